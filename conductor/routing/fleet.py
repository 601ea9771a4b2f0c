"""The engines of a model as kinds, in fixed values, for advice and lending."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from math import inf

from conductor.costs.book import EngineCosts
from conductor.costs.prior import CostPrior
from conductor.routing.capacity import EngineKind
from conductor.routing.engines import Engine, EngineInfo, EngineRegistry, Health, Role
from conductor.routing.lending import MixedEngine, Pools
from conductor.routing.load import EngineLoads
from conductor.routing.recent import LoadSample
from conductor.routing.requests import Request


def kinds_of(engines: Iterable[Engine], loads: EngineLoads) -> list[EngineKind]:
    """Engines that are not dead, by role and hardware; each kind has the costs of its first."""
    counts: Counter[tuple[Role, str]] = Counter()
    firsts: dict[tuple[Role, str], EngineInfo] = {}
    for engine in engines:
        if engine.health.state is not Health.DEAD:
            kind = _of(engine.info)
            counts[kind] += 1
            firsts.setdefault(kind, engine.info)
    return [_kind(firsts[kind], kind, count, loads) for kind, count in counts.items()]


def fleet_of(
    engines: Iterable[Engine], loads: EngineLoads
) -> tuple[list[MixedEngine], list[EngineKind]]:
    """Engines that are not dead: mixed ones one by one, and the kinds of the others."""
    living = [one for one in engines if one.health.state is not Health.DEAD]
    kinds = {(one.role, one.hardware): one for one in kinds_of(living, loads)}
    mixed = [
        MixedEngine(
            info.id,
            replace(kinds[_of(info)], places=info.max_running, count=1),
            loads.prompts_s(info),
            loads.answers(info),
        )
        for info in (one.info for one in living)
        if info.role is Role.MIXED
    ]
    return mixed, [one for one in kinds.values() if one.role is not Role.MIXED]


def look(pools: Pools, registry: EngineRegistry, loads: EngineLoads, now: float) -> None:
    """Let the pools lend registered engines, or end that; see :meth:`Pools.look`."""
    dead = [engine.health.state is Health.DEAD for engine in registry]
    seen = registry.changes, dead
    pools.look(lambda model: fleet_of(registry.of_model(model), loads), seen, now)


def came(pools: Pools, registry: EngineRegistry, model: str, now: float) -> None:
    """Tell the pools that a request has come for a model or an adapter, if any engine serves it."""
    infos = registry.infos(model)
    if infos:
        pools.came(infos[0].model, now)


def need(pools: Pools, registry: EngineRegistry, request: Request, sample: LoadSample) -> None:
    """Tell the pools what a request for a model or an adapter needs; see :meth:`Pools.needs`."""
    infos = registry.infos(request.model)
    if infos:
        pools.needs(infos[0].model, request.number, sample, request.arrived)


def _of(info: EngineInfo) -> tuple[Role, str]:
    return info.role, info.hardware or "unknown"


def _kind(info: EngineInfo, kind: tuple[Role, str], count: int, loads: EngineLoads) -> EngineKind:
    costs: EngineCosts = loads.costs(info)
    factors = tuple(costs.step_factors.tolist())
    return EngineKind(
        role=kind[0],
        hardware=kind[1],
        line=costs.prefill_line,
        step_s=partial(_step_s, costs.prior, factors, max(1, len(info.ranks))),
        places=info.max_running,
        room=costs.prior.kv_tokens_max or inf,
        count=count,
    )


def _step_s(
    prior: CostPrior, factors: tuple[float, ...], ranks: int, batch: float, context: float
) -> float:
    """As ``EngineLoads.step_seconds``, by factors that do not change."""
    terms = prior.step_terms(max(1.0, batch / ranks), context / ranks)
    return sum(factor * term for factor, term in zip(factors, terms, strict=True))
