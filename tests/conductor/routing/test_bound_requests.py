"""Goal: policies that choose an engine at arrival hold requests up no longer than they must."""

import pytest

from conductor.routing.choices import Assign
from conductor.routing.columns import Prefix
from conductor.routing.engines import EngineRegistry
from conductor.routing.requests import Request
from tests.conductor.routing.test_seconds_dispatched import SECONDS, TOKENS, dispatcher, info


@pytest.mark.parametrize("policy", SECONDS[:2])
def test_who_has_waited_half_of_its_time_for_a_full_engine_takes_any_other(policy: str) -> None:
    registry = EngineRegistry()
    for name in ("has", "other"):
        registry.register(info(name, "mixed", 1), 0.0)
    desk = dispatcher(registry, policy)
    matches = {"has": Prefix(TOKENS, 0, TOKENS)}

    def decide(now: float) -> list[tuple[int, str]]:
        for number, _ in desk.due(now):
            desk.learn(number, matches)
        effects = desk.step(now)
        desk.check()
        return [(one.request, one.prefill) for one in effects if isinstance(one, Assign)]

    for number in (1, 2, 3):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=TOKENS))
    assert decide(0.0) == [(1, "has")]
    assert desk.wake_at == 30.0
    assert decide(29.9) == []
    assert decide(30.0) == [(2, "other")], "and the last one goes on waiting"
    assert desk.wake_at == 60.0
    desk.left(1, 31.0)
    assert decide(31.0) == [(3, "has")]


@pytest.mark.parametrize("policy", SECONDS[:2])
def test_who_gives_up_its_engine_leaves_another_to_those_who_wait_for_it(policy: str) -> None:
    registry = EngineRegistry()
    for name in ("has", "other"):
        registry.register(info(name, "mixed", 1), 0.0)
    desk = dispatcher(registry, policy)
    wants = {1: "has", 2: "has", 3: "other", 4: "other"}

    def decide(now: float) -> list[tuple[int, str]]:
        for number, _ in desk.due(now):
            desk.learn(number, {wants[number]: Prefix(TOKENS, 0, TOKENS)})
        effects = desk.step(now)
        desk.check()
        return [(one.request, one.prefill) for one in effects if isinstance(one, Assign)]

    for number in wants:
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=TOKENS))
    assert decide(0.0) == [(1, "has"), (3, "other")]
    desk.left(3, 31.0)
    assert decide(31.0) == [(4, "other")], "the second one has waited long, but not for this one"
    desk.left(4, 32.0)
    assert decide(32.0) == [(2, "other")], "now nobody waits for it"


def test_who_waits_for_an_engine_counts_there_with_what_it_needs_there() -> None:
    registry = EngineRegistry()
    for name in ("has", "other"):
        registry.register(info(name, "mixed", 1), 0.0)
    desk = dispatcher(registry, "cache-local")
    for number in range(40):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=TOKENS))
    for now in (0.0, 0.001):
        for number, _ in desk.due(now):
            desk.learn(number, {"has": Prefix(TOKENS // 2, 0, TOKENS // 2)})
        desk.step(now)
        desk.check()

    needs = {one.bound: one.least_s for one in desk._waiting.values()}
    assert needs["other"] > 1.5 * needs["has"] > 0
