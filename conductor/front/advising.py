"""Advice of a running Conductor: computed in a thread, now and then, and when somebody asks."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

from conductor.advice.advise import Advice, advise
from conductor.routing.admission import ServiceClass
from conductor.routing.capacity import EngineKind, Targets
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import Engine, EngineRegistry
from conductor.routing.fleet import kinds_of
from conductor.routing.recent import LoadShape

REFRESHED_S: Final = 15.0
"""Seconds between two looks for the metrics."""
KEPT_S: Final = 1.0
"""Those who ask within this time get the same: for many kinds of engines a look takes seconds."""
MODELS_MAX: Final = 16
"""Models that are looked at, in the order of their names."""

_BUGS: Final = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
_log = logging.getLogger(__name__)

_Seen = dict[str, tuple[list[EngineKind], LoadShape]]


class Adviser:
    """The newest advice for each model.

    Args:
        registry: the engines.
        dispatcher: knows their costs and the recent load.
        service: class whose objectives count.
        clock: seconds, as the dispatcher's.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        dispatcher: Dispatcher,
        service: ServiceClass,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._targets = Targets(service.ttft_s, service.tbt_s)
        self._clock = clock
        self._looking: asyncio.Task[dict[str, Advice]] | None = None
        self._newest: dict[str, Advice] = {}
        self._looked_at = 0.0
        self._faults = 0

    async def run(self) -> None:
        """Look every :data:`REFRESHED_S`, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(REFRESHED_S)

    async def look(self) -> dict[str, Advice]:
        """Advice on the present load by model, at most :data:`KEPT_S` old."""
        looking = self._looking
        if looking is None or (looking.done() and self._clock() >= self._looked_at + KEPT_S):
            looking = self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(looking)

    async def _look(self) -> dict[str, Advice]:
        models = self._registry.models()[:MODELS_MAX]
        seen = {model: self._seen(model) for model in models}
        try:
            self._newest = await asyncio.to_thread(_advise_all, seen, self._targets)
        except _BUGS:  # or no thread is available; nothing else may end for it
            self._faults += 1
            _log.exception("cannot compute advice; the last one stays")
        self._looked_at = self._clock()
        return self._newest

    def _seen(self, model: str) -> tuple[list[EngineKind], LoadShape]:
        """The engines and the load of a model, as values."""
        engines = [one for one in self._registry if one.info.model == model]
        load = self._dispatcher.admission.recent.shape(_names(model, engines), self._clock())
        return kinds_of(engines, self._dispatcher.loads), load

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The newest advice, as metrics."""
        found = self._newest.items()
        return {
            "advice_faults": {(): float(self._faults)},
            "advice_rate": {
                (model, what): getattr(one, what)
                for model, one in found
                for what in ("rate", "served", "prefill", "decode")
            },
            "advice_short": {
                (model, str(short.role), short.hardware): float(short.engines)
                for model, one in found
                for short in one.short
            },
            "advice_gain": {
                (model, change.change, str(change.role), change.hardware, change.was): change.gain
                for model, one in found
                for change in one.changes
            },
        }


def _names(model: str, engines: Collection[Engine]) -> set[str]:
    return {model, *(name for one in engines for name in one.info.adapters)}


def _advise_all(seen: _Seen, targets: Targets) -> dict[str, Advice]:
    return {model: advise(kinds, load, targets) for model, (kinds, load) in seen.items()}
