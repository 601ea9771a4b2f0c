"""An extent that changes its class: which one, and which pages leave it in which order. Pure.

Room for pages of another size or another tenant is a whole extent, and it may hold thousands of
pages. They leave some in each turn of the loop, after all of them were looked at: an extent with a
page that somebody needs is left as it is. One extent at a time is drained.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final

from kvstore.state.choice.eviction import is_held
from kvstore.state.choice.policy import enter
from kvstore.state.choice.quotas import Quotas
from kvstore.state.table.orphans import tails_first
from kvstore.state.table.runs import Owners
from kvstore.state.tree.columns import last_slot
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot, SlotTable

LOOKS: Final = 8
"""Slots that are looked at in the time in which one page leaves."""
WHOLE_MAX: Final = 128
"""Pages of a run that leave together at most."""
SKIPS_MAX: Final = 1024
"""Victims in the extent that is being emptied that one request skips at most."""
STAY_NS: Final = 30_000_000_000
"""How long a class keeps an extent that it got, against one that has pages of its own to evict.

Two models that take turns would else take the same extents from each other in each turn."""


@dataclass(slots=True)
class Drain:
    """An extent that is being emptied.

    Attributes:
        position: which.
        space: who asked for its memory.
        slot_bytes: of the class that asked.
    """

    position: int
    space: PrefixTree
    slot_bytes: int


class Draining:
    """The extent that is being emptied, and those that were.

    Args:
        slots: where the extents are.
        owners: whose slots they are, at each moment.
        quotas: which spaces must not lose an extent's bytes.

    Attributes:
        now: what is being drained; None = nothing.
        grown: the extent that a class got last; when half of it is used, the next one is drained.
        tick: the request that is being carried out; pages that it used stay.
        spared: the page behind which room is being made, which stays.
        skips_left: victims that the request may still skip.
        skipped: victims that were skipped, and their class; they are in no queue until the end.
        returning: those that were skipped before, until they are offered again.
    """

    def __init__(self, slots: SlotTable, owners: Owners, quotas: Quotas) -> None:
        self._slots = slots
        self._owners = owners
        self._quotas = quotas
        self.now: Drain | None = None
        self._walk: Iterator[tuple[PrefixNode, int] | None] = iter(())
        self.grown: int | None = None
        self.tick = 0
        self.spared: PrefixNode | None = None
        self.skips_left = 0
        self.skipped: dict[PrefixNode, int] = {}
        self.returning: list[tuple[PrefixNode, int]] = []
        #: Position → when it got empty.
        self._since_ns: dict[int, int] = {}
        self._emptied = False

    def serves(self, space: PrefixTree, slot_bytes: int) -> bool:
        """Whether an extent is being emptied for that class."""
        asked = space.identity.tenant, slot_bytes
        now = self.now
        return now is not None and asked == (now.space.identity.tenant, now.slot_bytes)

    def is_half_used(self, space: PrefixTree, slot_bytes: int) -> bool:
        """Whether the class has used half of the extent that it got last; said once of each."""
        if self.grown is None or self.now is not None:
            return False
        extent = self._slots.extents[self.grown]
        if extent.draining or 2 * len(extent.free) > extent.count:
            return False
        if extent.class_of != (space.identity.tenant, slot_bytes):
            return False
        self.grown = None
        return True

    def begin_request(self, tick: int) -> None:
        """A request makes room; what it used stays."""
        self.tick, self.skips_left = tick, SKIPS_MAX

    def skips(self, victim: PrefixNode, slot_bytes: int) -> bool:
        """Whether to skip a victim: its last slot is in the extent that is being emptied.

        What it leaves there is not for the class that asks. It leaves with the extent.
        """
        if self.now is None or self.skips_left <= 0:
            return False
        shards, position = victim.space.shards, self.now.position
        for shard, column in victim.slot_columns.items():
            of_class = shards[shard].slot_bytes == slot_bytes
            if of_class and self._slots.position(last_slot(column)) != position:
                return False
        assert slot_bytes not in victim.queued, "it is still in the queue"
        self.skips_left -= 1
        self.skipped[victim] = slot_bytes
        enter(victim, slot_bytes)  # it comes again by itself
        return True

    def begin(
        self, space: PrefixTree, slot_bytes: int, own: PrefixNode | None, now_ns: int
    ) -> bool:
        """Choose an extent of another class that is colder than ``own``, a victim of this one.

        Args:
            space: who asks for it.
            slot_bytes: of the class that asks.
            own: what would leave in its place; None = there is nothing.
            now_ns: the time.

        Returns:
            whether there is one; it is :attr:`now` then.
        """
        assert self.now is None, "one extent at a time"
        position = self.colder(space, slot_bytes, own, now_ns)
        if position is None:
            return False
        self.now = Drain(position, space, slot_bytes)
        self._walk = self._leaving(position, space)
        self._slots.drain(position)
        return True

    def colder(
        self, space: PrefixTree, slot_bytes: int, own: PrefixNode | None, now_ns: int
    ) -> int | None:
        """The extent that :meth:`begin` would choose; None = there is none."""
        tenant = space.identity.tenant
        if own is None:
            return self._slots.colder_extent(tenant, slot_bytes, self.tick)
        since = self._since_ns.items()
        staying = {at for at, then in since if then + STAY_NS > now_ns}
        return self._slots.colder_extent(tenant, slot_bytes, own.access, staying)

    def pages(self, steps: int) -> Iterator[tuple[PrefixNode, int] | None]:
        """The next pages that leave memory; each is taken out before the next step.

        Yields:
            pages and their shard, or None for a step that found none: ``steps`` of both, fewer when
            the walk has ended. Then call :meth:`end`. A run of N pages takes N steps.
        """
        return islice(self._walk, steps)

    def end(self, now_ns: int) -> bool:
        """The walk has ended: whether the extent is empty; else it is left to its class."""
        assert self.now is not None
        position, self.now = self.now.position, None
        self.returning += self.skipped.items()
        self.skipped.clear()
        if self._slots.end_drain(position):
            self.grown, self._emptied = position, True
            self._since_ns[position] = now_ns
            return True
        self._slots.extents[position].used_at = self.tick  # somebody needs a page of it
        return False

    def take_emptied(self) -> bool:
        """Whether an extent was emptied since this was last asked, and so has room for many."""
        emptied, self._emptied = self._emptied, False
        return emptied

    def _leaving(self, position: int, space: PrefixTree) -> Iterator[tuple[PrefixNode, int] | None]:
        """All pages of an extent, what only they make reachable before them.

        It ends early when a page may not leave.
        """
        if self._slots.needed(position) or not (yield from self._all_may_leave(position, space)):
            return
        for slot in self._slots.slots_in_use(position):
            run = self._owners.run(slot)
            if run is not None and not (yield from self._some_leave(run, slot, position)):
                return

    def _all_may_leave(self, position: int, space: PrefixTree) -> Generator[None, None, bool]:
        """Whether all pages of an extent may leave now, so that it is worth to begin."""
        seen: PrefixNode | None = None
        for at, slot in enumerate(self._slots.slots_in_use(position)):
            owner = self._owners.run(slot)
            if owner is None:
                return False
            if owner is not seen:  # neighbours are of one run, and it is looked at as a whole
                if not self._may_leave(owner):
                    return False
                if self._quotas.protects(owner.space, space, self._slots.extent_bytes):
                    return False
                seen = owner
            if at % LOOKS == LOOKS - 1:
                yield None
        return True

    def _some_leave(
        self, run: PrefixNode, slot: Slot, position: int
    ) -> Generator[tuple[PrefixNode, int] | None, None, bool]:
        """The page in a slot, or all of its run; False when one may not leave."""
        if self._leaves_whole(run, position):
            if not self._may_leave(run) or self._is_reserved(run):
                return False
            (shard,), pages = run.slot_columns, run.count
            yield run, shard
            yield from repeat(None, pages - 1)
            return True
        owner = self._owners.get(slot)
        assert owner is not None
        for shard in list(owner.slot_columns):
            alone = owner.on_disk >> shard & 1 or owner.space.shards[shard].window_pages
            for node in () if alone else tails_first(owner, shard):
                if node is not None and (not self._may_leave(node) or self._is_reserved(node)):
                    return False
                yield None if node is None else (node, shard)
            if owner.memory >> shard & 1 and is_live(owner):
                if not self._may_leave(owner) or self._is_reserved(owner):
                    return False
                yield owner, shard
        return True

    def _is_reserved(self, node: PrefixNode) -> bool:
        """Whether the pages of a node are in what its space has reserved; asked before each leaves.

        What only they make reachable may be in other extents, and leaves too.
        """
        assert self.now is not None, node
        size_bytes = node.count * bytes_of_a_page(node)
        return self._quotas.protects(node.space, self.now.space, size_bytes)

    def _leaves_whole(self, run: PrefixNode, position: int) -> bool:
        """Whether all pages of a run may leave together: each split makes a node more.

        Of one that has others below it, is on disk too, has pages of several shards or elsewhere,
        each page leaves by itself.
        """
        if run.below or run.on_disk or len(run.slot_columns) != 1 or run.count > WHOLE_MAX:
            return False
        (shard,) = run.slot_columns
        return all(self._slots.position(slot) == position for slot in run.slots_of(shard))

    def _may_leave(self, node: PrefixNode) -> bool:
        """Whether the pages of a node may leave memory now."""
        if node is self.spared or is_held(node) or node.access == self.tick:
            return False
        if node.ready != node.present:
            return False
        return not any(
            self._slots.in_use(slot) for shard in node.slot_columns for slot in node.slots_of(shard)
        )


def bytes_of_a_page(node: PrefixNode) -> int:
    """Bytes of memory that each page of the node takes, all its shards together."""
    shards = node.space.shards
    return sum([shards[shard].slot_bytes for shard in node.slot_columns])
