"""The policies: what must hold for every view, and what each of them prefers."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.routing.engines import Health, Role
from conductor.routing.policy import (
    POLICIES,
    Assign,
    EngineView,
    Hold,
    Plan,
    Prefix,
    Reject,
    Scheduler,
    View,
    Waiting,
)

NOW = 100.0


def engine(name: str, role: str = "mixed", **fields: object) -> EngineView:
    values = {"model": "m", "health": Health.ALIVE, "in_flight": 0, "max_running": 4, **fields}
    return EngineView(id=name, role=Role(role), **values)  # type: ignore[arg-type]


def request(number: int = 1, **fields: object) -> Waiting:
    return Waiting(number=number, **{"model": "m", "deadline": NOW + 1, **fields})  # type: ignore[arg-type]


@st.composite
def views(draw: st.DrawFn) -> tuple[View, list[Waiting]]:
    engines = []
    for number in range(draw(st.integers(0, 6))):
        max_running = draw(st.integers(1, 4))
        engines.append(
            EngineView(
                id=f"e{number}",
                model=draw(st.sampled_from(["m", "m", "n"])),
                adapters=draw(st.sets(st.sampled_from(["n", "lora"]), max_size=2)),
                role=draw(st.sampled_from(list(Role))),
                health=draw(st.sampled_from([Health.ALIVE, *Health])),
                in_flight=draw(st.integers(0, max_running + 1)),  # it may have shrunk
                max_running=max_running,
                last_assigned=draw(st.integers(0, 9)),
            )
        )
    ids = [e.id for e in engines] or ["none"]
    waiting = [
        Waiting(
            number=number,
            model=draw(st.sampled_from(["m", "n", "lora", "unknown"])),
            deadline=NOW + draw(st.integers(-1, 5)),
            excluded=frozenset(draw(st.sets(st.sampled_from(ids), max_size=2))),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    prefixes = {name: Prefix(*draw(st.tuples(*[st.integers(0, 1000)] * 3))) for name in ids}
    return View(engines=engines, assigned=9, prefixes=lambda _: prefixes), waiting


def serving(view: View, model: str) -> list[str]:
    """The engines of a model; of a LoRA adapter only if no model has its name."""
    of_base = [e.id for e in view.engines if e.model == model]
    return of_base or [e.id for e in view.engines if model in e.adapters]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@given(case=views())
def test_every_decision_is_possible_and_no_request_is_lost(
    policy: str, case: tuple[View, list[Waiting]]
) -> None:
    view, waiting = case
    decisions = Scheduler(policy).schedule(view, waiting, NOW)

    assert [d.request for d in decisions] == [w.number for w in waiting]
    engines = {e.id: e for e in view.engines}
    given_out: Counter[str] = Counter()
    for decision, wanted in zip(decisions, waiting, strict=True):
        if not isinstance(decision, Assign):
            continue
        pair = {decision.prefill, decision.decode}
        given_out.update(pair)
        for name in pair:
            assert engines[name].health is not Health.DEAD
            assert name in serving(view, wanted.model)
            assert name not in wanted.excluded
        first, second = engines[decision.prefill], engines[decision.decode]
        if decision.plan is Plan.ALONE:
            assert first is second
            assert first.role is Role.MIXED
        else:
            assert first is not second
            assert first.role is Role.PREFILL
            assert second.role is not Role.PREFILL
        assert [c.engine for c in decision.candidates] == serving(view, wanted.model)
        assert decision.reason
    for name, count in given_out.items():
        assert engines[name].in_flight + count <= engines[name].max_running
    for decision, wanted in zip(decisions, waiting, strict=True):
        if isinstance(decision, Hold):
            assert wanted.deadline > NOW
            assert any(
                e.in_flight + given_out[e.id] >= e.max_running
                for e in view.engines
                if e.id in serving(view, wanted.model)
            )
        if isinstance(decision, Reject):
            assert decision.retry_after_s >= 1


def chosen(policy: str, view: View, wanted: Waiting | None = None) -> tuple[str, str]:
    [decision] = Scheduler(policy).schedule(view, [wanted or request()], NOW)
    assert isinstance(decision, Assign), decision
    return decision.prefill, decision.decode


def prefixes(**usable: int) -> dict[str, Prefix]:
    return {name: Prefix(tokens, 0, tokens) for name, tokens in usable.items()}


def test_round_robin_takes_whose_turn_it_is_in_each_role() -> None:
    engines = [engine("p1", "prefill"), engine("p2", "prefill"), engine("d1", "decode")]
    decisions = Scheduler("round-robin").schedule(
        View(engines=engines), [request(n) for n in range(4)], NOW
    )
    assert [d.prefill for d in decisions if isinstance(d, Assign)] == ["p1", "p2", "p1", "p2"]


def test_round_robin_of_two_models_does_not_lock_step() -> None:
    engines = [engine(f"{model}{i}", model=model) for model in "mn" for i in range(2)]
    waiting = [request(n, model="mn"[n % 2]) for n in range(8)]
    decisions = Scheduler("round-robin").schedule(View(engines=engines), waiting, NOW)
    used = Counter(d.prefill for d in decisions if isinstance(d, Assign))
    assert used == {"m0": 2, "m1": 2, "n0": 2, "n1": 2}


def test_least_loaded_goes_by_the_share_of_an_engine_that_is_taken() -> None:
    view = View(engines=[engine("small", in_flight=1), engine("big", in_flight=2, max_running=16)])
    assert chosen("least-loaded", view) == ("big", "big")


def test_the_longest_usable_prefix_wins_and_a_tie_goes_to_the_least_load() -> None:
    engines = [engine("a", in_flight=1), engine("b"), engine("c", in_flight=1)]
    view = View(engines=engines, prefixes=lambda _: prefixes(a=64, b=0, c=128))
    assert chosen("longest-prefix", view) == ("c", "c")
    view = View(engines=engines, prefixes=lambda _: prefixes(a=64, b=64, c=64))
    assert chosen("longest-prefix", view) == ("b", "b")


def test_a_prefix_on_a_reachable_node_is_worth_as_much_as_a_local_one() -> None:
    engines = [engine("local", in_flight=1), engine("through-node")]
    known = {"local": Prefix(128, 0, 128), "through-node": Prefix(0, 128, 128)}
    view = View(engines=engines, prefixes=lambda _: known)
    assert chosen("longest-prefix", view) == ("through-node", "through-node")


def test_a_hot_prefix_does_not_collect_all_the_load() -> None:
    engines = [engine("hot", max_running=8), engine("cold", max_running=8)]
    view = View(engines=engines, prefixes=lambda _: prefixes(hot=4096))
    decisions = Scheduler("longest-prefix").schedule(view, [request(n) for n in range(8)], NOW)
    used = Counter(d.prefill for d in decisions if isinstance(d, Assign))
    assert used == {"hot": 6, "cold": 2}  # "hot" alone would have had room for all of them


def test_a_suspect_engine_is_used_only_when_no_healthy_one_can_serve() -> None:
    suspect, well = engine("s", health=Health.SUSPECT), engine("w", in_flight=3)
    assert chosen("least-loaded", View(engines=[suspect, well])) == ("w", "w")
    assert chosen("least-loaded", View(engines=[suspect])) == ("s", "s")
    alone = View(engines=[suspect, engine("d", "decode")])
    assert chosen("least-loaded", alone) == ("s", "s")


def test_without_a_decode_engine_a_mixed_one_decodes_or_serves_alone() -> None:
    p, m = engine("p", "prefill"), engine("m", "mixed", in_flight=1)
    assert chosen("least-loaded", View(engines=[p, m])) == ("p", "m")
    busy = engine("p", "prefill", in_flight=4)
    assert chosen("least-loaded", View(engines=[busy, m])) == ("m", "m")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_role_alone_is_refused_and_says_which(role: str) -> None:
    [decision] = Scheduler("least-loaded").schedule(
        View(engines=[engine("e", role)], retry_after_s=7), [request()], NOW
    )
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
    view = View(engines=engines, prefixes=lambda _: {"a": Prefix(64, 128, 128)})
    [decision] = Scheduler("longest-prefix").schedule(
        view, [request(excluded=frozenset({"x"}))], NOW
    )
    assert isinstance(decision, Assign)
    assert {c.engine: c.verdict for c in decision.candidates} == {
        "a": "chosen to serve alone",
        "b": "passed over",
        "c": "full",
        "d": "dead",
        "x": "failed this request before",
    }
    a = decision.candidates[0]
    assert (a.local_tokens, a.node_tokens, a.usable_tokens, a.load) == (64, 128, 128, 0.5)
    assert decision.usable_tokens == 128
