"""What does an engine notice of a node that is kept busy by another?

This process looks up pages that are all there, while a second process keeps the node at work:
``fill`` puts pages to a full node, ``models`` lets two models of small and of large pages take
turns, ``clear`` empties a space of pages and fills it again, ``reclaim`` puts pages through an SSD
tier that is full. The bound is a bare Unix socket with messages of the same size, while as many
processes are busy with copies of their own. Both are measured in turns; a figure is the 99.9th
percentile of all its round trips.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.synchronize import Event
from pathlib import Path
from time import perf_counter
from typing import Final

import numpy as np

from bench import measure, ping_pong, server
from bench.host_pages import MIB, SHAPES, Shape, open_space, random_keys
from bench.measure import Result
from kvstore.cli.remote import Remote
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys
from kvstore.server.answers import JobRow

PERCENT: Final = 99.9
ROUNDS: Final = 6
"""Of each of the two, in turns."""
PAGES: Final = 128
"""That a lookup asks for."""
SMALL, LARGE = SHAPES[1], SHAPES[4]
POOL_BYTES: Final = 256 * MIB
SSD_BYTES: Final = 256 * MIB
SEGMENT_BYTES: Final = 16 * MIB
CLEAR_CALLS: Final = 16
"""Puts between two clears."""
MODEL_CALLS: Final = 8
"""Puts of a model before the other one's turn: a quarter of the pool, or of one large page each."""
END_WAIT_S: Final = 30.0
_POLL_S: Final = 0.05

Step = Callable[[], None]


def names() -> list[str]:
    """All cases."""
    return [f"bystander/{case}" for case in _STEPS]


def measured(name: str, seconds: float) -> Result:
    """Measure one of :func:`names`; ``seconds``: at least, of each of its rounds."""
    case = name.partition("/")[2]
    with tempfile.TemporaryDirectory(prefix="kvstore-bystander-") as folder:
        more = {}
        if case == "reclaim":
            more = {
                "ssd.directories": str(Path(folder)), "ssd.capacity_bytes": str(SSD_BYTES),
                "ssd.segment_bytes": str(SEGMENT_BYTES),
            }  # fmt: skip
        with (
            server.running(POOL_BYTES, more=more) as address,
            server.connected(address) as store,
        ):
            server.wait_populated(store, POOL_BYTES)
            ours, bare = _in_turns(case, address, store, seconds)
    value, bound = (1e6 * measure.percentile(found, PERCENT) for found in (ours, bare))
    return Result(name, value, "us", "bare Unix socket, as many busy", bound, bound / value)


def _in_turns(
    case: str, address: str, store: KVStore, seconds: float
) -> tuple[list[float], list[float]]:
    """Round trips to the node while it works for another, and bare ones."""
    space = open_space(store, SHAPES[0])
    keys = random_keys(space, PAGES, np.random.default_rng())
    page = np.zeros(SHAPES[0].page_bytes, np.uint8)
    assert space.put(keys, [page] * PAGES).stored == PAGES
    request = len(wire.encode(wire.Lookup(1 << 16, 1, [0], keys.packed)))
    answer = len(wire.encode(wire.Found(1 << 16, PAGES, 0)))

    def lookup() -> float:
        begin = perf_counter()
        pages = space.lookup(keys).pages
        took = perf_counter() - begin
        if pages < PAGES:  # the other's pages have pushed them out
            space.put(keys, [page] * PAGES)
        return took

    ours: list[float] = []
    bare: list[float] = []
    with (
        ping_pong.answering(request, answer) as exchange,
        _working(_work, case, address) as works,
        _working(_copy) as copies,
    ):
        for number in range(2 * ROUNDS):
            going, once, found = (works, lookup, ours) if number % 2 else (copies, exchange, bare)
            going.set()
            once()
            found += _for_seconds(once, seconds)
            going.clear()
    return ours, bare


def _for_seconds(once: Callable[[], float], seconds: float) -> list[float]:
    found: list[float] = []
    end = perf_counter() + seconds
    while perf_counter() < end:
        found.append(once())
    return found


@contextmanager
def _working(work: Callable[..., None], *arguments: str) -> Iterator[Event]:
    """A second process that works whenever the event is set, until the block ends."""
    context = multiprocessing.get_context("spawn")
    going, ended, ready = context.Event(), context.Event(), context.Event()
    process = context.Process(target=work, args=(*arguments, going, ended, ready))
    process.start()
    try:
        if not ready.wait(END_WAIT_S):
            raise server.NodeError("the second process does not start")
        yield going
    finally:
        ended.set()
        going.set()
        process.join(END_WAIT_S)
        if process.is_alive():
            process.kill()
            process.join()
    if process.exitcode:
        raise server.NodeError("the second process failed, so nobody kept the node at work")


def _work(case: str, address: str, going: Event, ended: Event, ready: Event) -> None:
    with server.connected(address, "worker") as store:
        step = _STEPS[case](store, address)
        for _ in range(POOL_BYTES // SMALL.call_bytes):
            step()  # from here on the node is full
        ready.set()
        _while_asked(step, going, ended)


def _copy(going: Event, ended: Event, ready: Event) -> None:
    """What the other process does beside asking: copies of as many bytes."""
    memcpy = measure.Memcpy(SMALL.page_bytes, SMALL.pages)
    ready.set()
    _while_asked(memcpy, going, ended)


def _while_asked(step: Callable[[], object], going: Event, ended: Event) -> None:
    while not ended.is_set():
        if going.wait(_POLL_S) and not ended.is_set():
            step()


def _fill(store: KVStore, address: str) -> Step:  # noqa: ARG001
    return _putting(store, SMALL)[1]


def _models(store: KVStore, address: str) -> Step:  # noqa: ARG001
    small, large = _putting(store, SMALL)[1], _putting(store, LARGE)[1]
    calls = count()
    return lambda: (large if next(calls) // MODEL_CALLS % 2 else small)()


def _clear(store: KVStore, address: str) -> Step:
    label, put = _putting(store, SMALL)
    node, calls = Remote(f"{address}.admin"), count(1)

    def step() -> None:
        put()
        if next(calls) % CLEAR_CALLS == 0:
            node.finished(node.send("POST", "/v1/clear", JobRow, {"space": label}), END_WAIT_S)

    return step


def _putting(store: KVStore, shape: Shape) -> tuple[str, Step]:
    """A space's label, and puts of new pages to it: some may find no room."""
    space, random = open_space(store, shape), np.random.default_rng()
    page = np.zeros(shape.page_bytes, np.uint8)

    def put() -> None:
        keys: PrefixKeys = random_keys(space, shape.pages, random)
        space.put(keys, [page] * shape.pages)

    return space.identity.digest.hex(), put


_STEPS: Final[dict[str, Callable[[KVStore, str], Step]]] = {
    "fill": _fill, "models": _models, "clear": _clear, "reclaim": _fill,
}  # fmt: skip
