"""How fast do pages move between this process and a node's shared memory, and how fast is asking?

A second process runs the node; digests are on. Sizes and counts are in the names of the cases:
``put/8MiB/x16`` is one call with 16 pages of 8 MiB, waited for. ``get`` copies into buffers,
``view`` verifies pages where they are and gives them back. In ``busy`` cases another thread of this
process runs Python all the time (not while the bound is measured). ``roundtrip/p50`` asks for one
key, ``lookup/N`` for N keys that are all there.
"""

import argparse
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from bench import measure, node, ping_pong
from bench.measure import Measured, Memcpy, Progress, Report, Result, timed
from kvstore import wire
from kvstore.client import KVStore
from kvstore.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity
from kvstore.space import Space

Arrays = list[npt.NDArray[np.uint8]]

KIB: Final = 1 << 10
MIB: Final = 1 << 20
POOL_MIB: Final = 1024
ROUND_TRIPS: Final = 32
"""Requests in one measurement of a latency: alternating one by one would measure other caches."""
LOOKUP_COUNTS: Final = (1, 128, 1000, 2048)


class Shape(NamedTuple):
    """Pages of one size and how many of them go in one call.

    Attributes:
        name: as in the names of the cases.
        page_bytes: bytes of one page.
        page_tokens: tokens of one page.
        layers: of the model whose pages have this size.
        count: pages in a call.
        busy: also measured beside a busy thread.
        views: also measured as views.
    """

    name: str
    page_bytes: int
    page_tokens: int
    layers: int
    count: int
    busy: bool
    views: bool


SHAPES: Final = (
    Shape("64KiB/x1", 64 * KIB, 16, 1, 1, busy=False, views=False),
    Shape("64KiB/x128", 64 * KIB, 16, 1, 128, busy=False, views=False),
    Shape("1MiB/x1", MIB, 64, 4, 1, busy=True, views=True),
    Shape("1MiB/x16", MIB, 64, 4, 16, busy=True, views=True),
    Shape("8MiB/x1", 8 * MIB, 64, 32, 1, busy=True, views=True),
    Shape("8MiB/x16", 8 * MIB, 64, 32, 16, busy=True, views=True),
)
"""8 KV heads x 128 in bfloat16: 256 KiB a layer at 64 tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0, help="at least so long for a case")
    parser.add_argument("--cases", type=re.compile, default="", help="only cases that this finds")
    parser.add_argument("--pool-mib", type=int, default=POOL_MIB, help="the node's memory")


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for."""
    wanted = re.compile(options.cases)
    names = [name for name in case_names() if wanted.search(name)]
    if not names:
        return 2
    pool_bytes = options.pool_mib * MIB
    with (
        Report(json=options.json) as report,
        Progress("host", len(names)) as progress,
        node.running(pool_bytes) as address,
        node.connected(address) as store,
        BusyThread() as busy,
    ):
        bench = Bench(store, busy, pool_bytes, options.seconds, report, progress)
        bench.run(set(names))
    return 0


def case_names() -> list[str]:
    """Every case of this group, in order."""
    names = []
    for shape in SHAPES:
        for verb in ("put", "get", "view") if shape.views else ("put", "get"):
            names += [f"{verb}/{shape.name}{end}" for end in (("", "/busy") if shape.busy else ("",))]
    return [*names, "roundtrip/p50", *(f"lookup/{count}" for count in LOOKUP_COUNTS)]


class BusyThread:
    """Another thread of this process that runs Python whenever it is asked to.

    A context manager; ``beside(case)`` measures a case beside the running thread.
    """

    def __init__(self) -> None:
        self._spin = False
        self._ended = False
        self._go = threading.Event()
        self._spinning = threading.Event()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-busy")

    def beside(self, case: Measured) -> Measured:
        """The same case, measured while the thread runs."""

        def measured() -> float:
            self._idle.clear()
            self._spin = True
            self._go.set()
            self._spinning.wait()
            try:
                return case()
            finally:
                self._spin = False
                self._idle.wait()

        return measured

    def _run(self) -> None:
        while True:
            self._go.wait()
            self._go.clear()
            if self._ended:
                return
            self._spinning.set()
            number = 0
            while self._spin:
                number += 1
            self._spinning.clear()
            self._idle.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended = True
        self._go.set()
        self._thread.join()


@dataclass
class Arena:
    """Memory of this process, cut into the buffers of calls that are used one after the other."""

    memory: npt.NDArray[np.uint8]

    def calls(self, shape: Shape) -> list[Arrays]:
        """The buffers of each call: shape (calls, pages) arrays of ``page_bytes``."""
        call_bytes = shape.page_bytes * shape.count
        size = len(self.memory) // call_bytes * call_bytes
        pages = list(self.memory[:size].reshape(-1, shape.page_bytes))
        return [pages[at : at + shape.count] for at in range(0, len(pages), shape.count)]


class Bench:
    """The node, this process's memory, and where results go."""

    def __init__(
        self,
        store: KVStore,
        busy: BusyThread,
        pool_bytes: int,
        seconds: float,
        report: Report,
        progress: Progress,
    ) -> None:
        self._store = store
        self._busy = busy
        self._pool_bytes = pool_bytes
        self._seconds = seconds
        self._report = report
        self._progress = progress
        self._random = np.random.default_rng(1)
        self._spaces: dict[int, Space] = {}

    def run(self, names: set[str]) -> None:
        """Measure the cases in ``names``."""
        node.wait_populated(self._store, self._pool_bytes)
        for shape in SHAPES:
            chosen = {verb for verb in ("put", "get", "view") if self._any(names, verb, shape)}
            if chosen:
                self._move(shape, names)
                self._cold(shape, chosen)
        if "roundtrip/p50" in names:
            self._ask("roundtrip/p50", 1)
        for count in LOOKUP_COUNTS:
            if f"lookup/{count}" in names:
                self._ask(f"lookup/{count}", count)
