"""How fast does the index take in events and match prompts, and how much memory does it need?

64 prefill engines, 64 decode engines and 64 nodes publish KV events over real ZeroMQ sockets; pages
have 64 tokens, and everybody has prefixes of another length. ``tokens``: events of engines, with
token ids and hashes of their own; ``keys``: events of nodes, with prefix keys. The number after it
is how many blocks are in a message.

``ingest`` is from the moment when an index that was stopped goes on, everything being queued at the
publishers, until a reader in another process sees the last block of every worker. ``match`` is what
one reader needs for a prompt of 131,072 tokens and all 192 workers, while 100,000 blocks a second
are written. ``memory`` is what the index process grows by, its shared memory included, when each
page is at one worker. ``rebuild``: the index process is killed while it is written to; until a
reader sees everything again.

``--peers dynamo`` measures Dynamo's indexer in the same run, on the same events and on the same
core, alternately. It is the bound; without it the bound of ``ingest`` is decoding alone.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec

from bench.index_feed import FeedError, Lines, feed
from bench.index_fleet import DECODE_ENGINES, NODES, PREFILL_ENGINES, Fleet
from bench.index_ours import (
    Cores,
    LastBlocks,
    Match,
    OurIndex,
    core_seconds,
    resident_bytes,
)
from bench.index_peer import PEERS, dynamo_lines
from bench.measure import Progress, Report, Result, percentile

ENTRIES: Final = 10_000_000
ENTRIES_MIN: Final = 20_000
"""With fewer not everybody has a part of a shared document."""
INGEST_PART: Final = {128: 10, 8: 20}
"""Blocks a message: what part of all entries one round sends; all of it is queued at once."""
REBUILD_PART: Final = 10
BLOCKS_PER_S: Final = 100_000
"""What is written while prompts are matched, and while a killed index comes back."""
STEADY_BLOCKS: Final = 128
MATCH_S: Final = 6.0
ASKED: Final = {
    "match/128k/p50": 0.35, "match/128k/p99": 0.7, "match/128k/tokens/p50": 3.0,
    "ingest/tokens/128": 450_000.0, "ingest/tokens/8": 200_000.0,
    "ingest/keys/128": 1_000_000.0, "ingest/keys/8": 300_000.0,
    "memory/keys": 40.0, "memory/tokens": 40.0,
    "rebuild/1M": 10.0, "snapshot/1M": 5.0, "snapshot/1M/turn": 5.0,
}  # fmt: skip
_DYNAMO: Final = "Dynamo"
_DECODING: Final = "decoding alone"
_SNAPSHOT_S: Final = 600.0
_ENGINES: Final = PREFILL_ENGINES + DECODE_ENGINES


class IndexResult(Result, frozen=True):
    """A result beside what is asked.

    Attributes:
        asked: in ``unit``: of rates at least, of all else at most.
        cpu_us: CPU time: of the indexing process for a block, of the reader for a prompt. On a
            machine with other work it says more than ``value``. None where it says nothing.
        bound_cpu_us: the same of the bound; None where it is not known.
    """

    asked: float | None = None
    cpu_us: float | None = None
    bound_cpu_us: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--entries", type=int, default=ENTRIES,
                        help=f"pages in the index; default: {ENTRIES:,}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3,
                        help="rounds of each ingest case; it alternates with its"
                        " bound")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=MATCH_S,
                        help="duration of each match case")  # fmt: skip
    parser.add_argument("--peers", choices=PEERS, action="append", default=[],
                        help="measure this index too")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    wanted = [name for name in ASKED if options.cases.search(name)]
    if not wanted:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    with (
        Report(json=options.json) as report,
        Progress("index", len({_step(name) for name in wanted})) as progress,
        feed(Cores.present().others) as publisher,
    ):
        peer = dynamo_lines(options.peers, progress)
        entries, rounds = max(options.entries, ENTRIES_MIN), max(options.rounds, 1)
        bench = Bench(publisher, peer, entries, rounds, options.seconds, progress)
        try:
            asyncio.run(_measure(bench, wanted, report))
        except FeedError as error:
            progress.note(str(error))
            return 1
    return 0


def _step(case: str) -> str:
    """What is measured at once: some cases come from the same run."""
    return case if case.startswith(("ingest/", "memory/")) else case.partition("/")[0]


class Bench(NamedTuple):
    """What every case needs."""

    publisher: Lines
    peer: Callable[[], Lines] | None
    entries: int
    rounds: int
    seconds: float
    progress: Progress

    async def ask(self, do: str, **arguments: object) -> Any:
        """Let the publisher do something; our loop goes on."""
        return await asyncio.to_thread(self.publisher.ask, do, **arguments)


async def _measure(bench: Bench, wanted: list[str], report: Report) -> None:
    groups: dict[str, Callable[[Bench, list[str]], AsyncIterator[IndexResult]]] = {
        "match": _match, "ingest": _ingest, "memory": _memory, "rebuild": _rebuild,
        "snapshot": _snapshot,
    }  # fmt: skip
    for group, measured in groups.items():
        names = [name for name in wanted if name.startswith(f"{group}/")]
        if names:
            async for result in measured(bench, names):
                report.add(result)


def _beside(
    name: str, value: float, unit: str, bound: str = "", bound_value: float | None = None,
    *, rising: bool = False, cpu_us: float | None = None, bound_cpu_us: float | None = None,
) -> IndexResult:  # fmt: skip
    """A result; ``rising`` if more is better."""
    ratio = None if bound_value is None else (value / bound_value) ** (1 if rising else -1)
    asked = ASKED[name]
    return IndexResult(name, value, unit, bound, bound_value, ratio, asked, cpu_us, bound_cpu_us)


# Matching


class Times(NamedTuple):
    """Milliseconds of calls.

    Attributes:
        wall: passed.
        cpu: the thread had a core.
        misses: calls that did not see the prompt's beginning at some worker.
    """

    wall: list[float]
    cpu: list[float]
    misses: int


async def _match(bench: Bench, names: list[str]) -> AsyncIterator[IndexResult]:
    """Times of one reader while the index is written to; the same of Dynamo, with the engines."""
    bench.progress.step(f"match: {bench.entries:,} pages come in first")
    fleet = Fleet(_ENGINES, NODES, bench.entries, shared=True)
    enough = int(BLOCKS_PER_S * (2 * bench.seconds + 1))
    written = fleet._replace(pages=enough, shared=False, seed=1)
    async with OurIndex(fleet.pages + written.pages) as ours:
        endpoints = await bench.ask("open", fleet=fleet)
        ours.follow(fleet.workers(), [[events] for events, _ in endpoints])
        await _fill(bench, fleet, written)
        table = await ours.table()
        await ours.wait_seen(LastBlocks(table, fleet).seen)
        match = Match(table, fleet)
        # A document that many workers announce at once is applied after what only one of them has.
        await ours.wait_seen(lambda: min(match.prefixes()) > 0)
        bench.publisher.pin(Cores.present().indexer)  # the reader has its core for itself
        await bench.ask("steady", rate=BLOCKS_PER_S / STEADY_BLOCKS)
        known = await _times(match.prefixes, bench.seconds)
        of_tokens = await _times(match.of_tokens, bench.seconds)
        rate = await bench.ask("stop")
        bench.publisher.pin(Cores.present().others)
        bench.progress.note(
            f"match: {rate * STEADY_BLOCKS:,.0f} blocks/s were written meanwhile;"
            f" {known.misses + of_tokens.misses} of {len(known.wall) + len(of_tokens.wall)} calls"
            " missed a block that was there"
        )
    peer = await _match_peer(bench, fleet, written._replace(nodes=0))
    for name in names:
        percent = 99.0 if name.endswith("p99") else 50.0
        ours_ms = of_tokens if "tokens" in name else known
        bound = None
        if peer is not None:
            bound = percentile(peer["tokens" if "tokens" in name else "hashes"], percent)
        yield _beside(
            name, percentile(ours_ms.wall, percent), "ms", _DYNAMO if peer else "", bound,
            cpu_us=1e3 * percentile(ours_ms.cpu, percent),
        )  # fmt: skip


async def _fill(bench: Bench, fleet: Fleet, written: Fleet) -> None:
    """Publish what is to be there, and make what is to be written."""
    await bench.ask("wait_subscribed", workers=len(fleet.workers()))
    await bench.ask("make", fleet=written, blocks=STEADY_BLOCKS)
    await bench.ask("stream", fleet=fleet, blocks=STEADY_BLOCKS)


async def _times(match: Callable[[], list[int]], seconds: float) -> Times:
    """Times of calls, each in a turn of our loop."""
    wall, cpu, misses = [], [], 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began, cpu_began = time.perf_counter(), time.thread_time()
        pages = match()
        cpu.append(1e3 * (time.thread_time() - cpu_began))
        wall.append(1e3 * (time.perf_counter() - began))
        misses += min(pages) == 0
        await asyncio.sleep(0)
    return Times(wall, cpu, misses)


async def _match_peer(bench: Bench, fleet: Fleet, written: Fleet) -> dict[str, list[float]] | None:
    """The same of Dynamo's indexer, which knows engines only."""
    if bench.peer is None:
        return None
    engines = fleet._replace(nodes=0, pages=fleet.pages // len(fleet.workers()) * fleet.engines)
    with bench.peer() as dynamo:
        endpoints = await bench.ask("open", fleet=fleet)
        events = [events for events, _ in endpoints[: fleet.engines]]
        await asyncio.to_thread(dynamo.ask, "follow", endpoints=events)
        await bench.ask("wait_subscribed", workers=fleet.engines)
        await bench.ask("make", fleet=written, blocks=STEADY_BLOCKS)
        await bench.ask("stream", fleet=engines, blocks=STEADY_BLOCKS)
        await asyncio.to_thread(dynamo.ask, "visible", fleet=engines)
        await bench.ask("steady", rate=BLOCKS_PER_S / STEADY_BLOCKS)
        found: dict[str, list[float]] = await asyncio.to_thread(
            dynamo.ask, "match", fleet=engines, seconds=bench.seconds
        )
        rate = await bench.ask("stop")
    bench.progress.note(f"match: {rate * STEADY_BLOCKS:,.0f} blocks/s beside Dynamo")
    with bench.peer() as dynamo:
        small = engines._replace(pages=min(engines.pages, 1_000_000))
        alone: list[float] = await asyncio.to_thread(
            dynamo.ask, "find_matches", fleet=small, seconds=bench.seconds
        )
    middle, rare = percentile(alone, 50), percentile(alone, 99)
    bench.progress.note(
        f"match: Dynamo's RadixTree.find_matches alone, with {small.pages:,} pages and nothing"
        f" written: p50 {middle:.3f} ms, p99 {rare:.3f} ms"
    )
    return found


# Learning


async def _ingest(bench: Bench, names: list[str]) -> AsyncIterator[IndexResult]:
    """Blocks a second from the publishers' queues to a reader."""
    for name in names:
        _, kind, blocks = name.split("/")
        pages = max(bench.entries // INGEST_PART[int(blocks)], 1)
        of_engines = kind == "tokens"
        fleet = Fleet(_ENGINES if of_engines else 0, 0 if of_engines else NODES, pages, shared=True)
        fleet = fleet._replace(pages=sum(worker.pages for worker in fleet.workers()))
        bench.progress.step(f"{name}: {fleet.pages:,} blocks")
        made = await bench.ask("make", fleet=fleet, blocks=int(blocks))
        decoding_s, decoding_cpu_s = await bench.ask("decode")
        ours, theirs = [], []
        for _ in range(bench.rounds):
            ours.append(await _ingest_ours(bench, fleet))
            if of_engines and bench.peer is not None:
                theirs.append(await _ingest_peer(bench, fleet, bench.peer))
        decoding = fleet.pages / decoding_s
        bench.progress.note(
            f"{name}: {made:,} messages; decoding alone {decoding:,.0f} blocks/s;"
            f" ours {_rates(ours)}{'; Dynamo ' if theirs else ''}{_rates(theirs)}"
        )
        mine = median(one.blocks_per_s for one in ours)
        cpu_us = median(one.cpu_us for one in ours)
        bound, bound_cpu_us = decoding, 1e6 * decoding_cpu_s / fleet.pages
        if theirs:
            bound = median(one.blocks_per_s for one in theirs)
            bound_cpu_us = median(one.cpu_us for one in theirs)
        yield _beside(
            name, mine, "blocks/s", _DYNAMO if theirs else _DECODING, bound,
            rising=True, cpu_us=cpu_us, bound_cpu_us=bound_cpu_us,
        )  # fmt: skip


class Learned(NamedTuple):
    """One round.

    Attributes:
        blocks_per_s: from the publishers' queues to a reader.
        cpu_us: CPU time of the process for a block.
    """

    blocks_per_s: float
    cpu_us: float

    @classmethod
    def of(cls, fleet: Fleet, took_ns: int, cpu_s: float) -> "Learned":
        """So much for all blocks of a fleet."""
        return cls(1e9 * fleet.pages / took_ns, 1e6 * cpu_s / fleet.pages)


def _rates(rounds: list[Learned]) -> str:
    return ", ".join(f"{one.blocks_per_s:,.0f}" for one in rounds)


async def _ingest_ours(bench: Bench, fleet: Fleet) -> Learned:
    workers = fleet.workers()
    async with OurIndex(2 * fleet.pages) as ours:
        endpoints = await bench.ask("open", fleet=fleet)
        ours.follow(workers, [[events] for events, _ in endpoints])
        await bench.ask("wait_subscribed", workers=len(workers))
        await ours.wait_current(len(workers))
        last = LastBlocks(await ours.table(), fleet)
        pid = ours.pid
        before_s = core_seconds(pid)
        os.kill(pid, signal.SIGSTOP)
        await bench.ask("send", keep=False)
        began_ns = time.monotonic_ns()
        os.kill(pid, signal.SIGCONT)
        took_ns = await ours.wait_seen(last.seen) - began_ns
        return Learned.of(fleet, took_ns, core_seconds(pid) - before_s)


async def _ingest_peer(bench: Bench, fleet: Fleet, peer: Callable[[], Lines]) -> Learned:
    with peer() as dynamo:
        endpoints = await bench.ask("open", fleet=fleet)
        events = [events for events, _ in endpoints]
        await asyncio.to_thread(dynamo.ask, "follow", endpoints=events)
        await bench.ask("wait_subscribed", workers=len(events))
        before_s = core_seconds(dynamo.pid)
        os.kill(dynamo.pid, signal.SIGSTOP)
        await bench.ask("send", keep=False)
        began_ns = time.monotonic_ns()
        os.kill(dynamo.pid, signal.SIGCONT)
        ended_ns = await asyncio.to_thread(dynamo.ask, "visible", fleet=fleet)
        return Learned.of(fleet, ended_ns - began_ns, core_seconds(dynamo.pid) - before_s)


# Memory


async def _memory(bench: Bench, names: list[str]) -> AsyncIterator[IndexResult]:
    """Growth of the index process for each page, each of which is at one worker."""
    for name in names:
        of_engines = name == "memory/tokens"
        engines, nodes = (_ENGINES, 0) if of_engines else (0, NODES)
        fleet = Fleet(engines, nodes, bench.entries, shared=False)
        workers = fleet.workers()
        pages = sum(worker.pages for worker in workers)
        bench.progress.step(f"{name}: {pages:,} pages")
        async with OurIndex(pages) as ours:
            endpoints = await bench.ask("open", fleet=fleet)
            ours.follow(workers, [[events] for events, _ in endpoints])
            await bench.ask("wait_subscribed", workers=len(workers))
            await ours.wait_current(len(workers))
            before = resident_bytes(ours.pid)
            await bench.ask("stream", fleet=fleet, blocks=STEADY_BLOCKS)
            await ours.wait_seen(LastBlocks(await ours.table(), fleet).seen)
            grown = resident_bytes(ours.pid) - before
        yield _beside(name, grown / pages, "B/pair")


# Coming back


async def _rebuild(bench: Bench, names: list[str]) -> AsyncIterator[IndexResult]:
    """From the end of the index process until a reader sees all that was there, by replays."""
    fleet = Fleet(_ENGINES, NODES, bench.entries // REBUILD_PART, shared=True)
    workers = fleet.workers()
    bench.progress.step(f"{names[0]}: {fleet.pages:,} pages")
    enough = min(int(ASKED[names[0]] * BLOCKS_PER_S), bench.entries)
    written = fleet._replace(pages=enough, shared=False, seed=1)
    async with OurIndex(2 * fleet.pages + written.pages) as ours:
        endpoints = await bench.ask("open", fleet=fleet)
        ours.follow(workers, endpoints)
        await bench.ask("wait_subscribed", workers=len(workers))
        await bench.ask("make", fleet=fleet, blocks=STEADY_BLOCKS)
        await bench.ask("send", keep=True)
        former = await ours.table()
        await ours.wait_seen(LastBlocks(former, fleet).seen)
        await bench.ask("make", fleet=written, blocks=STEADY_BLOCKS)
        await bench.ask("steady", rate=BLOCKS_PER_S / STEADY_BLOCKS)
        began_ns = ours.kill()
        table = await ours.table(former)
        ended_ns = await ours.wait_seen(LastBlocks(table, fleet).seen)
        rate = await bench.ask("stop")
    bench.progress.note(f"{names[0]}: {rate * STEADY_BLOCKS:,.0f} blocks/s were written meanwhile")
    yield _beside(names[0], (ended_ns - began_ns) / 1e9, "s")


async def _snapshot(bench: Bench, names: list[str]) -> AsyncIterator[IndexResult]:
    """What `python -m bench snapshot` finds with a tenth of all pages at one node."""
    pages = max(bench.entries // REBUILD_PART, 1_000)
    bench.progress.step(f"{names[0]}: a node of {pages:,} pages")
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench", "snapshot", "--json", "--pages", str(pages),
        stdout=subprocess.PIPE,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(child.communicate(), _SNAPSHOT_S)
    found = [msgspec.json.decode(line, type=Result) for line in said.splitlines()]
    seconds = [one.value for one in found if one.case.endswith("/seconds")]
    turns = [one.value for one in found if one.case.endswith("_turn")]
    for name in names:
        if name.endswith("/turn"):
            yield _beside(name, max(turns), "ms")
        else:
            yield _beside(name, max(seconds), "s")
