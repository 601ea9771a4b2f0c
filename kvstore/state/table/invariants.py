"""The invariants of all pages of a node, checked in short stretches. Pure.

Checking a million pages takes seconds, and nothing may block the state for so long. So each part of
the state is walked in stretches of about 100 microseconds. Between two stretches anything may
happen: pages come and go, extents change their class. Invariants of a single node, slot or record
are always asserted. Sums are asserted only if nothing changed during the walk; each part counts its
changes for that.
"""

from collections.abc import Iterator
from typing import Final

from kvstore.state.choice.policy import classes
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.columns import SLOT_COLUMN, unpack_places
from kvstore.state.tree.node import RUN_PAGES_MAX, PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot, SlotState

TOGETHER_MAX: Final = 1024
"""Maximum writes in progress, or dropped pages with descendants, that one stretch adds up."""


def checks(table: PageTable) -> Iterator[int]:
    """Assert every invariant of slots, trees, pins and the log, and those between them.

    Yields:
        The number of nodes checked in each stretch.
    """

    def slot_and_page(slot: Slot, state: int) -> None:
        node = table.residents.owner(slot)
        assert state == SlotState.WRITING or (node is not None) == (state == SlotState.READY), node
        assert node is None or (is_live(node) and _has_slot(node, slot)), node

    for _ in table.slots.checks(slot_and_page):
        yield 0
    _check_turn(table)
    table.spaces.check()
    table.keeping.pins.check()
    yield from table.keeping.conversations.checks()
    for space in list(table.spaces):
        yield from _space(table, space)
    table.disk.graves.check()
    for _ in table.disk.persists.checks():
        yield 0
    for _ in table.disk.log.checks():
        yield 0


def check(table: PageTable) -> None:
    """Assert every invariant at once."""
    for _ in checks(table):
        pass
    table.keeping.conversations.check()


def _space(table: PageTable, space: PrefixTree) -> Iterator[int]:
    """Assert the invariants of the pages of a space."""
    changes, disk, record_bytes = space.changes, table.disk, 0
    _check_holes(table, space)

    def page(node: PrefixNode) -> None:
        nonlocal record_bytes
        _check_memory(table, node)
        _check_disk(disk, node)
        each = sum([space.shards[shard].record_bytes for shard in node.place_columns])
        record_bytes += node.count * each

    yield from space.checks(page)
    if space.changes == changes and len(disk.writes) <= TOGETHER_MAX:
        assert space.disk_bytes == record_bytes + disk.limits.writing_bytes(space)


def _check_turn(table: PageTable) -> None:
    """Assert the invariants that hold between two turns."""
    table.eviction.check_turn(table.moment.now_ns)
    assert table.draining.spared is None
    assert not table.disk.effects, "the disk side said what nobody has applied"
    now = table.draining.now
    for position, extent in enumerate(table.slots.extents):
        if extent.draining and len(extent.free) < extent.count:
            assert now is not None, "an extent that nobody empties"
            assert now.position == position, "another extent is emptied"


def _check_holes(table: PageTable, space: PrefixTree) -> None:
    """Assert that pages below each hole are being dropped, and records of departing pages leave."""
    if len(orphans := table.residents.orphans) <= TOGETHER_MAX:
        leaving = {(one.top, one.shard) for one in orphans if not one.records}
        departing = {(one.top, one.shard) for one in orphans if one.records}
        for node, mask in space.holes.items():
            assert is_live(node), node
            assert node.count == 1, node
            assert mask & ~space.full_mask == 0, node
            shards = [shard for shard in range(mask.bit_length()) if mask >> shard & 1]
            assert shards, ("a hole of no shard", node)
            assert all((node, shard) in leaving for shard in shards), node
        for node, mask in space.departing.items():
            assert node.count == 1, node
            assert mask & ~space.full_mask == 0, node
            shards = [shard for shard in range(mask.bit_length()) if mask >> shard & 1]
            assert shards, ("it departs from no shard", node)
            assert all((node, shard) in departing for shard in shards), node


def _check_memory(table: PageTable, node: PrefixNode) -> None:
    for shard in node.slot_columns:
        pinned = set[bool]()
        for slot in node.slots_of(shard):
            assert table.residents.owner(slot) is node, node
            ready = table.slots.state(slot) == SlotState.READY
            assert ready == bool(node.ready >> shard & 1), node
            pinned.add(table.slots.pinned(slot))
        assert len(pinned) == 1, ("the pages of a node are pinned together", node)
    if table.eviction.evictable(node):
        assert set(classes(node)) <= set(node.queued), ("a leaf is in all its queues", node)
    head = node.above
    assert head is not None, node
    if head is not node.space.root:
        alone = node.present & ~head.present & node.space.full_mask
        alone = alone and alone & ~_left_first(head, alone)
        assert not alone, ("a page whose head is gone: nobody reaches it", node)


def _left_first(head: PrefixNode, missing: int) -> int:
    """Of shards that a page lacks, those of a run that has left before what follows it.

    The first page of such a run is a hole.
    """
    found, left, at = 0, missing, head
    for _ in range(RUN_PAGES_MAX):
        left &= ~at.present
        found |= left & at.space.holes.get(at, 0)
        left &= ~found
        if not left or at.above is None:
            break
        at = at.above
    return found


def _has_slot(node: PrefixNode, slot: Slot) -> bool:
    packed = slot.to_bytes(SLOT_COLUMN, "little")
    return any(packed in column for column in node.slot_columns.values())


def _check_disk(disk: DiskPages, node: PrefixNode) -> None:
    disk.limits.check(node)
    writing = [shard for shard in node.slot_columns if disk.limits.writing.of(node, shard)]
    assert node.to_disk == sum(1 << shard for shard in writing), node
    head, of = node.above, node.space
    assert head is not None, node
    for shard in node.place_columns:
        for number, place in enumerate(unpack_places(node.place_columns[shard])):
            segment = disk.log.segments.get(place.segment)
            assert segment is not None, node
            assert segment.pages.key_at(place.offset) == node.key_at(number), node
            assert place.offset < segment.end, node
        follows = head.on_disk >> shard & 1 or _left_first(head, 1 << shard)
        assert head is of.root or follows or of.shards[shard].window_pages, node
