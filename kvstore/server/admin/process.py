"""Runs an admin process: serves until the node ends."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from kvstore.server.admin.access import Access
from kvstore.server.admin.app import App
from kvstore.server.admin.connections import (
    HEADER_BYTES_MAX,
    IDLE_S,
    Connections,
    HttpConnection,
)
from kvstore.server.admin.link import AdminLink, NodeLog
from kvstore.server.channel import ALIVE_S, Serving

log = logging.getLogger(__name__)

_BEGIN_S: Final = 30.0
_NICE: Final = 5
"""Niceness, so that engines' lookups have priority."""


class _Server(uvicorn.Server):
    """A server that reports when it is ready, and does not handle signals."""

    def __init__(self, config: uvicorn.Config, link: AdminLink) -> None:
        super().__init__(config)
        self._link = link

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self._link.send(Serving())

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """See uvicorn; only the node ends this process."""
        yield


def run(descriptor: int) -> int:
    """Serve the node at the other end of a socket; returns the exit status."""
    os.nice(_NICE)
    return asyncio.run(_live(socket.socket(fileno=descriptor)))


async def _live(node: socket.socket) -> int:
    """Serve; a failure is written to the node's log."""
    node.setblocking(False)  # noqa: FBT003
    link = AdminLink()
    await asyncio.get_running_loop().create_unix_connection(lambda: link.channel, sock=node)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[NodeLog(link)])
    try:
        await _serve(link)
    except (OSError, BaseExceptionGroup) as error:  # exceptions of tasks come as a group
        log.critical("the admin process failed", exc_info=error)
        return 1
    return 0


async def _serve(link: AdminLink) -> None:
    async with asyncio.timeout(_BEGIN_S):
        begin = await link.begun
    access = Access(
        begin.tokens, group=begin.group, tenants=begin.tenants, token_file=begin.token_file
    )
    app = App(link, access, begin.values, open_metrics=begin.open_metrics).starlette()
    HttpConnection.all = Connections()
    config = uvicorn.Config(
        app, http=HttpConnection, ws="none", loop="asyncio", lifespan="off", log_config=None,
        log_level="error", access_log=False, proxy_headers=False, server_header=False,
        timeout_keep_alive=int(IDLE_S), timeout_graceful_shutdown=1, backlog=128,
        h11_max_incomplete_event_size=HEADER_BYTES_MAX,
    )  # fmt: skip
    server = _Server(config, link)
    listeners = [socket.socket(fileno=number) for number in begin.listeners]
    async with asyncio.TaskGroup() as tasks:
        helpers = [
            tasks.create_task(link.say_alive(ALIVE_S)),
            tasks.create_task(HttpConnection.all.sweep()),
        ]
        serving = tasks.create_task(server.serve(listeners))
        await link.lost.wait()
        server.should_exit = True
        await serving
        for helper in helpers:
            helper.cancel()
