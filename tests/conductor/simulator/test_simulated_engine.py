"""One simulated engine: steps, chunks, room for KV, and time between tokens."""

import heapq
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.simulator.batching import BatchEngine, EngineLimits, Work
from conductor.simulator.steps import Part, TrueSteps
from tests.conductor.simulator.simulated import LinearSteps

FLAT = LinearSteps(pair_s=0.0, context_s=0.0)
STEP_S, TOKEN_S = 1e-2, 1e-4


def engine(room: int = 100_000, chunk: int = 1_000, batch: int = 8, prefix: int = 0) -> BatchEngine:
    limits = EngineLimits(room, chunk, batch)
    return BatchEngine(TrueSteps(FLAT), limits, lambda work: min(prefix, work.tokens - 1))


def drive(one: BatchEngine, arrivals: list[tuple[float, Work]]) -> dict[int, float]:
    """Let requests come; returns when each has ended, or was computed if it has no tokens."""
    events = [(at, n, work) for n, (at, work) in enumerate(arrivals)]
    heapq.heapify(events)
    ended: dict[int, float] = {}
    while events or one.ends_at is not None:
        ends_at = math.inf if one.ends_at is None else one.ends_at
        if events and events[0][0] < ends_at:
            at, _, work = heapq.heappop(events)
            one.add(work, at)
        else:
            done = one.advance(ends_at)
            for work in [*(work for work in done.computed if not work.output), *done.ended]:
                one.release(work.number)
                assert work.number not in ended
                ended[work.number] = ends_at
            one.resume(ends_at)
        one.check()
    return ended


def test_a_prompt_takes_as_long_as_its_new_tokens():
    one = engine(prefix=400)

    assert drive(one, [(1.0, Work(1, 900, 0))]) == {1: pytest.approx(1.0 + STEP_S + 500 * TOKEN_S)}


def test_prompts_that_fit_in_one_chunk_share_its_step():
    one = engine()
    works = [Work(n, 300, 0) for n in range(1, 6)]

    ended = drive(one, [(0.0, work) for work in works])

    first = STEP_S + 300 * TOKEN_S  # it was alone when it came
    assert ended[1] == pytest.approx(first)
    assert ended[2] == ended[3] == ended[4] == pytest.approx(first + STEP_S + 900 * TOKEN_S)
    assert ended[5] > ended[4]


def test_a_request_that_joins_waits_for_the_end_of_the_present_step():
    one = engine()
    alone = STEP_S + TOKEN_S
    both = STEP_S + 2 * TOKEN_S

    first, second = Work(1, 10, 5, here=True), Work(2, 10, 2, here=True)
    ended = drive(one, [(0.0, first), (1.5 * alone, second)])

    assert second.first_s == pytest.approx(2 * alone + both)
    assert ended == {1: pytest.approx(3 * alone + 2 * both), 2: pytest.approx(2 * alone + 2 * both)}


def test_who_decodes_gets_a_token_with_each_chunk_of_a_prompt():
    one = engine(chunk=101)
    talks, comes = Work(1, 10, 30, here=True), Work(2, 400, 1)

    drive(one, [(0.0, talks), (0.0, comes)])

    chunked = STEP_S / 4 + 101 * TOKEN_S  # one start of the prompt, over four chunks
    assert talks.tbt_s == pytest.approx(chunked)  # the longest tenth: three of four such steps
    assert comes.first_s is not None
    assert one.generated == 31


def test_a_request_waits_until_there_is_room_for_its_kv():
    one = engine(room=1_000)
    works = [Work(1, 500, 100, here=True), Work(2, 500, 1, here=True)]

    ended = drive(one, [(0.0, works[0]), (0.0, works[1])])

    assert works[1].first_s > ended[1]


def test_a_prompt_keeps_its_room_until_its_kv_has_left():
    one = engine(room=1_000)
    one.add(Work(1, 600, 0), 0.0)
    one.add(Work(2, 600, 0), 0.0)
    one.advance(one.ends_at)
    one.resume(1.0)
    assert one.ends_at is None
    assert one.waiting == 1

    one.release(1)
    one.resume(2.0)

    assert one.ends_at is not None


def test_an_engine_that_dies_tells_who_had_a_token_already():
    one = engine()
    one.add(Work(1, 10, 5, here=True), 0.0)
    one.add(Work(2, 10, 5, here=True), 1.5 * STEP_S)  # joins after the second step

    assert one.cancel(1.6 * STEP_S) == {1}
    one.check()
    assert one.ends_at is None
    assert one.reserved == 0


def test_time_between_tokens_is_the_mean_of_the_longest_tenth():
    one = engine()
    long = Work(1, 10, 21, here=True)
    # Twenty intervals, of which the two longest count: both with another request.
    drive(one, [(0.0, long), (5 * STEP_S, Work(2, 10, 2, here=True))])

    assert long.tbt_s == pytest.approx(STEP_S + 2 * TOKEN_S)


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_truth_differs_from_belief_by_a_factor(factor: float):
    steps = TrueSteps(LinearSteps(), factor)

    assert steps.decode(3, 50) == pytest.approx(LinearSteps().decode_step_seconds(3, 50) * factor)
    whole = LinearSteps().prefill_seconds(500, 100) * factor
    assert steps.prompts([Part(500, 100)], 1, 0, 0) == pytest.approx(whole)


def test_prompts_computed_together_have_the_attention_of_each():
    pairs = LinearSteps(token_s=0.0, step_s=0.0)
    apart = pairs.prefill_seconds(300, 50) + pairs.prefill_seconds(200, 900)

    assert TrueSteps(pairs).prompts([Part(300, 50), Part(200, 900)], 1, 0, 0) == pytest.approx(
        apart
    )


Arrival = tuple[float, int]
arrivals = st.lists(
    st.tuples(st.floats(0, 2, allow_nan=False), st.integers(1, 40)), min_size=1, max_size=12
)


def token_by_token(coming: list[Arrival], batch_max: int) -> dict[int, float]:
    """The same decode engine, one step after another."""
    left: dict[int, int] = {}
    waiting = sorted((at, number, out) for number, (at, out) in enumerate(coming))
    ended: dict[int, float] = {}
    now = 0.0
    while waiting or left:
        if not left:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now + 1e-12 and len(left) < batch_max:
            _, number, out = waiting.pop(0)
            left[number] = out
        now += STEP_S + len(left) * TOKEN_S
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                del left[number]
                ended[number] = now
    return ended


@given(arrivals, st.integers(1, 5))
def test_stretches_are_the_same_as_one_step_after_another(coming: list[Arrival], batch_max: int):
    one = engine(batch=batch_max)
    works = [(at, Work(n, 10, out, here=True)) for n, (at, out) in enumerate(coming)]

    ended = drive(one, works)

    expected = token_by_token(coming, batch_max)
    slow = STEP_S + batch_max * TOKEN_S
    assert ended.keys() == expected.keys()
    # Who comes just when a step ends may join it in one of both, and the next step in the other.
    assert all(abs(ended[n] - expected[n]) <= 2 * slow * len(coming) for n in ended)
    assert sum(ended.values()) == pytest.approx(sum(expected.values()), abs=slow * len(coming) ** 2)


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1, allow_nan=False),
            st.integers(1, 3_000),
            st.integers(0, 30),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(0, 500),
)
def test_no_engine_exceeds_its_room_and_every_request_ends(
    coming: list[tuple[float, int, int, bool]], batch_max: int, prefix: int
):
    one = engine(room=3_030, chunk=512, batch=batch_max, prefix=prefix)
    works = [
        (at, Work(n, tokens, max(out, int(here)), here=here))
        for n, (at, tokens, out, here) in enumerate(coming)
    ]

    ended = drive(one, works)

    assert ended.keys() == {work.number for _, work in works}
    assert one.generated == sum(work.output for _, work in works)
    assert one.reserved == 0
    for at, work in works:
        if work.output:
            assert at < work.first_s <= ended[work.number]
