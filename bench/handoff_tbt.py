"""The gaps of four running streams while prompts of 2,000 tokens arrive: the reason for P and D."""

import asyncio
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from typing import Final

import aiohttp
import numpy as np

from bench.cluster import Cluster, Options
from bench.completion import Completion, complete
from bench.handoff_pools import TOKENS
from bench.handoff_ttft import PushedPair, pushed, registry_of
from bench.measure import Result, percentile
from kvstore.handoff.rooms import RoomNumbers

STREAMS: Final = 4
STREAM_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 1_500
PROMPTS_MIN: Final = 5
WAIT_S: Final = 60.0
Send = Callable[[list[int], int, list[float]], Awaitable[Completion]]


def results(_: str, seconds: float) -> Iterator[Result]:
    """Measure both on the same cores, one after the other."""
    with Cluster(Options(handoff="push", kv_hashes=False)) as cluster:
        found = asyncio.run(_both(cluster, seconds))
    bound = 1e3 * percentile(found["tbt/mono"], 99)
    for name, gaps in found.items():
        value = 1e3 * percentile(gaps, 99)
        sys.stderr.write(f"{name}: {len(gaps)} gaps, median {1e3 * percentile(gaps, 50):.1f} ms\n")
        yield Result(name, value, "ms", "one engine", bound, bound / value)


async def _both(cluster: Cluster, seconds: float) -> dict[str, list[float]]:
    rooms, prefill = RoomNumbers(secrets.randbits(31)), cluster.engine_urls["P1"]
    at = PushedPair(prefill, cluster.engine_urls["D1"], registry_of(prefill))
    async with aiohttp.ClientSession() as session:

        def to_mono(prompt: list[int], most: int, times: list[float]) -> Awaitable[Completion]:
            return complete(
                session, cluster.mono_url, prompt, times, max_tokens=most, temperature=0.0,
            )  # fmt: skip

        def to_pair(prompt: list[int], most: int, times: list[float]) -> Awaitable[Completion]:
            return pushed(
                session, at, prompt, rooms.draw(), tokens_at=times, max_tokens=most,
                temperature=0.0,
            )  # fmt: skip

        return {
            "tbt/mono": await _gaps(to_mono, seconds),
            "tbt/push": await _gaps(to_pair, seconds),
        }


async def _gaps(send: Send, seconds: float) -> list[float]:
    """Seconds between two tokens of each stream, while prompts arrive."""
    rng = np.random.default_rng()

    def prompt(size: int) -> list[int]:
        found: list[int] = rng.integers(32, 127, size).tolist()
        return found

    outputs: list[list[float]] = []

    async def stream() -> None:
        while True:  # an output may end at any token
            times: list[float] = []
            outputs.append(times)
            await send(prompt(STREAM_TOKENS), OUTPUT_TOKENS, times)

    streams = [asyncio.ensure_future(stream()) for _ in range(STREAMS)]
    try:
        await send(prompt(TOKENS), 2, [])  # warms up, while the streams begin
        until = time.perf_counter() + WAIT_S
        while sum(len(times) > 1 for times in outputs) < STREAMS:
            assert time.perf_counter() < until, "a stream does not begin"
            await asyncio.sleep(0.01)
        began, count = time.perf_counter(), 0
        while count < PROMPTS_MIN or time.perf_counter() - began < seconds:
            await send(prompt(TOKENS), 2, [])
            count += 1
        ended = time.perf_counter()
    finally:
        for one in streams:
            one.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return [
        later - earlier
        for times in outputs
        for earlier, later in pairwise(times)
        if began <= later and earlier <= ended
    ]
