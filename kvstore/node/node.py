"""The node: the decisions of a ``kvstore-server``, message by message.

This is the main path. The node gets a request of an engine's process with the current time, checks
it, calls the page table, and leaves answers in ``outbox`` and other effects in ``actions``. It does
no I/O and reads no clock, so the socket server, the embedded store and simulations use the same
object:

1. ``connected`` / Hello: a process joins its engine's session.
2. OpenSpace: identifies the KV, and compares its layout.
3. Lookup: how long is the prefix? HIT, MISS, or PENDING (the answer waits, with a deadline).
4. BeginPut → the client copies bytes → CommitPut: pages become READY and are announced.
5. Acquire → the client copies or views, checking digests → Release.
6. ``disconnected``, ``process_ended``, ``advance``: what engines held is released, but no slot is
   reused while a process may still access it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final, TypeVar

from kvstore.node.awaited import RoomFor, give_up
from kvstore.node.copies import CopyRequests
from kvstore.node.hello import free_label, refuse_hello, session_of
from kvstore.node.leaving import LeavingProcesses
from kvstore.node.requests import NodeLimits, Requests, refuse_others
from kvstore.node.waiting import PATIENT, PatientRequests, Waiter, WaitingRoom, request_bytes
from kvstore.protocol import wire
from kvstore.protocol.errors import InvalidArgument, KVStoreError, ProtocolError
from kvstore.protocol.page import KEY_BYTES
from kvstore.state.metering import Histogram
from kvstore.state.remote.jobs import FetchEnd, Holding, PeerLimits, SpreadEnd
from kvstore.state.remote.pages import RemotePages
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import Abandoned, Action
from kvstore.state.tree.sessions import Peer, Process, Session
from kvstore.state.tree.slots import SlotTable

T = TypeVar("T")

WAIT_MS_MAX: Final = 60_000
SWEEP_STEPS = 64
"""Steps in one turn of removing descendants of dropped pages."""
_NS_PER_MS: Final = 1_000_000


class Node:
    """The decisions of one node.

    Args:
        name: the node's name.
        boot: 16 bytes that differ at every start.
        slots: the slots of the host tier.
        limits: limits of one engine.
        new_token: generates an unguessable session token.
        policy: eviction policy of the memory.

    Attributes:
        outbox: answers to send, (connection, answer), in order.
        actions: pages that became READY or left the index, in order, to be published.
        closing: connections to close, because their client has given them up.
        latencies: durations of requests of these types. The caller of :meth:`receive` measures the
            requests that it answers at once, because the node has no clock.
        unfinished: there is more work than one turn does; call :meth:`go_on` soon.
        leaving: processes that were lost, or have ended, and hold something.
    """

    def __init__(
        self, name: str, boot: bytes, slots: SlotTable, limits: NodeLimits,
        new_token: Callable[[], bytes], policy: str = "lru",
    ) -> None:  # fmt: skip
        self.name = name
        self.boot = boot
        self.limits = limits
        self.pages = PageTable(slots, policy)
        self.pages.residents.ghosts.policy = policy
        self.sessions: dict[bytes, Session] = {}
        self.processes: dict[int, Process] = {}
        self.outbox: list[tuple[int, wire.Answer]] = []
        self.actions: list[Action] = []
        self.closing: list[int] = []
        self.unfinished = False
        #: What other nodes have; None = this node is alone. See :meth:`join`.
        self.remote: RemotePages | None = None
        self._new_token = new_token
        self._peers: dict[int, Peer] = {}
        #: Identity of a process → its connections that are open, or hold something.
        self._connections: dict[int, dict[int, None]] = {}
        self.waiting = WaitingRoom()
        #: More deadlines have passed than one turn applied.
        self._overdue = False
        self.leaving = LeavingProcesses(self.pages, limits.turn_pages, limits.unwatched_ns)
        meter = self.pages.meter
        self.latencies: dict[type, Histogram] = {
            wire.Lookup: meter.lookup, wire.Acquire: meter.acquire,
        }  # fmt: skip
        self._requests = asked = Requests(self.pages, limits, boot)
        self._patient = PatientRequests(asked, CopyRequests(self.pages, asked))
        self._handlers: dict[type, Callable[[Process, Any, int], wire.Answer | None]] = {
            **dict.fromkeys(PATIENT, self._answer_or_wait),
            wire.OpenSpace: lambda process, request, _: asked.open_space(process, request),
            wire.Release: lambda process, request, _: asked.release(process, request),
            wire.CommitPut: asked.commit_put,
            wire.StorePage: asked.store_page,
            wire.AbortPut: lambda process, request, _: asked.abort_put(process, request),
            wire.Corrupt: lambda process, request, _: asked.corrupt(process, request),
            wire.KeepConversation: lambda process, request, _: asked.keep(process, request),
            wire.Settled: self._settled,
            wire.ReportPrefill: lambda process, request, _: asked.report_prefill(process, request),
            wire.Ping: lambda _process, request, _: wire.Pong(request.id),
        }

    def join(self, limits: PeerLimits) -> None:
        """Get pages of other nodes from now on: :attr:`remote` has jobs for the peer side."""
        assert self.remote is None
        self.remote = self._requests.remote = RemotePages(self.pages, limits)

    # ---- connections ------------------------------------------------------------------------

    def connected(self, connection: int, peer: Peer) -> None:
        """A process has connected; ``peer``: its identity from the kernel."""
        assert connection not in self._peers
        assert connection not in self.processes, "what that one held would be this one's"
        self._peers[connection] = peer
        self._connections.setdefault(peer.identity, {})[connection] = None

    def receive(self, connection: int, request: wire.Request, now_ns: int) -> bool:
        """Process one request; its answer, if any, is added to ``outbox``.

        Returns:
            Whether it was answered at once; otherwise it has no answer, or waits for a better one.
        """
        handler = self._handlers.get(type(request))
        process = self.processes.get(connection)
        self.pages.moment.now_ns = now_ns
        try:
            if process is not None:
                if process.lost:
                    self.closing.append(connection)
                    raise ProtocolError("this connection was given up: a later one took its place")
                refuse_others(request, process.peer)
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
        return answer is not None

    def disconnected(self, connection: int, now_ns: int, *, ended: bool) -> None:
        """A connection was closed; ``ended``: its process is known to have ended too."""
        self.pages.moment.now_ns = now_ns
        peer = self._peers.pop(connection, None)
        if peer is not None:
            self._left(connection, peer)
        process = self.processes.get(connection)
        if process is not None:
            self._stop_waiting(process)
            if ended or process.idle:
                self._end(process)
            elif process not in self.leaving.ending:  # else it has settled, and is being released
                self._lose(process)
        self._after(now_ns)

    def process_ended(self, identity: int, now_ns: int) -> None:
        """The kernel reports that a process has ended: it accesses no bytes any more.

        Its open connections (a child process may hold them) are added to :attr:`closing`, including
        those without an accepted Hello, because a later Hello would be accepted.
        """
        self.pages.moment.now_ns = now_ns
        known = self._connections.get(identity, {})
        ended = [self.processes[at] for at in known if at in self.processes]
        self.closing += [at for at in known if at in self._peers]
        for process in ended:
            self._end(process)
        assert all(process.lost for process in ended)
        self._after(now_ns)

    def disk_completed(
        self, job: int, error: KVStoreError | None, now_ns: int, tokens: bytes = b"",
        failed: tuple[int, ...] = (), *, last: bool = True,
    ) -> None:  # fmt: skip
        """The SSD tier has completed a job; ``error`` None = success.

        ``tokens``: of a record that was read. ``failed``: segments that it could not sync.
        ``last``: no other job's end follows in this turn; what waits goes on after the last one.
        """
        self.pages.moment.now_ns = now_ns
        if self.pages.tiers.completed(job, error, tokens, failed, last=last):
            self.waiting.note_room()
        if last:
            self._after(now_ns)

    def located(self, number: int, holdings: Sequence[Holding], now_ns: int) -> None:
        """The directory has answered a :class:`~kvstore.state.remote.jobs.Locate`."""
        self._from_peers(now_ns).chains.located(number, holdings, now_ns)
        self._after(now_ns)

    def peer_fetched(self, end: FetchEnd, now_ns: int) -> None:
        """A job of a peer has ended; unknown jobs are ignored."""
        self._from_peers(now_ns).peer_fetched(end)
        self._after(now_ns)

    def peer_settled(self, job: int, now_ns: int) -> None:
        """Nothing writes into the slots of a job that ended unsettled any more."""
        self._from_peers(now_ns).peer_settled(job)
        self._after(now_ns)

    def peer_spread(self, end: SpreadEnd, now_ns: int) -> None:
        """A :class:`~kvstore.state.remote.jobs.Spread` has ended."""
        self._from_peers(now_ns).spreads.finish(end)
        self._after(now_ns)

    def _from_peers(self, now_ns: int) -> RemotePages:
        assert self.remote is not None
        self.pages.moment.now_ns = now_ns
        self.waiting.note_room()
        return self.remote

    def advance(self, now_ns: int) -> None:
        """Apply all deadlines up to ``now_ns``: leases, pages with a TTL, waiting requests."""
        assert now_ns >= self.pages.moment.now_ns, "the clock never goes back"
        self.pages.moment.now_ns = now_ns
        self._overdue = self.pages.expire(now_ns)
        self.pages.tiers.advance(now_ns)
        if self.remote is not None:
            self.remote.advance()
        for process in self.leaving.retirement.advance(now_ns):
            self._end(process)
        self.waiting.wake_due(now_ns)
        self.waiting.try_some()
        self._after(now_ns)

    def go_on(self, now_ns: int) -> None:
        """Continue work that one turn could not finish; see :attr:`unfinished`."""
        assert now_ns >= self.pages.moment.now_ns, "the clock never goes back"
        self.pages.moment.now_ns = now_ns
        self._overdue = self.pages.expire(now_ns)
        self.pages.residents.drop_orphans(SWEEP_STEPS)
        drained = self.pages.draining.now
        self.pages.room.drain(SWEEP_STEPS)
        offered = self.pages.residents.offer_more(SWEEP_STEPS)
        offered += self.pages.eviction.sweep(SWEEP_STEPS) + self.pages.disk.take_passed()
        if offered or self.pages.draining.now is not drained:
            self.waiting.note_room()
        self.pages.room.load_more()
        self.pages.ahead.make_room()
        self._after(now_ns)

    def operate(self, change: Callable[[PageTable], T], now_ns: int) -> T:
        """Carry out an operator's change of the page table, with its effects."""
        self.pages.moment.now_ns = now_ns
        try:
            return change(self.pages)
        finally:
            self.waiting.note_room()
            self._after(now_ns)

    def waits_for(self, identity: int) -> bool:
        """Whether the node holds, or may come to hold, anything until this process ends."""
        return identity in self._connections

    # ---- requests ---------------------------------------------------------------------------

    def _hello(self, connection: int, request: wire.Hello) -> wire.Answer:
        if connection in self.processes:
            raise ProtocolError("a connection says Hello once")
        peer = self._peers[connection]
        refuse_hello(request, peer, self.processes.values())
        engine = free_label(request.engine, self.sessions.values(), self.pages.counts)
        session = session_of(request, peer, self.sessions, self._new_token, self.limits)
        own = session.of(request.origin)
        if request.number and any(one.number >= request.number for one in own):
            raise ProtocolError(f"connection {request.number} was given up for a later one")
        for older in own:
            if not older.lost:
                # A client that reconnects has given up its old connection.
                self._stop_waiting(older)
                self._lose(older)
                self.closing.append(older.connection)
        assert all(older.lost for older in own), "two connections of one process"
        session.engine = session.engine or engine
        process = Process(connection, peer, session, request.origin, request.number)
        self.processes[connection] = session.processes[connection] = process
        return wire.Welcome(
            request.id, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, self.boot, self.name,
            session.token, self.pages.slots.extent_bytes, session.quota_bytes,
        )  # fmt: skip

    def _settled(self, process: Process, request: wire.Settled, _now_ns: int) -> None:
        if request.before > process.number:
            raise ProtocolError(f"{process.number} cannot settle up to {request.before}")
        for other in process.session.of(process.origin):
            if other.lost and 0 < other.number < request.before:
                self._end(other)

    # ---- internal ---------------------------------------------------------------------------

    def _lose(self, process: Process) -> None:
        """The connection of a process was lost; the process may still access bytes."""
        if process.peer.remote:
            self._end(process)  # it touches no memory of this node, and checks digests
        else:
            self.leaving.lose(process)

    def _end(self, process: Process) -> None:
        """The process accesses no bytes any more: :meth:`_after` releases what it held."""
        if process not in self.leaving.ending:
            self._stop_waiting(process)
            self.leaving.end(process)

    def _let_go(self, now_ns: int) -> None:
        """Release what lost and ended processes held, up to the limit of one turn."""
        for process in self.leaving.go_on(now_ns):
            self._forget(process)
        self.waiting.note_room()

    def _forget(self, process: Process) -> None:
        """Remove an ended process that holds nothing."""
        assert process.lost
        assert process.idle
        session = process.session
        del self.processes[process.connection]
        self._left(process.connection, process.peer)
        del session.processes[process.connection]
        if not session.processes:
            assert session.used_bytes == 0
            self.pages.spaces.left(session)
            del self.sessions[session.token]

    def _left(self, connection: int, peer: Peer) -> None:
        """A connection was closed, or holds nothing any more: forget it after both."""
        if connection not in self._peers and connection not in self.processes:
            del self._connections[peer.identity][connection]
            if not self._connections[peer.identity]:
                del self._connections[peer.identity]

    def _refuse(self, request: wire.Request, error: KVStoreError) -> wire.Failure | None:
        self.pages.counts[f"refused_{error.code}"] += 1
        number = getattr(request, "id", 0)
        field = getattr(error, "field", "")
        return wire.Failure(number, error.code, str(error), field) if number else None

    # ---- waiting ----------------------------------------------------------------------------

    def _answer_or_wait(self, process: Process, request: Any, now_ns: int) -> wire.Answer | None:
        """Answer, unless the request may wait and there is something to wait for."""
        if not 0 <= request.wait_ms <= WAIT_MS_MAX:
            raise InvalidArgument("wait_ms", f"{request.wait_ms} is outside 0..{WAIT_MS_MAX}")
        waits = request.wait_ms > 0 and self._may_wait(process, request)
        answer, awaited = self._patient.first[type(request)](process, request, now_ns, waits)
        if awaited is None or not waits:
            self._requests.count_found(process, request, answer)
            return answer
        deadline_ns = now_ns + request.wait_ms * _NS_PER_MS
        token, size = process.session.token, request_bytes(request)
        self.waiting.add(
            Waiter(process.connection, token, request, size, now_ns, deadline_ns, awaited)
        )
        return None

    def _may_wait(self, process: Process, request: Any) -> bool:
        """Whether the limits of its session and of the node allow one more waiting request."""
        return self.waiting.admits(process.session.token, request_bytes(request))

    def _resume(self, waiter: Waiter, now_ns: int) -> bool:
        """Try a waiting request again, after its event or its deadline.

        Returns:
            whether it found no room again.
        """
        process, request = self.processes[waiter.connection], waiter.request
        assert not process.lost, "nobody would read the answer"
        answer: wire.Answer | None
        awaited: Hashable = None
        try:
            answer, awaited = self._patient.ask_again(
                process, request, now_ns, waiter.awaited, waits=now_ns < waiter.deadline_ns
            )
        except KVStoreError as error:
            answer = self._refuse(request, error)
        if awaited is not None and now_ns < waiter.deadline_ns:
            return self.waiting.add_again(waiter, awaited)
        if isinstance(waiter.awaited, RoomFor):
            self.waiting.note_room()  # where one found room, others may
        if answer is not None:
            if awaited is not None and isinstance(answer, wire.Failure):
                self.pages.counts[f"refused_{answer.code}"] += 1
            self._requests.count_found(process, request, answer)
            for latency in (self.pages.meter.wait, self.latencies.get(type(request))):
                if latency is not None:
                    latency.observe(now_ns - waiter.since_ns)
            self.outbox.append((waiter.connection, answer))
        return False

    def _stop_waiting(self, process: Process) -> None:
        for waiter in self.waiting.of(process.connection):
            self.waiting.remove(waiter)
            give_up(self.pages, process, waiter.awaited)
        assert not process.fetches, "pages would stay pinned for a request that is gone"

    def _after(self, now_ns: int) -> None:
        """Collect the page table's effects, and resume waiting requests as one turn allows."""
        if self.leaving.losing or self.leaving.ending:
            self._let_go(now_ns)
        self._wake()
        if self.waiting.count:
            self._resume_some(now_ns)
        self.unfinished = bool(
            self.leaving.losing or self.leaving.ending or self._overdue
            or (self.waiting.count and self.waiting.may_go_on)
            or self.pages.residents.unfinished or self.pages.ahead.used
        )  # fmt: skip

    def _resume_some(self, now_ns: int) -> None:
        """Resume waiting requests whose turn it is, within one turn's limit."""
        if self.pages.draining.take_emptied():
            self.waiting.note_room()
        if self.waiting.put_off(took_long=self.pages.disk.took_long()):
            return
        keys_left, in_vain = self.limits.turn_pages, False
        while keys_left > 0 and not in_vain and (waiter := self.waiting.take()) is not None:
            keys_left -= 1 + len(waiter.request.keys) // KEY_BYTES
            in_vain = self._resume(waiter, now_ns)  # that takes as long as many keys
            self._wake()

    def _wake(self) -> None:
        """Collect the effects since the last call; requests that waited for them become ready."""
        ended: list[Hashable] = []
        actions, fetched, disk = self.pages.actions, self.pages.fetches.ended, self.pages.disk
        self.actions += [action for action in actions if not isinstance(action, Abandoned)]
        if fetched:
            ended += fetched
            fetched.clear()
        if disk.acknowledged:
            ended += disk.acknowledged
            disk.acknowledged.clear()
        if self.remote is not None:
            ended += self.remote.chains.answered
            self.remote.chains.answered.clear()
            ended += self.remote.spreads.ended
            self.remote.spreads.ended.clear()
        begun = self._requests.begun
        if self.waiting.count and self.waiting.awaits_events:
            things = {(at.space.number, key): None for at in actions for key in at.keys}
            things |= {(number, key): None for number, keys in begun for key in keys}
            for thing in [*things, *ended]:
                self.waiting.wake(thing)
        begun.clear()
        actions.clear()

    def next_deadline_ns(self) -> int:
        """When :meth:`advance` must be called next; 0 = no deadline."""
        disk = self.pages.disk
        deadlines = (
            self.waiting.next_deadline_ns() if self.waiting.count else 0,
            self.pages.next_deadline_ns(),
            self.leaving.retirement.next_deadline_ns(),
            disk.next_deadline_ns() if disk.exists else 0,
            self.remote.next_deadline_ns() if self.remote is not None else 0,
        )
        return min((at for at in deadlines if at), default=0)
