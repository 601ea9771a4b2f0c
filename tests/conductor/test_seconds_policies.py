"""Policies with costs in seconds: beside a brute-force model, and what each of them is for."""

import heapq
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import CostBook, EngineCosts, Machine
from conductor.costs.prior import transfer_seconds
from conductor.routing.choices import Assign, Hold
from conductor.routing.columns import Matches, Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.joining import RankEvents
from conductor.routing.load import EngineLoads
from conductor.routing.policy import AGING, KVCACHE_BALANCING_THRESHOLD, POLICIES, WORK
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from tests.conductor.columns import NOW, EngineRow, engine, request, schedule
from tests.conductor.seeded_load import LOADS, SeededLoad
from tests.conductor.test_recorded_decisions import Simulated

PRIOR = EngineCosts(Machine("llama3-70b", "h800", 8)).prior
"""Of all engines in these views."""
SECONDS = ("cache-local", "cache-global", "earliest-first-token")
TOKENS = 32_768


def fetches(policy: str, usable: int, reached: int, fetched_s: float, computed_s: float) -> bool:
    if reached <= usable or policy == "cache-local":
        return False
    if policy == "cache-global":
        return usable == 0 or reached / usable > KVCACHE_BALANCING_THRESHOLD
    return fetched_s < computed_s


def seconds_at(policy: str, row: EngineRow, prefix: Prefix) -> tuple[float, float]:
    """What a prompt costs at a mixed engine, by the prior's scalars; and until its first token."""
    usable = min(prefix.usable, TOKENS - 1)
    reached = min(prefix.usable + prefix.peer, TOKENS - 1)
    computed_s = PRIOR.prefill_seconds(TOKENS - usable, usable)
    fetched_s = transfer_seconds(PRIOR.kv_bytes(reached - usable), PRIOR.network)
    rest_s = PRIOR.prefill_seconds(TOKENS - reached, reached)
    fetched = fetches(policy, usable, reached, fetched_s + rest_s, computed_s)
    ttft_s = row.backlog_s + (fetched_s + rest_s if fetched else computed_s)
    late = policy == "earliest-first-token"
    return ttft_s + (WORK * (rest_s if fetched else computed_s) if late else 0.0), ttft_s


@st.composite
def places(draw: st.DrawFn) -> tuple[list[EngineRow], Matches]:
    rows = [
        engine(f"e{at}", backlog_s=draw(st.sampled_from([0.0, 0.01, 0.3, 2.0])))
        for at in range(draw(st.integers(1, 6)))
    ]
    tokens = st.sampled_from([0, 0, 512, 8192, 30_000, TOKENS])
    local = {row.id: draw(tokens) for row in rows}
    matches = {name: Prefix(own, 0, own, None, draw(tokens)) for name, own in local.items()}
    return rows, matches


@pytest.mark.parametrize("policy", SECONDS)
@given(places())
def test_the_engine_is_the_one_that_a_brute_force_model_takes(
    policy: str, case: tuple[list[EngineRow], Matches]
) -> None:
    rows, matches = case
    [decision] = schedule(policy, rows, [request(tokens=TOKENS)], matches)
    every = {row.id: seconds_at(policy, row, matches[row.id]) for row in rows}
    least = min(cost for cost, _ in every.values())
    best = {name for name, (cost, _) in every.items() if cost <= least * (1 + 1e-9)}

    if isinstance(decision, Assign):
        assert decision.prefill in best
        ttft_s = every[decision.prefill][1]
        assert decision.ttft_s == pytest.approx(ttft_s)
        shown = {one.engine: one for one in decision.candidates}
        one = shown[decision.prefill]
        terms = (one.queue_s, one.fetch_s, one.prefill_s, one.handoff_s)
        assert sum(term or 0.0 for term in terms) == pytest.approx(ttft_s, rel=1e-3, abs=1e-5)
    else:
        assert policy == "earliest-first-token", "the others take places at once"
        assert isinstance(decision, Hold)
        busy = {row.id for row in rows if row.backlog_s > 0.02}
        assert best & busy, "it waits only for a better engine that is not free"


def test_with_nothing_of_its_own_an_engine_fetches_whatever_the_threshold() -> None:
    rows = [engine("has", backlog_s=9.0), engine("idle")]
    matches = {"has": Prefix(8192, 0, 8192), "idle": Prefix(0, 0, 0, None, 8192)}
    asked = [request(tokens=TOKENS)]
    [local], [far] = (schedule(one, rows, asked, matches) for one in SECONDS[:2])

    assert isinstance(local, Assign)
    assert isinstance(far, Assign)
    assert (far.prefill, far.fetch_tokens) == ("idle", 8192)
    assert (local.prefill, local.fetch_tokens) == ("idle", 0)


def test_a_request_that_is_bound_waits_for_its_engine_and_another_does_not() -> None:
    rows = [engine("full", in_flight=4), engine("idle")]
    bound = request(1, tokens=100, bound="full", arrived=NOW)
    free = request(2, tokens=100)
    waits, goes = schedule("cache-global", rows, [bound, free])

    assert waits == Hold(1, "full")
    assert isinstance(goes, Assign)


def test_who_has_a_prefix_at_a_full_engine_is_bound_to_it_at_arrival() -> None:
    rows = [engine("full", in_flight=4, backlog_s=0.1), engine("idle")]
    matches = {"full": Prefix(30_000, 0, 30_000)}

    assert schedule("cache-global", rows, [request(tokens=TOKENS)], matches) == [Hold(1, "full")]


def test_a_late_engine_gets_its_next_prompt_when_it_is_about_to_need_one() -> None:
    soon, later = engine("e", backlog_s=0.01), engine("e", backlog_s=0.5)
    asked = [request(1, tokens=100), request(2, tokens=TOKENS)]

    assert [type(one) for one in schedule("earliest-first-token", [soon], asked)] == [Assign, Hold]
    assert [type(one) for one in schedule("earliest-first-token", [later], asked)] == [Hold, Hold]


def test_who_needs_least_goes_first_unless_the_other_has_waited_long() -> None:
    short = request(2, tokens=8000, least_s=0.1, arrived=NOW)
    long = request(1, tokens=TOKENS, least_s=2.0, arrived=NOW)
    older = request(1, tokens=TOKENS, least_s=2.0, arrived=NOW - 1.9 / AGING - 1)
    recent = request(1, tokens=TOKENS, least_s=2.0, arrived=NOW - 1.9 / AGING + 1)

    for first, expected in ((long, 2), (recent, 2), (older, 1)):
        decisions = schedule("earliest-first-token", [engine("e")], [first, short])
        assert [one.request for one in decisions if isinstance(one, Assign)] == [expected]


def test_a_cold_burst_of_one_long_prefix_stays_together() -> None:
    keys = np.arange(64, dtype=np.uint64)
    asked = [
        request(number, tokens=TOKENS, least_s=1.0, keys=np.append(keys[:-1], keys[-1:] + number))
        for number in range(1, 4)
    ]
    first, *others = schedule("earliest-first-token", [engine("a"), engine("b")], asked)

    assert isinstance(first, Assign)
    assert all(isinstance(one, Hold) for one in others), "they wait for what it computes"
    cold = [request(number, tokens=TOKENS, least_s=1.0) for number in range(1, 4)]
    decisions = schedule("earliest-first-token", [engine("a"), engine("b")], cold)
    assert [type(one) for one in decisions] == [Assign, Assign, Hold]


def test_a_hot_prefix_spreads_before_its_engine_has_a_queue() -> None:
    rows = [engine("hot", backlog_s=3.0), engine("idle")]
    matches = {"hot": Prefix(TOKENS, 0, TOKENS)}
    [decision] = schedule("earliest-first-token", rows, [request(tokens=TOKENS)], matches)

    assert isinstance(decision, Assign)
    assert decision.prefill == "idle"


def test_the_decode_engine_is_one_with_room_for_the_kv_and_the_shortest_steps() -> None:
    registry = EngineRegistry()
    for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
        registry.register(info(name, role), 0.0)
    desk = dispatcher(registry, "earliest-first-token")
    used = []
    for number in range(1, 7):
        desk.arrive(Request(number=number, model="m", arrived=number, tokens=8192))
        [effect] = decided(desk, float(number))
        assert isinstance(effect, Assign)
        used.append(effect.decode)
        desk.prefilled(number, number + 0.5)
        desk.step(number + 0.5)
        desk.check()

    assert all(a != b for a, b in itertools.pairwise(used)), "they get them in turn"


def info(name: str, role: str, places: int = 8) -> EngineInfo:
    return EngineInfo(
        id=name, role=Role(role), url="http://x", model="m", page_tokens=4, domain="d",
        max_running=places, shape="llama3-70b", hardware="8xh800",
    )  # fmt: skip


def dispatcher(registry: EngineRegistry, policy: str) -> Dispatcher:
    return Dispatcher(registry, Scheduler(POLICIES[policy]), DispatchLimits(100, 60.0, 3))


def decided(desk: Dispatcher, now: float) -> list[object]:
    for number, _ in desk.due(now):
        desk.learn(number, {})
    return list(desk.step(now))


@pytest.mark.parametrize("policy", SECONDS)
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=30), st.integers(1, 3))
def test_every_prompt_is_computed_and_no_engine_waits_for_its_next(
    policy: str, prompts: list[int], count: int
) -> None:
    registry = EngineRegistry()
    for at in range(count):
        registry.register(info(f"e{at}", "mixed", 1), 0.0)
    desk, now, served = dispatcher(registry, policy), 0.0, 0
    for number, tokens in enumerate(prompts, 1):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=tokens))
    running: list[tuple[float, int]] = []

    def decide() -> None:
        for one in decided(desk, now):
            if isinstance(one, Assign):
                heapq.heappush(running, (now + one.prefill_s, one.request))

    decide()
    while running:
        if policy == "earliest-first-token":
            assert not len(desk) or len(running) == count, "an engine waits, and requests do"
        now, number = heapq.heappop(running)
        desk.began(number, now)
        desk.ended(number, 1, now)
        desk.left(number, now)
        desk.check()
        served += 1
        decide()

    assert served == len(prompts)


def test_a_request_that_is_said_to_decode_twice_counts_once() -> None:
    registry = EngineRegistry()
    registry.register(info("p", "prefill"), 0.0)
    registry.register(info("d", "decode"), 0.0)
    desk = dispatcher(registry, "earliest-first-token")

    def room() -> float:
        costs = desk.view(0.0).costs
        assert costs is not None
        return float(costs.kv_room[1])

    empty = room()
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=8192))
    decided(desk, 0.0)
    desk.prefilled(1, 1.0)
    decided(desk, 1.0)
    desk.began(1, 1.5)  # the first byte
    desk.began(1, 1.6)
    desk.check()
    assert room() == empty - 8192
    desk.left(1, 2.0)
    assert room() == empty


def test_those_who_wait_for_one_model_hold_no_engine_of_another() -> None:
    rows = [engine("near", backlog_s=0.1), engine("far"), engine("other", model="n")]
    matches = {"near": Prefix(TOKENS, 0, TOKENS)}
    asked = [request(number, tokens=TOKENS) for number in range(1, 18)]
    *held, last = schedule(
        "earliest-first-token", rows, [*asked, request(18, model="n", tokens=TOKENS)], matches
    )

    assert all(isinstance(one, Hold) for one in held)
    assert isinstance(last, Assign)


@pytest.mark.parametrize(
    "told", [10**400, -(10**400), -1], ids=["huge", "hugely negative", "negative"]
)
def test_what_an_engine_cannot_have_counted_is_survived(told: int) -> None:
    desk = over_one()
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=8192))
    decided(desk, 0.0)
    desk.began(1, 1.0, told)
    desk.ended(1, told, 2.0)
    desk.left(1, 2.0)
    desk.check()
    factors = desk.loads.gauges()["cost_factor"].values()
    assert np.isfinite(list(factors)).all()


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


def over_one(places: int = 64, policy: str = "earliest-first-token") -> Dispatcher:
    """A dispatcher over one mixed engine "e"."""
    registry = EngineRegistry()
    registry.register(info("e", "mixed", places), 0.0)
    return dispatcher(registry, policy)


def given_until(desk: Dispatcher, until: float, *, told: bool) -> dict[int, float]:
    """When each of those who wait got its engine, if no answer comes."""
    now, got = 0.0, {}
    while now <= until:
        for one in decided(desk, now):
            if isinstance(one, Assign):
                got[one.request] = now
                if not told:
                    desk.loads.untold(one.request, one.prefill)
        desk.check()
        wake = desk.wake_at
        if wake is None:
            break
        assert wake > now
        now = wake
    return got


def test_answers_that_come_as_a_whole_keep_no_engine_idle_until_they_end() -> None:
    desk = over_one()
    for number in range(1, 21):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=8192))
    prompt_s = PRIOR.prefill_seconds(8192, 0)
    got = given_until(desk, 59.0, told=False)

    assert len(got) == 20
    assert max(got.values()) == pytest.approx(19 * prompt_s, rel=0.1)


def test_a_prompt_that_is_far_too_late_holds_nobody_up_and_still_teaches() -> None:
    desk = over_one()
    for number in range(1, 6):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=8192))
    assert len(given_until(desk, 59.0, told=True)) == 5

    assert not desk.loads.gauges()["cost_error"]
    desk.began(1, 60.0)
    desk.check()
    assert desk.loads.gauges()["cost_error"]
    for number in range(1, 6):
        desk.left(number, 61.0)
        desk.check()
    costs = desk.view(61.0).costs
    assert costs is not None
    assert not costs.backlog_s.any()


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("load", sorted(LOADS))
@pytest.mark.parametrize("policy", SECONDS)
def test_a_load_with_failures_and_engines_that_go_leaves_nothing_behind(
    policy: str, load: str, in_turn: bool
) -> None:
    seeded = SeededLoad(LOADS[load], f"{load}/seconds", in_turn=in_turn)
    driven = Simulated(seeded, policy)
    log = seeded.run(driven)

    assert log
    assert len(driven.dispatcher) == 0
    costs = driven.dispatcher.view(0.0).costs
    assert costs is not None
    assert not costs.backlog_s.any(), "no engine is thought to have prompts"
    assert not costs.coming_bytes.any(), "or KV on its way"
    places = {spec.id: spec.max_running for spec in LOADS[load]}
    assert all(most <= places[name] for name, most in seeded.most.items())


def test_steps_are_estimated_anew_when_an_engine_registers_with_other_hardware_or_ranks() -> None:
    loads = EngineLoads(CostBook())
    small = info("e", "mixed")
    large = msgspec.structs.replace(small, hardware="8xh200")
    ranks = tuple(RankEvents(rank, None, None, None) for rank in range(4))

    def step_s(one: EngineInfo) -> float:
        return float(loads.columns([one], 0.0).step_s[0])

    for number in range(1, 60):
        loads.decodes(number, small, 20_000, 0.0)
    before = step_s(small)
    assert step_s(large) < before
    assert step_s(small) == before
    assert step_s(msgspec.structs.replace(small, ranks=ranks)) < before


def test_an_answer_that_is_not_streamed_decodes_when_its_prompt_should_be_computed() -> None:
    desk = over_one()
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=8192))
    [assign] = decided(desk, 0.0)
    assert isinstance(assign, Assign)
    desk.loads.untold(1, "e")

    def seen(now: float) -> tuple[float, float, float]:
        costs = desk.view(now).costs
        assert costs is not None
        return float(costs.backlog_s[0]), float(costs.kv_room[0]), float(costs.step_s[0])

    computing, decoding = seen(assign.prefill_s / 2), seen(assign.prefill_s * 2)
    assert computing[0] > decoding[0] == 0
    assert computing[1] - decoding[1] == 8192
    assert computing[2] < decoding[2]
    desk.check()
    desk.ended(1, 500, 1.0)
    assert desk.loads.gauges()["cost_error"] == {}, "nobody knows when its first token came"
    desk.left(1, 1.0)
    assert seen(2.0)[1:] == computing[1:]
    desk.check()
