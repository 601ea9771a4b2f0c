"""Fake nodes in the test's own process and loop, on free ports or Unix sockets."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web


class FakeNode:
    """The admin API of a node, without the node.

    Attributes:
        told: the answer of ``GET /v1/events``.
        sessions: the rows of ``GET /v1/sessions``.
        token: bearer token that requests need; empty = none.
        status: answer with this status instead.
        gate: cleared, requests wait before they are answered.
        reads: how often the sessions were read.
        more: further routes.
    """

    def __init__(self, node_id: str, **told: object) -> None:
        self.told: dict[str, object] = {
            "node": node_id, "boot": "b1", "topic": f"kvstore@{node_id}@b1", "endpoint": None,
            "replay_endpoint": None, "follow_token": False, "tokens": False, **told,
        }  # fmt: skip
        self.sessions: list[dict[str, object]] = []
        self.token = ""
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.reads = 0
        self.more: list[web.RouteDef] = []
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self, path: str = "") -> "FakeNode":
        """Listen on a free port, or at a Unix socket."""
        app = web.Application()
        told = [web.get("/v1/events", self._events), web.get("/v1/sessions", self._sessions)]
        app.add_routes([*told, *self.more])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        if path:
            await web.UnixSite(self._runner, path).start()
            self.url = f"unix://{path}"
        else:
            await web.TCPSite(self._runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _refusal(self, http: web.Request) -> web.Response | None:
        await self.gate.wait()
        if self.status != 200:
            return web.json_response({}, status=self.status)
        if self.token and http.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({}, status=401)
        return None

    async def _events(self, http: web.Request) -> web.Response:
        return await self._refusal(http) or web.json_response(self.told)

    async def _sessions(self, http: web.Request) -> web.Response:
        refusal = await self._refusal(http)
        if refusal is not None:
            return refusal
        cursor, limit = int(http.query["cursor"]), int(http.query["limit"])
        self.reads += not cursor
        end = cursor + limit
        more = end if end < len(self.sessions) else None
        return web.json_response({"sessions": self.sessions[cursor:end], "next": more})


@asynccontextmanager
async def beside(*nodes: FakeNode) -> AsyncIterator[None]:
    """Nodes that end with the context."""
    try:
        for node in nodes:
            await node.start()
        yield
    finally:
        for node in nodes:
            await node.stop()


def session_of(
    name: str | None, space: str = "ab" * 32, page_tokens: int = 4, shards: Iterable[str] = (),
    **engine: object,
) -> dict[str, object]:  # fmt: skip
    """A row of ``GET /v1/sessions``, with what nobody reads left out."""
    opened = {"space": space, "model": "m", "page_tokens": page_tokens, "scope": "",
              "shards": list(shards)}  # fmt: skip
    told = {"name": name, "events": None, "events_bind": None, "events_replay": None,
            "block_tokens": None, **engine}  # fmt: skip
    return {"name": "vllm", "engine": told if name else None, "spaces": [opened],
            "spaces_total": 1}  # fmt: skip
