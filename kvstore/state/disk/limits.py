"""Limits of spaces on disk: quotas, reservations, pins. Pure.

If a space is at its quota, a record of it is written only once as much of the space's own pages has
been removed: leaves, the least recently used first. A leaf on disk is a page without descendants on
disk and, if it is not in memory, without any: its removal makes no page unreachable. A removed
record is dead at once; its room is free when its segment is reclaimed.

A reclaim carries over pinned pages, and pages that the space needs to stay at its reservation.
"""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import count
from typing import Final

from kvstore.state.choice.quotas import SHRINK_MAX, Quotas
from kvstore.state.disk.jobs import LeftDisk, PageMemory
from kvstore.state.disk.log import Segment, SegmentLog
from kvstore.state.disk.plans import parts_of
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.underway import WritesUnderWay
from kvstore.state.tree.columns import last_slot
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import Entry, NodeHeap
from kvstore.state.tree.prefix_tree import CHILDREN_MAX, PrefixTree

WALK_MAX: Final = 1024
"""Maximum descendants that are counted to decide whether a page may be removed; one with more is
kept."""


class _Leaves:
    """The leaves of one space, in LRU order."""

    def __init__(self) -> None:
        #: (access, serial, number, node); may be out of date, which is found when it comes out. A
        #: head that was split off has the serial number that its tail had.
        self._heap = NodeHeap(self._stays)
        self._number = count(1)
        self.queued: set[PrefixNode] = set()
        self.all_offered = False

    def add(self, node: PrefixNode) -> None:
        if node not in self.queued:
            self.queued.add(node)
            self._heap.push((node.access, node.serial, next(self._number), node))

    def pop(self, may_go: Callable[[PrefixNode], bool]) -> PrefixNode | None:
        node: PrefixNode
        while self._heap:
            access, _, _, node = self._heap.pop()
            self.queued.remove(node)
            if may_go(node):
                if node.access == access:
                    return node
                self.add(node)
        return None

    def _stays(self, entry: Entry) -> bool:
        if not is_live(entry[-1]):
            self.queued.remove(entry[-1])
            return False
        return True


class DiskLimits:
    """The limits of all spaces on disk.

    Args:
        memory: the memory side.
        log: the places of records.
        queue: gets the pages that are removed for a quota.

    Attributes:
        writing: the pages that are being written; maintained by
            :class:`~kvstore.state.disk.writes.Writes`.
    """

    def __init__(self, memory: PageMemory, log: SegmentLog, queue: DiskQueue) -> None:
        self.writing = WritesUnderWay()
        self.quotas = Quotas(lambda space: space.disk_bytes)
        self._memory = memory
        self._log = log
        #: Space number → leaves, for spaces with a quota.
        self._leaves: dict[int, _Leaves] = {}
        self._queue = queue
        #: Leaves that were chosen to leave the disk, until the page table has applied that; and
        #: what they take there, by number of their space.
        self._going: set[PrefixNode] = set()
        self._going_bytes: Counter[int] = Counter()

    def limit(
        self, space: PrefixTree, quota_bytes: int, reserved_bytes: int, reservable_bytes: int
    ) -> None:
        """Set a space's limits. With a quota, the caller then queues its nodes and shrinks it.

        Raises:
            InvalidArgument, CapacityError: see :meth:`kvstore.state.choice.quotas.Quotas.set`.
        """
        self.quotas.set(space, quota_bytes, reserved_bytes, reservable_bytes)
        if not quota_bytes:
            self._leaves.pop(space.number, None)
        elif space.number not in self._leaves:
            self._leaves[space.number] = _Leaves()

    def all_offered(self, space: PrefixTree) -> None:
        """Every node of a space with a new quota has been queued."""
        if space.number in self._leaves:
            self._leaves[space.number].all_offered = True

    def forget(self, node: PrefixNode, shard: int) -> None:
        """Remove the records of a node's pages, if they are on disk."""
        if node.on_disk >> shard & 1:
            self._log.remove(node, shard)
            node.forget_disk(shard)
            assert node.space.disk_bytes >= 0, node
        if node.above is not None:
            self.add_candidate(node.above)  # also when they were only being written

    # ---- quotas -----------------------------------------------------------------------------

    def add_candidate(self, node: PrefixNode) -> None:
        """The node may have become a removable leaf."""
        leaves = self._leaves.get(node.space.number) if self._leaves else None
        if leaves is not None and self._may_go(node):
            leaves.add(node)

    def is_short(self, space: PrefixTree, more_bytes: int) -> bool:
        """Whether the space has a quota that ``more_bytes`` do not fit without removing leaves."""
        return space.number in self.quotas.limited and self._exceeded(space, more_bytes)

    def make_room(self, node: PrefixNode, shard: int) -> bool:
        """Whether a page may be written, after removing leaves of its space if needed."""
        space, size = node.space, node.space.shards[shard].record_bytes
        if not self._exceeded(space, size):
            return True
        if size > self.quotas.get(space).quota_bytes:
            return False
        # Of what is before it only its parent can look like a leaf: that one leads to nothing yet.
        spared = [node, node.above] if node.above is not None else [node]
        return self.shrink(space, SHRINK_MAX, size, spared)

    def shrink(
        self,
        space: PrefixTree,
        pages_max: int,
        more_bytes: int = 0,
        spared: Collection[PrefixNode] = (),
    ) -> bool:
        """Remove leaves of a space until ``more_bytes`` fit its quota; returns whether they do."""
        leaves = self._leaves.get(space.number)
        for _ in range(pages_max if leaves is not None else 0):
            if not self._exceeded(space, more_bytes):
                return True
            assert leaves is not None
            chosen = leaves.pop(lambda node: node not in spared and self._may_go(node))
            for node in spared:
                self.add_candidate(node)
            if chosen is None:
                return False
            self._choose(chosen)
        return not self._exceeded(space, more_bytes)

    def applied(self) -> None:
        """The chosen pages have been removed."""
        self._going.clear()
        self._going_bytes.clear()

    def writing_bytes(self, space: PrefixTree) -> int:
        """Bytes of a space that are being written."""
        return self.writing.bytes_of(space)

    def there_bytes(self, space: PrefixTree) -> int:
        """Bytes that a space has on disk; what is being written may fail."""
        return space.disk_bytes - self.writing_bytes(space)

    def _exceeded(self, space: PrefixTree, more_bytes: int) -> bool:
        return self.quotas.exceeded(space, more_bytes - self._going_bytes[space.number])

    def _choose(self, node: PrefixNode) -> None:
        """Remove the last page of a leaf from disk; its parent may become a leaf."""
        assert node not in self._going, ("it would be counted twice", node)
        node.explode()
        space = node.space
        for shard in node.place_columns:
            self._memory.counts["disk_quota_pages"] += 1
            self._going_bytes[space.number] += space.shards[shard].record_bytes
            self._queue.effects.append(LeftDisk(space, shard, node.keys, "quota"))
        self._going.add(node)
        assert self._going_bytes[space.number] <= space.disk_bytes, node
        if node.above is not None:
            self.add_candidate(node.above)

    def _may_go(self, node: PrefixNode) -> bool:
        slots = self._memory.slots
        return (
            node.on_disk > 0
            and node not in self._going
            and node not in node.space.departing
            and self._is_leaf(node)
            and is_live(node)
            and node.present == node.ready
            and not node.pins
            and not any(slots.pinned(last_slot(of)) for of in node.slot_columns.values())
        )

    def _is_leaf(self, node: PrefixNode) -> bool:
        if node.on_disk & ~node.memory:
            return all(one in self._going and not one.memory for one in node.below.values())
        return not any(
            (child.on_disk and child not in self._going)
            or any(self.writing.of(child, at) for at in child.slot_columns)
            for child in node.below.values()
        )

    # ---- reservations and pins --------------------------------------------------------------

    def kept(self, segment: Segment) -> set[tuple[PrefixNode, int]]:
        """The pages of a segment that must not be removed with it, closed towards parents."""
        kept: set[tuple[PrefixNode, int]] = set()
        reserved: dict[int, list[tuple[PrefixNode, int]]] = {
            one.space.number: [] for one in self.quotas.all() if one.reserved_bytes
        }
        for node, _, part, _ in list(parts_of(segment.pages)):
            if part.space.number not in reserved:
                if is_pinned(node, part.shard):
                    kept.add((node, part.shard))
                continue
            for number in range(part.pages):
                page = part.space.nodes[part.key(number)], part.shard
                if is_pinned(*page):
                    kept.add(page)
                else:
                    reserved[part.space.number].append(page)
        for pages in reserved.values():
            if pages:
                kept |= self._beyond_excess(pages)
        return kept

    def _beyond_excess(self, pages: list[tuple[PrefixNode, int]]) -> set[tuple[PrefixNode, int]]:
        """The pages of a space that cannot be removed without violating its reservation."""
        space = pages[0][0].space
        excess = self.there_bytes(space) - self.quotas.get(space).reserved_bytes
        going: set[tuple[PrefixNode, int]] = set()
        kept: set[tuple[PrefixNode, int]] = set()
        for node, shard in sorted(pages, key=lambda page: -page[0].depth):
            below = _below(node, shard, going, kept)
            size = len(below) * space.shards[shard].record_bytes
            if not below or size > excess:
                kept.add((node, shard))
                continue
            excess -= size
            going.update(below)
        return kept

    # ---- checks -----------------------------------------------------------------------------

    def check(self, node: PrefixNode) -> None:
        """Assert that a removable leaf is queued, once all nodes have been queued."""
        leaves = self._leaves.get(node.space.number)
        if leaves is not None and leaves.all_offered and len(node.below) <= CHILDREN_MAX:
            assert not self._may_go(node) or node in leaves.queued, node


def is_pinned(node: PrefixNode, shard: int) -> bool:
    """Whether an operator's pin keeps a page on disk."""
    return node.disk_pins > 0 or (node.memory_pins > 0 and not node.memory >> shard & 1)


def _below(
    node: PrefixNode,
    shard: int,
    going: set[tuple[PrefixNode, int]],
    kept: set[tuple[PrefixNode, int]],
) -> list[tuple[PrefixNode, int]]:
    """A page and those that are removed from disk with it, without those already being removed.

    Empty if one of them is kept, or they are too many.
    """
    found = [(node, shard)]
    if node.space.shards[shard].window_pages:
        return found
    for at, _ in found:
        below = [(one, shard) for one in at.children.values() if one.on_disk >> shard & 1]
        if len(found) > WALK_MAX or not kept.isdisjoint(below):
            return []
        found += [page for page in below if page not in going]
    return found
