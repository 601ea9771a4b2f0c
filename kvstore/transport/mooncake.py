"""``mooncake``: pages over Mooncake's Transfer Engine, for networks with RDMA.

There are two processes with an engine. Peers read the registered memory from one of them; the other
one reads from peers and writes to them, and is replaced after a failed or late read, because only
its end ensures that nothing arrives any more.

Mooncake has no tickets, certificates or names: a process that reaches the port of an engine can
read and write all memory that is registered there. So peers get addresses with their leases, and
only the digests of the pages protect a reader from a late read. Only the end of the process that
peers write to protects memory from a late write.
"""

import logging
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count
from typing import Final

import numpy as np

from kvstore.protocol.errors import ConfigError, InvalidArgument, TransferError
from kvstore.transport.attempts import Attempts, Give
from kvstore.transport.base import (
    PLACE_BYTES,
    PageArrival,
    PageTransfer,
    Range,
    TicketEnded,
    TransferEnd,
    TransportEvent,
)
from kvstore.transport.engine import START_S, MooncakeEngine
from kvstore.transport.engine_messages import (
    Contacted,
    Contacting,
    EngineReady,
    EngineRefused,
    FromEngine,
    MapMemory,
    MemoryMapped,
    PagesRead,
    ReadPages,
    StartEngine,
    ToEngine,
    UnmapMemory,
)
from kvstore.transport.open_tickets import OpenTickets
from kvstore.transport.regions import Regions

END_S: Final = 5.0
_TURN_S: Final = 1.0
_KILL_S: Final = 0.05
"""For how long the end of a killed process is waited for at a time."""
_COUNTED: Final = (
    "transfers_done", "transfers_failed", "read_pages", "written_pages", "wrong_pages",
    "processes_lost",
)  # fmt: skip
_log: Final = logging.getLogger(__name__)


class MooncakeTransport:
    """The transport over Mooncake; see :class:`kvstore.transport.base.Transport`.

    Attributes:
        name: ``mooncake``.
        endpoint: ``host:port`` of the engine that peers read from; empty = none runs now.
    """

    name = "mooncake"

    def __init__(
        self, host: str, in_flight_bytes_max: int, *, protocol: str = "rdma", serves: bool = True,
        patient: bool = False,
    ) -> None:  # fmt: skip
        """Start both engines; returns when they are ready.

        Args:
            host: this machine, as peers are told. Mooncake listens on all interfaces whatever it
                is, at ports of its own choice from 15000 to 17000.
            in_flight_bytes_max: bytes of all own transfers together.
            protocol: ``rdma``, or ``tcp`` for tests.
            serves: peers may read from here.
            patient: as of :class:`kvstore.transport.attempts.Attempts`; for writes only.

        Raises:
            ConfigError: Mooncake is not installed or finds no device.
        """
        start = StartEngine(host, protocol)
        self._attempts = Attempts(in_flight_bytes_max, patient=patient)
        self._tickets = OpenTickets()
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        #: Registered memory: address → what is asked of processes, and the descriptor.
        self._registered: dict[int, tuple[MapMemory, int]] = {}
        self._serials = count(1)
        self._known = Regions()
        self._events: deque[TransportEvent] = deque()
        self._reader = MooncakeEngine(start)
        self._owner = MooncakeEngine(start) if serves else None
        #: What registration asks of the processes, in order with the transfers.
        self._asked: deque[tuple[ToEngine, int]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = threading.Event()
        self._refused = ""
        self._thread = threading.Thread(target=self._run, name="kvstore-mooncake", daemon=True)
        self._thread.start()
        self._ready.wait(START_S)
        if not self._all_up():
            why = self._refused or f"not ready within {START_S:.0f} s"
            self.close()
            raise ConfigError(f"cluster.transports: {why}")

    @property
    def endpoint(self) -> str:
        """See the class."""
        return "" if self._owner is None else self._owner.endpoint

    def register(self, address: int, length: int, descriptor: int) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        with self._lock:
            if self._closed:
                return
            if self._known.overlaps(address, length):
                raise InvalidArgument("address", "memory there is registered already")
            own = os.dup(descriptor)
            ask = MapMemory(address, length, next(self._serials))
            self._registered[address] = ask, own
            self._known.add(address, length, address)
            self._asked.append((ask, own))
        self._awake()

    def unregister(self, address: int) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        with self._lock:
            if address not in self._registered:
                return
            _, own = self._registered.pop(address)
            self._known.remove(address)
            for engine in self._engines():
                engine.forget(address)
            self._asked.append((UnmapMemory(address), own))
        self._awake()

    def addresses(self, ranges: Sequence[tuple[Range, int]]) -> bytes | None:
        """See :class:`kvstore.transport.base.Transport`."""
        if self._owner is None or not ranges:
            return None
        there = np.array([address for _, address in ranges], dtype=np.uint64)
        with self._lock:
            if not self._owner.endpoint:
                return None
            found = self._owner.memory.elsewhere(there, max(one.length for one, _ in ranges))
        return None if found is None else found.astype("<u8").tobytes()

    def takes(self, transfer: PageTransfer) -> bool:
        """See :class:`kvstore.transport.base.Transport`."""
        with self._lock:
            return (
                self._attempts.up
                and bool(transfer.addresses)
                and not self._attempts.avoids(transfer.endpoint, time.monotonic_ns())
                and self._has(transfer)
            )

    def _has(self, transfer: PageTransfer) -> bool:
        """Whether the process that reads has registered the memory of a transfer."""
        return self._reader.memory.elsewhere(transfer.local, transfer.page_bytes) is not None

    def read(self, transfer: PageTransfer) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        self._submit(transfer, write=False)

    def write(self, transfer: PageTransfer) -> None:
        """See :class:`kvstore.transport.base.Transport`.

        An end that is not settled says nothing about the peer's memory: bytes may arrive there
        until the peer has revoked the ticket, and its process has ended.
        """
        self._submit(transfer, write=True)

    def _submit(self, transfer: PageTransfer, *, write: bool) -> None:
        transfer.check(verified=not write)
        if len(transfer.addresses) != PLACE_BYTES * len(transfer.remote):
            raise InvalidArgument("addresses", "the peer did not send an address for each page")
        with self._lock:
            why = "the transport is closed" if self._closed else ""
            # The process may still have other memory under the same addresses.
            if self._attempts.up and not self._has(transfer):
                why = "the memory for the pages is not registered"
            if why:
                missing = bytes(len(transfer.remote))
                end = TransferEnd(transfer.number, missing, TransferError(why), settled=True)
                self._tell([end])
                return
            self._attempts.submit(transfer, time.monotonic_ns(), write=write)
            self._publish()
        self._awake()

    def grant(
        self,
        ticket: bytes,
        ranges: Sequence[tuple[Range, int]],
        deadline_ns: int,
        *,
        write: bool = False,
    ) -> None:
        """See :class:`kvstore.transport.base.Transport`; a ticket opens and closes nothing here."""
        with self._lock:
            self._tickets.grant(ticket, ranges, deadline_ns, write=write)

    def revoke(self, ticket: bytes, *, ended: bool = False) -> bool:
        """See :class:`kvstore.transport.base.Transport`.

        It is unknown whether a peer still reads: it compares the data with the digests. It is also
        unknown whether one still writes: unless the peer says that it has ended, the process that
        peers access is ended.
        """
        with self._lock:
            doubtful, owner = self._tickets.revoke(ticket, ended=ended), self._owner
            if not doubtful or self._closed or owner is None or owner.process is None:
                return True
            self._tickets.revoked.append(ticket)
            owner.ending = True
        self._awake()
        return False

    def poll(self) -> list[TransportEvent]:
        """See :class:`kvstore.transport.base.Transport`."""
        if self._closed:
            return []
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        found: list[TransportEvent] = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def fileno(self) -> int:
        """See :class:`kvstore.transport.base.Transport`."""
        return self._event

    def cancel(self, number: int) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        with self._lock:
            self._attempts.cancel(number)
            self._publish()
        self._awake()

    def close(self) -> None:
        """See :class:`kvstore.transport.base.Transport`; may be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(END_S)
        until_s = time.monotonic() + END_S
        for engine in self._engines():
            if not engine.end(until_s):
                _log.error("a Mooncake process is still running after it was killed")
        left = [own for ask, own in self._asked if isinstance(ask, UnmapMemory)]
        for own in [*left, *(own for _, own in self._registered.values())]:
            os.close(own)
        os.close(self._event)
        os.close(self._wake)

    def stats(self) -> dict[str, int]:
        """See :class:`kvstore.transport.base.Transport`."""
        with self._lock:
            owner = self._owner or self._reader
            return {
                **self._counts,
                "in_flight_bytes": self._attempts.in_flight_bytes,
                "replaced_processes": self._attempts.replaced,
                "registered_bytes": owner.memory.total_bytes,
                "registered_huge_bytes": sum(owner.huge.values()),
                "registering_extents": len(self._reader.registering),
                "unregistered_bytes": self._known.total_bytes - owner.memory.total_bytes,
                "tickets": len(self._tickets),
            }

    def _engines(self) -> list[MooncakeEngine]:
        return [self._reader] if self._owner is None else [self._reader, self._owner]

    def _all_up(self) -> bool:
        return all(one.endpoint for one in self._engines())

    def _awake(self) -> None:
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    def _publish(self) -> None:
        """Report the decisions of the attempts; under the lock."""
        events, self._attempts.events = self._attempts.events, []
        self._tell(events)

    def _tell(self, events: Sequence[TransportEvent]) -> None:
        for event in events:
            if isinstance(event, TransferEnd):
                self._counts["transfers_failed" if event.error else "transfers_done"] += 1
                self._counts["wrong_pages"] += event.good.count(PageArrival.WRONG)
        self._events.extend(events)
        if events and not self._closed:
            os.eventfd_write(self._event, 1)

    # ---- the thread of the processes ----------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            try:
                now_ns = time.monotonic_ns()
                for engine in self._engines():
                    self._keep(engine, now_ns)
                self._carry(now_ns)
                self._wait(now_ns)
            except Exception:  # no transfer would be settled any more
                _log.exception("%s continues after an internal error", self._thread.name)
                time.sleep(_KILL_S)

    def _keep(self, engine: MooncakeEngine, now_ns: int) -> None:
        """Start a process where there is none, and end one that is to be replaced."""
        if engine.process is not None and not engine.endpoint and now_ns > engine.start_ns:
            engine.ending = True  # it is never ready
        if engine.ending:
            with self._lock:
                if not engine.end(time.monotonic()):  # the node waits for the lock
                    return
                if engine is self._reader:
                    self._attempts.gone()
                    self._publish()
                else:
                    self._tell([TicketEnded(ticket) for ticket in self._tickets.revoked])
                    self._tickets.revoked.clear()
            engine.start_ns = now_ns + engine.pause_ns
        if engine.process is None and now_ns >= engine.start_ns:
            engine.begin(now_ns)

    def _carry(self, now_ns: int) -> None:
        """Pass requests on to the processes, and apply the deadlines."""
        with self._lock:
            self._attempts.advance(now_ns)
            self._publish()
            asked = list(self._asked)
            self._asked.clear()
            effects, self._attempts.effects = self._attempts.effects, []
        for ask, own in asked:
            for engine in self._engines():
                if engine.endpoint:
                    self._send(engine, ask, own if isinstance(ask, MapMemory) else -1)
            if isinstance(ask, UnmapMemory):
                os.close(own)
        for effect in effects:
            if isinstance(effect, Give):
                self._send(self._reader, ReadPages.of(effect.transfer, write=effect.write))
            else:
                self._reader.ending = True

    def _send(self, engine: MooncakeEngine, message: ToEngine, descriptor: int = -1) -> None:
        if engine.process is not None and not engine.process.send(message, descriptor):
            engine.ending = True

    def _wait(self, now_ns: int) -> None:
        """Wait for messages, until the next deadline."""
        ready = select.poll()
        ready.register(self._wake, select.POLLIN)
        fds = {
            one.process.fileno(): one
            for one in self._engines()
            if one.process is not None and not one.ending
        }
        for fd in fds:
            ready.register(fd, select.POLLIN)
        with self._lock:
            next_ns = self._attempts.next_ns() or now_ns + int(_TURN_S * 1e9)
        wait_s = min((next_ns - time.monotonic_ns()) / 1e9, _TURN_S)
        if any(one.ending or one.process is None for one in self._engines()):
            wait_s = min(wait_s, _KILL_S)
        for fd, _ in ready.poll(max(wait_s, 0.0) * 1000 + 1):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                self._hear(fds[fd])

    def _hear(self, engine: MooncakeEngine) -> None:
        assert engine.process is not None
        messages = engine.process.receive()
        if messages is None:
            engine.ending = True
            self._counts["processes_lost"] += not engine.process.killed
            return
        for message in messages:
            match message:
                case EngineReady(port):
                    self._began(engine, port)
                case EngineRefused(why):
                    self._refused = why
                    self._ready.set()
                case MemoryMapped():
                    self._mapped(engine, message)
                case _:
                    self._advance(message)

    def _began(self, engine: MooncakeEngine, port: int) -> None:
        """A process is ready: register all memory, then pass reads on.

        Registering much memory may take longer than any deadline, and a late read costs the
        process.
        """
        with self._lock:
            asked = {ask.serial for ask, _ in self._asked if isinstance(ask, MapMemory)}
            # It gets those that are asked for now in their turn.
            sent = [one for one in self._registered.values() if one[0].serial not in asked]
            engine.registering = {ask.serial for ask, _ in sent}
            engine.ready(port)
        for ask, own in sent:
            self._send(engine, ask, own)
        if not sent:
            self._has_memory(engine)
        if self._all_up():
            self._ready.set()

    def _mapped(self, engine: MooncakeEngine, message: MemoryMapped) -> None:
        with self._lock:
            ask, _ = self._registered.get(message.start, (None, -1))
            if ask is not None and ask.serial == message.serial:
                engine.mapped(message, ask.length)
        if message.serial in engine.registering:
            engine.registering.discard(message.serial)
            if not engine.registering:
                self._has_memory(engine)

    def _has_memory(self, engine: MooncakeEngine) -> None:
        """A new process has registered all memory, or could not."""
        if engine is self._reader:
            with self._lock:
                self._attempts.started()

    def _advance(self, message: FromEngine) -> None:
        """Process a message of the reading engine."""
        now_ns = time.monotonic_ns()
        with self._lock:
            match message:
                case Contacting(number):
                    self._attempts.contacting(number, now_ns)
                case Contacted():
                    self._attempts.contacted()
                case PagesRead(number, good, ""):
                    written = self._attempts.is_write(number)
                    self._counts["written_pages" if written else "read_pages"] += len(good)
                    self._attempts.arrived(number, good)
                case PagesRead(number, good, why, touched):
                    self._attempts.failed(number, good, why, now_ns, touched=touched)
            self._publish()
