"""Goal: the HTTP face says what the contract says; a client that leaves is not worked for."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from engine_adapters.reference.engine import Engine, EngineBusyError
from engine_adapters.reference.handoff_options import HandoffOptions
from engine_adapters.reference.parts import EngineOptions
from engine_adapters.reference.scheduler import Limits
from engine_adapters.reference.server import ConductorAt, Identity, Server, serve
from tests.conftest import wait_for
from tests.engine_adapters.reference.fake_store import FakeNode, FakeStore

PROMPT = "Tell me about pages, slots and leases. " * 4
WAIT_S = 20.0


class Service:
    """A served engine and a client of it."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession, url: str) -> None:
        self.engine = engine
        self.session = session
        self.url = url

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, **body: Any) -> Any:
        fields = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        status, answer = await self.post("/v1/completions", fields | body)
        assert status == 200, answer
        return answer

    async def until(self, condition: Callable[[], bool]) -> None:
        assert await asyncio.to_thread(wait_for, condition, WAIT_S), "it never came true"


@asynccontextmanager
async def service(  # type: ignore[no-untyped-def]
    store: Any = None,
    conductor: ConductorAt | None = None,
    handoff: HandoffOptions | None = None,
    **options: Any,
):
    engine = Engine(EngineOptions(model="tiny", blocks=256, **options), store, handoff)
    engine.start()
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    server = Server(engine, Identity(id="E1", node="N1"))
    running = asyncio.ensure_future(
        serve(
            server,
            engine,
            listen=("127.0.0.1", 0),
            conductor=conductor,
            stop=stop,
            ready=ready.set_result,
            drain_s=3.0,
            engine_id="E1",
        )
    )
    url = await ready
    async with aiohttp.ClientSession() as session:
        yield Service(engine, session, url)
    stop.set()
    async with asyncio.timeout(WAIT_S):
        assert await running, "the engine did not end in time"


def scenario(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * WAIT_S))


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield data.decode() if data == b"[DONE]" else json.loads(data)


def test_a_completion_says_what_it_is_and_what_it_cost() -> None:
    async def run() -> None:
        async with service() as s:
            answer = await s.complete(request_id="mine")
            choice = answer["choices"][0]
            assert answer["id"] == "mine"
            assert (choice["finish_reason"], choice["index"]) == ("length", 0)
            assert len(choice["token_ids"]) == 8
            assert bytes(choice["token_ids"]).decode() == choice["text"]
            prompt = len(PROMPT)
            assert answer["usage"]["prompt_tokens"] == prompt
            assert answer["usage"]["total_tokens"] == prompt + 8
            again = await s.complete()
            assert again["choices"] == answer["choices"]
            assert again["timings"]["cached_tokens"] == 128
            assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}
            ids = await s.complete(prompt=list(PROMPT.encode()))
            assert ids["choices"] == answer["choices"]

    scenario(run)


def test_a_stream_carries_the_same_tokens_one_by_one() -> None:
    async def run() -> None:
        async with service() as s:
            whole = await s.complete(temperature=0.8, seed=3)
            body = {
                "prompt": PROMPT,
                "max_tokens": 8,
                "temperature": 0.8,
                "seed": 3,
                "stream": True,
                "return_token_ids": True,
            }
            async with s.session.post(s.url + "/v1/completions", json=body) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                events = [event async for event in events_of(response)]
            assert events.pop() == "[DONE]"
            choices = [event["choices"][0] for event in events]
            assert len(choices) == 8
            tokens = [token for choice in choices for token in choice["token_ids"]]
            assert tokens == whole["choices"][0]["token_ids"]
            assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
            assert [c["finish_reason"] for c in choices] == [None] * 7 + ["length"]
            assert [("usage" in event, "timings" in event) for event in events[:-1]] == [
                (False, False)
            ] * 7
            assert events[-1]["usage"] == whole["usage"] | {
                "prompt_tokens_details": {"cached_tokens": 128}
            }

    scenario(run)


def test_a_stop_string_ends_the_completion() -> None:
    async def run() -> None:
        async with service() as s:
            text = (await s.complete(max_tokens=30))["choices"][0]["text"]
            stop = text[10:13]
            choice = (await s.complete(max_tokens=30, stop=[stop, "\0"]))["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert choice["text"] == text[: text.index(stop)]

    scenario(run)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [1, 320]}, "prompt"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 5000}, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "seed": -1}, "seed"),
        ({"prompt": "x", "model": "another"}, "model"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        (
            {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}},
            "kv_transfer_params.first_token",
        ),
        (
            {
                "prompt": "xyz",
                "kv_transfer_params": {
                    "do_remote_prefill": True,
                    "first_token": 1,
                    "prompt_tokens": 2,
                },
            },
            "kv_transfer_params.prompt_tokens",
        ),
    ],
)
def test_a_wrong_request_is_refused_naming_the_field(body: Any, field: str) -> None:
    async def run() -> None:
        async with service() as s:
            status, answer = await s.post("/v1/completions", body)
            assert status == 400
            assert field in answer["error"]["message"]
            assert answer["error"]["type"] == "invalid_request_error"

    scenario(run)


def test_the_small_endpoints() -> None:
    async def run() -> None:
        async with service(mode="decode") as s:
            assert await s.get("/health") == (200, {"status": "ok"})
            longest = s.engine.config.max_model_len
            tokenized = {"tokens": [104, 195, 169], "count": 3, "max_model_len": longest}
            assert await s.post("/tokenize", {"prompt": "hé"}) == (200, tokenized)
            status, models = await s.get("/v1/models")
            assert [m["id"] for m in models["data"]] == ["reference-tiny"]
            status, about = await s.get("/v1/engine")
            assert status == 200
            assert about["space"] == s.engine.identity.digest.hex()
            assert (about["id"], about["role"], about["node"]) == ("E1", "decode", "N1")
            assert (about["page_tokens"], about["max_running"]) == (64, 8)
            assert (about["events"], about["events_replay"]) == (None, None)
            assert (await s.get("/v1/requests/none/kv-hashes"))[0] == 404
            assert (await s.post("/v1/completions", "no object"))[0] == 400
            assert (await s.get("/nowhere"))[1]["error"]["type"] == "not_found_error"
            async with s.session.get(s.url + "/metrics") as response:
                text = await response.text()
            assert "reference_engine_step_seconds_bucket" in text

    scenario(run)


def test_a_handoff_of_an_engine_that_does_not_name_pages_is_taken() -> None:
    async def run() -> None:
        node = FakeNode()
        async with (
            service(FakeStore(node), mode="prefill") as p,
            service(FakeStore(node), mode="decode") as d,
        ):
            fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
            first = await p.complete(**fields, kv_transfer_params={"do_remote_decode": True})
            told = first["kv_transfer_params"]
            assert told.pop("kvstore_node") == node.name
            pages = {key: told.pop(key) for key in ("kvstore_pages", "kvstore_page_tokens")}
            assert pages == {"kvstore_pages": len(PROMPT) // 64, "kvstore_page_tokens": 64}
            assert set(told) == {"do_remote_prefill", "handoff_id", "first_token", "prompt_tokens",
                                 "position", "tail_key", "tail_tokens"}  # fmt: skip
            answer = await d.complete(**fields, kv_transfer_params={**told, "seed": None})
            assert answer["timings"]["restored_tokens"] == len(PROMPT)

    scenario(run)


def test_a_handoff_over_http_gives_the_tokens_and_hashes_of_mono() -> None:
    async def run() -> None:
        node = FakeNode()
        async with (
            service() as mono,
            service(FakeStore(node), mode="prefill") as p,
            service(FakeStore(node), mode="decode") as d,
        ):
            fields: dict[str, Any] = {"temperature": 0.7, "max_tokens": 12, "request_id": "r"}
            first = await p.complete(**fields, kv_transfer_params={"do_remote_decode": True})
            params = first["kv_transfer_params"]
            assert params["first_token"] == first["choices"][0]["token_ids"][0]
            assert params["seed"] is not None, "a random seed must travel"
            answer = await d.complete(**fields, kv_transfer_params=params)
            expected = await mono.complete(**fields, seed=params["seed"])
            assert answer["choices"] == expected["choices"]
            assert answer["timings"]["restored_tokens"] == len(PROMPT)
            hashes = [await s.get("/v1/requests/r/kv-hashes") for s in (mono, p, d)]
            assert hashes[0][0] == 200
            assert hashes[0][1]["prompt_tokens"] == len(PROMPT)
            assert hashes[0] == hashes[1] == hashes[2]

    scenario(run)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    async def run() -> None:
        async with service() as s:
            body = {"prompt": PROMPT, "max_tokens": 1500, "stream": stream}
            asked = asyncio.ensure_future(s.session.post(s.url + "/v1/completions", json=body))
            await s.until(lambda: s.engine.parts.scheduler.running == 1)
            if stream:
                (await asked).close()
            else:
                asked.cancel()
            await s.until(lambda: s.engine.parts.scheduler.running == 0)
            assert s.engine.metrics.requests.labels("abort")._value.get() == 1

    scenario(run)


def test_too_many_requests_are_told_to_go_elsewhere() -> None:
    async def run() -> None:
        async with service(limits=Limits(running_max=1, waiting_max=1)) as s:
            body = {"prompt": PROMPT, "max_tokens": 500, "temperature": 0}
            answers = await asyncio.gather(*(s.post("/v1/completions", body) for _ in range(6)))
            statuses = sorted(status for status, _ in answers)
            assert statuses[0] == 200
            assert statuses[-1] == 503
            refused = next(answer for status, answer in answers if status == 503)
            assert refused["error"]["code"] == "overloaded"

    scenario(run)


def test_a_request_that_was_never_queued_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with service() as mono:
            aborted: list[Any] = []

            def full(_: Any) -> None:
                raise EngineBusyError("the engine's queue is full")

            monkeypatch.setattr(mono.engine, "submit", full)
            monkeypatch.setattr(mono.engine, "abort", aborted.append)  # it waits for the queue
            status, refused = await mono.post("/v1/completions", {"prompt": PROMPT})
            assert (status, refused["error"]["code"]) == (503, "overloaded")
            assert aborted == []

    scenario(test)


def test_an_engine_that_shuts_down_refuses_and_ends_what_runs() -> None:
    async def run() -> None:
        engine = Engine(EngineOptions(model="tiny", blocks=256))
        engine.start()
        server = Server(engine, Identity(id="E1"))
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        running = asyncio.ensure_future(
            serve(
                server,
                engine,
                listen=("127.0.0.1", 0),
                conductor=None,
                stop=stop,
                ready=ready.set_result,
                drain_s=1.0,
            )
        )
        async with aiohttp.ClientSession() as session:
            s = Service(engine, session, await ready)
            body = {"prompt": PROMPT, "max_tokens": 1800}
            asked = asyncio.ensure_future(s.post("/v1/completions", body))
            await s.until(lambda: engine.parts.scheduler.running == 1)
            stop.set()
            await s.until(lambda: server._closing)
            assert (await s.get("/health"))[0] == 503
            assert (await s.post("/v1/completions", body))[0] == 503
            status, answer = await asked
            assert (status, answer["error"]["code"]) == (503, "shutdown")
        assert await running

    scenario(run)


def test_an_engine_registers_again_with_a_conductor_that_forgot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("engine_adapters.reference.server._REGISTER_EVERY_S", 0.01)
    seen: list[Any] = []
    shown: list[str | None] = []
    token = tmp_path / "token"

    async def register(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization"))
        seen.append(await request.json())
        return web.Response(status=503 if len(seen) == 1 else 201)

    async def leave(request: web.Request) -> web.Response:
        seen.append(request.match_info["id"])
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/engines", register), web.delete("/v1/engines/{id}", leave)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        token.write_text("first life\n")
        conductor = ConductorAt(f"http://127.0.0.1:{runner.addresses[0][1]}", token)
        async with service(conductor=conductor) as s:
            await s.until(lambda: len(seen) >= 3)
            token.write_text("second life\n")
            await s.until(lambda: shown[-1] == "Bearer second life")
            assert seen[:3] == [{"id": "E1", "role": "mixed", "url": s.url}] * 3
        assert seen[-1] == "E1", "it did not say good-bye"
        assert shown[0] == "Bearer first life"
        await runner.cleanup()

    scenario(run)


def test_the_command_serves_where_it_is_told_and_ends_on_sigterm(spawn: Any) -> None:
    words = ["--port", "0", "--host", "127.0.0.2", "--id", "E7", "--threads", "1"]
    command = [sys.executable, "-m", "engine_adapters.reference", *words]
    process = spawn(command, ready=r"^listening on (http://127\.0\.0\.2:\d+)$")

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            url = process.ready[1]
            async with session.get(url + "/v1/engine") as response:
                assert (await response.json())["id"] == "E7"
            body = {"prompt": "hello", "max_tokens": 3}
            async with session.post(url + "/v1/completions", json=body) as response:
                assert response.status == 200

    scenario(run)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0
