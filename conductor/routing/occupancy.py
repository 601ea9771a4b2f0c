"""Which places at engines are taken or promised, and all engines as columns. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np

from conductor.routing.columns import View
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.load import EngineLoads
from conductor.routing.others import EngineOthers
from kvstore.index.layout import Numbers

AT_HOME: Final[Mapping[str, Role]] = {}
"""No mixed engine is lent."""
_PACE_WEIGHT: Final = 0.1
"""Of the newest interval in the moving average."""


class _Fixed(NamedTuple):
    """Data of registrations: constant until an engine registers, registers again, or is removed.

    It is also replaced if the lent engines change.
    """

    changes: int
    lent: Mapping[str, Role]
    infos: list[EngineInfo]
    ids: list[str]
    models: list[str]
    adapters: list[Collection[str]]
    protocols: list[str]
    preferred: list[str]
    roles: list[Role]
    max_running: Numbers
    kept: dict[str, Any]
    kept_groups: dict[Any, Any]
    rows: dict[str, int]


class Occupancy:
    """The places that requests have at engines.

    Attributes:
        in_flight: requests that have a place, by engine.
        detached: number of these places that belong to no request, by engine.
        promised: requests that will get a place when their KV arrives, by engine.
        pace_s: recent mean seconds from one free place to the next, while requests wait.
    """

    def __init__(self, others: EngineOthers) -> None:
        self._others = others
        self._others_seen: tuple[int, _Fixed, Numbers] | None = None
        self.in_flight: Counter[str] = Counter()
        self.detached: Counter[str] = Counter()
        self.promised: Counter[str] = Counter()
        self.pace_s = 1.0
        self._freed_at: float | None = None  # the last place, if it was waited for
        self._last_assigned: dict[str, int] = {}
        self._assigned = 0
        self._changes = 0
        self._stale: set[str] = set()  # engines whose counts have changed since the last view
        self._counts: Numbers = np.zeros((3, 0), dtype=np.int64)
        self._fixed: _Fixed | None = None
        self._view: tuple[tuple[float, ...], View] | None = None

    def take(self, engine_id: str) -> None:
        """A request gets a place."""
        self.in_flight[engine_id] += 1
        self._changed(engine_id)

    def free(self, engine_id: str, now: float, *, waited_for: bool = False) -> None:
        """A place is free again; ``waited_for``: whether requests wait for places."""
        self._less(self.in_flight, engine_id)
        if self._freed_at is not None and waited_for:
            self.pace_s += _PACE_WEIGHT * (now - self._freed_at - self.pace_s)
        self._freed_at = now if waited_for else None

    def promise(self, engine_id: str) -> None:
        """A request will need a place."""
        self.promised[engine_id] += 1
        self._changed(engine_id)

    def unpromise(self, engine_id: str) -> None:
        """It has got one, here or elsewhere, or needs none any more."""
        self._less(self.promised, engine_id)

    def detach(self, engine_id: str) -> None:
        """A place no longer belongs to a request."""
        self.detached[engine_id] += 1
        self._changed(engine_id)

    def undetach(self, engine_id: str) -> None:
        """Such a place is about to be free."""
        self._less(self.detached, engine_id)

    def chosen(self, engine_ids: Iterable[str]) -> None:
        """A request was assigned to these engines."""
        self._assigned += 1
        self._changes += 1
        for engine_id in engine_ids:
            self._last_assigned[engine_id] = self._assigned
            self._changed(engine_id)

    def forget(self, engine_id: str) -> None:
        """An engine was removed; its places stay taken."""
        self._last_assigned.pop(engine_id, None)
        self._changed(engine_id)

    def view(
        self, registry: EngineRegistry, loads: EngineLoads | None, retry_after_s: int, now: float,
        lent: Mapping[str, Role] = AT_HOME,
    ) -> View:  # fmt: skip
        """All engines in columns; the same object until something changes.

        Args:
            registry: the engines; always the same.
            loads: their costs; None = the policy uses none.
            retry_after_s: for rejected clients.
            now: time.
            lent: what mixed engines do instead; another object whenever that changes.
        """
        fixed = self._registered(registry, lent)
        health = [engine.health.state for engine in registry]
        state: tuple[float, ...] = (
            self._changes,
            loads.changes if loads is not None else 0,
            retry_after_s,
            now,
            self._others.changes,
        )
        if self._view is None or self._view[0] != state or self._view[1].health != health:
            in_flight, promised, last_assigned = self._columns(fixed.rows)
            view = View(
                ids=fixed.ids,
                models=fixed.models,
                adapters=fixed.adapters,
                protocols=fixed.protocols,
                preferred=fixed.preferred,
                roles=fixed.roles,
                health=health,
                in_flight=in_flight,
                promised=promised,
                max_running=fixed.max_running,
                others=self._others_of(fixed),
                kept=fixed.kept,
                kept_groups=fixed.kept_groups,
                rows=fixed.rows,
                last_assigned=last_assigned,
                assigned=self._assigned,
                retry_after_s=retry_after_s,
                costs=loads.columns(fixed.infos, now, fixed.roles) if loads is not None else None,
                lent=lent,
            )
            self._view = (state, view)
        return self._view[1]

    def check(self, held: Counter[str], promised: Counter[str]) -> None:
        """Assert that the places are those of the requests.

        Args:
            held: places that belong to requests, by engine.
            promised: places that requests will need, by engine.
        """
        assert held + self.detached == self.in_flight
        assert promised == self.promised

    def _registered(self, registry: EngineRegistry, lent: Mapping[str, Role]) -> _Fixed:
        known = self._fixed
        if known is None or known.changes != registry.changes or known.lent is not lent:
            infos = [engine.info for engine in registry]
            known = self._fixed = _Fixed(
                registry.changes,
                lent,
                infos,
                ids=[info.id for info in infos],
                models=[info.model for info in infos],
                adapters=[info.adapters for info in infos],
                protocols=[info.protocol for info in infos],
                preferred=[info.preferred_protocol for info in infos],
                roles=[_role(info, lent) for info in infos],
                max_running=np.array([info.max_running for info in infos], dtype=np.int64),
                kept={},
                kept_groups={},
                rows={info.id: row for row, info in enumerate(infos)},
            )
            self._counts = np.zeros((3, len(infos)), dtype=np.int64)
            self._stale = set(known.rows)
            self._view = None
        return known

    def _others_of(self, fixed: _Fixed) -> Numbers:
        seen = self._others_seen
        if seen is None or seen[0] != self._others.changes or seen[1] is not fixed:
            counts = [ceil(sum(self._others.of(one))) for one in fixed.ids]
            seen = (self._others.changes, fixed, np.array(counts, dtype=np.int64))
            self._others_seen = seen
        return seen[2]

    def _less(self, counts: Counter[str], engine_id: str) -> None:
        """Count one less; a count of zero is dropped."""
        counts[engine_id] -= 1
        assert counts[engine_id] >= 0, engine_id
        if not counts[engine_id]:
            del counts[engine_id]
        self._changed(engine_id)

    def _changed(self, engine_id: str) -> None:
        self._changes += 1
        self._stale.add(engine_id)

    def _columns(self, rows: Mapping[str, int]) -> Numbers:
        """Requests that have a place, those that will, and the last assignment, of each engine."""
        for engine_id in self._stale:
            row = rows.get(engine_id)
            if row is not None:
                self._counts[:, row] = (
                    self.in_flight.get(engine_id, 0),
                    self.promised.get(engine_id, 0),
                    self._last_assigned.get(engine_id, 0),
                )
        self._stale.clear()
        return self._counts.copy()


def _role(info: EngineInfo, lent: Mapping[str, Role]) -> Role:
    """The present role of an engine."""
    return lent.get(info.id, info.role) if info.role is Role.MIXED else info.role
