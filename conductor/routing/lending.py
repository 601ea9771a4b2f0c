"""Which mixed engines compute prompts only, or decode only, for a while. Pure.

A mixed engine is *lent*: to prompts, so that it computes prompts that others decode, or to tokens,
so that it decodes what others compute. Where it is lent to nobody it is at home, and does both.
Splitwise (ISCA 2024) has such pools; here it is decided by what each split is thought to serve.

::

    at home ◄──────────────────────────────► lent to prompts, or to tokens
       little comes; or a partner is missing      more comes than is served at home, and
                                                  the split serves clearly more

No engine changes twice within :data:`HOLD_S`, but to go home because no partner is left.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from typing import Final, NamedTuple

from conductor.routing.capacity import EngineKind, Needs, Targets, capacity
from conductor.routing.engines import Role
from conductor.routing.recent import LoadSample

HOLD_S: Final = 15.0
"""An engine keeps what it does for so long."""
LOOK_S: Final = 2.0
"""Between two looks."""
SAMPLES_MIN: Final = 4
"""With fewer prompts, nobody is lent."""
SAMPLES_KEPT: Final = 128
"""Prompts and arrivals of which the load is taken."""
SPARE: Final = 2.0
"""All stay as they are while so many times the present load is thought to be served."""
AMPLE: Final = 3.0
"""All go home if so many times the present load is thought to be served there."""
WORTH: Final = 1.1
"""What another split must serve, as a multiple of the present one."""
RATE_S_MIN: Final = 1.0
"""A rate is never taken over less."""
_POOLED_MAX: Final = 12
"""Sizes of a pool that are looked at; of more engines not every size is."""


class Split(NamedTuple):
    """Names of the engines that are lent."""

    prompts: frozenset[str] = frozenset()
    tokens: frozenset[str] = frozenset()

    def role(self, engine_id: str) -> Role:
        """What a mixed engine does."""
        if engine_id in self.prompts:
            return Role.PREFILL
        return Role.DECODE if engine_id in self.tokens else Role.MIXED


HOME: Final = Split()


class Prospect(NamedTuple):
    """Requests a second that are thought to be served in time.

    Attributes:
        rate: that come now.
        home: if all are at home.
        present: with the present split.
        best: finds the best split, and what it serves.
    """

    rate: float
    home: float
    present: float
    best: Callable[[], tuple[Split, float]]


@dataclass(slots=True)
class Lending:
    """The mixed engines of one model.

    Attributes:
        split: the present one.
        changes: how often it has changed.
        held_until: no other split is taken before that.
    """

    split: Split = HOME
    changes: int = 0
    held_until: float = -inf

    def keep(self, alive: Collection[str], others: Collection[Role]) -> bool:
        """Send those home that cannot be lent any more; returns whether there are any.

        Args:
            alive: mixed engines that can be used.
            others: roles of the other engines that can.
        """
        prompts, tokens = self.split.prompts & set(alive), self.split.tokens & set(alive)
        computed, decoded = prompts or Role.PREFILL in others, tokens or Role.DECODE in others
        kept = Split(frozenset(prompts if decoded else ()), frozenset(tokens if computed else ()))
        return self._become(kept)

    def consider(self, prospect: Prospect, now: float) -> bool:
        """Take another split if that is worth it; returns whether it was taken."""
        if now < self.held_until:
            return False
        rate, lent = prospect.rate, self.split != HOME
        if prospect.home >= (AMPLE if lent else SPARE) * rate:
            wanted = HOME
        elif lent and prospect.present >= SPARE * rate:
            return False
        else:
            wanted, served = prospect.best()
            if served <= WORTH * prospect.present:
                return False
        changed = self._become(wanted)
        if changed:
            self.held_until = now + HOLD_S
        return changed

    def _become(self, split: Split) -> bool:
        if split == self.split:
            return False
        self.split = split
        self.changes += 1
        return True


# What a split would serve


class MixedEngine(NamedTuple):
    """An engine that could be lent.

    Attributes:
        id: its name.
        kind: what it is, its role mixed.
    """

    id: str
    kind: EngineKind


Fleet = tuple[Sequence[MixedEngine], Sequence[EngineKind]]
"""Engines of a model: mixed ones, and all others."""


def prospect_of(
    engines: Sequence[MixedEngine],
    others: Sequence[EngineKind],
    load: tuple[float, Sequence[LoadSample]],
    targets: Targets,
    present: Split,
) -> Prospect:
    """What the splits of some engines are thought to serve.

    Engines whose hardware is better at prompts than at tokens are the first to be lent to prompts,
    the others to tokens; of equal ones, those that are lent so now.

    Args:
        engines: those that can be lent.
        others: the other engines of their model.
        load: requests a second that come, and what the newest needed, at least one.
        targets: objectives of the requests.
        present: the present split.
    """
    needs = Needs(load[1])
    ranked = sorted(engines, key=lambda one: _rank(one, needs, targets, present))
    rates = _Rates(ranked, others, needs, targets)
    fleet = [replace(one.kind, role=present.role(one.id)) for one in ranked]
    now = capacity(_counted([*fleet, *others]), needs, targets).both
    return Prospect(load[0], rates.of(0, 0), now, rates.best)


def _rank(
    one: MixedEngine, needs: Needs, targets: Targets, present: Split
) -> tuple[float, int, str]:
    """The less, the sooner it is lent to prompts."""
    prompt_s = float(needs.prompts_s(one.kind.line).mean())
    decoded = capacity([replace(one.kind, role=Role.DECODE)], needs, targets).decode
    order = (Role.PREFILL, Role.MIXED, Role.DECODE).index(present.role(one.id))
    return round(prompt_s * decoded, 6), order, one.id


def _sizes(most: int) -> list[int]:
    """Sizes of a pool of at most so many: evenly spread if there are too many."""
    steps = min(most, _POOLED_MAX)
    return sorted({round(one * most / steps) for one in range(steps + 1)}) if steps else [0]


class _Rates:
    """Requests a second by how many of the first are lent to prompts, and of the last to tokens."""

    def __init__(
        self,
        ranked: Sequence[MixedEngine],
        others: Sequence[EngineKind],
        needs: Needs,
        targets: Targets,
    ) -> None:
        self._ranked = ranked
        self._others = others
        self._needs = needs
        self._targets = targets
        self._pools: dict[tuple[Role, int], float] = {}
        alone: dict[tuple[str, int], float] = {}
        for one in ranked:
            key = _hardware(one)
            if key not in alone:
                alone[key] = capacity([one.kind], needs, targets).both
        #: of the first so many at home
        self._home = [0.0, *accumulate(alone[_hardware(one)] for one in ranked)]
        fixed = capacity([one for one in others if one.role is Role.MIXED], needs, targets)
        self._fixed = fixed.both

    def of(self, prompts: int, tokens: int) -> float:
        """If so many are lent."""
        at_home = self._home[len(self._ranked) - tokens] - self._home[prompts] + self._fixed
        pairs = min(self._pool(Role.PREFILL, prompts), self._pool(Role.DECODE, tokens))
        return pairs + at_home

    def best(self) -> tuple[Split, float]:
        """The split that serves most; of equal ones that with the fewest engines lent."""
        names, sizes = [one.id for one in self._ranked], _sizes(len(self._ranked))
        served, prompts, tokens = self.of(0, 0), 0, 0
        for first in sizes:
            for last in (one for one in sizes if first + one <= len(names)):
                if self.of(first, last) > served:
                    served, prompts, tokens = self.of(first, last), first, last
        lent = names[len(names) - tokens :] if tokens else []
        return Split(frozenset(names[:prompts]), frozenset(lent)), served

    def _pool(self, role: Role, size: int) -> float:
        known = self._pools.get((role, size))
        if known is None:
            count = len(self._ranked)
            lent = self._ranked[:size] if role is Role.PREFILL else self._ranked[count - size :]
            fleet = [replace(one.kind, role=role) for one in lent]
            fleet += [one for one in self._others if one.role is role]
            rates = capacity(_counted(fleet), self._needs, self._targets)
            known = rates.prefill if role is Role.PREFILL else rates.decode
            self._pools[role, size] = known
        return known


def _hardware(one: MixedEngine) -> tuple[str, int]:
    return one.kind.hardware, one.kind.places


def _counted(fleet: Sequence[EngineKind]) -> list[EngineKind]:
    """Equal engines as one kind."""
    found: dict[tuple[Role, str, int], EngineKind] = {}
    for one in fleet:
        key = one.role, one.hardware, one.places
        known = found.get(key)
        found[key] = one if known is None else replace(known, count=known.count + one.count)
    return list(found.values())


# The load, and when to look


@dataclass(slots=True)
class _Model:
    """What came for one model."""

    lending: Lending = field(default_factory=Lending)
    arrived: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    samples: deque[LoadSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))

    def rate(self, now: float) -> float:
        """Requests a second."""
        if len(self.arrived) < 2:
            return 0.0
        return (len(self.arrived) - 1) / max(RATE_S_MIN, now - self.arrived[0])


class Pools:
    """The mixed engines of all models.

    Attributes:
        lent: roles of those that are lent; another object whenever they change.
    """

    def __init__(self, targets: Targets) -> None:
        """Nobody is lent; ``targets`` are the objectives of the requests."""
        self.lent: Mapping[str, Role] = {}
        self._targets = targets
        self._models: dict[str, _Model] = {}
        self._look_at = -inf

    def came(self, model: str, now: float) -> None:
        """A request has come for the engines of a model."""
        self._models.setdefault(model, _Model()).arrived.append(now)

    def assigned(self, model: str, tokens: tuple[int, int, int]) -> None:
        """A request has got an engine; ``tokens`` as in :class:`LoadSample`."""
        self._models.setdefault(model, _Model()).samples.append(LoadSample(*tokens))

    def look(self, fleet: Callable[[str], Fleet], now: float) -> None:
        """Lend, and take back, if it is time.

        Args:
            fleet: the engines of a model that can be used.
            now: time.
        """
        if now < self._look_at:
            return
        if any(len(model.samples) >= SAMPLES_MIN for model in self._models.values()):
            self._look_at = now + LOOK_S
        changed = False
        for name, model in [*self._models.items()]:
            engines, others = fleet(name)
            if not engines and not others:
                changed |= model.lending.split != HOME
                del self._models[name]
                continue
            roles = {one.role for one in others}
            changed |= model.lending.keep([one.id for one in engines], roles)
            waits = now < model.lending.held_until or len(model.samples) < SAMPLES_MIN
            if engines and not waits:
                load = model.rate(now), model.samples
                split = model.lending.split
                prospect = prospect_of(engines, others, load, self._targets, split)
                changed |= model.lending.consider(prospect, now)
        if changed:
            self.lent = {
                engine: model.lending.split.role(engine)
                for model in self._models.values()
                for engine in model.lending.split.prompts | model.lending.split.tokens
            }

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Who is lent, and how often that has changed, as metrics."""
        return {
            "engine_lent": {(one, str(role)): 1.0 for one, role in self.lent.items()},
            "lendings": {(name,): float(one.lending.changes) for name, one in self._models.items()},
        }
