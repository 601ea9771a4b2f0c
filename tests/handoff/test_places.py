"""Where ranges of a handoff belong: their seeds, and which of them were noted."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handoff import places
from kvstore.handoff.memory import seeds_of
from kvstore.handoff.places import Coverage, PushRange


def test_the_seed_of_a_digest_depends_on_room_and_place():
    ranges = [PushRange(0, 1, 2), PushRange(1, 1, 2), PushRange(0, 2, 2), PushRange(0, 1, 3)]
    seeds = {seed for room in (1, 2) for seed in unpack_seeds(room, ranges)}

    assert len(seeds) == 8


def unpack_seeds(room, ranges):
    return np.frombuffer(seeds_of(room, ranges), dtype=np.uint64).tolist()


@pytest.mark.parametrize("few", [0, 8])
def test_a_range_is_noted_once_and_only_inside(few, monkeypatch):
    monkeypatch.setattr(places, "_FEW", few)
    coverage = Coverage(2, 4, 8)
    assert not coverage.claim([PushRange(2, 4, 1)])
    assert not coverage.claim([PushRange(0, 3, 1)])
    assert not coverage.claim([PushRange(0, 7, 2)])
    assert not coverage.claim([PushRange(0, 4, 0)])
    assert not coverage.claim([PushRange(0, 4, 2), PushRange(0, 5, 1)])
    assert coverage.missing == 8
    assert coverage.claim([PushRange(0, 4, 2), PushRange(1, 5, 1)])
    assert coverage.missing == 5
    coverage = Coverage(1, 0, 4, np.array([5, 6, 9, 10]))
    assert not coverage.claim([PushRange(0, 1, 2)]), "their blocks are no neighbours"
    assert coverage.claim([PushRange(0, 0, 2), PushRange(0, 2, 2)])


SOME_RANGES = st.lists(
    st.builds(PushRange, st.integers(2, 6), st.integers(2, 10), st.integers(0, 4)), max_size=5
)


@pytest.mark.parametrize("few", [0, 8])
@given(heads=st.lists(SOME_RANGES, max_size=8), gaps=st.sets(st.integers(4, 9)))
def test_ranges_are_noted_all_or_none_as_in_a_model(few, heads, gaps):
    """Planes 3 to 5, positions 3 to 9; a range may not go over a gap between two blocks."""
    blocks = np.arange(7) + np.cumsum([at in gaps for at in range(3, 10)])
    coverage, there = Coverage(3, 3, 10, blocks, 3), set()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(places, "_FEW", few)
        for head in heads:
            wanted = [(one.plane, one.first + at) for one in head for at in range(one.size)]
            inside = all(3 <= plane <= 5 and 3 <= at <= 9 for plane, at in wanted)
            torn = any(gaps & set(range(one.first + 1, one.first + one.size)) for one in head)
            right = inside and not torn and all(one.size for one in head)
            right = right and len(set(wanted)) == len(wanted) and not there & set(wanted)

            assert coverage.claim(head) == right
            there |= set(wanted) if right else set()
            assert coverage.missing == 21 - len(there)
