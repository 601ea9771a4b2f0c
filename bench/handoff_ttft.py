"""The first token of new prompts: by one engine, through the store, and pushed while computed.

This command is the router: it asks prefill and decode itself, so no Conductor is in the figures.
"""

import asyncio
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import aiohttp
import numpy as np

from bench.cluster import Cluster, ClusterError, Options, request
from bench.completion import Completion, complete
from bench.measure import Result
from kvstore.handoff.rooms import RoomNumbers

PROMPT_TOKENS: Final = 2_000
TURNS_MIN: Final = 5
WAYS: Final = ("ttft/mono", "ttft/store", "ttft/push/layers")


def results(_: str, seconds: float) -> Iterator[Result]:
    """Measure all ways in turns; the bound is one engine that computes the prompt."""
    with Cluster(Options(handoff="push", kv_hashes=False)) as cluster:
        found = asyncio.run(_turns(cluster, seconds))
    for way, times in found.items():
        shown = ", ".join(f"{1e3 * it:.0f}" for it in sorted(times))
        sys.stderr.write(f"{way}: {shown} ms\n")
    mono = 1e3 * statistics.median(found["ttft/mono"])
    for way, times in found.items():
        value = 1e3 * statistics.median(times)
        yield Result(way, value, "ms", "one engine", mono, mono / value)


def registry_of(prefill: str) -> str:
    """The URL of the registry of a prefill engine."""
    found: str = request("GET", f"{prefill}/v1/engine")["handoff"]["push"]["registry"]
    return found


async def _turns(cluster: Cluster, seconds: float) -> dict[str, list[float]]:
    """TTFT of each turn, for each way; which one is first changes."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    rooms, rng = RoomNumbers(secrets.randbits(31)), np.random.default_rng()
    registry = registry_of(cluster.engine_urls["P1"])
    async with aiohttp.ClientSession() as session:
        began, turn = time.monotonic(), -1  # the first turn warms everything up
        while turn < TURNS_MIN or time.monotonic() - began < seconds:
            for at in range(len(WAYS)):
                way = WAYS[(at + turn) % len(WAYS)]
                prompt = rng.integers(32, 127, PROMPT_TOKENS).tolist()
                room = rooms.draw()
                spent = await _ask(session, cluster, way, prompt, room, registry)
                if turn >= 0:
                    found[way].append(spent)
            turn += 1
    return found


async def _ask(
    session: aiohttp.ClientSession, cluster: Cluster, way: str, prompt: list[int], room: int,
    registry: str,
) -> float:  # fmt: skip
    """The time to the first token of one prompt."""
    decode, start = cluster.engine_urls["D1"], time.perf_counter()
    if way == "ttft/mono":
        url = cluster.mono_url
        return (await complete(session, url, prompt, max_tokens=2, temperature=0.0)).ttft_s
    if way == "ttft/store":
        parameters = await _prefill(
            session, cluster.engine_urls["P1"], prompt, {"do_remote_decode": True}
        )
        began = time.perf_counter() - start
        answer = await complete(
            session, decode, prompt, max_tokens=2, temperature=0.0, kv_transfer_params=parameters
        )
        return began + answer.ttft_s
    at = PushedPair(cluster.engine_urls["P1"], decode, registry)
    return (await pushed(session, at, prompt, room, max_tokens=2, temperature=0.0)).ttft_s


class PushedPair(NamedTuple):
    """URLs of a prefill and a decode engine, and of the registry that decode asks."""

    prefill: str
    decode: str
    registry: str


async def pushed(
    session: aiohttp.ClientSession, at: PushedPair, prompt: list[int], room: int, **parameters: Any
) -> Completion:
    """One completion of a decode engine while its K/V are pushed; as :func:`complete`.

    Raises:
        ClusterError: the push failed, or one of both requests.
    """
    common = {"handoff": "push", "room": room}
    there = common | {"do_remote_prefill": True, "registry": at.registry}
    async with asyncio.TaskGroup() as tasks:
        here = common | {"do_remote_decode": True}
        prefilled = tasks.create_task(_prefill(session, at.prefill, prompt, here))
        decoded = tasks.create_task(
            complete(session, at.decode, prompt, kv_transfer_params=there, **parameters)
        )
    report = prefilled.result()["handoff"]
    if report["state"] != "success":
        raise ClusterError(f"a push failed: {report}")
    return decoded.result()


async def _prefill(
    session: aiohttp.ClientSession, prefill: str, prompt: list[int], parameters: dict[str, Any]
) -> dict[str, Any]:
    """The transfer parameters of the prefill engine's answer."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "kv_transfer_params": parameters}
    url = f"{prefill}/v1/completions"
    async with session.post(url, json=body) as answer:
        if answer.status != 200:
            raise ClusterError(f"{url}: {answer.status} {(await answer.text())[:500]}")
        returned: dict[str, Any] = (await answer.json())["kv_transfer_params"]
        return returned
