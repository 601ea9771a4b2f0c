"""Goal: which extent another class may get is known without a look at all of them."""

import pytest

from kvstore.state.tree.slots import Extent, SlotTable
from tests.state.world import PAGE, hold


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Extent]:
    """The extents whose class anybody has asked for."""
    found: list[Extent] = []

    def class_of(extent: Extent) -> tuple[str | None, int]:
        found.append(extent)
        return extent.domain, extent.slot_bytes

    monkeypatch.setattr(Extent, "class_of", property(class_of))
    return found


def test_the_coldest_extent_is_looked_for_once_while_the_others_are_only_used(looks):
    table = SlotTable(2 * PAGE, 6)
    others = [table.allocate(2, "b", PAGE) for _ in range(5)]
    for tick, slots in enumerate(others, 1):
        table.commit(slots, tick)
    mine = table.allocate(2, "a", PAGE)
    table.commit(mine, 9)
    looks.clear()

    assert table.colder_extent("a", PAGE, 9) == 0
    assert len(looks) == 6
    table.commit(table.allocate(0, "a", PAGE), 10)
    table.pin(others[3], 11)
    assert table.colder_extent("a", PAGE, 9) == 0
    assert table.colder_extent("a", PAGE, 1) is None, "it is not that cold"
    assert len(looks) == 6
    table.pin(others[0], 12)
    assert table.colder_extent("a", PAGE, 9) == 1
    assert table.colder_extent("a", PAGE, 9, {1}) == 2
    table.drain(1)
    assert table.colder_extent("a", PAGE, 9) == 2
    assert not table.end_drain(1)
    assert table.colder_extent("a", PAGE, 9) == 1


class NoWalk(list[Extent]):
    """Extents that may be looked at by their position only."""

    def __iter__(self):
        raise AssertionError("nobody is to look at all of them")


def test_an_extent_of_others_is_found_without_a_look_at_those_in_use():
    table = SlotTable(2 * PAGE, 6)
    others = [table.allocate(2, "b", PAGE) for _ in range(5)]
    for slots in others:
        table.commit(slots, 1)
    table.commit(table.allocate(2, "a", PAGE), 1)
    table.extents = NoWalk(table.extents)

    assert table.allocate(1, "a", PAGE) == []
    table.release(others[3])
    (slot,) = table.allocate(1, "a", PAGE)
    assert table.position(slot) == 3
    hold(table.checks(lambda _slot, _state: None))
