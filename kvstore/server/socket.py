"""The node's Unix socket: access control, handshakes, and descriptors of extents.

The first message of a connection is read from the raw socket, before the loop's transport takes
over, because descriptors can only be passed there. ``FetchExtents`` is answered with descriptors,
and the connection ends; its socket is kept until they have been received. ``Hello`` makes it a
session's connection. Everything runs on the loop that owns the node.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kvstore.config import SocketConfig
from kvstore.node.desk import Desk
from kvstore.protocol import wire
from kvstore.protocol.counts import NodeStats
from kvstore.protocol.errors import CapacityError, ConfigError, KVStoreError, ProtocolError, reason
from kvstore.server.connection import SessionConnections
from kvstore.server.frames import FrameConnection
from kvstore.server.handshakes import FirstFrame, Handshakes, Unread
from kvstore.server.place import check_free
from kvstore.server.processes import credentials
from kvstore.server.tenants import Tenants, groups
from kvstore.tier.host import MEMORY_WAIT_S, HostMemory

log = logging.getLogger(__name__)

MEMORY_POLL_S: Final = 0.005
_EXTENTS_MAX: Final = 64


class SocketServer:
    """Serves one node on one Unix socket.

    Args:
        config: path of the socket, which this node has claimed
            (:func:`~kvstore.server.place.claim`), and access.
        desk: the node's desk.
        memory: the extents.
        stats: returns the node's statistics, for ``Stats``.

    Raises:
        ConfigError: a user or group of ``socket.tenants`` does not exist.
    """

    def __init__(
        self, config: SocketConfig, desk: Desk, memory: HostMemory, stats: Callable[[], NodeStats]
    ) -> None:
        self._node = desk.node
        self._table = desk.node.pages
        self._memory = memory
        self._config = config
        self._tenants = Tenants(config.tenants)
        self._connections = SessionConnections(desk, stats)
        self._handshakes = Handshakes()
        self._unread = Unread()

    def listen(self) -> None:
        """Create the socket; peers may connect, and :meth:`serve` serves them.

        Raises:
            ConfigError: the socket cannot be created.
        """
        path = Path(self._config.path)
        self._listener = _listen(path, self._mode())
        self._inode = path.stat().st_ino

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        await self._handshakes.serve(self._listener, self._handshake)

    def close(self) -> None:
        """Close all connections and remove the socket file if it is still ours."""
        path = Path(self._config.path)
        self._listener.close()
        if path.exists() and path.stat().st_ino == self._inode:
            path.unlink()
        self._connections.close()
        self._unread.close()

    def connections(self) -> int:
        """Open connections."""
        return len(self._connections.frames.open)

    def accepted_connections(self) -> int:
        """Connections since the start, refused ones too."""
        return self._handshakes.accepted

    # ---- internal ---------------------------------------------------------------------------

    async def _handshake(self, raw: socket.socket) -> None:
        """Read the first message and become a session's connection, or answer and close."""
        loop = asyncio.get_running_loop()
        try:
            async with self._handshakes.limits() as heard:
                tenants = self._admit(raw)
                body, rest = await _first_frame(loop, raw)
                heard()
                request = wire.decode_request(body)
                if isinstance(request, wire.FetchExtents):
                    await self._memory_there(request.extents)
                    user = credentials(raw).uid
                    self._unread.check(user)
                    self._hand_out(raw, request, tenants)
                    self._unread.add(user, raw)
                    return
                if not isinstance(request, wire.Hello):
                    raise ProtocolError(f"{type(request).__name__} before Hello")
        except TimeoutError:
            self._turn_away(raw, ProtocolError("no message in time, and its place was needed"))
            return
        except (KVStoreError, OSError) as error:
            self._turn_away(raw, error)
            return
        begin = partial(self._connections.begin, tenants=tenants, hello=request, rest=rest)
        connection = FrameConnection(self._connections.frames, raw, begin)
        await loop.connect_accepted_socket(lambda: connection, raw)

    def _mode(self) -> int:
        """The mode of the socket file; :meth:`_admit` checks each peer."""
        if self._tenants:
            return 0o666
        return 0o660 if self._config.group_access else 0o600

    def _admit(self, raw: socket.socket) -> frozenset[str] | None:
        """The tenants that the peer may use, if it may connect; None = any."""
        if len(self._connections.frames.open) >= self._config.connections_max:
            raise ProtocolError(f"{self._config.connections_max} connections are open already")
        uid = credentials(raw).uid
        if uid in (0, os.geteuid()):
            return None
        if self._tenants:
            tenants = self._tenants.of(raw)
            if not tenants:
                raise ProtocolError(f"user {uid} may not connect: socket.tenants has no entry")
            return tenants
        if not (self._config.group_access and os.getegid() in groups(raw)):
            raise ProtocolError(f"user {uid} may not connect: the node runs as {os.geteuid()}")
        return None

    async def _memory_there(self, numbers: Sequence[int]) -> None:
        """Wait for the memory of these extents, for a short time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + MEMORY_WAIT_S
        wanted = numbers[:_EXTENTS_MAX]
        while any(map(self._memory.pending, wanted)) and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(MEMORY_POLL_S)

    def _hand_out(
        self, raw: socket.socket, request: wire.FetchExtents, tenants: frozenset[str] | None
    ) -> None:
        """Send descriptors of extents to a process of the session that owns them."""
        session = self._node.sessions.get(request.session)
        if session is None or (tenants is not None and session.domain not in tenants):
            raise ProtocolError("no such session")
        if request.boot not in (b"", self._node.boot):
            raise ProtocolError("these extents belong to an earlier boot")
        if len(request.extents) > _EXTENTS_MAX or len(request.known) > wire.KNOWN_EXTENTS_MAX:
            raise ProtocolError(f"more extents at once than {_EXTENTS_MAX}, or too many known")
        owners = {extent.number: extent.domain for extent in self._table.slots.extents}
        descriptors: list[int] = []
        for number in request.extents:
            if owners.get(number) != session.domain:
                raise ProtocolError(f"extent {number} is not of tenant {session.domain!r}")
            descriptor = self._memory.descriptor(number)
            if descriptor is None:
                raise CapacityError(f"extent {number} has no memory now")
            descriptors.append(descriptor)
        gone = [number for number in request.known if owners.get(number) != session.domain]
        answer = wire.encode(wire.ExtentsFollow(request.extents, gone))
        socket.send_fds(raw, [answer], descriptors)

    def _turn_away(self, raw: socket.socket, error: Exception) -> None:
        code = error.code if isinstance(error, KVStoreError) else "protocol"
        self._table.counts["refused_connections"] += 1
        log.warning("connection refused: %s", str(error) or type(error).__name__)
        try:
            raw.send(wire.encode(wire.Failure(1, code, str(error))))
        except OSError:
            log.debug("the refused peer had disconnected")
        raw.close()


async def _first_frame(loop: asyncio.AbstractEventLoop, raw: socket.socket) -> tuple[bytes, bytes]:
    """Read the first frame; returns its body, and the bytes after it."""
    first = FirstFrame()
    while True:
        found = first.add(await loop.sock_recv(raw, 1 << 16))
        if found is not None:
            return found


def _listen(path: Path, mode: int) -> socket.socket:
    """A listening socket at ``path``; a dead node's socket file there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        check_free(path)
        path.unlink(missing_ok=True)
        previous = os.umask(0o777 & ~mode)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        listener.listen(128)
        listener.setblocking(False)  # noqa: FBT003
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket.path={path}: {reason(error)}") from error
    except ConfigError:
        listener.close()
        raise
    return listener
