"""Pages: the state a node decides with. Batches in, results and actions out; pure.

This is where slots, prefix trees and sessions meet. What callers must do with ``actions`` (publish
events, replace memory, wake waiters) is the node's business; nothing here does I/O or reads a
clock. Every list of keys is a run of one chain, packed as 32 bytes each.
"""

import heapq
from collections import Counter
from itertools import count

from kvstore.errors import CapacityError, InvalidArgument
from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.match import longest_match
from kvstore.state.outcomes import Abandoned, Action, PageStatus, Removed, Stored
from kvstore.state.policy import EvictionPolicy, new_policy
from kvstore.state.sessions import Lease, Process, Put
from kvstore.state.slots import Slot, SlotState, SlotTable
from kvstore.state.spaces import Spaces
from kvstore.state.tree import Node, Space, is_live


class PageTable:
    """All pages of one node, and who holds them.

    Args:
        slots: the slots of the host tier.
        policy: what to evict first, one of :data:`kvstore.state.policy.POLICIES`.
    """

    def __init__(self, slots: SlotTable, policy: str = "lru") -> None:
        """Start empty."""
        self._policy_name = policy
        self.slots = slots
        self.spaces = Spaces(slots.extent_bytes)
        self.actions: list[Action] = []
        self.counts: Counter[str] = Counter()
        self._queues: dict[tuple[str, int], EvictionPolicy] = {}
        #: All and only the slots of pages in the trees.
        self._owners: dict[Slot, Node] = {}
        self._lease_deadlines: list[tuple[int, int, Process, int, Lease]] = []
        self._page_deadlines: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._sequence = count()

    # ---- reading ----------------------------------------------------------------------------

    def lookup(self, space: Space, shards: list[int], packed: bytes) -> tuple[int, int]:
        """The longest prefix of which every needed shard is READY.

        Returns:
            (pages, pending): pages of the hit; and how many more would be a hit once everything
            that is being written now is READY.
        """
        self._tick += 1
        match = longest_match(space, shards, packed)
        if match.deepest is not None:
            match.deepest.access = self._tick
        self.counts["lookup_pages"] += len(packed) // KEY_BYTES
        self.counts["hit_pages"] += match.pages
        return match.pages, match.pending

    def acquire(
        self, process: Process, lease_id: int, space: Space, shard: int, packed: bytes,
        deadline_ns: int,
    ) -> Lease:  # fmt: skip
        """Pin the leading run of READY pages of one shard under a lease.

        Raises:
            CapacityError: the session's quota is used up; nothing was pinned.
        """
        if lease_id in process.leases:
            raise InvalidArgument("lease", f"{lease_id} is in use")
        self._tick += 1
        pages: list[tuple[Node, int, Slot]] = []
        bit = 1 << shard
        for at in range(0, len(packed), KEY_BYTES):
            node = space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            if node is None or not node.ready & bit:
                break
            pages.append((node, shard, node.slots[shard]))
        lease = Lease(pages, len(pages) * space.shards[shard].slot_bytes, deadline_ns)
        if not process.session.admits(lease.size_bytes):
            raise CapacityError(
                f"the session's quota of {process.session.quota_bytes} bytes is used up"
            )
        if pages:
            self.slots.pin(lease.slots, self._tick)
            self._use(pages[-1][0], shard)
            self._hold(process, lease.size_bytes)
            process.leases[lease_id] = lease
            entry = (deadline_ns, next(self._sequence), process, lease_id, lease)
            heapq.heappush(self._lease_deadlines, entry)
        return lease

    def release(self, process: Process, lease_id: int) -> None:
        """The reader is done; unknown leases are ignored (the answer to them may be late)."""
        lease = process.leases.pop(lease_id, None)
        if lease is None:
            return
        self._hold(process, -lease.size_bytes)
        if lease.expired:
            self.slots.unhold(lease.slots)
        else:
            self.slots.unpin(lease.slots)
        for node, shard, slot in lease.pages:
            if node.read_once and self._owns(node, shard, slot):
                self.drop(node, shard, "read_once")
            else:
                self._offer(node)
        lease.pages.clear()  # its deadline may be far away, and must not keep the nodes till then

    # ---- writing ----------------------------------------------------------------------------

    def begin_put(
        self, process: Process, put_id: int, space: Space, shard: int, packed: bytes,
        parent: PrefixKey, tokens: bytes = b"",
    ) -> tuple[list[PageStatus], Put]:  # fmt: skip
        """Grant a slot for every page that is neither stored nor being written.

        Pages before the first NO_ROOM or NO_PARENT are decided; all after it get the same answer.
        """
        if put_id in process.puts:
            raise InvalidArgument("put", f"{put_id} is in use")
        self._tick += 1
        keys = [PrefixKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
        if parent and parent in keys:
            raise InvalidArgument("parent", "is among the keys that are to follow it")
        put = Put([], shard, 0)
        statuses: list[PageStatus] = []
        told: list[bytes] = []
        token_bytes = len(tokens) // len(keys) if keys else 0
        for index, key in enumerate(keys):
            status = self._grant(process, put, space, key, parent)
            if status in (PageStatus.NO_ROOM, PageStatus.NO_PARENT):
                statuses += [status] * (len(keys) - index)
                break
            if status is PageStatus.GRANTED:
                told.append(tokens[index * token_bytes : (index + 1) * token_bytes])
            statuses.append(status)
            parent = key
        if put.pages:
            put.tokens = b"".join(told)
            process.puts[put_id] = put
        return statuses, put

    def commit_put(
        self, process: Process, put_id: int, digests: bytes, expires_ns: int, *, read_once: bool
    ) -> list[PageStatus]:
        """The bytes are there: make the granted pages READY.

        Raises:
            InvalidArgument: no such put, or not one digest a page; the put is left as it was.
        """
        put = process.puts.get(put_id)
        if put is None:
            raise InvalidArgument("put", f"{put_id} is not open")
        size = len(digests) // len(put.pages)
        if size * len(put.pages) != len(digests) or size != 16:
            raise InvalidArgument("digests", f"{len(digests)} bytes for {len(put.pages)} pages")
        del process.puts[put_id]
        self._hold(process, -put.size_bytes)
        self._tick += 1
        statuses: list[PageStatus] = []
        stored: list[Node] = []
        for index, (node, slot) in enumerate(put.pages):
            if not self._owns(node, put.shard, slot):
                self.slots.abort([slot])
                statuses.append(PageStatus.DROPPED)
                continue
            self.slots.commit([slot], self._tick)
            node.commit(put.shard, digests[index * size : (index + 1) * size])
            node.access = self._tick
            self._queue(node.space.identity.tenant, node.space.shards[put.shard].slot_bytes).stored(
                node, self._tick
            )
            node.read_once = read_once
            if expires_ns:
                node.expires_ns = expires_ns
                heapq.heappush(self._page_deadlines, (expires_ns, next(self._sequence), node))
            stored.append(node)
            statuses.append(PageStatus.STORED)
            self._offer(node)
        self._announce(put, stored)
        self.counts["stored_pages"] += len(stored)
        return statuses

    def abort_put(self, process: Process, put_id: int, *, writing: bool = False) -> None:
        """Take the pages of an open put back.

        While its writer may still be ``writing``, the slots go to LIMBO until it has settled.
        """
        put = process.puts.get(put_id)
        if put is None or put.lost:
            return
        for node, slot in reversed(put.pages):
            if self._owns(node, put.shard, slot):
                self._abandon(node, put.shard)
                self._drop_below(node, put.shard, "head_lost")
                self._tidy(node)
        if writing:
            self.slots.lose(put.slots)
            put.lost = True
            self.counts["lost_puts"] += 1
        else:
            self.slots.abort(put.slots)
            self._end_put(process, put_id)
        self.counts["aborted_puts"] += 1

    # ---- ends -------------------------------------------------------------------------------

    def lose(self, process: Process) -> None:
        """The connection broke but the process lives: what it writes goes to LIMBO."""
        process.lost = True
        for put_id in list(process.puts):
            self.abort_put(process, put_id, writing=True)

    def end(self, process: Process) -> None:
        """The process is known to touch no byte of this tier any more: free all it held."""
        for lease_id in list(process.leases):
            self.release(process, lease_id)
        for put_id, put in list(process.puts.items()):
            if put.lost:
                self.slots.unhold(put.slots)
                self._end_put(process, put_id)
            else:
                self.abort_put(process, put_id)
        assert process.idle

    def drop(self, node: Node, shard: int, cause: str) -> None:
        """Take one READY page out of the index, and with it what only it made reachable."""
        if not node.ready >> shard & 1:
            return
        self._drop_below(node, shard, cause)
        self._remove(node, shard, cause)
        self._tidy(node)

    def expire(self, now_ns: int) -> None:
        """Apply every deadline up to ``now_ns``."""
        leases, pages = self._lease_deadlines, self._page_deadlines
        while leases and leases[0][0] <= now_ns:
            _, _, process, lease_id, lease = heapq.heappop(leases)
            if process.leases.get(lease_id) is lease and not lease.expired:
                lease.expired = True
                self.slots.pin_to_hold(lease.slots)
                self.counts["expired_leases"] += 1
                for node, _, _ in lease.pages:
                    self._offer(node)
        while pages and pages[0][0] <= now_ns:
            _, _, node = heapq.heappop(pages)
            if is_live(node) and 0 < node.expires_ns <= now_ns:
                for shard in list(node.digests):
                    self.drop(node, shard, "expired")

    def next_deadline_ns(self) -> int:
        """The earliest deadline that :meth:`expire` would apply; 0 = none."""
        queues = (self._lease_deadlines, self._page_deadlines)
        return min((queue[0][0] for queue in queues if queue), default=0)

    def check(self) -> None:
        """Assert every invariant that spans slots, trees and sessions."""
        self.slots.check()
        owned: dict[Slot, Node] = {}
        for space in self.spaces:
            space.check()
            for node in space.nodes.values():
                for shard, slot in node.slots.items():
                    owned[slot] = node
                    ready = self.slots.state(slot) == SlotState.READY
                    assert ready == bool(node.ready >> shard & 1)
                    needs_head = not space.shards[shard].window_pages
                    head = node.parent
                    assert head is space.root or not needs_head or shard in head.slots  # type: ignore[union-attr]
                if self._evictable(node):
                    assert _classes(node) <= set(node.queued), "a leaf is in all its queues"
        assert owned == self._owners

    # ---- inside -----------------------------------------------------------------------------

    def _announce(self, put: Put, stored: list[Node]) -> None:
        """Add one Stored action for each run of ``stored`` in which page follows page."""
        size = len(put.tokens) // len(put.pages)
        tokens = {
            id(node): put.tokens[at * size : (at + 1) * size]
            for at, (node, _) in enumerate(put.pages)
        }
        run: list[Node] = []
        for node in [*stored, None]:
            if run and (node is None or node.parent is not run[-1]):
                assert run[0].parent is not None
                keys = [member.key for member in run]
                told = b"".join(tokens[id(member)] for member in run)
                self.actions.append(Stored(run[0].space, put.shard, keys, run[0].parent.key, told))
                run = []
            if node is not None:
                run.append(node)

    def _grant(
        self, process: Process, put: Put, space: Space, key: PrefixKey, parent: PrefixKey
    ) -> PageStatus:
        shard = put.shard
        known = space.nodes.get(key)
        if known is not None and shard in known.slots:
            known.access = self._tick
            return PageStatus.EXISTS if known.ready >> shard & 1 else PageStatus.PENDING
        of = space.shards[shard]
        if parent and not of.window_pages:
            head = space.nodes.get(parent)
            if head is None or shard not in head.slots:
                return PageStatus.NO_PARENT
        if not process.session.admits(of.slot_bytes):
            return PageStatus.NO_ROOM
        node = space.node(key, parent)
        # In the tree before room is made, so that its ancestors are no leaves meanwhile.
        node.begin(shard, Slot(-1))
        slot = self._allocate(space.identity.tenant, of.slot_bytes)
        if slot is None:
            node.forget(shard)
            self._tidy(node)
            return PageStatus.NO_ROOM
        node.slots[shard] = slot
        self._owners[slot] = node
        put.pages.append((node, slot))
        put.size_bytes += of.slot_bytes
        self._hold(process, of.slot_bytes)
        return PageStatus.GRANTED

    def _allocate(self, domain: str, slot_bytes: int) -> Slot | None:
        while not (taken := self.slots.allocate(1, domain, slot_bytes)):
            if not self._make_room(domain, slot_bytes):
                return None
        return taken[0]

    def _make_room(self, domain: str, slot_bytes: int) -> bool:
        """Evict the leaf that the class's policy names, or a colder extent of another class."""
        queue = self._queue(domain, slot_bytes)
        while (node := queue.pop(self._tick)) is not None and not (
            slot_bytes in _classes(node) and self._evictable(node)
        ):
            pass
        age = node.access if node is not None else self._tick
        position = self.slots.colder_extent(domain, slot_bytes, age)
        while position is not None:
            if self._empty_extent(position):
                if node is not None:
                    queue.offer(node, self._tick)
                return True
            self.slots.extents[position].used_at = self._tick
            position = self.slots.colder_extent(domain, slot_bytes, age)
        if node is None:
            return False
        for shard in list(node.slots):
            self._remove(node, shard, "evicted")
        self._tidy(node)
        return True

    def _empty_extent(self, position: int) -> bool:
        """Evict every page of an extent and what hangs below them; False if something is in use."""
        slots = self.slots.slots_in_use(position)
        doomed: list[Node] = []
        for slot in slots:
            owner = self._owners.get(slot)
            if owner is None:
                return False  # LIMBO
            doomed.append(owner)
        for owner in doomed:
            for node in _subtree(owner):
                for shard, slot in node.slots.items():
                    if not node.ready >> shard & 1 or self.slots.in_use(slot):
                        return False
        for owner in doomed:
            if is_live(owner):
                for shard in list(owner.digests):
                    self.drop(owner, shard, "evicted")
        return not self.slots.slots_in_use(position)

    def _drop_below(self, node: Node, shard: int, cause: str) -> None:
        """Take out what lies below ``node``: without their head nobody reaches those pages."""
        if node.space.shards[shard].window_pages:
            return
        for below in reversed(_subtree(node)[1:]):
            if below.ready >> shard & 1:
                self._remove(below, shard, cause)
            elif shard in below.slots:
                self._abandon(below, shard)  # its writer will find it DROPPED
            self._tidy(below)

    def _remove(self, node: Node, shard: int, cause: str) -> None:
        slot = self._forget(node, shard)
        self.actions.append(Removed(node.space, shard, [node.key], cause))
        self.counts[f"removed_{cause}"] += 1
        self.slots.release([slot])

    def _abandon(self, node: Node, shard: int) -> None:
        self._forget(node, shard)
        self.actions.append(Abandoned(node.space, [node.key]))

    def _forget(self, node: Node, shard: int) -> Slot:
        slot = node.forget(shard)
        del self._owners[slot]
        return slot

    def _owns(self, node: Node, shard: int, slot: Slot) -> bool:
        return is_live(node) and node.slots.get(shard) == slot

    def _tidy(self, node: Node) -> None:
        """After pages went: prune bare nodes, and offer what became a leaf."""
        if is_live(node):
            self._offer(node.space.prune(node))

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            for slot_bytes in _classes(node):
                self._queue(node.space.identity.tenant, slot_bytes).offer(node, self._tick)

    def _use(self, node: Node, shard: int) -> None:
        """A reader uses the prefix that ends at ``node``; counted for its first rank only."""
        node.access = self._tick
        if shard == min(node.slots):
            node.uses += 1
            for slot_bytes in _classes(node):
                self._queue(node.space.identity.tenant, slot_bytes).used(node, self._tick)

    def _queue(self, domain: str, slot_bytes: int) -> EvictionPolicy:
        queue = self._queues.get((domain, slot_bytes))
        if queue is None:
            queue = self._queues[domain, slot_bytes] = new_policy(self._policy_name, slot_bytes)
        return queue

    def _evictable(self, node: Node) -> bool:
        return (
            bool(node.slots)
            and not node.children
            and is_live(node)
            and len(node.digests) == len(node.slots)
            and not any(self.slots.pinned(slot) for slot in node.slots.values())
        )

    def _hold(self, process: Process, delta: int) -> None:
        process.session.used_bytes += delta
        assert process.session.used_bytes >= 0

    def _end_put(self, process: Process, put_id: int) -> None:
        put = process.puts.pop(put_id)
        self._hold(process, -put.size_bytes)


def _classes(node: Node) -> set[int]:
    """The slot sizes of the node's pages."""
    return {node.space.shards[shard].slot_bytes for shard in node.slots}


def _subtree(node: Node) -> list[Node]:
    """``node`` and all below it, every parent before its children."""
    found = [node]
    for at in found:
        found.extend(at.children.values())
    return found
