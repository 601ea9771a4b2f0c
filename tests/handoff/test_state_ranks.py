"""Goal: state data come to each rank, each plane from one that has it, or the push fails."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.handoff.greeting import PROTOCOL, Greeter, LinkGreeting
from kvstore.handoff.peers import peer_ranks
from kvstore.handoff.ranks import RankGroup, RankPart, Share
from kvstore.handoff.registry import RankRecord
from kvstore.handoff.shape import PoolShape
from kvstore.handoff.state_data import StateKind, StateShape
from kvstore.handoff.states import FailureCode, State
from kvstore.protocol.errors import InvalidArgument
from tests.handoff.pair import SECRET, SPACE
from tests.handoff.ranked import BLOCK_TOKENS, BLOCKS, RankMemory, ranked, whole_of
from tests.handoff.ranked_states import BUFFERS, RankStates, some_blocks
from tests.handoff.test_ranks import grid, two_sides
from tests.handoff.test_unequal_ranks import split

COUNT = 6


def stateful_shape(part, *, alike=True, planes=1, **change):
    """A pool whose state buffer has so many planes of each layer."""
    layers, heads = (stop - first for first, stop in (part.layers, part.heads))
    fields = {
        "name": "s", "kind": StateKind.EVERY, "plane_count": layers * planes, "block_bytes": 8,
        "block_count": 4, "first_plane": part.layers[0] * planes if alike else 0,
        "is_alike": alike,
    } | change  # fmt: skip
    size = heads * BLOCK_TOKENS * 2
    return PoolShape(2 * layers, 2, size, BLOCK_TOKENS, BLOCKS, part.layers[0], part.heads,
                     (StateShape(**fields),))  # fmt: skip


def group_of(parts):
    return RankGroup(1, tuple(parts), bytes(16))


def records_of(shapes):
    return [
        RankRecord(
            rank, "127.0.0.1:9", "ab" * 16, 1, shape.part.layers, shape.part.heads, shape,
            SPACE.hex(), ["tcp"], PROTOCOL, 60.0, len(shapes),
        )
        for rank, shape in enumerate(shapes)
    ]  # fmt: skip


def links_of(prefill, decode, rank):
    """What a rank of decode gets of its state buffer: (rank of prefill, planes)."""
    group = RankGroup(rank, tuple(one.part for one in decode), bytes(16))
    peers = peer_ranks(records_of(prefill), group, decode[rank])
    for peer in peers:
        greeting = LinkGreeting(
            PROTOCOL, "messages", bytes(16), bytes(16), "d", SPACE, decode[rank], group,
            peer.share.part, peer.share.has_aux, peer.states, b"",
        )  # fmt: skip
        there = RankGroup(peer.record.rank, tuple(one.part for one in prefill), bytes(16))
        greeter = Greeter(SECRET, SPACE, prefill[peer.record.rank], there)
        assert greeter.target(greeting).share == peer.source.share, "both sides must agree"
    return [(peer.record.rank, *peer.states[0]) for peer in peers if peer.states]


STAIRS = [RankPart((0, 4), (0, 1)), *grid([0, 1, 2, 4], [1, 2])]


@example((STAIRS, [RankPart((0, 4), (0, 2))]), 1)
@given(two_sides(), st.integers(1, 3))
def test_each_plane_that_is_alike_comes_to_each_rank_from_one_rank_that_has_it(sides, planes):
    prefill, decode = ([stateful_shape(one, planes=planes) for one in side] for side in sides)
    for rank, shape in enumerate(decode):
        found = []
        for sender, first, stop in links_of(prefill, decode, rank):
            own = range(*prefill[sender].states[0].planes)
            assert all(plane in own for plane in range(first, stop))
            found += range(first, stop)
        assert sorted(found) == list(range(*shape.states[0].planes))


@given(two_sides())
def test_what_is_not_alike_comes_only_from_the_rank_of_the_same_number(sides):
    prefill, decode = ([stateful_shape(one, alike=False) for one in side] for side in sides)
    for rank, shape in enumerate(decode):
        if sides[0] == sides[1]:
            (own,) = [one for one in links_of(prefill, decode, rank) if one[1] < one[2]]
            assert own == (rank, *shape.states[0].planes)
            continue
        with pytest.raises(InvalidArgument, match=r"states\.s"):
            links_of(prefill, decode, rank)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"is_alike": False}, "states.s.is_alike"),
        ({"block_bytes": 16}, "states.s.block_bytes"),
        ({"plane_count": 1}, "states.s.planes"),
        ({"first_plane": 3}, "states.s.planes"),
    ],
)
def test_planes_that_nobody_has_and_other_buffers_are_refused_by_field(change, field):
    prefill = [stateful_shape(one, **change) for one in grid([0, 2], [0, 1, 2])]
    decode = [stateful_shape(RankPart((0, 2), (0, 2)))]
    with pytest.raises(InvalidArgument) as caught:
        links_of(prefill, decode, 0)
    assert caught.value.field == field


def test_an_engine_with_state_data_asks_no_prefill_engine_without_any_and_the_other_way_round():
    part = RankPart((0, 2), (0, 2))
    some, none = stateful_shape(part), replace(stateful_shape(part), states=())
    for prefill, decode in ((some, none), (none, some)):
        with pytest.raises(InvalidArgument, match="states"):
            links_of([prefill], [decode], 0)


@pytest.mark.parametrize(
    ("planes", "field"),
    [(((0, 3),), "states.s.planes"), (((2, 1),), "states.s.planes"),
     (((-1, 1),), "states.s.planes"), (((0, 1), (0, 1)), "states"), (((1, 2),), None)],
)  # fmt: skip
def test_a_greeting_that_asks_for_planes_that_are_not_there_is_refused(planes, field):
    shape = stateful_shape(RankPart((0, 2), (0, 1)))
    share = Share(0, 0, shape.part, has_aux=True)
    if field is None:
        assert [list(one.planes) for one in shape.share(share, shape.part, planes).states] == [
            [shape.state_shares[0].planes[1]]
        ]
        return
    with pytest.raises(InvalidArgument) as caught:
        shape.share(share, shape.part, planes)
    assert caught.value.field == field


def test_prefill_refuses_what_is_not_alike_to_a_rank_of_another_number():
    parts = tuple(grid([0, 2], [0, 1], copies=2))
    shape = stateful_shape(parts[0], alike=False)
    greeting = LinkGreeting(
        PROTOCOL, "messages", bytes(16), bytes(16), "d", SPACE, shape,
        RankGroup(1, parts, bytes(16)), parts[1], True, ((0, 2),), b"",
    )  # fmt: skip
    assert Greeter(SECRET, SPACE, shape, RankGroup(1, parts, bytes(16))).target(greeting)
    many = (*parts, *parts)
    wider = Greeter(SECRET, SPACE, shape, RankGroup(1, many, bytes(16)))
    with pytest.raises(InvalidArgument, match=r"states\.s"):
        wider.target(greeting)


def test_a_pipeline_stage_must_say_which_planes_it_has_of_a_buffer_that_is_alike():
    states = RankStates(change={"index": {"first_plane": None}})
    RankMemory(group_of(split(heads=2)), states.of(group_of(split(heads=2))))
    with pytest.raises(InvalidArgument) as caught:
        RankMemory(group_of(split(layers=2)), states.of(group_of(split(layers=2))))
    assert caught.value.field == "states.index.first_plane"


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (split(), split()),
        (split(heads=2), split()),
        (split(), split(heads=2)),
        (split(layers=2), split()),
        (split(), split(layers=2)),
        (split(layers=2, heads=2), split(layers=4)),
        (grid([0, 1, 4], [0, 4]), grid([0, 3, 4], [0, 2, 4])),
        (split(copies=3), split(heads=2)),
        (split(copies=2), split(copies=3)),
    ],
    ids=str,
)
def test_state_data_arrive_whole_at_every_rank_whatever_the_ranks(prefill, decode, wait_until):
    chance = random.Random(7)
    here, there = RankStates(), RankStates()
    with ranked(prefill, decode, states=(here.of, there.of)) as engines:
        whole, blocks = whole_of(1, COUNT), some_blocks(COUNT, chance)
        senders, receivers = engines.begin(1, COUNT)
        for receiver in receivers:
            receiver.announce(0, [9, 8, 7, 3, 2, 1], blocks)
        here.send(senders, 1, COUNT, chance)
        engines.push(senders, whole, [0, 2, 4, 6, 8, 10])
        wait_until(lambda: all(one.progress.ended for one in (*senders, *receivers)))

        assert [one.failure for one in (*senders, *receivers) if one.failure] == []
        assert there.wrong(1, COUNT, blocks) == []
        assert engines.wrong(whole, [9, 8, 7, 3, 2, 1]) == []


@pytest.mark.parametrize("name", sorted(BUFFERS))
def test_ranks_of_unequal_heads_do_not_push_what_each_has_for_itself(name, wait_until):
    here, there = (RankStates(change={name: {"is_alike": False}}) for _ in range(2))
    with ranked(split(heads=2), split(), states=(here.of, there.of)) as engines:
        _, (receiver,) = engines.begin(1, COUNT)
        wait_until(lambda: receiver.state == State.FAILED)
        assert receiver.failure.code == FailureCode.UNREACHABLE
        assert f"states.{name}" in receiver.failure.message


@pytest.mark.parametrize("ranks", [split(heads=2), grid([0, 1, 4], [0, 4])], ids=str)
def test_equal_ranks_push_what_each_has_for_itself(ranks, wait_until):
    chance = random.Random(3)
    here, there = RankStates(alike=False), RankStates(alike=False)
    with ranked(ranks, ranks, states=(here.of, there.of)) as engines:
        blocks = some_blocks(COUNT, chance)
        senders, receivers = engines.begin(1, COUNT)
        for receiver in receivers:
            receiver.announce(COUNT * BLOCK_TOKENS, [], blocks | {"index": []})
        here.send(senders, 1, COUNT, chance)
        engines.push(senders, whole_of(1, COUNT), list(range(COUNT)))
        wait_until(lambda: all(one.state == State.SUCCESS for one in (*senders, *receivers)))
        for memory in there.memory:
            memory["index"][:, blocks["index"]] = 1  # decode had these
        assert there.wrong(1, COUNT, blocks) == [f"index of rank {rank}" for rank in (0, 1)]
