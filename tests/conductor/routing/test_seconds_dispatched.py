"""Policies with costs in seconds at the dispatcher: loads of many prompts, and what ends them."""

import heapq
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import CostBook, EngineCosts, Machine
from conductor.routing.choices import Assign, Continue
from conductor.routing.columns import Prefix
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.joining import RankEvents
from conductor.routing.load import EngineLoads
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from conductor.routing.work import NO_ANSWER, Answer
from tests.conductor.routing.seeded_load import LOADS, SeededLoad
from tests.conductor.routing.test_recorded_decisions import Simulated

PRIOR = EngineCosts(Machine("llama3-70b", "h800", 8)).prior
SECONDS = ("cache-local", "cache-global", "earliest-first-token")
TOKENS = 32_768


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
        return float(costs.inputs.kv_room[1])

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


def test_the_terms_of_a_pair_are_those_with_the_decode_engine_that_was_chosen() -> None:
    """The links of d1 are full, so d0 looks better, but the slow link of p has less to send to d1.

    What is shown, and the first token that is predicted, is of the latter.
    """
    registry = EngineRegistry()
    slow = msgspec.structs.replace(info("p", "prefill"), hardware="4xl40s")
    for one in (slow, info("d0", "decode"), info("d1", "decode")):
        registry.register(one, 0.0)
    desk = dispatcher(registry, "earliest-first-token")
    for number in range(100, 103):
        desk.loads.hands_over(number, info("d1", "decode"), 60_000, 0.0)
        desk.loads.decodes(number, info("d1", "decode"), 100, 0.0)
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=16_384))
    step_s = desk.loads.step_s(info("d1", "decode"))
    desk.due(0.0)
    desk.learn(1, {"d1": Prefix(local=12_000, usable=12_000)})
    [assign] = desk.step(0.0)

    assert isinstance(assign, Assign)
    assert (assign.prefill, assign.decode) == ("p", "d1")
    [first] = [one for one in assign.candidates if one.engine == "p"]
    arrives_s = PRIOR.kv_bytes(4_384 + 3 * 60_000) / PRIOR.network.bytes_per_s
    assert first.handoff_s == pytest.approx(PRIOR.handoff_s + arrives_s, abs=1e-5)
    assert first.tbt_s == pytest.approx(step_s, abs=1e-6)
    terms = (first.queue_s, first.fetch_s, first.prefill_s, first.handoff_s)
    assert assign.ttft_s == pytest.approx(sum(one or 0.0 for one in terms), abs=1e-5)
    other, chosen = (one for one in assign.candidates if one.engine != "p")
    assert (chosen.handoff_s, chosen.tbt_s) == (first.handoff_s, first.tbt_s)
    assert other.handoff_s is not None
    assert other.handoff_s > first.handoff_s, "16,384 tokens over the slow link of p"
    assert other.tbt_s == pytest.approx(desk.loads.step_s(info("d0", "decode")), abs=1e-6)
    assert other.queue_s is chosen.queue_s is None, "they compute no prompts"


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("elsewhere", [True, False])
def test_steps_are_learned_from_the_first_token_on_wherever_a_request_decodes(
    streamed: bool, elsewhere: bool
) -> None:
    """Not from the handoff on; of an answer that is not streamed its first token is unknown."""
    registry = EngineRegistry()
    for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
        registry.register(info(name, role), 0.0)
    desk = dispatcher(registry, "earliest-first-token")
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=8192))
    [assign] = decided(desk, 0.0)
    assert isinstance(assign, Assign)
    if elsewhere:
        registry.remove(assign.decode)
        desk.forget(assign.decode)
    desk.prefilled(1, 1.0)
    [then] = desk.step(1.0)
    assert isinstance(then, Continue)
    assert (then.decode != assign.decode) == elsewhere
    decoder = registry.get(then.decode)
    assert decoder is not None
    costs = desk.loads.costs(decoder.info)
    step_s = costs.step_seconds(1.0, 8192.0)
    if streamed:
        desk.began(1, 3.0)
    desk.ended(1, 11, 3.0 + 10 * step_s)
    desk.check()

    assert costs.step_fit.count == streamed
    assert costs.step_bias.factor == pytest.approx(1.0)


def test_kv_leaves_an_engine_one_prompt_after_the_other() -> None:
    registry = EngineRegistry()
    registry.register(info("p", "prefill"), 0.0)
    registry.register(info("d", "decode"), 0.0)
    desk = dispatcher(registry, "earliest-first-token")

    def leaving_s(now: float) -> float:
        costs = desk.view(now).costs
        assert costs is not None
        return float(costs.leaving_s[0])

    for number in (1, 2, 3):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=8192))
    (first,) = decided(desk, 0.0)
    assert isinstance(first, Assign)
    sends_s = leaving_s(0.0) - first.prefill_s
    assert sends_s > 0
    assert leaving_s(first.prefill_s) == pytest.approx(sends_s)
    assert leaving_s(9.0) == 0.0

    desk.prefilled(1, 0.0)  # much earlier than was thought
    (second,) = [one for one in decided(desk, 0.0) if isinstance(one, Assign)]
    assert leaving_s(0.0) == pytest.approx(first.prefill_s + 2 * sends_s)
    desk.left(second.request, 0.0)  # the client has gone: it is not computed, and does not leave
    assert leaving_s(0.0) == pytest.approx(first.prefill_s + sends_s)
    desk.check()


def test_kv_that_arrives_sooner_than_was_thought_makes_no_engine_seem_busier_for_good() -> None:
    registry = EngineRegistry()
    registry.register(info("p", "prefill"), 0.0)
    registry.register(info("d", "decode"), 0.0)
    desk = dispatcher(registry, "earliest-first-token")

    def leaving_s() -> float:
        costs = desk.view(0.0).costs
        assert costs is not None
        return float(costs.leaving_s[0])

    for number in range(1, 9):
        desk.arrive(Request(number=number, model="m", arrived=0.0, tokens=8192))
        [assign] = decided(desk, 0.0)
        assert isinstance(assign, Assign)
        assert leaving_s() > 0.0
        desk.prefilled(number, 0.0)
        decided(desk, 0.0)
        if number % 2:
            desk.began(number, 0.0)  # its first byte: all of its KV is there
        desk.left(number, 0.0)
        desk.check()
        assert leaving_s() == 0.0, "nothing is left to send"


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
    for number in range(1, 6):
        desk.left(number, 61.0)
        desk.check()
    assert desk.loads.gauges()["cost_error"]
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
    assert not costs.inputs.coming_bytes.any(), "or KV on its way"
    assert not driven.dispatcher.loads._senders
    places = {spec.id: spec.max_running for spec in LOADS[load]}
    assert all(most <= places[name] for name, most in seeded.most.items())


def test_steps_are_estimated_anew_when_an_engine_registers_with_other_hardware_or_ranks() -> None:
    loads = EngineLoads(CostBook())
    small = info("e", "mixed")
    large = msgspec.structs.replace(small, hardware="8xh200")
    ranks = tuple(RankEvents(rank, None, None, None) for rank in range(4))

    def step_s(one: EngineInfo) -> float:
        return float(loads.columns([one], 0.0).inputs.step_s[0])

    for number in range(1, 60):
        loads.decodes(number, small, 20_000, 0.0)
    before = step_s(small)
    assert step_s(large) < before
    assert step_s(small) == before
    assert step_s(msgspec.structs.replace(small, ranks=ranks)) < before


def test_who_has_been_stalled_longer_is_nearer_to_being_late() -> None:
    loads, one = EngineLoads(CostBook()), info("e", "mixed")
    answer = Answer(200.0, 0.1)
    bears_s = answer.bears_s(loads.step_s(one))
    assert bears_s == pytest.approx(20 * (0.1 - loads.step_s(one)))

    def late(seconds: float) -> float:
        costs = loads.columns([one], 100.0)
        inputs = costs.inputs
        line, square, most = inputs.late_per_s[0], inputs.late_per_s2[0], inputs.late_most[0]
        return float(min(most, seconds * line + seconds**2 * square))

    def compute(number: int, seconds: float, now: float) -> None:
        loads.assigned(number, one, (512, 0), (0.0, seconds), now - seconds)
        loads.computed(number, "e", now, None)
        loads.left(number, "e", now)

    assert late(1.0) == 0
    loads.decodes(1, one, 512, 0.0, answer)
    assert late(bears_s / 2) == pytest.approx(1 / 4)
    assert late(bears_s * 2) == 1, "nobody is more than late"
    compute(2, bears_s / 2, 10.0)
    assert late(bears_s / 4) == pytest.approx((3 / 4) ** 2 - (1 / 2) ** 2)
    assert late(bears_s * 2) == pytest.approx(1 - (1 / 2) ** 2)
    compute(3, bears_s, 20.0)
    assert late(bears_s / 4) == pytest.approx(2 / 4), "who is late counts as one who is about to be"
    loads.decodes(4, one, 512, 20.0, NO_ANSWER)
    assert late(bears_s / 4) == pytest.approx(2 / 4)
    loads.left(1, "e", 30.0)
    assert late(9.0) == 0


def test_an_answer_that_is_not_streamed_decodes_when_its_prompt_should_be_computed() -> None:
    desk = over_one()
    desk.arrive(Request(number=1, model="m", arrived=0.0, tokens=8192))
    [assign] = decided(desk, 0.0)
    assert isinstance(assign, Assign)
    desk.loads.untold(1, "e")

    def seen(now: float) -> tuple[float, float, float]:
        costs = desk.view(now).costs
        assert costs is not None
        inputs = costs.inputs
        return float(costs.backlog_s[0]), float(inputs.kv_room[0]), float(inputs.step_s[0])

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
