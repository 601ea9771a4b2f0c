"""Handoffs over Mooncake's Transfer Engine, beside the link: prefill writes into decode's pool.

Each side has one child process with an engine (decisions 22 and 34): prefill's writes, decode's is
written to. Neither blocks the engine's process, and both are killed when they must end.

Mooncake has no authentication: a process that reaches the port of decode's engine can write to its
pool.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvstore.handoff.messages import LandingPlace
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.handoff.writing import BlockWrite, EngineUp, WriteEnded
from kvstore.protocol.errors import ConfigError
from kvstore.transport.base import TICKET_BYTES, PageTransfer, Range, TransferEnd, TransportEvent
from kvstore.transport.engine import RESTART_S, START_S, MooncakeEngine
from kvstore.transport.engine_messages import (
    EngineReady,
    EngineRefused,
    MapMemory,
    MemoryMapped,
    StartEngine,
)
from kvstore.transport.mooncake import MooncakeTransport

MOONCAKE: Final = "mooncake"
"""Name of the transport, in registrations and announcements."""
WRITE_S: Final = 10.0
"""A write that has not ended then has failed; less than the silence of TRANSFERRING."""
GATHER_BYTES: Final = 16 << 20
"""Memory for heads on their way to ranks that have others: sixteen jobs of 1 MiB."""
STAGED_BYTES: Final = 64 << 20
_IN_FLIGHT_BYTES: Final = 1 << 30
"""Never reached: each of 64 links has four jobs of 1 MiB, or of one block, at a time."""
_END_S: Final = 5.0
_KILL_S: Final = 0.05
_TURN_S: Final = 1.0
_STEP_S: Final = 0.01
_log: Final = logging.getLogger(__name__)


class MooncakeWriter:
    """Prefill's end; see :class:`kvstore.handoff.writing.BlockWriter`.

    Args:
        memory: in which all of the pool is; it outlives this.
        host: of this machine, for the engine; it listens on all interfaces whatever it is.
        protocol: ``rdma``, or ``tcp`` for tests.

    Raises:
        ConfigError: Mooncake is not installed, finds no device, or cannot register the memory.
    """

    transport = MOONCAKE

    def __init__(
        self, memory: SharedMemory, *, host: str = "127.0.0.1", protocol: str = "rdma"
    ) -> None:
        try:
            self._mooncake = MooncakeTransport(
                host, _IN_FLIGHT_BYTES, protocol=protocol, serves=False, patient=True
            )
        except ConfigError as error:
            why = str(error).partition(": ")[2]
            raise ConfigError(f"handoffs over Mooncake: {why}") from error
        self._gathered = SharedMemory(GATHER_BYTES)
        self.gather_memory = np.frombuffer(self._gathered.buffer, dtype=np.uint8)
        for one in (memory, self._gathered):
            self._mooncake.register(one.address, one.size_bytes, one.descriptor)
        wanted = memory.size_bytes + GATHER_BYTES
        until_s = time.monotonic() + START_S
        while self._mooncake.stats()["registered_bytes"] < wanted:
            if time.monotonic() > until_s:
                self._mooncake.close()
                self._gathered.close()
                raise ConfigError("handoffs over Mooncake: the pool was not registered")
            time.sleep(_STEP_S)
        self._lock = threading.Lock()
        self._moving: set[int] = set()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ended: WriteEnded | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-handoff-writes")

    def begin(self, ended: WriteEnded) -> None:
        """See :class:`~kvstore.handoff.writing.BlockWriter`."""
        self._ended = ended
        self._thread.daemon = True
        self._thread.start()

    def takes(self, write: BlockWrite) -> bool:
        """See :class:`~kvstore.handoff.writing.BlockWriter`."""
        return not self._closed and self._mooncake.takes(_transfer(write))

    def submit(self, write: BlockWrite) -> None:
        """See :class:`~kvstore.handoff.writing.BlockWriter`."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._mooncake.write(_transfer(write))  # if it raises, nothing was begun
                self._moving.add(write.number)
        if closed:
            self._tell(write.number, "the transport is closed", doubtful=False)

    def close(self) -> None:
        """See :class:`~kvstore.handoff.writing.BlockWriter`; may be repeated."""
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        if self._thread.ident is not None:  # it was started
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._mooncake.close()
        self._gathered.close()
        os.close(self._wake)
        for number in sorted(self._moving):
            self._tell(number, "the transport was closed", doubtful=True)

    def _run(self) -> None:
        whys: dict[int, tuple[str, bool]] = {}  # ended, but our memory may still be read
        while not self._closed:
            for event in self._events():
                try:
                    self._hear(event, whys)
                except Exception:  # nobody would be told the end of any other write
                    _log.exception("%s continues after an internal error", self._thread.name)

    def _events(self) -> list[TransportEvent]:
        """Wait for ends."""
        try:
            _ready([self._mooncake.fileno(), self._wake], -1.0)
            return self._mooncake.poll()
        except Exception:  # as above
            _log.exception("%s continues after an internal error", self._thread.name)
            time.sleep(_STEP_S)
            return []

    def _hear(self, event: TransportEvent, whys: dict[int, tuple[str, bool]]) -> None:
        if isinstance(event, TransferEnd):
            failed = event.error is not None
            whys[event.number] = str(event.error) if failed else "", failed and event.begun
            if not event.settled:
                return
        number = int(event.number)  # type: ignore[union-attr]  # no tickets are granted here
        with self._lock:
            self._moving.discard(number)
        why, doubtful = whys.pop(number)
        self._tell(number, why, doubtful=doubtful)

    def _tell(self, number: int, why: str, *, doubtful: bool) -> None:
        assert self._ended is not None
        self._ended(number, why, doubtful)


class MooncakeLanding:
    """Decode's end; see :class:`kvstore.handoff.writing.LandingEngine`.

    Args:
        memory: in which all of the pool is; it outlives this.
        planes: address of block 0 of each plane of the pool.
        host: at which prefill reaches this machine; the engine listens on all interfaces whatever
            it is, at ports of its own choice from 15000 to 17000.
        protocol: ``rdma``, or ``tcp`` for tests.
        staged_bytes: memory for heads from ranks that have others, before they are scattered into
            the pool; a handoff needs as much as its KV have, or they go over the link. At least 1.

    Raises:
        ConfigError: Mooncake is not installed, finds no device, or cannot register the memory.
    """

    transport = MOONCAKE

    def __init__(
        self, memory: SharedMemory, planes: Sequence[int], *, host: str = "127.0.0.1",
        protocol: str = "rdma", staged_bytes: int = STAGED_BYTES,
    ) -> None:  # fmt: skip
        self._staged = SharedMemory(staged_bytes)
        self.staged_address = self._staged.address
        self._regions = (memory, self._staged)
        self._mapped: dict[int, int] = {}  # address here → in the engine's process
        self._memory = memory
        self._offsets = np.array(planes, dtype=np.uint64) - np.uint64(memory.address)
        self._engine = MooncakeEngine(StartEngine(host, protocol))
        self._number = 1
        self._place: LandingPlace | None = None  # None = it is not up
        self._refused = ""
        self._to_end = 0
        self._lock = threading.Lock()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._up: EngineUp | None = None
        self._gone: Callable[[int], None] | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-handoff-engine")
        until_s = time.monotonic() + START_S
        self._engine.begin(time.monotonic_ns())
        while time.monotonic() < until_s and not (self.place or self._engine.ending):
            self._wait(_TURN_S)
        if self._place is None:
            self.close()
            raise ConfigError(f"handoffs over Mooncake: {self._refused or 'it does not start'}")

    def begin(self, up: EngineUp, ended: Callable[[int], None]) -> None:
        """See :class:`~kvstore.handoff.writing.LandingEngine`."""
        assert self._place is not None
        self._up, self._gone = up, ended
        up(self._number, self._place, self._staged_there())
        self._thread.daemon = True
        self._thread.start()

    def end(self, number: int) -> None:
        """See :class:`~kvstore.handoff.writing.LandingEngine`."""
        with self._lock:
            self._to_end = number
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """See :class:`~kvstore.handoff.writing.LandingEngine`; may be repeated."""
        with self._lock:
            first, self._closed = not self._closed, True
        if not first:
            return
        if self._thread.ident is not None:  # it was started
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        if not self._engine.end(time.monotonic() + _END_S):
            _log.error("a Mooncake process is still running after it was killed")
        elif self._place is not None and self._gone is not None:
            self._gone(self._number)
        self._staged.close()
        os.close(self._wake)

    @property
    def place(self) -> LandingPlace | None:
        """Where prefill may write now, and all planes of the pool; None = no engine is up."""
        return self._place

    def _run(self) -> None:
        while not self._closed:
            try:
                self._keep(time.monotonic_ns())
                idle = self._place is not None and not self._engine.ending
                self._wait(_TURN_S if idle else _KILL_S)
            except Exception:  # nobody would end an engine that still writes
                _log.exception("%s continues after an internal error", self._thread.name)
                time.sleep(_KILL_S)

    def _keep(self, now_ns: int) -> None:
        """End the process if it has to end, and start one where there is none."""
        engine = self._engine
        late = engine.process is not None and self._place is None and now_ns > engine.start_ns
        if late or (self._to_end == self._number and self._place is not None):
            engine.ending = True
        if engine.ending:
            if not engine.end(time.monotonic() + _KILL_S):
                return
            engine.start_ns = now_ns
            if self._place is None:  # it has never been up: do not try without a pause
                engine.start_ns += int(RESTART_S * 1e9)
            else:
                self._place = None
                self._number += 1  # first: none has the number of one that has ended
                assert self._gone is not None
                self._gone(self._number - 1)
        if engine.process is None and now_ns >= engine.start_ns:
            engine.begin(now_ns)

    def _wait(self, wait_s: float) -> None:
        """Wait for a message of the process, or for :meth:`end`."""
        process = self._engine.process
        watched = [self._wake]
        if process is not None and not self._engine.ending:
            watched.append(process.fileno())
        ready = _ready(watched, wait_s)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if ready != [self._wake] and ready:
            self._hear()

    def _hear(self) -> None:
        engine = self._engine
        assert engine.process is not None
        messages = engine.process.receive()
        if messages is None:
            engine.ending = True
            return
        for message in messages:
            match message:
                case EngineReady(port):
                    engine.ready(port)
                    self._mapped.clear()
                    for memory in self._regions:
                        ask = MapMemory(memory.address, memory.size_bytes, self._number)
                        sent = engine.process.send(ask, memory.descriptor)
                        engine.ending = engine.ending or not sent
                case EngineRefused(why):
                    self._refused, engine.ending = why, True
                case MemoryMapped(start=start, address=address) if address:
                    self._mapped[start] = address
                    if len(self._mapped) == len(self._regions):
                        self._begin()
                case MemoryMapped():
                    self._refused, engine.ending = "the pool was not registered", True

    def _begin(self) -> None:
        """All memory is registered."""
        pool = np.uint64(self._mapped[self._memory.address])
        planes = (self._offsets + pool).astype("<u8").tobytes()
        self._place = LandingPlace(MOONCAKE, self._engine.endpoint, planes)
        if self._up is not None:
            self._up(self._number, self._place, self._staged_there())

    def _staged_there(self) -> range:
        address = self._mapped[self._staged.address]
        return range(address, address + self._staged.size_bytes)


def _ready(descriptors: Sequence[int], wait_s: float) -> list[int]:
    """The readable descriptors, after at most ``wait_s`` seconds; less than 0 = no limit."""
    watched = select.poll()
    for descriptor in descriptors:
        watched.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in watched.poll(wait_s * 1000)]


def _transfer(write: BlockWrite) -> PageTransfer:
    count = len(write.here)
    return PageTransfer(
        write.number,
        write.endpoint,
        bytes(TICKET_BYTES),
        [Range(0, 0, 0, write.block_bytes)] * count,
        write.here,
        np.zeros(0, dtype=np.uint64),
        b"",
        time.monotonic_ns() + int(WRITE_S * 1e9),
        write.there.astype("<u8").tobytes(),
    )
