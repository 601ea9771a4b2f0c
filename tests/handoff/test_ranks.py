"""Goal: each layer and head of each rank of decode has exactly one sender, whatever the split."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handoff.ranks import RankGroup, RankPart, data_rank_of, plan_ranks
from kvstore.protocol.errors import InvalidArgument


def grid(layers: list[int], heads: list[int], copies: int = 1) -> list[RankPart]:
    """Ranks between these bounds, each so many times."""
    return [
        RankPart(one, two)
        for one in pairwise(layers)
        for two in pairwise(heads)
        for _ in range(copies)
    ]


def split(total: int) -> st.SearchStrategy[list[int]]:
    inner = st.sets(st.integers(1, total - 1)) if total > 1 else st.just(set())
    return inner.map(lambda cuts: [0, *sorted(cuts), total])


@st.composite
def two_sides(draw):
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def side():
        parts = grid(draw(split(layers)), draw(split(heads)), draw(st.integers(1, 3)))
        return draw(st.permutations(parts))

    return side(), side()


def cells(part: RankPart) -> set[tuple[int, int]]:
    return {(layer, head) for layer in range(*part.layers) for head in range(*part.heads)}


@given(two_sides())
def test_every_layer_and_head_of_decode_has_one_sender_that_holds_it(sides):
    prefill, decode = sides
    plan = plan_ranks(prefill, decode)
    senders = Counter()
    aux = Counter()
    for share in plan.shares:
        aux[share.decode] += share.has_aux
        if share.has_aux:
            assert prefill[share.prefill].layers[1] == max(part.layers[1] for part in prefill)
        if share.part is not None:
            assert cells(share.part) <= cells(prefill[share.prefill]) & cells(decode[share.decode])
            senders.update((share.decode, cell) for cell in cells(share.part))

    assert senders == {(rank, cell): 1 for rank, part in enumerate(decode) for cell in cells(part)}
    assert aux == dict.fromkeys(range(len(decode)), 1)
    pairs = [(share.prefill, share.decode) for share in plan.shares]
    assert len(set(pairs)) == len(pairs)
    assert {rank for rank, _ in pairs} == set(range(len(prefill)))
    assert plan.idle == [share.prefill for share in plan.shares if share.is_idle]
    assert [one for rank in range(len(prefill)) for one in plan.of_prefill(rank)] == plan.shares
    assert sum(len(plan.of_decode(rank)) for rank in range(len(decode))) == len(plan.shares)


def spans(most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, most), st.integers(1, most)).map(
        lambda span: (min(span), max(span) + (span[0] == span[1]))
    )


any_part = st.builds(RankPart, spans(3), spans(3))


@given(st.lists(any_part, min_size=1, max_size=4), st.lists(any_part, min_size=1, max_size=4))
def test_no_split_is_taken_that_leaves_something_out_or_sends_it_twice(prefill, decode):
    try:
        plan = plan_ranks(prefill, decode)
    except InvalidArgument:
        return
    senders = Counter()
    for share in plan.shares:
        if share.part is not None:
            senders.update((share.decode, cell) for cell in cells(share.part))
    assert senders == {(rank, cell): 1 for rank, part in enumerate(decode) for cell in cells(part)}


def test_what_ranks_hold_alike_is_sent_once_and_they_take_turns():
    latents = [RankPart((0, 4), (0, 1))] * 4
    plan = plan_ranks(latents, latents[:2])

    assert [share[:2] for share in plan.shares if share.part is not None] == [(0, 0), (1, 1)]
    assert plan.idle == [2, 3]
    assert [share[:2] for share in plan.shares if share.is_idle] == [(2, 0), (3, 1)]


def test_the_aux_data_come_from_the_last_stage_also_to_a_rank_that_gets_no_kv_from_it():
    stages = grid([0, 2, 4], [0, 2])
    plan = plan_ranks(stages, stages)

    assert [(*share[:2], share.part is None, share.has_aux) for share in plan.shares] == [
        (0, 0, False, False),
        (1, 0, True, True),
        (1, 1, False, True),
    ]


@pytest.mark.parametrize(
    ("prefill", "decode", "field"),
    [
        (grid([0, 4], [0, 4]), grid([0, 5], [0, 4]), "layers"),
        (grid([0, 5], [0, 4]), grid([0, 4], [0, 4]), "layers"),
        (grid([0, 4], [0, 4]), grid([0, 4], [0, 5]), "heads"),
        (grid([0, 4], [0, 5]), grid([0, 4], [0, 4]), "heads"),
        (grid([0, 4], [1, 2, 4]), grid([0, 4], [0, 4]), "heads"),
        ([RankPart((0, 4), (0, 2)), RankPart((0, 4), (1, 4))], grid([0, 4], [0, 4]), "heads"),
        # as many layers as decode has, one of them twice and another not at all
        ([RankPart((0, 3), (0, 1)), RankPart((2, 3), (0, 1))], grid([0, 4], [0, 1]), "heads"),
        (grid([0, 4], [0, 1]), [RankPart((0, 3), (0, 1)), RankPart((2, 3), (0, 1))], "heads"),
        ([], grid([0, 4], [0, 4]), "ranks"),
        (grid([0, 4], [0, 4]), [RankPart((2, 2), (0, 1))], "layers"),
        (grid([0, 4], [0, 4]), [RankPart((0, 4), (-1, 4))], "heads"),
        (grid([0, 4], [0, 4]), [RankPart((0, 4), (0, 1 << 17))], "heads"),
    ],
)
def test_what_cannot_fit_is_refused_by_field(prefill, decode, field):
    with pytest.raises(InvalidArgument) as caught:
        plan_ranks(prefill, decode)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("group", "field"),
    [
        (RankGroup(2, (RankPart((0, 1), (0, 1)),), bytes(16)), "rank"),
        (RankGroup(0, (RankPart((0, 2), (0, 1)),), bytes(16)), "layers"),
        (RankGroup(0, (RankPart((0, 1), (0, 1)),), b"short"), "instance"),
        (RankGroup(0, (RankPart((0, 1), (0, 1)),), bytes(16), 2, 2), "data_rank"),
    ],
)
def test_a_group_that_cannot_be_is_refused_by_field(group, field):
    with pytest.raises(InvalidArgument) as caught:
        group.check(1)
    assert caught.value.field == field


def test_a_room_chooses_a_data_parallel_rank():
    assert [data_rank_of(room, 3) for room in range(5)] == [0, 1, 2, 0, 1]
