"""Policies with costs in seconds: beside a brute-force model, and what each of them is for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import EngineCosts, Machine
from conductor.routing.binding import AHEAD_S
from conductor.routing.choices import Assign, Hold
from conductor.routing.columns import Matches, Prefix
from conductor.routing.policy import (
    AGING,
    KVCACHE_BALANCING_THRESHOLD,
    OVERTAKEN,
    POLICIES,
    WORK,
)
from conductor.routing.scheduler import Scheduler
from tests.conductor.routing.columns import (
    NOW,
    USUAL_S,
    EngineRow,
    engine,
    request,
    schedule,
    view_of,
    waiting,
)

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


def seconds_at(policy: str, row: EngineRow, prefix: Prefix, busy: float) -> tuple[float, float]:
    """What a prompt costs at a mixed engine, by the prior's scalars; and until its first token."""
    usable = min(prefix.usable, TOKENS - 1)
    in_memory = min(prefix.usable - prefix.disk, TOKENS - 1)
    own = min(prefix.usable - prefix.disk - prefix.memory, TOKENS - 1)
    reached = min(prefix.usable + prefix.peer, TOKENS - 1)
    fetched_s, have = 0.0, own
    prefill_s = PRIOR.prefill_seconds(TOKENS - own, own)
    ways = (("memory", in_memory, PRIOR.host.bytes_per_s), ("disk", usable, 6e9),
            ("peer", reached, PRIOR.network.bytes_per_s))  # fmt: skip
    for way, end, bytes_per_s in ways:
        gap = way == "peer" and have < usable
        part_s = PRIOR.kv_bytes(end - have) / bytes_per_s + (0.0 if fetched_s else 0.005)
        rest_s = PRIOR.prefill_seconds(TOKENS - end, end)
        rule = policy if way == "peer" else "whatever is sooner"
        if end > have and not gap and fetches(rule, have, end, part_s + rest_s, prefill_s):
            fetched_s, prefill_s, have = fetched_s + part_s, rest_s, end
    ttft_s = max(row.backlog_s, fetched_s) + prefill_s
    if policy != "earliest-first-token":
        return ttft_s, ttft_s
    passed_s = OVERTAKEN * busy**2 * min(row.backlog_s, prefill_s)
    line, square, most = row.late
    late_s = USUAL_S * min(most, line * prefill_s + square * prefill_s**2)
    return ttft_s + passed_s + WORK * busy**4 * prefill_s + late_s, ttft_s


@st.composite
def places(draw: st.DrawFn) -> tuple[list[EngineRow], Matches]:
    rows = [
        engine(
            f"e{at}",
            backlog_s=draw(st.sampled_from([0.0, 0.01, 0.3, 2.0])),
            late=draw(st.sampled_from([(0, 0, 0), (0, 0, 0), (0.1, 0.3, 1), (9, 2, 20)])),
        )
        for at in range(draw(st.integers(1, 6)))
    ]
    tokens = st.sampled_from([0, 0, 512, 8192, 30_000, TOKENS])
    node = st.sampled_from([0, 0, 0, 512, 8192, 30_000])
    matches = {}
    for row in rows:
        own, memory, disk = draw(tokens), draw(node), draw(node)
        usable = own + memory + disk
        matches[row.id] = Prefix(own, 0, usable, None, draw(tokens), memory, disk)
    return rows, matches


@pytest.mark.parametrize("policy", SECONDS)
@given(places())
def test_the_engine_is_the_one_that_a_brute_force_model_takes(
    policy: str, case: tuple[list[EngineRow], Matches]
) -> None:
    rows, matches = case
    [decision] = schedule(policy, rows, [request(tokens=TOKENS)], matches)
    busy = sum(row.backlog_s > 0 for row in rows) / len(rows)
    every = {row.id: seconds_at(policy, row, matches[row.id], busy) for row in rows}
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
    assert (far.prefill, far.fetch.network) == ("idle", 8192)
    assert (local.prefill, local.fetch.network) == ("idle", 0)


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


def test_a_prompt_goes_where_it_makes_fewer_requests_late() -> None:
    crowded = engine("crowded", late=(0.0, 1e3, 20.0), last_assigned=0)
    rows = [crowded, engine("quiet", last_assigned=1)]
    [decision] = schedule("earliest-first-token", rows, [request(tokens=TOKENS)])

    assert isinstance(decision, Assign)
    assert decision.prefill == "quiet"
    shown = {one.engine: one for one in decision.candidates}
    assert shown["quiet"].late_s == 0
    assert shown["crowded"].late_s == pytest.approx(20 * USUAL_S)


def test_prompts_whose_last_page_is_not_whole_count_on_no_more_than_they_have_in_common() -> None:
    keys = np.arange(3, dtype=np.uint64)  # of 512 tokens each
    asked = [request(number, tokens=2000, keys=keys, arrived=NOW) for number in (1, 2)]
    [first, second] = schedule("cache-global", [engine("e", max_running=9)], asked)

    assert isinstance(first, Assign)
    assert isinstance(second, Assign)
    rest_s = PRIOR.prefill_seconds(2000 - 3 * 512, 3 * 512)
    assert rest_s <= second.prefill_s < first.prefill_s


def test_a_late_engine_gets_its_next_prompt_when_it_is_about_to_need_one() -> None:
    soon, later = engine("e", backlog_s=AHEAD_S - 0.01), engine("e", backlog_s=AHEAD_S + 0.01)
    asked = [request(1, tokens=TOKENS), request(2, tokens=TOKENS)]

    assert [type(one) for one in schedule("earliest-first-token", [soon], asked)] == [Assign, Hold]
    assert [type(one) for one in schedule("earliest-first-token", [later], asked)] == [Hold, Hold]


@pytest.mark.parametrize("policy", SECONDS)
def test_the_first_token_waits_for_what_leaves_the_engine_already(policy: str) -> None:
    def chosen(leaving_s: float) -> str:
        rows = [
            engine("a", "prefill", protocol="in-turn", leaving_s=leaving_s),
            engine("b", "prefill", protocol="in-turn", backlog_s=0.05),
            engine("d", "decode", protocol="in-turn"),
        ]
        (one,) = schedule(policy, rows, [request(tokens=TOKENS, least_s=1.0)])
        assert isinstance(one, Assign)
        return one.prefill

    computed_s = PRIOR.prefill_seconds(TOKENS)
    assert chosen(0.0) == "a"
    assert chosen(0.9 * computed_s) == "a", "it has left when the prompt is computed"
    assert chosen(computed_s + 1.0) == "b"


def test_who_needs_least_goes_first_unless_the_other_has_waited_long() -> None:
    short = request(2, tokens=8000, least_s=0.1, arrived=NOW)
    long = request(1, tokens=TOKENS, least_s=2.0, arrived=NOW)
    older = request(1, tokens=TOKENS, least_s=2.0, arrived=NOW - 1.9 / AGING - 1)
    recent = request(1, tokens=TOKENS, least_s=2.0, arrived=NOW - 1.9 / AGING + 1)

    for first, expected in ((long, 2), (recent, 2), (older, 1)):
        decisions = schedule("earliest-first-token", [engine("e")], [first, short])
        assert [one.request for one in decisions if isinstance(one, Assign)] == [expected]


def test_a_cold_burst_of_one_long_prefix_stays_together_while_most_engines_are_busy() -> None:
    keys = np.arange(64, dtype=np.uint64)
    asked = [
        request(number, tokens=TOKENS, least_s=1.0, keys=np.append(keys[:-1], keys[-1:] + number))
        for number in range(1, 4)
    ]
    busy = [engine(f"busy{at}", backlog_s=9.0) for at in range(4)]
    rows = [engine("a"), engine("b"), *busy]
    first, *others = schedule("earliest-first-token", rows, asked)

    assert isinstance(first, Assign)
    assert all(isinstance(one, Hold) for one in others), "they wait for what it computes"
    cold = [request(number, tokens=TOKENS, least_s=1.0) for number in range(1, 4)]
    decisions = schedule("earliest-first-token", rows, cold)
    assert [type(one) for one in decisions] == [Assign, Assign, Hold]


def test_many_who_wait_for_one_engine_do_not_keep_an_idle_one_from_who_comes_behind() -> None:
    """A burst waits for its prefix, which "hot" computes; all of it needs less than the last."""
    rows = [engine("hot", backlog_s=0.5), engine("idle")]
    keys = np.arange(64, dtype=np.uint64)
    burst = [
        request(number, tokens=TOKENS, least_s=0.01, keys=np.append(keys[:-1], keys[-1:] + number))
        for number in range(1, 41)
    ]
    last = request(41, tokens=TOKENS, least_s=5.0, keys=keys + 1000)
    asked = waiting([*burst, last], {"hot": Prefix(TOKENS - 8, 0, TOKENS - 8)})
    asked.matches[-1] = {}
    scheduler = Scheduler(POLICIES["earliest-first-token"])

    decisions = scheduler.schedule(view_of(rows, assigned=9, retry_after_s=1), asked, NOW)

    assert [(one.request, one.prefill) for one in decisions if isinstance(one, Assign)] == [
        (41, "idle")
    ]


def test_a_hot_prefix_spreads_before_its_engine_has_a_queue() -> None:
    rows = [engine("hot", backlog_s=3.0), engine("idle")]
    matches = {"hot": Prefix(TOKENS, 0, TOKENS)}
    [decision] = schedule("earliest-first-token", rows, [request(tokens=TOKENS)], matches)

    assert isinstance(decision, Assign)
    assert decision.prefill == "idle"


def test_those_who_wait_for_one_model_hold_no_engine_of_another() -> None:
    rows = [engine("near", backlog_s=0.3), engine("far"), engine("other", model="n")]
    matches = {"near": Prefix(TOKENS, 0, TOKENS)}
    asked = [request(number, tokens=TOKENS) for number in range(1, 18)]
    *held, last = schedule(
        "earliest-first-token", rows, [*asked, request(18, model="n", tokens=TOKENS)], matches
    )

    assert all(isinstance(one, Hold) for one in held)
    assert isinstance(last, Assign)
