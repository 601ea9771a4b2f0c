"""The policies: what must hold for every view, and what each of them prefers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.routing.choices import Assign, Hold, Plan, Reject
from conductor.routing.columns import Matches, Prefix
from conductor.routing.engines import Health, Role
from conductor.routing.policy import POLICIES, Policy
from conductor.routing.scheduler import Scheduler
from tests.conductor.routing.columns import (
    AT_ONCE,
    NOW,
    EngineRow,
    RequestRow,
    decided,
    engine,
    request,
    schedule,
    view_of,
    waiting,
)

Case = tuple[list[EngineRow], list[RequestRow], Matches]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    engines = []
    for number in range(draw(st.integers(0, 6))):
        max_running = draw(st.integers(1, 4))
        engines.append(
            EngineRow(
                id=f"e{number}",
                model=draw(st.sampled_from(["m", "m", "n"])),
                adapters=draw(st.sets(st.sampled_from(["n", "lora"]), max_size=2)),
                role=draw(st.sampled_from(list(Role))),
                health=draw(st.sampled_from([Health.ALIVE, *Health])),
                in_flight=draw(st.integers(0, max_running + 1)),  # it may have shrunk
                max_running=max_running,
                last_assigned=draw(st.integers(0, 9)),
                promised=draw(st.integers(0, max_running)),
                protocol=draw(st.sampled_from(["at-once", "in-turn", "in-turn"])),
            )
        )
    ids = [e.id for e in engines] or ["none"]
    requests = [
        RequestRow(
            number=number,
            model=draw(st.sampled_from(["m", "n", "lora", "unknown"])),
            deadline=NOW + draw(st.integers(-1, 5)),
            excluded=frozenset(draw(st.sets(st.sampled_from(ids), max_size=2))),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    prefixes = {name: Prefix(*draw(st.tuples(*[st.integers(0, 1000)] * 3))) for name in ids}
    return engines, requests, prefixes


def serving(engines: list[EngineRow], model: str) -> list[str]:
    """The engines of a model; of a LoRA adapter only if no model has its name."""
    of_base = [e.id for e in engines if e.model == model]
    return of_base or [e.id for e in engines if model in e.adapters]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(case=cases())
def test_every_decision_is_possible_and_no_request_is_lost(policy: str, case: Case) -> None:
    rows, requests, matches = case
    decisions = schedule(policy, rows, requests, matches)

    assert [d.request for d in decisions] == [w.number for w in requests]
    engines = {e.id: e for e in rows}
    taken: Counter[str] = Counter()
    promised: Counter[str] = Counter()
    for decision, wanted in zip(decisions, requests, strict=True):
        if not isinstance(decision, Assign):
            continue
        pair = {decision.prefill, decision.decode}
        taken.update(pair if decision.at_once else [decision.prefill])
        promised.update([] if decision.at_once else [decision.decode])
        for name in pair:
            assert engines[name].health is not Health.DEAD
            assert name in serving(rows, wanted.model)
            assert name not in wanted.excluded
        first, second = engines[decision.prefill], engines[decision.decode]
        assert decision.protocol == first.protocol
        if decision.plan is Plan.ALONE:
            assert first is second
            assert first.role is Role.MIXED
        else:
            assert first is not second
            assert first.role is Role.PREFILL
            assert second.role is not Role.PREFILL
            assert (first.protocol in AT_ONCE) == (second.protocol in AT_ONCE) == decision.at_once
        assert [c.engine for c in decision.candidates] == serving(rows, wanted.model)
        assert decision.reason
    for name, count in taken.items():
        assert engines[name].in_flight + count <= engines[name].max_running
    for name, count in promised.items():
        assert engines[name].promised + count <= engines[name].max_running
    for decision, wanted in zip(decisions, requests, strict=True):
        if isinstance(decision, Hold):
            assert wanted.deadline > NOW
            assert any(
                e.in_flight + taken[e.id] >= e.max_running
                or e.promised + promised[e.id] >= e.max_running
                for e in rows
                if e.id in serving(rows, wanted.model)
            )
        if isinstance(decision, Reject):
            assert decision.retry_after_s >= 1


@given(case=cases())
def test_prefixes_are_due_of_all_requests_that_get_a_place(case: Case) -> None:
    rows, requests, _ = case
    scheduler = Scheduler(POLICIES["longest-prefix"], AT_ONCE)
    view, asked = view_of(rows), waiting(requests)
    due = {asked.numbers[row] for row in scheduler.due(view, asked, NOW)}
    decisions = decided(scheduler, view, asked)
    assert {d.request for d in decisions if isinstance(d, Assign)} <= due
    free = sum(max(0, e.max_running - e.in_flight) for e in rows)
    groups = {(w.model, w.excluded) for w in requests}
    assert len(due) <= free * len(groups)


def test_a_policy_orders_requests_too() -> None:
    urgent_first = Policy(
        POLICIES["least-loaded"].costs, "least load", needs_prefixes=False,
        order=lambda waiting, _: sorted(range(len(waiting)), key=waiting.priorities.__getitem__),
    )  # fmt: skip
    asked = waiting([request(1, priority=3), request(2), request(3, priority=-1)])
    view = view_of([engine("e", max_running=2)])
    decisions = decided(Scheduler(urgent_first), view, asked)
    assert [(type(d), d.request) for d in decisions] == [(Assign, 3), (Assign, 2), (Hold, 1)]


def chosen(
    policy: str, engines: list[EngineRow], matches: Matches | None = None
) -> tuple[str, str]:
    [decision] = schedule(policy, engines, [request()], matches)
    assert isinstance(decision, Assign), decision
    return decision.prefill, decision.decode


def prefixes(**usable: int) -> dict[str, Prefix]:
    return {name: Prefix(tokens, 0, tokens) for name, tokens in usable.items()}


def test_round_robin_takes_whose_turn_it_is_in_each_role() -> None:
    engines = [engine("p1", "prefill"), engine("p2", "prefill"), engine("d1", "decode")]
    decisions = schedule("round-robin", engines, [request(n) for n in range(4)])
    assert [d.prefill for d in decisions if isinstance(d, Assign)] == ["p1", "p2", "p1", "p2"]


def test_round_robin_of_two_models_does_not_lock_step() -> None:
    engines = [engine(f"{model}{i}", model=model) for model in "mn" for i in range(2)]
    requests = [request(n, model="mn"[n % 2]) for n in range(8)]
    decisions = schedule("round-robin", engines, requests)
    used = Counter(d.prefill for d in decisions if isinstance(d, Assign))
    assert used == {"m0": 2, "m1": 2, "n0": 2, "n1": 2}


def test_least_loaded_goes_by_the_share_of_an_engine_that_is_taken() -> None:
    engines = [engine("small", in_flight=1), engine("big", in_flight=2, max_running=16)]
    assert chosen("least-loaded", engines) == ("big", "big")


def test_the_longest_usable_prefix_wins_and_a_tie_goes_to_the_least_load() -> None:
    engines = [engine("a", in_flight=1), engine("b"), engine("c", in_flight=1)]
    known = prefixes(a=64, b=0, c=128)
    assert chosen("longest-prefix", engines, known) == ("c", "c")
    known = prefixes(a=64, b=64, c=64)
    assert chosen("longest-prefix", engines, known) == ("b", "b")


def test_a_prefix_on_a_reachable_node_is_worth_as_much_as_a_local_one() -> None:
    engines = [engine("local", in_flight=1), engine("through-node")]
    known = {"local": Prefix(128, 0, 128), "through-node": Prefix(0, 128, 128)}
    assert chosen("longest-prefix", engines, known) == ("through-node", "through-node")


def test_a_hot_prefix_does_not_collect_all_the_load() -> None:
    engines = [engine("hot", max_running=8), engine("cold", max_running=8)]
    requests = [request(n) for n in range(8)]
    decisions = schedule("longest-prefix", engines, requests, prefixes(hot=4096))
    used = Counter(d.prefill for d in decisions if isinstance(d, Assign))
    assert used == {"hot": 6, "cold": 2}  # "hot" alone would have had room for all of them


def test_a_suspect_engine_is_used_only_when_no_healthy_one_can_serve() -> None:
    suspect, well = engine("s", health=Health.SUSPECT), engine("w", in_flight=3)
    assert chosen("least-loaded", [suspect, well]) == ("w", "w")
    assert chosen("least-loaded", [suspect]) == ("s", "s")
    alone = [suspect, engine("d", "decode")]
    assert chosen("least-loaded", alone) == ("s", "s")


def test_without_a_decode_engine_a_mixed_one_decodes_or_serves_alone() -> None:
    p, m = engine("p", "prefill"), engine("m", "mixed", in_flight=1)
    assert chosen("least-loaded", [p, m]) == ("p", "m")
    busy = engine("p", "prefill", in_flight=4)
    assert chosen("least-loaded", [busy, m]) == ("m", "m")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_role_alone_is_refused_and_says_which(role: str) -> None:
    [decision] = schedule("least-loaded", [engine("e", role)], [request()], retry_after_s=7)
    assert isinstance(decision, Reject)
    assert f"only {role} engines" in decision.reason
    assert decision.retry_after_s == 7


def test_a_decision_says_what_every_candidate_had() -> None:
    engines = [
        engine("a", in_flight=2),
        engine("b"),
        engine("c", in_flight=4),
        engine("d", health=Health.DEAD),
        engine("x"),
        engine("other", model="n"),
    ]
    known = {"a": Prefix(64, 128, 128)}
    asked = [request(excluded=frozenset({"x"}))]
    [decision] = schedule("longest-prefix", engines, asked, known)
    assert isinstance(decision, Assign)
    assert {c.engine: c.verdict for c in decision.candidates} == {
        "a": "chosen to serve alone",
        "b": "passed over",
        "c": "full",
        "d": "dead",
        "x": "failed this request before",
    }
    a = next(iter(decision.candidates))
    assert (a.local_tokens, a.node_tokens, a.usable_tokens, a.load) == (64, 128, 128, 0.5)
    assert decision.usable_tokens == 128


def test_random_uses_all_engines_alike_and_decides_the_same_again() -> None:
    engines = [engine(name, max_running=1_000) for name in "abcd"]
    requests = [request(number) for number in range(800)]
    first, again = (
        [one.prefill for one in schedule("random", engines, requests) if isinstance(one, Assign)]
        for _ in range(2)
    )
    assert first == again
    used = Counter(first)
    assert sum(used.values()) == 800
    assert all(150 < used[name] < 250 for name in "abcd")


def of_sessions(engines: list[EngineRow]) -> dict[str, str]:
    """The engine of each of many sessions."""
    requests = [request(number, session=f"s{number}") for number in range(100)]
    decisions = schedule("session", engines, requests)
    return {f"s{one.request}": one.prefill for one in decisions if isinstance(one, Assign)}


def test_a_session_stays_at_its_engine_and_few_move_when_another_comes() -> None:
    engines = [engine(name, max_running=1_000) for name in "abc"]
    before = of_sessions(engines)
    assert set(before.values()) == {"a", "b", "c"}
    busy = [engine(name, max_running=1_000, in_flight=400 if name == "a" else 0) for name in "abc"]
    assert of_sessions(busy) == before
    after = of_sessions([*engines, engine("d", max_running=1_000)])
    moved = {session for session, name in after.items() if name != before[session]}
    assert {after[session] for session in moved} == {"d"}
    assert 10 < len(moved) < 45


def test_a_session_goes_elsewhere_while_its_engine_is_overloaded() -> None:
    known = of_sessions([engine(name, max_running=1_000) for name in "ab"])
    home = known["s0"]
    other = "ab".replace(home, "")
    asked = [request(0, session="s0")]
    for in_flight, wanted in ((2, home), (3, other)):
        engines = [engine(home, in_flight=in_flight), engine(other)]
        [decision] = schedule("session", engines, asked)
        assert isinstance(decision, Assign)
        assert decision.prefill == wanted
    [decision] = schedule("session", engines, [request(session="not text: \udc80")])
    assert isinstance(decision, Assign)
    engines = [engine("a", in_flight=1), engine("b")]
    assert chosen("session", engines) == ("b", "b")  # without a session


def test_lmetric_weighs_new_tokens_against_the_requests_that_an_engine_has() -> None:
    engines = [engine("warm", in_flight=2), engine("cold")]
    for usable, wanted in ((600, "cold"), (700, "warm")):  # 400 * 3 > 1000 > 300 * 3
        known = prefixes(warm=usable)
        [decision] = schedule("lmetric", engines, [request(tokens=1_000)], known)
        assert isinstance(decision, Assign)
        assert decision.prefill == wanted
    full = prefixes(warm=1_000, cold=1_000)  # a prompt that is there counts as one token
    [decision] = schedule("lmetric", engines, [request(tokens=1_000)], full)
    assert isinstance(decision, Assign)
    assert decision.prefill == "cold"
    assert chosen("lmetric", engines) == ("cold", "cold")  # without tokens
