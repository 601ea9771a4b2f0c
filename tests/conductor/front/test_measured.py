"""Goal: a decision has what its predicted terms were in truth, where that is known."""

import asyncio
import time
from typing import Any

import pytest

from tests.conductor.fakes import Client, FakeEngine, serving
from tests.loops import eventually, in_loop


@pytest.fixture(autouse=True)
def no_slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other work any client may seem to be one."""
    monkeypatch.setattr("conductor.front.relaying._SLOW_READER_S", 60.0)


async def passed(client: Client) -> float:
    """Let some time pass; returns how much."""
    began = time.monotonic()
    for _ in range(3):
        await client.get("/health")
    return time.monotonic() - began


async def only_attempt(client: Client, headers: Any) -> tuple[Any, Any]:
    decision = await client.decision(headers["X-Request-Id"])
    [attempt] = decision["attempts"]
    assert attempt["outcome"] == "ok"
    return decision, attempt


@in_loop
async def test_the_handoff_lasts_from_the_place_to_the_first_token_of_the_decode_engine() -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    async with serving(p, d) as client:
        d.gate.clear()
        asked = asyncio.create_task(client.complete(stream=True))
        await eventually(lambda: d.running == 1)
        least_s = await passed(client)
        d.gate.set()
        decision, attempt = await only_attempt(client, (await asked)[2])
        most_s = decision["ttft_s"] - attempt["assigned_s"] - attempt["prefill_s"]
        assert least_s <= attempt["handoff_s"] <= most_s


@pytest.mark.parametrize("plan", ["alone", "pair"])
@in_loop
async def test_the_time_between_tokens_is_that_after_the_first_one(plan: str) -> None:
    last = FakeEngine("d", "mixed" if plan == "alone" else "decode")
    engines = [last] if plan == "alone" else [FakeEngine("p", "prefill"), last]
    async with serving(*engines) as client:
        last.mid_gate.clear()
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            least_s = await passed(client)
            last.mid_gate.set()
            await response.read()
        decision, attempt = await only_attempt(client, response.headers)
        assert attempt["served"]["completion_tokens"] == 3
        assert least_s <= 2 * attempt["tbt_s"] <= decision["total_s"]
        assert (attempt["handoff_s"] is None) == (plan == "alone")


@in_loop
async def test_an_answer_that_is_not_streamed_tells_neither() -> None:
    async with serving(FakeEngine("p", "prefill"), FakeEngine("d", "decode")) as client:
        _, attempt = await only_attempt(client, (await client.complete())[2])
        assert (attempt["plan"], attempt["handoff_s"], attempt["tbt_s"]) == ("pair", None, None)


@pytest.mark.parametrize("why", ["nothing to relay", "refused"])
@in_loop
async def test_a_decode_engine_that_computes_the_prompt_itself_has_got_no_handoff(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    if why == "refused":
        d.status, d.refuses = 400, "kv_transfer_params.prompt_tokens"
    else:
        monkeypatch.setattr(p, "transfer", lambda: None)
    async with serving(p, d) as client:
        _, attempt = await only_attempt(client, (await client.complete(stream=True))[2])
        assert "kv_transfer_params" not in d.requests[-1]
        assert attempt["handoff_s"] is None
        assert attempt["tbt_s"] >= 0


@in_loop
async def test_an_engine_that_does_not_count_its_tokens_leaves_their_times_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = FakeEngine("e", "mixed")
    monkeypatch.setattr(engine, "_end", lambda _: {})
    async with serving(engine) as client:
        _, attempt = await only_attempt(client, (await client.complete(stream=True))[2])
        assert (attempt["served"], attempt["tbt_s"]) == (None, None)
