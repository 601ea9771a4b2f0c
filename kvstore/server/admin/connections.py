"""The connections of the admin process: how many, how long, and who is at the other end.

Idle ones cost descriptors, so there is a limit for each kind of socket, and whoever comes when it
is reached takes the place of the connection that has been idle for longest: idle connections never
keep anybody out, and those over TCP never those over the Unix socket.
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
"""Until the first request, and between two."""
REQUEST_S: Final = 60.0
"""A request that has not been sent, carried out and answered by then is cut off."""
SWEEP_S: Final = 1.0
HEADER_BYTES_MAX: Final = 32 << 10
_OTHER_DESCRIPTORS: Final = 64


class HttpPeer(NamedTuple):
    """Who is at the other end.

    Attributes:
        address: for the log.
        unix: whether it came over the Unix socket; then the kernel says whose process it is.
        uid: its user; -1 over TCP.
        groups: all groups of its user; none over TCP.
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
        #: Unix or TCP → connections, the one that has been idle (or busy) for longest first.
        self._open: dict[bool, dict[HttpConnection, None]] = {True: {}, False: {}}

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def opened(self, connection: "HttpConnection") -> None:
        """Take a connection on; if there is no room, one that is idle goes, or else this one."""
        there = self._open[connection.peer.unix]
        if len(there) >= self._most[connection.peer.unix]:
            idle = next((one for one in there if one.idle), connection)
            idle.transport.abort()
            there.pop(idle, None)
            if idle is connection:
                return
        there[connection] = None

    def closed(self, connection: "HttpConnection") -> None:
        """A connection is gone."""
        self._open[connection.peer.unix].pop(connection, None)

    def rested(self, connection: "HttpConnection") -> None:
        """A connection is idle again."""
        there = self._open[connection.peer.unix]
        if connection in there:
            del there[connection]
            there[connection] = None

    async def sweep(self) -> None:
        """Close what has been idle, or busy, for too long; until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = monotonic()
            for there in self._open.values():
                for one in list(there):
                    if now - one.since > (IDLE_S if one.idle else IDLE_S + REQUEST_S):
                        one.transport.abort()


class HttpConnection(H11Protocol):
    """One HTTP connection; counts, and knows who is at its other end.

    Attributes:
        all: of this process; set before the first is made.
        since: when it was idle last.
        peer: who is at the other end.
    """

    all: Connections

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:  # fmt: skip
        """See uvicorn."""
        super().__init__(config, server_state, app_state, _loop)
        self.since = monotonic()
        self.peer = HttpPeer("", unix=False)

    @property
    def idle(self) -> bool:
        """Whether no request is being carried out."""
        cycle: Any = self.cycle  # None until the first request
        return cycle is None or cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected."""
        self.peer = _peer(transport.get_extra_info("socket"))
        self.app_state = {**self.app_state, "peer": self.peer}
        super().connection_made(transport)
        self.all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self.all.closed(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """A request has been answered."""
        self.since = monotonic()
        self.all.rested(self)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, perhaps in the middle of a request that is being carried out."""
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # nobody gets two answers to one request
            cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # it has had an answer, or the beginning of one
            self.transport.close()


def _peer(connection: socket.socket) -> HttpPeer:
    if connection.family != socket.AF_UNIX:
        try:
            host, port = connection.getpeername()[:2]
        except OSError:  # it has left already
            return HttpPeer("a client that left", unix=False)
        return HttpPeer(f"{host}:{port}", unix=False)
    pid, uid, _ = credentials(connection)
    return HttpPeer(f"user {uid}, process {pid}", unix=True, uid=uid, groups=groups(connection))
