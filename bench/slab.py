"""How much faster is a restore from a device slab than from the node's shared memory?

Pages of 64 tokens, 8 KV heads x 128 in bfloat16, 256 KiB a layer, into permuted blocks of 16
tokens; digests are on. ``slab/N``: N pages that the slab has. ``host/N``: the same pages, by a
store without a slab. ``promote/N``: pages that the slab lacks, until the engine has them (the slab
gets them behind its back). The slab is in host memory: what is saved is the node's part, not the
copy.
"""

import argparse
import itertools
import re
import sys
import time
from time import perf_counter
from typing import Final

import numpy as np

from bench import measure, server
from bench.host_pages import LAYER_TOKEN_BYTES, Shape, open_space, random_keys
from bench.measure import Memcpy, Progress, Report
from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from kvstore.mover.kvpool import KVPool

PAGE_TOKENS: Final = 64
BLOCK_TOKENS: Final = 16
LAYERS: Final = 8
PAGES: Final = (1, 16)
CALLS: Final = 8
WAIT_S: Final = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of each case")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--layers", type=int, default=LAYERS,
                        help="layers of the model; each adds 256 KiB to a page")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    every = [(verb, pages) for pages in PAGES for verb in ("slab", "host", "promote")]
    cases = [(v, n) for v, n in every if options.cases.search(f"{v}/{n}")]
    if not cases:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    with Report(json=options.json) as report, Progress("slab", len(cases)) as progress:
        for verb, pages in cases:
            progress.step(f"{verb}/{pages}")
            shape = Shape("slab", PAGE_TOKENS, options.layers, pages)
            report.add(_measure(verb, shape, options.seconds))
    return 0


def _measure(verb: str, shape: Shape, seconds: float) -> measure.Result:
    held_bytes = max(2 * CALLS * shape.call_bytes, 64 << 20)
    slab = DeviceSlabConfig(device="cpu", capacity_bytes=2 * held_bytes)
    with (
        server.running(held_bytes) as address,
        server.connected(address) as plain,
        KVStore.connect(address, device_slab=slab, timeout_s=WAIT_S) as cached,
    ):
        server.wait_populated(plain, held_bytes)
        engine = Engine(plain if verb == "host" else cached, shape)
        work = engine.restore if verb != "promote" else engine.restore_new
        memcpy = Memcpy(shape.page_bytes, shape.pages)
        measured = measure.interleave(work, memcpy, min_seconds=seconds)
        return measure.throughput(f"{verb}/{shape.pages}", shape.call_bytes, measured, memcpy.name)


class Engine:
    """An engine that restores the same few prompts over and over.

    Args:
        store: of the node.
        shape: what a call moves.
    """

    def __init__(self, store: KVStore, shape: Shape) -> None:
        self._store, self._shape = store, shape
        self._space = open_space(store, shape)
        planes = 2 * shape.layers
        self._memory = measure.prefaulted(CALLS * shape.call_bytes)
        plane_bytes = self._memory.nbytes // planes
        block_bytes = BLOCK_TOKENS * LAYER_TOKEN_BYTES // 2
        self._pool = KVPool(
            planes=tuple(self._memory.ctypes.data + plane_bytes * at for at in range(planes)),
            block_bytes=block_bytes, block_stride_bytes=block_bytes,
            block_count=plane_bytes // block_bytes,
        )  # fmt: skip
        random = np.random.default_rng(1)
        blocks = random.permutation(self._pool.block_count)
        self._calls = blocks.reshape(CALLS, -1)
        self._prompts = [random_keys(self._space, shape.pages, random) for _ in range(CALLS)]
        for keys, blocks in zip(self._prompts, self._calls, strict=True):
            self._space.extract_from_kvpool(self._pool, blocks, keys).result(WAIT_S)
        self._turn = itertools.count()
        for _ in range(2 * CALLS):
            self.restore()
            self._settle()

    def restore(self) -> float:
        """Restore a prompt; seconds."""
        turn = next(self._turn) % CALLS
        keys, blocks = self._prompts[turn], self._calls[turn]
        start = perf_counter()
        result = self._space.restore_to_kvpool(keys, self._pool, blocks).result(WAIT_S)
        seconds = perf_counter() - start
        assert result.pages == self._shape.pages, f"{result}: not {self._shape.pages} pages"
        return seconds

    def restore_new(self) -> float:
        """Restore a prompt that the slab does not have; seconds, without the promotion."""
        self._store.clear_slab()
        seconds = self.restore()
        self._settle()
        return seconds

    def _settle(self) -> None:
        """Wait until nothing is being promoted."""
        deadline = perf_counter() + WAIT_S
        while (self._store.slab_stats() or {}).get("pending_bytes"):
            assert perf_counter() < deadline, "a promotion does not end"
            time.sleep(0.0005)
