"""Goal: who could not be served in time is refused at once, and nobody else."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conductor.routing.admission import AdmissionMode, AdmissionRules, ServiceClass
from conductor.routing.choices import Assign, Continue, Effect, Reject
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from conductor.routing.shares import HALF_S

FAST = ServiceClass("fast", ttft_s=2.0, tbt_s=0.1, priority=-1)
SLOW = ServiceClass("slow", ttft_s=30.0, tbt_s=0.1)
PROMPT_S = 2.9
"""About, of 20,000 tokens of llama3-70b on eight A800."""


def engine(name: str, role: str, places: int = 4) -> EngineInfo:
    return EngineInfo(
        id=name, role=Role(role), url="http://x", model="m", page_tokens=64, domain="d",
        max_running=places, shape="llama3-70b", hardware="8xa800",
    )  # fmt: skip


class Case:
    """A dispatcher whose requests have no prefix anywhere."""

    def __init__(
        self,
        mode: str = "prediction",
        engines: Sequence[EngineInfo] = (engine("p", "prefill"), engine("d", "decode")),
        policy: str = "earliest-first-token",
        classes: Sequence[ServiceClass] = (SLOW, FAST),
        *,
        fair: bool = False,
    ) -> None:
        registry = EngineRegistry()
        for info in engines:
            registry.register(info, 0.0)
        rules = AdmissionRules(AdmissionMode(mode), tuple(classes), fair=fair)
        limits = DispatchLimits(1_000, 1e6, 3)
        self.dispatcher = Dispatcher(registry, Scheduler(POLICIES[policy]), limits, rules=rules)
        self.number = 0

    def arrive(
        self, now: float = 0.0, tokens: int = 20_000, service: str = "", tenant: str = ""
    ) -> list[Effect]:
        self.number += 1
        self.dispatcher.arrive(
            Request(
                number=self.number, model="m", arrived=now, tokens=tokens, service=service,
                tenant=tenant,
            )
        )  # fmt: skip
        return self.step(now)

    def step(self, now: float) -> list[Effect]:
        for number, _ in self.dispatcher.due(now):
            self.dispatcher.learn(number, {})
        effects = self.dispatcher.step(now)
        self.dispatcher.check()
        return effects


def refusals(effects: Sequence[Effect]) -> list[Reject]:
    return [one for one in effects if isinstance(one, Reject)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("mode", ["none", "load", "prediction"])
def test_who_comes_to_idle_engines_is_admitted_and_who_comes_to_full_ones_is_not(
    mode: str, policy: str
) -> None:
    case = Case(mode, policy=policy)
    assert not refusals(case.arrive())
    for _ in range(30):
        case.arrive()
    found = refusals(case.arrive())
    assert bool(found) == (mode != "none")
    for reject in found:
        assert (reject.status, reject.code) == (429, "overloaded")
        assert reject.judgement is not None
        assert reject.judgement.refused == "prefill"


def test_as_many_are_admitted_as_can_be_computed_in_time() -> None:
    case = Case()
    admitted = sum(not refusals(case.arrive()) for _ in range(40))
    assert admitted == pytest.approx(SLOW.ttft_s / PROMPT_S, abs=2)
    assert not refusals(case.arrive(tokens=100)), "a short one would be computed first"


def test_retry_after_is_when_a_request_would_be_admitted() -> None:
    case = Case(policy="cache-global")
    while not (found := refusals(case.arrive())):
        pass
    [reject] = found
    assert 1 <= reject.retry_after_s <= 2 * PROMPT_S
    seen = reject.judgement
    assert seen is not None
    assert seen.ttft_s is not None
    assert seen.ttft_s > SLOW.ttft_s
    assert re.search(r"first token is expected after \d+\.\d s, not 30", reject.reason)


def test_a_class_has_its_own_objectives_and_comes_first() -> None:
    case = Case(policy="cache-global")
    for _ in range(8):
        assert not refusals(case.arrive(tokens=5_000))
    assert not refusals(case.arrive(tokens=2_000, service="slow"))
    assert refusals(case.arrive(tokens=30_000, service="fast"))
    waiting = case.dispatcher.admission
    assert (waiting.priority(9), waiting.judgement(9).service_class) == (0, "slow")

    urgent = Case("none", [engine("m", "mixed", 1)], "least-loaded")
    urgent.arrive()
    urgent.arrive(service="slow")
    urgent.arrive(service="fast")
    urgent.dispatcher.left(1, 1.0)
    [assign] = urgent.step(1.0)
    assert assign.request == 3


def decoding(case: Case, count: int, now: float) -> None:
    """Let as many decode as there are places."""
    for _ in range(count):
        [assign] = [one for one in case.arrive(now, tokens=500) if isinstance(one, Assign)]
        case.dispatcher.prefilled(assign.request, now)
        [told] = case.step(now)
        assert isinstance(told, Continue)


def test_who_would_find_no_place_to_decode_in_time_is_refused_before_its_prompt_is_computed() -> (
    None
):
    small = Case(engines=[engine("p", "prefill"), engine("d", "decode", 2)], classes=[FAST])
    decoding(small, 2, 0.0)
    [reject] = refusals(small.arrive(0.1, tokens=500))
    assert reject.judgement is not None
    assert reject.judgement.refused == "decode"
    assert (reject.judgement.decode_load or 0) > 1
    assert 1 <= reject.retry_after_s <= 10


def test_who_will_have_ended_by_then_does_not_count() -> None:
    case = Case(engines=[engine("p", "prefill"), engine("d", "decode", 2)])
    decoding(case, 2, 0.0)
    assert not refusals(case.arrive(0.1, tokens=60_000))
    seen = case.dispatcher.admission.judgement(case.number)
    assert (seen.decode_load or 0) <= 1
    assert seen.output_tokens > 1


def test_who_waited_too_long_is_refused_and_who_failed_at_an_engine_is_not() -> None:
    case = Case(engines=[engine("m", "mixed", 1), engine("n", "mixed", 1)], classes=[SLOW])
    first = [one for _ in range(2) for one in case.arrive(tokens=5_000)]
    assert [type(one) for one in first] == [Assign, Assign]
    assert not case.arrive(tokens=5_000)
    case.dispatcher.failed(1, "m", "cut", 29.9)
    [late] = refusals(case.step(29.9))
    assert late.request == 3
    assert late.judgement is not None
    assert late.judgement.refused == "late"
    counts = case.dispatcher.admission.gauges()["admission"]
    assert (counts["slow", "admitted"], counts["slow", "late"]) == (2, 1)


def served(case: Case, now: float, seconds: tuple[float, float]) -> float | None:
    """Serve one request if it is admitted: when it has ended; ``seconds``: prompt, decode step."""
    effects = case.arrive(now, tokens=500)
    if refusals(effects):
        return None
    [assign] = effects
    case.dispatcher.began(assign.request, now + seconds[0])
    ends_at = now + sum(seconds) + 98 * seconds[1]
    case.dispatcher.ended(assign.request, 100, ends_at)
    case.dispatcher.left(assign.request, ends_at)
    return ends_at


@pytest.mark.parametrize(
    ("mode", "seconds"),
    [("load", (0.3, 0.3)), ("prediction", (0.3, 0.3)), ("prediction", (6.0, 0.05))],
)
def test_what_a_slow_time_has_taught_is_forgotten_when_engines_are_quick_again(
    mode: str, seconds: tuple[float, float]
) -> None:
    info = engine("m", "mixed", 64)
    case = Case(mode, [info], classes=[FAST])
    now = 0.0
    for _ in range(100):
        ended = served(case, now, seconds)
        if ended is None:
            break
        now = ended + 1.0
    assert refusals(case.arrive(now, tokens=500)), "it is too slow"
    steps = case.dispatcher.loads.step_s(info)
    admitted = []
    for _ in range(400):
        now += 1.0
        ended = served(case, now, (0.2, 0.02))
        admitted.append(ended is not None)
        now = now if ended is None else ended
    assert not any(admitted[:7]), "only one who comes when nobody else was served for a while"
    assert all(admitted[-100:])
    assert case.dispatcher.loads.step_s(info) < max(steps / 2, 0.05)
    counts = case.dispatcher.admission.gauges()["admission"]
    assert 0 < counts["fast", "probe"] < 60


def test_one_who_is_let_through_to_measure_is_not_refused_later_and_none_comes_beside_it() -> None:
    case = Case(engines=[engine("m", "mixed", 64)], classes=[FAST], policy="cache-global")
    [first] = case.arrive(tokens=100_000)
    assert isinstance(first, Assign), "nobody else was admitted before"
    judged = case.dispatcher.admission.judgement(1)
    assert (judged.refused, judged.probe) == ("", True)
    assert judged.ttft_s is not None
    assert judged.ttft_s > FAST.ttft_s
    assert refusals(case.arrive(60.0, tokens=100_000)), "the first one is still there"
    case.dispatcher.left(1, 60.0)
    assert refusals(case.arrive(60.0 + 9.0, tokens=100_000)), "it has hardly gone"
    assert not refusals(case.arrive(60.0 + 11.0, tokens=100_000))
    waits = Case(engines=[engine("m", "mixed", 1)], classes=[FAST])
    waits.arrive(tokens=100)
    waits.dispatcher.detach(1, "m")
    waits.dispatcher.left(1, 0.0)
    assert not waits.arrive(20.0, tokens=100_000), "no place is free, so it waits"
    assert not waits.step(30.0), "late as it is"


def test_each_request_is_counted_once() -> None:
    case = Case(engines=[engine("m", "mixed", 1)], classes=[ServiceClass(ttft_s=1e4)])
    case.arrive(tokens=100)
    case.arrive(tokens=100)
    case.dispatcher.failed(1, "m", "cut", 0.1)
    case.dispatcher.left(1, 0.2)
    case.dispatcher.left(2, 0.3)
    counts = case.dispatcher.admission.gauges()["admission"]
    assert {outcome: count for (_, outcome), count in counts.items() if count} == {"admitted": 2}


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_is_not_streamed_decodes_once_its_prompt_should_be_computed(
    stream: bool,
) -> None:
    case = Case("load", [engine("m", "mixed", 64)], classes=[FAST])
    for at in range(56):
        now = at / 4
        [assign] = case.arrive(now, tokens=100)
        assert isinstance(assign, Assign), "56 of 64 places are no overload"
        if stream:
            case.dispatcher.began(assign.request, now + 0.1)
        else:
            case.dispatcher.loads.untold(assign.request, "m")
    seen = case.dispatcher.admission.judgement(case.number)
    assert (seen.decode_load or 0) > 0.5
    for number in range(1, 57):
        case.dispatcher.ended(number, 256, now)
        case.dispatcher.left(number, now)
    case.arrive(now + 1, tokens=100)
    seen = case.dispatcher.admission.judgement(case.number)
    assert (seen.decode_load or 0) < 0.5, "nobody decodes any more"


def test_a_tenant_above_its_share_waits_behind_others() -> None:
    case = Case("none", [engine("m", "mixed", 1)], "least-loaded", fair=True)
    case.arrive(tenant="greedy")
    case.arrive(tenant="greedy")
    case.arrive(tenant="modest")
    assert case.dispatcher.admission.gauges()["tenants_over_share"][()] == 1
    case.dispatcher.left(1, 1.0)
    [assign] = case.step(1.0)
    assert assign.request == 3


def test_a_tenant_gets_back_what_an_engine_that_failed_was_to_give_it() -> None:
    engines = [engine("m", "mixed", 1), engine("n", "mixed", 1)]
    case = Case("none", engines, "least-loaded", fair=True)
    case.arrive(tenant="unlucky", tokens=1_000)
    got = case.dispatcher.admission._shares._got
    once = got["unlucky"]
    case.dispatcher.failed(1, "m", "cut", 0.0)
    assert got["unlucky"] == pytest.approx(0, abs=1e-6)
    [assign] = case.step(0.0)
    assert (assign.request, got["unlucky"]) == (1, once), "charged for one try"
    case.dispatcher.left(1, 0.0)
    assert got["unlucky"] == pytest.approx(1_000), "its prompt is computed, but for no answer"
    case.dispatcher.admission._shares.charge("unlucky", once - 1_000, 0.0)
    case.arrive(0.0, tokens=1_000, tenant="unlucky")
    case.dispatcher.failed(2, "m", "cut", HALF_S)
    assert got["unlucky"] == pytest.approx(once, rel=1e-6), "of what is left of it"


@pytest.mark.parametrize("how", ["ends", "leaves"])
def test_a_tenant_that_leaves_before_the_end_is_charged_for_what_was_generated(how: str) -> None:
    case = Case("none", [engine("m", "mixed", 64)], "least-loaded", fair=True)
    dispatcher = case.dispatcher
    step_s = dispatcher.loads.step_s(engine("m", "mixed", 64))
    ends: list[tuple[float, int, int]] = []
    for second in range(120):
        now = float(second)
        for at, number, tokens in [one for one in ends if one[0] <= now]:
            if how == "ends" or tokens == 200:
                dispatcher.ended(number, tokens, at)
            dispatcher.left(number, at)
            ends.remove((at, number, tokens))
        for tenant, tokens in (("greedy", 4_000), ("honest", 200)):
            case.arrive(now, 100, tenant=tenant)
            dispatcher.began(case.number, now)
            ends.append((now + tokens * step_s, case.number, tokens))
    levels = dispatcher.admission.levels()
    assert levels.keys() == {"greedy"}
    assert levels["greedy"] >= 2


def test_who_leaves_at_once_is_charged_for_no_answer() -> None:
    case = Case("none", [engine("m", "mixed", 3)], "least-loaded", fair=True)
    got = case.dispatcher.admission._shares._got
    for tenant in ("before its first token", "after it", "as nobody reports it"):
        case.arrive(10.0, 1_000, tenant=tenant)
        assert got[tenant] > 2_000 * 2 ** (10 / HALF_S)
    case.dispatcher.began(2, 10.0)
    case.dispatcher.loads.untold(3, "m")
    for number in (1, 2):
        case.dispatcher.left(number, 10.0)
    case.dispatcher.left(3, 10.0 + 1e4)  # for as long as it liked
    assert got["before its first token"] == pytest.approx(1_000 * 2 ** (10 / HALF_S))
    assert got["after it"] == pytest.approx(1_000 * 2 ** (10 / HALF_S))
    assert got["as nobody reports it"] > 2_000 * 2 ** (10 / HALF_S), "at most what was expected"
    assert case.dispatcher.admission.lengths.gauges()["output_tokens_bias"] == {}


@pytest.mark.parametrize("said", [-5_000_000, -(10**400), 10**400])
def test_no_engine_can_give_a_tenants_share_back_or_take_it_for_good(said: int) -> None:
    case = Case("none", [engine("m", "mixed", 1)], "least-loaded", fair=True)
    case.arrive(tenant="greedy")
    case.dispatcher.ended(1, said, 1.0)
    assert 10_000 < case.dispatcher.admission._shares._got["greedy"] < 1e8


class Anything(RuleBasedStateMachine):
    """Whatever happens, what admission knows fits what the dispatcher knows."""

    def __init__(self) -> None:
        super().__init__()
        engines = [engine("p", "prefill", 1), engine("d", "decode", 1), engine("m", "mixed", 1)]
        self.case = Case(engines=engines, fair=True)
        self.now = 0.0
        self.assigned: dict[int, Assign] = {}
        self.decodes: set[int] = set()

    def note(self, effects: Sequence[Effect]) -> None:
        for one in effects:
            if isinstance(one, Assign):
                self.assigned[one.request] = one
            elif isinstance(one, Continue):
                self.decodes.add(one.request)
            else:
                self.assigned.pop(one.request, None)

    @rule(
        tokens=st.sampled_from([0, 10, 4_000, 100_000]), service=st.sampled_from(["", "fast"]),
        tenant=st.sampled_from(["", "a", "b"]),
    )  # fmt: skip
    def arrive(self, tokens: int, service: str, tenant: str) -> None:
        self.note(self.case.arrive(self.now, tokens, service, tenant))

    @rule(seconds=st.sampled_from([0.01, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.note(self.case.step(self.now))

    @precondition(lambda self: self.assigned)
    @rule(which=st.integers(0, 9), how=st.sampled_from(["ends", "fails", "leaves"]))
    def goes_on(self, which: int, how: str) -> None:
        number = sorted(self.assigned)[which % len(self.assigned)]
        one, dispatcher = self.assigned[number], self.case.dispatcher
        if how == "fails":
            del self.assigned[number]
            self.decodes.discard(number)
            dispatcher.failed(number, one.prefill, "cut", self.now)
        elif how == "ends" and one.prefill != one.decode and number not in self.decodes:
            dispatcher.prefilled(number, self.now)
            self.decodes.add(number)
        else:
            if how == "ends":
                dispatcher.began(number, self.now)
                dispatcher.ended(number, 7, self.now)
            dispatcher.left(number, self.now)
            del self.assigned[number]
            self.decodes.discard(number)
        self.note(self.case.step(self.now))

    @invariant()
    def fits(self) -> None:
        self.case.dispatcher.check()


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
