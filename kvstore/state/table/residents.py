"""Pages and where they are: in memory, on disk, on their way, gone. Pure.

Who asks for memory gets a slot that is free, or one that a victim leaves: its page stays on disk if
it is there, is written there first if that is worth it, or leaves the index with all that it leads
to. Nothing here knows about engines; :mod:`kvstore.state.table.pages` does.
"""

from collections import Counter, deque
from itertools import islice
from typing import Final

from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.choice.eviction import Eviction, classes, slots_of_a_page
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.disk.graves import BURIED
from kvstore.state.disk.jobs import Verdict
from kvstore.state.disk.pages import DiskPages
from kvstore.state.metering import Meter
from kvstore.state.table.draining import LOOKS, Draining
from kvstore.state.table.orphans import Orphans, subtree, tails_first
from kvstore.state.table.owners import Owners
from kvstore.state.table.runs import missing_pages
from kvstore.state.tree.actions import Abandoned, Action, Removed, TierRemoved, TierStored
from kvstore.state.tree.fetches import Fetches
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.state.tree.spaces import Spaces
from kvstore.state.tree.story import Story

DROP_AT_ONCE = 128
"""Nodes that one page takes along when it leaves the index; of more, all leave in turns."""
SPILL_LOOKS: Final = 1024
"""Pages before a new one that are looked at when only its own prompt is left to give room."""
SPILL_WRITES: Final = 64
"""Of those, pages that are asked to be written to disk for one that needs room."""
EMPTY_MAX: Final = 128
"""Pages that leave an extent of another class for one request, which waits for the others."""


class Residents:
    """All pages of one node.

    Args:
        slots: the slots of the host tier.
        policy: what leaves memory first.

    Attributes:
        actions: what became READY or left the index, in order.
        now_ns: the time of the message that is being carried out.
        tick: counts the requests; orders uses.
        orphans: pages whose head has left, and that are still there.
        story: the last events of pages.
        draining: the extent that is being emptied for pages of another class.
    """

    def __init__(self, slots: SlotTable, policy: str = "lru") -> None:
        self.slots = slots
        #: Set when there is an SSD tier.
        self.disk: DiskPages | None = None
        self.spaces = Spaces(slots.extent_bytes)
        self.actions: list[Action] = []
        self.counts: Counter[str] = Counter()
        self.meter = Meter()
        self.ghosts = Ghosts()
        self.story = Story(self)
        #: Who waits for pages to come to memory.
        self.fetches = Fetches(self)
        self.eviction = Eviction(slots, policy)
        self.quotas = self.eviction.quotas
        self.now_ns = 0
        self.tick = 0
        self.orphans: deque[Orphans] = deque()
        self._owners = Owners(slots)
        self.draining = Draining(slots, self._owners, self.quotas)

    @property
    def unfinished(self) -> bool:
        """Whether there is work for the turns that come: :meth:`sweep`, :meth:`drain`, writes."""
        if self.orphans or self.draining.now is not None:
            return True
        return self.disk is not None and (self.disk.unfinished or self.disk.loads.unfinished)

    def ready_run(self, space: PrefixTree, shard: int, packed: bytes) -> list[PrefixNode]:
        """The leading run of READY pages of one shard, in whatever tier, as single pages."""
        run: list[PrefixNode] = []
        for at in range(0, len(packed), KEY_BYTES):
            node = space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            if node is None or not node.ready >> shard & 1:
                break
            run.append(node)
        return run

    def on_disk(self, space: PrefixTree, shards: list[int], packed: bytes, pages: int) -> int:
        """How many of the first ``pages`` pages, a hit, are to be loaded for some shard."""
        if self.disk is None:
            return 0
        return missing_pages(space, shards, packed, pages)

    def owner(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None for a slot of no page in the trees."""
        return self._owners.run(slot)

    # ---- memory -----------------------------------------------------------------------------

    def allocate(
        self, space: PrefixTree, head: PrefixNode, slot_bytes: int, count: int
    ) -> list[Slot]:
        """Slots in state WRITING for pages behind ``head``; fewer if there is no more room."""
        taken = self.slots.allocate(count, space.identity.tenant, slot_bytes)
        if len(taken) == count:
            if self.draining.grown is not None:
                self._look_ahead(space, slot_bytes)
            return taken
        self.ghosts.wanted = (space.number, slot_bytes)
        self.eviction.now_ns = self.now_ns
        victims_left = count + EMPTY_MAX  # what leaves an extent that is drained makes no room yet
        while len(taken) < count and victims_left > 0:
            victims_left -= 1
            if not self._make_room(space, slot_bytes, count - len(taken)) and (
                self.draining.serves(space, slot_bytes)
                or self.eviction.spared_since_ns
                or not self._spill(head, slot_bytes)
            ):
                break
            taken += self.slots.allocate(count - len(taken), space.identity.tenant, slot_bytes)
        self.eviction.end_choice()
        self.ghosts.wanted = None
        return taken

    def promoted(self, node: PrefixNode, shard: int, slot: Slot, tokens: bytes) -> None:
        """A page that was on disk only has been loaded to ``slot``, which is still WRITING."""
        self.slots.commit([slot], self.tick)
        node.promote(shard, slot)
        node.learn(tokens)
        self._owners.add([slot], [node.key], node.space)
        self.counts["promoted_pages"] += 1
        self.emit(TierStored, node, shard, "host")

    def emit(
        self, kind: type[TierStored | TierRemoved], node: PrefixNode, shard: int, tier: str,
        tokens: bytes = b"",
    ) -> None:  # fmt: skip
        """The pages of a node came to a tier, or leave it and stay in the other.

        ``tokens`` are those of their records, for pages that are in no memory.
        """
        assert node.above is not None
        known, keys = node.tokens or tokens, node.key_list()
        self.actions.append(kind(node.space, shard, keys, node.above.key, tier, known))
        self.story.tell(f"{kind.__name__} {tier}", node, shard, node.count)

    def add_candidate(self, node: PrefixNode) -> None:
        """The node may be evictable now."""
        if not node.children_in_memory:  # else it is not, and many are asked of at once
            self.eviction.add_candidate(node)
        if self.disk is not None:
            self.disk.add_candidate(node)

    def shrink(self, space: PrefixTree, pages_max: int, more_bytes: int = 0) -> bool:
        """Evict leaves of a space until so much more is within its quota; whether it is."""
        left = pages_max
        while left and self.quotas.exceeded(space, more_bytes) and self._evict_own(space):
            left -= 1
        self.eviction.end_choice()
        return not self.quotas.exceeded(space, more_bytes)

    def _evict_own(self, space: PrefixTree) -> bool:
        """Evict a leaf of a space with limits, or have it written first; False when none may go."""
        chosen = self.eviction.own_victim(space)
        verdict = self._verdict(chosen) if chosen is not None else Verdict.FULL
        if chosen is not None and verdict is Verdict.EVICT:
            self.ghosts.wanted = (space.number, 0)
            self._evict(chosen)
            self.ghosts.wanted = None
        return verdict is not Verdict.FULL

    # ---- leaving ----------------------------------------------------------------------------

    def drop(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Take the READY pages of a node out of the index, with what only they made reachable."""
        if not node.ready >> shard & 1:
            return
        self.ghosts.head = node.key
        self._drop_below(node, shard, cause)
        self.ghosts.head = PrefixKey(b"")
        self._remove(node, shard, cause)
        self._tidy(node)

    def _drop_below(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Take out what lies below ``node``: without their head nobody reaches those pages.

        Of many pages none goes now, and all of them in turns, see :meth:`sweep`.
        """
        if node.space.shards[shard].window_pages:
            return
        found = subtree(node, most=DROP_AT_ONCE)
        if len(found) > DROP_AT_ONCE:
            node.space.holes[node] = node.space.holes.get(node, 0) | 1 << shard
            self.story.tell("hole", node, shard)
            self.orphans.append(Orphans(node, shard, cause, tails_first(node, shard)))
            return
        for below in reversed(found[1:]):
            self._drop_orphan(below, shard, cause)

    def _drop_orphan(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Take a page out, whatever its state, below which there is none."""
        if node.ready >> shard & 1:
            self._remove(node, shard, cause)
        elif node.present >> shard & 1:
            self._abandon(node, shard)  # its writer will find it DROPPED
        self._tidy(node)

    def sweep(self, steps: int) -> None:
        """Take out pages whose head has left, in ``steps`` steps; see :attr:`orphans`."""
        left = steps
        while self.orphans and left > 0:
            top, shard, cause, walk = self.orphans[0]
            self.ghosts.head = top.key
            for node in islice(walk, left):
                left -= 1
                if node is not None:
                    self._drop_orphan(node, shard, cause)
            self.ghosts.head = PrefixKey(b"")
            if left > 0:  # the walk has ended
                self.orphans.popleft()
                top.space.fill_hole(top, shard)
                self._tidy(top)

    def _remove(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Take the READY pages of a node out of every tier."""
        here = ("host",) if node.memory >> shard & 1 else ()
        places = (*here, "ssd") if node.on_disk >> shard & 1 else here
        slots = self._forget(node, shard) if here else []
        if self.disk is not None:
            self.disk.forget(node, shard)
            if cause in BURIED:
                self.disk.graves.bury(node, shard)
        keys = node.key_list()[::-1]
        self.actions.append(Removed(node.space, shard, keys, cause, places))
        self.counts[f"removed_{cause}"] += len(keys)
        self.story.tell(f"removed {cause}", node, shard, len(keys))
        for key in keys:
            self.ghosts.add(node, shard, cause, self.now_ns, key)
        self.slots.release(slots)

    def _abandon(self, node: PrefixNode, shard: int) -> None:
        self._forget(node, shard)
        self.actions.append(Abandoned(node.space, [node.key]))
        self.story.tell("abandoned", node, shard)

    def _forget(self, node: PrefixNode, shard: int) -> list[Slot]:
        slots = node.forget_all(shard)
        self._owners.remove(slots)
        return slots

    def _tidy(self, node: PrefixNode) -> None:
        """After pages went: prune bare nodes, and offer what became a leaf."""
        if is_live(node):
            node = node.space.prune(node)
            if self.disk is not None:
                self.disk.add_candidate(node)
            while not node.in_memory and node.above is not None:
                node = node.above
            self.add_candidate(node)

    # ---- making room ------------------------------------------------------------------------

    def _make_room(self, space: PrefixTree, slot_bytes: int, slots: int) -> bool:
        """Evict as much of a leaf as gives so many slots, or take a colder extent of another class.

        False when there is none, or none yet: an extent of many pages is drained in turns.
        """
        while (node := self.eviction.victim(space, slot_bytes)) is not None:
            # Of a space with limits each page is asked for: the next one may be reserved.
            most = 1 if self.quotas.is_limited(node.space) else slots
            pages = -(-most // slots_of_a_page(node, slot_bytes))
            verdict = self._verdict(node, pages)
            if verdict is Verdict.FULL:
                return False
            if verdict is Verdict.EVICT:
                break
        if not self.eviction.spared_since_ns and self._take_extent(space, slot_bytes, node):
            if node is not None:
                self.add_candidate(node)
            return self.draining.now is None
        if node is None:
            return False
        self._evict(node, pages)
        return True

    def _spill(self, head: PrefixNode, slot_bytes: int) -> bool:
        """Take the memory of ``head`` or a page before it that is on disk, the first one first.

        A prompt larger than memory has no leaf to give but itself.
        """
        if self.disk is None:
            return False
        heads: list[PrefixNode] = []
        at, unwritten = head, 0
        at.explode()
        for _ in range(SPILL_LOOKS):
            before = at.parent
            if before is None:
                break
            if at.memory:
                heads.append(at)
            at = before
        for page in reversed(heads):
            if slot_bytes not in classes(page) or not self.eviction.releasable(page):
                continue
            unwritten += bool(page.memory & ~page.on_disk)
            if unwritten > SPILL_WRITES:
                return False
            if self.disk.before_eviction(page) is not Verdict.EVICT:
                continue  # it is being written now, and its memory is free when that has ended
            if not page.memory & ~page.on_disk:
                self._evict(page)
                return True
            return False  # not worth writing, and what follows it must not lose it
        return False

    def _verdict(self, node: PrefixNode, pages: int = 1) -> Verdict:
        """Whether a victim may go now; one that has to wait is offered again when it may."""
        verdict = Verdict.EVICT
        if self.disk is not None:
            verdict = self.disk.before_eviction(node, pages)
        if verdict is Verdict.FULL:
            self.add_candidate(node)
        return verdict

    def _evict(self, node: PrefixNode, pages: int = 1) -> None:
        """Take the last ``pages`` of a node out of memory, those on disk stay in the index."""
        if not node.on_disk and not node.below:
            self._evict_last(node, min(pages, node.count))
            return
        if pages < node.count:
            node.split(node.count - pages)  # the last ones keep the node
        for shard in list(node.slot_columns):
            if node.on_disk >> shard & 1:
                self._release_memory(node, shard)
            else:
                self._remove(node, shard, "evicted")
        if node.above is not None:
            node.above.access = max(node.above.access, node.access)
        self._tidy(node)

    def _evict_last(self, node: PrefixNode, pages: int) -> None:
        """Take the last pages of a leaf out of memory, and so out of the index."""
        first, count, cause = node.count - pages, node.count, "evicted"
        keys = node.key_list(first)
        keys.reverse()
        for shard in list(node.slot_columns):
            slots = node.forget_all(shard) if not first else node.slots_of(shard)[first:]
            self._owners.remove(slots)
            self.actions.append(Removed(node.space, shard, keys, cause))
            self.counts[f"removed_{cause}"] += pages
            self.story.tell_last(f"removed {cause}", node, shard, pages)
            for key in keys:
                self.ghosts.add(node, shard, cause, self.now_ns, key)
            self.slots.release(slots)
        if pages < count:
            node.shorten(pages)
        self._tidy(node)

    def release_memory(self, node: PrefixNode) -> bool:
        """Let go of a node's memory if all its pages are on disk and nothing needs it there."""
        if node.memory & ~node.on_disk or not self.eviction.evictable(node):
            return False
        self._evict(node, node.count)
        return True

    def _release_memory(self, node: PrefixNode, shard: int) -> None:
        self.emit(TierRemoved, node, shard, "host")  # while its tokens are known
        slots = self._forget(node, shard)
        self.counts["evicted_to_disk"] += len(slots)
        self.slots.release(slots)

    def _take_extent(self, space: PrefixTree, slot_bytes: int, own: PrefixNode | None) -> bool:
        """Whether an extent of another class, colder than ``own``, is empty or is being drained."""
        draining, left = self.draining, EMPTY_MAX
        draining.tick = self.tick  # what this request used stays
        while left > 0:
            if draining.now is None and not draining.begin(space, slot_bytes, own, self.now_ns):
                return False
            if not draining.serves(space, slot_bytes):
                return False
            moved = self.counts["moved_extents"]
            left -= max(LOOKS, self.drain(left))
            if draining.now is not None or self.counts["moved_extents"] > moved:
                return True
        return False

    def drain(self, steps: int) -> int:
        """Take pages out of the extent that changes its class, in at most ``steps`` steps.

        Returns:
            the steps that were taken; fewer when the extent is empty, or left to its class.
        """
        if self.draining.now is None:
            return 0
        taken, self.draining.tick = 0, self.tick
        for page in self.draining.pages(steps):
            taken += 1
            if page is not None:
                self._leave_memory(*page)
        if taken < steps:
            self.counts["moved_extents"] += self.draining.end(self.now_ns)
        return taken

    def _leave_memory(self, node: PrefixNode, shard: int) -> None:
        """Take a page out of memory that nobody needs, and out of the index if it is nowhere."""
        if node.on_disk & node.memory & 1 << shard:
            self._release_memory(node, shard)
            self._tidy(node)
        else:
            self.drop(node, shard, "evicted")

    def _look_ahead(self, space: PrefixTree, slot_bytes: int) -> None:
        """Begin to drain the next extent for a class that has used half of the one it got last."""
        if self.draining.is_half_used(space, slot_bytes):
            self.eviction.now_ns, self.draining.tick = self.now_ns, self.tick
            own = self.eviction.victim(space, slot_bytes)
            self.draining.begin(space, slot_bytes, own, self.now_ns)
            if own is not None:
                self.add_candidate(own)
            self.eviction.end_choice()

    def vacate(self, position: int, pages_max: int) -> bool:
        """Take READY pages out of the memory of an extent, used or not; whether all are out."""
        left = pages_max
        for slot in self.slots.slots_in_use(position):
            owner = self._owners.get(slot)
            if owner is None:
                continue
            shard = next(at for at, mine in owner.slots.items() if mine == slot)
            if not owner.ready >> shard & 1:
                continue  # it leaves once its writer is done
            if not left:
                return False
            left -= 1
            if owner.on_disk >> shard & 1:
                self._release_memory(owner, shard)
                self._tidy(owner)
            else:
                self.drop(owner, shard, "retired")
        return True

    def _needs_space(self, space: PrefixTree) -> bool:
        """Whether something stands under the number of an empty space."""
        if self.quotas.is_limited(space) or space.host_bytes or space.disk_bytes:
            return True
        return self.disk is not None and self.disk.needs_space(space)

    def _use_last(self, node: PrefixNode, packed: bytes, pages: int) -> None:
        """The prefix that ends with the last of so many keys was used; ``node`` has that page."""
        if node.count > 1:
            key = PrefixKey(packed[(pages - 1) * KEY_BYTES : pages * KEY_BYTES])
            node = node.space.node_of(key)
        self._use(node)

    def _use(self, node: PrefixNode) -> None:
        node.access, node.used_ns = self.tick, self.now_ns
        node.hits += 1
