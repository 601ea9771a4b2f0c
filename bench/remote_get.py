"""How fast does a client get pages that only another node has?

``get/8MiB/x16``: a client of one node gets 16 pages of 8 MiB that only the other node has, and that
nobody has asked for before. It looks them up until it knows who has them, its node leases and reads
them, and it copies them into buffers, verified. ``bound/get/…`` is the least that this needs: the
bare socket, then a digest of each page, then one copy.
"""

import ctypes
from collections.abc import Iterator
from itertools import count
from time import perf_counter
from typing import Final

from bench import measure
from bench.host_pages import SHAPES, Shape
from bench.measure import Result
from bench.remote_nodes import Pair, pair
from bench.remote_transport import BARE, PAGES, Reads, reading
from kvstore import mover
from kvstore.protocol.page import PrefixKeys

RUNS_AT_ONCE: Final = 4
WAIT_S: Final = 1.0
_SHAPES: Final = {f"get/{shape.name}": shape for shape in SHAPES if shape.pages == PAGES}


def names() -> list[str]:
    """All cases, in their order."""
    return [f"{begin}{name}" for name in _SHAPES for begin in ("", "bound/")]


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure one case."""
    shape = _SHAPES[name.removeprefix("bound/")]
    with reading(shape.page_bytes) as reads:
        if name.startswith("bound/"):
            case = Copied(reads, shape)
            measured = measure.interleave(case, reads.bare, min_seconds=seconds)
        else:
            with pair(2 * RUNS_AT_ONCE * shape.call_bytes, shape) as nodes:
                gets = Gets(nodes)
                measured = measure.interleave(gets.get, reads.bare, min_seconds=seconds)
        yield measure.throughput(name, shape.call_bytes, measured, BARE)


class Gets:
    """Gets of pages that only the other node has.

    Args:
        nodes: both nodes.
    """

    def __init__(self, nodes: Pair) -> None:
        self._nodes = nodes
        self._stored: list[PrefixKeys] = []
        size, call_bytes = nodes.shape.page_bytes, nodes.shape.call_bytes
        pages = list(measure.prefaulted(measure.working_set_bytes(call_bytes)).reshape(-1, size))
        self._buffers = [pages[at : at + PAGES] for at in range(0, len(pages), PAGES)]
        self._turn = count()
        for _ in range(2 * RUNS_AT_ONCE):
            self.get()  # from here on both nodes are full

    def get(self) -> float:
        """Get fresh pages; seconds."""
        if not self._stored:
            self._stored = self._nodes.store(RUNS_AT_ONCE)
        keys, buffers = self._stored.pop(), self._buffers[next(self._turn) % len(self._buffers)]
        start = perf_counter()
        self._nodes.reader.lookup(keys, wait_s=WAIT_S)
        pages = self._nodes.reader.get(keys, out=buffers)
        seconds = perf_counter() - start
        assert pages == PAGES, f"{pages} pages, not {PAGES}"
        return seconds


class Copied:
    """What a get needs at least, one after another on one thread.

    Args:
        reads: have the bare socket.
        shape: what a call moves.
    """

    def __init__(self, reads: Reads, shape: Shape) -> None:
        self._reads, self._shape = reads, shape
        self._target = measure.prefaulted(measure.working_set_bytes(shape.call_bytes))
        self._offset = 0

    def __call__(self) -> float:
        """Receive pages, digest them and copy them once; seconds."""
        seconds = self._reads.bare()
        pages, seeds = self._reads.last
        start = perf_counter()
        mover.digest(pages, self._shape.page_bytes, seeds)
        target = self._target.ctypes.data + self._offset
        ctypes.memmove(target, int(pages[0]), self._shape.call_bytes)
        self._offset = (self._offset + self._shape.call_bytes) % self._target.size
        return seconds + perf_counter() - start
