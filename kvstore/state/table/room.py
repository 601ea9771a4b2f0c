"""Makes room in memory: chooses what leaves, and brings in what is wanted. Pure.

Who asks for memory gets slots that are free, or those that victims leave. A victim that is worth it
is written to disk first: then its slots are free a little later.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.state.choice.eviction import classes, slots_of_a_page
from kvstore.state.choice.quotas import SHRINK_MAX
from kvstore.state.disk.jobs import Verdict
from kvstore.state.disk.loads import LOADS_TURN, DiskLoads
from kvstore.state.table.draining import LOOKS
from kvstore.state.table.residents import Residents
from kvstore.state.table.runs import leading_ready
from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot

SPILL_LOOKS: Final = 1024
"""Pages before a new one that are looked at when only its own prompt is left to give room."""
SPILL_WRITES: Final = 64
"""Of those, pages that are asked to be written to disk for one that needs room."""
EMPTY_MAX: Final = 128
"""Pages that leave an extent of another class for one request, which waits for the others."""


class Room:
    """Room in the memory of one node.

    Args:
        residents: the pages, and where they are.
    """

    def __init__(self, residents: Residents) -> None:
        self._held = residents

    def allocate(
        self, space: PrefixTree, head: PrefixNode, slot_bytes: int, count: int
    ) -> list[Slot]:
        """Slots in state WRITING for pages behind ``head``; fewer if there is no more room."""
        taken = self._held.slots.allocate(count, space.identity.tenant, slot_bytes)
        if len(taken) < count:
            self._free(space, head, slot_bytes, count, taken)
        elif self._held.draining.grown is not None and not self._held.eviction.spared_since_ns:
            self._look_ahead(space, slot_bytes)
        return taken

    def _free(
        self, space: PrefixTree, head: PrefixNode, slot_bytes: int, count: int, taken: list[Slot]
    ) -> None:
        """Make room until ``taken`` has so many slots, or there is no more room to make."""
        held, tenant = self._held, space.identity.tenant
        held.ghosts.wanted = (space.number, slot_bytes)
        held.eviction.now_ns = held.moment.now_ns
        victims_left = count + EMPTY_MAX  # what leaves an extent that is drained makes no room yet
        while len(taken) < count and victims_left > 0:
            victims_left -= 1
            if not self._make_room(space, slot_bytes, count - len(taken)) and (
                held.draining.serves(space, slot_bytes)
                or held.eviction.spared_since_ns
                or not self._spill(head, slot_bytes, count - len(taken))
            ):
                break
            taken += held.slots.allocate(count - len(taken), tenant, slot_bytes)
        held.eviction.end_choice()
        held.ghosts.wanted = None
        apply_effects(held)

    def shrink(self, space: PrefixTree, pages_max: int, more_bytes: int = 0) -> bool:
        """Evict leaves of a space until so much more is within its quota; whether it is."""
        left = pages_max
        while left and self._held.quotas.exceeded(space, more_bytes) and self._evict_own(space):
            left -= 1
        self._held.eviction.end_choice()
        apply_effects(self._held)
        return not self._held.quotas.exceeded(space, more_bytes)

    def within_quota(self, space: PrefixTree, slot_bytes: int, count: int) -> int:
        """How many of ``count`` more pages the space's quota allows, its own leaves evicted."""
        if not self._held.quotas.is_limited(space):
            return count
        for more in range(count):
            if not self.shrink(space, SHRINK_MAX, (more + 1) * slot_bytes):
                return more
        return count

    def _evict_own(self, space: PrefixTree) -> bool:
        """Evict a leaf of a space with limits, or have it written first; False when none may go."""
        chosen = self._held.eviction.own_victim(space)
        verdict = self._verdict(chosen) if chosen is not None else Verdict.FULL
        if chosen is not None and verdict is Verdict.EVICT:
            self._held.ghosts.wanted = (space.number, 0)
            self._held.evict(chosen)
            self._held.ghosts.wanted = None
        return verdict is not Verdict.FULL

    def _make_room(self, space: PrefixTree, slot_bytes: int, slots: int) -> bool:
        """Evict as much of a leaf as gives so many slots, or take a colder extent of another class.

        False when there is none, or none yet: an extent of many pages is drained in turns.
        """
        while (node := self._held.eviction.victim(space, slot_bytes)) is not None:
            # Of a space with limits each page is asked for: the next one may be reserved.
            most = 1 if self._held.quotas.is_limited(node.space) else slots
            pages = -(-most // slots_of_a_page(node, slot_bytes))
            verdict = self._verdict(node, pages)
            if verdict is Verdict.FULL:
                return False
            if verdict is Verdict.EVICT:
                break
        held = self._held
        if not held.eviction.spared_since_ns and self._take_extent(space, slot_bytes, node):
            if node is not None:
                self._held.add_candidate(node)
            return self._held.draining.now is None
        if node is None:
            return False
        self._held.evict(node, pages)
        return True

    def _spill(self, head: PrefixNode, slot_bytes: int, slots: int) -> bool:
        """Take the memory of pages before the new ones that are on disk, the first ones first.

        A prompt larger than memory has no leaf to give but itself. Its runs stay runs: one is split
        only behind the pages that go.
        """
        disk, writes_left = self._held.disk, SPILL_WRITES
        for run in reversed(_runs_before(head)):
            if slot_bytes not in classes(run) or not self._held.eviction.releasable(run):
                continue
            dirty = run.memory & ~run.on_disk
            if dirty:
                if writes_left <= 0:
                    return False
                if run.count > writes_left and not disk.is_full:
                    run = run.split(writes_left)
                writes_left -= run.count
            if disk.before_eviction(run) is not Verdict.EVICT:
                continue  # it is being written now, and its memory is free when that has ended
            if dirty:
                return False  # not worth writing, and what follows it must not lose it
            pages = min(run.count, -(-slots // slots_of_a_page(run, slot_bytes)))
            self._held.evict(run.split(pages) if pages < run.count else run, pages)
            return True
        return False

    def _verdict(self, node: PrefixNode, pages: int = 1) -> Verdict:
        """Whether a victim may go now; one that has to wait is offered again when it may."""
        verdict = self._held.disk.before_eviction(node, pages)
        if verdict is Verdict.FULL:
            self._held.add_candidate(node)
        return verdict

    def _take_extent(self, space: PrefixTree, slot_bytes: int, own: PrefixNode | None) -> bool:
        """Whether an extent of another class, colder than ``own``, is empty or is being drained."""
        draining, left, now_ns = self._held.draining, EMPTY_MAX, self._held.moment.now_ns
        draining.tick = self._held.moment.tick  # what this request used stays
        while left > 0:
            begun = draining.now is not None or draining.begin(space, slot_bytes, own, now_ns)
            if not begun:
                return False
            if not draining.serves(space, slot_bytes):
                return False
            moved = self._held.counts["moved_extents"]
            left -= max(LOOKS, self.drain(left))
            if draining.now is not None or self._held.counts["moved_extents"] > moved:
                return True
        return False

    def drain(self, steps: int) -> int:
        """Take pages out of the extent that changes its class, in at most ``steps`` steps.

        Returns:
            the steps that were taken; fewer when the extent is empty, or left to its class.
        """
        if self._held.draining.now is None:
            return 0
        taken, self._held.draining.tick = 0, self._held.moment.tick
        for page in self._held.draining.pages(steps):
            taken += 1
            if page is not None:
                self._held.leave_memory(*page)
        if taken < steps:
            self._held.counts["moved_extents"] += self._held.draining.end(self._held.moment.now_ns)
        return taken

    def _look_ahead(self, space: PrefixTree, slot_bytes: int) -> None:
        """Begin to drain the next extent for a class that has used half of the one it got last."""
        eviction, draining, moment = self._held.eviction, self._held.draining, self._held.moment
        if draining.is_half_used(space, slot_bytes):
            eviction.now_ns, draining.tick = moment.now_ns, moment.tick
            own = eviction.victim(space, slot_bytes)
            draining.begin(space, slot_bytes, own, moment.now_ns)
            if own is not None:
                self._held.add_candidate(own)
            eviction.end_choice()

    # ---- pages that are on disk only --------------------------------------------------------

    def fetch(self, fetch: Fetch, space: PrefixTree, shard: int, packed: bytes) -> None:
        """Keep a run of READY pages in memory for a fetch, and load what is on disk only."""
        self.load(fetch, leading_ready(space, packed, shard), shard)

    def load(self, fetch: Fetch, nodes: Sequence[PrefixNode], shard: int) -> None:
        """Load what is on disk only of a run of READY pages, and keep all of it in memory.

        Of many loads some begin now, and the others in the turns that come.
        """
        disk = self._held.disk
        disk.loads.add(fetch, nodes, shard)
        self._begin_loads(disk.loads, fetch, LOADS_TURN)
        if fetch.wanted:
            disk.loads.beginning.append(fetch)

    def load_more(self) -> None:
        """Begin more of the loads that somebody waits for, as many as one turn does."""
        disk, left = self._held.disk, LOADS_TURN
        while disk.loads.beginning and left > 0:
            fetch = disk.loads.beginning[0]
            left -= self._begin_loads(disk.loads, fetch, left)
            if not fetch.wanted:
                disk.loads.beginning.popleft()

    def _begin_loads(self, loads: DiskLoads, fetch: Fetch, most: int) -> int:
        """Begin up to ``most`` loads of a fetch; how many pages were looked at."""
        looked = 0
        while fetch.wanted and not fetch.ended and looked < most:
            pages, node, shard = loads.next(fetch, most - looked)
            looked += pages
            if node is not None:
                assert node.above is not None
                size, keys = node.space.shards[shard].slot_bytes, node.keys
                slots = self.allocate(node.space, node.above, size, pages)
                loads.begin(fetch, node, shard, keys, slots)
        loads.tell(fetch)
        return max(1, looked)


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
