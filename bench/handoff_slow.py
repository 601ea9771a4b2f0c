"""The first token of new prompts over a link that needs 0.6 of the time of computing them.

``end`` pushes when the whole prompt is computed, ``chunks`` after each 512 tokens, ``layers`` after
each layer of each chunk. The rate is set anew in each turn, from the ``mono`` just before.
"""

import asyncio
import secrets
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, NamedTuple

import aiohttp
import msgspec
import numpy as np

from bench.cluster import Cluster, Options
from bench.completion import complete
from bench.handoff_pools import PROMPT_BYTES, TOKENS
from bench.handoff_ttft import PushedPair, pushed, registry_of
from bench.measure import Result
from bench.slow_link import SlowLink
from kvstore.handoff.greeting import read_secret
from kvstore.handoff.registry import HandoffRegistry, RegistryClient
from kvstore.handoff.rooms import RoomNumbers

SHARE: Final = 0.6
TURNS_MIN: Final = 5
OF_END_MOST: Final = 0.15
OF_CHUNKS_MOST: Final = 0.5
AFTER: Final = {
    "slow/push/end": "prompt", "slow/push/chunks": "chunk", "slow/push/layers": "layer",
}  # fmt: skip
_SHARE_MIN: Final = 0.01
_LEASE_S: Final = 3_600.0


class _Way(NamedTuple):
    """A prefill engine behind a link."""

    at: PushedPair
    link: SlowLink


def results(_: str, seconds: float) -> Iterator[Result]:
    """Measure all ways in turns, and what they add to ``mono``."""
    options = Options(
        handoff="push", kv_hashes=False, prefills=len(AFTER), push_after=tuple(AFTER.values())
    )
    with ExitStack() as undo:
        cluster = undo.enter_context(Cluster(options))
        ways = dict(zip(AFTER, _ways(cluster, undo), strict=True))
        found = asyncio.run(_turns(cluster, ways, seconds))
    mono = 1e3 * statistics.median(found["slow/mono"])
    added = {}
    for name, times in found.items():
        shown = ", ".join(f"{1e3 * it:.0f}" for it in sorted(times))
        sys.stderr.write(f"{name}: {shown} ms\n")
        value = 1e3 * statistics.median(times)
        differences = [way - one for way, one in zip(times, found["slow/mono"], strict=True)]
        added[name] = 1e3 * statistics.median(differences)
        yield Result(name, value, "ms", "one engine", mono, mono / value)
    layers = added["slow/push/layers"]
    for name, most in (("slow/push/end", OF_END_MOST), ("slow/push/chunks", OF_CHUNKS_MOST)):
        share = layers / added[name]
        case = f"slow/added/layers of {name.rpartition('/')[2]}"
        ratio = most / max(share, _SHARE_MIN)  # noise may make it negative
        yield Result(case, share, "share", "at most, as required", most, ratio)


def _ways(cluster: Cluster, undo: ExitStack) -> Iterator[_Way]:
    """Each prefill engine behind a link of its own, with a registry that names the link."""
    secret = read_secret(cluster.secret())
    for number in range(len(AFTER)):
        prefill = cluster.engine_urls[f"P{number + 1}"]
        (record,) = RegistryClient(registry_of(prefill), secret).ranks()
        link = undo.enter_context(SlowLink(record.address))
        registry = HandoffRegistry("127.0.0.1", 0, secret)
        undo.callback(registry.close)
        behind = msgspec.structs.replace(record, address=link.address, lease_s=_LEASE_S)
        RegistryClient(registry.url, secret).register(behind)
        yield _Way(PushedPair(prefill, cluster.engine_urls["D1"], registry.url), link)


async def _turns(cluster: Cluster, ways: dict[str, _Way], seconds: float) -> dict[str, list[float]]:
    """TTFT of each turn, for each way; which one is first changes."""
    found: dict[str, list[float]] = {name: [] for name in ("slow/mono", *ways)}
    rooms, rng = RoomNumbers(secrets.randbits(31)), np.random.default_rng()
    async with aiohttp.ClientSession() as session:
        began, turn = time.monotonic(), -1  # the first turn warms everything up
        while turn < TURNS_MIN or time.monotonic() - began < seconds:
            prompt = rng.integers(32, 127, TOKENS).tolist()
            answer = await complete(
                session, cluster.mono_url, prompt, max_tokens=2, temperature=0.0
            )
            spent = {"slow/mono": answer.ttft_s}
            for way in ways.values():
                way.link.limit(PROMPT_BYTES / (SHARE * answer.ttft_s))
            for at in range(len(ways)):
                name = list(ways)[(at + turn) % len(ways)]
                prompt = rng.integers(32, 127, TOKENS).tolist()
                room = rooms.draw()
                answer = await pushed(
                    session, ways[name].at, prompt, room, max_tokens=2, temperature=0.0
                )
                spent[name] = answer.ttft_s
            if turn >= 0:
                for name, one in spent.items():
                    found[name].append(one)
            turn += 1
    return found
