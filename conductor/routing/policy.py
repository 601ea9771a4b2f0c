"""Chooses engines for requests: one pure function, called on arrivals, completions and events.

``schedule(view, waiting, now)`` returns exactly one :class:`Assign`, :class:`Hold` or
:class:`Reject` for each waiting request. A policy is an order of preference of engines, chosen by
name from :data:`POLICIES`; everything else is the same for all policies.

A **first** engine prefills: a prefill engine (which needs a second one to decode), or a mixed
engine, which serves alone. A **second** engine is a decode engine, or a mixed one if no decode
engine is left. If no first or no second engine exists, the request is rejected, not held. Suspect
engines are used only if no engine is alive, dead engines never.
"""

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from conductor.routing.engines import Health, Role

HERD_LOAD_GAP: Final = 0.5
"""A longer prefix is ignored if the load of its engine is this much above the lowest load.

Loads are fractions of ``max_running``. Otherwise one engine gets all requests with a popular prefix
while others are idle (reported for several cache-aware routers).
"""


_FULL: Final = "every engine that could serve it is full"


class Plan(enum.StrEnum):
    """How a request is served."""

    ALONE = "alone"
    PAIR = "pair"


class Prefix(NamedTuple):
    """How much of a prompt's KV an engine need not compute, in tokens.

    Attributes:
        local: longest prefix in the engine's own cache.
        node: longest prefix on nodes it can read from.
        usable: longest prefix of which each page is in either, or expected soon.
        rank: the engine's data-parallel rank for which this is true; None = it is for all.
        peer: how much longer than ``usable`` the prefix is that one other node of its node's
            cluster has; its node could fetch that.
    """

    local: int = 0
    node: int = 0
    usable: int = 0
    rank: int | None = None
    peer: int = 0


NO_PREFIX: Final = Prefix()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """An engine as the scheduler sees it.

    Attributes:
        id: its name.
        model: model it serves.
        adapters: names of the LoRA adapters that it serves.
        role: its role.
        health: its health.
        in_flight: requests assigned to it and not released.
        max_running: maximum of ``in_flight``.
        last_assigned: number of its last assignment; 0 = none yet.
    """

    id: str
    model: str
    role: Role
    health: Health
    in_flight: int
    max_running: int
    last_assigned: int = 0
    adapters: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A waiting request.

    Attributes:
        number: unique; increases in order of arrival.
        model: requested model, or LoRA adapter.
        deadline: time from which on it is rejected instead of held.
        excluded: engines at which it has already failed.
    """

    number: int
    model: str
    deadline: float
    excluded: frozenset[str] = frozenset()


Prefixes = Callable[[Waiting], Mapping[str, Prefix]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything that a decision depends on, besides the requests.

    Attributes:
        engines: all registered engines.
        assigned: number of assignments so far.
        prefixes: a request's prefix at each engine (by id; absent = none), according to the index.
        retry_after_s: ``Retry-After`` for a rejected client.
    """

    engines: Sequence[EngineView]
    assigned: int = 0
    prefixes: Prefixes = lambda _: {}
    retry_after_s: int = 1


class Candidate(msgspec.Struct, frozen=True):
    """One engine's numbers at the time of a decision.

    Attributes:
        engine: its id.
        role: its role.
        health: its health.
        in_flight: its requests in flight.
        max_running: their maximum.
        load: ``in_flight / max_running``.
        local_tokens: prompt tokens in its own cache.
        node_tokens: prompt tokens on nodes it reads from.
        usable_tokens: prompt tokens it need not compute.
        peer_tokens: prompt tokens beyond these that its node could fetch from one other node of the
            cluster; no policy uses them.
        verdict: the role it was chosen for, ``passed over``, or why it could not be chosen.
    """

    engine: str
    role: Role
    health: Health
    in_flight: int
    max_running: int
    load: float
    local_tokens: int
    node_tokens: int
    usable_tokens: int
    peer_tokens: int
    verdict: str


@dataclass(frozen=True, slots=True)
class Assign:
    """Send a request to these engines; ``prefill == decode`` if one serves it alone.

    ``ranks``: the data-parallel rank of each that has the longest prefix; None = all have the same.
    """

    request: int
    prefill: str
    decode: str
    plan: Plan
    reason: str
    usable_tokens: int
    candidates: tuple[Candidate, ...]
    ranks: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep a request waiting."""

    request: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a request."""

    request: int
    reason: str
    retry_after_s: int
    code: str = "no_engine"


Decision = Assign | Hold | Reject


class _Standing(NamedTuple):
    """An engine for one request, including the assignments of this call."""

    engine: EngineView
    in_flight: int
    last_assigned: int
    prefix: Prefix
    herded: bool = False

    @property
    def load(self) -> float:
        return self.in_flight / self.engine.max_running

    @property
    def tie(self) -> tuple[bool, int, str]:
        """Tie-breaker: mixed engines first (no handoff), then the oldest last assignment."""
        return (self.engine.role is not Role.MIXED, self.last_assigned, self.engine.id)


Rank = Callable[[_Standing], tuple[float | bool | int | str, ...]]


class Policy(NamedTuple):
    """An order of preference.

    Attributes:
        rank: engines with the lowest rank are preferred.
        because: the reason in decisions.
        needs_prefixes: whether ``rank`` uses prefixes, so that prompts must be tokenised.
    """

    rank: Rank
    because: str
    needs_prefixes: bool


POLICIES: Final[dict[str, Policy]] = {
    "round-robin": Policy(
        lambda s: (s.last_assigned, *s.tie), "its turn", needs_prefixes=False
    ),
    "least-loaded": Policy(lambda s: (s.load, *s.tie), "least load", needs_prefixes=False),
    "longest-prefix": Policy(
        lambda s: (s.herded, -s.prefix.usable, s.load, -s.prefix.local, *s.tie),
        "longest usable prefix, then least load",
        needs_prefixes=True,
    ),
}  # fmt: skip


class Scheduler:
    """One policy as the function ``schedule``; stateless."""

    def __init__(self, name: str) -> None:
        """Select a policy by name.

        Raises:
            KeyError: it does not exist.
        """
        self.name = name
        self.policy = POLICIES[name]

    def schedule(self, view: View, waiting: Sequence[Waiting], now: float) -> list[Decision]:
        """Decide on every waiting request, in the given order.

        Args:
            view: state of the engines; not changed.
            waiting: requests, oldest first.
            now: time on the clock of the deadlines.

        Returns:
            One decision for each request, in the same order. Together with requests in flight they
            never exceed an engine's ``max_running``.
        """
        call = _Call(self.policy, view)
        return [call.decide(request, now) for request in waiting]


class _Call:
    """One call of ``schedule``: the view, and the assignments of this call."""

    def __init__(self, policy: Policy, view: View) -> None:
        self.policy = policy
        self.view = view
        self.in_flight = {e.id: e.in_flight for e in view.engines}
        self.last_assigned = {e.id: e.last_assigned for e in view.engines}
        self.assigned = view.assigned
        # Free capacity only shrinks during a call: later requests for the same engines are held
        # too.
        self.full: set[tuple[str, frozenset[str]]] = set()
        self.of_model: dict[str, list[EngineView]] = {}
        for engine in view.engines:
            self.of_model.setdefault(engine.model, []).append(engine)

    def decide(self, request: Waiting, now: float) -> Decision:
        retry_after_s = self.view.retry_after_s
        group = (request.model, request.excluded)
        if group in self.full:
            return self._hold(request, now)
        fit = [e for e in self._serving(request.model) if e.id not in request.excluded]
        firsts, seconds = _stages(fit)
        if not firsts:
            return Reject(request.number, _nobody(fit, request), retry_after_s)
        seconds = [e for e in seconds if self._has_room(e)]
        firsts = [
            e for e in firsts if self._has_room(e) and (e.role is Role.MIXED or _other(e, seconds))
        ]
        if not firsts:
            self.full.add(group)
            return self._hold(request, now)
        prefixes = self.view.prefixes(request) if self.policy.needs_prefixes else {}
        first = self._best(firsts, prefixes)
        second = first
        if first.role is not Role.MIXED:
            second = self._best(seconds, prefixes)
        return self._assign(request, first, second, prefixes)

    def _serving(self, model: str) -> list[EngineView]:
        """The engines of a model; or of a LoRA adapter, if no model has its name."""
        found = self.of_model.get(model)
        if found is None:
            found = [engine for engine in self.view.engines if model in engine.adapters]
            self.of_model[model] = found
        return found

    def _hold(self, request: Waiting, now: float) -> Hold | Reject:
        """All engines are full: hold or reject."""
        if now < request.deadline:
            return Hold(request.number)
        reason = f"waited too long: {_FULL}"
        return Reject(request.number, reason, self.view.retry_after_s, "queue_timeout")

    def _has_room(self, engine: EngineView) -> bool:
        return self.in_flight[engine.id] < engine.max_running

    def _standing(self, engine: EngineView, prefixes: Mapping[str, Prefix]) -> _Standing:
        return _Standing(
            engine,
            self.in_flight[engine.id],
            self.last_assigned[engine.id],
            prefixes.get(engine.id, NO_PREFIX),
        )

    def _best(self, engines: Sequence[EngineView], prefixes: Mapping[str, Prefix]) -> EngineView:
        standings = [self._standing(engine, prefixes) for engine in engines]
        least = min(s.load for s in standings)
        standings = [s._replace(herded=s.load - least > HERD_LOAD_GAP) for s in standings]
        return min(standings, key=self.policy.rank).engine

    def _assign(
        self,
        request: Waiting,
        first: EngineView,
        second: EngineView,
        prefixes: Mapping[str, Prefix],
    ) -> Assign:
        candidates = tuple(
            self._candidate(engine, request, first, second, prefixes)
            for engine in self.of_model[request.model]
        )
        self.assigned += 1
        for engine_id in {first.id, second.id}:
            self.in_flight[engine_id] += 1
            self.last_assigned[engine_id] = self.assigned
        return Assign(
            request.number,
            first.id,
            second.id,
            Plan.ALONE if first is second else Plan.PAIR,
            self.policy.because,
            prefixes.get(first.id, NO_PREFIX).usable,
            candidates,
            {one.id: prefixes.get(one.id, NO_PREFIX).rank for one in (first, second)},
        )

    def _candidate(
        self,
        engine: EngineView,
        request: Waiting,
        first: EngineView,
        second: EngineView,
        prefixes: Mapping[str, Prefix],
    ) -> Candidate:
        standing = self._standing(engine, prefixes)
        prefix = standing.prefix
        if engine is first:
            verdict = "chosen to serve alone" if first is second else "chosen to prefill"
        elif engine is second:
            verdict = "chosen to decode"
        elif engine.id in request.excluded:
            verdict = "failed this request before"
        elif engine.health is not Health.ALIVE:
            verdict = str(engine.health)
        else:
            verdict = "passed over" if self._has_room(engine) else "full"
        return Candidate(
            engine.id,
            engine.role,
            engine.health,
            standing.in_flight,
            engine.max_running,
            round(standing.load, 3),
            prefix.local,
            prefix.node,
            prefix.usable,
            prefix.peer,
            verdict,
        )


def _stages(fit: Sequence[EngineView]) -> tuple[list[EngineView], list[EngineView]]:
    """Engines that may be first, and second; no first engines if the request cannot be served.

    Suspect engines are used only if the healthy ones cannot serve the request.
    """
    for bad in ({Health.SUSPECT, Health.DEAD}, {Health.DEAD}):
        by_role: dict[Role, list[EngineView]] = {role: [] for role in Role}
        for engine in fit:
            if engine.health not in bad:
                by_role[engine.role].append(engine)
        mixed = by_role[Role.MIXED]
        seconds = by_role[Role.DECODE] or mixed
        firsts = [*mixed, *(by_role[Role.PREFILL] if seconds else ())]
        if firsts:
            return firsts, seconds
    return [], []


def _other(first: EngineView, seconds: Sequence[EngineView]) -> bool:
    return any(second.id != first.id for second in seconds)


def _nobody(fit: Sequence[EngineView], request: Waiting) -> str:
    """Why no engine can serve."""
    roles = {e.role for e in fit if e.health is not Health.DEAD}
    if roles == {Role.PREFILL}:
        return "only prefill engines are left"
    if roles == {Role.DECODE}:
        return "only decode engines are left"
    failed = f"; {len(request.excluded)} failed this request" if request.excluded else ""
    return f"no engine is left for this model{failed}"
