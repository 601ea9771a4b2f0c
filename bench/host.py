"""How fast are page copies between a process and a node's shared memory, and how fast are lookups?

A second process runs the node; digests are on. ``put/8MiB/x16`` is one call with 16 pages of 8 MiB,
waited for; ``get`` copies into buffers, ``view`` verifies pages where they are and gives them back.
The node is full, so that each put evicts pages; ``put/…/fresh`` finds free memory that the node has
touched.
In ``busy`` cases another thread of this process runs Python all the time (but not while the bound
is measured). ``roundtrip/p50`` is a ping; ``lookup/N`` asks for N keys that are all there;
``bystander/CASE`` is what another engine notices meanwhile, see :mod:`bench.host_bystander`;
``peer/…`` is the same put or get beside another store's, see :mod:`bench.host_mooncake`.
"""

import argparse
import re
import sys
from itertools import count
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from bench import host_bystander, host_mooncake, measure, ping_pong, server
from bench.busy import BusyThread
from bench.host_pages import MIB, SHAPES, PageCalls, Shape, open_space, random_keys
from bench.measure import Measured, Memcpy, Progress, Report, Result
from kvstore.cli.remote import Remote
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.server.answers import JobRow

POOL_MIB: Final = 1024
POOL_MIB_MIN: Final = 64
ROUND_TRIPS: Final = 32
"""Requests in one measurement of a latency: taking turns one by one would measure cold caches."""
FRESH: Final = "/fresh"
FRESH_SHAPES: Final = ("64KiB/x128",)
CLEAR_WAIT_S: Final = 30.0
LOOKUP_COUNTS: Final = (1, 128, 1000, 2048)


def move_cases(shape: Shape) -> list[str]:
    """Names of the cases that move pages of this shape, in the order they are measured."""
    verbs, ends = (
        (("put", "get", "view"), ("", "/busy")) if shape.views else (("put", "get"), ("",))
    )
    fresh = [f"put/{shape.name}{FRESH}"] if shape.name in FRESH_SHAPES else []
    return [f"{verb}/{shape.name}{end}" for verb in verbs for end in ends] + fresh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of each case")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--peers", choices=("none", "mooncake"), default="none",
                        help="also measure this other store")  # fmt: skip
    parser.add_argument("--pool-mib", type=int, default=POOL_MIB, help="node memory, MiB")


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    moves = {shape: [*filter(options.cases.search, move_cases(shape))] for shape in SHAPES}
    asks = {"roundtrip/p50": 0} | {f"lookup/{pages}": pages for pages in LOOKUP_COUNTS}
    asks = {name: pages for name, pages in asks.items() if options.cases.search(name)}
    beside = [*filter(options.cases.search, host_bystander.names())]
    peers = host_mooncake.names() if options.peers == "mooncake" else []
    peers = [*filter(options.cases.search, peers)]
    total = sum(map(len, moves.values())) + len(asks) + len(beside) + len(peers)
    if not total:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    pool_bytes = max(options.pool_mib, POOL_MIB_MIN) * MIB
    with (
        Report(json=options.json) as report,
        Progress("host", total) as progress,
        BusyThread() as busy,
        server.running(pool_bytes) as address,
        server.connected(address) as store,
    ):
        server.wait_populated(store, pool_bytes)
        bench = Bench(store, pool_bytes, busy, options.seconds, report, progress)
        for shape, names in moves.items():
            if names:
                _move(bench, shape, names)
        for name, pages in asks.items():
            _ask(bench, name, pages)
        for name in beside:
            progress.step(name)
            report.add(host_bystander.measured(name, options.seconds))
        for name in peers:
            progress.step(name)
            for result in host_mooncake.results(name, options.seconds, pool_bytes):
                report.add(result)
    return 0


class Bench(NamedTuple):
    """What every case needs: a node, company, and where results go."""

    store: KVStore
    pool_bytes: int
    busy: BusyThread
    seconds: float
    report: Report
    progress: Progress


# Moving pages


def _move(bench: Bench, shape: Shape, names: list[str]) -> None:
    """Measure the cases ``names`` of one shape."""
    calls = PageCalls(bench.store, shape, _sources_bytes(bench, shape))
    memcpy = Memcpy(shape.page_bytes, shape.pages)
    for _ in range(bench.pool_bytes // shape.call_bytes):
        calls.put()  # from here on the pool is full, all of it touched, and each put evicts
    for name in names:
        bench.progress.step(name)
        if name.endswith(FRESH):
            bench.report.add(_fresh(bench, shape, name, memcpy))
            continue
        verb = name.partition("/")[0]
        if verb != "put":
            calls.fill()
        case: Measured = getattr(calls, verb)
        if name.endswith("/busy"):
            case = bench.busy.beside(case)
        measured = measure.interleave(case, memcpy, min_seconds=bench.seconds)
        bench.report.add(measure.throughput(name, shape.call_bytes, measured, memcpy.name))
    bench.progress.note(_cold(shape))


def _sources_bytes(bench: Bench, shape: Shape) -> int:
    """What pages are copied from: more than the caches, at most half of the node's memory."""
    fitting = bench.pool_bytes // 2 // shape.call_bytes * shape.call_bytes
    return min(measure.working_set_bytes(shape.call_bytes), fitting)


def _fresh(bench: Bench, shape: Shape, name: str, memcpy: Memcpy) -> Result:
    """Puts to a node of their own, which is emptied whenever it is half full."""
    with server.running(bench.pool_bytes) as address, server.connected(address) as store:
        server.wait_populated(store, bench.pool_bytes)
        calls = PageCalls(store, shape, _sources_bytes(bench, shape))
        operator, turns = Remote(f"{address}.admin"), count(1)

        def put() -> float:
            seconds = calls.put()
            if next(turns) % (bench.pool_bytes // 2 // shape.call_bytes) == 0:
                job = operator.send("POST", "/v1/clear", JobRow, {"all": True})
                operator.finished(job, CLEAR_WAIT_S)
            return seconds

        measured = measure.interleave(put, memcpy, min_seconds=bench.seconds)
    return measure.throughput(name, shape.call_bytes, measured, memcpy.name)


def _cold(shape: Shape) -> str:
    """A line of figures for memory that neither the node nor this process has touched before."""
    pool_bytes = max(4 * shape.call_bytes, POOL_MIB_MIN * MIB)
    seconds: dict[str, float] = {}
    with server.running(pool_bytes, prefault=False) as address:
        with server.connected(address) as store:
            writer = PageCalls(store, shape, shape.call_bytes)
            seconds["put"] = writer.put()
            writer.fill()
        for verb in ("get", "view"):
            with server.connected(address) as store:  # maps the memory anew
                reader = PageCalls(store, shape, shape.call_bytes, cold=True)
                reader.prompts = writer.prompts
                seconds[verb] = getattr(reader, verb)()
    figures = ", ".join(f"{verb} {shape.call_bytes / it / 1e9:.2f}" for verb, it in seconds.items())
    return f"cold {shape.name}: {figures} GB/s"


# Asking


def _ask(bench: Bench, name: str, pages: int) -> None:
    """Measure a lookup of ``pages`` keys that are all there; of none, a ping."""
    bench.progress.step(name)
    if not pages:
        size = len(wire.encode(wire.Ping(1 << 16)))
        with ping_pong.answering(size, size) as exchange:
            measured = measure.interleave(
                _repeated(bench.store.ping), _repeated(exchange), min_seconds=bench.seconds
            )
        bench.report.add(measure.latency(name, measured, exchange.name))
        return
    shape = SHAPES[0]
    space = open_space(bench.store, shape)
    keys = random_keys(space, pages, np.random.default_rng())
    page = np.zeros(shape.page_bytes, np.uint8)
    assert space.put(keys, [page] * pages).stored == pages
    assert space.lookup(keys).pages == pages
    request = len(wire.encode(wire.Lookup(1 << 16, 1, [0], keys.packed)))
    answer = len(wire.encode(wire.Found(1 << 16, pages, 0)))
    with ping_pong.answering(request, answer) as exchange:
        ask = measure.timed(lambda: space.lookup(keys))
        measured = measure.interleave(
            _repeated(ask), _repeated(exchange), min_seconds=bench.seconds
        )
    bench.report.add(measure.latency(name, measured, exchange.name))


def _repeated(case: Measured) -> Measured:
    """The median of some calls in a row."""
    return lambda: median(case() for _ in range(ROUND_TRIPS))
