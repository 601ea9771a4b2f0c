"""Goal: wherever an engine dies, each client has its answer or an error in time, and nothing stays.

The four states of a request: it waits for an engine, its prompt is computed, its KV waits for a
place to decode, its answer is streamed.
"""

import asyncio
from typing import Any

import pytest

from tests.conductor.fakes import Client, FakeEngine, serving, sse
from tests.loops import eventually, in_loop

POLICIES = ("longest-prefix", "cache-global", "earliest-first-token")
HEALTH = {"probe_s": 0.05, "dead_after": 2}


def nothing_is_held(client: Client) -> bool:
    dispatcher = client.conductor.queue.dispatcher
    dispatcher.check()
    held = [dispatcher.in_flight(engine.info.id) for engine in client.conductor.registry]
    return not any(held) and not len(client.conductor.queue)


def ask(client: Client, number: int = 0, **fields: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(client.complete([number, 2, 3, 4, 5], **fields))


async def dies(client: Client, engine: FakeEngine) -> None:
    """It answers nobody any more, and is noticed to be dead."""
    engine.broken = "reset"
    engine.healthy = False
    engine.gate.set()
    known = client.conductor.registry.get(engine.id)
    assert known is not None
    await eventually(lambda: known.health.state == "dead", "it is dead")


@pytest.mark.parametrize("policy", POLICIES)
@in_loop
async def test_who_waits_for_an_engine_that_dies_goes_to_another(policy: str) -> None:
    dying, other = (FakeEngine(name, "mixed", max_running=1) for name in "ab")
    async with serving(dying, other, policy={"name": policy}, health=HEALTH) as client:
        dying.gate.clear()
        other.gate.clear()
        asked = [ask(client, number) for number in range(4)]
        await eventually(lambda: dying.running == other.running == 1)
        await eventually(lambda: len(client.conductor.queue) == 2)
        await dies(client, dying)
        other.gate.set()
        assert {(await one)[0] for one in asked} == {200}
        assert len(other.requests) == 4
        await eventually(lambda: nothing_is_held(client))


@pytest.mark.parametrize("policy", POLICIES)
@in_loop
async def test_who_waits_is_told_at_once_when_all_engines_are_dead(policy: str) -> None:
    engines = [FakeEngine(name, "mixed", max_running=1) for name in "ab"]
    sections = {"policy": {"name": policy}, "health": HEALTH, "queue": {"wait_s": 3600.0}}
    async with serving(*engines, **sections) as client:
        for one in engines:
            one.gate.clear()
        asked = [ask(client, number) for number in range(4)]
        await eventually(lambda: len(client.conductor.queue) == 2)
        for one in engines:
            await dies(client, one)
        for status, answer, headers in await asyncio.gather(*asked):
            assert status == 503
            assert answer["error"]["code"] in ("no_engine", "engines_failed")
            assert int(headers["Retry-After"]) >= 1
        await eventually(lambda: nothing_is_held(client))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@in_loop
async def test_a_prompt_whose_engine_dies_is_computed_elsewhere(policy: str, stream: bool) -> None:
    prefills = [FakeEngine(name, "prefill") for name in "pq"]
    decode = FakeEngine("d", "decode")
    sections = {"policy": {"name": policy}, "health": HEALTH}
    async with serving(*prefills, decode, **sections) as client:
        for one in prefills:
            one.gate.clear()
        asked = ask(client, stream=stream)
        await eventually(lambda: any(one.running for one in prefills))
        dying, other = sorted(prefills, key=lambda one: -one.running)
        other.gate.set()
        await dies(client, dying)
        assert (await asked)[0] == 200
        assert len(other.requests) == 1
        await eventually(lambda: nothing_is_held(client))


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("policy", POLICIES)
@in_loop
async def test_kv_that_waits_for_an_engine_that_dies_goes_to_another_or_its_client_is_told(
    policy: str, left: int
) -> None:
    prefill = FakeEngine("p", "prefill")
    dying = FakeEngine("d", "decode", max_running=1)
    others = [FakeEngine("e", "decode", max_running=1)][:left]
    sections = {"policy": {"name": policy}, "health": HEALTH, "queue": {"wait_s": 3600.0}}
    async with serving(prefill, dying, *others, **sections) as client:
        for one in (dying, *others):
            one.gate.clear()
        asked = [ask(client, number) for number in range(1 + len(others))]
        await eventually(lambda: all(one.running == 1 for one in (dying, *others)))
        waiting = ask(client, 7)
        await eventually(lambda: client.conductor.queue.dispatcher._arrived, "its KV waits")
        await dies(client, dying)
        for one in others:
            one.gate.set()
        answers = await asyncio.gather(waiting, *asked)
        assert {one[0] for one in answers} == {200 if others else 503}
        await eventually(lambda: nothing_is_held(client))


@pytest.mark.parametrize("policy", POLICIES)
@in_loop
async def test_a_stream_whose_engine_dies_ends_with_an_error_and_is_not_begun_again(
    policy: str,
) -> None:
    prefill, dying, other = (
        FakeEngine("p", "prefill"), FakeEngine("d", "decode"), FakeEngine("e", "decode")
    )  # fmt: skip
    sections = {"policy": {"name": policy}, "health": HEALTH}
    async with serving(prefill, dying, **sections) as client:
        dying.mid_gate.clear()
        asked = ask(client, stream=True)
        await eventually(lambda: dying.requests)
        await other.start()
        try:
            await client.register(other)
            dying.broken = "midway"
            dying.mid_gate.set()
            status, answer, _ = await asked
            assert status == 200
            assert sse(answer)[-1]["error"]["code"] == "engine_failed"
            assert not other.requests
            await eventually(lambda: nothing_is_held(client))
        finally:
            await other.stop()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("silent", ["prefill", "decode", "mixed", "tokenizer"])
@in_loop
async def test_nobody_waits_for_ever_for_an_engine_that_is_silent(
    silent: str, stream: bool
) -> None:
    engines = {
        "prefill": FakeEngine("p", "prefill"), "decode": FakeEngine("d", "decode"),
        "mixed": FakeEngine("m", "mixed"),
    }  # fmt: skip
    used = ["prefill", "decode"] if silent in ("prefill", "decode") else ["mixed"]
    deadline = {"tokenize_s": 0.2}  # all that the other parts of a good engine have to keep
    if silent != "tokenizer":
        deadline |= {"prefill_s": 0.2, "first_byte_s": 0.2, "request_s": 1.0, "push_s": 0.2}
    async with serving(
        *(engines[one] for one in used), deadline=deadline, policy={"name": "longest-prefix"}
    ) as client:
        if silent == "tokenizer":
            engines["mixed"].tokenize_gate.clear()
        else:
            engines[silent].gate.clear()
        status, _, _ = await client.complete("a text", stream=stream)
        assert status == 200 if silent == "tokenizer" else status in (503, 504)
        await eventually(lambda: nothing_is_held(client))
        await eventually(lambda: client.conductor.proxy.active == 0)


@in_loop
async def test_the_time_at_an_engine_that_fails_is_not_the_conductor_s_own() -> None:
    silent, other = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    async with serving(silent, other, deadline={"first_byte_s": 3.0}) as client:
        silent.gate.clear()
        status, _, headers = await client.complete("x", stream=True)
        assert status == 200
        decision = await client.decision(headers["X-Request-Id"])
        assert [one["prefill"] for one in decision["attempts"]] == ["a", "b"]
        assert decision["ttft_s"] > 3.0
        assert decision["conductor_s"] < decision["ttft_s"] - 2.9


@in_loop
async def test_few_engines_are_asked_for_tokens_one_after_another() -> None:
    """A client does not wait for the deadlines of all engines."""
    engines = [FakeEngine(name, "mixed") for name in "abcde"]
    async with serving(*engines, deadline={"tokenize_s": 2.0}) as client:
        for engine in engines:
            engine.tokenize_gate.clear()
        status, answer, _ = await client.post("/tokenize", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "no_engine")
        assert sum(engine.tokenized for engine in engines) == 3


@pytest.mark.parametrize("policy", POLICIES)
@in_loop
async def test_an_engine_that_refuses_a_prompt_is_not_thought_to_have_it(policy: str) -> None:
    busy, works = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    busy.status = 503
    prompt, tries = list(range(64)), list[list[str]]()
    async with serving(busy, works, policy={"name": policy}) as client:
        while not tries or tries[-1] != ["b"]:
            assert len(tries) < 20, tries  # the index hears of a refusal a moment later
            status, _, headers = await client.complete(prompt)
            assert status == 200
            decision = await client.decision(headers["X-Request-Id"])
            tries.append([one["prefill"] for one in decision["attempts"]])
        assert tries[0] == ["a", "b"]
        pages = 16 * len(tries)  # of the other one
        await eventually(lambda: client.conductor.index.present().report.expected == pages)


@in_loop
async def test_an_engine_that_was_removed_has_no_failures_any_more() -> None:
    removed, other = FakeEngine("a", "mixed"), FakeEngine("b", "mixed")
    async with serving(removed, other) as client:
        removed.gate.clear()
        asked = asyncio.create_task(client.complete())
        await eventually(lambda: removed.running == 1)
        assert await client.delete("/v1/engines/a") == 204
        await removed.stop()
        assert (await asked)[0] == 200
        told = (await client.get("/metrics"))[1]
        assert "retries_total 1.0" in told
        assert "engine_failures_total{" not in told
