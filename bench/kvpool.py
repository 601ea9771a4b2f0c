"""How fast do pages move between an engine's scattered KV pool and a node's shared memory?

16 pages of 64 tokens a call: 32 layers, 8 KV heads x 128 in bfloat16, 8 MiB a page; digests are on.
``restore/block16/permuted`` restores into an engine whose blocks hold 16 tokens and lie in random
order; ``contiguous`` blocks lie one behind the other. ``layers`` is a restore that hands on layer
after layer. A call is submitted and waited for.
"""

import argparse
import itertools
import re
import sys
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np

from bench import measure, server
from bench.host_pages import LAYER_TOKEN_BYTES, Shape, open_space, random_keys
from bench.measure import Memcpy, Progress, Report
from kvstore.client.store import KVStore
from kvstore.mover import Order
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import PrefixKeys

PAGE_TOKENS: Final = 64
LAYERS: Final = 32
PAGES: Final = 16
BLOCK_TOKENS: Final = (1, 16, 64)
POOL_CALLS: Final = 8
"""Calls whose pages the node has room for."""
WAIT_S: Final = 30.0


class Case(NamedTuple):
    """One line of output."""

    verb: str
    block_tokens: int
    order: str

    @property
    def name(self) -> str:
        """As it is printed."""
        return f"{self.verb}/block{self.block_tokens}/{self.order}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of each case")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--layers", type=int, default=LAYERS,
                        help="layers of the model; each adds 256 KiB to a page")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    orders = ("contiguous", "permuted")
    every = itertools.product(("restore", "layers", "extract"), BLOCK_TOKENS, orders)
    cases = [case for case in itertools.starmap(Case, every) if options.cases.search(case.name)]
    if not cases:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    shape = Shape("kvpool", PAGE_TOKENS, options.layers, PAGES)
    pool_bytes = POOL_CALLS * shape.call_bytes
    with (
        Report(json=options.json) as report,
        Progress("kvpool", len(cases)) as progress,
        server.running(pool_bytes) as address,
        server.connected(address) as store,
    ):
        server.wait_populated(store, pool_bytes)
        memcpy = Memcpy(shape.page_bytes, shape.pages)
        engine = Engine(store, shape)
        engine.arrange(PAGE_TOKENS, "contiguous")
        for _ in range(POOL_CALLS):
            engine.extract()  # from here on the node is full, all of it touched
        engine.fill()
        for case in cases:
            progress.step(case.name)
            engine.arrange(case.block_tokens, case.order)
            move = {
                "restore": engine.restore, "layers": engine.restore_layers,
                "extract": engine.extract,
            }[case.verb]  # fmt: skip
            measured = measure.interleave(move, memcpy, min_seconds=options.seconds)
            report.add(measure.throughput(case.name, shape.call_bytes, measured, memcpy.name))
    return 0


class Engine:
    """An engine's KV pool in this process, and the calls it makes.

    Args:
        store: of the node.
        shape: what a call moves.
    """

    def __init__(self, store: KVStore, shape: Shape) -> None:
        self._shape = shape
        self._space = open_space(store, shape)
        # At most half of what the node holds: restores must find what was stored for them.
        size = min(measure.working_set_bytes(shape.call_bytes), POOL_CALLS // 2 * shape.call_bytes)
        self._memory = measure.prefaulted(size)
        self._random = np.random.default_rng()
        self._turn = itertools.count()
        self._prompts: list[PrefixKeys] = []

    def arrange(self, block_tokens: int, order: str) -> None:
        """Give the pool blocks of that size, and each call its blocks in that order."""
        planes = 2 * self._shape.layers
        plane_bytes = self._memory.nbytes // planes
        block_bytes = block_tokens * LAYER_TOKEN_BYTES // 2
        self._pool = KVPool(
            planes=tuple(self._memory.ctypes.data + plane_bytes * plane for plane in range(planes)),
            block_bytes=block_bytes,
            block_stride_bytes=block_bytes,
            block_count=plane_bytes // block_bytes,
        )
        blocks = np.arange(self._pool.block_count)
        if order == "permuted":
            blocks = self._random.permutation(blocks)
        self._calls = blocks.reshape(-1, self._shape.pages * PAGE_TOKENS // block_tokens)

    def fill(self) -> None:
        """Store what ``restore`` reads, and restore all of it once."""
        self._prompts = [self._fresh_keys() for _ in self._calls]
        for keys, blocks in zip(self._prompts, self._calls, strict=True):
            self._space.extract_from_kvpool(self._pool, blocks, keys).result(WAIT_S)
        for _ in self._prompts:
            self.restore()

    def restore(self, order: Order = "page") -> float:
        """Restore pages into the pool; seconds."""
        turn = next(self._turn) % len(self._calls)
        keys, blocks = self._prompts[turn], self._calls[turn]
        start = perf_counter()
        job = self._space.restore_to_kvpool(keys, self._pool, blocks, order=order)
        result = job.result(WAIT_S)
        seconds = perf_counter() - start
        assert result.pages == self._shape.pages, f"{result}: not {self._shape.pages} pages"
        return seconds

    def restore_layers(self) -> float:
        """Restore pages layer after layer; seconds."""
        return self.restore("segment")

    def extract(self) -> float:
        """Store pages from the pool under new keys; seconds."""
        keys, blocks = self._fresh_keys(), self._calls[next(self._turn) % len(self._calls)]
        start = perf_counter()
        result = self._space.extract_from_kvpool(self._pool, blocks, keys).result(WAIT_S)
        seconds = perf_counter() - start
        assert result.stored == self._shape.pages, f"{result}: not {self._shape.pages} pages"
        return seconds

    def _fresh_keys(self) -> PrefixKeys:
        return random_keys(self._space, self._shape.pages, self._random)
