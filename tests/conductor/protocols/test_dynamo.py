"""Goal: a frontend of Dynamo gets one request, which names the workers that were chosen.

The fake answers as frontend and mock workers of Dynamo 1.6.1 did (``--router-mode direct``).
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from conductor.protocols import PROTOCOLS
from conductor.protocols.base import PairRequest
from tests.conductor.fakes import Client, serving, sse, texts
from tests.loops import in_loop

P1, P2 = "17122538760205124154", "5897766210142576389"
D1, D2 = "13512565703707795521", "17061101771907288997"
MIXED = "11251184776682706459"
BEYOND = {"message": "Invalid request", "type": "Bad Request", "code": 400}
AWAY = {"message": "Service temporarily unavailable", "code": 503}


class FakeFrontend:
    """The frontend of some workers.

    Attributes:
        prefills: rooms that each prefill worker has given, by its id; one that is absent is gone.
        decodes: whether each decode worker is there.
        dead: prefill workers that are still known and do not answer.
        bodies: what came.
        refuses: refuse requests as invalid, with this answer.
    """

    def __init__(self) -> None:
        self.prefills: dict[int, list[int]] = {int(P1): [], int(P2): []}
        self.decodes = {int(one) for one in (D1, D2, MIXED)}
        self.dead: set[int] = set()
        self.bodies: list[dict[str, Any]] = []
        self.refuses: dict[str, object] | None = None
        self.url = ""

    async def complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        told = body.get("nvext") or {}
        decode = told.get("decode_worker_id", told.get("backend_instance_id"))
        if self.refuses is not None:
            return web.json_response(self.refuses, status=400)
        if decode is None:
            return web.json_response({"message": "Failed to generate completions"}, status=500)
        room = None
        if (prefill := told.get("prefill_worker_id")) is not None:
            if prefill in self.dead:
                return web.json_response(AWAY, status=503)
            if prefill not in self.prefills:
                return web.json_response(BEYOND, status=400)
            room = len(self.prefills[prefill])
            self.prefills[prefill].append(room)
        if decode not in self.decodes:
            return web.json_response(BEYOND, status=400)
        text = f"{decode} in room {room}"
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        if not body.get("stream"):
            answer = {"choices": [{"index": 0, "text": text}], "usage": usage, "nvext": {}}
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in ({"choices": [{"index": 0, "text": text}]}, {"choices": [], "usage": usage}):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def fleet(*engines: tuple[str, str]) -> AsyncIterator[tuple[FakeFrontend, Client]]:
    """A Conductor that knows these workers, all at one frontend."""
    frontend, app = FakeFrontend(), web.Application()

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "object": "model", "context_window": 0}]})

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    app.add_routes(
        [
            web.get("/health", health),
            web.get("/v1/models", models),
            web.post("/v1/completions", frontend.complete),
            web.post("/v1/chat/completions", frontend.complete),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    frontend.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with serving() as client:
            for name, role in engines:
                body = {"id": name, "role": role, "url": frontend.url, "protocol": "dynamo"}
                status, answer, _ = await client.operate("/v1/engines", body)
                assert status == 201, answer
            yield frontend, client
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("stream", [False, True])
@in_loop
async def test_one_request_names_both_workers_and_decode_gets_the_room(stream: bool) -> None:
    async with fleet((P1, "prefill"), (D1, "decode")) as (frontend, client):
        for number in range(2):
            status, answer, headers = await client.complete("hi", max_tokens=7, stream=stream)
            assert status == 200
            said = texts(sse(answer)) if stream else [answer["choices"][0]["text"]]
            assert said == [f"{D1} in room {number}"]
        assert len(frontend.bodies) == 2
        sent = {"model": "m", "prompt": "hi", "max_tokens": 7, "stream": stream}
        sent["nvext"] = {"prefill_worker_id": int(P1), "decode_worker_id": int(D1)}
        if stream:
            sent["stream_options"] = {"include_usage": True}
        assert frontend.bodies[0] == sent
        [attempt] = (await client.decision(headers["X-Request-Id"]))["attempts"]
        assert (attempt["plan"], attempt["prefill"], attempt["decode"]) == ("pair", P1, D1)
        in_flight = client.conductor.queue.dispatcher.in_flight
        assert (in_flight(P1), in_flight(D1)) == (0, 0)


@in_loop
async def test_a_worker_that_serves_alone_is_named_and_chats_are_the_same() -> None:
    async with fleet((MIXED, "mixed")) as (frontend, client):
        assert (await client.complete())[0] == (await client.chat())[0] == 200
        workers = [body["nvext"] for body in frontend.bodies]
        assert workers == [{"backend_instance_id": int(MIXED)}] * 2
        assert frontend.prefills == {int(P1): [], int(P2): []}


@in_loop
async def test_a_client_s_own_options_stay_and_its_choice_of_workers_does_not() -> None:
    async with fleet((P1, "prefill"), (D1, "decode")) as (frontend, client):
        wanted = {"backend_instance_id": 5, "decode_worker_id": 6, "agent_hints": {"osl": 9}}
        for options in (wanted, "none", None):
            assert (await client.complete(nvext=options))[0] == 200
        chosen = {"prefill_worker_id": int(P1), "decode_worker_id": int(D1)}
        assert [body["nvext"] for body in frontend.bodies] == [
            {"agent_hints": {"osl": 9}, **chosen}, chosen, chosen
        ]  # fmt: skip


@pytest.mark.parametrize("how", ["dead", "unknown"])
@in_loop
async def test_a_prefill_worker_that_is_gone_is_replaced_and_the_only_decode_worker_stays(
    how: str,
) -> None:
    async with fleet((P1, "prefill"), (P2, "prefill"), (D1, "decode")) as (frontend, client):
        if how == "dead":
            frontend.dead.add(int(P1))
        else:
            del frontend.prefills[int(P1)]
        for _ in range(2):  # one of the two would begin with it
            status, answer, _ = await client.complete()
            assert (status, answer["choices"][0]["text"][:20]) == (200, D1)
        attempts = [
            one for decision in client.conductor.decisions.newest(2) for one in decision.attempts
        ]
        assert [one.prefill for one in attempts if one.outcome == "ok"] == [P2, P2]
        failed = [one for one in attempts if one.outcome != "ok"]
        assert {one.prefill for one in failed} == {P1}
        assert all(f"engine {P1}" in one.outcome for one in failed)


@pytest.mark.parametrize("engines", [[(D1, "decode"), (D2, "decode"), (P1, "prefill")], None])
@in_loop
async def test_a_worker_that_decodes_and_is_gone_is_replaced(
    engines: list[tuple[str, str]] | None,
) -> None:
    async with fleet(*(engines or [(D1, "mixed"), (D2, "mixed")])) as (frontend, client):
        frontend.decodes.remove(int(D1))
        for _ in range(2):
            status, answer, _ = await client.complete()
            assert (status, answer["choices"][0]["text"][:20]) == (200, D2)


@in_loop
async def test_what_is_wrong_with_a_request_is_relayed_and_not_tried_again() -> None:
    async with fleet((P1, "prefill"), (D1, "decode"), (MIXED, "mixed")) as (frontend, client):
        frontend.refuses = {"message": "Validation: Temperature must be between 0 and 2, got 99"}
        for _ in range(2):
            status, answer, _ = await client.complete(temperature=99)
            assert (status, answer) == (400, frontend.refuses)
        assert len(frontend.bodies) == 2


@pytest.mark.parametrize("name", ["worker-1", "007", "-1", "1" * 21, "1e3"])
@in_loop
async def test_a_worker_is_registered_under_its_number(name: str) -> None:
    async with fleet() as (frontend, client):
        body = {"id": name, "role": "mixed", "url": frontend.url, "protocol": "dynamo"}
        status, answer, _ = await client.operate("/v1/engines", body)
        assert (status, answer["error"]["param"]) == (400, "id")
        assert len(client.conductor.registry) == 0


def test_an_answer_that_is_no_json_misses_nobody() -> None:
    misses = PROTOCOLS["dynamo"].misses
    assert misses is not None
    assert [misses(raw) for raw in (b"", b"[]", b"\xff", b'{"message": 5}')] == [False] * 4
    assert misses(json.dumps(BEYOND).encode())
    fields = {"prompt": msgspec.Raw(b'"x"')}
    pair = PairRequest(fields, 1, "http://p", "http://d", prefill=P1, decode=D1)
    assert PROTOCOLS["dynamo"].decode(pair, None) != fields
