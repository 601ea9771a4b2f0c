"""Fake engines and a Conductor in the test's own process and loop, everything on port 0."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from conductor.config import ConductorConfig
from conductor.service import Conductor, index_settings
from kvstore.cluster.store import RecordStore
from kvstore.index.followers import Follower
from tests.local_index import LocalIndex

OPERATE = "operate-token-of-tests"


class FakeEngine:
    """An engine that answers without a model.

    Attributes:
        requests: bodies of the completions and chat completions it got, in order.
        paths: what they asked for.
        rendered: bodies of its ``/tokenize``.
        headers: their headers.
        gate: cleared, completions wait before they answer anything.
        mid_gate: cleared, streams wait after their first event.
        status: answer completions with this status instead.
        refuses: the ``param`` of that error; requests without this field are served.
        keyed: whether it refuses to describe itself without a key of its own.
        describes: whether it has ``GET /v1/engine``; vLLM has not.
        adapters: its LoRA adapters in ``GET /v1/models``, with their paths.
        listed: what it says of its model there besides.
        models_status: status of its answer to that request.
        like_openai: streams end with an event of usage if that is asked for, and tell none else.
        metrics: the text of its ``/metrics``; None = it has none.
        scraped: how often that was asked for.
        report: how it says that a push went on its side; None = nothing.
        broken: ``""``; ``"reset"``: cut the connection at once; ``"midway"``: after an event;
            ``"short"``: end the stream without ``[DONE]``.
    """

    def __init__(self, engine_id: str, role: str, **described: object) -> None:
        self.id = engine_id
        self.described: dict[str, object] = {
            "id": engine_id,
            "role": "mono" if role == "mixed" else role,
            "model": "m",
            "page_tokens": 4,
            "space": "ab" * 32,
            "events": None,
            "events_replay": None,
            "node": None,
            "max_running": 8,
            **described,
        }
        self.describes = True
        self.adapters: dict[str, object] = {"adapter": None}
        self.listed: dict[str, object] = {}
        self.models_status = 200
        self.keyed = False
        self.role = role
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.rendered: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.tokenized = 0
        self.tokenize_status = 200
        self.tokenize_gate = asyncio.Event()
        self.tokenize_gate.set()
        self.running = 0
        self.running_most = 0
        self.aborted = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.mid_gate = asyncio.Event()
        self.mid_gate.set()
        self.status = 200
        self.broken = ""
        self.report: dict[str, object] | None = None
        self.refuses = ""
        self.metrics: str | None = None
        self.scraped = 0
        self.tokens = 3
        self.like_openai = False
        self.healthy = True
        self.probed = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> "FakeEngine":
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/engine", self._describe),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._completions),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _health(self, _: web.Request) -> web.Response:
        self.probed += 1
        return web.json_response({}, status=200 if self.healthy else 500)

    async def _metrics(self, _: web.Request) -> web.Response:
        self.scraped += 1
        return web.Response(text=self.metrics, status=404 if self.metrics is None else 200)

    async def _describe(self, _: web.Request) -> web.Response:
        status = 401 if self.keyed else 200 if self.describes else 404
        return web.json_response(self.described, status=status)

    async def _models(self, _: web.Request) -> web.Response:
        model = self.described["model"]
        adapters = [
            {"id": name, "parent": model, "root": path} for name, path in self.adapters.items()
        ]
        models = [*adapters, {"id": model, "root": "/the/model", "parent": None, **self.listed}]
        answer = {"object": "list", "data": models}
        return web.json_response(answer, status=self.models_status)

    async def _tokenize(self, http: web.Request) -> web.Response:
        self.tokenized += 1
        await self.tokenize_gate.wait()
        if self.tokenize_status != 200:
            return web.json_response({}, status=self.tokenize_status)
        body = await http.json()
        self.rendered.append(body)
        messages = "".join(f"{one['content']}\n" for one in body.get("messages", ()))
        tokens = list(body.get("prompt", messages).encode())
        return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.requests.append(body)
        self.paths.append(http.path)
        self.headers.append(http.headers)
        self.running += 1
        self.running_most = max(self.running, self.running_most)
        try:
            await self.gate.wait()
            if self.broken == "reset":
                assert http.transport is not None
                http.transport.abort()
                return web.Response()
            refused = self.refuses.partition(".")[0]
            if self.status != 200 and (not refused or refused in body):
                error = {"error": {"message": "as told", "type": "x", "code": "told"}}
                if self.refuses:
                    error["error"]["param"] = self.refuses
                return web.json_response(error, status=self.status)
            return await (self._stream(http, body) if body.get("stream") else self._whole(body))
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def _end(self, body: dict[str, Any]) -> dict[str, Any]:
        pushed = (body.get("kv_transfer_params") or {}).get("handoff") == "push"
        told = {"kv_transfer_params": {"handoff": self.report}} if pushed and self.report else {}
        return told | {
            "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
            "timings": {
                "queue_s": 0.0,
                "restore_s": 0.25,
                "compute_s": 0.5,
                "restored_tokens": 4,
                "restored_bytes": 4096,
                "cached_tokens": 1,
            },
        }

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        said = f"whole from {self.id}"
        told = {"message": {"content": said}} if "messages" in body else {"text": said}
        answer: dict[str, Any] = {"id": "x", "choices": [{**told, "index": 0}]}
        answer |= self._end(body)
        asked = body.get("kv_transfer_params") or {}
        if asked.get("do_remote_decode") and "handoff" not in asked:
            answer["choices"][0]["token_ids"] = [65]
            answer["kv_transfer_params"] = self.transfer()
        return web.json_response(answer)

    def transfer(self) -> dict[str, object]:
        return {
            "do_remote_prefill": True,
            "handoff_id": f"handoff of {self.id}",
            "first_token": 65,
            "prompt_tokens": 9,
            "tail_key": "cd" * 32,
            "tail_tokens": 1,
            "seed": 12345678901234567890,
            "position": 9,
            "some_new_field": [1.5, None],
        }

    async def _stream(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for number in range(self.tokens):
            said = f"{self.id}:{number} "
            told = {"delta": {"content": said}} if "messages" in body else {"text": said}
            choice = {**told, "index": 0, "token_ids": [number]}
            last = number == self.tokens - 1 and not self.like_openai
            end = self._end(body) if last else {}
            await response.write(b"data: " + json.dumps({"choices": [choice], **end}).encode())
            await response.write(b"\n\n")
            await self.mid_gate.wait()
            if self.broken == "midway":
                assert http.transport is not None
                http.transport.abort()
                return response
            if self.broken == "short":
                return response
        if self.like_openai and (body.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode())
            await response.write(b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def bearer(token: str) -> dict[str, str]:
    """The header that shows a token; none for an empty one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


class Client:
    """Talks to a Conductor."""

    def __init__(self, session: aiohttp.ClientSession, conductor: Conductor, url: str) -> None:
        self.session = session
        self.conductor = conductor
        self.url = url

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(raw) if is_json else raw.decode()

    async def delete(self, path: str, token: str = OPERATE) -> int:
        headers = bearer(token)
        async with self.session.delete(self.url + path, headers=headers) as response:
            return response.status

    async def operate(self, path: str, body: object) -> tuple[int, Any, Any]:
        """POST with the token that may."""
        return await self.post(path, body, **bearer(OPERATE))

    async def post(
        self, path: str, body: object, **headers: str
    ) -> tuple[int, Any, "aiohttp.typedefs.LooseHeaders"]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json"
            answer = json.loads(raw) if is_json else raw.decode()
            return response.status, answer, response.headers

    async def complete(self, prompt: object = "a prompt", **fields: object) -> tuple[int, Any, Any]:
        return await self.post("/v1/completions", {"model": "m", "prompt": prompt, **fields})

    async def chat(self, content: object = "hi", **fields: object) -> tuple[int, Any, Any]:
        messages = [{"role": "user", "content": content}]
        body = {"model": "m", "messages": messages, **fields}
        return await self.post("/v1/chat/completions", body)

    async def register(self, *engines: FakeEngine) -> None:
        for engine in engines:
            body = {"id": engine.id, "role": engine.role, "url": engine.url}
            status, answer, _ = await self.operate("/v1/engines", body)
            assert status == 201, answer

    @property
    def entries(self) -> int:
        """Pages and blocks in the index."""
        return self.conductor.index.present().report.entries

    def is_current(self, worker: str) -> bool:
        """Whether the index follows a worker, and its pages count."""
        known = self.conductor.index.present().worker(worker)
        return known is not None and known.current

    def followed(self, worker: str) -> Follower | None:
        """The follower of a worker."""
        index = self.conductor.index
        assert isinstance(index, LocalIndex)
        every = index._service._followers
        return next((one for one in every if one.source.worker == worker), None)

    async def decision(self, request_id: str) -> Any:
        status, decision = await self.get(f"/v1/decisions/{request_id}")
        assert status == 200, decision
        return decision


def like_vllm(engine_id: str = "e", **described: object) -> FakeEngine:
    """An engine that has no ``GET /v1/engine``."""
    engine = FakeEngine(engine_id, "mixed", **described)
    engine.describes = False
    return engine


def sse(raw: str) -> list[Any]:
    """The events of a stream: parsed JSON, or the text of what is none."""
    events: list[Any] = []
    for block in raw.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                text = line.removeprefix("data: ")
                events.append(json.loads(text) if text.startswith("{") else text)
    return events


def texts(events: Iterable[Any]) -> list[str]:
    """The texts in a stream's events."""
    return [e["choices"][0]["text"] for e in events if isinstance(e, dict) and e.get("choices")]


def configured(**sections: Any) -> ConductorConfig:
    """A configuration for tests: quick probes, short deadlines, a free port."""
    tree: dict[str, Any] = {
        "http": {"port": 0, "drain_s": 2.0, "operate_token": OPERATE},
        "policy": {"name": "round-robin"},
        "queue": {"wait_s": 5.0},
        "deadline": {"connect_s": 2.0, "first_byte_s": 5.0, "idle_s": 5.0, "prefill_s": 5.0},
        "health": {"probe_s": 0.05, "probe_timeout_s": 2.0, "node_s": 0.02},
        "index": {"entries_max": 4096},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return msgspec.convert(tree, ConductorConfig)


@asynccontextmanager
async def serving(
    *engines: FakeEngine, store: RecordStore | None = None, within_s: float = 60.0, **sections: Any
) -> AsyncIterator[Client]:
    """A Conductor that knows these engines; everything ends with the context, in time."""
    async with AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        config = configured(**sections)
        conductor = Conductor(config, index=LocalIndex(index_settings(config)), store=store)
        stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as tasks:
            tasks.create_task(conductor.serve(stop, url.set_result))
            try:
                async with aiohttp.ClientSession() as session:
                    client = Client(session, conductor, await url)
                    await client.register(*engines)
                    yield client
            finally:
                for engine in engines:
                    engine.gate.set()
                    engine.tokenize_gate.set()
                    engine.mid_gate.set()
                stop.set()
