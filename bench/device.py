"""How fast do pages move between a node's shared memory and a KV pool on a device?

16 pages of 8 MiB a call (64 tokens, 32 layers, 8 KV heads x 128 in bfloat16), into blocks of 16
tokens in random order; digests are on. ``device/restore`` and ``device/extract`` have K and V of a
layer in planes of their own; for ``outermost`` a block has the parts of all layers together. The
bound is one large copy: of pinned memory in the same direction, or memcpy with ``--device cpu:0``,
where host memory plays the device and torch has one thread. ``device/launches`` counts operations
on the device a layer and job of up to 256 MiB, beside the two that are allowed. ``cpu_s_per_gb`` is
the time of all threads of this process, ``threads`` how many copy to and from the node's memory.
"""

import argparse
import itertools
import re
import sys
from time import perf_counter, process_time
from typing import Any, Final

import numpy as np
import torch

from bench import measure, server
from bench.host_pages import LAYER_TOKEN_BYTES, Shape, open_space, random_keys
from bench.measure import Measured, Memcpy, Progress, Report
from kvstore.client.store import KVStore
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import PrefixKeys
from kvstore.testing.device import EngineMemory
from kvstore.tier.gpu import STAGING_BYTES, HostDevice, open_device
from kvstore.tier.lane import Device, DeviceCopy, thread_count

LAYERS: Final = 32
PAGES: Final = 16
PAGE_TOKENS: Final = 64
BLOCK_TOKENS: Final = 16
POOL_CALLS: Final = 8
"""Calls whose pages the node has room for; the engine has room for half of them."""
LAUNCHES_MAX: Final = 2
LAUNCH_PAGES: Final = 11
WAIT_S: Final = 60.0


class DeviceResult(measure.Result, frozen=True):
    """A result with the CPU time that it took.

    Attributes:
        cpu_s_per_gb: seconds of all threads of this process for 10**9 bytes.
        threads: threads that copy between the ring and the node's memory.
    """

    cpu_s_per_gb: float = 0.0
    threads: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of each case")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--layers", type=int, default=LAYERS,
                        help="layers of the model; each adds 256 KiB to a page")  # fmt: skip
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu:0",
                        help="cuda:N, or cpu:0 = host memory")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    every = [f"device/{verb}{end}" for end in ("", "/outermost") for verb in ("restore", "extract")]
    cases = [*filter(options.cases.search, [*every, "device/launches"])]
    if not cases:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    torch.set_num_threads(1)
    shape = Shape("device", PAGE_TOKENS, options.layers, PAGES)
    node_bytes = POOL_CALLS * shape.call_bytes
    with (
        Report(json=options.json) as report,
        Progress("device", len(cases)) as progress,
        server.running(node_bytes) as address,
        server.connected(address) as store,
    ):
        server.wait_populated(store, node_bytes)
        device = open_device(options.device)
        for outermost in (False, True):
            chosen = [name for name in cases if name.endswith("outermost") is outermost]
            if chosen:
                engine = DeviceEngine(store, shape, device, outermost=outermost)
                for name in chosen:
                    progress.step(name)
                    report.add(_measure(name, engine, shape, device, options.seconds))
    return 0


def _measure(
    name: str, engine: "DeviceEngine", shape: Shape, device: Device, seconds: float
) -> DeviceResult:
    if name == "device/launches":
        launches = _launches(shape, device)
        most = LAUNCHES_MAX
        return DeviceResult(name, launches, "", "allowed a layer and job", most, most / launches)
    move = engine.restore if "restore" in name else engine.extract
    bound: Measured
    if device.name.startswith("cpu"):
        memcpy = Memcpy(shape.page_bytes, shape.pages)
        bound, bound_name = memcpy, f"{memcpy.name}; device {device.name}"
    else:
        bound = _pinned_copy(device, shape.call_bytes, inwards="restore" in name)
        bound_name = f"a pinned copy; {torch.cuda.get_device_name()}"
    move()
    began, calls = process_time(), 3
    for _ in range(calls):
        move()
    cpu_s = (process_time() - began) / (calls * shape.call_bytes / 1e9)
    measured = measure.interleave(move, bound, min_seconds=seconds)
    plain = measure.throughput(name, shape.call_bytes, measured, bound_name)
    return DeviceResult(
        plain.case,
        plain.value,
        plain.unit,
        plain.bound,
        plain.bound_value,
        plain.ratio,
        cpu_s,
        thread_count(),
    )


def _launches(shape: Shape, device: Device) -> float:
    """Operations a layer, of the job that needs more, if all of it is staged at once."""
    if device.name.startswith("cpu"):
        device = HostDevice(device.name, STAGING_BYTES)
    block_bytes, each = BLOCK_TOKENS * LAYER_TOKEN_BYTES // 2, PAGE_TOKENS // BLOCK_TOKENS
    memory = EngineMemory(device, 2 * shape.layers, block_bytes, 0, each, LAUNCH_PAGES)
    pool, found = memory.pool, []
    try:
        pool.restore(memory.pages(), memory.table, pool.fence(), DeviceCopy())
        found.append(pool.launches)
        pool.extract(
            memory.table, memory.addresses, memory.size, memory.seeds, pool.fence(), DeviceCopy()
        )
        found.append(pool.launches - found[0])
    finally:
        memory.close()
    return max(found) / memory.layers


def _pinned_copy(device: Device, size: int, *, inwards: bool) -> Measured:
    """One copy of pinned memory, waited for."""
    stream = device.stream()
    host, there = torch.empty(size, dtype=torch.uint8, pin_memory=True), device.memory(size, stream)
    target, source = (there, host) if inwards else (host, there)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def work() -> None:
        stream.run(copy)
        stream.record().wait(WAIT_S)

    return measure.timed(work)


class DeviceEngine:
    """An engine's KV pool on a device, and the calls it makes.

    Args:
        store: of the node.
        shape: what a call moves.
        device: where the pool is.
        outermost: a block has the parts of all layers together.
    """

    def __init__(self, store: KVStore, shape: Shape, device: Device, *, outermost: bool) -> None:
        self._shape = shape
        self._space = open_space(store, shape)
        self._random = np.random.default_rng(3)
        self._turn = itertools.count()
        calls = POOL_CALLS // 2
        block_bytes, planes = BLOCK_TOKENS * LAYER_TOKEN_BYTES // 2, 2 * shape.layers
        count = calls * shape.call_bytes // (block_bytes * planes)
        self._memory: Any = device.memory(calls * shape.call_bytes, device.stream())
        self._memory.fill_(1)
        start = self._memory.data_ptr()
        if outermost:
            whole = block_bytes * planes
            self._pool = KVPool((start,), whole, whole, count, 1, device.name)
        else:
            places = tuple(start + at * block_bytes * count for at in range(planes))
            self._pool = KVPool(places, block_bytes, block_bytes, count, 2, device.name)
        self._calls = self._random.permutation(count).reshape(calls, -1)
        self._prompts = [self._fresh_keys() for _ in self._calls]
        for keys, blocks in zip(self._prompts, self._calls, strict=True):
            self._space.extract_from_kvpool(self._pool, blocks, keys).result(WAIT_S)

    def restore(self) -> float:
        """Restore pages into the pool; seconds."""
        turn = next(self._turn) % len(self._calls)
        start = perf_counter()
        job = self._space.restore_to_kvpool(self._prompts[turn], self._pool, self._calls[turn])
        result = job.result(WAIT_S)
        seconds = perf_counter() - start
        assert result.pages == self._shape.pages, f"{result}: not {self._shape.pages} pages"
        return seconds

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
