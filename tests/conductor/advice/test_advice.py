"""Goal: following the advice raises goodput, and what is said of a fleet fits its costs."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.advice.advise import SHORT_MAX, advise
from conductor.costs.prior import PrefillLine
from conductor.front.advising import KEPT_S, Adviser
from conductor.routing.admission import ServiceClass
from conductor.routing.capacity import EngineKind, Needs, Targets, batch_max, capacity
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineRegistry, Role
from conductor.routing.policy import POLICIES
from conductor.routing.recent import (
    ARRIVALS_KEPT,
    SPAN_S_MIN,
    WINDOW_S,
    LoadSample,
    LoadShape,
    RecentLoad,
)
from conductor.routing.requests import DispatchLimits
from conductor.routing.scheduler import Scheduler
from conductor.simulator.fleet import Running, engines_of
from conductor.simulator.report import (
    Objectives,
    Summary,
    advice_of,
    run_while_attained,
    shown_advice,
    summary_of,
)
from conductor.simulator.scenario import Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.workloads import made_up
from tests.conductor.fakes import FakeEngine, serving
from tests.loops import in_loop

TARGETS = Targets(5.0, 0.1)


def kind(
    role: str = "prefill", count: int = 2, hardware: str = "x", **fields: object
) -> EngineKind:
    usual = {
        "line": PrefillLine(0.01, 0.0, 1e-4, 0.0),
        "step_s": lambda batch, context: 0.01 + 1e-4 * batch,
        "places": 64,
        "room": 1e6,
    }
    return EngineKind(role=Role(role), count=count, hardware=hardware, **{**usual, **fields})  # type: ignore[arg-type]


def load(rate: float = 1.0, new: int = 5_000, output: int = 100) -> LoadShape:
    return LoadShape(rate, (LoadSample(new, 0, output),) * 32)


# What a fleet can serve


def test_prompts_are_computed_as_fast_as_the_engines_can_and_no_faster() -> None:
    needs = Needs(load().samples)
    found = capacity([kind(count=4), kind("decode")], needs, TARGETS)
    assert 0.8 * 4 / 0.51 < found.prefill < 4 / 0.51
    assert found.both == min(found)


def test_nobody_is_served_in_time_by_engines_that_are_too_slow_for_one() -> None:
    needs = Needs(load(new=100_000).samples)
    assert capacity([kind(), kind("decode")], needs, TARGETS).both == 0
    slow = kind("decode", step_s=lambda batch, context: 0.2)
    assert capacity([kind(), slow], Needs(load().samples), TARGETS).decode == 0
    assert capacity([kind()], Needs(load().samples), TARGETS).both == 0


@pytest.mark.parametrize(
    ("fields", "batch"),
    [
        ({}, 64),
        ({"places": 7}, 7),
        ({"room": 5_100 * 9}, 9),
        ({"step_s": lambda batch, context: 0.005 * batch}, 20),
        ({"step_s": lambda batch, context: 1.0}, 0),
    ],
)
def test_a_batch_is_bounded_by_places_room_and_the_time_between_tokens(
    fields: dict[str, object], batch: int
) -> None:
    assert batch_max(kind("decode", **fields), Needs(load().samples), 0.1) == batch


@given(
    st.lists(st.builds(LoadSample, *[st.integers(0, 200_000)] * 3), min_size=1, max_size=20),
    st.sampled_from(list(Role)), st.integers(1, 8), st.integers(1, 300),
)  # fmt: skip
def test_one_more_engine_never_serves_less(
    samples: list[LoadSample], role: Role, count: int, places: int
) -> None:
    needs = Needs(samples)
    fleet = [kind(str(one), count=count, places=places) for one in Role]
    before = capacity(fleet, needs, TARGETS)
    more = capacity([*fleet, kind(str(role), 1, "y", places=places)], needs, TARGETS)
    assert more.both >= before.both * 0.999
    assert all(0 <= one < float("inf") for one in (*before, *more))


# What is advised


def test_it_says_what_is_short_by_how_much_and_what_one_change_would_give() -> None:
    advice = advise([kind(count=1), kind("decode", count=3)], load(rate=6.0), TARGETS)
    assert advice.limit == "prefill"
    assert advice.served < advice.rate
    [short] = advice.short
    assert (short.role, short.hardware) == (Role.PREFILL, "x")
    assert short.engines == pytest.approx(6 * 0.51 - 1, abs=1)
    assert advice.flip is not None
    assert (advice.flip.was, advice.flip.role) == ("decode", Role.PREFILL)
    changes = {(one.change, str(one.role)): one for one in advice.changes}
    assert changes["more", "prefill"].rate > advice.served > changes["fewer", "prefill"].rate
    assert changes["more", "decode"].rate == pytest.approx(advice.served)
    assert changes["fewer", "prefill"].goodput == 0
    assert advice.flip.goodput == pytest.approx(advice.flip.rate / 4)


def test_a_fleet_that_serves_what_comes_is_short_of_nothing() -> None:
    advice = advise([kind(), kind("decode")], load(rate=0.5), TARGETS)
    assert (advice.short, advice.reason) == ((), "")


def test_without_requests_or_engines_nothing_is_advised() -> None:
    few = LoadShape(1.0, load().samples[:3])
    assert "3 requests have ended, 16 are needed" in advise([kind()], few, TARGETS).reason
    assert advise([], load(), TARGETS).reason == "there are no engines"
    assert shown_advice(advise([], load(), TARGETS)) == "no advice: there are no engines"


def test_hardware_is_told_apart_and_the_work_is_bounded() -> None:
    fleet = [kind(role, 1, f"h{one}") for role in ("prefill", "decode") for one in range(40)]
    advice = advise(fleet, load(rate=1e9), TARGETS)
    assert len(advice.changes) <= 4 * 32 + 32
    assert {one.engines for one in advice.short} == {SHORT_MAX}


def test_mixed_engines_are_limited_by_prompts_that_hold_answers_up() -> None:
    needs = Needs(load().samples)
    strict = capacity([kind("mixed")], needs, Targets(5.0, 0.05)).both
    loose = capacity([kind("mixed")], needs, Targets(5.0, 1.0)).both
    assert 0 < strict < loose < 2 / 0.51


def test_a_request_after_a_quiet_time_is_no_flood() -> None:
    recent = RecentLoad()
    recent.came("m", 100.0)
    assert recent.shape({"m"}, 100.01).rate == 1 / SPAN_S_MIN
    recent.came("m", 1000.0)
    assert recent.shape({"m"}, 1000.01).rate == pytest.approx(1 / WINDOW_S)


def test_more_requests_than_are_kept_are_counted_over_the_time_of_those() -> None:
    recent = RecentLoad()
    for number in range(2 * ARRIVALS_KEPT):
        recent.came("m", number / 100)
    assert recent.shape({"m"}, 2 * ARRIVALS_KEPT / 100).rate == pytest.approx(100.0, rel=0.01)


def test_the_recent_load_is_that_of_a_window_and_of_some_models() -> None:
    recent = RecentLoad()
    for second in range(400):
        recent.came("m", float(second))
        recent.came("other", float(second))
        recent.ended("m", LoadSample(1, 2, 3))
    assert recent.shape({"m"}, 399.0).rate == pytest.approx(1.0, rel=0.02)
    assert recent.shape({"m", "other"}, 399.0).rate == pytest.approx(2.0, rel=0.02)
    assert recent.shape({"m"}, 400.0 + WINDOW_S) == LoadShape(0.0, recent.shape({"m"}, 0).samples)
    assert not recent.shape({"other"}, 399.0).samples


# Does it help?


def simulate(name: str, speed: float, roles: dict[Role, int]) -> Simulation:
    running = Running(decode=32)
    engines = engines_of({role: f"{n}xa800" for role, n in roles.items()}, "llama3-70b", running)
    scenario = Scenario(policy="earliest-first-token", speed=speed)
    simulation = Simulation(made_up(name, 150), engines, scenario)
    simulation.run()
    return simulation


@pytest.mark.parametrize(
    ("name", "speed", "prefill", "ttft_s"),
    [("long", 1.2, 2, 20.0), ("short", 12.0, 4, 2.0), ("sessions", 14.0, 1, 5.0)],
)
def test_following_the_advice_raises_goodput(
    name: str, speed: float, prefill: int, ttft_s: float
) -> None:
    targets = Objectives(ttft_s, 0.1)
    roles = {Role.PREFILL: prefill, Role.DECODE: 5 - prefill}
    before = simulate(name, speed, roles)
    advice = advice_of(before, targets)
    assert advice.flip is not None
    assert f"advice: let one a800 {advice.flip.role}" in shown_advice(advice)
    roles[advice.flip.role] += 1
    roles[Role(advice.flip.was)] -= 1
    after = simulate(name, speed, roles)

    def goodput(one: Simulation) -> Summary:
        return summary_of(one, targets)

    assert goodput(after).goodput > 1.05 * goodput(before).goodput


def test_an_overload_makes_long_prompts_late_and_not_all() -> None:
    simulation = simulate("hot", 8.0, {Role.PREFILL: 1, Role.DECODE: 4})
    assert summary_of(simulation, Objectives(5.0, 0.1)).effective > 0.4


def test_a_simulation_for_goodput_ends_when_too_many_are_lost() -> None:
    engines = engines_of({Role.MIXED: "1xa800"}, "llama3-70b", Running())
    simulation = Simulation(made_up("long", 100), engines, Scenario(speed=50.0))
    run_while_attained(simulation, Objectives(1.0, 0.1))
    assert 10 < sum(bool(one.outcome) for one in simulation.records) < 60
    assert summary_of(simulation, Objectives(1.0, 0.1)).effective < 0.9


@in_loop
async def test_a_conductor_gives_advice_and_exports_it() -> None:
    engines = [FakeEngine("p", "prefill"), FakeEngine("d", "decode")]
    sections = {"classes": ({"name": "only", "ttft_s": 100.0},)}
    async with serving(*engines, policy={"name": "earliest-first-token"}, **sections) as client:
        async with asyncio.timeout(30):
            status, answer = await client.get("/v1/advice")
            while "m" not in answer["models"]:  # a look is kept for a second
                status, answer = await client.get("/v1/advice")
        assert (status, "0 requests have ended" in answer["models"]["m"]["reason"]) == (200, True)
        for number in range(16):
            await client.complete([number] * 2_000, stream=True)
        advice = answer["models"]["m"]
        async with asyncio.timeout(30):
            while advice["reason"]:
                _, answer = await client.get("/v1/advice")
                advice = answer["models"]["m"]
        assert advice["served"] > 0
        assert {one["change"] for one in advice["changes"]} == {"more", "fewer", "flip"}
        _, text = await client.get("/metrics")
        assert 'kvstore_conductor_advice_rate{model="m",what="served"}' in text
        assert "kvstore_conductor_advice_gain{" in text


class FailingRegistry(EngineRegistry):
    """Engines that no advice can be computed for."""

    looks = 0

    def models(self) -> list[str]:
        self.looks += 1
        return ["m"]


@in_loop
async def test_nothing_ends_because_no_advice_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, now = FailingRegistry(), 10.0
    dispatcher = Dispatcher(
        registry, Scheduler(POLICIES["least-loaded"], ("once",)), DispatchLimits(8, 1.0, 3)
    )
    adviser = Adviser(registry, dispatcher, ServiceClass(), lambda: now)

    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert await adviser.look() == await adviser.look() == {}
        assert (adviser.gauges()["advice_faults"], registry.looks) == ({(): 1.0}, 1)
        now += KEPT_S
        await adviser.look()
        assert (adviser.gauges()["advice_faults"], registry.looks) == ({(): 2.0}, 2)
