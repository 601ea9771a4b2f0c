"""Handles each message of a session: checks it, then calls the page table.

All input is checked before the state changes: an invalid message is refused, with the name of the
wrong field, so that an assertion that fails later is an error in our code. No message occupies the
node for long: one that asks for too much is answered in part.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.node.awaited import Outcome, room_for, room_is_coming
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    CapacityError,
    DurabilityUnavailable,
    InvalidArgument,
    ProtocolError,
    TransferTimeout,
)
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import SyncPolicy
from kvstore.state.remote.jobs import Holding
from kvstore.state.remote.located import LocatedChain, Span
from kvstore.state.remote.pages import RemotePages
from kvstore.state.table.ahead import PageAhead
from kvstore.state.table.pages import PageTable
from kvstore.state.table.runs import follows, leading_ready, ready_pages
from kvstore.state.tree.actions import NO_PARENT, NO_ROOM
from kvstore.state.tree.match import awaited_key
from kvstore.state.tree.node import ORDINARY, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch, Peer, Process, Put

PUT_PAGES_MAX: Final = 128
"""Maximum pages granted by one BeginPut, because each may evict one; the client asks again."""
LEASE_PAGES_MAX: Final = 4096
"""Maximum pages leased by one Acquire: the first ones of a longer run."""
PERSIST_PAGES_MAX: Final = 4096
PREFILL_S_MAX: Final = 3600.0
_OF_PEERS: Final = (
    wire.Hello, wire.OpenSpace, wire.Lookup, wire.Acquire, wire.Release, wire.Corrupt, wire.Ping,
    wire.Bring,
)  # fmt: skip
"""What another node may ask for: it reads, and asks this node to read."""
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits of one engine.

    Attributes:
        session_quota_bytes: maximum bytes that it may have pinned, reserved or not settled.
        lease_ms_max: maximum duration of a lease.
        turn_pages: maximum keys that one turn looks up for waiting requests, and maximum pages that
            it releases; the rest is done in later turns.
        unwatched_ns: how long pages of a lost connection stay held if the end of its process cannot
            be detected.
    """

    session_quota_bytes: int
    lease_ms_max: int
    turn_pages: int = 512
    unwatched_ns: int = 60_000_000_000


class Requests:
    """The messages of sessions, carried out on one page table.

    Every method raises :class:`~kvstore.protocol.errors.KVStoreError` if the node refuses; then
    nothing was changed. ``waits``: whether the request may wait for a better answer.

    Args:
        pages: the page table.
        limits: limits of one engine.
        boot: id of this boot of the node.
    """

    def __init__(self, pages: PageTable, limits: NodeLimits, boot: bytes) -> None:
        self._pages = pages
        self._limits = limits
        self._boot = boot
        #: What peers have; None = the node has none.
        self.remote: RemotePages | None = None
        #: Pages whose puts have begun since the node last took them: number of a space, and keys.
        self.begun: list[tuple[int, list[PrefixKey]]] = []

    def open_space(self, process: Process, request: wire.OpenSpace) -> wire.Answer:
        """Open a space with its shards; compare its layout with the known one."""
        _refuse_others(process, request.identity.tenant)
        space, shards = self._pages.open_space(process.session, request.identity, request.shards)
        return wire.SpaceOpened(request.id, space.number, shards)

    # ---- reading ----------------------------------------------------------------------------

    def lookup(self, process: Process, request: wire.Lookup, awaited: Hashable = None) -> Outcome:
        """Look up the longest prefix; a better answer waits for its first pending page.

        ``awaited``: what the request has waited for.
        """
        answer = awaited if isinstance(awaited, LocatedChain) else None
        space = self.space(process, request.space, request.shards)
        wire.count_keys(request.keys)
        if len(request.holder) > wire.HOLDER_CHARS_MAX or request.held < 0:
            raise InvalidArgument("holder", "must be a node's name with a number of pages")
        table = self._pages
        pages, pending = table.lookup(space, request.shards, request.keys)
        on_disk = table.residents.on_disk(space, request.shards, request.keys, pages)
        awaited = None
        if pending:
            key = awaited_key(space, request.shards, request.keys, pages + pending)
            awaited = (space.number, key)
        if self.remote is None or process.peer.remote:
            return wire.Found(request.id, pages, pending, on_disk), awaited
        remote, remote_s, missing = 0, 0.0, len(request.keys) // KEY_BYTES - pages
        if missing > pending:
            promise = Holding(request.holder, request.held) if request.holder else None
            further = self.remote.further(
                space, request.shards, request.keys, pages, promise, answer
            )
            if isinstance(further, LocatedChain):
                pending, awaited = missing, further
            else:
                remote, remote_s = further[0], min(further[1], wire.FETCH_S_MAX)
        return wire.Found(request.id, pages, pending, on_disk, remote, remote_s), awaited

    def acquire(
        self, process: Process, request: wire.Acquire, now_ns: int, *, waits: bool,
        earlier: Fetch | None = None, answer: LocatedChain | None = None,
    ) -> Outcome:  # fmt: skip
        """Lease the part of the run in memory; if the request may wait, the rest is loaded first.

        Pages on disk are loaded, and the pages after them are read from peers. ``answer``: the
        directory's answer, for which the request has waited.
        """
        space = self.space(process, request.space, [request.shard])
        wire.count_keys(request.keys)
        request.keys = request.keys[: LEASE_PAGES_MAX * KEY_BYTES]
        _check_parent(request.parent)
        if request.lease_ms < 1:
            raise InvalidArgument("lease_ms", f"{request.lease_ms} is less than 1")
        remote = self.remote
        if remote is not None and process.peer.remote:
            remote = None
        if not space.disk_bytes and remote is None:
            return self._lease(process, request, now_ns, 0), None
        shard = request.shard
        ready, missing = ready_pages(space, shard, request.keys)
        if ready * KEY_BYTES == len(request.keys):
            remote = None  # peers have nothing that is not here
        before = _known_parent(space, request)
        chain, here = before + request.keys, len(before) // KEY_BYTES + ready
        if not waits:
            offered = 0
            if remote is not None:
                offered = remote.offered(space, shard, chain, here, begins=request.begins)
            return self._lease(process, request, now_ns, ready, offered), None
        further: Span | None = None
        if remote is not None:
            found = remote.want(
                space, shard, chain, here, asks=earlier is None, begins=request.begins,
                answer=answer,
            )  # fmt: skip
            if isinstance(found, LocatedChain):
                return wire.Acquired(request.id, b"", b"", ready), found
            further = found
        if missing or further is not None:
            fetch, full = self.begin_fetch(process, request, ready, further, earlier)
            if fetch.waits:
                return wire.Acquired(request.id, b"", b""), fetch
            self._pages.end_fetch(process, fetch)
            if room_is_coming(self._pages) and (missing or full):
                room = room_for("load", process, space, shard)
                return wire.Acquired(request.id, b"", b"", ready), room
        return self._lease(process, request, now_ns, ready), None

    def begin_fetch(
        self, process: Process, request: wire.Acquire | wire.Bring, ready: int,
        further: Span | None, earlier: Fetch | None,
    ) -> tuple[Fetch, bool]:  # fmt: skip
        """Load ``ready`` pages to memory, and fetch ``further`` pages from peers.

        Returns:
            the fetch, and whether memory has no room for more pages of peers.
        """
        space, shard = self.space(process, request.space, [request.shard]), request.shard
        pages = ready + (further.pages if further is not None else 0)
        size = pages * space.shards[shard].slot_bytes
        fetch, full = self._pages.begin_fetch(process, size, earlier), False
        fetch.copies = isinstance(request, wire.Bring)
        if self.remote is not None and further is not None:
            if earlier is not None and earlier.peers_until_ns:
                fetch.peers_until_ns = earlier.peers_until_ns
            else:
                fetch.peers_until_ns = self._pages.now_ns + self.remote.limits.fetch_ns
            full = self.remote.fetch(fetch, further, shard)
        self._pages.room.fetch(fetch, space, shard, request.keys[: ready * KEY_BYTES])
        return fetch, full

    def acquire_again(
        self, process: Process, request: wire.Acquire, now_ns: int, awaited: Hashable, *,
        waits: bool,
    ) -> Outcome:  # fmt: skip
        """Continue loading missing pages; loaded ones stay in memory meanwhile."""
        fetch = awaited if isinstance(awaited, Fetch) else None
        answer = awaited if isinstance(awaited, LocatedChain) else None
        try:
            return self.acquire(process, request, now_ns, waits=waits, earlier=fetch, answer=answer)
        finally:
            if fetch is not None:
                self._pages.end_fetch(process, fetch)

    def release(self, process: Process, request: wire.Release) -> None:
        """Release a lease."""
        self._pages.release(process, request.lease, read=request.read)

    def corrupt(self, process: Process, request: wire.Corrupt) -> None:
        """Drop a page that a reader found corrupt; reports from another boot are ignored."""
        space = self.space(process, request.space, [request.shard])
        node = space.nodes.get(PrefixKey(request.key))
        if request.boot not in (b"", self._boot) or node is None:
            return
        if not node.ready & node.memory & 1 << request.shard:
            return  # it has left memory; the copy on disk is verified when it is loaded
        _, generation, _ = self._pages.slots.address(node.slot(request.shard))
        if generation & 0xFFFFFFFF == request.generation:
            self._pages.residents.drop(node, request.shard, "corrupt")

    # ---- writing ----------------------------------------------------------------------------

    def begin_put(self, process: Process, request: wire.BeginPut) -> Outcome:
        """Grant slots for missing pages."""
        space = self.space(process, request.space, [request.shard])
        keys, parent, tokens = request.keys, request.parent, request.tokens
        count, token_bytes = wire.count_keys(keys), space.token_bytes
        _check_parent(parent)
        if tokens and len(tokens) != count * token_bytes:
            raise InvalidArgument("tokens", f"{len(tokens)} bytes, not {count * token_bytes}")
        asked = min(count, PUT_PAGES_MAX)
        keys, tokens = keys[: asked * KEY_BYTES], tokens[: asked * token_bytes]
        statuses, put = self._pages.begin_put(
            process, request.put, space, request.shard, keys, PrefixKey(parent), tokens
        )
        assert len(statuses) == asked
        last = statuses[-1]
        busy = last is NO_ROOM and room_is_coming(self._pages)
        if asked < count:
            ended = last in (NO_ROOM, NO_PARENT)
            statuses += [last if ended else NO_ROOM] * (count - asked)
            busy = busy or not ended
        answer = wire.PutGranted(request.id, bytes(statuses), self._addresses(put), busy)
        self.begun.append((space.number, put.keys[:]))
        if statuses[0] is NO_PARENT and request.follows:
            return answer, (space.number, PrefixKey(parent))
        waits = busy and not put.slots
        return answer, room_for("put", process, space, put.shard) if waits else None

    def commit_put(self, process: Process, request: wire.CommitPut, now_ns: int) -> wire.Answer:
        """Make written pages READY; reserve a slot for the next page on request."""
        keep, put = _retention(request, now_ns), process.puts.get(request.put)
        if request.ahead and request.ahead in process.puts:
            raise InvalidArgument("ahead", f"{request.ahead} is in use")
        statuses = self._pages.commit_put(process, request.put, request.digests, keep)
        if not request.ahead or put is None:
            return wire.Committed(request.id, bytes(statuses))
        reserved = self._pages.ahead.reserve(process, request.ahead, put.space, put.shard)
        return wire.Committed(request.id, bytes(statuses), self._addresses(reserved))

    def store_page(self, process: Process, request: wire.StorePage, now_ns: int) -> wire.Answer:
        """Make a page READY whose bytes are in a slot reserved in advance."""
        space = self.space(process, request.space, [request.shard])
        if len(request.key) != KEY_BYTES:
            raise InvalidArgument("key", f"{len(request.key)} bytes are not a key")
        wire.refuse_all_keys("key", request.key)
        _check_parent(request.parent)
        if request.tokens and len(request.tokens) != space.token_bytes:
            raise InvalidArgument("tokens", f"{len(request.tokens)} bytes, not {space.token_bytes}")
        if len(request.digest) != DIGEST_BYTES:
            raise InvalidArgument("digest", f"{len(request.digest)} bytes")
        if request.ahead and request.ahead in process.puts:
            raise InvalidArgument("ahead", f"{request.ahead} is in use")
        keep = _retention(request, now_ns)
        key, parent = PrefixKey(request.key), PrefixKey(request.parent)
        page = PageAhead(space, request.shard, key, parent, request.tokens)
        status = self._pages.ahead.store(process, request.put, page)
        if status is None:
            [status] = self._pages.commit_put(process, request.put, request.digest, keep)
        if not request.ahead:
            self._pages.abort_put(process, request.put)
            return wire.Committed(request.id, bytes([status]))
        reserved = self._pages.ahead.go_on(
            process, request.put, request.ahead, space, request.shard
        )
        return wire.Committed(request.id, bytes([status]), self._addresses(reserved))

    def _addresses(self, put: Put | None) -> bytes:
        """The addresses of a put's slots; empty if there is no put."""
        return b"" if put is None else self._pages.slots.addresses(put.slots)

    def abort_put(self, process: Process, request: wire.AbortPut) -> None:
        """Abort a put; the writer has stopped."""
        self._pages.abort_put(process, request.put)

    def persist(self, process: Process, request: wire.Persist, *, waits: bool) -> Outcome:
        """Make pages durable; it waits for their sync, or for free space."""
        space = self.space(process, request.space, [request.shard])
        count = wire.count_keys(request.keys)
        if count > PERSIST_PAGES_MAX:
            raise InvalidArgument("keys", f"{count} keys, at most {PERSIST_PAGES_MAX}")
        disk = self._pages.disk
        if disk.rules.sync is SyncPolicy.NONE:
            raise DurabilityUnavailable(
                "this node never syncs pages: set ssd.directories and a sync policy other than"
                " none, or put without durable"
            )
        run = leading_ready(space, request.keys, request.shard)
        missing = count - sum([node.count for node in run])
        if missing:
            raise CapacityError(f"{missing} of {count} pages are not stored; put them again")
        if not waits:
            raise CapacityError("no room in time, or too many requests wait for a sync: retry")
        try:
            not_yet = wire.Failure(request.id, TransferTimeout.code, "the pages are not synced yet")
            deadline_ns = self._pages.now_ns + request.wait_ms * _NS_PER_MS
            return not_yet, self._pages.tiers.make_durable(run, request.shard, deadline_ns)
        except CapacityError as error:
            if not disk.busy:
                raise
            room = room_for("disk", process, space, request.shard)  # space is being freed
            return wire.Failure(request.id, error.code, str(error)), room

    # ---- other ------------------------------------------------------------------------------

    def report_prefill(self, process: Process, request: wire.ReportPrefill) -> None:
        """Store the engine's seconds per prompt token."""
        if 0 < request.seconds_per_token < PREFILL_S_MAX:
            process.session.prefill_s_per_token = request.seconds_per_token

    def keep(self, process: Process, request: wire.KeepConversation) -> None:
        """Keep pages of a conversation, or end it."""
        space = self._pages.spaces.get(request.space, process.session)
        _refuse_others(process, space.identity.tenant)
        if not 0 < len(request.name) <= wire.CONVERSATION_CHARS_MAX:
            raise InvalidArgument("name", f"has 1 to {wire.CONVERSATION_CHARS_MAX} characters")
        if not 0 <= request.ttl_ms <= wire.TTL_MS_MAX:
            raise InvalidArgument("ttl_ms", f"{request.ttl_ms} is outside 0..{wire.TTL_MS_MAX}")
        if request.bytes_max < 0:
            raise InvalidArgument("bytes_max", f"{request.bytes_max} is negative")
        if not request.ttl_ms:
            self._pages.keeping.end(space, request.name)
            return
        if wire.count_keys(request.keys) > wire.KEEP_KEYS_MAX:
            raise InvalidArgument("keys", f"are more than {wire.KEEP_KEYS_MAX}")
        starts = range(0, len(request.keys), KEY_BYTES)
        keys = [PrefixKey(request.keys[at : at + KEY_BYTES]) for at in starts]
        ttl_ns = request.ttl_ms * _NS_PER_MS
        self._pages.keeping.keep(space, request.name, keys, ttl_ns, request.bytes_max)

    def count_found(self, process: Process, request: Any, answer: wire.Answer) -> None:
        """Count the keys of an answered lookup by where they were found."""
        if type(answer) is not wire.Found:  # `isinstance` asks the class of messages
            return
        pages, asked = self._pages, len(request.keys) // KEY_BYTES
        pages.counts["lookup_pages"] += asked
        pages.counts["hit_pages"] += answer.pages
        model = pages.spaces.get(request.space, process.session).identity.model
        host = answer.pages - answer.on_disk
        pages.meter.found(model, host, answer.on_disk, asked - answer.pages)

    def space(self, process: Process, number: int, shards: list[int]) -> PrefixTree:
        """An open space, of which the process may use these shards."""
        space = self._pages.spaces.get(number, process.session)
        _refuse_others(process, space.identity.tenant)  # another process of the session opened it
        if not 1 <= len(shards) <= len(space.shards):
            what = f"{len(shards)} shards; space {number} has {len(space.shards)}"
            raise InvalidArgument("shards", what)
        for shard in shards:
            if not 0 <= shard < len(space.shards):
                raise InvalidArgument("shards", f"one is not open in space {number}")
        return space

    def _lease(
        self, process: Process, request: wire.Acquire, now_ns: int, ready: int, offered: int = 0
    ) -> wire.Answer:
        """Lease those of ``ready`` pages that are in memory; peers may have ``offered`` more."""
        lease_ms = min(request.lease_ms, self._limits.lease_ms_max)
        shard, deadline_ns = request.shard, now_ns + lease_ms * _NS_PER_MS
        space = self.space(process, request.space, [shard])
        leased = self._pages.acquire(
            process, request.lease, space, shard, request.keys, deadline_ns,
            used=not request.copies,
        )  # fmt: skip
        return wire.Acquired(
            request.id,
            self._pages.slots.addresses(leased.lease.slots),
            leased.digests, max(0, ready - len(leased.lease.slots)) + offered, leased.lasting,
            lease_ms, offered,
            _pack_kept(leased.kept, now_ns),
        )  # fmt: skip


def refuse_others(request: wire.Request, peer: Peer) -> None:
    """Refuse requests that only engines, or only other nodes, may send.

    Raises:
        ProtocolError: the peer may not send this request.
    """
    kind = type(request)
    if not peer.remote and kind is wire.Bring:
        raise ProtocolError(f"{kind.__name__} is for other nodes only")
    if peer.remote and not isinstance(request, _OF_PEERS):
        raise ProtocolError(f"{kind.__name__} is not for other nodes: they read")


def _retention(request: wire.CommitPut | wire.StorePage, now_ns: int) -> Retention:
    """How long the pages of a put are kept.

    Raises:
        InvalidArgument: the lifetime is invalid.
    """
    if not 0 <= request.ttl_ms <= wire.TTL_MS_MAX:
        raise InvalidArgument("ttl_ms", f"{request.ttl_ms} is outside 0..{wire.TTL_MS_MAX}")
    expires_ns = now_ns + request.ttl_ms * _NS_PER_MS if request.ttl_ms else 0
    special = expires_ns or request.read_once or request.memory_only
    return Retention(expires_ns, request.read_once, request.memory_only) if special else ORDINARY


def _check_parent(parent: bytes) -> None:
    """Refuse a parent that cannot be a key; empty = there is none, or it is unknown.

    Raises:
        InvalidArgument: it is not a key.
    """
    if len(parent) not in (0, KEY_BYTES):
        raise InvalidArgument("parent", f"{len(parent)} bytes are not a key")
    wire.refuse_all_keys("parent", parent)


def _known_parent(space: PrefixTree, request: wire.Acquire) -> bytes:
    """The key before the run, if a fetched page can follow it here; else empty."""
    known = request.parent and follows(space, request.shard, PrefixKey(request.parent))
    return request.parent if known else b""


def _pack_kept(kept: list[Retention], now_ns: int) -> bytes:
    """How long each page is kept, for another node; empty if no page has a limit."""
    if all(one == ORDINARY for one in kept):
        return b""
    rows = [
        (max(0, one.expires_ns - now_ns) // _NS_PER_MS if one.expires_ns else wire.NO_TTL, *one[1:])
        for one in kept
    ]
    return np.array(rows, dtype=wire.KEPT).tobytes()


def _refuse_others(process: Process, tenant: str) -> None:
    """Refuse a tenant that the process may not use.

    Raises:
        InvalidArgument: ``socket.tenants`` does not allow it.
    """
    tenants = process.peer.tenants
    if tenants is not None and tenant not in tenants:
        may = ", ".join(sorted(tenants))
        raise InvalidArgument("tenant", f"{tenant!r}; socket.tenants allows this user only {may}")
