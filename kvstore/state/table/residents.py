"""Where each page is: in memory, on disk, in transit, or dropped. Pure.

A page that is evicted from memory stays on disk if it is there; otherwise it is dropped from the
index with its descendants. :mod:`kvstore.state.table.room` chooses which pages are evicted. Engines
are unknown here; :mod:`kvstore.state.table.pages` knows them.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.choice.eviction import Eviction
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.choice.policy import classes, enter, leave
from kvstore.state.choice.quotas import Pins
from kvstore.state.disk.graves import BURIED
from kvstore.state.disk.jobs import EVICT, FULL, Verdict
from kvstore.state.disk.pages import DiskPages, no_disk
from kvstore.state.metering import Meter
from kvstore.state.table.draining import Draining
from kvstore.state.table.orphans import (
    Orphans,
    depart,
    few_records,
    leave_hole,
    subtree,
)
from kvstore.state.table.runs import Owners, missing_pages, nodes_of
from kvstore.state.tree.actions import (
    Abandoned,
    Action,
    Removed,
    TierRemoved,
    TierStored,
)
from kvstore.state.tree.children import first_page
from kvstore.state.tree.columns import last_slots
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetches, Spaces
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.state.tree.story import Moment, Story

_EVICTED: Final = "removed_evicted"
DROP_AT_ONCE = 128
"""Maximum descendants that are dropped together with a page; if there are more, all are dropped in
later turns."""


class Residents:
    """All pages of one node.

    Args:
        slots: the slots of the host tier.
        policy: name of the eviction policy.

    Attributes:
        actions: pages that became READY or were dropped, in order.
        moment: the time of the message that is being processed.
        orphans: descendants of dropped pages that are still in the index.
        story: the last events of pages.
        draining: the extent that is being emptied for pages of another class.
        pins: of operators.
        pinned_changed: pinned nodes that lost or gained pages, until that is charged.
    """

    def __init__(self, slots: SlotTable, policy: str = "lru") -> None:
        self.slots = slots
        self.spaces = Spaces(slots.extent_bytes)
        self.actions: list[Action] = []
        #: What was counted, by name; 0 for all other names.
        self.counts: dict[str, int] = defaultdict(int)
        self.meter = Meter()
        self.ghosts = Ghosts()
        self.moment = Moment()
        self.story = Story(self.moment)
        #: Who waits for pages to come to memory.
        self.fetches = Fetches(slots, self.moment)
        self.eviction = Eviction(slots, policy)
        self.quotas = self.eviction.quotas
        self.orphans: deque[Orphans] = deque()
        self.owners = Owners(slots)
        self.draining = Draining(slots, self.owners, self.quotas)
        self.pins = Pins()
        self.pinned_changed: list[PrefixNode] = []
        #: Another one is set here when there is an SSD tier.
        self.disk: DiskPages = no_disk(self)

    @property
    def unfinished(self) -> bool:
        """Whether work is left for later turns: :meth:`drop_orphans`, :meth:`drain`, writes."""
        if self.orphans or self.draining.now is not None or self.draining.returning:
            return True
        more = self.pins.ending or self.eviction.behind or self.disk.unfinished
        return bool(more or (self.fetches.beginning and self.disk.loads.may_go_on))

    def ready_run(self, space: PrefixTree, shard: int, packed: bytes) -> list[PrefixNode]:
        """The leading run of READY pages of one shard, in any tier, as single pages."""
        run: list[PrefixNode] = []
        for at in range(0, len(packed), KEY_BYTES):
            node = space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            if node is None or not node.ready >> shard & 1:
                break
            run.append(node)
        return run

    def on_disk(self, space: PrefixTree, shards: list[int], packed: bytes, pages: int) -> int:
        """How many of the first ``pages`` pages, a hit, must be loaded for some shard."""
        return missing_pages(space, shards, packed, pages) if space.disk_bytes else 0

    def owner(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None if the slot has no page in the trees."""
        return self.owners.run(slot)

    # ---- memory -----------------------------------------------------------------------------

    def count_stored(self, pages: int, page_bytes: int, peer: str) -> None:
        """Count pages of one shard that became READY; ``peer``: their source, empty = a client."""
        if peer:
            self.counts["peer_fetched_pages"] += pages
            self.counts["peer_fetched_bytes"] += pages * page_bytes
        else:
            self.counts["stored_pages"] += pages
            self.counts["stored_bytes"] += pages * page_bytes

    def emit(
        self, kind: type[TierStored | TierRemoved], node: PrefixNode, shard: int, tier: Tier,
        tokens: bytes = b"",
    ) -> None:  # fmt: skip
        """Report that pages were added to a tier, or removed from one tier and kept in another.

        ``tokens``: those of their records, for pages that are not in memory.
        """
        assert node.above is not None, node
        known, keys = node.tokens or tokens, node.key_list()
        self.actions.append(kind(node.space, shard, keys, node.above.key, tier, known))
        self.story.tell(f"{kind.__name__} {tier}", node, shard, node.count)

    def add_candidate(self, node: PrefixNode) -> None:
        """The node may be evictable now."""
        if not node.children_in_memory:  # else it is not, and many are asked of at once
            self.eviction.add_candidate(node)
        if self.disk.exists:
            self.disk.limits.add_candidate(node)

    def put_off(self, node: PrefixNode, verdict: Verdict) -> None:
        """A victim cannot go now: it is offered again at once, or when its write has ended.

        If only pages before it are being written, it is offered in the next turn: others may go
        meanwhile.
        """
        if verdict is FULL:
            self.add_candidate(node)
        elif self.eviction.evictable(node):
            for slot_bytes in classes(node):
                if enter(node, slot_bytes):
                    self.draining.returning.append((node, slot_bytes))
        assert verdict is not EVICT, node

    def offer_more(self, most: int) -> int:
        """Offer up to ``most`` pages that no queue has: how many.

        These are leaves that were skipped while an extent was emptied or pages before them were
        written, and pages of pins that have ended.
        """
        returning = self.draining.returning
        for _ in range(offered := min(most, len(returning))):
            node, slot_bytes = returning.pop()
            leave(node, slot_bytes)
            if is_live(node):
                self.eviction.add_candidate(node)
        if self.pins.ending:
            gone = self.pins.let_go(most - offered)
            self.unprotected(gone)
            offered += len(gone)
        return offered

    def unprotected(self, nodes: Sequence[PrefixNode]) -> None:
        """Pins of these nodes ended: the nodes may be evictable, their segments reclaimable."""
        for node in nodes:
            if is_live(node):
                self.add_candidate(node)
        if nodes:
            self.disk.unpinned()

    def unpin(self, slots: list[Slot]) -> None:
        """Unpin the pages in these slots.

        Either all slots of a node are given or none; some pages may have been dropped meanwhile.
        """
        self.slots.unpin(slots)
        for node in nodes_of(self.owners, slots):
            self.add_candidate(node)

    # ---- leaving ----------------------------------------------------------------------------

    def drop(self, node: PrefixNode, shard: int, cause: str) -> int:
        """Drop the READY pages of a node, and their descendants; how many were looked at."""
        if not node.ready >> shard & 1:
            return 0
        in_memory, above, self.ghosts.head = node.in_memory, node.above, node.key
        looked = node.count + self.drop_below(node, shard, cause)
        self.ghosts.head = PrefixKey(b"")
        self._drop_ready(node, shard, cause)
        if node.above is not above and node.above is not None:  # its first page is a hole now
            self._drop_ready(node.above, shard, cause)
        assert not node.present >> shard & 1, node
        self.tidy(node, left_memory=in_memory)
        return looked

    def drop_below(self, node: PrefixNode, shard: int, cause: str, looked: int = 0) -> int:
        """Drop the descendants of ``node``, which no lookup can reach without it.

        If there are many, :meth:`drop_orphans` drops them over several turns. ``looked``: pages
        that this turn has looked at before.

        Returns:
            how many descendants were looked at.
        """
        assert is_live(node), node
        if node.space.shards[shard].window_pages:
            return 0
        most = max(1, DROP_AT_ONCE - looked)
        found = subtree(node, most=most)
        if len(found) > most:
            self.orphans.append(leave_hole(node, shard, cause))
            self.story.tell("hole", self.orphans[-1].top, shard)
        else:
            for below in reversed(found[1:]):
                self._drop_orphan(below, shard, cause)
        return len(found) - 1

    def _drop_orphan(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Drop a leaf, whatever its state."""
        in_memory = node.in_memory
        if node.ready >> shard & 1:
            self._drop_ready(node, shard, cause)
        elif node.present >> shard & 1:
            self.drop_writing(node, shard)  # its writer will find it DROPPED
        assert not node.present >> shard & 1, node
        self.tidy(node, left_memory=in_memory)

    def drop_read(self, held: Sequence[PrefixNode], slots: set[Slot]) -> None:
        """Drop those of the pages that were read once, of a lease of these slots.

        If a dropped page has many descendants, they are dropped in later turns.
        """
        leaving: set[tuple[PrefixNode, int]] = set()
        for node in held:
            for shard, slot in node.slots.items() if node.read_once and is_live(node) else ():
                if not node.read_once >> shard & 1 or slot not in slots:
                    continue
                if (node.above, shard) not in leaving:
                    self.drop(node, shard, "read_once")
                if is_live(node) and (
                    (node.above, shard) in leaving or node.space.holes.get(node, 0) >> shard & 1
                ):
                    leaving.add((node, shard))

    def drop_orphans(self, steps: int) -> None:
        """Drop descendants of dropped pages, in ``steps`` steps; see :attr:`orphans`."""
        left = steps
        while self.orphans and left > 0:
            top, shard, cause, walk, records = self.orphans[0]
            if records:
                left = self._lose_records(walk, shard, cause, left)
            else:
                self.ghosts.head = top.key
                for node in islice(walk, left):
                    left -= 1
                    if node is not None:
                        self._drop_orphan(node, shard, cause)
                self.ghosts.head = PrefixKey(b"")
            if left > 0:  # the walk has ended
                self.orphans.popleft()
                if records:
                    top.space.departed(top, shard)
                    self.disk.applied()  # a segment may wait for this record
                else:
                    top.space.fill_hole(top, shard)
                self.tidy(top)

    # ---- records ----------------------------------------------------------------------------

    def lose_records(self, node: PrefixNode, shard: int, cause: str) -> bool:
        """Give up the records of a node and of its descendants; pages not in memory are dropped.

        If they are many, :meth:`drop_orphans` gives them up over several turns, the last pages
        first, so that after a power cut, too, all that is on disk can be reached.

        Returns:
            whether they are all given up now.
        """
        space, few = node.space, [node]
        if not space.shards[shard].window_pages:
            found = few_records(node, shard, DROP_AT_ONCE)
            if found is None:
                self._depart(first_page(node), shard, cause)
                return False
            few = found
        for one in reversed(few):
            self._lose_record(one, shard, cause)
        assert not node.on_disk >> shard & 1, node
        return True

    def _depart(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Give up the records of a page and of its descendants in later turns."""
        if not node.space.departing.get(node, 0) >> shard & 1:
            self.orphans.append(depart(node, shard, cause))
            self.story.tell("departing", node, shard)

    def _lose_records(
        self, walk: Iterator[PrefixNode | None], shard: int, cause: str, most: int
    ) -> int:
        """Give up records of a walk, up to about ``most`` pages; returns how many are left of it.

        More than 0: the walk has ended.
        """
        left = most
        for node in walk:
            left -= 1 if node is None else node.count
            if node is not None:
                self._lose_record(node, shard, cause)
            if left <= 0:
                break
        return left

    def _lose_record(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Give up the records of a node; if its pages are not in memory, drop them."""
        if node.on_disk & node.memory & 1 << shard:
            self.disk.limits.forget(node, shard)
            self.emit(TierRemoved, node, shard, "ssd")
        elif node.on_disk >> shard & 1:
            self.drop(node, shard, cause)
        assert not node.on_disk >> shard & 1, node

    def _drop_ready(self, node: PrefixNode, shard: int, cause: str) -> None:
        """Remove the READY pages of a node from every tier."""
        assert node.ready >> shard & 1, node
        if node.pins:
            self.pinned_changed.append(node)
        tiers = node.tiers(shard)
        slots = self._forget(node, shard) if "host" in tiers else []
        self.disk.limits.forget(node, shard)
        if cause in BURIED:
            self.disk.graves.bury(node, shard)
        keys = node.key_list()[::-1]
        self.actions.append(Removed(node.space, shard, keys, cause, tiers))
        self.counts[f"removed_{cause}"] += len(keys)
        self.story.tell(f"removed {cause}", node, shard, len(keys))
        self.ghosts.add(node, shard, cause, self.moment.now_ns, keys)
        self.slots.release(slots)

    def drop_writing(self, node: PrefixNode, shard: int) -> None:
        """Drop a page that is being written; its writer will find it DROPPED."""
        assert node.count == 1, ("its writer is told of one page", node)
        assert node.memory & ~node.ready & 1 << shard, node
        self._forget(node, shard)
        self.actions.append(Abandoned(node.space, [node.key]))
        self.story.tell("abandoned", node, shard)

    def _forget(self, node: PrefixNode, shard: int) -> list[Slot]:
        slots = node.forget_all(shard)
        assert len(slots) == node.count, node
        self.owners.remove(slots)
        return slots

    def tidy(self, node: PrefixNode, *, left_memory: bool = True) -> None:
        """After a removal: prune empty nodes, and add new leaves to the eviction queues.

        ``left_memory``: pages left memory; otherwise the leaves there are the same as before.
        """
        if is_live(node):
            node = node.space.prune(node)
            self.disk.limits.add_candidate(node)
            while left_memory and not node.in_memory and node.above is not None:
                node = node.above
            self.add_candidate(node)

    def evict(self, node: PrefixNode, pages: int = 1) -> None:
        """Evict the last ``pages`` of a node from memory; those on disk stay in the index."""
        assert not node.memory & ~node.ready, ("a page of it is being written", node)
        if not node.on_disk and not node.below:
            self._evict_last(node, min(pages, node.count))
            return
        if pages < node.count:
            node.split(node.count - pages)  # the last ones keep the node
        for shard in list(node.slot_columns):
            if node.on_disk >> shard & 1:
                self._release_memory(node, shard)
            else:
                self._drop_ready(node, shard, "evicted")
        assert not node.memory, node
        if node.above is not None:
            node.above.access = max(node.above.access, node.access)
        self.tidy(node)

    def _evict_last(self, node: PrefixNode, pages: int) -> None:
        """Evict the last pages of a leaf from memory, and drop them."""
        first, count = node.count - pages, node.count
        keys = node.key_list(first)
        keys.reverse()
        for shard in list(node.slot_columns):
            column = node.slot_columns[shard]
            slots = last_slots(column, pages) if first else node.forget_all(shard)
            self.owners.remove(slots)
            self.actions.append(Removed(node.space, shard, keys, "evicted"))
            self.counts[_EVICTED] += pages
            self.story.tell_last("removed evicted", node, shard, pages)
            self.ghosts.add(node, shard, "evicted", self.moment.now_ns, keys)
            self.slots.release(slots)
        if pages < count:
            node.shorten(keys)
        self.tidy(node)

    def release_memory(self, node: PrefixNode) -> bool:
        """Free a node's memory if all its pages are on disk and nothing needs them in memory."""
        if node.memory & ~node.on_disk or not self.eviction.evictable(node):
            return False
        self.evict(node, node.count)
        return True

    def _release_memory(self, node: PrefixNode, shard: int) -> None:
        assert node.memory & node.on_disk & 1 << shard, ("it would be in no tier", node)
        self.emit(TierRemoved, node, shard, "host")  # while its tokens are known
        slots = self._forget(node, shard)
        self.counts["evicted_to_disk"] += len(slots)
        self.slots.release(slots)

    def leave_memory(self, node: PrefixNode, shard: int) -> None:
        """Evict a page that nothing needs in memory; drop it if it is in no other tier."""
        if node.on_disk & node.memory & 1 << shard:
            self._release_memory(node, shard)
            self.tidy(node)
        else:
            self.drop(node, shard, "evicted")
        assert not node.memory >> shard & 1, node

    def vacate(self, position: int, pages_max: int) -> int:
        """Evict READY pages of an extent, even used ones, until ``pages_max`` were looked at.

        Returns:
            how many were, with those that left with them; fewer: all are evicted.
        """
        assert self.slots.extents[position].retiring, "new pages would come"
        looked = 0
        for slot in self.slots.slots_in_use(position):
            owner = self.owners.get(slot)
            if owner is None:
                continue
            shard = next(at for at, mine in owner.slots.items() if mine == slot)
            if not owner.ready >> shard & 1:
                continue  # it leaves once its writer is done
            if looked >= pages_max:
                break
            if owner.on_disk >> shard & 1:
                looked += 1
                self._release_memory(owner, shard)
                self.tidy(owner)
            else:
                looked += self.drop(owner, shard, "retired")
        return looked

    def close_idle_spaces(self) -> None:
        """If there are nearly too many spaces or shards, close spaces that nothing refers to."""
        idle = [space for space in self.spaces.idle() if not self.needs_space(space)]
        for space in idle:
            self.spaces.close(space)
            self.counts["closed_spaces"] += 1
        if idle:
            self.eviction.close_queues({one.identity.tenant for one in self.spaces})
        self.eviction.forget()

    def needs_space(self, space: PrefixTree) -> bool:
        """Whether pages, limits or jobs still refer to this empty space."""
        if space.number in self.quotas.limited or space.host_bytes or space.disk_bytes:
            return True
        return self.disk.needs_space(space)

    def use_last(self, node: PrefixNode, packed: bytes, pages: int) -> None:
        """The prefix that ends with the last of ``pages`` keys was used; ``node`` has that page."""
        if node.count > 1:
            key = PrefixKey(packed[(pages - 1) * KEY_BYTES : pages * KEY_BYTES])
            node = node.space.node_of(key)
        self.use(node)

    def use(self, node: PrefixNode) -> None:
        """The prefix that ends at this node was used."""
        node.access, node.used_ns = self.moment.tick, self.moment.now_ns
        node.hits += 1
