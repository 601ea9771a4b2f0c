"""Goal: a segment knows which of its records are alive, and which of these are adjacent."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.state.disk.records import PageRecords
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.world import identity, key

EACH = 4096


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sets(st.integers(0, 29)),
    st.integers(-1, 30),
    st.integers(1, 8),
)
def test_adjacent_live_records_are_counted_backwards_within_their_stretch(
    stretches, dead, asked, most
):
    records, space, at = PageRecords(), PrefixTree(0, identity()), 0
    live: list[int] = []
    for number, pages in enumerate(stretches):
        keys = b"".join(key(f"{number}{page}") for page in range(pages))
        records.add(space, 0, keys, at * EACH, EACH, number)
        live += [number] * pages
        at += pages
    for one in dead:
        if one < len(live):
            records.remove(one * EACH)
            live[one] = -1

    expected, first = 0, asked
    while 0 <= first < len(live) and live[first] == live[asked] >= 0 and expected < most:
        first, expected = first - 1, expected + 1
    assert records.live_up_to(asked * EACH, most) == expected
    assert records.live_up_to(asked * EACH + 1, most) == 0
