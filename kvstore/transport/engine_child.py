"""``python -m kvstore.transport.engine_child SOCKET``: a Mooncake Transfer Engine.

Started by :class:`kvstore.transport.engine_process.EngineProcess` only. It maps the memory that it
gets, and either lets peers read it or reads pages of theirs into it. It ends when the socket's
other end is closed, also while the engine blocks.

One item is one batch, for ``transfer_check_status`` looks at the first item of a batch only: of
eight pages of 8 MiB it said "completed" when five had arrived.
"""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter, deque
from typing import Any, Final, Protocol

import numpy as np

from kvstore.mover.memory import huge_bytes, map_shared, prefer_huge_pages, unmap
from kvstore.protocol.errors import KVStoreError
from kvstore.transport.base import PageArrival, PageTransfer, Range
from kvstore.transport.engine_messages import (
    Contacted,
    Contacting,
    EngineReady,
    EngineRefused,
    FromEngine,
    MapMemory,
    MemoryMapped,
    MessageReader,
    PagesRead,
    ReadPages,
    StartEngine,
    UnmapMemory,
    framed,
)
from kvstore.transport.regions import Regions

ITEM_BYTES_MAX: Final = 8 << 20
"""Maximum bytes of adjacent pages that are read together."""
WINDOW_ITEMS: Final = 128
WINDOW_BYTES: Final = 32 << 20
"""Maximum bytes of one read in progress."""
ITEMS_MAX: Final = 512
"""Maximum items in progress to one peer: with 1,024, and 1,024 waiting, the engine may fail for
good."""
_INSTALL: Final = "pip install '.[mooncake]' in the clone, and install libibverbs1"
_PAUSE_S: Final = 50e-6
_RECEIVE_BYTES: Final = 1 << 20
_DESCRIPTORS_MAX: Final = 64


class TransferEngine(Protocol):
    """The functions of Mooncake's engine that are used, with their names there."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """0 also for a protocol that it does not have."""

    def get_local_topology(self) -> str:
        """Its devices, as JSON."""

    def get_rpc_port(self) -> int:
        """Where it listens."""

    def register_memory(self, address: int, length: int) -> int:
        """0 = it is registered."""

    def unregister_memory(self, address: int) -> int:
        """0 = it was registered."""

    def batch_transfer_async_read(
        self, endpoint: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        """A number for :meth:`transfer_check_status`; 0 = it was not started."""

    def batch_transfer_async_write(
        self, endpoint: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        """The same; it has arrived when the peer can read it."""

    def transfer_check_status(self, batch: int) -> int:
        """0 = in progress, 1 = the first item has arrived, else it failed."""


class _Read:
    """A transfer in progress; ``waiting``: first page of each item, and the page after its last."""

    def __init__(self, asked: ReadPages, transfer: PageTransfer, remote: list[int]) -> None:
        self.number = asked.number
        self.write = asked.write
        self.endpoint = asked.endpoint
        self.transfer = transfer
        self.remote = remote
        self.local = transfer.local.tolist()
        self.good = bytearray(len(remote))
        self.waiting = deque(_items(self.local, remote, asked.page_bytes))
        self.moving: list[tuple[int, int, int]] = []
        self.moving_bytes = 0
        self.touched = False


class EngineServer:
    """Carries out the node's requests; all on one thread.

    Args:
        engine: created by the caller.
        control: the socket.
        messages: received messages, each with a descriptor or -1; None = the end.
    """

    def __init__(
        self, engine: TransferEngine, control: socket.socket,
        messages: "queue.SimpleQueue[tuple[Any, int]]",
    ) -> None:  # fmt: skip
        self._engine = engine
        self._control = control
        self._messages = messages
        self._memory = Regions()
        self._mapped: dict[int, tuple[int, int]] = {}
        self._reads: dict[int, _Read] = {}
        self._contacted: set[str] = set()
        self._items: Counter[str] = Counter()
        #: What changes registered memory, in order; reads have deadlines and do not wait for it.
        self._changes: deque[tuple[MapMemory | UnmapMemory, int]] = deque()

    def serve(self) -> None:
        """Serve for ever."""
        while True:
            idle = not self._reads and not self._changes
            with contextlib.suppress(queue.Empty):
                self._obey(*self._messages.get(block=idle))
                continue
            changed = bool(self._changes)
            if changed:
                self._change(*self._changes.popleft())
            progress = [self._advance(one) for one in list(self._reads.values())]
            if not changed and not any(progress):
                time.sleep(_PAUSE_S)

    def _obey(self, message: Any, descriptor: int) -> None:
        match message:
            case StartEngine():
                self._start(message)
            case MapMemory() | UnmapMemory():
                self._changes.append((message, descriptor))
            case ReadPages():
                self._begin(message)

    def _change(self, message: MapMemory | UnmapMemory, descriptor: int) -> None:
        if isinstance(message, MapMemory):
            self._map(message, descriptor)
        else:
            self._unmap(message.start)

    def _tell(self, message: FromEngine) -> None:
        self._control.sendall(framed(message))

    # ---- memory -----------------------------------------------------------------------------

    def _start(self, asked: StartEngine) -> None:
        status = self._engine.initialize(asked.host, "P2PHANDSHAKE", asked.protocol, "")
        if status:
            self._tell(EngineRefused(f"Mooncake cannot be initialized: status {status}"))
        elif asked.protocol != "tcp" and not _devices(self._engine.get_local_topology()):
            # It says 0 and would use TCP in silence.
            self._tell(EngineRefused(f"Mooncake finds no device for {asked.protocol}"))
        else:
            self._tell(EngineReady(self._engine.get_rpc_port()))

    def _map(self, asked: MapMemory, descriptor: int) -> None:
        assert descriptor >= 0
        try:
            address = map_shared(descriptor, asked.length)
        except OSError:
            self._tell(MemoryMapped(asked.start, asked.serial, 0))
            return
        finally:
            os.close(descriptor)
        prefer_huge_pages(address, asked.length)
        if self._engine.register_memory(address, asked.length):
            unmap(address, asked.length)
            self._tell(MemoryMapped(asked.start, asked.serial, 0))
            return
        self._memory.add(asked.start, asked.length, address)
        self._mapped[asked.start] = address, asked.length
        self._tell(MemoryMapped(asked.start, asked.serial, address, huge_bytes(address)))

    def _unmap(self, start: int) -> None:
        known = self._mapped.pop(start, None)
        if known is not None:
            self._memory.remove(start)
            self._engine.unregister_memory(known[0])
            unmap(*known)

    # ---- reads ------------------------------------------------------------------------------

    def _begin(self, asked: ReadPages) -> None:
        remote = np.frombuffer(asked.remote, dtype="<u8").tolist()
        there = np.frombuffer(asked.local, dtype="<u8").astype(np.uint64)
        local = self._memory.elsewhere(there, asked.page_bytes)
        if local is None:
            why = "the memory for the pages is not registered"
            self._tell(PagesRead(asked.number, bytes(len(remote)), why))
            return
        seeds = np.frombuffer(asked.seeds, dtype="<u8").astype(np.uint64)
        ranges = [Range(0, 0, 0, asked.page_bytes)] * len(remote)
        transfer = PageTransfer(
            asked.number, asked.endpoint, b"", ranges, local, seeds, asked.digests, 0
        )
        self._reads[asked.number] = _Read(asked, transfer, remote)

    def _advance(self, read: _Read) -> bool:
        """Start items and check those in progress; returns whether anything has changed."""
        before = len(read.waiting), len(read.moving)
        while (
            read.waiting
            and len(read.moving) < WINDOW_ITEMS
            and read.moving_bytes < WINDOW_BYTES
            and self._items[read.endpoint] < ITEMS_MAX
        ):
            if not self._submit(read, *read.waiting.popleft()):
                self._end(read, "the peer cannot be reached")
                return True
        arrived: list[tuple[int, int]] = []
        for item in list(read.moving):
            status = self._engine.transfer_check_status(item[0])
            if not status:
                continue
            read.moving.remove(item)
            read.moving_bytes -= (item[2] - item[1]) * read.transfer.page_bytes
            self._items[read.endpoint] -= 1
            if status != 1:
                self._end(read, "the peer broke off, or refused the pages")
                return True
            arrived.append(item[1:])
        for first, stop in arrived:
            read.good[first:stop] = (
                bytes([PageArrival.RIGHT]) * (stop - first)
                if read.write
                else read.transfer.arrivals(first, stop)
            )
        if not read.waiting and not read.moving:
            self._end(read, "")
        return before != (len(read.waiting), len(read.moving))

    def _submit(self, read: _Read, first: int, stop: int) -> bool:
        size = (stop - first) * read.transfer.page_bytes
        new = read.endpoint not in self._contacted
        if new:
            self._tell(Contacting(read.number))
        engine = self._engine
        submit = (
            engine.batch_transfer_async_write if read.write else engine.batch_transfer_async_read
        )
        batch = submit(read.endpoint, [read.local[first]], [read.remote[first]], [size])
        if new:
            self._tell(Contacted(read.number))
        if batch in (0, -1):
            return False
        self._contacted.add(read.endpoint)
        read.touched = True
        read.moving.append((batch, first, stop))
        read.moving_bytes += size
        self._items[read.endpoint] += 1
        return True

    def _end(self, read: _Read, why: str) -> None:
        del self._reads[read.number]
        self._tell(PagesRead(read.number, bytes(read.good), why, read.touched and bool(why)))


def _items(local: list[int], remote: list[int], size: int) -> list[tuple[int, int]]:
    """Pages that follow each other on both sides, together."""
    found: list[tuple[int, int]] = []
    for at in range(len(local)):
        if found and (at - found[-1][0] + 1) * size <= ITEM_BYTES_MAX:
            first, last = found[-1][0], at - 1
            if local[at] == local[last] + size and remote[at] == remote[last] + size:
                found[-1] = first, at + 1
                continue
        found.append((at, at + 1))
    return found


def _devices(topology: str) -> list[str]:
    """The devices that an engine has found, of all places."""
    return [name for lists in json.loads(topology).values() for some in lists for name in some]


def _receive(control: socket.socket, messages: "queue.SimpleQueue[tuple[Any, int]]") -> None:
    """Receive messages until the node has closed the socket; then end this process.

    It also ends if descriptors are missing, because this process may not have more: another one is
    started.
    """
    reader, descriptors = MessageReader(), deque[int]()
    try:
        with contextlib.suppress(OSError, KVStoreError):
            while True:
                data, came, flags, _ = socket.recv_fds(control, _RECEIVE_BYTES, _DESCRIPTORS_MAX)
                descriptors.extend(came)
                if not data or flags & socket.MSG_CTRUNC:
                    return
                for message in reader.feed(data):
                    needs = isinstance(message, MapMemory)
                    if needs and not descriptors:
                        return
                    messages.put((message, descriptors.popleft() if needs else -1))
    finally:
        os._exit(0)


def main() -> int:
    """Serve until the socket is closed.

    Returns:
        Exit status.
    """
    os.putenv("MC_LOG_LEVEL", "ERROR")  # it says much at each start
    control = socket.socket(fileno=int(sys.argv[1]))
    messages: queue.SimpleQueue[tuple[Any, int]] = queue.SimpleQueue()
    try:
        from mooncake.engine import TransferEngine as Engine
    except ImportError as error:
        control.sendall(framed(EngineRefused(f"{error}: {_INSTALL}")))
        return 1
    receiver = threading.Thread(
        target=_receive, args=(control, messages), name="kvstore-engine-messages", daemon=True
    )
    receiver.start()
    EngineServer(Engine(), control, messages).serve()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
