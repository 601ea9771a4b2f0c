"""The first token after a restart, from a store and then from the engine's own cache."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from bench.completion import complete
from bench.vllm_cluster import HITS, MODEL, VllmCluster

PROMPT_TOKENS: Final = 2000
WARM_UP: Final = 3
_SETTLE_S: Final = 3.0
_WARM_UP_SEED: Final = 10_000


class Restarted(msgspec.Struct):
    """What a restarted server did.

    Attributes:
        loaded_s: time to the first token of each prompt, whose KV came from the store.
        cached_s: the same at once again, when the engine's own prefix cache had it.
        hit_tokens: that came from the store in all.
        notes: what else is worth telling.
    """

    loaded_s: list[float]
    cached_s: list[float]
    hit_tokens: int
    notes: list[str] = []


def prompt(seed: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """A prompt that shares no prefix with those of other seeds."""
    return [int(token) for token in np.random.default_rng(seed).integers(2, 500, tokens)]


async def restarted(
    cluster: VllmCluster, seeds: Sequence[int], transfer: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
) -> Restarted:  # fmt: skip
    """Compute prompts, restart the server, and ask for each twice.

    One server runs at a time, and both cases take turns on it, so that they meet the same
    neighbours.

    Args:
        cluster: its store serves already.
        seeds: of the prompts.
        transfer: ``--kv-transfer-config``.
        variables: environment of the server.
    """
    result = Restarted([], [], 0)
    warm_up = range(_WARM_UP_SEED, _WARM_UP_SEED + WARM_UP)
    cluster.start_server("store", transfer, variables=variables)
    cluster.wait_server("store")
    for seed in (*warm_up, *seeds):
        await ttft_s(cluster, "store", seed)
    # An idle vLLM does not say how far its connector's stores are.
    await asyncio.sleep(_SETTLE_S)
    cluster.stop("store")
    cluster.start_server("store", transfer, variables=variables)
    cluster.wait_server("store")
    for seed in warm_up:
        await ttft_s(cluster, "store", seed)
    for seed in seeds:
        result.loaded_s.append(await ttft_s(cluster, "store", seed))
        result.cached_s.append(await ttft_s(cluster, "store", seed))
    result.hit_tokens = int(cluster.metric("store", HITS))
    return result


async def ttft_s(cluster: VllmCluster, name: str, seed: int) -> float:
    """Seconds to the first token of one prompt."""
    async with aiohttp.ClientSession() as session:
        answer = await complete(
            session, cluster.urls[name], prompt(seed), max_tokens=1, temperature=0.0, model=MODEL
        )
    return answer.ttft_s
