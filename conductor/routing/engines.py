"""The engines the Conductor knows, and how well each of them is. Pure: time is passed in.

::

               a failure                dead_after failures in a row
    ALIVE ───────────────► SUSPECT ──────────────────────────────────► DEAD
      ▲                       │                                          │
      └───────────────────────┴──── a success, or registering again ◄────┘

A failure is a request that the engine broke or a health probe that it missed; a refusal (busy, bad
request) is not. A suspect engine is used when no engine is alive, and is probed at once; a dead one
is never used and is probed ever more rarely, up to a bound.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

_SUSPECT_PROBE_FACTOR: Final = 0.25
"""A suspect engine is probed this much sooner than one that is well: its fate matters now."""


class Role(enum.StrEnum):
    """What an engine does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Health(enum.StrEnum):
    """What the Conductor believes about an engine."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is; changes only when it registers again.

    Attributes:
        id: names it in decisions, metrics and events.
        role: what it may be used for.
        url: ``http://host:port``, no trailing slash.
        model: model it serves.
        page_tokens: tokens in a page of its space, at least 1.
        domain: what its pages are indexed under: the hex digest of its space, or
            ``model:<model>`` for an engine that knows no space.
        events: endpoint of its KV events, or None.
        events_replay: endpoint where missed batches are asked for, or None.
        node: id of the kvstore node it reads from, or None.
        max_running: requests it may have in flight, at least 1.
    """

    id: str
    role: Role
    url: str
    model: str
    page_tokens: int
    domain: str
    events: str | None = None
    events_replay: str | None = None
    node: str | None = None
    max_running: int = 8


@dataclass(slots=True)
class EngineHealth:
    """The health of one engine.

    Attributes:
        state: see the module.
        failures: in a row; 0 exactly when the engine is alive.
        probe_at: when it is to be probed next, on the caller's clock.
    """

    probe_s: float
    dead_after: int
    backoff_s_max: float
    probe_at: float
    state: Health = Health.ALIVE
    failures: int = 0

    def succeeded(self, now: float) -> None:
        """A request or a probe went well, or the engine registered again."""
        self.failures = 0
        self.state = Health.ALIVE
        self.probe_at = now + self.probe_s

    def failed(self, now: float) -> None:
        """A request broke, or a probe was missed."""
        self.failures += 1
        if self.failures >= self.dead_after:
            self.state = Health.DEAD
            doublings = min(self.failures - self.dead_after, 16)
            self.probe_at = now + min(self.probe_s * 2.0**doublings, self.backoff_s_max)
        else:
            self.state = Health.SUSPECT
            self.probe_at = now + self.probe_s * _SUSPECT_PROBE_FACTOR
        self.check()

    def probe_started(self, now: float) -> None:
        """No second probe before this one has had its time."""
        self.probe_at = now + self.backoff_s_max

    def check(self) -> None:
        """Assert the invariants."""
        assert (self.failures == 0) == (self.state is Health.ALIVE)
        assert (self.failures >= self.dead_after) == (self.state is Health.DEAD)


@dataclass(slots=True)
class Engine:
    """One registered engine."""

    info: EngineInfo
    health: EngineHealth


@dataclass(slots=True)
class EngineRegistry:
    """All and only the engines that were registered and not removed since.

    Attributes:
        probe_s: between two probes of a healthy engine.
        dead_after: failures in a row that make an engine dead.
        backoff_s_max: longest pause between probes.
        engines_max: further engines are refused.
    """

    probe_s: float = 1.0
    dead_after: int = 3
    backoff_s_max: float = 10.0
    engines_max: int = 1024
    _engines: dict[str, Engine] = field(default_factory=dict)

    def register(self, info: EngineInfo, now: float) -> EngineInfo | None:
        """Add an engine, or replace and revive the one of that id.

        Returns:
            what the engine was before; None when it is new.
        """
        known = self._engines.get(info.id)
        if known is not None:
            before = known.info
            known.info = info
            known.health.succeeded(now)
            return before
        health = EngineHealth(self.probe_s, self.dead_after, self.backoff_s_max, now + self.probe_s)
        self._engines[info.id] = Engine(info, health)
        return None

    @property
    def full(self) -> bool:
        """No engine with a new id is taken."""
        return len(self._engines) >= self.engines_max

    def remove(self, engine_id: str) -> EngineInfo | None:
        """Forget an engine; None when it was not known."""
        engine = self._engines.pop(engine_id, None)
        return engine.info if engine else None

    def get(self, engine_id: str) -> Engine | None:
        """The engine of that id."""
        return self._engines.get(engine_id)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def of_model(self, model: str) -> list[Engine]:
        """Every engine that serves ``model``, however well it is."""
        return [engine for engine in self if engine.info.model == model]

    def models(self) -> list[str]:
        """Every model that some engine serves, sorted."""
        return sorted({engine.info.model for engine in self})

    def can_serve(self) -> bool:
        """Some model has a mixed engine, or a prefill and a decode engine, that is not dead."""
        for model in self.models():
            roles = {e.info.role for e in self.of_model(model) if e.health.state is not Health.DEAD}
            if Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles:
                return True
        return False

    def due(self, now: float) -> list[Engine]:
        """Engines to probe now."""
        return [engine for engine in self if engine.health.probe_at <= now]

    def next_probe_at(self) -> float | None:
        """When the next probe is due; None without engines."""
        return min((engine.health.probe_at for engine in self), default=None)
