"""The first token after a restart, from a store, beside an engine that has its own cache only."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from bench.completion import complete
from bench.vllm_cluster import HITS, MODEL, VllmCluster

LENGTHS: Final = (1000, 2000, 8000)
WARM_UP: Final = 3
_LONG: Final = 8000
_LONG_PROMPTS: Final = 3
_SETTLE_S: Final = 3.0
_WARM_UP_SEED: Final = 10_000
_BEFORE_SEED: Final = 20_000
_BEFORE: Final = 16
"""Tokens of the prompt just before a timed one; too few for a page or a block."""
_SEEDS: Final = 100
"""Seeds of a length begin at its place among :data:`LENGTHS` times this."""


class Restarted(msgspec.Struct):
    """What a restarted server did; all times are in the order of the prompts.

    Attributes:
        computed_s: length of a prompt to the times to the first token, when the server computed
            and stored the KV.
        loaded_s: the same after a restart, when the KV came from the store.
        cached_s: the same on a server without a connector, whose own prefix cache had it.
        hit_tokens: that came from the store in all.
        notes: what else is worth telling.
    """

    computed_s: dict[int, list[float]]
    loaded_s: dict[int, list[float]]
    cached_s: dict[int, list[float]]
    hit_tokens: int
    notes: list[str] = []


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no prefix with those of other seeds."""
    return [int(token) for token in np.random.default_rng(seed).integers(2, 500, tokens)]


def prompts(count: int) -> list[tuple[int, int]]:
    """Seed and length of every prompt: ``count`` of each length, of the longest only three."""
    return [
        (place * _SEEDS + number, tokens)
        for place, tokens in enumerate(LENGTHS)
        for number in range(_LONG_PROMPTS if tokens == _LONG else min(count, _SEEDS))
    ]


async def restarted(
    cluster: VllmCluster, count: int, transfer: Mapping[str, Any],
    variables: Mapping[str, str] | None = None,
) -> Restarted:  # fmt: skip
    """Compute prompts, restart the server, and ask for each.

    A server without a connector is asked for each twice: the second time its own cache has it. (A
    connector loads what that cache does not have: the end of a prompt.) Both take turns, so that
    they meet the same neighbours, and while one is timed the other one stands still. Just before,
    the timed one answers a short prompt: otherwise one server alone would begin with what the
    other's computing left in the processor's caches.

    Args:
        cluster: its store serves already.
        count: of :func:`prompts`.
        transfer: ``--kv-transfer-config``.
        variables: environment of the server.
    """
    result = Restarted({}, {}, {}, 0)
    cluster.start_server("store", transfer, variables=variables)
    cluster.wait_server("store")
    await _warm_up(cluster, "store")
    for seed, tokens in prompts(count):
        seconds = await ttft_s(cluster, "store", seed, tokens)
        result.computed_s.setdefault(tokens, []).append(seconds)
    # An idle vLLM does not say how far its connector's stores are.
    await asyncio.sleep(_SETTLE_S)
    cluster.stop("store")
    cluster.start_server("store", transfer, variables=variables)
    cluster.start_server("plain")
    for name in ("store", "plain"):
        cluster.wait_server(name)
        await _warm_up(cluster, name)
    for seed, tokens in prompts(count):
        # Computing takes long. A store that stood still meanwhile might lose its engine.
        await ttft_s(cluster, "plain", seed, tokens)
        with cluster.suspended("plain"):
            await ttft_s(cluster, "store", _BEFORE_SEED + seed, _BEFORE)
            loaded_s = await ttft_s(cluster, "store", seed, tokens)
        with cluster.suspended("store"):
            await ttft_s(cluster, "plain", _BEFORE_SEED + seed, _BEFORE)
            cached_s = await ttft_s(cluster, "plain", seed, tokens)
        result.loaded_s.setdefault(tokens, []).append(loaded_s)
        result.cached_s.setdefault(tokens, []).append(cached_s)
    cluster.stop("plain")
    result.hit_tokens = int(cluster.metric("store", HITS))
    return result


async def from_disk(cluster: VllmCluster, transfer: Mapping[str, Any]) -> tuple[list[float], int]:
    """Restart node and server after :func:`restarted`, and ask for the longest prompts once.

    Args:
        cluster: its node has an SSD tier, its server just served :func:`restarted`.
        transfer: ``--kv-transfer-config``.

    Returns:
        Times to the first token, and tokens that came from the store.
    """
    cluster.stop("store")
    cluster.stop("node")
    cluster.start_node()
    cluster.start_server("store", transfer)
    cluster.wait_server("store")
    await _warm_up(cluster, "store")
    before = cluster.metric("store", HITS)
    seconds = [
        await ttft_s(cluster, "store", seed, tokens)
        for seed, tokens in prompts(0) if tokens == _LONG
    ]  # fmt: skip
    return seconds, int(cluster.metric("store", HITS) - before)


async def _warm_up(cluster: VllmCluster, name: str) -> None:
    for seed in range(_WARM_UP_SEED, _WARM_UP_SEED + WARM_UP):
        await ttft_s(cluster, name, seed, LENGTHS[0])


async def ttft_s(cluster: VllmCluster, name: str, seed: int, tokens: int) -> float:
    """Seconds to the first token of one prompt."""
    async with aiohttp.ClientSession() as session:
        answer = await complete(
            session, cluster.urls[name], prompt(seed, tokens),
            max_tokens=1, temperature=0.0, model=MODEL,
        )  # fmt: skip
    return answer.ttft_s
