"""How much later does the first token come when prefill and decode are at two nodes?

Two installations with the reference engine: P and D at one node, and P and D at a node each. For
each prompt P computes it once on its own, at its node. Then the prompt goes with a question through
Conductor, P and D: P restores it from its own node and computes the question; D restores all of it,
in the second installation from the other node. Both installations take turns.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Final

import aiohttp
import numpy as np

from bench.cluster import Cluster, Options, node_stats, request
from bench.completion import complete
from bench.measure import Result

NAME: Final = "ttft/two-nodes"
PROMPT_TOKENS: Final = 2048
QUESTION_TOKENS: Final = 40
TURNS_MIN: Final = 3
_WARM: Final = 0.9


def names() -> list[str]:
    """The case."""
    return [NAME]


def results(name: str, seconds: float) -> Iterator[Result]:
    """Measure it."""
    with Cluster(_options(1)) as one, Cluster(_options(2)) as two:
        found = asyncio.run(_turns([one, two], seconds))
        fetched = node_stats(two.nodes[-1])["counts"].get("peer_fetched_pages", 0)
    for label, times in zip(("one node", "two nodes"), found, strict=True):
        shown = ", ".join(f"{1e3 * it:.0f}" for it in sorted(times))
        sys.stderr.write(f"{name}: {label}: {shown} ms\n")
    assert fetched >= len(found[1]) * PROMPT_TOKENS // 64, f"only {fetched} pages were fetched"
    bound, value = (1e3 * statistics.median(times) for times in found)
    yield Result(name, value, "ms", "one node", bound, bound / value)


def _options(nodes: int) -> Options:
    return Options(nodes=nodes, kv_hashes=False)


async def _turns(clusters: list[Cluster], seconds: float) -> list[list[float]]:
    """TTFT of each turn, for each installation."""
    found: list[list[float]] = [[] for _ in clusters]
    rng = np.random.default_rng()
    async with aiohttp.ClientSession() as session:
        for cluster in clusters:  # what every process does once
            await _ask(session, cluster, rng)
        began = time.monotonic()
        turns = min(TURNS_MIN, 1 + int(seconds))
        while len(found[0]) < turns or time.monotonic() - began < seconds:
            at = len(found[0]) % 2
            for which in (at, 1 - at):
                found[which].append(await _ask(session, clusters[which], rng))
    return found


async def _ask(session: aiohttp.ClientSession, cluster: Cluster, rng: np.random.Generator) -> float:
    """TTFT of one warm prompt."""
    tokens = rng.integers(32, 127, PROMPT_TOKENS + QUESTION_TOKENS).tolist()
    alone = tokens[:PROMPT_TOKENS]
    await complete(session, cluster.engine_urls["P1"], alone, max_tokens=1, temperature=0.0)
    answer = await complete(session, cluster.conductor_url, tokens, max_tokens=4, temperature=0.0)
    url = f"{cluster.conductor_url}/v1/decisions/{answer.request_id}"
    prefilled = request("GET", url)["attempts"][-1].get("prefilled") or {}
    restored = prefilled.get("restored_tokens") or 0
    assert restored >= _WARM * PROMPT_TOKENS, f"only {restored} tokens were restored at P"
    return answer.ttft_s
