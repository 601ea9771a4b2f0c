"""Handoffs by push: who is asked what, whose place is taken until when, and what is told of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from conductor.front.openai import events_without_transfer, without_transfer
from conductor.protocols import PROTOCOLS
from conductor.routing.decisions import HandoffReport
from kvstore.handoff.rooms import ROOM_MAX
from tests.conductor.fakes import OPERATE, Client, FakeEngine, serving, sse, texts
from tests.loops import eventually, in_loop

REGISTRY = "http://127.0.0.1:9"
PUSHED = {"way": "push", "state": "success", "code": "", "bytes": 4096,
          "seconds": {"bootstrapping": 0.1, "transferring": 0.3}}  # fmt: skip


def prefill(name: str = "p", **described: object) -> FakeEngine:
    return FakeEngine(name, "prefill", handoff={"push": {"registry": REGISTRY}}, **described)


def decode(name: str = "d", **described: object) -> FakeEngine:
    return FakeEngine(name, "decode", handoff={"push": {}}, **described)


def in_flight(client: Client, *engines: FakeEngine) -> list[int]:
    return [client.conductor.queue.dispatcher.in_flight(engine.id) for engine in engines]


async def metrics(client: Client) -> str:
    return str((await client.get("/metrics", Authorization=f"Bearer {OPERATE}"))[1])


async def attempts(client: Client, headers: Any) -> list[Any]:
    found: list[Any] = (await client.decision(headers["X-Request-Id"]))["attempts"]
    return found


@asynccontextmanager
async def later(client: Client, *engines: FakeEngine) -> AsyncIterator[None]:
    """Engines that register when requests are under way."""
    try:
        for engine in engines:
            await engine.start()
        await client.register(*engines)
        yield
    finally:
        for engine in engines:
            await engine.stop()


@in_loop
async def test_kv_that_was_pushed_is_not_on_its_way_any_more_while_the_answer_is_written() -> None:
    p, d = prefill(), decode()
    async with serving(p, d, policy={"name": "earliest-first-token"}) as client:
        d.gate.clear()
        asked = asyncio.create_task(client.complete("hi there", stream=False))
        await eventually(lambda: in_flight(client, p, d) == [0, 1])
        load = client.conductor.queue.dispatcher.loads._loads["d"]
        assert not load.coming
        assert len(load.decoding) == 1
        d.gate.set()
        assert (await asked)[0] == 200


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_both_get_the_request_at_once_with_one_room_and_tell_how_it_went(
    stream: bool,
) -> None:
    p, d = prefill(), decode()
    p.report, d.report = PUSHED, {**PUSHED, "bytes": 5000}
    async with serving(p, d) as client:
        p.gate.clear()
        d.gate.clear()
        asked = asyncio.create_task(client.complete("hi", max_tokens=7, stream=stream))
        await eventually(lambda: p.running == d.running == 1, "both have it")
        assert in_flight(client, p, d) == [1, 1]
        p.gate.set()
        await eventually(lambda: in_flight(client, p, d) == [0, 1])
        d.gate.set()
        status, answer, headers = await asked
        assert status == 200
        events = sse(answer)[:-1] if stream else [answer]
        assert texts(events) == (["d:0 ", "d:1 ", "d:2 "] if stream else ["whole from d"])
        assert not any("kv_transfer_params" in event for event in events)
        assert events[-1]["timings"]["restored_tokens"] == 4
        [to_p], [to_d] = p.requests, d.requests
        room = to_p["kv_transfer_params"]["room"]
        assert 0 <= room <= ROOM_MAX
        assert to_p["kv_transfer_params"] == {
            "do_remote_decode": True, "handoff": "push", "room": room
        }  # fmt: skip
        assert to_d["kv_transfer_params"] == {
            "do_remote_prefill": True, "handoff": "push", "room": room, "registry": REGISTRY
        }  # fmt: skip
        assert (to_p["max_tokens"], to_p["stream"], to_d["max_tokens"]) == (1, False, 7)
        [attempt] = await attempts(client, headers)
        assert (attempt["way"], attempt["room"]) == ("push", room)
        assert attempt["pushed"] == PUSHED
        assert attempt["received"] == {**PUSHED, "bytes": 5000}
        assert attempt["prefilled"]["prompt_tokens"] == attempt["served"]["prompt_tokens"] == 9
        told = await metrics(client)
        for side in ("prefill", "decode"):
            assert f'handoffs_total{{code="",side="{side}",state="success",way="push"}} 1.0' in told
            name = f'handoff_state_seconds_sum{{side="{side}",state="transferring"}}'
            assert f"{name} 0.3" in told


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", ["p", "d"])
@pytest.mark.parametrize("how", ["reset", "busy", "does not know push"])
@in_loop
async def test_if_either_fails_before_the_first_byte_another_pair_gets_another_room(
    how: str, fails: str, stream: bool
) -> None:
    p, d, p2, d2 = prefill(), decode(), prefill("p2"), decode("d2")
    async with serving(p, d) as client:
        broken, other = (p, d) if fails == "p" else (d, p)
        broken.broken = "reset" if how == "reset" else ""
        broken.status = {"reset": 200, "busy": 503, "does not know push": 400}[how]
        broken.refuses = "kv_transfer_params.handoff" if how == "does not know push" else ""
        broken.gate.clear()
        other.gate.clear()
        asked = asyncio.create_task(client.complete("hi", stream=stream))
        await eventually(lambda: broken.running == other.running == 1, "both have it")
        async with later(client, p2, d2):
            broken.gate.set()
            await eventually(lambda: other.aborted == 1, "the other one's part ends")
            other.gate.set()
            status, _, headers = await asked
        assert status == 200
        [first, second] = await attempts(client, headers)
        assert broken.id in first["outcome"]
        assert second["outcome"] == "ok"
        assert first["room"] != second["room"]
        assert broken.id not in (second["prefill"], second["decode"])
        assert in_flight(client, p, d, p2, d2) == [0, 0, 0, 0]


@in_loop
async def test_a_request_that_an_engine_refuses_is_the_client_s_fault_as_ever() -> None:
    p, d = prefill(), decode()
    async with serving(p, d) as client:
        p.status, p.refuses = 400, "prompt"
        d.gate.clear()
        status, answer, _ = await client.complete()
        assert (status, answer["error"]["param"]) == (400, "prompt")
        await eventually(lambda: d.aborted == 1)


@in_loop
async def test_a_prefill_engine_that_dies_after_the_first_byte_costs_the_client_nothing() -> None:
    p, d = prefill(), decode()
    async with serving(p, d, health={"probe_s": 60.0}) as client:
        p.gate.clear()
        p.broken = "reset"
        d.mid_gate.clear()
        body = {"model": "m", "prompt": "hi", "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            assert in_flight(client, p, d) == [1, 1]  # it still computes
            p.gate.set()
            await eventually(lambda: in_flight(client, p, d) == [0, 1], "its place is free")
            d.mid_gate.set()
            rest = (await response.read()).decode()
        assert sse(rest)[-1] == "[DONE]"
        assert len(p.requests) == len(d.requests) == 1
        engine = client.conductor.registry.get("p")
        assert engine is not None
        assert engine.health.failures == 1
        told = await metrics(client)
        assert 'engine_failures_total{engine="p"} 1.0' in told
        assert 'code="no_answer",side="prefill",state="failed",way="push"} 1.0' in told


@in_loop
async def test_a_decode_engine_that_dies_after_the_first_byte_ends_both_and_the_client_knows():
    p, d = prefill(), decode()
    async with serving(p, d) as client:
        p.gate.clear()
        d.broken = "midway"
        status, answer, _ = await client.complete(stream=True)
        assert status == 200
        assert "event: error" in answer
        await eventually(lambda: p.aborted == 1 and in_flight(client, p, d) == [0, 0])


@pytest.mark.parametrize("begun", [False, True])
@in_loop
async def test_a_client_that_goes_ends_both(begun: bool) -> None:
    p, d = prefill(), decode()
    async with serving(p, d) as client:
        p.gate.clear()
        (d.mid_gate if begun else d.gate).clear()
        asked = asyncio.create_task(client.complete(stream=True))
        await eventually(lambda: p.running == d.running == 1, "both have it")
        asked.cancel()
        await eventually(lambda: p.aborted == 1, "it was aborted")
        await eventually(lambda: client.conductor.proxy.active == 0)
        d.mid_gate.set()
        await eventually(lambda: d.running == 0)
        assert in_flight(client, p, d) == [0, 0]


@in_loop
async def test_a_push_that_goes_on_after_the_answer_keeps_its_place_until_it_has_ended() -> None:
    p, d = prefill(max_running=1), decode()
    p.report = {**PUSHED, "state": "failed", "code": "peer_closed"}
    async with serving(p, d) as client:
        p.gate.clear()
        status, _, headers = await client.complete("first")
        assert status == 200
        assert in_flight(client, p, d) == [1, 0]
        assert (await attempts(client, headers))[0]["pushed"] is None
        second = asyncio.create_task(client.complete("second"))
        await eventually(lambda: len(client.conductor.queue) == 1, "it waits for the place")
        assert len(d.requests) == 1
        p.gate.set()
        assert (await second)[0] == 200
        [attempt] = await attempts(client, headers)
        assert (attempt["outcome"], attempt["pushed"]["code"]) == ("ok", "peer_closed")
        await eventually(lambda: in_flight(client, p, d) == [0, 0])


@in_loop
async def test_a_push_that_never_ends_gives_its_place_back_at_the_deadline() -> None:
    p, d = prefill(), decode()
    async with serving(p, d, deadline={"push_s": 2.0, "prefill_s": 60.0}) as client:
        p.gate.clear()
        assert (await client.complete())[0] == 200
        assert in_flight(client, p, d) == [1, 0]
        await eventually(lambda: p.aborted == 1 and in_flight(client, p, d) == [0, 0])
        assert 'engine_failures_total{engine="p"} 1.0' in await metrics(client)


@in_loop
async def test_a_conductor_that_stops_waits_for_no_push() -> None:
    p, d = prefill(), decode()
    async with serving(p, d, deadline={"push_s": 600.0}, health={"probe_s": 60.0}) as client:
        p.gate.clear()
        assert (await client.complete())[0] == 200
        conductor = client.conductor
        assert conductor._stop is not None
        conductor._stop.set()
        await eventually(lambda: p.aborted == 1, "the request has ended with the Conductor")
    engine = conductor.registry.get("p")
    assert engine is not None
    assert engine.health.failures == 0  # it is not to blame


@pytest.mark.parametrize("odd", ["p", "d"])
@in_loop
async def test_a_pair_with_an_engine_that_does_not_push_goes_through_the_store(odd: str) -> None:
    p = FakeEngine("p", "prefill") if odd == "p" else prefill()
    d = FakeEngine("d", "decode") if odd == "d" else decode()
    async with serving(p, d) as client:
        status, _, headers = await client.complete()
        assert status == 200
        assert p.requests[0]["kv_transfer_params"] == {"do_remote_decode": True}
        assert d.requests[0]["kv_transfer_params"]["handoff_id"] == "handoff of p"
        [attempt] = await attempts(client, headers)
        assert (attempt["way"], attempt["room"], attempt["pushed"]) == ("store", None, None)
        told = await metrics(client)
        assert 'handoffs_total{code="",side="prefill",state="success",way="store"} 1.0' in told


@in_loop
async def test_the_way_is_decided_for_each_pair() -> None:
    old, new = FakeEngine("d1", "decode", max_running=1), decode("d2", max_running=1)
    p = prefill()
    async with serving(p, old, new) as client:
        old.gate.clear()
        new.gate.clear()
        asked = [asyncio.create_task(client.complete()) for _ in range(2)]
        await eventually(lambda: old.running == new.running == 1)
        old.gate.set()
        new.gate.set()
        answers = [await one for one in asked]
        ways = {}
        for _, _, headers in answers:
            [attempt] = await attempts(client, headers)
            ways[attempt["decode"]] = attempt["way"]
        assert ways == {"d1": "store", "d2": "push"}


@in_loop
async def test_an_engine_that_says_nothing_of_a_push_is_counted_and_serves() -> None:
    p, d = prefill(), decode()
    d.report = {"state": "over", "seconds": {}}
    async with serving(p, d) as client:
        assert (await client.complete())[0] == 200
        told = await metrics(client)
        for side in ("prefill", "decode"):
            assert f'code="no_report",side="{side}",state="failed",way="push"}} 1.0' in told


@in_loop
async def test_a_code_that_nobody_knows_is_no_label() -> None:
    p, d = prefill(), decode()
    p.report = {**PUSHED, "state": "failed", "code": "c" * 60, "seconds": {"x": 1, "success": 2}}
    async with serving(p, d) as client:
        _, _, headers = await client.complete()
        [attempt] = await attempts(client, headers)
        assert (attempt["pushed"]["code"], attempt["pushed"]["seconds"]) == ("c" * 60, {})
        assert 'code="other",side="prefill",state="failed"' in await metrics(client)


URLS = {
    "http://127.0.0.1:9": True,
    "http://localhost:9": True,
    "http://[::1]:9": True,
    "http://10.9.9.9:9": False,
    "http://elsewhere:9": False,
    "http://named:9": True,
    "http://127.0.0.1": False,
    "https://127.0.0.1:9": True,
    "https://127.0.0.1": False,
    "ftp://127.0.0.1:9": False,
    "http://user@127.0.0.1:9": False,
    "http://127.0.0.1:9/path": False,
    "http://127.0.0.1:99999": False,
    "file:///etc/passwd": False,
    "": False,
}


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("told", ["by the engine", "by its registration"])
@in_loop
async def test_decode_engines_are_sent_only_where_a_registry_may_be(url: str, told: str) -> None:
    offer = {"push": {"registry": url}}
    p = FakeEngine("p", "prefill", handoff=offer if told == "by the engine" else None)
    async with serving(handoff={"registry_hosts": ["named"]}) as client:
        try:
            await p.start()
            body: dict[str, object] = {"id": "p", "role": "prefill", "url": p.url}
            if told != "by the engine":
                body["handoff"] = offer
            status, answer, _ = await client.operate("/v1/engines", body)
        finally:
            await p.stop()
        if URLS[url]:
            assert (status, answer["handoff"]) == (201, offer)
        else:
            assert (status, answer["error"]["param"]) == (400, "handoff.push.registry")
            assert "user" not in answer["error"]["message"].replace("user name", "")


@in_loop
async def test_offers_count_only_beside_the_protocol_that_they_are_over() -> None:
    engines = (
        prefill("none", protocol="vllm"),
        FakeEngine("bare", "prefill", handoff={}),
        FakeEngine("decode", "decode", handoff={"push": {"registry": "http://elsewhere:1"}}),
    )
    async with serving(*engines) as client:
        shown = {
            one["id"]: one["handoff"] for one in (await client.get("/v1/engines"))[1]["engines"]
        }
        assert shown == {"none": None, "bare": None, "decode": {"push": {"registry": None}}}
        body = {"id": "x", "role": "mixed", "url": engines[0].url, "model": "m"}
        status, answer, _ = await client.operate("/v1/engines", {**body, "protocol": "push"})
        assert (status, answer["error"]["param"]) == (400, "protocol")


def test_what_a_handoff_tells_is_no_client_s_business() -> None:
    assert without_transfer(b'{"a": 1, "kv_transfer_params": {"x": [1]}}') == b'{"a":1}'
    for kept in (b'{"a": "kv_transfer_params"}', b'"kv_transfer_params"', b'{"kv_transfer_params'):
        assert without_transfer(kept) == kept
    line = b'data: {"a":"kv_transfer_params","kv_transfer_params":null}'
    other = b'data: {"choices": [{"text": "kv_transfer_params"}]}\n\n'
    events = b"event: x\r\n" + line + b"\r\n\r\n" + other + b"data: [DONE]\n\n"
    shown = events_without_transfer(events)
    assert shown == events.replace(b',"kv_transfer_params":null', b"")


@pytest.mark.parametrize(
    "told",
    [
        {}, {"handoff": None}, {"handoff": 1}, {"handoff": {}}, {"handoff": {"state": "over"}},
        {"handoff": {"state": "failed", "code": "A b"}}, [], 3, "x",
        {"handoff": {"state": "failed", "bytes": -1}},
        {"handoff": {"state": "failed", "seconds": {"transferring": "1"}}},
    ],
)  # fmt: skip
def test_a_report_that_is_none_is_none(told: object) -> None:
    report = PROTOCOLS["push"].report
    assert report is not None
    assert report(json.dumps(told).encode()) is None  # type: ignore[arg-type]


def test_of_a_report_only_states_that_are_and_times_that_can_be_count() -> None:
    report = PROTOCOLS["push"].report
    assert report is not None
    seconds = {"TRANSFERRING": 1.5, "bootstrapping": -1.0, "other": 2.0, "success": 3.0}
    told = {"handoff": {"state": "failed", "code": None, "seconds": seconds, "new": [1]}}
    found = report(json.dumps(told).encode())  # type: ignore[arg-type]
    assert found == HandoffReport("push", "failed", "", {"transferring": 1.5}, 0)
