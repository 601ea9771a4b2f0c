"""Six clients talk for four rounds with a server whose own cache has no room for all of them.

``multiturn/*``: seconds for all rounds, beside those of a server without a store. Only one server
works at a time.
"""

import asyncio
import statistics
import time
from typing import Final

import aiohttp

from bench.completion import complete
from bench.measure import Progress, Report, Result
from bench.vllm_cluster import HITS, MODEL, VllmCluster
from bench.vllm_restart import prompt

CLIENTS: Final = 6
ROUND_TOKENS: Final = (1100, 1333, 1566, 1800)
"""Tokens of the prompts of each round; each begins with the whole prompt of the round before."""
BLOCKS: Final = 200
"""Of 32 tokens: 6,400, where the six have 10,800 at last."""
OUTPUT_TOKENS: Final = 8
_FLAGS: Final = ("--max-model-len", "2048")
"""vLLM does not start with fewer blocks than its longest prompt takes."""
_SEED: Final = 30_000
_WARM_SEED: Final = 39_000
_WARM_TOKENS: Final = 1_000
_SETTLE_S: Final = 3.0
_BOUND: Final = "without a store"


async def multiturn(talks: int, report: Report, progress: Progress) -> None:
    """Measure and report the case.

    Args:
        talks: how often all is done, with other prompts; at least 1.
        report: gets the results.
        progress: gets the notes.
    """
    walls: dict[str, list[float]] = {name: [] for name in ("without", "first", "second", "restart")}
    seeds = [_SEED + CLIENTS * talk for talk in range(talks)]
    with VllmCluster(capacity_bytes=2 << 30) as cluster:
        cluster.start_node()
        transfer = cluster.transfer()
        cluster.start_server("plain", flags=_FLAGS, blocks=BLOCKS)
        cluster.start_server("store", transfer, _FLAGS, blocks=BLOCKS)
        for name in ("plain", "store"):
            cluster.wait_server(name)
            await _ask(cluster, name, prompt(_WARM_SEED, _WARM_TOKENS))
        for seed in seeds:
            with cluster.suspended("store"):
                walls["without"].append(await _wall_s(cluster, "plain", seed))
            with cluster.suspended("plain"):
                for case in ("first", "second"):
                    walls[case].append(await _wall_s(cluster, "store", seed))
                # An idle vLLM does not say how far its connector's stores are.
                await asyncio.sleep(_SETTLE_S)
        cluster.stop("plain")
        cluster.stop("store")
        cluster.start_server("store", transfer, _FLAGS, blocks=BLOCKS)
        cluster.wait_server("store")
        await _ask(cluster, "store", prompt(_WARM_SEED, _WARM_TOKENS))
        walls["restart"] = [await _wall_s(cluster, "store", seed) for seed in seeds]
        hits = cluster.metric("store", HITS)
    without = statistics.median(walls.pop("without"))
    for case, seconds in walls.items():
        wall = statistics.median(seconds)
        name = f"multiturn/{case}"
        report.add(Result(name, wall, "s", _BOUND, without, without / wall))
        progress.note(f"{name}: {wall / without:.2f} of the {without:.1f} s without a store")
    progress.note(f"after the restart {hits:.0f} tokens came from the node")


async def _wall_s(cluster: VllmCluster, name: str, seed: int) -> float:
    """Seconds until the last of the clients has its last answer."""
    begin = time.perf_counter()
    await asyncio.gather(*(_talk(cluster, name, seed + client) for client in range(CLIENTS)))
    return time.perf_counter() - begin


async def _talk(cluster: VllmCluster, name: str, seed: int) -> None:
    said = prompt(seed, ROUND_TOKENS[-1])
    for tokens in ROUND_TOKENS:
        await _ask(cluster, name, said[:tokens])


async def _ask(cluster: VllmCluster, name: str, tokens: list[int]) -> None:
    async with aiohttp.ClientSession() as session:
        await complete(
            session, cluster.urls[name], tokens,
            max_tokens=OUTPUT_TOKENS, temperature=0.0, model=MODEL,
        )  # fmt: skip
