"""Chooses which pages to evict: plans, as values. Pure.

Choosing takes leaves out of the order in which they are to leave, and changes nothing else: no
page, no slot, no job. :mod:`kvstore.state.table.room` carries a plan out in one place. A plan ends
where the next choice depends on what becomes of this one; then another is made.
"""

from collections import Counter
from typing import Final

from kvstore.state.choice.policy import classes
from kvstore.state.table.draining import bytes_of_a_page
from kvstore.state.table.residents import Residents
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

SPILL_LOOKS: Final = 1024
"""Pages before a new one that are looked at when only its own prompt is left to give room."""
SPILL_WRITES: Final = 64
"""Of those, pages that are asked to be written to disk for one that needs room."""


class RoomRequest:
    """Room that somebody needs.

    Args:
        space: whose pages come.
        slot_bytes: the class of their slots.
        slots: how many more.
        head: the page that they continue; what is before it gives room when nothing else does.
    """

    __slots__ = ("head", "slot_bytes", "slots", "space")

    def __init__(self, space: PrefixTree, slot_bytes: int, slots: int, head: PrefixNode) -> None:
        self.space = space
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.head = head


class Leaving:
    """A part of a plan.

    Args:
        node: what leaves memory.
        pages: that many of its last pages; of a run that is written first, its first ones.
    """

    __slots__ = ("node", "pages")

    def __init__(self, node: PrefixNode, pages: int) -> None:
        self.node = node
        self.pages = pages


class RoomPlan:
    """What to do for room, in this order.

    Args:
        spared: the pages of a put continue it: no victim. None = nothing continues a page by that:
            pages that are loaded follow one that is on disk.

    Attributes:
        writes: runs of the prompt itself, the first ones first, that the disk side is to write
            before more of it may leave; it ends when the disk side does not take one.
        victims: leave memory.
        asked: the last victim, which the disk side may want to write first: it leaves if not.
        drain: an extent of another class is to be emptied in the place of :attr:`asked`.
    """

    __slots__ = ("_taken", "asked", "drain", "spared", "victims", "writes")

    def __init__(self, spared: PrefixNode | None, asked: Leaving | None = None) -> None:
        self.spared = spared
        self.writes: list[Leaving] = []
        self.victims: list[Leaving] = []
        self.asked = asked
        self.drain = False
        #: The nodes of all victims, once somebody has asked; most plans have only one.
        self._taken: set[PrefixNode] | None = None

    def take(self, victim: Leaving) -> None:
        """Add a victim, behind the others."""
        assert victim.node is not self.spared
        self.victims.append(victim)
        if self._taken is not None:
            self._taken.add(victim.node)

    def takes(self, node: PrefixNode) -> bool:
        """Whether the node is a victim."""
        if not self.victims:
            return False
        if self._taken is None:
            self._taken = {one.node for one in self.victims}
        return node in self._taken

    def check(self) -> None:
        """Assert that no page leaves twice, and none that the new ones follow."""
        nodes = [one.node for one in self.victims]
        if self.asked is not None:
            nodes.append(self.asked.node)
        assert len(nodes) < 2 or len(set(nodes)) == len(nodes)
        assert self.spared not in nodes or self.spared is None


class RoomChooser:
    """The choices of one node.

    Args:
        residents: the pages, and where they are.
    """

    def __init__(self, residents: Residents) -> None:
        self._held = residents

    def choose(self, wanted: RoomRequest) -> RoomPlan:
        """Plan evictions until the request fits, or one depends on how an earlier one ends."""
        held = self._held
        plan = RoomPlan(held.draining.spared)
        space, slot_bytes, left = wanted.space, wanted.slot_bytes, wanted.slots
        leaving: Counter[PrefixNode] | None = None
        while left > 0:
            node = held.eviction.victim(space, slot_bytes)
            if node is not None and plan.takes(node):
                continue  # it stood there twice, as what changed its queue may
            if node is not None:
                limited = node.space.number in held.quotas.limited
                if not limited and held.draining.skips(node, slot_bytes):
                    continue
                spare = held.quotas.spare(node.space, space)
                each = _slots_of_a_page(node, slot_bytes)
                pages = -(-left // each)
                if spare is not None:  # what is more is reserved, maybe with what has been taken
                    pages = min(pages, 1 + max(0, spare - slot_bytes) // bytes_of_a_page(node))
                last = Leaving(node, pages)
                if held.disk.is_dirty(node):
                    plan.asked = last
                    break
            if self._is_other_colder(space, slot_bytes, node):
                plan.asked, plan.drain = None if node is None else last, True
                break
            if node is None:
                break
            plan.take(last)
            left -= each * min(last.pages, node.count)
            if left <= 0 or spare is not None or node.above is None:
                break
            leaving = Counter() if leaving is None else leaving
            leaving[node.above] += 1
            bared = leaving[node.above] >= node.above.children_in_memory
            if bared and node.above is not space.root:
                break  # it is a leaf then, which takes its rank from this one
        return plan

    def choose_own(self, space: PrefixTree, pages_max: int, size_bytes: int) -> RoomPlan:
        """A leaf of a space with limits: as many pages of it as take ``size_bytes``."""
        node = self._held.eviction.own_victim(space)
        if node is None:
            return RoomPlan(None)
        pages = min(pages_max, node.count, -(-size_bytes // bytes_of_a_page(node)))
        return RoomPlan(None, Leaving(node, pages))

    def choose_spill(self, wanted: RoomRequest) -> RoomPlan:
        """The pages before the new ones that are on disk, the first ones first.

        A prompt larger than memory has no leaf to give but itself. What is not on disk is written
        before that. Its runs stay runs: one is split only behind the pages that go.
        """
        disk, writes_left, plan = self._held.disk, SPILL_WRITES, RoomPlan(None)
        if self._held.eviction.is_behind(wanted.space, wanted.slot_bytes):
            return plan  # there is a leaf, but not in this turn
        for run in reversed(_runs_before(wanted.head)):
            if wanted.slot_bytes not in classes(run) or not self._held.eviction.releasable(run):
                continue
            if not run.memory & ~run.on_disk:
                each = _slots_of_a_page(run, wanted.slot_bytes)
                plan.take(Leaving(run, min(run.count, -(-wanted.slots // each))))
                break
            if writes_left <= 0:
                break
            pages = run.count if disk.is_full else min(run.count, writes_left)
            writes_left -= pages
            plan.writes.append(Leaving(run, pages))
        return plan

    def _is_other_colder(self, space: PrefixTree, slot_bytes: int, own: PrefixNode | None) -> bool:
        """Whether an extent of another class gives room, in the place of a victim of this one."""
        draining, held = self._held.draining, self._held
        if held.eviction.spared_since_ns or held.eviction.is_behind(space, slot_bytes):
            return False
        if draining.now is not None:
            return draining.serves(space, slot_bytes)
        return draining.colder(space, slot_bytes, own, held.moment.now_ns) is not None


def _runs_before(head: PrefixNode) -> list[PrefixNode]:
    """The last runs up to ``head`` that are in memory, the last one first."""
    found: list[PrefixNode] = []
    at, looked = head, 0
    while at.above is not None and looked < SPILL_LOOKS:
        looked += at.count
        if at.memory:
            found.append(at)
        at = at.above
    return found


def _slots_of_a_page(node: PrefixNode, slot_bytes: int) -> int:
    """Number of slots of this size that each page of the node has; at least 1."""
    shards = node.space.shards
    return max(1, sum([shards[shard].slot_bytes == slot_bytes for shard in node.slot_columns]))
