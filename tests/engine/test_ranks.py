"""Goal: every head and page has one writer among any number of ranks, and all its readers find it.

The model knows single heads only: who holds them, as vLLM loads weights.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.engine.ranks import SHARING_RANKS, HeadSplit
from kvstore.protocol.errors import InvalidArgument

HEADS = st.integers(1, 64)
POWERS = (1, 2, 4, 8)


@st.composite
def splits(draw):
    heads = draw(HEADS)
    fits = [ranks for ranks in range(1, 65) if not (heads % ranks and ranks % heads)]
    return HeadSplit(heads, draw(st.sampled_from(fits)), draw(st.booleans()))


def heads_of(split, rank):
    """The heads of a rank, one by one."""
    if split.ranks > split.heads:
        return [rank // (split.ranks // split.heads)]
    each = split.heads // split.ranks
    return list(range(rank * each, (rank + 1) * each))


@given(splits())
def test_a_cover_is_the_heads_of_its_rank_in_order_and_nothing_else(split):
    groups = split.groups()
    for rank in range(split.ranks):
        here = heads_of(split, rank)
        found = [
            (groups[held.number][0] + at, here[held.heads[0] + at])
            for held in split.cover(rank)
            for at in range(held.heads[1] - held.heads[0])
        ]
        assert [head for head, _ in found] == here
        assert all(global_head == local for global_head, local in found)


@given(splits(), st.integers(0, 100), st.integers(0, 40))
def test_every_page_of_every_group_is_written_once_by_a_rank_that_holds_it(split, first, count):
    written = Counter(
        (held.number, first + page)
        for rank in range(split.ranks)
        for held in split.cover(rank)
        for page in held.own_pages(first, count)
    )

    pages = range(first, first + count)
    assert written == Counter(
        (group, page) for group in range(len(split.groups())) for page in pages
    )


@given(splits(), st.integers(0, 100), st.integers(0, 40), st.integers(0, 40))
def test_who_writes_a_page_does_not_depend_on_where_a_job_begins(split, first, skipped, count):
    for held in split.cover(0):
        late = {first + skipped + at for at in held.own_pages(first + skipped, count)}
        whole = {first + at for at in held.own_pages(first, skipped + count)}
        assert late == {page for page in whole if page >= first + skipped}


@given(splits())
def test_ranks_with_the_same_heads_share_the_writing_evenly(split):
    for rank in range(split.ranks):
        alike = [one for one in range(split.ranks) if heads_of(split, one) == heads_of(split, rank)]
        for held in split.cover(rank):
            assert held.copies == len(alike)
            assert held.turn == alike.index(rank)


@given(HEADS)
def test_one_two_four_and_eight_ranks_have_the_same_groups(heads):
    """Unless some of them cannot serve the model at all."""
    fitting = [ranks for ranks in POWERS if not (heads % ranks and ranks % heads)]
    groups = {tuple(HeadSplit(heads, ranks).groups()) for ranks in fitting}

    assert len(groups) == 1
    assert len(groups.pop()) <= SHARING_RANKS


def test_heads_that_cannot_be_told_apart_stay_together():
    assert HeadSplit(8, 2, whole=True).groups() == [(0, 4), (4, 8)]
    assert len(HeadSplit(8, 2, whole=True).cover(1)) == 1


def test_ranks_that_would_hold_different_numbers_of_heads_are_refused():
    with pytest.raises(InvalidArgument, match="3 KV heads cannot be divided among 2 ranks"):
        HeadSplit(3, 2).groups()
