"""Goal: requests of others load an engine as ours do, and never keep ours from it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.costs.book import CostBook
from conductor.routing.choices import Assign
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.load import EngineLoads
from conductor.routing.others import NOBODY, TOLD_MAX, USUAL_TOKENS, EngineOthers, OtherRequests
from conductor.routing.policy import POLICIES
from tests.conductor.routing.columns import NOW, engine, request, schedule

counts = st.floats(0, 2 * TOLD_MAX)


@given(counts, counts, st.integers(0, 3 * TOLD_MAX))
def test_what_is_not_ours_is_of_others_and_shared_as_all_is(
    running: float, waiting: float, ours: int
) -> None:
    others = EngineOthers()
    others.tell("e", running, waiting, ours)
    found = others.of("e")
    running, waiting = min(running, TOLD_MAX), min(waiting, TOLD_MAX)
    assert sum(found) == pytest.approx(max(0.0, running + waiting - ours), abs=1e-6)
    assert 0 <= found.running <= running
    assert 0 <= found.waiting <= waiting
    assert found.running * waiting == pytest.approx(found.waiting * running, rel=1e-6, abs=1e-3)


def test_only_changes_count_and_an_engine_that_does_not_tell_is_ours() -> None:
    others = EngineOthers()
    assert (others.of("e"), others.reported("e")) == (NOBODY, None)
    others.tell("e", 4.0, 2.0, 3)
    assert others.of("e") == OtherRequests(2.0, 1.0)
    changes = others.changes
    others.tell("e", 4.0, 2.0, 3)
    others.forget("f")
    assert others.changes == changes
    others.forget("e")
    assert (others.of("e"), others.reported("e"), others.changes) == (NOBODY, None, changes + 1)


@pytest.mark.parametrize("policy", ["least-loaded", "longest-prefix", "lmetric"])
def test_policies_by_load_prefer_the_engine_that_others_use_less(policy: str) -> None:
    engines = [engine("a", in_flight=1, others=2), engine("b", in_flight=2)]
    [decision] = schedule(policy, engines, [request(tokens=100)])
    assert isinstance(decision, Assign)
    assert decision.decode == "b"
    shown = {one.engine: (one.in_flight, one.others, one.load) for one in decision.candidates}
    assert shown == {"a": (1, 2, 0.75), "b": (2, 0, 0.5)}


@pytest.mark.parametrize("policy", ["cache-local", "cache-global", "earliest-first-token"])
def test_policies_in_seconds_count_the_prompts_of_others_that_wait(policy: str) -> None:
    engines = [engine("a", others=3, others_s=9.0), engine("b", backlog_s=0.05)]
    [decision] = schedule(policy, engines, [request(tokens=1000)])
    assert isinstance(decision, Assign)
    assert decision.decode == "b"
    found = {one.engine: one.queue_s for one in decision.candidates}
    assert found == {"a": pytest.approx(9.0), "b": pytest.approx(0.05)}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_however_many_others_there_are_an_engine_gets_what_only_it_can_serve(policy: str) -> None:
    engines = [engine("a", max_running=2, others=1000, others_s=1e6)]
    decisions = schedule(policy, engines, [request(tokens=100)])
    assert [type(one) for one in decisions] == [Assign]


def info(name: str = "e", ranks: int = 0) -> EngineInfo:
    return EngineInfo(
        id=name, role=Role.MIXED, url="http://x", model="m", page_tokens=4, domain="d",
        shape="llama3-70b", hardware="8xh800",
    )  # fmt: skip


def test_costs_count_others_as_requests_like_ours() -> None:
    infos = [info()]
    alone, beside = EngineLoads(CostBook()), EngineLoads(CostBook())
    for loads, requests in ((alone, 4), (beside, 2)):
        for number in range(requests):
            loads.decodes(number, infos[0], 3_000, NOW)
    beside.tell_others("e", 4.0, 0.0, 2)
    both = [loads.columns(infos, NOW) for loads in (alone, beside)]
    assert both[0].inputs.step_s == pytest.approx(both[1].inputs.step_s)
    assert both[0].inputs.kv_room == pytest.approx(both[1].inputs.kv_room)
    beside.tell_others("e", None, None, 0)
    assert beside.columns(infos, NOW).inputs.step_s < both[1].inputs.step_s
    beside.check()


def test_a_prompt_of_others_takes_as_long_as_ours_lately_or_as_a_usual_one() -> None:
    infos = [info()]
    loads = EngineLoads(CostBook())
    loads.tell_others("e", 0.0, 3.0, 0)
    usual_s = loads.prefill_seconds(infos[0], USUAL_TOKENS, 0)
    assert loads.columns(infos, NOW).inputs.others_s == pytest.approx([3 * usual_s])
    loads.assigned(1, infos[0], (1_000, 0), (0.5, 2.0), NOW)
    loads.tell_others("e", 0.0, 4.0, 1)
    columns = loads.columns(infos, NOW)
    assert columns.inputs.others_s == pytest.approx([3 * 2.0])
    assert columns.backlog_s == pytest.approx([2.5]), "ours alone"


def test_without_ours_others_count_as_requests_of_usual_size() -> None:
    infos = [info()]
    loads = EngineLoads(CostBook())
    idle = loads.columns(infos, NOW)
    loads.tell_others("e", 5.0, 0.0, 0)
    busy = loads.columns(infos, NOW)
    assert np.all(busy.inputs.step_s > idle.inputs.step_s)
    assert idle.inputs.kv_room - busy.inputs.kv_room == pytest.approx([5 * USUAL_TOKENS])
    loads.forget("e")
    assert loads.columns(infos, NOW).inputs.kv_room == pytest.approx(idle.inputs.kv_room)
