"""What the dispatcher does with arrivals, completions, failures and time.

All time is simulated: the dispatcher runs without an event loop.
"""

import pytest

from conductor.routing.choices import Assign, Continue, Effect, Plan, Reject
from conductor.routing.columns import Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, HandoffOffer, PushOffer, Role
from conductor.routing.policy import POLICIES, Policy
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler

WAIT_S = 5.0
TRIES = 3
WAITING_MAX = 4


def info(
    name: str, role: str, max_running: int = 1, protocol: str = "turn", *, push: bool = False
) -> EngineInfo:
    return EngineInfo(
        id=name, role=Role(role), url="http://x", model="m", page_tokens=4, domain="d",
        max_running=max_running, protocol=protocol,
        handoff=HandoffOffer(PushOffer()) if push else None,
    )  # fmt: skip


def dispatcher_over(
    *engines: EngineInfo, policy: Policy = POLICIES["least-loaded"], tries: int = TRIES
) -> Dispatcher:
    registry = EngineRegistry()
    for engine in engines:
        registry.register(engine, 0.0)
    limits = DispatchLimits(WAITING_MAX, WAIT_S, tries)
    return Dispatcher(registry, Scheduler(policy, ("once", "push")), limits)


def arrive(dispatcher: Dispatcher, *numbers: int, now: float = 0.0) -> list[Effect]:
    for number in numbers:
        dispatcher.arrive(Request(number=number, model="m", arrived=now))
    return dispatcher.step(now)


def numbers(effects: list[Effect]) -> list[int]:
    return [effect.request for effect in effects]


def test_places_are_given_in_order_of_arrival_and_who_waits_too_long_is_refused() -> None:
    dispatcher = dispatcher_over(info("e", "mixed"))
    assert numbers(arrive(dispatcher, 1, 2)) == [1]
    assert dispatcher.wake_at == WAIT_S
    assert numbers(arrive(dispatcher, 3, now=1.0)) == []
    assert dispatcher.step(WAIT_S - 0.1) == []
    [refused] = dispatcher.step(WAIT_S)
    assert isinstance(refused, Reject)
    assert (refused.request, refused.code, refused.status) == (2, "queue_timeout", 503)
    dispatcher.released(1, "e", 5.5)
    assert numbers(dispatcher.step(5.5)) == [3]
    assert (len(dispatcher), dispatcher.wake_at) == (0, None)


def test_a_full_queue_refuses_who_comes_but_not_who_failed() -> None:
    dispatcher = dispatcher_over(info("e", "mixed"), info("f", "mixed"))
    arrive(dispatcher, 1, 2)
    [refused] = arrive(dispatcher, 3, 4, 5, 6, 7)
    assert isinstance(refused, Reject)
    assert (refused.request, refused.code, refused.status) == (7, "queue_full", 429)
    dispatcher.failed(1, "e", "broke", 1.0)
    [third] = dispatcher.step(1.0)
    assert (third.request, third.prefill) == (3, "e")  # the first one has failed there
    dispatcher.released(2, "f", 2.0)
    [first] = dispatcher.step(2.0)
    assert (first.request, first.prefill) == (1, "f")


def test_after_the_last_try_a_request_is_refused_with_the_last_error() -> None:
    dispatcher = dispatcher_over(*(info(name, "mixed") for name in "efg"), tries=2)
    used = []
    [assign] = arrive(dispatcher, 1)
    for _ in range(2):
        assert isinstance(assign, Assign)
        used.append(assign.prefill)
        dispatcher.failed(1, assign.prefill, f"{assign.prefill} broke", 0.0)
        [assign] = dispatcher.step(0.0)
    assert isinstance(assign, Reject)
    assert assign.code == "engines_failed"
    assert assign.reason == f"2 tries failed; the last error: {used[1]} broke"
    assert len(set(used)) == 2
    dispatcher.check()


def test_clients_are_told_to_come_back_as_fast_as_requests_end() -> None:
    registry = EngineRegistry()
    registry.register(info("e", "mixed", 100), 0.0)
    limits = DispatchLimits(200, 1e9, 1)
    dispatcher = Dispatcher(registry, Scheduler(POLICIES["least-loaded"]), limits)
    arrive(dispatcher, *range(120))
    assert dispatcher.retry_after_s == 20
    for ended in range(100):
        dispatcher.released(ended, "e", 0.1 * ended)
    assert dispatcher.retry_after_s == 3


def test_how_fast_requests_end_is_not_learned_while_nobody_waits() -> None:
    registry = EngineRegistry()
    registry.register(info("e", "mixed", 2), 0.0)
    limits = DispatchLimits(20, 1e9, 1)
    dispatcher = Dispatcher(registry, Scheduler(POLICIES["least-loaded"]), limits)
    now, number = 0.0, 0
    for _ in range(50):
        arrive(dispatcher, number := number + 1, now=now)
        dispatcher.left(number, now + 1.0)
        now += 3_600.0
    arrive(dispatcher, number + 1, number + 2, number + 3, number + 4, number + 5, now=now)
    assert dispatcher.retry_after_s == 3
    for one in range(number + 1, number + 4):
        now += 2.0
        dispatcher.left(one, now)
        dispatcher.step(now)
    arrive(dispatcher, *range(number + 6, number + 16), now=now)
    assert dispatcher.retry_after_s == 12, "the two intervals at whose ends somebody waited"
    dispatcher.check()


def test_a_request_whose_client_has_gone_gets_nothing() -> None:
    dispatcher = dispatcher_over(info("e", "mixed"))
    arrive(dispatcher, 1, 2, 3)
    dispatcher.left(2, 1.0)
    dispatcher.left(2, 1.0)
    dispatcher.left(1, 1.0)
    assert numbers(dispatcher.step(1.0)) == [3]


def test_in_turn_the_place_to_decode_is_taken_when_the_kv_arrives() -> None:
    dispatcher = dispatcher_over(info("p", "prefill", 2), info("d", "decode"))
    assert numbers(arrive(dispatcher, 1, 2)) == [1]  # as many are promised as there are places
    assert (dispatcher.in_flight("p"), dispatcher.in_flight("d")) == (1, 0)
    dispatcher.prefilled(1, 1.0)
    effects = dispatcher.step(1.0)
    assert [(type(one), one.request) for one in effects] == [(Continue, 1), (Assign, 2)]
    assert (dispatcher.in_flight("p"), dispatcher.in_flight("d")) == (1, 1)
    dispatcher.prefilled(2, 2.0)  # while the first one decodes
    assert dispatcher.step(2.0) == []
    assert (len(dispatcher), dispatcher.wake_at) == (1, 2.0 + WAIT_S)
    dispatcher.released(1, "d", 3.0)
    assert dispatcher.step(3.0) == [Continue(2, "d", None)]


def test_at_once_the_place_to_decode_is_taken_while_the_prompt_is_computed() -> None:
    dispatcher = dispatcher_over(
        info("p", "prefill", 2, "once"), info("d", "decode", 1, "once")
    )  # fmt: skip
    assert numbers(arrive(dispatcher, 1, 2)) == [1]
    assert (dispatcher.in_flight("p"), dispatcher.in_flight("d")) == (1, 1)
    dispatcher.prefilled(1, 1.0)
    assert dispatcher.step(1.0) == []
    assert (dispatcher.in_flight("p"), dispatcher.in_flight("d")) == (0, 1)
    dispatcher.released(1, "d", 2.0)
    assert numbers(dispatcher.step(2.0)) == [2]


def test_a_detached_place_is_taken_until_it_is_given_back_whatever_the_request_does() -> None:
    dispatcher = dispatcher_over(
        info("p", "prefill", push=True), info("d0", "decode", push=True),
        info("d1", "decode", push=True),
    )  # fmt: skip
    [assign] = arrive(dispatcher, 1)
    assert isinstance(assign, Assign)
    assert (assign.protocol, assign.at_once) == ("push", True)
    dispatcher.detach(1, "p")
    dispatcher.failed(1, assign.decode, "broke", 1.0)
    assert dispatcher.step(1.0) == []  # the one prefill engine still pushes
    assert [dispatcher.in_flight(name) for name in ("p", "d0", "d1")] == [1, 0, 0]
    dispatcher.left(1, 2.0)
    assert arrive(dispatcher, 2, now=2.0) == []
    dispatcher.check()
    dispatcher.give_back(1, "p", 3.0)
    assert numbers(dispatcher.step(3.0)) == [2]
    dispatcher.check()


def test_a_pair_is_asked_by_what_both_offer_and_else_by_its_protocol() -> None:
    p = info("p", "prefill", 9, push=True)
    pushed, stored = info("d0", "decode", push=True), info("d1", "decode", 2)
    dispatcher = dispatcher_over(p, pushed, stored)
    found = {
        one.decode: (one.protocol, one.at_once)
        for one in arrive(dispatcher, 1, 2) if isinstance(one, Assign)
    }  # fmt: skip
    assert found == {"d0": ("push", True), "d1": ("turn", False)}
    # The one that is full takes no push, though another KV could be promised to it.
    assert [one.decode for one in arrive(dispatcher, 3) if isinstance(one, Assign)] == ["d1"]
    assert arrive(dispatcher, 4) == []


def test_kv_goes_to_another_decode_engine_if_the_chosen_one_is_full_or_gone() -> None:
    registry = EngineRegistry()
    for one in (info("p", "prefill", 9), info("d0", "decode"), info("d1", "decode")):
        registry.register(one, 0.0)
    limits = DispatchLimits(WAITING_MAX, WAIT_S, TRIES)
    dispatcher = Dispatcher(registry, Scheduler(POLICIES["least-loaded"]), limits)
    chosen = {
        one.request: one.decode for one in arrive(dispatcher, 1, 2) if isinstance(one, Assign)
    }
    assert set(chosen.values()) == {"d0", "d1"}
    gone, other = chosen[1], chosen[2]
    registry.remove(gone)
    dispatcher.forget(gone)
    dispatcher.prefilled(1, 1.0)
    assert dispatcher.step(1.0) == [Continue(1, other, None)]
    dispatcher.prefilled(2, 1.0)
    assert dispatcher.step(1.0) == []  # the first one has the place that was meant for it
    registry.register(info(gone, "decode"), 2.0)
    assert dispatcher.step(2.0) == [Continue(2, gone, None)]
    dispatcher.check()


def test_kv_that_waits_too_long_or_for_nobody_is_refused() -> None:
    registry = EngineRegistry()
    for one in (info("p", "prefill", 9), info("d", "decode", 2)):
        registry.register(one, 0.0)
    limits = DispatchLimits(WAITING_MAX, WAIT_S, TRIES)
    dispatcher = Dispatcher(registry, Scheduler(POLICIES["least-loaded"]), limits)
    arrive(dispatcher, 1, 2)
    for number in (1, 2):
        dispatcher.prefilled(number, 0.0)
    dispatcher.step(0.0)
    arrive(dispatcher, 3, 4, now=1.0)
    for number in (3, 4):
        dispatcher.prefilled(number, 2.0)
    assert dispatcher.step(2.0 + WAIT_S - 0.1) == []
    late = dispatcher.step(2.0 + WAIT_S)
    assert [(type(one), one.request) for one in late] == [(Reject, 3), (Reject, 4)]
    arrive(dispatcher, 5, now=8.0)
    dispatcher.prefilled(5, 9.0)
    engine = registry.get("d")
    assert engine is not None
    for _ in range(3):
        engine.health.failed(9.0)
    [refused] = dispatcher.step(9.0)
    assert isinstance(refused, Reject)
    assert refused.code == "no_engine"
    dispatcher.check()


def test_one_free_place_to_decode_is_given_to_the_oldest_of_those_who_wait_for_it() -> None:
    dispatcher = dispatcher_over(info("p", "prefill", 4), info("d", "decode", 2))
    for number in range(1, 5):
        arrive(dispatcher, number)
        dispatcher.prefilled(number, 1.0)
        dispatcher.step(1.0)
    assert (dispatcher.in_flight("d"), len(dispatcher)) == (2, 2)
    dispatcher.released(2, "d", 2.0)
    assert dispatcher.step(2.0) == [Continue(3, "d", None)]
    dispatcher.left(1, 3.0)
    assert dispatcher.step(3.0) == [Continue(4, "d", None)]


def test_the_policy_orders_those_whose_kv_waits_too() -> None:
    last_first = POLICIES["least-loaded"]._replace(
        order=lambda waiting, _: range(len(waiting) - 1, -1, -1)
    )
    dispatcher = dispatcher_over(
        info("p", "prefill", 4), info("d", "decode", 2), policy=last_first
    )  # fmt: skip
    for number in range(1, 5):
        dispatcher.arrive(Request(number=number, model="m", arrived=0.0))
        dispatcher.step(0.0)
        dispatcher.prefilled(number, 1.0)
        dispatcher.step(1.0)
    dispatcher.released(1, "d", 2.0)
    assert dispatcher.step(2.0) == [Continue(4, "d", None)]


def test_engines_of_different_protocols_are_no_pair_if_both_are_asked_at_once() -> None:
    dispatcher = dispatcher_over(info("p", "prefill", 2, "once"), info("d", "decode"))
    [refused] = arrive(dispatcher, 1)
    assert isinstance(refused, Reject)
    assert "speak the same protocol: once, turn" in refused.reason
    mixed = dispatcher_over(info("p", "prefill", 2, "turn"), info("d", "decode", 1, "other"))
    [assign] = arrive(mixed, 1)
    assert isinstance(assign, Assign)
    assert (assign.plan, assign.protocol) == (Plan.PAIR, "turn")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_it_runs_in_simulated_time_without_an_event_loop(policy: str) -> None:
    """A day of requests, each served for five minutes, takes no time."""
    dispatcher = dispatcher_over(
        *(info(name, "mixed", 4) for name in "efg"), policy=POLICIES[policy]
    )
    served = 0
    ends: list[tuple[float, int, str]] = []
    for number in range(1, 25 * 60):
        now = 60.0 * number
        while ends and ends[0][0] <= now:
            at, done, engine = ends.pop(0)
            dispatcher.released(done, engine, at)
            dispatcher.left(done, at)
        dispatcher.arrive(Request(number=number, model="m", arrived=now))
        for one, _ in dispatcher.due(now):
            dispatcher.learn(one, {"e": Prefix(usable=one % 7)})
        for effect in dispatcher.step(now):
            assert isinstance(effect, Assign)
            ends.append((now + 300.0, effect.request, effect.prefill))
            served += 1
    assert served == 25 * 60 - 1


def fail_for(
    dispatcher: Dispatcher, name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a function of its loads raise for one request."""
    real = getattr(dispatcher.loads, name)

    def broken(one: int, *args: object, **options: object) -> None:
        if one == number:
            raise KeyError("a bug")
        real(one, *args, **options)

    monkeypatch.setattr(dispatcher.loads, name, broken)


@pytest.mark.parametrize("engines", [[("e", "mixed")], [("p", "prefill"), ("d", "decode")]])
def test_an_assignment_that_fails_costs_its_request_alone(
    engines: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = dispatcher_over(*(info(name, role, 3) for name, role in engines))
    fail_for(dispatcher, "assigned", 2, monkeypatch)
    with pytest.raises(KeyError):
        arrive(dispatcher, 1, 2, 3)
    first, second = dispatcher.decided()
    assert isinstance(first, Assign)
    assert isinstance(second, Reject)
    assert (second.request, second.code, second.status) == (2, "internal", 500)
    dispatcher.check()
    assert dispatcher.decided() == []

    assert numbers(dispatcher.step(0.0)) == [3]
    assert dispatcher.in_flight(engines[0][0]) == 2
    for number in (1, 2, 3):
        dispatcher.left(number, 0.0)
    dispatcher.check()


def test_a_place_to_decode_that_cannot_be_given_costs_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = dispatcher_over(info("p", "prefill", 3), info("d", "decode", 3))
    arrive(dispatcher, 1, 2, 3)
    for number in (1, 2, 3):
        dispatcher.prefilled(number, 1.0)
    fail_for(dispatcher, "hands_over", 2, monkeypatch)
    with pytest.raises(KeyError):
        dispatcher.step(1.0)
    first, second = dispatcher.decided()
    assert (type(first), type(second)) == (Continue, Reject)
    dispatcher.check()

    assert numbers(dispatcher.step(1.0)) == [3]
    assert dispatcher.in_flight("d") == 2


def test_a_request_that_cannot_be_removed_holds_up_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = dispatcher_over(info("e", "mixed", 1))
    assert numbers(arrive(dispatcher, 1)) == [1]
    assert arrive(dispatcher, 2) == []
    fail_for(dispatcher, "sent", 2, monkeypatch)
    with pytest.raises(KeyError):
        dispatcher.left(2, 1.0)
    dispatcher.left(1, 1.0)

    assert numbers(arrive(dispatcher, 3)) == [3]
