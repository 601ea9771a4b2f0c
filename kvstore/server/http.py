"""Health, metrics, statistics and pages over HTTP, beside the state's loop.

A scrape or a listing runs in a thread of its own and only asks the state's loop for snapshots, so
that it never delays an engine.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Final, Protocol, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Response

from kvstore.config import HttpConfig
from kvstore.errors import ConfigError
from kvstore.node import Node
from kvstore.page import PrefixKey
from kvstore.server.metrics import render
from kvstore.state.tree import Space

T = TypeVar("T")

ANSWER_TIMEOUT_S: Final = 5.0
PAGES_MAX: Final = 1000
_LISTING_TTL_S: Final = 30.0
_LISTINGS_MAX: Final = 8
_STOP_TIMEOUT_S: Final = 10.0


class Observed(Protocol):
    """What the HTTP face shows."""

    node: Node

    def stats(self) -> dict[str, Any]:
        """One snapshot; called on the state's loop."""


class HttpServer:
    """FastAPI in a thread.

    Args:
        config: where to listen.
        loop: the state's loop, which alone may touch ``observed``.
        observed: the daemon.
    """

    def __init__(
        self, config: HttpConfig, loop: asyncio.AbstractEventLoop, observed: Observed
    ) -> None:
        """Bind the address.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._loop = loop
        self._observed = observed
        self._listings: dict[str, tuple[float, tuple[PrefixKey, ...]]] = {}
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((config.host, config.port))
            self._listener.listen(128)  # from the ready line on, connections wait for the thread
        except OSError as error:
            self._listener.close()
            raise ConfigError(f"http.port={config.port} on {config.host}: {error}") from error
        self.url = f"http://{config.host}:{self._listener.getsockname()[1]}"
        settings = uvicorn.Config(
            self._app(), log_level="warning", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._run, name="kvstore-http")

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving; waits for the thread, but not for ever."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._listener])

    def _ask(self, question: Callable[[], T]) -> T:
        """Run ``question`` on the state's loop.

        Raises:
            HTTPException: 503 when the loop does not answer.
        """

        async def ask() -> T:
            return question()

        future = asyncio.run_coroutine_threadsafe(ask(), self._loop)
        try:
            return future.result(ANSWER_TIMEOUT_S)
        except TimeoutError as error:
            future.cancel()
            raise HTTPException(503, "the node does not answer") from error

    def _app(self) -> FastAPI:
        app = FastAPI(title="kvstore node", version="1", docs_url="/docs", redoc_url=None)

        @app.get("/healthz")
        def healthz() -> dict[str, str]:
            """The process runs."""
            return {"status": "ok"}

        @app.get("/readyz")
        def readyz() -> dict[str, Any]:
            """The node answers and has memory to store pages in."""
            host = self._ask(lambda: self._observed.node.pages.slots.stats())
            if not host.capacity_bytes:
                raise HTTPException(503, "all memory is held by clients of the previous boot")
            return {"status": "ready", "withheld_bytes": host.withheld_bytes}

        @app.get("/metrics")
        def metrics() -> Response:
            """Prometheus series."""
            return Response(render(self._ask(self._observed.stats)), media_type="text/plain")

        @app.get("/v1/stats")
        def stats() -> dict[str, Any]:
            """Everything that can be counted."""
            return self._ask(self._observed.stats)

        @app.get("/v1/pages")
        def pages(
            space: str,
            cursor: Annotated[int, Query(ge=0)] = 0,
            limit: Annotated[int, Query(ge=1, le=PAGES_MAX)] = 100,
        ) -> dict[str, Any]:
            """Pages of one space, a stretch at a time; ``next`` is the next stretch's cursor."""
            return self._pages(space, cursor, limit)

        return app

    def _pages(self, label: str, cursor: int, limit: int) -> dict[str, Any]:
        found = self._ask(lambda: self._space(label))
        if found is None:
            raise HTTPException(404, f"space: {label!r} is not open here; see /v1/stats")
        keys = self._listing(found, fresh=cursor == 0)
        wanted = keys[cursor : cursor + limit]
        rows = self._ask(lambda: [_row(found, key) for key in wanted if key in found.nodes])
        end = cursor + len(wanted)
        return {"pages": rows, "next": end if end < len(keys) else None, "total": len(keys)}

    def _space(self, label: str) -> Space | None:
        spaces = self._observed.node.pages.spaces
        return next((space for space in spaces if space.label == label), None)

    def _listing(self, space: Space, *, fresh: bool) -> tuple[PrefixKey, ...]:
        """The space's keys at one moment, kept a while so that later stretches agree with it."""
        now = time.monotonic()
        taken, keys = self._listings.get(space.label, (0.0, ()))
        if fresh or now - taken > _LISTING_TTL_S:
            keys = self._ask(lambda: tuple(space.nodes))
            if len(self._listings) >= _LISTINGS_MAX:
                self._listings.pop(next(iter(self._listings)), None)
            self._listings[space.label] = (now, keys)
        return keys


def _row(space: Space, key: PrefixKey) -> dict[str, Any]:
    node = space.nodes[key]
    parent = node.parent.key if node.parent is not None else b""
    return {
        "key": key.hex(),
        "parent": parent.hex() or None,
        "tier": "host",
        "children": len(node.children),
        "shards": {
            str(number): {
                "state": "ready" if node.ready >> number & 1 else "writing",
                "bytes": space.shards[number].page_bytes,
                "digest": node.digests.get(number, b"").hex() or None,
            }
            for number in sorted(node.slots)
        },
    }
