"""Limits HTTP connections in number and idle time.

If there are too many, the one that has been idle longest is closed. A connection without any
request is closed after some time. The HTTP server itself handles connections that are idle between
requests.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_protocol import RequestHandler

from kvstore.process.faults import Faults

CONNECTIONS_MAX: Final = 4_096
BACKLOG: Final = 1_024
"""Connections that the kernel keeps until they are accepted.

It drops those that come at once beyond it, and their clients ask again after a second, or three.
"""
FIRST_REQUEST_S: Final = 15.0
"""Seconds from connecting to the end of the first request's headers."""
KEEPALIVE_S: Final = 75.0
CAUSES: Final = (
    "malformed", "unauthorized", "forbidden", "full", "silent", "internal", "unhandled",
    "background", "bodies",
)  # fmt: skip
"""Causes of faults; exported from the start, so that the first fault is an increase."""


class Front:
    """Creates a protocol for each connection.

    Args:
        faults: counts closed connections.
        connections_max: maximum open connections.

    Attributes:
        faults: connections that were closed, by cause.
    """

    def __init__(self, faults: Faults, connections_max: int) -> None:
        self.faults = faults
        self._most = connections_max
        self._idle: dict[RequestHandler, float] = {}  # start of idle time; oldest first
        self._new: dict[RequestHandler, float] = {}
        self._server: web.Server | None = None

    def serve(self, server: web.Server) -> Callable[[], asyncio.Protocol]:
        """A factory for the protocols of ``server``."""
        self._server = server
        return self._protocol

    def _protocol(self) -> asyncio.Protocol:
        assert self._server is not None
        if len(self._server.connections) >= self._most and not self._make_room():
            self.faults.note("full", f"{self._most} connections are in use")
            return _Closed()
        protocol: RequestHandler = self._server()
        self._idle[protocol] = self._new[protocol] = asyncio.get_running_loop().time()
        return protocol

    def _make_room(self) -> bool:
        """Close the connection that has been idle longest; returns False if all are in use."""
        while self._idle:
            protocol = next(iter(self._idle))
            self._forget(protocol)
            if protocol.transport is not None:
                self.faults.note("full", "an idle connection was closed for a new one")
                protocol.force_close()
                return True
        return False

    def _forget(self, protocol: RequestHandler) -> None:
        self._idle.pop(protocol, None)
        self._new.pop(protocol, None)

    @property
    def middleware(self) -> Middleware:
        """A middleware that tracks which connections are in use."""

        @web.middleware
        async def used(request: web.Request, handler: Handler) -> web.StreamResponse:
            protocol = request.protocol
            self._forget(protocol)
            try:
                return await handler(request)
            finally:
                if protocol.transport is not None:
                    self._idle[protocol] = asyncio.get_running_loop().time()

        return used

    async def run(self) -> None:
        """Close connections without a request, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(1.0, FIRST_REQUEST_S))
            overdue = loop.time() - FIRST_REQUEST_S
            for protocol, since in list(self._new.items()):
                if since > overdue:
                    break
                if protocol.transport is not None:
                    self.faults.note("silent", "a connection without a request")
                    protocol.force_close()
                self._forget(protocol)
            for protocol, since in list(self._idle.items()):
                if protocol.transport is None and since <= overdue:
                    del self._idle[protocol]


def complaints(faults: Faults) -> logging.Logger:
    """A logger for the HTTP server that counts all messages and logs a few."""
    logger = logging.Logger("conductor.http", logging.WARNING)  # noqa: LOG001 - of this server alone
    logger.addHandler(_Counting(faults))
    return logger


class _Counting(logging.Handler):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        """Count it."""
        error = record.exc_info[1] if record.exc_info else None
        cause = "malformed" if isinstance(error, HttpProcessingError) else "unhandled"
        self._faults.note(cause, f"{record.getMessage()}: {error!r}")


class _Closed(asyncio.Protocol):
    """A connection over the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        transport.close()
