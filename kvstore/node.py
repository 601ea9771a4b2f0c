"""The node: what a ``kvstore-server`` decides, message by message.

This is the main path. A request of an engine's process comes in with the time; the node checks it,
asks the page table, and leaves answers in ``outbox`` and what else must happen in ``actions``. It
does no I/O and reads no clock, so the socket server, the embedded store and a simulation drive the
same object:

1. ``connected`` / Hello: a process joins its engine's session.
2. OpenSpace: names what the KV is of; the layout is compared.
3. Lookup: how long is the prefix? HIT, MISS, or PENDING (the answer waits, with a deadline).
4. BeginPut → bytes are copied by the client → CommitPut: pages become READY and are announced.
5. Acquire → the client copies or views, checking digests → Release.
6. ``disconnected``, ``process_ended``, ``advance``: what engines leave behind is taken back, but no
   slot is used again while anyone may still touch it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kvstore import wire
from kvstore.errors import (
    CapacityError,
    DurabilityUnavailable,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    TransferTimeout,
)
from kvstore.page import KEY_BYTES, PrefixKey
from kvstore.state.describe import describe
from kvstore.state.diskjobs import Durable, Fetch, SyncPolicy
from kvstore.state.match import awaited_key
from kvstore.state.outcomes import Abandoned, Action, PageStatus
from kvstore.state.pages import PageTable
from kvstore.state.sessions import Process, Session
from kvstore.state.slots import SlotTable
from kvstore.state.tree import Node as TreeNode
from kvstore.state.tree import Space
from kvstore.waiting import Waiter, WaitingRoom

T = TypeVar("T")

TOKEN_BYTES: Final = 16
WAIT_MS_MAX: Final = 60_000
_NS_PER_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """What one engine may ask of this node."""

    session_quota_bytes: int
    lease_ms_max: int


_ROOM: Final = "room"
"""What puts wait for while pages are being written to disk to make room."""


class Node:
    """One node's decisions.

    Args:
        name: names the node.
        boot: 16 bytes that differ at every start.
        slots: the slots of the host tier.
        limits: what one engine may hold.
        new_token: makes an unguessable session token.
        policy: which pages leave memory first.

    Attributes:
        outbox: answers to send, (connection, answer), in order.
        actions: what became READY or left the index, in order; to be published.
    """

    def __init__(
        self, name: str, boot: bytes, slots: SlotTable, limits: NodeLimits,
        new_token: Callable[[], bytes], policy: str = "lru",
    ) -> None:  # fmt: skip
        """Start with no pages and no sessions."""
        self.name = name
        self.boot = boot
        self.limits = limits
        self.pages = PageTable(slots, policy)
        self.pages.ghosts.policy = policy
        self.sessions: dict[bytes, Session] = {}
        self.processes: dict[int, Process] = {}
        self.outbox: list[tuple[int, wire.Answer]] = []
        self.actions: list[Action] = []
        self._new_token = new_token
        self._pids: dict[int, int] = {}
        self.waiting = WaitingRoom()
        #: Each gives its answer, and what a better one could wait for.
        self._patient: dict[type, Callable[[Process, Any, int], tuple[wire.Answer, Hashable]]] = {
            wire.Lookup: self._lookup,
            wire.Acquire: self._acquire,
            wire.BeginPut: self._begin_put,
            wire.Persist: self._persist,
        }
        self._handlers: dict[type, Callable[[Process, Any, int], wire.Answer | None]] = {
            **dict.fromkeys(self._patient, self._answer_or_wait),
            wire.OpenSpace: self._open_space,
            wire.Release: self._release,
            wire.CommitPut: self._commit_put,
            wire.AbortPut: self._abort_put,
            wire.Corrupt: self._corrupt,
            wire.Settled: self._settled,
            wire.ReportPrefill: self._report_prefill,
            wire.Ping: lambda _process, request, _now_ns: wire.Pong(request.id),
        }

    # ---- connections ------------------------------------------------------------------------

    def connected(self, connection: int, pid: int) -> None:
        """A process connected; ``pid`` is what the kernel says, 0 when it cannot."""
        self._pids[connection] = pid

    def receive(self, connection: int, request: wire.Request, now_ns: int) -> None:
        """Carry out one request; its answer, if it wants one, is added to ``outbox``."""
        handler = self._handlers.get(type(request))
        process = self.processes.get(connection)
        self.pages.now_ns = now_ns
        try:
            if handler is not None and process is not None:
                answer = handler(process, request, now_ns)
            elif isinstance(request, wire.Hello):
                answer = self._hello(connection, request)
            else:
                raise ProtocolError(f"{type(request).__name__} is not expected here")
        except KVStoreError as error:
            answer = self._refuse(request, error)
        if answer is not None:
            self.outbox.append((connection, answer))
        self._after(now_ns)

    def disconnected(self, connection: int, now_ns: int, *, ended: bool) -> None:
        """A connection is gone; ``ended`` when its process is known to have ended too."""
        self.pages.now_ns = now_ns
        self._pids.pop(connection, None)
        process = self.processes.get(connection)
        if process is not None:
            self._stop_waiting(process)
            if ended or process.idle:
                self._end(process)
            else:
                self.pages.lose(process)
        self._after(now_ns)

    def process_ended(self, pid: int, now_ns: int) -> list[int]:
        """The kernel says that process ``pid`` is gone: nothing of it touches bytes any more.

        Returns:
            its connections that are still open (a child of it may hold them) and must be closed.
        """
        self.pages.now_ns = now_ns
        ended = [process for process in self.processes.values() if process.pid == pid]
        still_open = [process.connection for process in ended if not process.lost]
        for process in ended:
            self._end(process)
        self._after(now_ns)
        return still_open

    def disk_completed(self, job: int, error: KVStoreError | None, now_ns: int) -> None:
        """The SSD tier has ended a job; ``error`` None = all of it was done."""
        assert self.pages.disk is not None
        self.pages.now_ns = now_ns
        self.pages.disk.completed(job, error)
        self._try_again(now_ns)
        self._after(now_ns)

    def advance(self, now_ns: int) -> None:
        """Apply every deadline up to ``now_ns``: leases, pages with a TTL, requests that wait."""
        self.pages.now_ns = now_ns
        self.pages.expire(now_ns)
        if self.pages.disk is not None:
            self.pages.disk.advance(now_ns)
        for waiter in self.waiting.due(now_ns):
            self._resume(waiter, now_ns)
        self._try_again(now_ns)
        self._after(now_ns)

    def operate(self, change: Callable[[PageTable], T], now_ns: int) -> T:
        """Carry out what an operator wants of the page table; its effects are handed on."""
        self.pages.now_ns = now_ns
        try:
            return change(self.pages)
        finally:
            self._after(now_ns)

    def waits_for(self, pid: int) -> bool:
        """Whether anything here depends on seeing process ``pid`` end."""
        return any(process.pid == pid for process in self.processes.values())

    # ---- requests ---------------------------------------------------------------------------

    def _hello(self, connection: int, request: wire.Hello) -> wire.Answer:
        if request.major != wire.PROTOCOL_MAJOR:
            raise ProtocolError(
                f"client speaks protocol {request.major}.{request.minor},"
                f" this node {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}"
            )
        if connection in self.processes:
            raise ProtocolError("a connection says Hello once")
        session = self.sessions.get(request.session)
        if session is None:
            # Kept over a restart of the node, so that an engine's processes meet again.
            token = request.session if len(request.session) == TOKEN_BYTES else self._new_token()
            session = Session(token, request.name[:128], self.limits.session_quota_bytes)
            self.sessions[token] = session
        own = session.of(request.origin)
        if request.number and any(one.number >= request.number for one in own):
            raise ProtocolError(f"connection {request.number} was given up for a later one")
        for older in own:
            if not older.lost:
                self._stop_waiting(older)
                self.pages.lose(older)  # whoever connects anew has given its old connection up
        process = Process(
            connection, self._pids.get(connection, 0), session, request.origin, request.number
        )
        session.processes[connection] = process
        self.processes[connection] = process
        return wire.Welcome(
            request.id, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, self.boot, self.name,
            session.token, self.pages.slots.extent_bytes, session.quota_bytes,
        )  # fmt: skip

    def _open_space(self, process: Process, request: wire.OpenSpace, _now_ns: int) -> wire.Answer:
        space, shards = self.pages.spaces.open(process.session, request.identity, request.shards)
        return wire.SpaceOpened(request.id, space.number, shards)

    def _lookup(
        self, process: Process, request: wire.Lookup, _now_ns: int
    ) -> tuple[wire.Answer, Hashable]:
        space = self._space(process, request.space, request.shards)
        wire.count_keys(request.keys)
        pages, pending = self.pages.lookup(space, request.shards, request.keys)
        on_disk = self.pages.on_disk(space, request.shards, request.keys, pages)
        awaited: Hashable = None
        if pending:
            key = awaited_key(space, request.shards, request.keys, pages + pending)
            awaited = (space.number, key)
        return wire.Found(request.id, pages, pending, on_disk), awaited

    def _acquire(
        self, process: Process, request: wire.Acquire, now_ns: int, earlier: Fetch | None = None
    ) -> tuple[wire.Answer, Hashable]:
        space = self._space(process, request.space, [request.shard])
        wire.count_keys(request.keys)
        if request.lease_ms < 1:
            raise InvalidArgument("lease_ms", f"{request.lease_ms} is less than 1")
        shard, run = request.shard, list[TreeNode]()
        if self.pages.disk is not None:
            run = self.pages.ready_run(space, shard, request.keys)
        if request.wait_ms and not self.waiting.full and any(shard not in at.slots for at in run):
            fetch = self.pages.fetch(process, run, shard, earlier)
            if fetch.outstanding:
                return wire.Acquired(request.id, b"", b""), fetch
            self.pages.end_fetch(process, fetch)
            if self.pages.disk is not None and self.pages.disk.busy:
                return wire.Acquired(request.id, b"", b"", len(run)), _ROOM
        return self._lease(process, request, now_ns, len(run)), None

    def _lease(
        self, process: Process, request: wire.Acquire, now_ns: int, ready: int
    ) -> wire.Answer:
        """Lease what of ``ready`` pages is in memory."""
        lease_ms = min(request.lease_ms, self.limits.lease_ms_max)
        shard, deadline_ns = request.shard, now_ns + lease_ms * _NS_PER_MS
        space = self._space(process, request.space, [shard])
        lease = self.pages.acquire(process, request.lease, space, shard, request.keys, deadline_ns)
        return wire.Acquired(
            request.id,
            b"".join(wire.pack_address(*self.pages.slots.address(at)) for at in lease.slots),
            b"".join(node.digests[shard] for node, shard, _ in lease.pages),
            max(0, ready - len(lease.pages)), lease.lasting, lease_ms,
        )  # fmt: skip

    def _release(self, process: Process, request: wire.Release, _now_ns: int) -> None:
        self.pages.release(process, request.lease)

    def _begin_put(
        self, process: Process, request: wire.BeginPut, _now_ns: int
    ) -> tuple[wire.Answer, Hashable]:
        space = self._space(process, request.space, [request.shard])
        count = wire.count_keys(request.keys)
        if len(request.parent) not in (0, KEY_BYTES):
            raise InvalidArgument("parent", f"{len(request.parent)} bytes are no key")
        token_bytes = count * space.identity.page_tokens * 4
        if request.tokens and len(request.tokens) != token_bytes:
            raise InvalidArgument("tokens", f"{len(request.tokens)} bytes, not {token_bytes}")
        statuses, put = self.pages.begin_put(
            process, request.put, space, request.shard, request.keys,
            PrefixKey(request.parent), request.tokens,
        )  # fmt: skip
        addresses = [wire.pack_address(*self.pages.slots.address(slot)) for slot in put.slots]
        disk = self.pages.disk
        busy = PageStatus.NO_ROOM in statuses and disk is not None and disk.busy
        answer = wire.PutGranted(request.id, bytes(statuses), b"".join(addresses), busy)
        return answer, _ROOM if busy and not addresses else None

    def _commit_put(self, process: Process, request: wire.CommitPut, now_ns: int) -> wire.Answer:
        if request.ttl_ms < 0:
            raise InvalidArgument("ttl_ms", f"{request.ttl_ms} is negative")
        expires_ns = now_ns + request.ttl_ms * _NS_PER_MS if request.ttl_ms else 0
        statuses = self.pages.commit_put(
            process, request.put, request.digests, expires_ns, read_once=request.read_once,
            memory_only=request.memory_only,
        )  # fmt: skip
        return wire.Committed(request.id, bytes(statuses))

    def _abort_put(self, process: Process, request: wire.AbortPut, _now_ns: int) -> None:
        self.pages.abort_put(process, request.put)

    def _persist(
        self, process: Process, request: wire.Persist, _now_ns: int
    ) -> tuple[wire.Answer, Hashable]:
        space = self._space(process, request.space, [request.shard])
        count = wire.count_keys(request.keys)
        disk = self.pages.disk
        if disk is None or disk.rules.sync is SyncPolicy.NONE:
            raise DurabilityUnavailable(
                "no page of this node is ever synced: give it ssd.directories and a sync policy"
                " other than none, or put without durable"
            )
        run = self.pages.ready_run(space, request.shard, request.keys)
        if len(run) < count:
            raise CapacityError(f"{count - len(run)} of {count} pages are not stored; put again")
        if not request.wait_ms or self.waiting.full:
            raise CapacityError("nothing more may wait for a sync now; try later")
        try:
            not_yet = wire.Failure(request.id, TransferTimeout.code, "the pages are not synced yet")
            return not_yet, disk.make_durable(run, request.shard)
        except CapacityError as error:
            if not disk.busy:
                raise
            return wire.Failure(request.id, error.code, str(error)), _ROOM  # it is being made

    def _corrupt(self, process: Process, request: wire.Corrupt, _now_ns: int) -> None:
        space = self._space(process, request.space, [request.shard])
        node = space.nodes.get(PrefixKey(request.key))
        if node is None or not node.ready >> request.shard & 1 or request.shard not in node.slots:
            return  # what was read has left memory; what is on disk is verified when it is loaded
        _, generation, _ = self.pages.slots.address(node.slots[request.shard])
        if generation & 0xFFFFFFFF == request.generation:
            self.pages.drop(node, request.shard, "corrupt")

    def _settled(self, process: Process, request: wire.Settled, _now_ns: int) -> None:
        if request.before > process.number:
            raise ProtocolError(f"{process.number} cannot settle what came before {request.before}")
        for other in process.session.of(process.origin):
            if other.lost and 0 < other.number < request.before:
                self._end(other)

    def _report_prefill(self, process: Process, request: wire.ReportPrefill, _now_ns: int) -> None:
        if 0 < request.seconds_per_token < 3600:
            process.session.prefill_s_per_token = request.seconds_per_token

    # ---- inside -----------------------------------------------------------------------------

    def _space(self, process: Process, number: int, shards: list[int]) -> Space:
        space = self.pages.spaces.get(number, process.session)
        if not shards or min(shards) < 0 or max(shards) >= len(space.shards):
            raise InvalidArgument("shards", f"{shards} are not all open in space {number}")
        return space

    def _end(self, process: Process) -> None:
        self._stop_waiting(process)
        self.pages.end(process)
        session = process.session
        del self.processes[process.connection]
        del session.processes[process.connection]
        if not session.processes:
            assert session.used_bytes == 0
            del self.sessions[session.token]

    def _refuse(self, request: wire.Request, error: KVStoreError) -> wire.Failure | None:
        self.pages.counts[f"refused_{error.code}"] += 1
        number = getattr(request, "id", 0)
        field = getattr(error, "field", "")
        return wire.Failure(number, error.code, str(error), field) if number else None

    # ---- waiting ----------------------------------------------------------------------------

    def _answer_or_wait(self, process: Process, request: Any, now_ns: int) -> wire.Answer | None:
        """Answer, unless there is something to wait for and the request wants to."""
        if not 0 <= request.wait_ms <= WAIT_MS_MAX:
            raise InvalidArgument("wait_ms", f"{request.wait_ms} is outside 0..{WAIT_MS_MAX}")
        answer, awaited = self._patient[type(request)](process, request, now_ns)
        if awaited is None or not request.wait_ms or self.waiting.full:
            return answer
        deadline_ns = now_ns + request.wait_ms * _NS_PER_MS
        self.waiting.add(Waiter(process.connection, request, deadline_ns, awaited))
        return None

    def _try_again(self, now_ns: int) -> None:
        """Let what waits for room try again, in turn, until one finds none: that can take long."""
        for waiter in self.waiting.on(_ROOM):
            self._resume(waiter, now_ns)
            if waiter in self.waiting.on(_ROOM)[-1:]:
                return

    def _resume(self, waiter: Waiter, now_ns: int) -> None:
        """What a request waited for has come, or its time is up."""
        self.waiting.remove(waiter)
        process, request = self.processes[waiter.connection], waiter.request
        answer: wire.Answer | None
        awaited: Hashable = None
        try:
            if isinstance(request, wire.Acquire):
                answer, awaited = self._acquire_again(process, waiter, now_ns)
            elif isinstance(waiter.awaited, Durable):
                answer = _acknowledge(request, waiter.awaited)
            else:
                answer, awaited = self._patient[type(request)](process, request, now_ns)
        except KVStoreError as error:
            answer = self._refuse(request, error)
        if awaited is not None and now_ns < waiter.deadline_ns:
            waiter.awaited = awaited
            self.waiting.add(waiter)
        elif answer is not None:
            if awaited is not None and isinstance(answer, wire.Failure):
                self.pages.counts[f"refused_{answer.code}"] += 1
            self.outbox.append((waiter.connection, answer))

    def _acquire_again(
        self, process: Process, waiter: Waiter, now_ns: int
    ) -> tuple[wire.Answer, Hashable]:
        """Go on loading what is still missing; what was loaded stays in memory meanwhile."""
        request = waiter.request
        fetch = waiter.awaited if isinstance(waiter.awaited, Fetch) else None
        try:
            if now_ns < waiter.deadline_ns:
                return self._acquire(process, request, now_ns, fetch)
            space = self._space(process, request.space, [request.shard])
            run = self.pages.ready_run(space, request.shard, request.keys)
            return self._lease(process, request, now_ns, len(run)), None
        finally:
            if fetch is not None:
                self.pages.end_fetch(process, fetch)

    def _stop_waiting(self, process: Process) -> None:
        for waiter in self.waiting.of(process.connection):
            self.waiting.remove(waiter)
            if isinstance(waiter.awaited, Fetch):
                self.pages.end_fetch(process, waiter.awaited)

    def _after(self, now_ns: int) -> None:
        """Hand on what the page table did, and resume the requests that waited for it."""
        while things := self._happened():
            for thing in things:
                for waiter in self.waiting.on(thing):
                    self._resume(waiter, now_ns)

    def _happened(self) -> list[Hashable]:
        """What somebody may have waited for, since the last call."""
        actions, self.pages.actions = self.pages.actions, []
        self.actions += [action for action in actions if not isinstance(action, Abandoned)]
        things: dict[Hashable, None] = {}
        if len(self.waiting):
            things = {(at.space.number, key): None for at in actions for key in at.keys}
        disk = self.pages.disk
        if disk is not None:
            things |= dict.fromkeys([*disk.fetched, *disk.acknowledged])
            disk.fetched.clear()
            disk.acknowledged.clear()
        return list(things)

    def next_deadline_ns(self) -> int:
        """When :meth:`advance` should be called next; 0 = no deadline stands."""
        disk = self.pages.disk
        deadlines = (
            self.waiting.next_deadline_ns(),
            self.pages.next_deadline_ns(),
            disk.next_deadline_ns() if disk is not None else 0,
        )
        return min((at for at in deadlines if at), default=0)

    def stats(self) -> dict[str, Any]:
        """One snapshot of everything that can be counted here, as plain values."""
        return {
            "node": self.name,
            "boot": self.boot.hex(),
            **describe(self.pages, list(self.sessions.values())),
            "waiting_requests": len(self.waiting),
        }


def _acknowledge(request: wire.Persist, durable: Durable) -> wire.Answer:
    """The answer to a Persist whose pages are synced, or whose time is up.

    Raises:
        KVStoreError: they are not; it may be that they will be later.
    """
    if durable.error is not None:
        raise durable.error
    if not durable.ended:
        raise TransferTimeout("the pages are not synced yet; they may be later")
    return wire.Persisted(request.id)
