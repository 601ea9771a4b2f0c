"""Goal: engines tell what others have there; one that does not tell is as it always was."""

import asyncio

import pytest

from conductor.front import others
from conductor.front.others import requests_in
from conductor.front.upstream import SMALL_ANSWER_BYTES_MAX
from tests.conductor.fakes import Client, FakeEngine, serving
from tests.loops import eventually, in_loop

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 7.0
"""
SGLANG = """\
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:num_running_reqs_offline_batch{model_name="m"} 9.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 1.0
"""
REFERENCE = "reference_engine_waiting 1.0\nreference_engine_running 5.0\n"


@pytest.mark.parametrize("text", [VLLM, SGLANG, REFERENCE, VLLM.replace("\n", "\r\n")])
def test_each_engine_s_own_names_are_read_and_those_of_ranks_added(text: str) -> None:
    assert requests_in(text.encode()) == (5.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "", "up 1", "vllm:num_requests_running 5", "sglang:num_queue_reqs 3",
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting 1",
        "vllm:num_requests_running -1\nvllm:num_requests_waiting 1",
        "vllm:num_requests_running 1.2.3\nvllm:num_requests_waiting 1",
        "vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1",
    ],
)  # fmt: skip
def test_what_is_no_number_of_requests_is_none(text: str) -> None:
    assert requests_in(text.encode()) is None


def told(running: float, waiting: float) -> str:
    return f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"


async def shown(client: Client, name: str = "e") -> object:
    _, engine = await client.get(f"/v1/engines/{name}")
    return engine["others"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(others, "_PERIOD_S", 0.01)


@in_loop
async def test_requests_of_others_are_shown_and_ours_are_not_among_them() -> None:
    engine = FakeEngine("e", "mixed")
    engine.metrics = told(3, 1)
    async with serving(engine) as client:
        loads = client.conductor.queue.dispatcher.loads
        await eventually(lambda: sum(loads.others.of("e")) == 4)
        assert await shown(client) == {"running": 3.0, "waiting": 1.0}
        _, metrics = await client.get("/metrics")
        assert 'engine_others{engine="e",state="waiting"} 1.0' in metrics
        engine.gate.clear()
        ours = [asyncio.create_task(client.complete()) for _ in range(2)]
        await eventually(lambda: sum(loads.others.of("e")) == 2, "two of the four are ours")
        engine.gate.set()
        assert [(await one)[0] for one in ours] == [200, 200]
        assert await client.delete("/v1/engines/e") == 204
        assert loads.others.reported("e") is None


@in_loop
async def test_a_request_goes_to_the_engine_that_others_use_less() -> None:
    busy, idle = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    busy.metrics, idle.metrics = told(6, 0), told(0, 0)
    async with serving(busy, idle, policy={"name": "least-loaded"}) as client:
        loads = client.conductor.queue.dispatcher.loads
        await eventually(lambda: loads.others.reported("a") and loads.others.reported("b"))
        for _ in range(3):
            _, answer, headers = await client.complete()
            assert answer["choices"][0]["text"] == "whole from b"
        decision = await client.decision(headers["X-Request-Id"])
        candidates = decision["attempts"][0]["candidates"]
        assert {one["engine"]: one.get("others", 0) for one in candidates} == {"a": 6, "b": 0}


@in_loop
async def test_an_engine_without_such_metrics_is_not_asked_again_for_a_while() -> None:
    without, other = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    other.metrics, third = "up 1\n", FakeEngine("c", "mixed")
    third.metrics = told(1, 0)
    async with serving(without, other, third) as client:
        await eventually(lambda: third.scraped >= 5)
        assert (without.scraped, other.scraped) == (1, 1)
        assert await shown(client, "a") is await shown(client, "b") is None
        assert [(await client.complete())[0] for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("text", [None, "x" * (SMALL_ANSWER_BYTES_MAX + 1), "down"])
@in_loop
async def test_an_engine_that_stops_telling_is_thought_to_be_ours_alone(text: str | None) -> None:
    engine = FakeEngine("e", "mixed")
    engine.metrics = told(3, 1)
    async with serving(engine) as client:
        loads = client.conductor.queue.dispatcher.loads
        await eventually(lambda: loads.others.reported("e"))
        if text == "down":
            await engine.stop()
        engine.metrics = text
        await eventually(lambda: loads.others.reported("e") is None)
        assert await shown(client) is None
        assert not client.conductor.faults.counts["background"]
