"""Goal: short prompts that are computed in one step are priced and given to engines as one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import CostBook, EngineCosts, Machine
from conductor.costs.prior import PrefillLine
from conductor.routing.choices import Assign
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.load import EngineLoads
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request
from conductor.routing.scheduler import Scheduler
from conductor.routing.together import STEP_TOKENS, shared_s

LINE = EngineCosts(Machine("llama3-70b", "a800", 8)).prefill_line
SHORT = st.integers(1, STEP_TOKENS)


def engine(name: str = "e") -> EngineInfo:
    return EngineInfo(
        id=name, role=Role.MIXED, url="http://x", model="m", page_tokens=16, domain="d",
        max_running=64, shape="llama3-70b", hardware="8xa800",
    )  # fmt: skip


def weights_s(tokens: float, line: PrefillLine = LINE) -> float:
    """Seconds of one step, but for attention."""
    constant_s, floor_s, _ = line._replace(pair_s=0.0).terms(tokens, 0)
    return constant_s + floor_s


@given(SHORT, SHORT)
def test_what_a_step_costs_is_shared(before: int, new: int) -> None:
    saved = shared_s(LINE, before, new)
    assert saved == pytest.approx(weights_s(before) + weights_s(new) - weights_s(before + new))
    assert LINE.constant_s - 1e-12 <= saved <= LINE.constant_s + LINE.floor_s + 1e-12


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=40), st.booleans())
def test_prompts_behind_the_first_are_packed_into_steps(prompts: list[int], began: bool) -> None:
    """``began``: the first one began to be computed after all others had come."""
    loads, line = EngineLoads(CostBook()), LINE._replace(pair_s=0.0)
    for number, tokens in enumerate([500, *prompts]):
        seconds = weights_s(tokens, line)
        loads.assigned(number, engine(), (tokens, 0), (0.0, seconds), 1.0)
    if began:
        loads.computed(0, "e", 2.0, 0)
    queue = prompts if began else [500, *prompts]
    steps: list[list[int]] = []
    for at, tokens in enumerate(queue):
        joins = steps and sum(steps[-1]) + tokens <= STEP_TOKENS
        if not joins or (len(steps) == 1 and not began and at == 1):
            steps.append([])
        steps[-1].append(tokens)

    costs = loads.columns([engine()], 2.0 if began else 1.0)
    last = steps[-1] if len(steps) > 1 else []
    assert costs.backlog_s[0] == pytest.approx(sum(weights_s(sum(one)) for one in steps))
    assert costs.steps.tokens[0] == sum(last)
    assert costs.steps.prompts[0] == len(last)
    assert costs.steps.seconds[0] == pytest.approx(weights_s(sum(last)) if last else 0.0)


def dispatcher() -> Dispatcher:
    registry = EngineRegistry()
    registry.register(engine(), 0.0)
    limits = DispatchLimits(10_000, 600.0, 3)
    return Dispatcher(registry, Scheduler(POLICIES["earliest-first-token"]), limits)


def arrive(desk: Dispatcher, number: int, tokens: int, now: float) -> None:
    desk.arrive(Request(number=number, model="m", arrived=now, tokens=tokens))


def given_at(desk: Dispatcher, now: float) -> list[int]:
    """Who gets the engine now."""
    for number, _ in desk.due(now):
        desk.learn(number, {})
    found = [one.request for one in desk.step(now) if isinstance(one, Assign)]
    desk.check()
    return found


def test_a_busy_engine_gets_its_next_step_full_of_short_prompts() -> None:
    desk = dispatcher()
    arrive(desk, 0, 20_000, 0.0)
    assert given_at(desk, 0.0) == [0]
    costs = desk.view(0.0).costs
    assert costs is not None
    ends = float(costs.backlog_s[0])
    for number in range(1, 200):
        arrive(desk, number, 100, 0.0)

    assert given_at(desk, ends - 0.2) == []
    wake = desk.wake_at
    assert wake == pytest.approx(ends - 0.1)
    found = given_at(desk, wake)
    assert len(found) == STEP_TOKENS // 100, "as many as the step has room for"
    assert given_at(desk, ends - 0.01) == []


def test_prompts_that_share_little_follow_one_another() -> None:
    """Their step would end later for all of them."""
    desk = dispatcher()
    arrive(desk, 0, 20_000, 0.0)
    assert given_at(desk, 0.0) == [0]
    costs = desk.view(0.0).costs
    assert costs is not None
    for number in range(1, 5):
        arrive(desk, number, 900, 0.0)

    assert len(given_at(desk, float(costs.backlog_s[0]) - 0.09)) == 1


@pytest.mark.parametrize("is_first", [True, False])
def test_nobody_joins_a_step_before_a_prompt_whose_turn_it_is(is_first: bool) -> None:
    desk = dispatcher()
    arrive(desk, 0, 60_000, 0.0)
    assert given_at(desk, 0.0) == [0]
    costs = desk.view(0.0).costs
    assert costs is not None
    ends = float(costs.backlog_s[0])
    arrive(desk, 1, 900, 0.0)
    arrive(desk, 2, 8_000, 0.0 if is_first else ends - 0.06)
    assert given_at(desk, ends - 0.09) == [1]

    for number in range(3, 20):
        arrive(desk, number, 100, ends - 0.05)
    assert bool(given_at(desk, ends - 0.05)) is not is_first
