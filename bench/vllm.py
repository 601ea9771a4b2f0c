"""How soon is vLLM's first token when the node has the prompt, and what does storing cost?

``cold/overhead``: two servers, with and without the connector, compute the same prompts in turn,
and then other two, and so on.
``ttft/*``: each store behind a server of its own that computes prompts, is restarted, and is asked
for them twice: what was loaded stands beside what the engine's own prefix cache then has. Only one
server works at a time, and the cases that are compared take turns.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from typing import Final

import aiohttp

from bench.cluster import ClusterError
from bench.completion import complete
from bench.measure import Progress, Report, Result, Spread, percentile
from bench.vllm_cluster import MODEL, VllmCluster
from bench.vllm_peers import PEERS, measure
from bench.vllm_restart import Restarted, prompt, restarted, ttft_s

BOUND: Final = "ttft/engine-prefix-hit"
BATCH: Final = 3
"""Prompts at once, so that one is stored while the next is computed."""
BATCH_TOKENS: Final = 640
OUTPUT_TOKENS: Final = 4
_OTHER: Final = {"plain": "store", "store": "plain"}
_STORED: Final = "kvstore:stored_pages_total"
_COLD_SEED: Final = 20_000
_WARM_SEED: Final = 19_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the group."""
    parser.add_argument("--load", default="async", choices=["async", "layerwise"], help="how")
    parser.add_argument("--prompts", type=int, default=9, help="prompts, at least 5")
    parser.add_argument("--pairs", type=int, default=36, help="turns with and without, in all")
    parser.add_argument("--servers", type=int, default=6, help="pairs of servers, at least 2")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="which")


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status is 1 when a server failed or nothing was loaded."""
    count = max(5, options.prompts)
    try:
        with Report(json=options.json) as report, Progress("part", 2 + len(options.peers)) as part:
            part.step("cold: every prompt is computed, with the connector and without")
            servers = max(2, options.servers)
            pairs = max(servers, options.pairs)
            recompute = asyncio.run(_cold(pairs, servers, count, report, part)) * 1e3
            part.step("kvstore: restart, then from the node and from the engine's own cache")
            ours = _ours(count, options.load, part)
            hit = statistics.median(ours.cached_s) * 1e3
            report.add(Result("ttft/recompute", recompute, "ms", BOUND, hit, hit / recompute))
            report.add(Result(BOUND, hit, "ms", BOUND, hit, 1.0))
            _add("kvstore", ours, report, part)
            for name in options.peers:
                part.step(f"{name}: restart, then from there and from the engine's own cache")
                try:
                    _add(name, measure(name, count), report, part)
                except (ClusterError, subprocess.CalledProcessError) as error:
                    part.note(f"ttft/{name} is left out: {error}")
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if ours.hit_tokens else 1


def _add(name: str, result: Restarted, report: Report, progress: Progress) -> None:
    """One store's case, beside the prefix hits that took turns with it."""
    loaded, cached = (Spread.of(seconds) for seconds in (result.loaded_s, result.cached_s))
    report.add(
        Result(
            f"ttft/{name}", loaded.median * 1e3, "ms",
            BOUND, cached.median * 1e3, cached.median / loaded.median,
        )
    )  # fmt: skip
    progress.note(
        f"{name}: loaded {_ms(loaded)}, the engine's own hits in turn {_ms(cached)},"
        f" {result.hit_tokens} tokens loaded. {' '.join(result.notes)}"
    )


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.0f} ms ({spread.min * 1e3:.0f} to {spread.max * 1e3:.0f})"


def _quartiles(percent: list[float]) -> str:
    first, third = percentile(percent, 25), percentile(percent, 75)
    return f"median {statistics.median(percent):.1f} % (quartiles {first:.1f} and {third:.1f})"


def _ours(count: int, load: str, progress: Progress) -> Restarted:
    with VllmCluster(capacity_bytes=2 << 30) as cluster:
        cluster.start_node()
        result = asyncio.run(restarted(cluster, range(count), cluster.transfer(load=load)))
        if not result.hit_tokens:
            progress.note("nothing was loaded from the node")
        loads = max(1.0, cluster.metric("store", "kvstore:loads_total"))
        for what in ("load", "lookup"):
            seconds = cluster.metric("store", f"kvstore:{what}_seconds_total")
            result.notes.append(f"Mean {what} {seconds / loads * 1e3:.2f} ms.")
        return result


async def _cold(pairs: int, servers: int, count: int, report: Report, progress: Progress) -> float:
    """Reports what storing costs; returns the seconds to a first token without any cache.

    A server can be faster or slower than its twin by several percent for as long as it lives (where
    its memory came to lie): turns of one pair alone would measure that, so there are several.
    """
    lost, lost_cpu, of_each, pages = list[float](), list[float](), list[float](), 0.0
    with VllmCluster(capacity_bytes=2 << 30) as cluster:
        cluster.start_node()
        for pair in range(servers):
            turns = range(pair * pairs // servers, (pair + 1) * pairs // servers)
            cluster.start_server("plain")
            cluster.start_server("store", cluster.transfer())
            for name in ("plain", "store"):
                cluster.wait_server(name)
                await _batch_s(cluster, name, _WARM_SEED)
            begun = cluster.metric("store", _STORED)
            seconds, cpu_s = await _turns(cluster, turns)
            pages += cluster.metric("store", _STORED) - begun
            of_each.append(statistics.median(_lost(seconds)))
            lost += _lost(seconds)
            lost_cpu += _lost(cpu_s)
            if pair < servers - 1:
                cluster.stop("plain")
            cluster.stop("store")
        value = statistics.mean(of_each)
        error = statistics.stdev(of_each) / len(of_each) ** 0.5
        report.add(Result("cold/overhead", value, "%"))
        each = ", ".join(f"{percent:.1f}" for percent in of_each)
        progress.note(
            f"cold/overhead: mean {value:.1f} % (standard error {error:.1f}) of {servers} pairs of"
            f" servers, {each}; of all {pairs} turns, {_quartiles(lost)}; of their CPU seconds,"
            f" {_quartiles(lost_cpu)}; {pages:.0f} pages were stored"
        )
        return statistics.median([await ttft_s(cluster, "plain", seed) for seed in range(count)])


async def _turns(
    cluster: VllmCluster, turns: range
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds and CPU seconds of the turns of two servers, of which one stands still."""
    seconds: dict[str, list[float]] = {"plain": [], "store": []}
    cpu_s: dict[str, list[float]] = {"plain": [], "store": []}
    for turn in turns:
        for name in sorted(seconds, reverse=turn % 2 == 0):
            with cluster.suspended(_OTHER[name]):
                before_s = cluster.cpu_s(name)
                seconds[name].append(await _batch_s(cluster, name, _COLD_SEED + BATCH * turn))
                cpu_s[name].append(cluster.cpu_s(name) - before_s)
    return seconds, cpu_s


def _lost(both: dict[str, list[float]]) -> list[float]:
    """Percent of the throughput that each turn with the connector lost."""
    return [(1 - plain / store) * 100 for plain, store in zip(*both.values(), strict=True)]


async def _batch_s(cluster: VllmCluster, name: str, seed: int) -> float:
    """Seconds that a server takes for a batch of new prompts that come at once."""
    async with aiohttp.ClientSession() as session:
        begin = time.perf_counter()
        await asyncio.gather(
            *(
                complete(
                    session, cluster.urls[name], prompt(seed + number, BATCH_TOKENS),
                    max_tokens=OUTPUT_TOKENS, temperature=0.0, model=MODEL,
                )
                for number in range(BATCH)
            )
        )  # fmt: skip
        return time.perf_counter() - begin
