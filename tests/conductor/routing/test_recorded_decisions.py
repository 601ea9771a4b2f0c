"""Goal: the dispatcher decides what the queue of 2026-11 decided, given the same events.

One thing is different on purpose: a pair takes its place at the decode engine when its KV arrives
there, not when it is assigned. A protocol that asks both engines at once takes both places at once,
as that queue did, so with such a protocol all decisions are equal, with all their numbers. In turn,
they are equal where no decode engine is ever full or dies. ``Retry-After`` differs, too: that queue
took idle times for its pace.
"""

import json
import re
from collections.abc import Iterator

import pytest

from conductor.routing.choices import Assign, Continue
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from tests.conductor.routing.seeded_load import (
    LOADS,
    RECORDED,
    TRIES,
    WAIT_S,
    WAITING_MAX,
    Continued,
    Effect,
    Refused,
    SeededLoad,
    Started,
)

RECORDED_POLICIES = ("round-robin", "least-loaded", "longest-prefix")


class Simulated:
    """The dispatcher as a seeded load drives it; all time is simulated."""

    def __init__(self, load: SeededLoad, policy: str) -> None:
        at_once = () if load.in_turn else ("reference",)
        scheduler = Scheduler(POLICIES[policy], at_once)
        limits = DispatchLimits(WAITING_MAX, WAIT_S, TRIES)
        self.load = load
        self.dispatcher = Dispatcher(load.registry, scheduler, limits)

    def arrive(self, number: int, model: str, now: float) -> Iterator[Effect]:
        self.dispatcher.arrive(Request(number=number, model=model, arrived=now))
        yield from self.tick(now)

    def prefilled(self, number: int, engine: str, now: float) -> Iterator[Effect]:
        self.dispatcher.prefilled(number, now)
        yield from self.tick(now)

    def released(self, number: int, engine: str, now: float) -> Iterator[Effect]:
        self.dispatcher.released(number, engine, now)
        yield from self.tick(now)
        self.dispatcher.left(number, now)

    def failed(self, number: int, engine: str, held: list[str], now: float) -> Iterator[Effect]:
        for one in held:
            self.dispatcher.released(number, one, now)
            yield from self.tick(now)
        self.dispatcher.failed(number, engine, "", now)
        yield from self.tick(now)

    def leave(self, number: int, held: list[str], now: float) -> Iterator[Effect]:
        for one in held:
            self.dispatcher.released(number, one, now)
            yield from self.tick(now)
        self.dispatcher.left(number, now)
        yield from self.tick(now)

    def tick(self, now: float) -> Iterator[Effect]:
        for number, _ in self.dispatcher.due(now):
            self.dispatcher.learn(number, self.load.prefixes(number))
        for effect in self.dispatcher.step(now):
            self.dispatcher.check()
            if isinstance(effect, Assign):
                yield Started(
                    effect.request, effect.prefill, effect.decode, effect.usable_tokens,
                    effect.reason, effect.ranks, effect.candidates,
                )  # fmt: skip
            elif isinstance(effect, Continue):
                yield Continued(effect.request, effect.decode)
            else:
                reason = effect.reason.partition(";")[0] if "tries" in effect.reason else None
                yield Refused(
                    effect.request, effect.code, reason or effect.reason, effect.retry_after_s
                )

    def wake_at(self) -> float | None:
        return self.dispatcher.wake_at


def recorded(load: str, policy: str) -> list[str]:
    log: list[str] = json.loads(RECORDED.read_text())[f"{load}/{policy}"]
    assert len(log) > 90
    return log


def without_advice(log: list[str]) -> list[str]:
    """The log without ``Retry-After``."""
    return [re.sub(r"( [a-z]+_[a-z]+ .*) \d+$", r"\1", line) for line in log]


@pytest.mark.parametrize("policy", RECORDED_POLICIES)
@pytest.mark.parametrize("name", LOADS)
def test_engines_asked_at_once_are_chosen_as_they_were_recorded(name: str, policy: str):
    load = SeededLoad(LOADS[name], f"{name}/{policy}")
    log = load.run(Simulated(load, policy))
    assert without_advice(log) == without_advice(recorded(name, policy))


@pytest.mark.parametrize("policy", RECORDED_POLICIES)
@pytest.mark.parametrize("name", ["mixed", "roomy"])
def test_engines_asked_in_turn_are_the_same_where_decode_engines_have_room(name: str, policy: str):
    load = SeededLoad(LOADS[name], f"{name}/{policy}", in_turn=True)
    log = load.run(Simulated(load, policy))
    assert without_advice(log) == without_advice(recorded(name, policy))


@pytest.mark.parametrize("policy", RECORDED_POLICIES)
@pytest.mark.parametrize("name", ["pairs", "every"])
def test_in_turn_no_engine_ever_has_more_than_its_places_and_every_request_ends(
    name: str, policy: str
):
    load = SeededLoad(LOADS[name], f"{name}/{policy}", in_turn=True)
    simulated = Simulated(load, policy)
    log = load.run(simulated)
    assert log != recorded(name, policy)  # decode engines are full here
    assert all(load.most.get(one.id, 0) <= one.max_running for one in LOADS[name])
    assert len(simulated.dispatcher) == 0
    assert not any(simulated.dispatcher.in_flight(one.id) for one in LOADS[name])
