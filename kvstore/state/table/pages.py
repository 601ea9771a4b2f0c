"""Pages: the state with which a node decides. Batches in, results and actions out; pure.

Slots, prefix trees and sessions meet here. The node carries out ``actions`` (publish events,
replace memory, wake waiting requests); nothing here does I/O or reads a clock. Every list of keys
is a run of one chain, packed as 32 bytes each.
"""

import sys
from collections.abc import Sequence
from itertools import chain

from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.ahead import SlotsAhead
from kvstore.state.table.deadlines import Deadlines
from kvstore.state.table.keeping import Keeping
from kvstore.state.table.residents import Residents
from kvstore.state.table.room import Room
from kvstore.state.table.runs import (
    Leased,
    begin_pages,
    follows,
    known_pages,
    leading_in_memory,
    lent,
    new_pages,
    nodes_of,
    shard_of,
    stored_actions,
)
from kvstore.state.table.tiers import Tiers, apply_effects
from kvstore.state.tree.actions import GRANTED, NO_PARENT, NO_ROOM, STORED, PageStatus
from kvstore.state.tree.columns import pack_slots
from kvstore.state.tree.match import longest_match
from kvstore.state.tree.node import ORDINARY, PrefixNode, Retention, is_live
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch, Lease, Process, Put, Session
from kvstore.state.tree.slots import SlotTable

EXPIRE_MAX = 48
"""Maximum pages whose deadlines one turn applies; those that leave with them count too. Each is a
run of its own, which costs some 50 microseconds."""


class PageTable:
    """All pages of one node, and the sessions that hold them.

    Args:
        slots: the slots of the host tier.
        policy: the eviction policy, one of :data:`kvstore.state.choice.policies.POLICIES`.

    Raises:
        InvalidArgument: no policy has that name.
    """

    def __init__(self, slots: SlotTable, policy: str = "lru") -> None:
        self.residents = held = Residents(slots, policy)
        self.room, self.tiers = Room(held), Tiers(held)
        self.ahead = SlotsAhead(held, self.room)
        self.slots, self.spaces, self.fetches = slots, held.spaces, held.fetches
        self.moment, self.meter, self.counts = held.moment, held.meter, held.counts
        self.actions, self.story = held.actions, held.story
        self.eviction, self.quotas, self.draining = held.eviction, held.quotas, held.draining
        self.keeping = Keeping(held, self.tiers)
        self._deadlines = Deadlines()

    @property
    def disk(self) -> DiskPages:
        """The disk side; without an SSD tier it accepts no page."""
        return self.residents.disk

    @property
    def now_ns(self) -> int:
        """The time of the message that is being processed."""
        return self.moment.now_ns

    def open_space(
        self, session: Session, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[PrefixTree, list[int]]:
        """See :class:`~kvstore.state.tree.sessions.Spaces`; idle spaces are closed to make room."""
        self.residents.close_idle_spaces()
        return self.spaces.open(session, identity, shards)

    # ---- reading ----------------------------------------------------------------------------

    def lookup(self, space: PrefixTree, shards: list[int], packed: bytes) -> tuple[int, int]:
        """The longest prefix for which every requested shard is READY.

        Returns:
            (pages, pending): pages of the hit; and how many more would be a hit once all pages that
            are being written now are READY.
        """
        self.moment.tick += 1
        match = longest_match(space, shards, packed)
        if match.deepest is not None:
            self.residents.use_last(match.deepest, packed, match.pages)
        return match.pages, match.pending

    def acquire(
        self, process: Process, lease_id: int, space: PrefixTree, shard: int, packed: bytes,
        deadline_ns: int, *, used: bool = True,
    ) -> Leased:  # fmt: skip
        """Pin, under a lease, the leading run of pages of one shard that are in memory.

        ``used``: count this as a use of the pages.

        Raises:
            CapacityError: the quota, or the number of leases, is used up; nothing was pinned.
        """
        process.refuse_lease(lease_id)
        self.moment.tick = tick = self.moment.tick + 1
        nodes = leading_in_memory(space, packed, shard)
        slots = list(chain.from_iterable([node.slots_of(shard) for node in nodes]))
        lease = Lease(slots, len(slots) * space.shards[shard].slot_bytes, deadline_ns)
        if not process.session.admits(lease.size_bytes):
            raise CapacityError(
                f"the session's quota of {process.session.quota_bytes} bytes is used up"
            )
        leased = lent(lease, nodes, shard, remote=process.peer.remote)
        assert len(leased.digests) == len(slots) * DIGEST_BYTES, "a reader verifies each page"
        if nodes:
            self.slots.pin(slots, tick)
            self._lend(process, lease_id, lease, nodes[0], shard)
            if used:
                self._count_use(nodes, shard)
                self.counts["loaded_bytes"] += len(slots) * space.shards[shard].page_bytes
        return leased

    def _count_use(self, nodes: Sequence[PrefixNode], shard: int) -> None:
        """A request used a run of pages of one shard."""
        for node in nodes:
            node.access = self.moment.tick  # segments are reclaimed without a look at descendants
        self.residents.use(last := nodes[-1])
        if not last.memory & (1 << shard) - 1:  # ranks of one request count once
            self.eviction.used(last, self.moment.tick)
        if self.disk.exists:
            self.disk.used(nodes, shard)
        if self.disk.effects:
            apply_effects(self.residents)

    def release(self, process: Process, lease_id: int, *, read: bool = True) -> None:
        """Release a lease; unknown ones are ignored: their Acquire may not have been answered yet.

        ``read``: the pages were read; read-once pages are dropped.
        """
        lease = process.leases.pop(lease_id, None)
        if lease is None:
            return
        process.charge(-lease.size_bytes)
        held = nodes_of(self.residents.owners, lease.slots)
        self._tell_of("released", held, lease)
        let_go = self.slots.unhold if lease.expired else self.slots.unpin
        let_go(lease.slots)
        if read and any(node.read_once for node in held):
            self.residents.drop_read(held, set(lease.slots))
        for node in held:
            if is_live(node):
                self.residents.add_candidate(node)
        lease.slots.clear()  # its deadline may be far away, and must not keep them till then

    def begin_fetch(self, process: Process, size_bytes: int, earlier: Fetch | None = None) -> Fetch:
        """Start a fetch; its bytes count against the session's quota until :meth:`end_fetch`.

        Args:
            process: the process that requests the pages.
            size_bytes: slot bytes of all pages, wherever they are.
            earlier: a fetch that loaded part of them and ends soon; its pages stay in memory until
                then.

        Raises:
            CapacityError: the session's quota is used up; nothing was started.
        """
        assert earlier is None or not earlier.ended
        held = earlier.size_bytes if earlier is not None else 0
        if not process.session.admits(size_bytes - held):
            raise CapacityError(
                f"the session's quota of {process.session.quota_bytes} bytes is used up"
            )
        process.charge(size_bytes)
        fetch = Fetch(size_bytes=size_bytes)
        process.fetches.append(fetch)
        return fetch

    def end_fetch(self, process: Process, fetch: Fetch) -> None:
        """End a fetch: its request was answered, or given up."""
        process.fetches.remove(fetch)
        process.charge(-fetch.size_bytes)
        self.residents.unpin(self.fetches.end(fetch))

    # ---- writing ----------------------------------------------------------------------------

    def begin_put(
        self, process: Process, put_id: int, space: PrefixTree, shard: int, packed: bytes,
        parent: PrefixKey, tokens: bytes = b"",
    ) -> tuple[list[PageStatus], Put]:  # fmt: skip
        """Grant a slot for every page that is neither stored nor being written.

        Pages before the first NO_ROOM or NO_PARENT are decided; all later ones get the same answer.
        """
        if put_id in process.puts:
            raise InvalidArgument("put", f"{put_id} is in use")
        self.moment.tick += 1
        keys = [PrefixKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
        if parent and parent in keys:
            raise InvalidArgument("parent", "is itself one of the keys after it")
        if process.session.prefill_s_per_token:
            space.prefill_s_per_token = process.session.prefill_s_per_token
        put = Put(space, shard, [], [], 0, self.moment.now_ns)
        statuses: list[PageStatus] = []
        each = len(tokens) // len(keys)
        while (at := len(statuses)) < len(keys):
            known = known_pages(space, shard, packed, at * KEY_BYTES, self.moment.tick)
            if known is not None:
                statuses += [known[0]] * known[1]
                continue
            following, before = (keys[at:], keys[at - 1]) if at else (keys, parent)
            granted, refusal = self._grant(process, put, following, before, tokens[at * each :])
            statuses += [GRANTED] * granted
            if refusal is not None:
                statuses += [refusal] * (len(keys) - len(statuses))
        if put.slots:
            process.puts[put_id] = put
            first = self.residents.owners.run(put.slots[0])
            assert first is not None
            self.story.tell("granted", first, shard, len(put.slots))
        return statuses, put

    def commit_put(
        self, process: Process, put_id: int, digests: bytes, keep: Retention = ORDINARY, *,
        peer: str = "",
    ) -> list[PageStatus]:  # fmt: skip
        """Make the granted pages READY; their bytes are written. They are kept as ``keep`` says.

        ``peer``: they were read from this peer, which still has them; empty = a client put them.

        Raises:
            InvalidArgument: no such put, or not one digest per page; the put is unchanged.
        """
        put = process.puts.get(put_id)
        if put is None or put.ahead:
            raise InvalidArgument("put", f"{put_id} is not open")
        assert not put.lost
        pages, its = len(put.slots), put.space.shards[put.shard]
        if len(digests) != pages * DIGEST_BYTES:
            raise InvalidArgument("digests", f"{len(digests)} bytes for {pages} pages")
        del process.puts[put_id]
        self.moment.tick = tick = self.moment.tick + 1
        now_ns = self.moment.now_ns
        (self.meter.peer_fetch if peer else self.meter.put).observe(now_ns - put.since_ns)
        process.charge(-put.size_bytes)
        apart = keep is not ORDINARY and keep != ORDINARY
        statuses: list[PageStatus] = []
        stored: list[PrefixNode] = []
        keys_of: list[list[PrefixKey]] = []
        while (at := len(statuses)) < pages:
            slot = put.slots[at]
            node = self.residents.owners.get(slot) if apart else self.residents.owners.run(slot)
            if node is None:
                self.slots.abort([slot])
                statuses.append(PageStatus.DROPPED)
                continue
            # Of a fetch only the first pages of a run may have come.
            node = put.space.exact(node, 0, min(node.count, pages - at))
            end = at + node.count
            slots = put.slots[at:end]
            assert node.slot_columns[put.shard] == pack_slots(slots), node
            self.slots.commit(slots, tick)
            node.commit(put.shard, digests[at * DIGEST_BYTES : end * DIGEST_BYTES], keep)
            node.access, node.stored_ns = tick, now_ns
            if keep.expires_ns:
                self._deadlines.add_page(node, put.shard, keep.expires_ns)
            stored.append(node)
            keys_of.append(put.keys[at:end])
            statuses += [STORED] * node.count
        for first, action in stored_actions(put, stored, keys_of):
            self.actions.append(action)
            self.story.stored(first, put.shard, len(action.keys), peer)
        self.residents.count_stored(statuses.count(STORED), its.page_bytes, peer)
        if peer or self.eviction.has_replicas:
            self.eviction.mark_replicas(stored, put.shard, peer)
        for number, node in enumerate(stored):
            self.eviction.stored(node, keys_of[number], its.slot_bytes, tick)
            self.residents.add_candidate(node)
        if self.disk.exists:
            self.disk.stored(stored, keys_of, put.shard)
        if self.keeping.is_used:
            self.keeping.stored(stored)
        if self.disk.effects:
            apply_effects(self.residents)
        return statuses

    def abort_put(self, process: Process, put_id: int, *, writing: bool = False) -> int:
        """Drop the pages of an open put; returns how many were looked at, descendants included.

        While its writer may still be ``writing``, the slots stay in LIMBO until the writer has
        settled.
        """
        put = process.puts.get(put_id)
        if put is None or put.lost:
            return 0
        if put.ahead:
            self.ahead.end(process, put_id, writing=writing)
            return 1
        assert len(put.keys) == len(put.slots) > 0
        first, below = self.residents.owners.get(put.slots[0]), 0
        for slot in reversed(put.slots):
            node = self.residents.owners.get(slot)
            if node is not None:
                self.residents.drop_writing(node, put.shard)
                below += self.residents.drop_below(node, put.shard, "head_lost", below)
                self.residents.tidy(node)
        if first is not None:
            self.story.tell("lost" if writing else "aborted", first, put.shard, len(put.slots))
        if writing:
            self.slots.lose(put.slots)
            put.lost = True
        else:
            self.slots.abort(put.slots)
            self._end_put(process, put_id)
        if not process.peer.remote:
            self.counts["lost_puts"] += writing
            self.counts["aborted_puts"] += 1
        return len(put.slots) + below

    # ---- what an operator asks for ----------------------------------------------------------

    def lend(
        self, process: Process, lease_id: int, pages: list[tuple[PrefixNode, int]], deadline_ns: int
    ) -> Lease:
        """Pin READY pages in memory under a lease, in any order; this does not count as a use."""
        slots = [node.slot(shard) for node, shard in pages]
        size = sum(node.space.shards[shard].slot_bytes for node, shard in pages)
        lease = Lease(slots, size, deadline_ns)
        self.slots.pin(slots, self.moment.tick)
        self._lend(process, lease_id, lease, *pages[0])
        return lease

    # ---- ends -------------------------------------------------------------------------------

    def lose(self, process: Process, pages_max: int = sys.maxsize) -> int:
        """The connection broke but the process lives: slots that it writes go to LIMBO.

        Returns:
            number of pages looked at; fewer than ``pages_max``: all of its puts are given up.
        """
        process.lost = True
        looked = 0
        for put_id in list(process.puts):
            if looked < pages_max:
                looked += self.abort_put(process, put_id, writing=True)
        return looked

    def end(self, process: Process, pages_max: int) -> int:
        """Free what a process held; it is known not to access this tier any more.

        Args:
            process: must not wait for anything from disk.
            pages_max: stop after this many pages; the rest is left to the next call.

        Returns:
            number of pages freed; the process is idle once all are.
        """
        assert not process.fetches
        freed = 0
        while process.leases and freed < pages_max:
            lease_id, lease = next(iter(process.leases.items()))
            freed += 1 + len(lease.slots)
            self.release(process, lease_id, read=not process.peer.remote)
        while process.puts and freed < pages_max:
            put_id, put = next(iter(process.puts.items()))
            if put.lost:
                freed += 1 + len(put.slots)
                self.slots.unhold(put.slots)
                self._end_put(process, put_id)
            else:
                freed += 1 + self.abort_put(process, put_id)
        return freed

    def expire(self, now_ns: int) -> bool:
        """Apply deadlines up to ``now_ns``, within a turn's limit; whether more have passed."""
        left = EXPIRE_MAX
        for process, lease_id, lease in self._deadlines.leases_due(now_ns, EXPIRE_MAX):
            left -= 1 + len(lease.slots)
            self.counts["expired_leases"] += 1
            self._expire_lease(process, lease_id, lease)
            if left <= 0:
                break
        for node, shard in self._deadlines.pages_due(now_ns, left):
            left -= self.residents.drop(node, shard, "expired")
            if left <= 0:
                break
        if self.keeping.is_used:
            self.keeping.expire(now_ns)
        return 0 < self.next_deadline_ns() <= now_ns

    def _expire_lease(self, process: Process, lease_id: int, lease: Lease) -> None:
        if process.peer.remote:  # it checks digests, and touches no memory of this node
            self.release(process, lease_id, read=False)
            return
        assert not lease.expired
        lease.expired = True
        held = nodes_of(self.residents.owners, lease.slots)
        self._tell_of("expired", held, lease)
        self.slots.pin_to_hold(lease.slots)
        for node in held:
            self.residents.add_candidate(node)

    def next_deadline_ns(self) -> int:
        """The earliest deadline that :meth:`expire` would apply; 0 = none."""
        kept_ns = self.keeping.next_deadline_ns() if self.keeping.is_used else 0
        due = (self._deadlines.next_ns(), kept_ns)
        return min((at for at in due if at), default=0)

    # ---- inside -----------------------------------------------------------------------------

    def _grant(
        self, process: Process, put: Put, keys: list[PrefixKey], parent: PrefixKey, tokens: bytes
    ) -> tuple[int, PageStatus | None]:
        """Grant slots to the leading pages of ``keys`` that are missing.

        Returns:
            how many; and why the next page is not granted, None if it is there or there is none.
        """
        space, shard = put.space, put.shard
        slot_bytes = space.shards[shard].slot_bytes
        new = new_pages(space, shard, keys, parent)
        count, refusal, head = new.pages, new.refusal, new.head or space.node_of(parent)
        self.counts["contradicting_pages"] += new.contradicts
        admitted = process.session.free_bytes // slot_bytes
        if count > admitted:
            count, refusal = admitted, NO_ROOM
        head.hold()  # so that what precedes the pages is no leaf while room is made
        self.draining.spared = head
        allowed = self.room.within_quota(space, slot_bytes, count)
        slots = self.room.allocate(space, head, slot_bytes, allowed)
        self.draining.spared = None
        head.unhold()
        if not follows(space, shard, parent):
            self.slots.abort(slots)  # its head was lost while room was made
            count, slots, refusal = 0, [], NO_PARENT
        if len(slots) < count:
            refusal = NO_ROOM
        granted = keys[: len(slots)]
        if slots:
            own = tokens[: len(tokens) // len(keys) * len(slots)] if tokens else tokens
            begin_pages(space, shard, granted, slots, parent, own, head, unknown=new.unknown)
            self.residents.owners.add(slots, granted, space)
        else:
            self.residents.tidy(head)
        put.keys += granted
        put.slots += slots
        put.size_bytes += len(slots) * slot_bytes
        process.charge(len(slots) * slot_bytes)
        return len(slots), refusal

    def _lend(
        self, process: Process, lease_id: int, lease: Lease, first: PrefixNode, shard: int
    ) -> None:
        assert lease_id not in process.leases, "nobody would release it"
        process.charge(lease.size_bytes)
        process.leases[lease_id] = lease
        self.story.tell("leased", first, shard, len(lease.slots))
        self._deadlines.add_lease(process, lease_id, lease)

    def _tell_of(self, what: str, held: list[PrefixNode], lease: Lease) -> None:
        if held:
            self.story.tell(what, held[0], shard_of(held[0], lease.slots[0]), len(lease.slots))

    def _end_put(self, process: Process, put_id: int) -> None:
        put = process.puts.pop(put_id)
        assert put.size_bytes == len(put.slots) * put.space.shards[put.shard].slot_bytes
        process.charge(-put.size_bytes)
