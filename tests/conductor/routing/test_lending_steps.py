"""Goal: looks at splits hold no step up, and nobody waits for a partner that has gone."""

from collections.abc import Generator, Sequence
from typing import Any

import pytest

from conductor.routing import lending
from conductor.routing.capacity import EngineKind, FleetRates, Needs, Targets
from conductor.routing.choices import Assign
from conductor.routing.columns import Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Health, Role
from conductor.routing.fleet import fleet_of
from conductor.routing.lending import LOOK_S, SAMPLES_MIN, Fleet, Prospect
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from conductor.routing.work import Answer
from tests.conductor.routing.test_lending import LONG

HARDWARE = ("4xa800", "8xa800", "4xh100", "8xh100", "4xh200", "8xh200", "8xb200", "4xl40s")


def dispatcher_with(
    count: int, kinds: int = 1, policy: str = "least-loaded", short: int = 0
) -> tuple[EngineRegistry, Dispatcher]:
    """``short``: what all but the first engine can take, in tokens."""
    registry = EngineRegistry()
    for number in range(count):
        info = EngineInfo(
            id=f"e{number}", role=Role.MIXED, url="http://x", model="m", page_tokens=16, domain="d",
            max_running=64 + number // kinds % 3 * (kinds > 1), hardware=HARDWARE[number % kinds],
            shape="llama3-70b", max_model_len=short if number else 0,
        )  # fmt: skip
        registry.register(info, 0.0)
    scheduler = Scheduler(POLICIES[policy])
    return registry, Dispatcher(registry, scheduler, DispatchLimits(64, 60.0, 3), lends=True)


def lend(dispatcher: Dispatcher) -> None:
    """Let so much come that engines are lent."""
    pools = dispatcher.pools
    assert pools is not None
    for number in range(2 * SAMPLES_MIN):
        pools.came("m", number * 0.01)
        pools.needs("m", number, LONG, number * 0.01)
    for _ in range(100):
        dispatcher.step(0.5)
    assert set(pools.lent.values()) == {Role.PREFILL, Role.DECODE}


@pytest.mark.parametrize("way", ["dies", "removed"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_whose_partners_have_gone_is_at_home_in_the_same_step(role: Role, way: str) -> None:
    registry, dispatcher = dispatcher_with(4)
    lend(dispatcher)
    assert dispatcher.pools is not None
    gone = [name for name, one in dispatcher.pools.lent.items() if one is role]
    assert len(dispatcher.pools.lent) == 4
    for name in gone:
        engine = registry.get(name)
        assert engine is not None
        if way == "removed":
            registry.remove(name)
            dispatcher.forget(name)
            continue
        while engine.health.state is not Health.DEAD:
            engine.health.failed(0.6)
    dispatcher.arrive(Request(number=1, model="m", arrived=0.6))
    [assign] = dispatcher.step(0.6)
    assert isinstance(assign, Assign)
    assert assign.prefill == assign.decode not in gone
    assert dispatcher.pools.lent == {}


@pytest.mark.parametrize("kinds", [1, len(HARDWARE)])
def test_a_step_does_a_part_of_a_look_and_a_late_step_goes_on(
    kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all splits of 64 engines it takes 25 to 50 ms."""
    _, dispatcher = dispatcher_with(64, kinds)
    pools = dispatcher.pools
    assert pools is not None
    calls, most, steps = 0, 0, 0
    capacity = lending.capacity

    def counted(fleet: Sequence[EngineKind], needs: Needs, targets: Targets) -> FleetRates:
        nonlocal calls
        calls += 1
        return capacity(fleet, needs, targets)

    monkeypatch.setattr(lending, "capacity", counted)
    for number in range(128):
        pools.came("m", number * 0.001)
        pools.needs("m", number, LONG, number * 0.01)
    while not pools.lent:
        before, steps = calls, steps + 1
        dispatcher.step(0.2 + steps * LOOK_S)
        most = max(most, calls - before)
    assert most <= lending.CAPACITIES_A_STEP
    assert calls > 3 * most
    assert steps < 30


def test_who_waits_counts_as_much_as_who_has_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the long ones, which wait, would be missing in the load of which splits are chosen."""
    _, dispatcher = dispatcher_with(1, policy="earliest-first-token")
    seen: list[list[int]] = []
    foresee = lending.foresee

    def watched(fleet: Fleet, load: lending.Load, *rest: Any) -> Generator[None, None, Prospect]:
        seen.append(sorted(one.new + one.prefix for one in load.samples))
        return (yield from foresee(fleet, load, *rest))

    monkeypatch.setattr(lending, "foresee", watched)
    for number in range(6):
        tokens = 40_000 if number < 2 else 500
        dispatcher.arrive(Request(number=number, model="m", arrived=0.0, tokens=tokens))
        dispatcher.learn(number, {"e0": Prefix(usable=100)})
    assigned = [one for one in dispatcher.step(0.1) if isinstance(one, Assign)]
    assert {one.request for one in assigned}.isdisjoint({0, 1}), "the long ones wait"
    dispatcher.step(0.1 + LOOK_S)
    assert seen[-1] == [500] * 4 + [40_000] * 2


def test_answers_do_not_hold_an_engine_up_that_was_lent_to_prompts() -> None:
    """It would stand idle for their sake while everybody waits."""
    registry, dispatcher = dispatcher_with(4, policy="earliest-first-token")
    for number, engine in enumerate(registry):
        dispatcher.loads.decodes(number, engine.info, 1_000, 0.0, Answer(2_000.0, 0.1))
    costs = dispatcher.view(0.1).costs
    assert costs is not None
    assert costs.inputs.late_most.tolist() == [1.0] * 4
    lend(dispatcher)
    view = dispatcher.view(0.6)
    assert view.costs is not None
    counted = [role is not Role.PREFILL for role in view.roles]
    assert view.costs.inputs.late_most.astype(bool).tolist() == counted
    assert not all(counted)


BOTH_WAYS = pytest.mark.parametrize("policy", ["least-loaded", "earliest-first-token"])


@BOTH_WAYS
def test_a_request_that_failed_at_the_last_partner_is_served_by_a_lent_engine(policy: str) -> None:
    _, dispatcher = dispatcher_with(4, policy=policy)
    lend(dispatcher)
    assert dispatcher.pools is not None
    lent = dict(dispatcher.pools.lent)
    few = min(Role.PREFILL, Role.DECODE, key=list(lent.values()).count)
    dispatcher.arrive(Request(number=1, model="m", arrived=0.6, tokens=1_000))
    [assign] = dispatcher.step(0.6)
    assert isinstance(assign, Assign)
    assert (lent[assign.prefill], lent[assign.decode]) == (Role.PREFILL, Role.DECODE)
    for name in [name for name, role in lent.items() if role is few]:
        dispatcher.failed(1, name, "broke", 0.7)
    [again] = dispatcher.step(0.7)
    assert isinstance(again, Assign)
    assert again.prefill == again.decode
    assert lent[again.prefill] is not few
    assert dispatcher.pools.lent == lent, "all others go to pairs"


@BOTH_WAYS
def test_a_prompt_that_one_engine_can_take_is_served_there_whatever_that_is_lent_to(
    policy: str,
) -> None:
    _, dispatcher = dispatcher_with(4, policy=policy, short=4_000)
    lend(dispatcher)
    dispatcher.arrive(Request(number=1, model="m", arrived=0.6, tokens=9_000))
    [assign] = dispatcher.step(0.6)
    assert isinstance(assign, Assign)
    assert (assign.prefill, assign.decode) == ("e0", "e0")


def test_what_engines_have_and_who_is_in_time_is_known() -> None:
    registry, dispatcher = dispatcher_with(1, policy="earliest-first-token")
    for number in (1, 2, 3):
        dispatcher.arrive(Request(number=number, model="m", arrived=0.0, tokens=500))
        dispatcher.learn(number, {})
    [first] = dispatcher.step(0.0)
    assert isinstance(first, Assign)
    attained = dispatcher._attained
    assert attained.part("m", 0.0, 0.0, 1) is None
    [engine], _ = fleet_of(registry, dispatcher.loads)
    assert (engine.answers, engine.prompts_s) == (0, pytest.approx(first.prefill_s))

    dispatcher.began(1, 1.0)
    [engine], _ = fleet_of(registry, dispatcher.loads)
    assert (engine.answers, engine.prompts_s) == (1, 0.0)
    assert attained.part("m", 0.0, 1.0, 1) == 1.0
    assert [effect.request for effect in dispatcher.step(1.0)] == [2]
    assert attained.part("m", 0.0, 30.5, 2) == 0.5  # one has waited for too long
    dispatcher.began(2, 31.0)  # the objective of the default class is 30 s
    assert attained.part("m", 0.0, 31.0, 3) == pytest.approx(1 / 3)
    dispatcher.ended(1, 10, 31.0)  # and 0.1 s
    dispatcher.left(1, 31.0)
    assert attained.part("m", 0.0, 31.0, 2) == 0.0
    dispatcher.left(3, 32.0)  # without an answer
    assert attained.part("m", 0.0, 32.0, 3) == 0.0
