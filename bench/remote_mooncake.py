"""How fast do pages come through Mooncake, beside its bare engine and beside ``tcp``?

``transport/mooncake/1MiB/x16`` reads 16 pages of 1 MiB in one transfer, with digests, over
Mooncake's own TCP; its bound is one ``batch_transfer_sync_read`` of the same pages by a bare
TransferEngine, which checks nothing. ``transport/tcp-beside-mooncake/…`` is the transport ``tcp``
with ``mooncake`` as its bound. Both processes are in a network of their own, because Mooncake
listens on all interfaces.
"""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final, cast

import msgspec
import numpy as np

from bench import measure
from bench.measure import Result
from bench.mooncake_alone import results_alone
from bench.remote_owner import TICKET, TICKET_S, pages_of
from kvstore import mover
from kvstore.mover.memory import map_shared, memory_at
from kvstore.transport.base import PageTransfer, TransferEnd, Transport
from kvstore.transport.mooncake import MooncakeTransport
from kvstore.transport.tcp import TcpTransport

MIB: Final = 1 << 20
PAGES: Final = 16
SIZES_MIB: Final = (1, 8)
BARE: Final = "bare TransferEngine, no digests"
BESIDE: Final = "transport mooncake"
HOST: Final = "127.0.0.1"
WAIT_S: Final = 30.0


def names() -> list[str]:
    """All cases, in their order."""
    kinds = ("mooncake", "tcp-beside-mooncake")
    return [f"transport/{kind}/{size}MiB/x{PAGES}" for kind in kinds for size in SIZES_MIB]


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure one case, in a process with a network of its own; nothing without Mooncake."""
    words = [name, str(seconds)]
    yield from results_alone("bench.remote_mooncake", name, words, timeout_s=10 * seconds + 60)


class Memory:
    """Shared memory with random pages, or none yet; mapped until this process ends."""

    def __init__(self, size_bytes: int, page_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.descriptor = os.memfd_create("kvstore-bench", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size_bytes)
        self.address = map_shared(self.descriptor, size_bytes)
        self.bytes = np.frombuffer(memory_at(self.address, size_bytes), dtype=np.uint8)
        words = self.bytes.view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.pages = pages_of(self.address, size_bytes, page_bytes)

    def register(self, transport: Transport) -> None:
        """Register all of it, and wait until it is."""
        transport.register(self.address, self.size_bytes, self.descriptor)
        until_s = time.monotonic() + WAIT_S
        while transport.stats().get("registered_bytes", self.size_bytes) < self.size_bytes:
            if time.monotonic() > until_s:
                raise TimeoutError("the memory is never registered")
            select.select([transport], [], [], 0.01)


class Reads:
    """Reads of the owner's pages; each goes on where the last one of its kind ended."""

    def __init__(self, offer: dict[str, Any], memory: Memory, page_bytes: int) -> None:
        self._offer = offer
        self._memory = memory
        self._page_bytes = page_bytes
        self._local = np.array([address for _, address in memory.pages], dtype=np.uint64)
        self._remote = np.array(offer["addresses"], dtype="<u8")
        self._seeds = np.arange(len(self._local), dtype=np.uint64)
        self._digests = mover.digest(self._local, page_bytes, self._seeds)
        self._numbers = count()
        memory.bytes[:] = 0

    def through(self, transport: Transport) -> Callable[[], float]:
        """A call that reads 16 pages through a transport, and returns its seconds."""
        endpoint, calls = self._offer[transport.name], count()

        def call() -> float:
            pages, number = self._pages(next(calls)), next(self._numbers)
            start = time.perf_counter()
            transport.read(
                PageTransfer(
                    number, endpoint, TICKET, [one for one, _ in self._memory.pages[pages]],
                    self._local[pages], self._seeds[pages], self._digests[pages].tobytes(),
                    time.monotonic_ns() + int(WAIT_S * 1e9), self._remote[pages].tobytes(),
                )
            )  # fmt: skip
            while not (ends := transport.poll()):
                if not select.select([transport], [], [], WAIT_S)[0]:
                    raise TimeoutError("a transfer did not end")
            seconds = time.perf_counter() - start
            assert cast("TransferEnd", ends[0]).good == b"\1" * PAGES, f"{ends}"
            return seconds

        return call

    def bare(self) -> Callable[[], float]:
        """A call that reads 16 pages with an engine of this process."""
        from mooncake.engine import TransferEngine

        engine, calls = TransferEngine(), count()
        engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
        engine.register_memory(self._memory.address, self._memory.size_bytes)
        sizes = [self._page_bytes] * PAGES

        def call() -> float:
            pages = self._pages(next(calls))
            local, remote = self._local[pages].tolist(), self._remote[pages].tolist()
            start = time.perf_counter()
            status = engine.batch_transfer_sync_read(self._offer["mooncake"], local, remote, sizes)
            seconds = time.perf_counter() - start
            assert status == 0, f"the bare engine said {status}"
            return seconds

        return call

    def _pages(self, number: int) -> slice:
        first = number * PAGES % len(self._local)
        return slice(first, first + PAGES)


def own(size_bytes: int, page_bytes: int) -> None:
    """Serve pages through both transports until standard input ends."""
    memory = Memory(size_bytes, page_bytes)
    mooncake = MooncakeTransport(HOST, 1, protocol="tcp")
    tcp = TcpTransport(f"{HOST}:0", 1)
    for transport in (mooncake, tcp):
        transport.grant(TICKET, memory.pages, time.monotonic_ns() + int(TICKET_S * 1e9))
    memory.register(mooncake)
    addresses = np.frombuffer(mooncake.addresses(memory.pages) or b"", dtype="<u8").tolist()
    offer = {"mooncake": mooncake.endpoint, "tcp": tcp.endpoint, "addresses": addresses}
    sys.stdout.write(json.dumps(offer) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    tcp.close()
    mooncake.close()


def read(name: str, seconds: float) -> list[Result]:
    """Measure one case in this process, against an owner in another one."""
    _, kind, size, _ = name.split("/")
    page_bytes = int(size.removesuffix("MiB")) * MIB
    size_bytes = measure.working_set_bytes(PAGES * page_bytes)
    command = [sys.executable, "-m", "bench.remote_mooncake", str(size_bytes), str(page_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            offer = json.loads(owner.stdout.readline())
            memory = Memory(size_bytes, page_bytes)
            reads = Reads(offer, memory, page_bytes)
            limit = 2 * PAGES * page_bytes
            mooncake = MooncakeTransport(HOST, limit, protocol="tcp", serves=False)
            memory.register(mooncake)
            tcp = TcpTransport("", limit)
            if kind == "mooncake":
                case, bound, what = reads.through(mooncake), reads.bare(), BARE
            else:
                case, bound, what = reads.through(tcp), reads.through(mooncake), BESIDE
            measured = measure.interleave(case, bound, min_seconds=seconds)
            tcp.close()
            mooncake.close()
            owner.communicate(timeout=WAIT_S)
        finally:
            owner.kill()  # nothing happens if it has ended
    return [measure.throughput(name, PAGES * page_bytes, measured, what)]


if __name__ == "__main__":
    if sys.argv[1].startswith("transport/"):
        found = read(sys.argv[1], float(sys.argv[2]))
        sys.stdout.buffer.write(msgspec.json.encode(found))
    else:
        own(int(sys.argv[1]), int(sys.argv[2]))
