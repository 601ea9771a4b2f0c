"""Makes room in memory: carries out eviction plans, and loads requested pages. Pure.

Who asks for memory gets slots that are free, or those that victims leave. What leaves is chosen in
:mod:`kvstore.state.table.choosing` before any of it is done. A victim that is worth it is written
to disk first: then its slots are free a little later.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.state.choice.quotas import SHRINK_MAX
from kvstore.state.disk.jobs import EVICT, FULL, WRITING, Verdict
from kvstore.state.disk.loads import LOADS_TURN, DiskLoads
from kvstore.state.table.choosing import RoomChooser, RoomPlan, RoomRequest
from kvstore.state.table.draining import LOOKS
from kvstore.state.table.residents import Residents
from kvstore.state.table.runs import leading_ready
from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot

EMPTY_MAX: Final = 128
"""Pages that leave an extent of another class for one request, which waits for the others."""


class Room:
    """Room in the memory of one node.

    Args:
        residents: the pages, and where they are.
    """

    def __init__(self, residents: Residents) -> None:
        self._held = residents
        self._chooser = RoomChooser(residents)

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
        held.draining.begin_request(held.moment.tick)
        plans_left = count + EMPTY_MAX  # what leaves an extent that is drained makes no room yet
        while len(taken) < count and (plans_left := plans_left - 1) >= 0:
            more = self._make_room(RoomRequest(space, slot_bytes, count - len(taken), head))
            taken += held.slots.allocate(count - len(taken), tenant, slot_bytes)
            if not more and len(taken) < count:
                if held.offer_more(EMPTY_MAX):
                    plans_left -= EMPTY_MAX // 4  # what is offered may be of no use, and be much
                    continue
                if held.draining.serves(space, slot_bytes) or held.eviction.spared_since_ns:
                    break
                if not self._spill(RoomRequest(space, slot_bytes, count - len(taken), head)):
                    break
                taken += held.slots.allocate(count - len(taken), tenant, slot_bytes)
        held.eviction.end_choice()
        held.ghosts.wanted = None
        apply_effects(held)

    def shrink(self, space: PrefixTree, pages_max: int, more_bytes: int = 0) -> bool:
        """Evict leaves of a space until so much more is within its quota; whether it is."""
        left, quotas = pages_max, self._held.quotas
        while left > 0 and (excess := quotas.excess(space, more_bytes)):
            pages = self._evict_own(space, left, excess)
            if not pages:
                break
            left -= pages
        self._held.eviction.end_choice()
        apply_effects(self._held)
        return not quotas.exceeded(space, more_bytes)

    def within_quota(self, space: PrefixTree, slot_bytes: int, count: int) -> int:
        """How many of ``count`` more pages the space's quota allows, its own leaves evicted."""
        quotas, size_bytes = self._held.quotas, count * slot_bytes
        if space.number not in quotas.limited or not count:
            return count
        if self.shrink(space, SHRINK_MAX + count - 1, size_bytes):
            return count
        return max(0, count - -(-quotas.excess(space, size_bytes) // slot_bytes))

    def _evict_own(self, space: PrefixTree, pages_max: int, size_bytes: int) -> int:
        """Evict pages of a leaf of a limited space that take up to ``size_bytes``; how many.

        A run that is written first counts as one; 0 = none may go.
        """
        chosen = self._chooser.choose_own(space, pages_max, size_bytes).asked
        if chosen is None:
            return 0
        verdict = self._verdict(chosen.node, chosen.pages)
        if verdict is EVICT:
            self._held.ghosts.wanted = (space.number, 0)
            self._held.evict(chosen.node, chosen.pages)
            self._held.ghosts.wanted = None
            return chosen.pages
        return int(verdict is WRITING)

    def _make_room(self, wanted: RoomRequest) -> bool:
        """Choose what gives room, and do it; False when there is nothing, or nothing yet."""
        while True:
            plan = self._chooser.choose(wanted)
            plan.check()
            verdict = self._carry_out(plan, wanted)
            if plan.victims and verdict is WRITING:
                return True  # these gave room; of what is left to make another plan is made
            if verdict is not WRITING:
                return verdict is EVICT

    def _carry_out(self, plan: RoomPlan, wanted: RoomRequest) -> Verdict:
        """Do what a plan says.

        Returns:
            EVICT: all of it gave room; WRITING: what was asked about will; FULL: nothing more does.
        """
        held, asked = self._held, plan.asked
        for victim in plan.victims:
            assert is_live(victim.node), victim.node
            assert not victim.node.children_in_memory, ("pages there are not reached", victim.node)
            held.disk.before_eviction(victim.node, victim.pages)
            held.evict(victim.node, victim.pages)
        if asked is not None and not plan.drain:
            verdict = self._verdict(asked.node, asked.pages)
            if verdict is not EVICT:
                return verdict
        own = asked.node if asked is not None else None
        if (plan.drain or own is not None) and self._take_extent(wanted, own):
            if own is not None:
                held.add_candidate(own)
            return EVICT if held.draining.now is None else FULL
        if asked is not None:
            if plan.drain:
                held.disk.before_eviction(asked.node, asked.pages)
            held.evict(asked.node, asked.pages)
        return EVICT if asked is not None or plan.victims else FULL

    def _spill(self, wanted: RoomRequest) -> bool:
        """Take the memory of pages before the new ones; whether some gave room."""
        held, plan = self._held, self._chooser.choose_spill(wanted)
        for one in plan.writes:
            run, pages = one.node, one.pages
            first = run.split(pages) if pages < run.count and not held.disk.is_full else run
            if held.disk.before_eviction(first) is EVICT:
                return False  # not worth writing, and what follows it must not lose it
        for one in plan.victims:
            run, pages = one.node, one.pages
            held.disk.before_eviction(run, pages)
            held.evict(run.split(pages) if pages < run.count else run, pages)
        return bool(plan.victims)

    def _verdict(self, node: PrefixNode, pages: int = 1) -> Verdict:
        """Whether a victim may go now; one that has to wait is offered again when it may."""
        verdict = self._held.disk.before_eviction(node, pages)
        if verdict is not EVICT:
            self._held.put_off(node, verdict)
        return verdict

    def _take_extent(self, wanted: RoomRequest, own: PrefixNode | None) -> bool:
        """Whether an extent of another class, colder than ``own``, is empty or is being drained."""
        space, slot_bytes = wanted.space, wanted.slot_bytes
        draining, left, now_ns = self._held.draining, EMPTY_MAX, self._held.moment.now_ns
        while left > 0 and not self._held.eviction.spared_since_ns:
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
            if not eviction.is_behind(space, slot_bytes):
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

        Of many loads some begin now, and the others in the turns that come, or when loads end.
        """
        disk = self._held.disk
        disk.loads.add(fetch, nodes, shard)
        self._begin_loads(disk.loads, fetch, LOADS_TURN)
        if fetch.wanted:
            disk.loads.beginning[fetch] = None

    def load_more(self) -> None:
        """Begin more of the loads that somebody waits for, as many as one turn does."""
        disk, left = self._held.disk, LOADS_TURN
        while left > 0 and (fetch := disk.loads.first) is not None:
            left -= self._begin_loads(disk.loads, fetch, left)
            if fetch.wanted:
                break  # until loads have ended, or in the next turn
            del disk.loads.beginning[fetch]

    def _begin_loads(self, loads: DiskLoads, fetch: Fetch, most: int) -> int:
        """Begin up to ``most`` loads of a fetch; how many pages were looked at."""
        looked = 0
        while fetch.wanted and looked < most and (found := loads.next(fetch, most - looked)):
            pages, node, shard = found
            looked += pages
            if node is not None:
                assert node.above is not None, node
                size, keys = node.space.shards[shard].slot_bytes, node.keys
                slots = self.allocate(node.space, node.above, size, pages)
                loads.begin(fetch, node, shard, keys, slots)
        loads.tell(fetch)
        return max(1, looked)
