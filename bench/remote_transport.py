"""How fast do pages come through a transport?

A second process has the pages. ``transport/tcp/8MiB/x16`` reads 16 pages of 8 MiB
in one transfer, over loopback. Its bound is one bare TCP connection of the same two processes that
moves the same bytes, and checks nothing.
"""

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, NamedTuple

import numpy as np

from bench import measure
from bench.measure import Result
from bench.remote_owner import ASKED, TICKET, pages_of
from kvstore import mover
from kvstore.transport.base import PageTransfer, TransferEnd
from kvstore.transport.tcp import TcpTransport

MIB: Final = 1 << 20
PAGES: Final = 16
_CASES: Final = {f"transport/tcp/{size}MiB/x{PAGES}": size * MIB for size in (1, 8)}
"""Name → bytes of a page."""
BARE: Final = "bare socket, no digests"
WAIT_S: Final = 30.0
IN_FLIGHT_BYTES_MAX: Final = 1 << 30


def names() -> list[str]:
    """All cases, in their order."""
    return list(_CASES)


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure one case."""
    with reading(_CASES[name]) as reads:
        measured = measure.interleave(reads.transfer, reads.bare, min_seconds=seconds)
        yield measure.throughput(name, PAGES * _CASES[name], measured, BARE)


class Offer(NamedTuple):
    """Where the owner's process offers its pages."""

    pages: str
    bare: int


@contextmanager
def reading(page_bytes: int) -> Iterator["Reads"]:
    """Start the process that has pages of this size, connect to it, and end it afterwards."""
    size_bytes = measure.working_set_bytes(PAGES * page_bytes)
    command = [sys.executable, "-m", "bench.remote_owner", str(size_bytes), str(page_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        try:
            offer = Offer(**json.loads(owner.stdout.readline()))
            with socket.create_connection(("127.0.0.1", offer.bare), WAIT_S) as bare:
                bare.settimeout(None)
                reads = Reads(offer.pages, bare, size_bytes, page_bytes)
                try:
                    yield reads
                finally:
                    reads.close()
            owner.communicate(timeout=WAIT_S)
        finally:
            owner.kill()  # nothing happens if it has ended


class Reads:
    """Reads of pages in two ways; each goes on where the last one of its kind ended.

    Args:
        endpoint: of the owner's transport.
        bare: connection to its bare socket.
        size_bytes: of all its pages.
        page_bytes: of one.

    Attributes:
        last: addresses and seeds of the pages that came through the bare socket last.
    """

    def __init__(
        self, endpoint: str, bare: socket.socket, size_bytes: int, page_bytes: int
    ) -> None:
        self._endpoint, self._bare, self._page_bytes = endpoint, bare, page_bytes
        self._transport = TcpTransport("", IN_FLIGHT_BYTES_MAX)
        bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = measure.prefaulted(size_bytes)
        self._view, self._memory = memory.data, memory
        pages = pages_of(memory.ctypes.data, size_bytes, page_bytes)
        self._ranges = [one for one, _ in pages]
        self._local = np.array([address for _, address in pages], dtype=np.uint64)
        self._seeds = np.arange(len(pages), dtype=np.uint64)
        self._digests = mover.digest(self._local, page_bytes, self._seeds)
        self.last = self._local[:PAGES], self._seeds[:PAGES]
        self._transfers, self._bares = count(), count()
        memory[:] = 0

    def transfer(self) -> float:
        """One transfer; seconds.

        Raises:
            TimeoutError: it did not end.
        """
        number = next(self._transfers)
        first = self._first(number)
        pages = slice(first, first + PAGES)
        start = time.perf_counter()
        self._transport.read(
            PageTransfer(
                number, self._endpoint, TICKET, self._ranges[pages], self._local[pages],
                self._seeds[pages], self._digests[pages].tobytes(),
                time.monotonic_ns() + int(WAIT_S * 1e9),
            )
        )  # fmt: skip
        while not (ends := self._transport.poll()):
            if not select.select([self._transport], [], [], WAIT_S)[0]:
                raise TimeoutError("a transfer did not end")
        seconds = time.perf_counter() - start
        (end,) = ends
        assert isinstance(end, TransferEnd)
        assert end.good == b"\1" * PAGES, f"{end}"
        return seconds

    def bare(self) -> float:
        """The same pages through the bare socket, not checked; seconds."""
        first, size = self._first(next(self._bares)), self._page_bytes
        start = time.perf_counter()
        self._bare.sendall(ASKED.pack(first * size, PAGES * size))
        for page in range(first, first + PAGES):
            target = self._view[page * size : (page + 1) * size]
            while target:
                target = target[self._bare.recv_into(target, 0, socket.MSG_WAITALL) :]
        seconds = time.perf_counter() - start
        self.last = self._local[first : first + PAGES], self._seeds[first : first + PAGES]
        return seconds

    def close(self) -> None:
        """Close the transport."""
        self._transport.close()

    def _first(self, number: int) -> int:
        """The first page of a call."""
        return number * PAGES % len(self._ranges)
