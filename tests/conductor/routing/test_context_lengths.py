"""Goal: a prompt that no engine takes is refused with the limit; others go where they fit."""

import asyncio

import pytest

from conductor.routing.choices import Assign, Reject
from conductor.routing.dispatcher import Dispatcher
from conductor.routing.engines import EngineInfo, EngineRegistry, Role
from conductor.routing.policy import POLICIES
from conductor.routing.requests import DispatchLimits, Request, tokens_max
from conductor.routing.scheduler import Scheduler
from tests.conductor.fakes import FakeEngine, like_vllm, serving
from tests.loops import eventually, in_loop


def engine(name: str, role: str, length: int) -> EngineInfo:
    return EngineInfo(
        id=name, role=Role(role), url="http://x", model="m", page_tokens=4, domain="d",
        max_model_len=length,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engines", "most"),
    [
        ([("mixed", 10), ("mixed", 20)], 20),
        ([("mixed", 10), ("mixed", 0)], float("inf")),
        ([("prefill", 100), ("decode", 30), ("decode", 40)], 40),
        ([("prefill", 100), ("decode", 30), ("mixed", 50)], 50),
        ([("prefill", 100)], 0),
    ],
)
def test_the_longest_pair_or_engine_counts(engines: list[tuple[str, int]], most: float) -> None:
    assert tokens_max(engine(f"e{n}", *one) for n, one in enumerate(engines)) == most


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_long_prompt_goes_to_the_engine_that_takes_it_or_is_refused(policy: str) -> None:
    registry = EngineRegistry()
    for info in (engine("small", "mixed", 50), engine("large", "mixed", 100)):
        registry.register(info, 0.0)
    dispatcher = Dispatcher(registry, Scheduler(POLICIES[policy]), DispatchLimits(10, 60.0, 3))
    for number, (tokens, output) in enumerate([(90, 10), (99, None), (90, 11), (100, None)], 1):
        one = Request(number=number, model="m", arrived=0.0, tokens=tokens, output_max=output)
        dispatcher.arrive(one)
        for due, _ in dispatcher.due(0.0):
            dispatcher.learn(due, {})
        [effect] = dispatcher.step(0.0)
        dispatcher.check()
        if number <= 2:
            assert isinstance(effect, Assign)
            assert effect.decode == "large"
            dispatcher.left(number, 0.0)
        else:
            assert isinstance(effect, Reject)
            assert (effect.status, effect.code) == (400, "context_length_exceeded")
            assert "at most 100" in effect.reason


@in_loop
async def test_engines_tell_their_limit_and_a_client_is_told_the_largest() -> None:
    small, large = FakeEngine("a", "mixed", max_model_len=20), like_vllm("b")
    large.listed = {"max_model_len": 40}
    async with serving(small, large) as client:
        status, answer, headers = await client.complete(list(range(40)), max_tokens=8)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert answer["error"]["type"] == "invalid_request_error"
        assert "48 tokens with its answer; at most 40 are possible" in answer["error"]["message"]
        assert "Retry-After" not in headers
        assert (await client.decision(headers["X-Request-Id"]))["outcome"] == "rejected"
        for _ in range(3):
            status, answer, _ = await client.complete(list(range(30)), max_tokens=8)
            assert answer["choices"][0]["text"] == "whole from b"
        assert not small.requests


@in_loop
@pytest.mark.parametrize("length", [0, -1, 1 << 60, "many", None, [1]])
async def test_a_limit_that_is_none_is_no_limit(length: object) -> None:
    engine = like_vllm("b")
    engine.listed = {"max_model_len": length}
    async with serving(engine) as client:
        assert (await client.complete(list(range(4_000))))[0] == 200


@in_loop
async def test_a_prompt_that_only_the_busy_engine_takes_waits_for_it() -> None:
    small, large = (
        FakeEngine(name, "mixed", max_model_len=length, max_running=1)
        for name, length in (("a", 20), ("b", 40))
    )
    async with serving(small, large) as client:
        large.gate.clear()
        tasks = [asyncio.create_task(client.complete(list(range(30)))) for _ in range(2)]
        await eventually(lambda: len(client.conductor.queue) == 1)
        assert not small.requests
        large.gate.set()
        assert [one[0] for one in await asyncio.gather(*tasks)] == [200, 200]
        assert len(large.requests) == 2
