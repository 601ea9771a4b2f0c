"""When a new request would get its first token, if it were admitted. Pure.

Engines that compute prompts are one server whose speed is the sum of theirs; those that decode are
one pool of places and of room for KV. That is coarser than the choice of engines, but it asks for
nothing that is not decided yet.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from conductor.costs.prior import CostPrior
from conductor.routing.binding import prompt_of
from conductor.routing.columns import Column, View, Waiting
from conductor.routing.demand import HORIZON_S, NOBODY, STEP_S, Crowd, DecodeDemand
from conductor.routing.engines import Health, Role
from conductor.routing.groups import PairRows, pair_rows, serving
from conductor.routing.load import EngineLoads
from conductor.routing.policy import Policy, never_fetches
from conductor.routing.pricing import Prices


@dataclass(slots=True)
class Ahead:
    """The requests that are considered before a request.

    Attributes:
        seconds: of their prompts, for those that wait for no particular engine.
        bound_s: of the others, by engine.
        who: their number and tokens, when they decode.
    """

    seconds: float = 0.0
    bound_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    who: Crowd = NOBODY

    def add(self, seconds: float, tokens: float, bound: str) -> None:
        """One more; ``bound`` is the engine for which it waits, empty = none."""
        if bound:
            self.bound_s[bound] += seconds
        else:
            self.seconds += seconds
        self.who = self.who.plus(Crowd(1, tokens))


class DecodePool:
    """The engines that decode for one model.

    Attributes:
        model: its name.
    """

    def __init__(self, model: str, view: View, rows: Sequence[int], loads: EngineLoads) -> None:
        self.model = model
        self._loads = loads
        self._ids = [view.ids[row] for row in rows]
        places = view.max_running[np.array(rows, dtype=np.intp)]
        self._places = float(places.sum())
        self._shares = (places / self._places).tolist()
        self._steps: _Steps | None = None
        self._room = sum(loads.kv_tokens_max(one) for one in self._ids)

    def filled(self, crowd: Crowd) -> float:
        """The part of its places, or of its room if that is more, that a crowd takes."""
        return max(crowd.size / self._places, crowd.tokens / self._room)

    def load(self, crowd: Crowd, tbt_s: float) -> float:
        """How full they are with a crowd: 1 = its places, its room or the TBT are used up."""
        return max(self.filled(crowd), self.step_s(crowd) / tbt_s)

    def step_s(self, crowd: Crowd) -> float:
        """Seconds of a step at that engine that is the fastest with its share of a crowd."""
        return min(
            self._loads.step_seconds(one, max(1.0, crowd.size * share), crowd.tokens * share)
            for one, share in zip(self._ids, self._shares, strict=True)
        )

    def loads(self, sizes: Column, tokens: Column, tbt_s: float) -> Column:
        """:meth:`load` with several crowds."""
        if self._steps is None:
            self._steps = _Steps(self._loads, self._ids, self._shares)
        filled = np.maximum(sizes / self._places, tokens / self._room)
        full: Column = np.maximum(filled, self._steps.seconds(sizes, tokens) / tbt_s)
        return full


class _Steps:
    """Steps of the engines of a pool; those of which the same is known are one."""

    def __init__(
        self, loads: EngineLoads, engine_ids: Sequence[str], shares: Sequence[float]
    ) -> None:
        priors: list[CostPrior | None] = []
        rows: dict[tuple[object, ...], list[float]] = {}
        for engine_id, share in zip(engine_ids, shares, strict=True):
            costs, ranks = loads.step_costs(engine_id)
            line, factors = (0.0, 0.0, 0.0), [0.0, 0.0, 0.0]
            if costs is not None:
                line, factors = costs.prior.step_line, costs.step_factors.tolist()
            machine = costs.machine if costs is not None else None
            key = (machine, ranks, share, *factors)
            if key not in rows:
                rows[key] = [share, ranks, *line, *factors]
                priors.append(costs.prior if costs is not None else None)
        self._columns = np.array(list(rows.values())).T[:, :, None]
        read_s = [one.read_seconds(1) if one is not None else 0.0 for one in priors]
        self._read_s = np.array(read_s)[:, None]
        #: rows and priors of models with experts
        self._chosen = [
            (row, one) for row, one in enumerate(priors) if one is not None and one.shape.experts
        ]

    def seconds(self, sizes: Column, tokens: Column) -> Column:
        """Of the fastest with its share of each crowd: as ``EngineLoads.step_seconds``."""
        share, ranks, constant_s, token_s, context_s, first, second, third = self._columns
        batch = np.ceil(np.maximum(1.0, sizes * share) / ranks)
        read_s = self._read_s
        if self._chosen:  # whose batch says how many weights are read
            read_s = np.repeat(read_s, len(sizes), axis=1)
            for row, prior in self._chosen:
                several, which = np.unique(batch[row], return_inverse=True)
                each = [prior.read_seconds(int(one)) for one in several.tolist()]
                read_s[row] = np.array(each)[which]
        weights_s = np.maximum(token_s * batch, read_s)
        context = tokens * share / ranks
        terms = first * constant_s + second * weights_s + third * (context_s * context)
        seconds: Column = terms.min(axis=0)
        return seconds


class Seen(NamedTuple):
    """The prediction for one request.

    Attributes:
        pool: engines that will decode it.
        queue_s: seconds until the requests before it are computed.
        need_s: seconds of its prompt at the engine that needs the fewest.
        computed_s: seconds until its KV is where it decodes.
    """

    pool: DecodePool
    queue_s: float
    need_s: float
    computed_s: float


class _Engines(NamedTuple):
    """Rows that serve a model.

    Attributes:
        rows: rows of engines that compute prompts, and of engines that decode after them (none =
            the same).
        speeds: speeds of the engines that compute prompts, 1 = the fastest; float64.
        pool: who decodes.
    """

    rows: PairRows
    speeds: Column
    pool: DecodePool


class Outlook:
    """The outlook at one time.

    Args:
        view: the engines, with their costs.
        loads: the work that they have.
        policy: the policy that chooses engines.
    """

    def __init__(self, view: View, loads: EngineLoads, policy: Policy) -> None:
        assert view.costs is not None
        self._view = view
        self._costs = view.costs
        self._loads = loads
        self._prices = Prices(view.costs, policy.fetches or never_fetches)
        self._engines: dict[str, _Engines | None] = {}

    def of(self, waiting: Waiting, row: int, ahead: Ahead) -> Seen | None:
        """Predict one request; None = no engine can serve it."""
        model = waiting.models[row]
        if model not in self._engines:
            self._engines[model] = self._serving(model)
        engines = self._engines[model]
        if engines is None:
            return None
        terms = self._prices.pairs(prompt_of(self._view, waiting, row), engines.rows).terms
        own_s = terms.fetch_s + terms.prefill_s
        backlog_s = self._costs.backlog_s[engines.rows.rows]
        speed = float(engines.speeds.sum())
        common_s = 0.0
        if ahead.seconds:
            common_s = (float((backlog_s * engines.speeds).sum()) + ahead.seconds) / speed
        bound_s = [ahead.bound_s.get(self._view.ids[one], 0.0) for one in engines.rows.firsts]
        queue_s = np.maximum(backlog_s + np.array(bound_s), common_s)
        computed_s = queue_s + own_s + terms.handoff_s
        best = int(computed_s.argmin())
        return Seen(engines.pool, float(queue_s[best]), float(own_s.min()), float(computed_s[best]))

    def _serving(self, model: str) -> _Engines | None:
        view = self._view
        rows = [one for one in serving(view, model).rows if view.health[one] is not Health.DEAD]
        by_role = {role: [one for one in rows if view.roles[one] is role] for role in Role}
        prefill, mixed = by_role[Role.PREFILL], by_role[Role.MIXED]
        decode = by_role[Role.DECODE] or mixed
        pairs = pair_rows([(mixed, []), (prefill if decode else [], decode)])
        if not pairs.firsts:
            return None
        token_s = self._costs.inputs.token_s[pairs.rows]
        decoders = [*by_role[Role.DECODE], *mixed]
        pool = DecodePool(view.models[rows[0]], view, decoders, self._loads)
        return _Engines(pairs, token_s.min() / token_s, pool)


class Entry(NamedTuple):
    """When a request could start to decode.

    Attributes:
        load: of the pool when its prompt is computed, including itself; more than 1 = it is full.
        waits_s: from then on until there is room; :data:`~conductor.routing.demand.HORIZON_S` = not
            within the horizon.
        step_s: duration of a step then.
    """

    load: float
    waits_s: float
    step_s: float


def enter(
    demand: DecodeDemand, seen: Seen, who: tuple[Crowd, Crowd], tbt_s: float, now: float
) -> Entry:
    """Predict the wait for a place to decode.

    Args:
        demand: the requests that are assigned or decode.
        seen: the request.
        who: the requests that wait before it, which arrive as evenly as they are computed; and
            itself.
        tbt_s: maximum seconds of a step.
        now: time.
    """
    ahead, mine = who
    at = now + min(seen.computed_s, HORIZON_S)
    stay_s = max(demand.typical_s, 1e-3)
    # Of those who come evenly until then, who came longer ago than a stay has left.
    there = min(1.0, stay_s / max(at - now, stay_s))
    first: tuple[float, Crowd] | None = None
    for when, crowd in demand.ahead(now, now + HORIZON_S):
        if when + STEP_S > at:
            left = there * max(0.0, 1.0 - (when - at) / stay_s)
            first = (when, crowd.plus(ahead, left).plus(mine))
            break
    assert first is not None, "the last time is not before"
    when, then = first
    load = seen.pool.load(then, tbt_s)
    if load <= 1.0:
        return Entry(load, max(0.0, when - at), seen.pool.step_s(then))
    times, sizes, tokens = demand.forecast(now, now + HORIZON_S)
    later = int(np.searchsorted(times, when, "right"))
    times, sizes, tokens = times[later:], sizes[later:], tokens[later:]
    part = there * np.maximum(0.0, 1.0 - (times - at) / stay_s)
    sizes, tokens = (
        sizes + part * ahead.size + mine.size,
        tokens + part * ahead.tokens + mine.tokens,
    )  # fmt: skip
    fits = np.flatnonzero(seen.pool.loads(sizes, tokens, tbt_s) <= 1.0)
    if not len(fits):
        return Entry(load, HORIZON_S, seen.pool.step_s(then))
    row = int(fits[0])
    wait_s = max(0.0, float(times[row]) - at)
    return Entry(load, wait_s, seen.pool.step_s(Crowd(float(sizes[row]), float(tokens[row]))))
