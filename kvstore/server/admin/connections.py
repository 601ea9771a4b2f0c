"""The connections of the admin process: limits, timeouts and peers.

Idle connections use descriptors, so there is a limit for each kind of socket. At the limit, a new
connection replaces the one that has been idle longest. So idle connections never block new ones,
and TCP connections never block those over the Unix socket.
"""

import asyncio
import resource
import socket
from collections.abc import Set
from time import monotonic
from typing import Any, Final, NamedTuple

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from kvstore.server.processes import credentials
from kvstore.server.tenants import groups

TCP_MAX: Final = 256
UNIX_MAX: Final = 64
IDLE_S: Final = 10.0
"""Maximum idle time before the first request, and between two."""
REQUEST_S: Final = 60.0
"""Maximum time for a request, from its first byte to the end of its answer."""
SWEEP_S: Final = 1.0
HEADER_BYTES_MAX: Final = 32 << 10
_OTHER_DESCRIPTORS: Final = 64


class HttpPeer(NamedTuple):
    """The peer of a connection.

    Attributes:
        address: address for the log.
        unix: whether it is a Unix-socket connection, with credentials from the kernel.
        uid: its user; -1 for TCP.
        groups: all its groups; none for TCP.
    """

    address: str
    unix: bool
    uid: int = -1
    groups: Set[int] = frozenset()


class Connections:
    """All connections of one process."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(8, soft - _OTHER_DESCRIPTORS) if soft != resource.RLIM_INFINITY else 1 << 20
        self._most = {True: min(UNIX_MAX, room // 4), False: min(TCP_MAX, room // 2)}
        #: Unix or TCP → connections, the longest idle (or busy) one first.
        self._open: dict[bool, dict[HttpConnection, None]] = {True: {}, False: {}}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def opened(self, connection: "HttpConnection") -> None:
        """Add a connection; at the limit close an idle one, or else this one."""
        there = self._open[connection.peer.unix]
        if len(there) >= self._most[connection.peer.unix]:
            idle = next((one for one in there if one.idle), connection)
            idle.transport.abort()
            there.pop(idle, None)
            if idle is connection:
                return
        there[connection] = None

    def closed(self, connection: "HttpConnection") -> None:
        """A connection was closed."""
        self._open[connection.peer.unix].pop(connection, None)

    def rested(self, connection: "HttpConnection") -> None:
        """A connection is idle again."""
        there = self._open[connection.peer.unix]
        if connection in there:
            del there[connection]
            there[connection] = None

    async def sweep(self) -> None:
        """Close connections that were idle or busy for too long, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = monotonic()
            for there in self._open.values():
                for one in list(there):
                    if now - one.since > (IDLE_S if one.idle else IDLE_S + REQUEST_S):
                        one.transport.abort()


class HttpConnection(H11Protocol):
    """One HTTP connection.

    Attributes:
        all: all connections of this process; set before the first is created.
        since: when it was last idle.
        peer: its peer.
    """

    all: Connections

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, server_state, app_state, _loop)
        self.since = monotonic()
        self.peer = HttpPeer("", unix=False)

    @property
    def idle(self) -> bool:
        """Whether no request is in progress."""
        cycle: Any = self.cycle  # None until the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The connection was opened."""
        self.peer = _peer(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": self.peer}
        super().connection_made(transport)
        self.all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed."""
        self.all.closed(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """A request has been answered."""
        self.since = monotonic()
        self.all.rested(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP, perhaps during a request in progress."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # do not answer one request twice
            cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # an answer was already begun
            self.transport.close()


def _peer(connection: socket.socket) -> HttpPeer:
    if connection.family != socket.AF_UNIX:
        try:
            host, port = connection.getpeername()[:2]
        except OSError:  # already disconnected
            return HttpPeer("a client that left", unix=False)
        return HttpPeer(f"{host}:{port}", unix=False)
    pid, uid, _ = credentials(connection)
    return HttpPeer(f"user {uid}, process {pid}", unix=True, uid=uid, groups=groups(connection))
