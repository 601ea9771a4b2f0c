"""Reads from engines' ``/metrics`` how many requests they have, so that those of others count.

An engine without these metrics (or without ``/metrics``) counts as before: only our own requests
are known. So does one whose answer is late or too long.
"""

import asyncio
import math
import re
from collections.abc import Callable
from typing import Final

from conductor.front.guarding import Guard
from conductor.front.upstream import EngineError, Upstream
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Health

_RUNNING: Final = (b"vllm:num_requests_running", b"sglang:num_running_reqs",
                   b"reference_engine_running")  # fmt: skip
_WAITING: Final = (b"vllm:num_requests_waiting", b"sglang:num_queue_reqs",
                   b"reference_engine_waiting")  # fmt: skip
_PERIOD_S: Final = 1.0
"""Seconds between two readings of an engine."""
_READINGS_MAX: Final = 20
"""Readings a second, of all engines together: vLLM's metrics are 100 KB and more."""
_AGAIN_S: Final = 60.0
"""Seconds until an engine without such metrics is asked again."""
_FAILED_S: Final = 5.0
"""Seconds until one is asked again that did not answer in time, or with too much."""


def _sum_of(names: tuple[bytes, ...]) -> re.Pattern[bytes]:
    every = b"|".join(map(re.escape, names))
    return re.compile(rb"^(?:%s)(?:\{[^\n]*\})? ([0-9.e+]{1,32})\r?$" % every, re.MULTILINE)


_SUMS: Final = (_sum_of(_RUNNING), _sum_of(_WAITING))


def requests_in(text: bytes) -> tuple[float, float] | None:
    """How many requests an engine runs, and how many wait there; None if it does not tell.

    Args:
        text: metrics of the engine; the numbers of several data-parallel ranks are added.
    """
    found = [pattern.findall(text) for pattern in _SUMS]
    if not all(found):
        return None
    try:
        running, waiting = (sum(map(float, values)) for values in found)
    except ValueError:
        return None
    return (running, waiting) if math.isfinite(running + waiting) else None


class OthersReader:
    """Reads them every second.

    Args:
        registry: the engines.
        upstream: client for engines.
        dispatcher: gets the numbers, and knows which requests are ours.
        changed: called after each change that may affect waiting requests.
        timeout_s: deadline of one reading.
        clock: seconds, monotonic.
        guard: keeps a failure of one engine from the others.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        upstream: Upstream,
        dispatcher: Dispatcher,
        changed: Callable[[], None],
        timeout_s: float,
        clock: Callable[[], float],
        guard: Guard,
    ) -> None:
        self._registry = registry
        self._upstream = upstream
        self._dispatcher = dispatcher
        self._changed = changed
        self._timeout_s = timeout_s
        self._clock = clock
        self._guard = guard
        self._not_before: dict[str, tuple[str, float]] = {}  # engine → its URL, time

    async def run(self) -> None:
        """Read from all engines until cancelled."""
        while True:
            started = self._clock()
            before = self._dispatcher.loads.others.changes
            infos = [engine.info for engine in self._registry if self._due(engine.info)]
            await asyncio.gather(*map(self._guarded, infos))
            known = {engine.info.id for engine in self._registry}
            self._not_before = {k: v for k, v in self._not_before.items() if k in known}
            if self._dispatcher.loads.others.changes != before:
                self._changed()
            period_s = max(_PERIOD_S, len(infos) / _READINGS_MAX)
            await asyncio.sleep(max(0.0, started + period_s - self._clock()))

    def _due(self, info: EngineInfo) -> bool:
        engine = self._registry.get(info.id)
        if engine is None or engine.health.state is Health.DEAD:
            self._tell(info.id, None, 0)
            return False
        url, at = self._not_before.get(info.id, ("", 0.0))
        return url != info.url or self._clock() >= at

    async def _guarded(self, info: EngineInfo) -> None:
        with self._guard.turn("metrics"):
            await self._read(info)

    async def _read(self, info: EngineInfo) -> None:
        ours = self._dispatcher.in_flight(info.id)
        try:
            text = await self._upstream.get(info.id, f"{info.url}/metrics", self._timeout_s)
        except EngineError as error:
            self._tell(info.id, None, 0)
            again_s = _AGAIN_S if error.status else _FAILED_S  # with a status: it has no such route
            self._not_before[info.id] = (info.url, self._clock() + again_s)
            return
        counts = requests_in(text)
        if counts is None:
            self._not_before[info.id] = (info.url, self._clock() + _AGAIN_S)
        # One that ended meanwhile may be among those that are told, or not.
        self._tell(info.id, counts, max(ours, self._dispatcher.in_flight(info.id)))

    def _tell(self, engine_id: str, counts: tuple[float, float] | None, ours: int) -> None:
        if self._registry.get(engine_id) is not None or counts is None:
            running, waiting = counts or (None, None)
            self._dispatcher.loads.tell_others(engine_id, running, waiting, ours)

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Requests of others for the metrics: (engine, running or waiting) → number."""
        others = self._dispatcher.loads.others
        reported = {engine.info.id: others.reported(engine.info.id) for engine in self._registry}
        return {
            "engine_others": {
                (name, what): getattr(one, what)
                for name, one in reported.items()
                if one is not None
                for what in one._fields
            }
        }
