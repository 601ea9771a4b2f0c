"""Goal: a request's wait for a place to decode is the one that looking step by step finds."""

import random

import numpy as np

from conductor.costs.book import CostBook
from conductor.routing.demand import HORIZON_S, STEP_S, Crowd, DecodeDemand
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.joining import RankEvents
from conductor.routing.load import EngineLoads
from conductor.routing.outlook import DecodePool, Entry, Seen, enter
from tests.conductor.routing.columns import engine, view_of

MACHINES = [
    ("llama3-70b", "8xh800"),
    ("llama3-8b", "h100"),
    ("deepseek-v3", "8xh200"),
    ("kimi-k2", "8xh200"),
]


def enter_step_by_step(
    demand: DecodeDemand, seen: Seen, who: tuple[Crowd, Crowd], tbt_s: float, now: float
) -> Entry:
    """What :func:`enter` says, one look after the other."""
    ahead, mine = who
    at = now + min(seen.computed_s, HORIZON_S)
    stay_s = max(demand.typical_s, 1e-3)
    there = min(1.0, stay_s / max(at - now, stay_s))
    first: Crowd | None = None
    load = 0.0
    for when, crowd in demand.ahead(now, now + HORIZON_S):
        if when + STEP_S <= at:
            continue
        left = there * max(0.0, 1.0 - (when - at) / stay_s)
        then = crowd.plus(ahead, left).plus(mine)
        full = seen.pool.load(then, tbt_s)
        if first is None:
            first, load = then, full
        if full <= 1.0:
            return Entry(load, max(0.0, when - at), seen.pool.step_s(then))
    return Entry(load, HORIZON_S, seen.pool.step_s(first or mine))


def some_pool(chance: random.Random) -> DecodePool:
    """Engines of which different things are known."""
    loads = EngineLoads(CostBook())
    names = [f"e{at}" for at in range(chance.randint(1, 6))]
    for name in names:
        shape, hardware = chance.choice(MACHINES)
        ranks = tuple(RankEvents(at, None, None, None) for at in range(chance.choice([0, 0, 2])))
        info = EngineInfo(
            id=name, role=Role.DECODE, url="http://x", model="m", page_tokens=4, domain="d",
            shape=shape, hardware=hardware, ranks=ranks,
        )  # fmt: skip
        if chance.random() < 0.9:  # nothing is known of some
            costs = loads.costs(info)
            loads.step_s(info)
            for _ in range(chance.choice([0, 0, 20])):
                batch = chance.randint(1, 60)
                seconds = chance.uniform(0.5, 2.0) * costs.step_seconds(batch, 1e3 * batch)
                costs.stepped(batch, 1e3 * batch, seconds)
    rows = [engine(name, "decode", max_running=chance.randint(1, 64)) for name in names]
    return DecodePool("m", view_of(rows), list(range(len(rows))), loads)


def some_demand(chance: random.Random, now: float, places: int) -> DecodeDemand:
    """Requests that decode, will do so, and are late."""
    demand = DecodeDemand()
    demand.pass_time(max(0.0, now - chance.uniform(0, 30)))
    for number in range(chance.randint(0, 2 * places)):
        tokens, stays_s = chance.randint(10, 130_000), chance.expovariate(1 / 40)
        if chance.random() < 0.6:
            demand.decodes(number, tokens, stays_s)
        else:
            demand.comes(number, tokens, now + chance.uniform(-20, 400), stays_s)
    demand.pass_time(now)
    return demand


def test_the_wait_for_a_place_is_the_one_that_is_found_step_by_step() -> None:
    chance, waits = random.Random(3), []
    for _ in range(80):
        now = chance.choice([0.0, 12.25, chance.uniform(0, 1e5)])
        pool, demand = some_pool(chance), some_demand(chance, now, 80)
        seen = Seen(pool, 0.0, 0.0, chance.choice([0.0, chance.expovariate(1 / 20), 400.0]))
        ahead = Crowd(chance.randint(0, 40), chance.uniform(0, 1e6))
        who = (ahead, Crowd(1, chance.uniform(10, 130_000)))
        tbt_s = chance.choice([0.02, 0.1, 1.0])
        entry = enter(demand, seen, who, tbt_s, now)
        assert entry == enter_step_by_step(demand, seen, who, tbt_s, now)
        waits.append(entry.waits_s)
    assert {0.0, HORIZON_S} < set(waits), "at once, never, and something between"


def test_a_forecast_in_columns_is_that_of_each_time() -> None:
    chance = random.Random(1)
    for _ in range(20):
        now = chance.uniform(0, 1e4)
        demand = some_demand(chance, now, 20)
        until = now + chance.choice([0.0, 0.1, 7.0, HORIZON_S])
        times, sizes, tokens = demand.forecast(now, until)
        every = list(demand.ahead(now, until))
        count = len(every)  # one step more where nothing is ahead
        assert times[:count].tolist() == [when for when, _ in every]
        assert np.array([sizes, tokens])[:, :count].T.tolist() == [list(one) for _, one in every]
