"""How soon is vLLM's first token when the node has the prompt, and what does storing cost?

Two servers, with and without the connector, compute the same prompts alternately (``cold``); then
the one with the connector is restarted, and what it loads stands beside what the other one finds in
its own prefix cache.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence

import aiohttp
import numpy as np

from bench.cluster import ClusterError
from bench.completion import complete
from bench.measure import Progress, Report, Result
from bench.vllm_cluster import HITS, MODEL, VllmCluster

PROMPT_TOKENS = 2000
_WARM_UP = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the group."""
    parser.add_argument("--load", default="async", choices=["async", "layerwise"], help="how")
    parser.add_argument("--prompts", type=int, default=9, help="prompts, at least 5")


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status is 1 when a server failed or nothing was loaded."""
    prompts = [_prompt(seed) for seed in range(max(5, options.prompts))]
    try:
        with VllmCluster() as cluster, Report(json=options.json) as report:
            return asyncio.run(_measure(cluster, prompts, report, options.load))
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1


async def _measure(
    cluster: VllmCluster, prompts: Sequence[Sequence[int]], report: Report, load: str
) -> int:  # fmt: skip
    cluster.start_node()
    cluster.start_server("plain")
    cluster.start_server("store", cluster.transfer(load=load))
    for name in ("plain", "store"):
        cluster.wait_server(name)
    with Progress("round", 2) as progress:
        progress.step("cold: every prompt is computed by both")
        cold = await _alternate(cluster, prompts)
        cluster.stop("store")
        cluster.start_server("store", cluster.transfer(load=load))
        cluster.wait_server("store")
        progress.step("warm: from the node after a restart, and from the engine's own cache")
        warm = await _alternate(cluster, prompts)
        loaded = cluster.metric("store", HITS)
        load_s = cluster.metric("store", "kvstore:load_seconds_total")
        lookup_s = cluster.metric("store", "kvstore:lookup_seconds_total")
        loads = max(1.0, cluster.metric("store", "kvstore:loads_total"))
        progress.note(
            f"loaded {loaded:.0f} of {PROMPT_TOKENS * (len(prompts) + _WARM_UP)} tokens;"
            f" mean load {load_s / loads * 1e3:.1f} ms, lookup {lookup_s / loads * 1e3:.2f} ms"
        )
    recompute, hit = statistics.median(cold["plain"]), statistics.median(warm["plain"])
    kvstore = statistics.median(warm["store"])
    pairs = zip(cold["store"], cold["plain"], strict=True)
    overhead = (statistics.median(ours / alone for ours, alone in pairs) - 1) * 100
    bound = "ttft/engine-prefix-hit"
    for case, seconds in (("ttft/recompute", recompute), (bound, hit), ("ttft/kvstore", kvstore)):
        report.add(Result(case, seconds * 1e3, "ms", bound, hit * 1e3, hit / seconds))
    report.add(Result("cold/overhead", overhead, "%"))
    return 0 if loaded else 1


async def _alternate(
    cluster: VllmCluster, prompts: Sequence[Sequence[int]]
) -> dict[str, list[float]]:
    """Seconds to the first token of each prompt at each server, one request at a time."""
    seconds: dict[str, list[float]] = {"plain": [], "store": []}
    async with aiohttp.ClientSession() as session:

        async def ask(name: str, prompt: Sequence[int]) -> float:
            answer = await complete(
                session, cluster.urls[name], list(prompt),
                max_tokens=1, temperature=0.0, model=MODEL,
            )  # fmt: skip
            return answer.ttft_s

        for number in range(_WARM_UP):
            for name in seconds:
                await ask(name, _prompt(10_000 + number))
        for number, prompt in enumerate(prompts):
            for name in sorted(seconds, reverse=number % 2 == 0):
                seconds[name].append(await ask(name, prompt))
    return seconds


def _prompt(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(2, 500, PROMPT_TOKENS)]
