"""Do prefill engines wait for their next prompt although requests wait for an engine?

All requests come at once. From when the first one waits for an engine until the last one has got
its, no prefill engine has a reason to be idle; the engines tell for how long they were.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import aiohttp

from bench.cluster import Cluster, ClusterError
from bench.completion import complete

_LOOK_S: Final = 0.1
_WAITING: Final = "kvstore_conductor_queue_length"
_IDLE: Final = "reference_engine_idle_seconds_total"


class Prompted(NamedTuple):
    """A request: its prompt, and how many tokens its answer has."""

    prompt: list[int]
    output: int


class Look(NamedTuple):
    """What was told at a moment.

    Attributes:
        at: in seconds of the monotonic clock.
        waiting: requests that waited for an engine.
        idle_s: seconds for which each prefill engine had nothing to compute so far.
    """

    at: float
    waiting: int
    idle_s: Mapping[str, float]


def idle_share(looks: Sequence[Look]) -> float:
    """Share of the time in which requests waited that the idlest engine had nothing to compute.

    Raises:
        ClusterError: requests did not wait for long enough to tell.
    """
    saturated = [one for one in looks if one.waiting]
    if len(saturated) < 2:
        raise ClusterError("no requests waited for an engine: ask for more --saturated")
    first, last = saturated[0], saturated[-1]
    return max(
        (last.idle_s[name] - first.idle_s[name]) / (last.at - first.at) for name in first.idle_s
    )


def prefill_idle(cluster: Cluster, requests: Sequence[Prompted]) -> float:
    """Send requests at once; the share of :func:`idle_share`.

    Raises:
        ClusterError: a request failed, or too few came.
    """
    return asyncio.run(_measured(cluster, requests))


async def _measured(cluster: Cluster, requests: Sequence[Prompted]) -> float:
    engines = {name: url for name, url in cluster.engine_urls.items() if name.startswith("P")}
    looks = list[Look]()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def look() -> None:
            while True:
                waiting = await _metric(session, cluster.conductor_url, _WAITING)
                idle_s = {name: await _metric(session, url, _IDLE) for name, url in engines.items()}
                looks.append(Look(time.monotonic(), int(waiting), idle_s))
                await asyncio.sleep(_LOOK_S)

        async with asyncio.TaskGroup() as tasks:
            looking = tasks.create_task(look())
            await asyncio.gather(*(
                complete(session, cluster.conductor_url, one.prompt, max_tokens=one.output,
                         temperature=0.0)
                for one in requests
            ))  # fmt: skip
            looking.cancel()
    return idle_share(looks)


async def _metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """One value of a process."""
    async with session.get(f"{url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
    raise ClusterError(f"{url} has no metric {name}")
