"""What does a cluster cost a node's lookups, and when do those of other nodes' pages end?

``lookup/local/2048``: 2,048 pages that are there, at a node of a cluster beside a node that is
alone. ``lookup/remote/2048``: from the first question for 2,048 pages that only another node has to
the answer that says so; ``…/first`` is the first answer, which must be PENDING at once, beside the
answer for local pages. ``lookup/local/p99``: of lookups of 2,048 local pages while two other nodes
announce 20,000 pages a second together, beside the same without; turns of both alternate. The time
for which the node or the client waited for a core is not counted: all these processes share this
machine's. The figures with it are on stderr.
"""

import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from bench import measure, server
from bench.host import ROUND_TRIPS
from bench.host_pages import Shape, open_space, random_keys
from bench.measure import Measured, Result
from bench.remote_nodes import pair, running
from kvstore.client.space import Space
from kvstore.testing.lookups import PAUSE_S, Engine, Looked

PAGES: Final = 2048
SHAPE: Final = Shape(f"4KiB/x{PAGES}", page_tokens=1, layers=1, pages=PAGES)
POOL_BYTES: Final = 256 << 20
LOCAL, REMOTE, P99 = "lookup/local/2048", "lookup/remote/2048", "lookup/local/p99"
REMOTE_MS_MAX: Final = 3.0
RUNS_AT_ONCE: Final = 7
ANNOUNCED_PER_S: Final = 20_000
ANNOUNCERS: Final = ("x", "y")
SLICE_S: Final = 0.5
SLICES_MIN: Final = 2
_END_WAIT_S: Final = 20.0
_pause: Final = threading.Event()


def names() -> list[str]:
    """All cases, in their order; one may have several results."""
    return [LOCAL, REMOTE, P99]


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure one case."""
    return {LOCAL: _local, REMOTE: _remote, P99: _beside_announcers}[name](seconds)


def _local(seconds: float) -> Iterator[Result]:
    with (
        pair(POOL_BYTES, SHAPE) as nodes,
        server.running(POOL_BYTES) as alone,
        server.connected(alone) as store,
    ):
        measured = measure.interleave(
            _lookups_of_own(nodes.reader), _lookups_of_own(open_space(store, SHAPE)),
            min_seconds=seconds,
        )  # fmt: skip
    yield measure.latency(LOCAL, measured, "a node alone")


def _lookups_of_own(space: Space) -> Measured:
    """Store pages; the median of some lookups of them in a row."""
    keys = random_keys(space, PAGES, np.random.default_rng())
    page = np.zeros(SHAPE.page_bytes, np.uint8)
    assert space.put(keys, [page] * PAGES).stored == PAGES

    def lookup() -> None:
        assert space.lookup(keys).pages == PAGES

    ask = measure.timed(lookup)
    return lambda: statistics.median(ask() for _ in range(ROUND_TRIPS))


def _remote(seconds: float) -> Iterator[Result]:
    first: list[float] = []
    whole: list[float] = []
    local: list[float] = []
    with pair(POOL_BYTES, SHAPE) as nodes:
        own = _lookups_of_own(nodes.reader)
        began = time.perf_counter()
        while not whole or time.perf_counter() - began < seconds:
            for keys in nodes.store(RUNS_AT_ONCE):
                start = time.perf_counter()
                hit = nodes.reader.lookup(keys)
                first.append(time.perf_counter() - start)
                assert (hit.pages, hit.pending) == (0, PAGES), f"{hit}: not PENDING"
                hit = nodes.reader.lookup(keys, wait_s=1.0)
                whole.append(time.perf_counter() - start)
                assert hit.remote == PAGES, f"{hit}: not {PAGES} pages of the other node"
                local.append(own())
    value = statistics.median(whole) * 1e3
    _note(f"{REMOTE}: worst {max(whole) * 1e3:.2f} ms of {len(whole)}, first answer"
          f" {max(first) * 1e3:.2f} ms")  # fmt: skip
    yield Result(REMOTE, value, "ms", "at most", REMOTE_MS_MAX, REMOTE_MS_MAX / value)
    value, bound = statistics.median(first) * 1e6, statistics.median(local) * 1e6
    yield Result(f"{REMOTE}/first", value, "us", "local pages", bound, bound / value)


def _beside_announcers(seconds: float) -> Iterator[Result]:
    knows = {"b": ANNOUNCERS, **{one: ["b"] for one in ANNOUNCERS}}
    quiet: list[Looked] = []
    beside: list[Looked] = []
    with running(POOL_BYTES, knows, prefault=False) as nodes, contextlib.ExitStack() as undo:
        rate = ANNOUNCED_PER_S // len(ANNOUNCERS)
        announcers = [undo.enter_context(Announcer(nodes[one].address, rate)) for one in ANNOUNCERS]
        engine = Engine(nodes["b"].address, nodes["b"].pid, PAGES)
        undo.callback(engine.close)
        slices = max(SLICES_MIN, round(seconds / SLICE_S))
        announced, took_s = 0, 0.0
        for number in range(2 * slices):
            announces = number % 2 == 1
            began = time.perf_counter()
            for one in announcers if announces else ():
                one.go()
            found = beside if announces else quiet
            while time.perf_counter() - began < SLICE_S:
                found.append(engine.lookup())
                _pause.wait(PAUSE_S)
            for one in announcers if announces else ():
                announced += one.rest()
            took_s += (time.perf_counter() - began) * announces
    assert all(one.hit for one in (*quiet, *beside)), "a lookup did not find all pages"
    whole = [measure.percentile([one.took_s for one in each], 99) * 1e6 for each in (beside, quiet)]
    _note(f"{P99}: {announced / took_s:,.0f} pages/s announced; with the time that processes waited"
          f" for a core {whole[0]:.0f} us, without announcements {whole[1]:.0f} us;"
          f" {len(beside)} and {len(quiet)} lookups")  # fmt: skip
    value, bound = (
        measure.percentile([one.seconds for one in each], 99) * 1e6 for each in (beside, quiet)
    )
    yield Result(P99, value, "us", "no announcements", bound, bound / value)


class Announcer:
    """A process that stores pages at one node at a constant rate; a context manager.

    Args:
        address: of the node.
        pages_per_s: the rate.
    """

    def __init__(self, address: str, pages_per_s: int) -> None:
        command = [sys.executable, "-m", "bench.remote_writer", address, str(pages_per_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def go(self) -> None:
        """Begin to store."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")

    def rest(self) -> int:
        """Stop storing; returns the number of pages since :meth:`go`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("rest\n")
        return int(self._process.stdout.readline())

    def __enter__(self) -> "Announcer":
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=_END_WAIT_S)  # closes its standard input
        finally:
            self._process.kill()  # nothing happens if it has ended


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
