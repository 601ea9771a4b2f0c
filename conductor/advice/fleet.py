"""The engines of a model as kinds: what advice needs of them, as values that do not change."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import inf

from conductor.advice.capacity import EngineKind
from conductor.costs.book import EngineCosts
from conductor.costs.prior import CostPrior
from conductor.routing.engines import Engine, EngineInfo, Health, Role
from conductor.routing.load import EngineLoads


def kinds_of(engines: Iterable[Engine], loads: EngineLoads) -> list[EngineKind]:
    """Engines that are not dead, by role and hardware; each kind has the costs of its first."""
    counts: Counter[tuple[Role, str]] = Counter()
    firsts: dict[tuple[Role, str], EngineInfo] = {}
    for engine in engines:
        if engine.health.state is not Health.DEAD:
            kind = engine.info.role, engine.info.hardware or "unknown"
            counts[kind] += 1
            firsts.setdefault(kind, engine.info)
    return [_kind(firsts[kind], kind, count, loads) for kind, count in counts.items()]


def _kind(info: EngineInfo, kind: tuple[Role, str], count: int, loads: EngineLoads) -> EngineKind:
    costs: EngineCosts = loads.costs(info)
    factors = tuple(costs.step_fit.factors.tolist())
    return EngineKind(
        role=kind[0],
        hardware=kind[1],
        line=costs.prefill_line,
        step_s=partial(_step_s, costs.prior, factors),
        places=info.max_running,
        room=costs.prior.kv_tokens_max or inf,
        count=count,
    )


def _step_s(prior: CostPrior, factors: tuple[float, ...], batch: float, context: float) -> float:
    """As ``EngineCosts.step_seconds``, by factors that do not change."""
    terms = prior.step_terms(batch, context)
    return sum(factor * term for factor, term in zip(factors, terms, strict=True))
