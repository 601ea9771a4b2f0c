"""Goal: the dispatcher loses no request, assigns none twice, and overfills no engine.

Whatever the policy. Who waits does so because no engine can take it; with a policy that binds
early, because its own engine cannot; with one that binds late, because an engine that it could
have has something to compute.
"""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conductor.routing.binding import AHEAD_S
from conductor.routing.choices import Assign, Continue, Plan
from conductor.routing.columns import Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Health, Role
from conductor.routing.policy import POLICIES, Binding
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from tests.conductor.routing.test_dispatcher import TRIES, WAIT_S, WAITING_MAX, info


@dataclass
class Expected:
    """A request in the model."""

    deadline: float
    excluded: set[str] = field(default_factory=set)
    tries: int = 0
    stage: str = "waits"
    held: list[str] = field(default_factory=list)
    promised: str = ""
    at_once: bool = False
    pushed_by: str = ""


ENGINES = (
    info("x0", "mixed", 1), info("x1", "mixed", 2, "once"), info("p0", "prefill", 1),
    info("p1", "prefill", 2, "once"), info("d0", "decode", 1), info("d1", "decode", 2),
    info("d2", "decode", 1, "once"), info("p2", "prefill", 1, push=True),
    info("d3", "decode", 2, push=True),
)  # fmt: skip


class ModelOfDispatcher(RuleBasedStateMachine):
    """The dispatcher beside a model that tries every engine for every request."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.policy = POLICIES[policy]
        self.now = 0.0
        self.number = 0
        self.model: dict[int, Expected] = {}
        self.registry = EngineRegistry()
        for engine in ENGINES:
            self.registry.register(engine, 0.0)
        limits = DispatchLimits(WAITING_MAX, WAIT_S, TRIES)
        scheduler = Scheduler(self.policy, ("once", "push"))
        self.dispatcher = Dispatcher(self.registry, scheduler, limits)
        self.learned: set[int] = set()
        self.pushes: list[tuple[int, str]] = []  # requests, and engines that push for them

    # What the model knows of engines.

    def held(self, name: str) -> int:
        pushed = sum(name == engine for _, engine in self.pushes)
        return pushed + sum(name in one.held for one in self.model.values())

    def promised(self, name: str) -> int:
        return sum(name == one.promised for one in self.model.values())

    def has_room(self, name: str) -> bool:
        engine = self.registry.get(name)
        return engine is not None and self.held(name) < engine.info.max_running

    def usable(self, number: int) -> list[EngineInfo]:
        """Engines that may serve: healthy ones, or suspect ones too if those cannot."""
        known = [
            one for one in self.registry if one.info.id not in self.model[number].excluded
        ]  # fmt: skip
        for bad in ({Health.SUSPECT, Health.DEAD}, {Health.DEAD}):
            well = [one.info for one in known if one.health.state not in bad]
            if any(self.roomless(one, well) for one in well):
                return well
        return []

    def is_push(self, first: EngineInfo, second: EngineInfo) -> bool:
        return first.preferred_protocol == second.preferred_protocol == "push"

    def decoders(self, first: EngineInfo, well: list[EngineInfo]) -> list[EngineInfo]:
        same = [one for one in well if (one.protocol == "once") == (first.protocol == "once")]
        by_role = {role: [one for one in same if one.role is role] for role in Role}
        return by_role[Role.DECODE] or by_role[Role.MIXED]

    def roomless(self, first: EngineInfo, well: list[EngineInfo]) -> bool:
        """Whether an engine could be first, were there room."""
        if first.role is Role.PREFILL:
            return bool(self.decoders(first, well))
        return first.role is Role.MIXED

    def choices(self, number: int) -> set[tuple[str, str]]:
        """All engines and pairs that have room for a request."""
        well = self.usable(number)
        found = set()
        for first in well:
            if not self.roomless(first, well) or not self.has_room(first.id):
                continue
            if first.role is Role.MIXED:
                found.add((first.id, first.id))
                continue
            for second in self.decoders(first, well):
                room = (
                    self.has_room(second.id)
                    if first.protocol == "once" or self.is_push(first, second)
                    else self.promised(second.id) < second.max_running
                )
                if room:
                    found.add((first.id, second.id))
        return found

    # What happens.

    @rule(tokens=st.sampled_from([None, 100, 300_000]))
    def a_request_arrives(self, tokens: int | None) -> None:
        """Of the longest ones a decode engine has memory for one."""
        self.number += 1
        waiting = sum(one.stage == "waits" for one in self.model.values())
        self.dispatcher.arrive(
            Request(number=self.number, model="m", arrived=self.now, tokens=tokens)
        )
        self.model[self.number] = Expected(self.now + WAIT_S)
        if waiting >= WAITING_MAX:
            self.model[self.number].stage = "refused"
        self.run()

    @rule(seconds=st.floats(0.1, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.run()

    def of_stage(self, *stages: str) -> list[int]:
        return [number for number, one in self.model.items() if one.stage in stages]

    @precondition(lambda self: self.of_stage("pushes"))
    @rule(data=st.data())
    def a_decode_engine_begins_to_answer(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.of_stage("pushes")))
        self.model[number].stage = "serves"
        self.dispatcher.began(number, self.now)
        self.run()

    @precondition(lambda self: self.of_stage("serves"))
    @rule(data=st.data())
    def a_first_token_comes(self, data: st.DataObject) -> None:
        """Also once more."""
        self.dispatcher.began(data.draw(st.sampled_from(self.of_stage("serves"))), self.now)
        self.run()

    @precondition(lambda self: self.pushes)
    @rule(data=st.data())
    def a_push_ends(self, data: st.DataObject) -> None:
        """Also that of a request that has ended, has failed or has another pair."""
        at = data.draw(st.integers(0, len(self.pushes) - 1))
        number, name = self.pushes.pop(at)
        self.dispatcher.give_back(number, name, self.now)
        self.run()

    @precondition(lambda self: self.of_stage("prefills"))
    @rule(data=st.data())
    def a_prompt_is_computed(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.of_stage("prefills")))
        one = self.model[number]
        one.held.pop(0)
        self.dispatcher.prefilled(number, self.now)
        if one.at_once:
            one.stage = "serves"
        else:
            one.stage, one.deadline = "arrived", self.now + WAIT_S
        self.run()

    @precondition(lambda self: self.of_stage("serves"))
    @rule(data=st.data())
    def a_request_ends(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.of_stage("serves")))
        self.dispatcher.ended(number, 9, self.now)
        for name in self.model.pop(number).held:
            self.dispatcher.released(number, name, self.now)
        self.dispatcher.left(number, self.now)
        self.run()

    @precondition(lambda self: self.of_stage("serves", "prefills", "pushes"))
    @rule(data=st.data())
    def an_engine_fails(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.of_stage("serves", "prefills", "pushes")))
        one = self.model[number]
        pushes = [push for push in self.pushes if push == (number, one.pushed_by)]
        name = data.draw(st.sampled_from([*one.held, *(engine for _, engine in pushes)]))
        if (number, name) in pushes:
            self.pushes.remove((number, name))
            self.dispatcher.give_back(number, name, self.now)
        self.dispatcher.failed(number, name, "broke", self.now)
        one.excluded.add(name)
        one.held, one.promised, one.deadline = [], "", self.now + WAIT_S
        one.stage = "waits" if one.tries < TRIES else "refused"
        self.run()

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def a_client_goes(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[number]
        self.dispatcher.left(number, self.now)
        self.run()

    @rule(name=st.sampled_from([one.id for one in ENGINES]), well=st.booleans())
    def health_changes(self, name: str, well: bool) -> None:
        engine = self.registry.get(name)
        if engine is not None:
            (engine.health.succeeded if well else engine.health.failed)(self.now)
        self.run()

    @rule(engine=st.sampled_from(ENGINES))
    def an_engine_comes_or_goes(self, engine: EngineInfo) -> None:
        if self.registry.remove(engine.id) is None:
            self.registry.register(engine, self.now)
        else:
            self.dispatcher.forget(engine.id)
        self.run()

    # What must follow.

    def run(self) -> None:
        due = dict(self.dispatcher.due(self.now))
        for number in due:
            self.dispatcher.learn(number, {"p0": Prefix(usable=number)})
            self.learned.add(number)
        before = {number: self.refusable(number) for number in self.of_stage("waits")}
        bound = self.bound()
        for effect in self.dispatcher.step(self.now):
            number = effect.request
            one = self.model[number]
            if isinstance(effect, Assign):
                assert one.stage == "waits"
                if self.policy.needs_prefixes:
                    assert number in (due if self.policy.binds is Binding.ROOM else self.learned)
                self.no_older_one_fits(number, effect.prefill, bound)
                assert (effect.prefill, effect.decode) in self.choices(number)
                self.assigned(one, effect)
            elif isinstance(effect, Continue):
                assert one.stage == "arrived"
                assert self.has_room(effect.decode)
                one.stage, one.promised, one.held = "serves", "", [effect.decode]
            else:
                assert (
                    one.stage == "refused" or one.deadline <= self.now or before.get(number, True)
                )
                del self.model[number]
        for number in self.of_stage("waits"):
            assert self.model[number].deadline > self.now
            assert not self.refusable(number)
        self.waits_with_reason()
        for number in self.of_stage("arrived"):
            assert self.model[number].deadline > self.now
            wanted = self.model[number].promised
            assert not (self.alive(wanted) and self.has_room(wanted))
            assert not any(self.has_room(one.id) for one in self.receivers(number))
        assert not self.of_stage("refused")

    def receivers(self, number: int) -> list[EngineInfo]:
        """Engines that can decode what was computed elsewhere in turn."""
        left = [
            one.info
            for one in self.registry
            if one.health.state is not Health.DEAD
            and one.info.id not in self.model[number].excluded
        ]
        return self.decoders(info("any", "prefill"), self.usable(number) or left)

    def alive(self, name: str) -> bool:
        engine = self.registry.get(name)
        return engine is not None and engine.health.state is not Health.DEAD

    def refusable(self, number: int) -> bool:
        """Whether no engine is left for a request."""
        return not self.usable(number)

    def bound(self) -> dict[int, str]:
        """The engine for which each request waits."""
        return {one.request.number: one.bound for one in self.dispatcher.unassigned}

    def no_older_one_fits(self, number: int, first: str, bound: dict[int, str]) -> None:
        """Requests are considered in order of arrival, unless those that need less go first.

        ``bound``: for which engines they waited before.
        """
        for other in self.of_stage("waits"):
            if other < number and self.policy.binds is Binding.ROOM:
                assert not self.choices(other)
            elif other < number and self.policy.binds is Binding.ARRIVAL:
                takes = {one for one, _ in self.choices(other)}
                assert bound.get(other) != first or first not in takes

    def waits_with_reason(self) -> None:
        """Requests wait only for engines that cannot take them now."""
        bound, choices = self.bound(), {one: self.choices(one) for one in self.of_stage("waits")}
        able = {number: {first for first, _ in those} for number, those in choices.items()}
        if self.policy.binds is Binding.ROOM:
            assert not any(able.values())
        elif self.policy.binds is Binding.ARRIVAL:
            for number, firsts in able.items():
                assert not firsts or bound[number] not in {"", *firsts}
        elif any(able.values()):
            view = self.dispatcher.view(self.now)
            assert view.costs is not None
            busy = view.costs.backlog_s > AHEAD_S
            full = {name for name, has in zip(view.ids, busy, strict=True) if has}
            full |= {name for name in view.ids if not self.has_room(name)}
            for number, firsts in able.items():
                well = self.usable(number)
                could = {one.id for one in well if self.roomless(one, well)}
                assert not firsts or could & full

    def assigned(self, one: Expected, assign: Assign) -> None:
        one.tries += 1
        assert one.tries <= TRIES
        one.at_once = assign.at_once
        if assign.plan is Plan.ALONE:
            one.stage, one.held = "serves", [assign.prefill]
            return
        if assign.protocol == "push":
            one.stage, one.held = "pushes", [assign.decode]
            assert assign.at_once
            self.dispatcher.detach(assign.request, assign.prefill)
            one.pushed_by = assign.prefill
            self.pushes.append((assign.request, assign.prefill))
            return
        one.stage = "prefills"
        one.held = [assign.prefill, assign.decode] if assign.at_once else [assign.prefill]
        one.promised = "" if assign.at_once else assign.decode

    @invariant()
    def places_are_those_of_the_model(self) -> None:
        self.dispatcher.check()
        held = Counter(name for one in self.model.values() for name in one.held)
        held.update(name for _, name in self.pushes)
        for engine in ENGINES:
            assert held[engine.id] == self.dispatcher.in_flight(engine.id) <= engine.max_running
        waiting = self.of_stage("waits", "arrived")
        assert len(self.dispatcher) == len(waiting)
        deadlines = [self.model[number].deadline for number in waiting]
        wake_at = self.dispatcher.wake_at
        if self.policy.binds is Binding.ROOM or not waiting:
            assert wake_at == min(deadlines, default=None)
        else:
            assert wake_at is not None
            assert wake_at <= min(deadlines)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_dispatcher_does_what_its_model_allows(policy: str) -> None:
    run_state_machine_as_test(
        lambda: ModelOfDispatcher(policy),
        settings=settings(max_examples=12, stateful_step_count=40),
    )
