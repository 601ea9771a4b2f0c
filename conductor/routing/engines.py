"""The registered engines and their health. Pure: the caller passes the time.

::

               a failure                dead_after failures in a row
    ALIVE ───────────────► SUSPECT ──────────────────────────────────► DEAD
      ▲                       │                                          │
      └───────────────────────┴──── a success, or registering again ◄────┘

A failure is a request that failed at the engine, or a missed health probe; a refusal (busy, bad
request) is not a failure. A suspect engine is used only if no engine is alive, and is probed at
once. A dead engine is never used, and is probed at growing intervals, up to a limit.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from conductor.routing.joining import Gap, RankEvents

_SUSPECT_PROBE_FACTOR: Final = 0.25
"""Factor for the probe interval of a suspect engine, compared with a healthy one."""


class Role(enum.StrEnum):
    """The role of an engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Health(enum.StrEnum):
    """The health of an engine."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that an engine serves.

    Attributes:
        path: where the engine has loaded it from; None = unknown.
        weights: fingerprint of the files there, as the engine's adapter makes it
            (:func:`kvstore.engine.requests.weights_fingerprint`); None = unknown. The keys of its
            pages are known only with both.
    """

    path: str | None = None
    weights: str | None = None


class PushOffer(msgspec.Struct, frozen=True):
    """An engine can push KV, or receive pushes.

    Attributes:
        registry: ``http://host:port``, or https, where decode engines find the ranks of a prefill
            engine; None = it does not push.
    """

    registry: Annotated[str, msgspec.Meta(max_length=512)] | None = None


class HandoffOffer(msgspec.Struct, frozen=True):
    """How an engine can hand KV over, in addition to its protocol.

    Attributes:
        push: straight into the pool of a decode engine; None = it cannot.
    """

    push: PushOffer | None = None


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of an engine; they change when it registers again, or its node tells others.

    Attributes:
        id: name in decisions, metrics and events.
        role: its role.
        url: ``http://host:port``, no trailing slash.
        model: model it serves.
        adapters: the LoRA adapters of the model that it serves, by name; a request for one names it
            as its model.
        page_tokens: tokens per page of its space, at least 1.
        domain: domain of its pages in the index: the hex digest of its space, or ``model:<model>``
            for an engine without a space.
        spaces: hex digests of the spaces that it has opened at its node; empty = unknown.
        shards: hex digests of the shards that it needs of each page on a node; empty = unknown.
        windows: for shards of which a hit needs only the last pages, their number.
        block_tokens: tokens of one of its own blocks; None = unknown.
        events: endpoint of its KV events, or None.
        events_bind: endpoint to which it connects, so that its follower listens there, or None.
        events_replay: endpoint for missed batches, or None.
        ranks: the events of each data-parallel rank, as reported by its node; those of the first
            are ``events``, unless the registration says otherwise.
        node: id of the kvstore node it uses, or None.
        peers: ids of the other followed nodes of that node's cluster, sorted.
        max_running: maximum requests in flight, at least 1.
        max_model_len: maximum tokens of a prompt and its answer; 0 = unknown.
        protocol: name of the protocol by which it hands KV over
            (:data:`conductor.protocols.PROTOCOLS`).
        shape: name of the shape of its model (:data:`conductor.costs.shapes.SHAPES`), and
        hardware: its accelerators, as ``8xh800``: of these its costs are estimated until they are
            measured; empty = unknown.
        handoff: what it offers in addition; None = nothing.
    """

    id: str
    role: Role
    url: str
    model: str
    page_tokens: int
    domain: str
    adapters: dict[str, LoraAdapter] = {}
    spaces: tuple[str, ...] = ()
    shards: tuple[str, ...] = ()
    windows: dict[str, int] = {}
    block_tokens: int | None = None
    events: str | None = None
    events_bind: str | None = None
    events_replay: str | None = None
    ranks: tuple[RankEvents, ...] = ()
    node: str | None = None
    peers: tuple[str, ...] = ()
    max_running: int = 8
    max_model_len: int = 0
    protocol: str = "reference"
    shape: str = ""
    hardware: str = ""
    handoff: HandoffOffer | None = None

    @property
    def preferred_protocol(self) -> str:
        """Name of the protocol that it offers over its own; empty = none."""
        return "push" if self.handoff is not None and self.handoff.push is not None else ""


@dataclass(slots=True)
class EngineHealth:
    """The health of one engine.

    Attributes:
        state: see the module.
        failures: failures in a row; 0 if and only if the engine is alive.
        probe_at: time of the next probe, on the caller's clock.
    """

    probe_s: float
    dead_after: int
    backoff_s_max: float
    probe_at: float
    state: Health = Health.ALIVE
    failures: int = 0

    def succeeded(self, now: float) -> None:
        """A request or probe succeeded, or the engine registered again."""
        self.failures = 0
        self.state = Health.ALIVE
        self.probe_at = now + self.probe_s

    def failed(self, now: float) -> None:
        """A request or probe failed."""
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
        """Postpone the next probe, so that two probes do not overlap."""
        self.probe_at = now + self.backoff_s_max

    def check(self) -> None:
        """Assert the invariants."""
        assert (self.failures == 0) == (self.state is Health.ALIVE)
        assert (self.failures >= self.dead_after) == (self.state is Health.DEAD)


@dataclass(slots=True)
class Engine:
    """One registered engine, and why its KV does not count, entirely or in part."""

    info: EngineInfo
    health: EngineHealth
    gaps: tuple[Gap, ...] = ()


_MODELS_KEPT: Final = 1_024
"""Models and LoRA adapters whose engines are kept; a client may ask for any name."""


@dataclass(slots=True)
class EngineRegistry:
    """The registered engines.

    Attributes:
        probe_s: seconds between two probes of a healthy engine.
        dead_after: failures in a row after which an engine is dead.
        backoff_s_max: maximum pause between probes.
        engines_max: maximum number of engines.
        changes: counts what changes engines, but for their health.
    """

    probe_s: float = 1.0
    dead_after: int = 3
    backoff_s_max: float = 10.0
    engines_max: int = 1024
    changes: int = 0
    _engines: dict[str, Engine] = field(default_factory=dict)
    _of_models: dict[str, list[Engine]] = field(default_factory=dict)
    _of_models_at: int = -1  # of `changes`

    def register(self, info: EngineInfo, now: float) -> EngineInfo | None:
        """Add an engine, or replace and revive the one with this id.

        Returns:
            The previous properties; None if it is new.
        """
        self.changes += 1
        known = self._engines.get(info.id)
        if known is not None:
            before = known.info
            known.info = info
            known.health.succeeded(now)
            return before
        health = EngineHealth(self.probe_s, self.dead_after, self.backoff_s_max, now + self.probe_s)
        self._engines[info.id] = Engine(info, health)
        return None

    def update(self, info: EngineInfo) -> None:
        """More is known of a registered engine; its health stays."""
        self.changes += 1
        self._engines[info.id].info = info

    @property
    def full(self) -> bool:
        """Whether no further engine can be added."""
        return len(self._engines) >= self.engines_max

    def remove(self, engine_id: str) -> EngineInfo | None:
        """Remove an engine; returns None if it is unknown."""
        self.changes += 1
        engine = self._engines.pop(engine_id, None)
        return engine.info if engine else None

    def get(self, engine_id: str) -> Engine | None:
        """The engine with this id."""
        return self._engines.get(engine_id)

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines.values())

    def __len__(self) -> int:
        return len(self._engines)

    def of_model(self, model: str) -> list[Engine]:
        """All engines that serve ``model``, whatever their health.

        Args:
            model: a model; or the name of a LoRA adapter, if no model has this name.

        Returns:
            Not to be changed; the same object until an engine is registered, updated or removed.
        """
        if self._of_models_at != self.changes or len(self._of_models) >= _MODELS_KEPT:
            self._of_models.clear()
            self._of_models_at = self.changes
        known = self._of_models.get(model)
        if known is None:
            of_base = [engine for engine in self if engine.info.model == model]
            known = of_base or [engine for engine in self if model in engine.info.adapters]
            self._of_models[model] = known
        return known

    def models(self) -> list[str]:
        """All served models without LoRA adapters, sorted."""
        return sorted({engine.info.model for engine in self})

    def adapters(self) -> dict[str, str]:
        """A model of each LoRA adapter, by its name, sorted; not those named as a model is."""
        every = {name: engine.info.model for engine in self for name in engine.info.adapters}
        known = set(self.models())
        return {name: every[name] for name in sorted(every) if name not in known}

    def can_serve(self) -> bool:
        """Whether some model has live engines: a mixed one, or a prefill and a decode one."""
        for model in self.models():
            roles = {e.info.role for e in self.of_model(model) if e.health.state is not Health.DEAD}
            if Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles:
                return True
        return False

    def due(self, now: float) -> list[Engine]:
        """Engines to probe now."""
        return [engine for engine in self if engine.health.probe_at <= now]

    def next_probe_at(self) -> float | None:
        """Time of the next probe; None without engines."""
        return min((engine.health.probe_at for engine in self), default=None)
