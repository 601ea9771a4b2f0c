"""Which mixed engines compute prompts only, or decode only, for a while. Pure.

A mixed engine is *lent*: to prompts, so that it computes prompts that others decode, or to tokens,
so that it decodes prompts that others compute. An engine that is not lent is at home, and does
both. Splitwise (ISCA 2024) has such pools; here the decision depends on the predicted capacity of
each split.

::

    at home ◄──────────────────────────────► lent to prompts, or to tokens
       little comes; or a partner is missing      more comes than is served at home, and
                                                  the split serves clearly more

No engine changes twice within :data:`HOLD_S`, except to return home because no partner is left.
"""

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from types import MappingProxyType
from typing import Final, NamedTuple

from conductor.routing.attainment import Attainment
from conductor.routing.capacity import EngineKind, FleetRates, Needs, Targets, capacity
from conductor.routing.engines import Role
from conductor.routing.recent import LoadSample

HOLD_S: Final = 15.0
"""Minimum time between two changes of an engine."""
LOOK_S: Final = 2.0
"""Between two looks."""
LOOK_AT_HOME_S: Final = 0.5
"""Likewise, while all engines of a model are at home: until they are lent, each prompt that begins
there holds answers up."""
SAMPLES_MIN: Final = 4
"""With fewer prompts, no engine is lent."""
SAMPLES_KEPT: Final = 128
"""Newest requests of which the load is taken."""
SPARE: Final = 2.0
"""Nothing changes while the predicted capacity is this multiple of the present load."""
AMPLE: Final = 3.0
"""All engines return home if the predicted capacity there is this multiple of the present load."""
WORTH: Final = 1.1
"""Minimum capacity of another split, as a multiple of the present one's."""
RATE_S_MIN: Final = 1.0
"""A rate is never taken over less."""
CAPACITIES_A_STEP = 4
"""Capacities that one step of a look computes: each takes up to half a millisecond."""
_POOLED_MAX: Final = 12
"""Sizes of a pool that are looked at; of more engines not every size is."""


class Split(NamedTuple):
    """Names of the engines that are lent."""

    prompts: frozenset[str] = frozenset()
    tokens: frozenset[str] = frozenset()

    def role(self, engine_id: str) -> Role:
        """The present role of a mixed engine."""
        if engine_id in self.prompts:
            return Role.PREFILL
        return Role.DECODE if engine_id in self.tokens else Role.MIXED


HOME: Final = Split()


class Prospect(NamedTuple):
    """Predicted rates of requests served in time, per second.

    Attributes:
        rate: present rate of arrivals.
        home: if all are at home.
        present: with the present split.
        best: finds the best split, and its rate.
        in_time: measured part of the requests that is served in time; None = unknown.
        answers: requests that decode at each engine, by its name.
    """

    rate: float
    home: float
    present: float
    best: Callable[[], tuple[Split, float]]
    in_time: float | None = None
    answers: Mapping[str, int] = MappingProxyType({})

    @property
    def served(self) -> float:
        """Requests a second that are served in time now: as measured, else as predicted."""
        return self.present if self.in_time is None else self.in_time * self.rate


@dataclass(slots=True)
class Lending:
    """The mixed engines of one model.

    Attributes:
        split: the present one.
        changes: how often it has changed.
        changed_at: when it has changed last; no other one is taken for :data:`HOLD_S`.
        better_since: since when another one would have served more at each look; None = it would
            not have at the last one.
    """

    split: Split = HOME
    changes: int = 0
    changed_at: float = -inf
    better_since: float | None = None

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
        if self.is_held(now):
            return False
        wanted = HOME
        if not self._is_ample_at_home(prospect):
            found = self._better(prospect, now)
            if found is None:
                return False
            wanted = found
        changed = self._become(wanted)
        if changed:
            self.changed_at, self.better_since = now, None
        return changed

    def _better(self, prospect: Prospect, now: float) -> Split | None:
        """The split that is worth a change; None = there is none."""
        since, self.better_since = self.better_since, None
        if not self.wants_best(prospect):
            return None
        wanted, best = prospect.best()
        if self.split == HOME:
            return wanted if best > WORTH * prospect.present else None
        served = prospect.served
        if best <= max(prospect.present, WORTH * served):
            return None
        # Answers of engines that decode no more are late, so the change must gain more requests
        # than that. It lasts as long as it must, and as long as there was a reason for it.
        self.better_since = now if since is None else since
        lost = sum(prospect.answers.get(one, 0) for one in self.split.tokens - wanted.tokens)
        gained = (min(best, prospect.rate) - served) * (HOLD_S + now - self.better_since)
        return wanted if gained > lost else None

    def is_held(self, now: float) -> bool:
        """Whether no other split is taken yet."""
        return now < self.changed_at + HOLD_S

    def wants_best(self, prospect: Prospect) -> bool:
        """Whether :meth:`consider` would ask for the best split."""
        if self._is_ample_at_home(prospect):
            return False
        return self.split == HOME or WORTH * prospect.served < prospect.rate

    def _is_ample_at_home(self, prospect: Prospect) -> bool:
        return prospect.home >= (SPARE if self.split == HOME else AMPLE) * prospect.rate

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
        prompts_s: seconds of the prompts that it has.
        answers: requests that decode there.
    """

    id: str
    kind: EngineKind
    prompts_s: float = 0.0
    answers: int = 0


Fleet = tuple[Sequence[MixedEngine], Sequence[EngineKind]]
"""Engines of a model: mixed ones, and all others."""


class Load(NamedTuple):
    """A snapshot of the requests that arrive for one model.

    Attributes:
        rate: requests a second.
        samples: needs of the newest, at least one.
        in_time: measured part of the requests that is served in time; None = unknown.
    """

    rate: float
    samples: Sequence[LoadSample]
    in_time: float | None = None


def foresee(
    fleet: Fleet,
    load: Load,
    targets: Targets,
    present: Split,
    wants_best: Callable[[Prospect], bool],
) -> Generator[None, None, Prospect]:
    """What the splits of some engines are thought to serve; yields after each part of the work.

    Engines whose hardware is better at prompts than at tokens are the first to be lent to prompts,
    the others to tokens; of equal ones, those that are lent so now, then those that have most
    prompts: answers that come to an engine would wait for the prompts that it still computes.

    Args:
        fleet: engines that can be lent, and the other engines of their model.
        load: what comes.
        targets: objectives of the requests.
        present: the present split.
        wants_best: whether the best split will be asked for.
    """
    engines, others = fleet
    needs = Needs(load.samples)
    worth: dict[tuple[str, int], float] = {}
    for one in engines:
        if _hardware(one) not in worth:
            worth[_hardware(one)] = _worth(one, needs, targets)
            yield
    order = (Role.PREFILL, Role.MIXED, Role.DECODE)
    ranked = sorted(
        engines,
        key=lambda one: (
            worth[_hardware(one)],
            order.index(present.role(one.id)),
            -one.prompts_s,
            one.id,
        ),
    )
    rates = _Rates(ranked, others, needs, targets)
    yield from rates.see_home()
    served = yield from rates.see_present(present)
    answers = {one.id: one.answers for one in engines}
    prospect = Prospect(load.rate, rates.of(0, 0), served, rates.best, load.in_time, answers)
    if wants_best(prospect):
        yield from rates.see_pools()
    return prospect


def _worth(one: MixedEngine, needs: Needs, targets: Targets) -> float:
    """The less, the sooner engines like this one are lent to prompts."""
    prompt_s = float(needs.prompts_s(one.kind.line).mean())
    decoded = capacity([replace(one.kind, role=Role.DECODE)], needs, targets).decode
    return round(prompt_s * decoded, 6)


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
        self._alone: dict[tuple[str, int], float] = {}
        #: of the first so many at home
        self._home = [0.0]
        self._fixed = 0.0

    def see_home(self) -> Iterator[None]:
        """Find out what each engine serves at home; this comes first, a part at a time."""
        for one in self._ranked:
            if _hardware(one) not in self._alone:
                self._alone[_hardware(one)] = self._capacity([one.kind]).both
                yield
        self._home = [0.0, *accumulate(self._alone[_hardware(one)] for one in self._ranked)]
        self._fixed = self._capacity([one for one in self._others if one.role is Role.MIXED]).both
        yield
        for role in (Role.PREFILL, Role.DECODE):
            self._pool(role, 0)
            yield

    def see_present(self, split: Split) -> Generator[None, None, float]:
        """Find out what a split serves, whoever is lent, a part at a time."""
        prompts = [one for one in self._ranked if split.role(one.id) is Role.PREFILL]
        tokens = [one for one in self._ranked if split.role(one.id) is Role.DECODE]
        prefill = self._rate(Role.PREFILL, prompts)
        yield
        decode = self._rate(Role.DECODE, tokens)
        yield
        at_home = [one for one in self._ranked if split.role(one.id) is Role.MIXED]
        alone = sum(self._alone[_hardware(one)] for one in at_home)
        return min(prefill, decode) + alone + self._fixed

    def see_pools(self) -> Iterator[None]:
        """Find out what :meth:`best` needs, a part at a time."""
        for size in _sizes(len(self._ranked)):
            for role in (Role.PREFILL, Role.DECODE):
                self._pool(role, size)
                yield

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
            known = self._pools[role, size] = self._rate(role, lent)
        return known

    def _rate(self, role: Role, lent: Sequence[MixedEngine]) -> float:
        """Of those that are lent so, with the engines of that role."""
        fleet = [replace(one.kind, role=role) for one in lent]
        rates = self._capacity([*fleet, *(one for one in self._others if one.role is role)])
        return rates.prefill if role is Role.PREFILL else rates.decode

    def _capacity(self, fleet: Sequence[EngineKind]) -> FleetRates:
        return capacity(_counted(fleet), self._needs, self._targets)


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
    samples: dict[int, LoadSample] = field(default_factory=dict)

    def is_known(self) -> bool:
        """Whether enough has come to lend engines."""
        return len(self.samples) >= SAMPLES_MIN

    def rate(self, now: float) -> float:
        """Requests a second."""
        if len(self.arrived) < 2:
            return 0.0
        return (len(self.arrived) - 1) / max(RATE_S_MIN, now - self.arrived[0])


class Pools:
    """The mixed engines of all models.

    Args:
        attained: which requests are in time.

    Attributes:
        lent: roles of the lent engines; another object whenever they change.
    """

    def __init__(self, attained: Attainment) -> None:
        self.lent: Mapping[str, Role] = {}
        self._attained = attained
        self._models: dict[str, _Model] = {}
        self._look_at = -inf
        self._looking: Iterator[None] | None = None
        self._seen: object = None
        self._now = -inf

    def came(self, model: str, now: float) -> None:
        """A request has come for the engines of a model."""
        self._models.setdefault(model, _Model()).arrived.append(now)

    def needs(self, model: str, number: int, sample: LoadSample, came: float) -> None:
        """What a request needs, as far as is known: it counts as long as it waits, too.

        Args:
            model: of the engines for which it has come.
            number: its own; a later one has a higher one.
            sample: what it needs; again when more is known.
            came: when it has come.
        """
        samples = self._models.setdefault(model, _Model()).samples
        self._attained.came(model, number, came)
        samples[number] = sample
        if len(samples) > SAMPLES_KEPT:
            del samples[min(samples)]

    def look(self, fleet: Callable[[str], Fleet], seen: object, now: float) -> None:
        """Lend, and take back, if it is time.

        What a split serves takes some milliseconds to find out, so each call does a part of that;
        a look at a fleet that changes meanwhile is given up.

        Args:
            fleet: the engines of a model that can be used.
            seen: another value whenever an engine of ``fleet`` may be another one.
            now: time.
        """
        self._now = now
        if seen != self._seen:
            self._seen, self._looking = seen, None
            self._keep(fleet)
        if self._looking is None:
            known = [model for model in self._models.values() if model.is_known()]
            if now < self._look_at or not known:
                return
            at_home = any(model.lending.split == HOME for model in known)
            self._look_at = now + (LOOK_AT_HOME_S if at_home else LOOK_S)
            self._looking = self._look(fleet)
        for _ in range(CAPACITIES_A_STEP):
            if next(self._looking, self) is self:
                self._looking = None
                return

    def _keep(self, fleet: Callable[[str], Fleet]) -> None:
        """Send those home whose partners have gone, and forget models without engines."""
        changed = False
        for name, model in [*self._models.items()]:
            engines, others = fleet(name)
            if engines or others:
                roles = {one.role for one in others}
                changed |= model.lending.keep([one.id for one in engines], roles)
            else:
                changed |= model.lending.split != HOME
                del self._models[name]
                self._attained.forget(name)
        if changed:
            self._tell()

    def _look(self, fleet: Callable[[str], Fleet]) -> Iterator[None]:
        for name, model in [*self._models.items()]:
            lending = model.lending
            if lending.is_held(self._now) or not model.is_known():
                continue
            engines, others = fleet(name)
            if engines:
                load = Load(
                    model.rate(self._now), [*model.samples.values()],
                    self._attained.part(name, lending.changed_at, self._now, SAMPLES_MIN),
                )  # fmt: skip
                prospect = yield from foresee(
                    (engines, others),
                    load,
                    self._attained.targets,
                    lending.split,
                    lending.wants_best,
                )
                if lending.consider(prospect, self._now):
                    self._tell()

    def _tell(self) -> None:
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
