"""Goal: mixed engines are lent where that serves more, seldom, and go home again."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.routing.attainment import Attainment
from conductor.routing.capacity import EngineKind, Targets
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import Role
from conductor.routing.lending import (
    AMPLE,
    HOLD_S,
    HOME,
    LOOK_AT_HOME_S,
    LOOK_S,
    SAMPLES_MIN,
    SPARE,
    WORTH,
    Fleet,
    Lending,
    Load,
    MixedEngine,
    Pools,
    Prospect,
    Split,
    foresee,
)
from conductor.routing.recent import LoadSample
from conductor.simulator.fleet import Running, engines_of
from conductor.simulator.report import Objectives, Summary, summary_of
from conductor.simulator.scenario import Failure, Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.workloads import made_up
from tests.conductor.advice.test_advice import kind
from tests.conductor.simulator.simulated import fleet, trace_of

NAMES = ("m0", "m1", "m2", "m3")
TARGETS = Targets(5.0, 0.1)
LONG = LoadSample(20_000, 0, 100)
SHORT = LoadSample(200, 0, 200)


def split(prompts: Sequence[str], tokens: Sequence[str]) -> Split:
    return Split(frozenset(prompts), frozenset(tokens))


def prospect_of(
    engines: Sequence[MixedEngine],
    others: Sequence[EngineKind],
    load: Load,
    targets: Targets,
    present: Split,
) -> Prospect:
    """What is foreseen, all at once."""
    found = list[Prospect]()

    def run() -> Iterator[None]:
        steps = foresee((engines, others), load, targets, present, lambda _: True)
        found.append((yield from steps))

    for _ in run():
        pass
    return found[0]


def look(pools: Pools, fleet: Callable[[str], Fleet], now: float, seen: object = None) -> None:
    """Look until all is found out."""
    for _ in range(200):
        pools.look(fleet, seen, now)


def mixed(count: int = 4, hardware: str = "x", **fields: object) -> list[MixedEngine]:
    one = kind("mixed", 1, hardware, **fields)
    return [MixedEngine(f"{hardware}{number}", one) for number in range(count)]


# Hysteresis

SPLITS = st.builds(
    lambda roles: Split(
        frozenset(one for one, role in zip(NAMES, roles, strict=True) if role is Role.PREFILL),
        frozenset(one for one, role in zip(NAMES, roles, strict=True) if role is Role.DECODE),
    ),
    st.tuples(*[st.sampled_from(list(Role))] * 4),
)
RATES = st.floats(0, 100)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), RATES, RATES, RATES, SPLITS, RATES, st.sets(st.sampled_from(NAMES))
        ),
        max_size=60,
    )
)
def test_an_engine_changes_once_in_a_while_whatever_is_foreseen(
    looks: list[tuple[float, float, float, float, Split, float, set[str]]],
) -> None:
    lending, now, taken = Lending(), 0.0, [0.0]
    for passed, rate, home, present, best, served, alive in looks:
        now += passed
        before = lending.split
        forced = lending.keep(alive, ())
        # Who is lent is alive, and has partners; nobody is lent because another one has gone.
        assert lending.split.prompts | lending.split.tokens <= alive & (
            before.prompts | before.tokens
        )
        assert bool(lending.split.prompts) == bool(lending.split.tokens)
        assert forced == (before != lending.split)
        best = split(sorted(best.prompts & alive), sorted(best.tokens & alive))
        if lending.consider(Prospect(rate, home, present, lambda: (best, served)), now):  # noqa: B023
            taken.append(now)
        assert not lending.split.prompts & lending.split.tokens
    assert all(later - earlier >= HOLD_S for earlier, later in pairwise(taken[1:]))


@given(RATES, RATES, RATES, RATES)
def test_a_steady_load_changes_nothing_twice(
    rate: float, home: float, there: float, factor: float
) -> None:
    lending, wanted = Lending(), split(["m0"], ["m1"])
    for look in range(40):
        present = home if lending.split == HOME else there
        best = (wanted, there) if there > home else (HOME, home)
        lending.consider(Prospect(rate, home, present, lambda: best), look * HOLD_S)  # noqa: B023
    assert lending.changes <= 1


def test_engines_are_lent_when_more_comes_than_they_serve_and_go_home_when_less_does() -> None:
    lending, wanted, now = Lending(), split(["m0", "m1"], ["m2"]), 100.0

    def foresee(rate: float, present: float, best: float = 30.0) -> bool:
        nonlocal now
        now += HOLD_S
        return lending.consider(Prospect(rate, 10.0, present, lambda: (wanted, best)), now)

    assert not foresee(10.0 / SPARE, 10.0)  # enough is served at home
    assert not foresee(20.0, 10.0, best=10.0 * WORTH)  # nothing is gained by it
    assert foresee(20.0, 10.0)
    assert lending.split == wanted
    assert not lending.consider(Prospect(0.0, 10.0, 30.0, lambda: (HOME, 10.0)), now + HOLD_S - 1)
    assert not foresee(10.0 / SPARE, 30.0)  # not as soon as it would not be lent again
    assert foresee(10.0 / AMPLE - 0.01, 30.0)
    assert lending.split == HOME


def test_a_split_that_serves_what_comes_stays_whatever_is_predicted_of_others() -> None:
    """A change makes answers late; it is for loads that the present split does not serve."""
    first, second = split(["m0", "m1"], ["m2"]), split(["m0"], ["m1", "m2"])

    def changes(present: float, best: float, in_time: float | None) -> bool:
        lending = Lending(first)
        prospect = Prospect(10.0, 4.0, present, lambda: (second, best), in_time)
        return lending.consider(prospect, 0.0)

    assert not changes(5.0, 9.0, in_time=1.0)  # the prediction is known to be wrong
    assert not changes(5.0, 9.0, in_time=0.92)
    assert not changes(5.0, 9.0, in_time=0.85)  # this is nearly what the other one would serve
    assert changes(5.0, 9.5, in_time=0.85)
    assert changes(5.0, 9.0, in_time=None)
    assert not changes(10.0, 30.0, in_time=None)  # enough is served, as is predicted
    assert changes(10.0, 30.0, in_time=0.5)  # or not, as is measured
    assert not changes(10.0, 10.0, in_time=0.5)  # the other one would be no better


def test_a_change_gains_more_requests_than_it_makes_answers_late() -> None:
    first, second = split(["m0"], ["m1", "m2"]), split(["m0", "m1"], ["m2"])
    answers = {"m1": 40, "m2": 1000}

    def prospect(served: float = 9.0) -> Prospect:
        return Prospect(10.0, 4.0, 7.0, lambda: (second, served), None, answers)

    lending = Lending(first)  # 2 a second more, 40 answers are lost
    assert not lending.consider(prospect(), 100.0)
    assert not lending.consider(prospect(), 100.0 + 40 / 2 - HOLD_S)
    assert not lending.consider(prospect(served=7.0), 110.0)  # it was not better for a moment
    assert not lending.consider(prospect(), 112.0)
    assert not lending.consider(prospect(), 112.0 + 40 / 2 - HOLD_S)
    assert lending.consider(prospect(), 112.1 + 40 / 2 - HOLD_S)
    assert lending.split == second
    # Of more than what comes nothing is gained.
    assert not Lending(first).consider(prospect(served=1000.0)._replace(rate=8.0), 0.0)
    assert Lending(first).consider(prospect(served=1000.0)._replace(rate=10.0), 0.0)
    # Who goes on decoding loses nothing, nor who is at home, where prompts are computed anyway.
    assert Lending(split(["m0"], ["m2"])).consider(prospect(), 0.0)
    assert Lending(HOME).consider(prospect(), 0.0)


def test_who_has_no_partner_left_goes_home_at_once() -> None:
    lending = Lending()
    lending.split = split(["m0", "m1"], ["m2"])
    assert not lending.keep(NAMES, ())
    assert lending.keep({"m0", "m2", "m3"}, ())
    assert lending.split == split(["m0"], ["m2"])
    assert lending.keep({"m0", "m3"}, ())
    assert lending.split == HOME
    lending.split = split(["m0"], [])
    assert not lending.keep({"m0"}, {Role.DECODE})
    assert lending.keep({"m0"}, {Role.PREFILL})


# What is lent


def test_prompts_that_hold_answers_up_are_computed_apart() -> None:
    long = prospect_of(mixed(), (), Load(5.0, [LONG] * 20), TARGETS, HOME)
    best, served = long.best()
    assert served > 1.1 * long.home == long.present * 1.1
    assert len(best.prompts) + len(best.tokens) == 4
    assert len(best.prompts) > len(best.tokens)
    assert prospect_of(mixed(), (), Load(5.0, [LONG] * 20), TARGETS, best).present == served


def test_engines_of_other_roles_are_counted_first() -> None:
    load = Load(5.0, [LONG] * 20)
    decode = kind("decode", 4)
    best, _ = prospect_of(mixed(2), [decode], load, TARGETS, HOME).best()
    assert (len(best.prompts), len(best.tokens)) == (2, 0)
    slow = kind("decode", 1, step_s=lambda batch, context: 0.01 * batch)
    others, load = [kind("prefill", 4), slow], Load(5.0, [SHORT] * 20)
    best, _ = prospect_of(mixed(2), others, load, TARGETS, HOME).best()
    assert not best.prompts


def test_the_hardware_that_is_better_at_prompts_is_lent_to_prompts() -> None:
    slow_steps = mixed(2, "fast-at-prompts", step_s=lambda batch, context: 0.03 + 1e-4 * batch)
    quick_steps = mixed(2, "fast-at-tokens", step_s=lambda batch, context: 0.01 + 1e-4 * batch)
    load = Load(5.0, [LONG] * 20)
    best, _ = prospect_of([*quick_steps, *slow_steps], (), load, TARGETS, HOME).best()
    assert {one.id for one in slow_steps} <= best.prompts
    assert best.tokens <= {one.id for one in quick_steps}


def test_of_equal_engines_those_that_have_no_prompts_are_lent_to_tokens() -> None:
    """Else the answers that come would wait for prompts that were there before."""
    busy_s = {"m0": 0.2, "m1": 0.0, "m2": 0.5, "m3": 7.0}
    engines = [one._replace(prompts_s=busy_s[one.id]) for one in mixed(4, "m")]
    load = Load(5.0, [LONG] * 20)
    best, _ = prospect_of(engines, (), load, TARGETS, HOME).best()
    assert best == split(["m0", "m2", "m3"], ["m1"])
    best, _ = prospect_of(engines, (), load, TARGETS, split(["m0", "m1", "m2"], ["m3"])).best()
    assert best == split(["m0", "m1", "m2"], ["m3"])  # no change for its sake


@pytest.mark.parametrize("count", [1, 2, 40])
def test_any_number_of_engines_can_be_lent(count: int) -> None:
    found = prospect_of(mixed(count), (), Load(1.0, [LONG, SHORT] * 10), TARGETS, HOME)
    best, served = found.best()
    assert served >= found.home
    assert len(best.prompts) + len(best.tokens) <= count
    assert count > 1 or best == HOME


def test_nothing_is_lent_before_enough_is_known() -> None:
    pools, engines = Pools(Attainment(TARGETS)), mixed()
    looks = 0

    def seen(_: str) -> Fleet:
        nonlocal looks
        looks += 1
        return engines, ()

    for number in range(40):
        pools.came("m", number * 0.02)
        if number < SAMPLES_MIN - 1:
            pools.needs("m", number, LONG, number * 0.02)
        look(pools, seen, number * 0.02)
    assert pools.lent == {}
    pools.needs("m", 40, SHORT, 0.8)
    look(pools, seen, 1.0)
    before, looks = pools.lent, 0
    for number in range(40):
        look(pools, seen, 1.0 + number * LOOK_S / 40)
    assert (pools.lent, looks) == (before, 0)  # nothing changes for a while
    assert set(pools.lent.values()) == {Role.PREFILL, Role.DECODE}
    gauges = pools.gauges()
    assert gauges["lendings"] == {("m",): 1.0}
    assert len(gauges["engine_lent"]) == len(pools.lent)


def test_a_load_that_grows_is_noticed_sooner_while_all_are_at_home() -> None:
    pools, now, looked = Pools(Attainment(TARGETS)), 0.0, list[float]()

    def seen(_: str) -> Fleet:
        looked.append(now)
        return mixed(), ()

    for number in range(SAMPLES_MIN):
        now = number * 100.0
        pools.came("m", now)
        pools.needs("m", number, LONG, now)
    look(pools, seen, now)
    assert pools.lent == {}
    for number in range(SAMPLES_MIN, 200):  # now more comes than they serve
        pools.came("m", now)
        pools.needs("m", number, LONG, now)
    now += LOOK_AT_HOME_S
    look(pools, seen, now)
    assert pools.lent
    lent_at = now
    looked.clear()
    for _ in range(400):
        now += 0.1
        look(pools, seen, now)
    later = sorted(set(looked))
    assert later[0] >= lent_at + HOLD_S
    assert all(two - one >= LOOK_S - 1e-9 for one, two in pairwise(later))


def test_a_model_without_engines_is_forgotten() -> None:
    pools = Pools(Attainment(TARGETS))
    for number in range(2 * SAMPLES_MIN):
        pools.came("m", number * 0.02)
        pools.needs("m", number, LONG, number * 0.02)
    look(pools, lambda _: (mixed(), ()), 1.0)
    assert pools.lent
    pools.look(lambda _: ((), ()), "gone", 1.0)
    assert pools.lent == pools.gauges()["lendings"] == {}


# In a dispatcher


def summary(name: str, speed: float, *, lends: bool, requests: int) -> tuple[Summary, Dispatcher]:
    engines = engines_of({Role.MIXED: "4xa800"}, "llama3-70b", Running())
    scenario = Scenario(policy="earliest-first-token", speed=speed, lends=lends)
    simulation = Simulation(made_up(name, requests, 7), engines, scenario)
    simulation.run()
    return summary_of(simulation, Objectives(20.0, 0.1)), simulation.desk.dispatcher


def test_lending_raises_goodput_where_prompts_are_long() -> None:
    at_home, _ = summary("long", 0.35, lends=False, requests=80)
    lent, dispatcher = summary("long", 0.35, lends=True, requests=80)
    assert lent.effective > at_home.effective + 0.1
    assert set(dispatcher.lent()["engine_lent"].values()) == {1.0}


def test_nobody_is_lent_while_little_comes() -> None:
    _, dispatcher = summary("short", 1.0, lends=True, requests=60)
    assert dispatcher.lent()["lendings"] == {("llama3-70b",): 0.0}


class LentByChance(Pools):
    """Lends the engines anew at each look, whatever comes."""

    def __init__(self, turns: Sequence[Split]) -> None:
        super().__init__(Attainment(TARGETS))
        self._turns = list(turns)

    def look(self, fleet: Callable[[str], Fleet], seen: object, now: float) -> None:
        if not self._turns:
            return
        wanted = self._turns.pop()
        lending = Lending(wanted)
        engines, others = fleet("reference-tiny")
        lending.keep([one.id for one in engines], {one.role for one in others})
        lent = lending.split.prompts | lending.split.tokens
        self.lent = {one: lending.split.role(one) for one in lent}


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 4000), st.integers(1, 40)), max_size=25),
    st.lists(SPLITS, max_size=40),
    st.sampled_from(["earliest-first-token", "cache-global", "least-loaded"]),
    st.integers(0, 1),
)
def test_every_request_ends_whoever_is_lent_and_dies(
    rows: list[tuple[float, int, int]], turns: list[Split], policy: str, prefill: int
) -> None:
    at, arrivals = 0.0, list[tuple[float, int, int, range]]()
    for passed, tokens, output in rows:
        at += passed
        arrivals.append((at, tokens, output, range(tokens // 512 + 1)))
    engines = fleet(prefill=prefill, decode=prefill, mixed=4)
    failures = [Failure(engine="m0", at_s=at / 3, back_s=at / 2), Failure(engine="m1", at_s=at / 2)]
    scenario = Scenario(policy=policy, lends=True, failures=failures)
    simulation = Simulation(trace_of(*arrivals), engines, scenario)
    simulation.desk.dispatcher.pools = LentByChance(turns)
    while simulation.step():
        simulation.check()
    simulation.run()
    assert all(record.outcome for record in simulation.records)
