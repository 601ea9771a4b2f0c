"""How fast does a node tell a directory in Redis of its pages, and what does that cost?

A real node with ``cluster.directory=redis``, and a real Redis beside it, on loopback. ``announce``
is pages a second that come into Redis when it goes on after a stop; they were put meanwhile.
``directory/redis`` is what ``INFO`` says a page and holder needs. ``directory/locate/2048`` is a
question about a prefix of 2,048 pages, as the node's index process asks it.
``put/1MiB/x16/announced`` is a client's put while another client's pages are announced; its bound
is the same of a node without a cluster, with the same other client.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import measure, server
from bench.host_pages import SHAPES, PageCalls, random_keys
from bench.measure import Report, Result
from bench.store_programs import NoProgramError
from bench.store_servers import ForgetfulRedisServer
from kvstore.client.store import KVStore
from kvstore.cluster.access import StoreServers
from kvstore.cluster.entries import NAME_BYTES, EntryNames, usable_prefixes
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity

CASES: Final = ("announce", "directory/redis", "directory/locate/2048", "put/1MiB/x16/announced")
PAGES: Final = 100_000
RUN_PAGES: Final = 2_048
FLOOR_PAGES_S: Final = 50_000
FLOOR_BYTES: Final = 200
LOCATE_S_MAX: Final = 0.003
WAIT_S: Final = 120.0
CLUSTER: Final = "bench"
POOL_BYTES: Final = 1 << 30
BESIDE_PAGES_S: Final = 20_000
"""Pages a second of the other client, while puts are measured."""
_IDENTITY: Final = SpaceIdentity(model="small", kv_dtype="bfloat16", page_tokens=1)
_SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 1), heads=(0, 1))


def measured(names: list[str], report: Report, seconds: float) -> str:
    """Measure these cases; returns why not, if there is no Redis."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-")))
        try:
            redis = undo.enter_context(ForgetfulRedisServer(folder / "redis"))
        except NoProgramError as error:
            return str(error)
        if set(names) & set(CASES[:3]):
            with node(redis) as store:
                _announce(names, report, store, redis)
        if CASES[3] in names:
            redis.empty()
            report.add(_puts(redis, seconds))
    return ""


@contextmanager
def node(redis: ForgetfulRedisServer | None) -> Iterator[KVStore]:
    """A node that announces its pages; without Redis it is alone."""
    more = {}
    if redis is not None:
        more = {
            "cluster.name": CLUSTER, "cluster.listen": "127.0.0.1:0",
            "cluster.transfer_listen": "127.0.0.1:0", "cluster.directory": "redis",
            "redis.endpoints": redis.endpoint,
        }  # fmt: skip
    with server.running(POOL_BYTES, more=more) as address, server.connected(address) as store:
        server.wait_populated(store, POOL_BYTES)
        if redis is not None:
            wait(lambda: shared(store)["current"])
        yield store


def shared(store: KVStore) -> dict[str, Any]:
    """What the node says of the directory."""
    found: dict[str, Any] = store.stats()["cluster"]["directory"]["shared"]
    return found


def wait(condition: Any) -> None:
    """Wait for something.

    Raises:
        TimeoutError: it does not come.
    """
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the node does not announce its pages")
        time.sleep(0.002)


class SmallPages:
    """Puts of many small pages.

    Attributes:
        last: the keys of the last put.
    """

    def __init__(self, store: KVStore) -> None:
        self._space = store.space(_IDENTITY, [_SHARD])
        self._random = np.random.default_rng()
        page = np.zeros(self._space.page_bytes[0], np.uint8)
        self._pages = [page] * RUN_PAGES
        self.last: PrefixKeys | None = None

    def put(self) -> None:
        """Put one run under new keys."""
        self.last = random_keys(self._space, RUN_PAGES, self._random)
        stored = self._space.put(self.last, self._pages).stored
        assert stored == RUN_PAGES, f"{stored} stored"


def _announce(
    names: list[str], report: Report, store: KVStore, redis: ForgetfulRedisServer
) -> None:
    small = SmallPages(store)
    small.put()
    wait(lambda: redis.info("db0") >= RUN_PAGES)
    before, used = redis.info("db0"), redis.info("used_memory")
    runs = PAGES // RUN_PAGES
    redis.stop()  # so that it is not the client's puts that are measured
    for _ in range(runs):
        small.put()
    redis.go_on()
    wait(lambda: redis.info("db0") > before)
    start, there = time.perf_counter(), redis.info("db0")
    pages = runs * RUN_PAGES
    wait(lambda: redis.info("db0") >= before + pages)
    seconds = time.perf_counter() - start
    assert "lost" not in shared(store)["faults"], "it was stopped for too long"
    if CASES[0] in names:
        rate = (before + pages - there) / seconds
        report.add(
            Result(CASES[0], rate, "pages/s", "least allowed", FLOOR_PAGES_S, rate / FLOOR_PAGES_S)
        )
    if CASES[1] in names:
        used = redis.info("used_memory") - used
        report.add(
            Result(CASES[1], used / pages, "B", "largest allowed", FLOOR_BYTES,
                   FLOOR_BYTES * pages / used)
        )  # fmt: skip
    if CASES[2] in names:
        assert small.last is not None
        took = asyncio.run(_locate(redis.endpoint, small.last.packed))
        report.add(
            Result(CASES[2], took * 1e6, "us", "largest allowed", LOCATE_S_MAX * 1e6,
                   LOCATE_S_MAX / took)
        )  # fmt: skip


async def _locate(endpoint: str, keys: bytes) -> float:
    """Median of questions about the last run; seconds."""
    store = RedisPages(redis_clients(StoreServers((endpoint,)), CALL_S), CLUSTER)
    names = EntryNames(CLUSTER)
    times = []
    try:
        for _ in range(101):
            start = time.perf_counter()
            entries = names.of(_IDENTITY.digest.hex(), _SHARD.digest.hex(), keys)
            found = usable_prefixes(await store.find([entries]), [0])
            times.append(time.perf_counter() - start)
            assert len(entries) == RUN_PAGES * NAME_BYTES
            assert [one.pages for one in found] == [RUN_PAGES], found
    finally:
        await store.close()
    return measure.percentile(times, 50)


def _puts(redis: ForgetfulRedisServer, seconds: float) -> Result:
    """Puts into a node that announces, and into one that does not, in turns."""
    shape = next(one for one in SHAPES if one.name == "1MiB/x16")
    with ExitStack() as undo:
        both = []
        for at in (redis, None):
            store = undo.enter_context(node(at))
            calls = PageCalls(store, shape, measure.working_set_bytes(shape.call_bytes) // 4)
            for _ in range(POOL_BYTES // shape.call_bytes):
                calls.put()
            both.append((store, calls))
        (announcing, case), (alone, bound) = both

        def beside(store: KVStore, calls: PageCalls) -> float:
            with _other_client(store):
                return sum(calls.put() for _ in range(8)) / 8

        result = measure.interleave(
            lambda: beside(announcing, case), lambda: beside(alone, bound), min_seconds=seconds
        )
        assert shared(announcing)["announced"], "nothing was announced"
    return measure.throughput(CASES[3], shape.call_bytes, result, "a node without a cluster")


@contextmanager
def _other_client(store: KVStore) -> Iterator[None]:
    """Another thread puts small pages at a fixed rate."""
    ended = threading.Event()
    small = SmallPages(store)

    def run() -> None:
        while not ended.wait(RUN_PAGES / BESIDE_PAGES_S):
            small.put()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
