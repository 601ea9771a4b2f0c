"""Pairs of engines: in turn, at once, and what either costs if an engine fails."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from conductor.protocols import PROTOCOLS
from conductor.protocols.base import Fields, PairProtocol, PairRequest, one_token
from kvstore.handoff.rooms import ROOM_MAX
from tests.conductor.fakes import OPERATE, FakeEngine, serving, sse, texts
from tests.loops import eventually, in_loop


def room(request: PairRequest, **more: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps({"room": request.room, **more}).encode())


def to_prefill(request: PairRequest) -> Fields:
    told = room(request, decode=request.decode_url)
    return {**one_token(request.fields), "kv_transfer_params": told}


def to_decode(request: PairRequest, transfer: msgspec.Raw | None) -> Fields:
    assert transfer is None
    told = room(request, prefill=request.prefill_url)
    return {**request.fields, "kv_transfer_params": told}


@pytest.fixture(autouse=True)
def other_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROTOCOLS, "once", PairProtocol(True, to_prefill, to_decode))
    monkeypatch.setitem(PROTOCOLS, "asked-by-decode", PairProtocol(True, None, to_decode))


def push(name: str, role: str, protocol: str = "once", **described: object) -> FakeEngine:
    return FakeEngine(name, role, protocol=protocol, **described)


def rooms(*engines: FakeEngine) -> list[Any]:
    asked = [one["kv_transfer_params"]["room"] for engine in engines for one in engine.requests]
    return sorted(asked)


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_at_once_both_engines_get_the_request_and_one_room(stream: bool) -> None:
    p, d = push("p", "prefill"), push("d", "decode")
    async with serving(p, d) as client:
        p.gate.clear()
        d.gate.clear()
        asked = asyncio.create_task(client.complete("hi", max_tokens=7, stream=stream))
        await eventually(lambda: p.running == d.running == 1, "both have it")
        assert client.conductor.queue.dispatcher.in_flight("d") == 1
        p.gate.set()
        await eventually(lambda: not client.conductor.queue.dispatcher.in_flight("p"))
        d.gate.set()
        status, answer, headers = await asked
        assert status == 200
        said = texts(sse(answer)) if stream else [answer["choices"][0]["text"]]
        assert said == (["d:0 ", "d:1 ", "d:2 "] if stream else ["whole from d"])
        [to_p], [to_d] = p.requests, d.requests
        assert (to_p["max_tokens"], to_d["max_tokens"]) == (1, 7)
        assert to_p["kv_transfer_params"]["decode"] == d.url
        assert to_d["kv_transfer_params"]["prefill"] == p.url
        [room_number] = set(rooms(p, d))
        assert 0 <= room_number <= ROOM_MAX
        [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
        assert attempt["outcome"] == "ok"
        assert attempt["prefilled"]["prompt_tokens"] == 9
        assert attempt["decode_queue_s"] is None


@pytest.mark.parametrize("fails", ["p", "d"])
@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_at_once_if_either_fails_before_the_first_byte_both_start_again(
    fails: str, stream: bool
) -> None:
    first = [push("p1", "prefill"), push("d1", "decode")]
    later = [push("p2", "prefill"), push("d2", "decode")]
    async with serving(*first) as client:
        broken, other = first if fails == "p" else first[::-1]
        broken.broken = "reset"
        broken.gate.clear()
        other.gate.clear()
        asked = asyncio.create_task(client.complete("hi", stream=stream))
        await eventually(lambda: broken.running == other.running == 1, "both have it")
        for engine in later:
            await engine.start()
        try:
            await client.register(*later)
            broken.gate.set()
            await eventually(lambda: other.aborted == 1, "the other one's part ends")
            other.gate.set()
            status, _, headers = await asked
        finally:
            for engine in later:
                await engine.stop()
        assert status == 200
        decision = await client.decision(headers["X-Request-Id"])
        attempts = decision["attempts"]
        assert len(attempts) == 2
        assert broken.id in attempts[0]["outcome"]
        assert attempts[1]["outcome"] == "ok"
        asked_rooms = rooms(*first, *later)
        assert len(asked_rooms) == 4
        assert len(set(asked_rooms)) == 2  # each attempt has its own
        in_flight = client.conductor.queue.dispatcher.in_flight
        assert not any(in_flight(one.id) for one in (*first, *later))


@in_loop
async def test_at_once_a_prefill_engine_that_fails_after_the_first_byte_ends_nothing() -> None:
    p, d = push("p", "prefill"), push("d", "decode")
    async with serving(p, d) as client:
        p.gate.clear()
        p.broken = "reset"
        d.mid_gate.clear()
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            p.gate.set()
            await eventually(lambda: p.running == 0, "it has failed")
            d.mid_gate.set()
            rest = (await response.read()).decode()
        assert sse(rest)[-1] == "[DONE]"
        assert len(p.requests) == len(d.requests) == 1
        _, metrics = await client.get("/metrics", Authorization=f"Bearer {OPERATE}")
        assert 'engine_failures_total{engine="p"} 1.0' in metrics


@in_loop
async def test_at_once_a_client_that_goes_ends_both_parts() -> None:
    p, d = push("p", "prefill"), push("d", "decode")
    async with serving(p, d) as client:
        p.gate.clear()
        d.gate.clear()
        asked = asyncio.create_task(client.complete())
        await eventually(lambda: p.running == d.running == 1, "both have it")
        asked.cancel()
        await eventually(lambda: p.aborted == d.aborted == 1, "both were aborted")
        await eventually(lambda: client.conductor.proxy.active == 0)
        assert client.conductor.queue.dispatcher.in_flight("p") == 0
        assert client.conductor.queue.dispatcher.in_flight("d") == 0


@in_loop
async def test_a_decode_engine_that_asks_the_prefill_engine_itself_is_asked_alone() -> None:
    p = push("p", "prefill", "asked-by-decode", max_running=1)
    d = push("d", "decode", "asked-by-decode")
    async with serving(p, d) as client:
        d.mid_gate.clear()
        asked = asyncio.create_task(client.complete(stream=True))
        await eventually(lambda: d.running == 1)
        # With its first byte, the prompt was computed: the next one can be.
        await eventually(lambda: not client.conductor.queue.dispatcher.in_flight("p"))
        d.mid_gate.set()
        assert (await asked)[0] == 200
        assert p.requests == []
        assert d.requests[0]["kv_transfer_params"]["prefill"] == p.url


@in_loop
async def test_in_turn_the_kv_goes_to_a_decode_engine_with_a_place_and_the_log_says_so() -> None:
    p = FakeEngine("p", "prefill")
    full, late = FakeEngine("d1", "decode", max_running=1), FakeEngine("d2", "decode")
    async with serving(p, full) as client:
        full.gate.clear()
        first = asyncio.create_task(client.complete("first"))
        await eventually(lambda: full.running == 1, "it has no further place")
        second = asyncio.create_task(client.complete("second"))
        await eventually(lambda: len(p.requests) == 2 and len(client.conductor.queue) == 1)
        assert client.conductor.queue.dispatcher.in_flight("p") == 0
        await late.start()
        try:
            await client.register(late)
            status, answer, headers = await second
        finally:
            await late.stop()
        assert (status, answer["choices"][0]["text"]) == (200, "whole from d2")
        assert late.requests[0]["kv_transfer_params"]["handoff_id"] == "handoff of p"
        decision = await client.decision(headers["X-Request-Id"])
        [attempt] = decision["attempts"]
        assert (attempt["prefill"], attempt["decode"]) == ("p", "d2")
        assert decision["queue_s"] >= attempt["decode_queue_s"] > 0
        full.gate.set()
        assert (await first)[0] == 200


@in_loop
async def test_kv_that_waits_too_long_for_a_place_is_503_with_retry_after() -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode", max_running=1)
    async with serving(p, d, queue={"wait_s": 0.05}) as client:
        d.gate.clear()
        first = asyncio.create_task(client.complete())
        await eventually(lambda: d.running == 1)
        status, answer, headers = await client.complete()
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert "could decode" in answer["error"]["message"]
        [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
        assert "could decode" in attempt["outcome"]
        assert "Retry-After" in headers
        d.gate.set()
        assert (await first)[0] == 200


FIELDS = {
    name: msgspec.Raw(json.dumps(value).encode())
    for name, value in {"prompt": "x", "max_tokens": 9, "stream": True, "seed": 3}.items()
}


@pytest.mark.parametrize("name", ["reference", "vllm"])
def test_a_decode_engine_gets_the_request_and_what_the_prefill_engine_said(name: str) -> None:
    request = PairRequest(FIELDS, 1, "http://p", "http://d")
    decode = PROTOCOLS[name].decode
    assert decode(request, None) == FIELDS
    said = msgspec.Raw(b'{"block_ids": [1, 2]}')
    assert decode(request, said) == {**FIELDS, "kv_transfer_params": said}


@in_loop
async def test_an_engine_s_protocol_is_registered_said_or_taken_from_its_routes() -> None:
    said, bare = push("said", "mixed"), FakeEngine("bare", "mixed")
    listed, strange = FakeEngine("listed", "mixed"), push("strange", "mixed", "unknown")
    listed.describes = False
    async with serving(said, bare, listed) as client:
        shown = {
            one["id"]: one["protocol"] for one in (await client.get("/v1/engines"))[1]["engines"]
        }
        assert shown == {"said": "once", "bare": "reference", "listed": "vllm"}
        body = {"id": "listed", "role": "mixed", "url": listed.url}
        status, answer, _ = await client.operate("/v1/engines", {**body, "protocol": "reference"})
        assert (status, answer["protocol"]) == (201, "reference")
        status, answer, _ = await client.operate("/v1/engines", {**body, "protocol": "none"})
        assert (status, answer["error"]["param"]) == (400, "protocol")
        await strange.start()
        try:
            body = {"id": "strange", "role": "mixed", "url": strange.url}
            status, answer, _ = await client.operate("/v1/engines", body)
        finally:
            await strange.stop()
        assert (status, answer["error"]["param"]) == (400, "protocol")


@in_loop
async def test_transfer_parameters_that_are_null_are_none_of_a_client_nor_of_an_engine() -> None:
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    p.transfer = lambda: None  # type: ignore[assignment, method-assign, return-value]
    async with serving(p, d) as client:
        assert (await client.complete(kv_transfer_params=None))[0] == 200
        assert p.requests[0]["kv_transfer_params"] == {"do_remote_decode": True}
        assert "kv_transfer_params" not in d.requests[0]


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_a_decode_engine_that_refuses_what_the_other_answers_computes_the_prompt(
    stream: bool,
) -> None:
    """The client has not sent the parameters, so their refusal is not for it."""
    p, d = FakeEngine("p", "prefill"), FakeEngine("d", "decode")
    d.status, d.refuses = 400, "kv_transfer_params.prompt_tokens"
    async with serving(p, d) as client:
        status, _, headers = await client.complete(stream=stream)
        assert status == 200
        first, second = d.requests
        assert "kv_transfer_params" in first
        assert "kv_transfer_params" not in second
        assert len(p.requests) == 1
        [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
        assert attempt["outcome"] == "ok"


@in_loop
async def test_a_prefill_engine_that_refuses_to_hand_over_is_not_asked_again() -> None:
    p, p2, d = FakeEngine("p", "prefill"), FakeEngine("p2", "prefill"), FakeEngine("d", "decode")
    p.status, p.refuses = 400, "kv_transfer_params"
    async with serving(p, p2, d) as client:
        status, _, headers = await client.complete()
        assert status == 200
        attempts = (await client.decision(headers["X-Request-Id"]))["attempts"]
        assert [one["prefill"] for one in attempts] == ["p", "p2"]
        assert "refuses the handoff" in attempts[0]["outcome"]
