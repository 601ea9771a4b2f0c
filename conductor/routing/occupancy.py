"""Which places at engines are taken or promised, and all engines as columns. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from conductor.routing.columns import View
from conductor.routing.engines import Engine, EngineInfo
from conductor.routing.load import EngineLoads
from kvstore.index.layout import Numbers


class _Fixed(NamedTuple):
    """What registrations say: the same until an engine registers, again or anew, or is removed."""

    infos: list[EngineInfo]
    identities: list[int]
    ids: list[str]
    offers: list[str]
    max_running: Numbers


class Occupancy:
    """The places that requests have at engines.

    Attributes:
        in_flight: requests that have a place, by engine.
        detached: of these, places that belong to no request.
        promised: requests that will get a place when their KV arrives, by engine.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.in_flight: Counter[str] = Counter()
        self.detached: Counter[str] = Counter()
        self.promised: Counter[str] = Counter()
        self._last_assigned: dict[str, int] = {}
        self._assigned = 0
        self._changes = 0
        self._fixed: _Fixed | None = None
        self._view: tuple[tuple[float, ...], View] | None = None

    def take(self, engine_id: str) -> None:
        """A request gets a place."""
        self.in_flight[engine_id] += 1
        self._changes += 1

    def free(self, engine_id: str) -> None:
        """A place is free again."""
        self._less(self.in_flight, engine_id)

    def promise(self, engine_id: str) -> None:
        """A request will need a place."""
        self.promised[engine_id] += 1
        self._changes += 1

    def unpromise(self, engine_id: str) -> None:
        """It has got one, here or elsewhere, or needs none any more."""
        self._less(self.promised, engine_id)

    def detach(self, engine_id: str) -> None:
        """A place no longer belongs to a request."""
        self.detached[engine_id] += 1
        self._changes += 1

    def undetach(self, engine_id: str) -> None:
        """Such a place is about to be free."""
        self._less(self.detached, engine_id)

    def chosen(self, engine_ids: Iterable[str]) -> None:
        """A request was assigned to these engines."""
        self._assigned += 1
        self._changes += 1
        for engine_id in engine_ids:
            self._last_assigned[engine_id] = self._assigned

    def forget(self, engine_id: str) -> None:
        """An engine was removed; its places stay taken."""
        self._last_assigned.pop(engine_id, None)
        self._changes += 1

    def view(
        self, engines: Sequence[Engine], loads: EngineLoads | None, retry_after_s: int, now: float
    ) -> View:
        """All engines in columns; the same object until something changes.

        Args:
            engines: all that are registered.
            loads: their costs; None = the policy uses none.
            retry_after_s: for rejected clients.
            now: time.
        """
        fixed = self._registered(engines)
        health = [engine.health.state for engine in engines]
        state: tuple[float, ...] = (
            self._changes,
            loads.changes if loads is not None else 0,
            retry_after_s,
            now,
        )
        if self._view is None or self._view[0] != state or self._view[1].health != health:
            view = View(
                ids=fixed.ids,
                models=[info.model for info in fixed.infos],
                adapters=[info.adapters for info in fixed.infos],
                protocols=[info.protocol for info in fixed.infos],
                offers=fixed.offers,
                roles=[info.role for info in fixed.infos],
                health=health,
                in_flight=_numbers(self.in_flight, fixed.ids),
                promised=_numbers(self.promised, fixed.ids),
                max_running=fixed.max_running,
                last_assigned=_numbers(self._last_assigned, fixed.ids),
                assigned=self._assigned,
                retry_after_s=retry_after_s,
                costs=loads.columns(fixed.infos, now) if loads is not None else None,
            )
            self._view = (state, view)
        return self._view[1]

    def check(self, held: Counter[str], promised: Counter[str]) -> None:
        """Assert that the places are those of the requests.

        Args:
            held: places that belong to requests, by engine.
            promised: those that requests will need.
        """
        assert held + self.detached == self.in_flight
        assert promised == self.promised

    def _registered(self, engines: Sequence[Engine]) -> _Fixed:
        known = self._fixed
        if known is None or [id(one.info) for one in engines] != known.identities:
            infos = [engine.info for engine in engines]
            known = self._fixed = _Fixed(
                infos,
                [id(info) for info in infos],
                [info.id for info in infos],
                [info.offers for info in infos],
                np.array([info.max_running for info in infos], dtype=np.int64),
            )
            self._view = None
        return known

    def _less(self, counts: Counter[str], engine_id: str) -> None:
        """Count one less; a count of zero is dropped."""
        counts[engine_id] -= 1
        assert counts[engine_id] >= 0, engine_id
        if not counts[engine_id]:
            del counts[engine_id]
        self._changes += 1


def _numbers(counts: Mapping[str, int], ids: Sequence[str]) -> Numbers:
    return np.array([counts.get(one, 0) for one in ids], dtype=np.int64)
