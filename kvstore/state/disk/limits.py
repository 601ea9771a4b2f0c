"""Limits of spaces on disk: quotas, reservations, pins. Pure.

If a space is at its quota, a record of it is written only once as much of the space's own pages has
been removed: leaves, the least recently used first. A leaf on disk is a page without descendants on
disk and, if it is not in memory, without any: its removal makes no page unreachable. A removed
record is dead at once; its room is free when its segment is reclaimed.

A reclaim carries over pinned pages, and pages that the space needs to stay at its reservation.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from kvstore.state.choice.quotas import SHRINK_MAX, Quotas
from kvstore.state.disk.jobs import LeftDisk, PageMemory
from kvstore.state.disk.leaves import ChosenLeaves, Leaves
from kvstore.state.disk.log import Segment, SegmentLog
from kvstore.state.disk.plans import NodePart, parts_of
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.underway import WritesUnderWay
from kvstore.state.tree.columns import last_slot
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree

WALK_MAX: Final = 1024
"""Maximum descendants that are counted to decide whether a page may be removed; one with more is
kept."""
FREED_TURN = 1024
"""Leaves that one turn lets go of when a quota has ended: of a million, all took 20 ms and more."""
LOOKS_MAX = 256
"""Leaves that the choices of one turn pass that were used, or are leaves no more, since they were
queued."""
SHORT_PAGES: Final = 32
"""Pages of a space that its quota has no room for that begin to be written at once: each makes a
choice of its own."""
_NOBODY: Final = ChosenLeaves()


class _Plan:
    """Leaves that are to leave the disk, in order: the last ``pages`` pages of each node.

    Attributes:
        victims: (node, pages); of the last node it may be a part.
        freed_bytes: what they have on disk.
        cut_short: there may be more leaves, but not in this turn.
    """

    def __init__(self) -> None:
        self.victims: list[tuple[PrefixNode, int]] = []
        self.freed_bytes = 0
        self.cut_short = False

    def add(self, node: PrefixNode, pages: int) -> None:
        """Add the last pages of a leaf."""
        assert 0 < pages <= node.count, node
        self.victims.append((node, pages))
        self.freed_bytes += pages * _bytes_of(node)

    def leading(self, needed_bytes: int) -> "_Plan":
        """As many of them as free ``needed_bytes``; all of them if they do not suffice."""
        some = _Plan()
        for node, pages in self.victims:
            if (left := needed_bytes - some.freed_bytes) <= 0:
                break
            some.add(node, min(pages, -(-left // _bytes_of(node))))
        return some


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
        #: Numbers of spaces of which a choice has found too little, because it passed too many.
        self._behind: dict[int, None] = {}
        self._looks_left = LOOKS_MAX
        self.writing = WritesUnderWay()
        self.quotas = Quotas(lambda space: space.disk_bytes)
        self._memory = memory
        self._log = log
        #: Space number → leaves, for spaces with a quota.
        self._leaves: dict[int, Leaves] = {}
        #: Those of quotas that have ended, until they are freed.
        self._ended: list[Leaves] = []
        self._queue = queue
        #: Leaves that were chosen to leave the disk, until the page table has applied that; and
        #: what they take there, by number of their space.
        self._going = ChosenLeaves()
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
            if (ended := self._leaves.pop(space.number, None)) is not None:
                self._ended.append(ended)
        elif space.number not in self._leaves:
            self._leaves[space.number] = Leaves()

    def free_some(self) -> bool:
        """Let go of some leaves of quotas that have ended; whether there are more."""
        if self._ended and not self._ended[-1].free(FREED_TURN):
            self._ended.pop()
        return bool(self._ended)

    @property
    def behind(self) -> bool:
        """Whether a choice has found too few leaves that :meth:`go_on` will find."""
        return bool(self._behind)

    def is_behind(self, space: PrefixTree) -> bool:
        """Whether that was a choice for this space."""
        return space.number in self._behind

    def go_on(self) -> bool:
        """A turn has ended: pass leaves that have changed, as many as one turn may.

        Returns:
            whether these were all of one space, so that it may have room.
        """
        self._looks_left = LOOKS_MAX
        for number in self._behind:
            leaves = self._leaves.get(number)
            if leaves is None or self._pass_changed(leaves):
                del self._behind[number]
                return True
            break
        return False

    def _pass_changed(self, leaves: Leaves) -> bool:
        """Whether the first leaf may go; as far as one turn passes others."""
        while self._looks_left > 0:
            first = leaves.pop()
            if first is None:
                return True
            node, was_used = first
            if self._may_go(node):
                leaves.add(node)
                if not was_used:
                    return True
            self._looks_left -= 1
        assert self._looks_left == 0
        return False

    def leaves_of(self, space: PrefixTree) -> Leaves | None:
        """The queue of a space with a quota; another one after the quota has ended."""
        return self._leaves.get(space.number)

    def forget(self, node: PrefixNode, shard: int) -> None:
        """Remove the records of a node's pages, if they are on disk."""
        if node.on_disk >> shard & 1:
            self._log.remove(node, shard)
            node.forget_disk(shard)
            assert node.space.disk_bytes >= 0, node
            if node in self._going:
                self._going_bytes[node.space.number] -= node.space.shards[shard].record_bytes
                if not node.on_disk:
                    self._going.discard(node)
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
        return space.number in self.quotas.limited and self._excess(space, more_bytes) > 0

    def make_room(self, node: PrefixNode, shard: int) -> bool:
        """Whether a page may be written, after removing leaves of its space if needed."""
        space, size = node.space, node.space.shards[shard].record_bytes
        if not self._excess(space, size):
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
        """Remove leaves of a space until ``more_bytes`` fit its quota; returns whether they do.

        The leaves are chosen before one is removed. If all that may go is not enough, only what the
        space has beyond its quota goes. If ``pages_max`` leaves are not enough but there may be
        more, those go, and a later call goes on.
        """
        needed = self._excess(space, more_bytes)
        if not needed:
            return True
        leaves = self._leaves.get(space.number)
        if leaves is None:
            return False
        plan = self._choose(leaves, needed, pages_max, spared)
        fits = plan.freed_bytes >= needed
        if plan.cut_short and self._looks_left <= 0:
            self._behind[space.number] = None
        going = plan if fits or plan.cut_short else plan.leading(self._excess(space, 0))
        self._carry_out(going)
        for node, _ in plan.victims:
            self.add_candidate(node)  # if it stays
        for node in spared:
            self.add_candidate(node)
        assert fits == (not self._excess(space, more_bytes))
        return fits

    def applied(self) -> None:
        """The chosen pages have been removed."""
        if self._going_bytes:  # it is asked after each write that has ended
            self._going.clear()
            self._going_bytes.clear()

    def writing_bytes(self, space: PrefixTree) -> int:
        """Bytes of a space that are being written."""
        return self.writing.bytes_of(space)

    def there_bytes(self, space: PrefixTree) -> int:
        """Bytes that a space has on disk; what is being written may fail."""
        return space.disk_bytes - self.writing_bytes(space)

    def _excess(self, space: PrefixTree, more_bytes: int) -> int:
        """Bytes that must leave the disk so that ``more_bytes`` fit a space's quota there."""
        return self.quotas.excess(space, more_bytes - self._going_bytes[space.number])

    def _choose(
        self, leaves: Leaves, needed_bytes: int, pages_max: int, spared: Collection[PrefixNode]
    ) -> _Plan:
        """The coldest leaves of a space that free ``needed_bytes``, as far as there are any.

        Nothing changes, but that they are taken out of ``leaves``.
        """
        plan, chosen, pages_left = _Plan(), ChosenLeaves(), pages_max
        while (left := needed_bytes - plan.freed_bytes) > 0:
            node = self._next(leaves, chosen, spared)
            if node is None:
                plan.cut_short = bool(leaves.queued)
                break
            pages = min(node.count, pages_left, -(-left // _bytes_of(node)))
            if pages:
                plan.add(node, pages)
                pages_left -= pages
            if pages < node.count:
                plan.cut_short = plan.freed_bytes < needed_bytes
                leaves.add(node)
                break
            chosen.add(node)
            if node.above is not None and self._may_go(node.above, chosen):
                leaves.add(node.above)
        assert pages_left >= 0
        return plan

    def _next(
        self, leaves: Leaves, chosen: ChosenLeaves, spared: Collection[PrefixNode]
    ) -> PrefixNode | None:
        """Take out the coldest leaf that may go once those in ``chosen`` have left.

        Of many that were used since they were queued it is the coldest that was looked at.
        """
        found: list[PrefixNode] = []
        while self._looks_left > 0 and (first := leaves.pop()) is not None:
            node, was_used = first
            if node not in spared and self._may_go(node, chosen):
                found.append(node)
                if not was_used:
                    break
            self._looks_left -= 1
        coldest = min(found, key=lambda node: node.access, default=None)
        for node in found:
            if node is not coldest:
                leaves.add(node)
        return coldest

    def _carry_out(self, plan: _Plan) -> None:
        """Remove the pages of a plan from disk; what is before them may become a leaf."""
        before: list[PrefixNode] = []
        for node, pages in plan.victims:
            if pages < node.count:
                node.split(node.count - pages)  # the last ones keep the node
            singles = node.singles()
            for page in reversed(singles):
                self._leave(page)
            if (above := singles[0].above) is not None:
                before.append(above)
        for node in before:
            self.add_candidate(node)

    def _leave(self, node: PrefixNode) -> None:
        space = node.space
        self._going.add(node)
        for shard in node.place_columns:
            self._memory.counts["disk_quota_pages"] += 1
            self._going_bytes[space.number] += space.shards[shard].record_bytes
            self._queue.effects.append(LeftDisk(space, shard, node.keys, "quota"))
        assert self._going_bytes[space.number] <= space.disk_bytes, node

    def _may_go(self, node: PrefixNode, chosen: ChosenLeaves = _NOBODY) -> bool:
        """Whether a node is a leaf, once those in ``chosen`` have left, and nobody needs it."""
        slots = self._memory.slots
        return (
            node.on_disk > 0
            and node not in self._going
            and node not in chosen
            and node not in node.space.departing
            and self._is_leaf(node, chosen)
            and is_live(node)
            and node.present == node.ready
            and not node.pins
            and not any(slots.pinned(last_slot(of)) for of in node.slot_columns.values())
        )

    def _is_leaf(self, node: PrefixNode, chosen: ChosenLeaves) -> bool:
        if node.on_disk & ~node.memory:
            return len(node.below) == self._going.bare[node] + chosen.bare[node]
        return node.children_on_disk == self._going.below[node] + chosen.below[node]

    # ---- reservations and pins --------------------------------------------------------------

    def kept(self, segment: Segment) -> tuple[set[tuple[PrefixNode, int]], list[NodePart]]:
        """The pages of a segment that must not be removed with it, closed towards parents.

        Also all pages of the segment, because finding them takes half of the time of a plan.
        """
        kept: set[tuple[PrefixNode, int]] = set()
        reserved: dict[int, list[tuple[PrefixNode, int]]] = {
            one.space.number: [] for one in self.quotas.all() if one.reserved_bytes
        }
        parts = list(parts_of(segment.pages))
        for node, _, part, _ in parts:
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
        if reserved:  # single pages were made of some of them
            parts = list(parts_of(segment.pages))
        return kept, parts

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
        if leaves is not None and leaves.all_offered:
            assert not self._may_go(node) or node in leaves.queued, node


def _bytes_of(node: PrefixNode) -> int:
    """Size of the records of one page of a node."""
    return sum([node.space.shards[shard].record_bytes for shard in node.place_columns])


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
