"""The node's Unix socket: connections in, answers out, processes watched.

A connection begins on the raw socket: its first message is read before the loop's transport takes
over, because descriptors can only be passed there. ``FetchExtents`` is answered with descriptors
and the connection closes; ``Hello`` makes it a session's connection. All of it runs on the one loop
that owns the node.
"""

import asyncio
import logging
import os
import select
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from typing import Final, cast

from kvstore import wire
from kvstore.config import SocketConfig
from kvstore.disk import DiskTier
from kvstore.errors import ConfigError, KVStoreError, ProtocolError
from kvstore.node import Node
from kvstore.tier.host import HostMemory

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
ACCEPT_PAUSE_S: Final = 0.1
UNSENT_BYTES_MAX: Final = 64 << 20
"""A client that does not read its answers is cut off beyond this."""
_SO_PEERPIDFD: Final = 77
_PEERCRED: Final = struct.Struct("3i")
_EXTENTS_MAX: Final = 64


class SocketServer:
    """Serves one node on one Unix socket.

    Args:
        config: where the socket is and who may connect.
        node: decides.
        memory: the extents to hand out.
        after: called when the node may have decided something: publishes its actions.
        stats: gives the JSON that answers ``Stats``.
    """

    def __init__(
        self, config: SocketConfig, node: Node, memory: HostMemory, after: Callable[[], None],
        stats: Callable[[], bytes],
    ) -> None:  # fmt: skip
        """Listen nowhere yet; see :meth:`serve`."""
        self.node = node
        self.memory = memory
        self.connections: dict[int, Connection] = {}
        self.accepted = 0
        #: Set when the node has an SSD tier.
        self.disk: DiskTier | None = None
        self._config = config
        self._after = after
        self._stats = stats
        self._pidfds: dict[int, int] = {}

    def listen(self) -> None:
        """Make the socket; peers may connect from now on and are served by :meth:`serve`.

        Raises:
            ConfigError: the socket cannot be made there.
        """
        path = Path(self._config.path)
        self._listener = _listen(path, group_access=self._config.group_access)
        self._inode = path.stat().st_ino

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    raw, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # no descriptors left: those who wait, wait
                    log.warning("connections cannot be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                raw.setblocking(False)  # noqa: FBT003
                self.accepted += 1
                tasks.create_task(self._handshake(raw, self.accepted))

    def close(self) -> None:
        """Cut all connections off and remove the socket file, if it is still ours."""
        path = Path(self._config.path)
        self._listener.close()
        if path.exists() and path.stat().st_ino == self._inode:
            path.unlink()
        for connection in list(self.connections.values()):
            connection.transport.abort()
        for pid in list(self._pidfds):
            self._forget_pid(pid)

    def flush(self) -> None:
        """Carry out what the node decided: memory first, then answers, then events."""
        node = self.node
        replaced = node.pages.slots.replaced
        while replaced:
            self.memory.replace(*replaced.pop(0))
        if self.disk is not None:
            self.disk.flush()
        if node.outbox:
            outbox, node.outbox = node.outbox, []
            for number, answer in outbox:
                connection = self.connections.get(number)
                if connection is not None:
                    connection.answer(answer)
        if node.actions:
            self._after()

    def receive(self, connection: "Connection", body: bytes | memoryview) -> None:
        """One message of a session's connection."""
        try:
            request = wire.decode_request(body)
            if isinstance(request, wire.Stats):
                connection.answer(wire.StatsReply(request.id, self._stats()))
                return
        except ProtocolError as error:
            self.node.pages.counts["refused_protocol"] += 1
            connection.answer(wire.Failure(0, error.code, str(error)))
            connection.transport.close()
            return
        self.node.receive(connection.number, request, monotonic_ns())
        self.flush()

    def lost(self, connection: "Connection") -> None:
        """A connection closed."""
        self.connections.pop(connection.number, None)
        ended = not _alive(self._pidfds.get(connection.pid))
        self.node.disconnected(connection.number, monotonic_ns(), ended=ended)
        self._unwatch(connection.pid)
        self.flush()

    # ---- inside -----------------------------------------------------------------------------

    async def _handshake(self, raw: socket.socket, number: int) -> None:
        """Read the first message and become a session's connection, or answer and close."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                pid = self._admit(raw)
                body, rest = await _first_frame(loop, raw)
                request = wire.decode_request(body)
                if isinstance(request, wire.FetchExtents):
                    self._hand_out(raw, request)
                    raw.close()
                    return
                if not isinstance(request, wire.Hello):
                    raise ProtocolError(f"{type(request).__name__} before Hello")
        except (KVStoreError, OSError, TimeoutError) as error:
            self._refuse(raw, error)
            return
        connection = Connection(self, number, pid, (raw, request, rest))
        await loop.connect_accepted_socket(lambda: connection, raw)

    def begin(
        self, connection: "Connection", raw: socket.socket, hello: wire.Hello, rest: bytes
    ) -> None:
        """Say Hello to the node, before this or another connection of the process can be lost."""
        self.connections[connection.number] = connection
        self._watch(raw, connection.pid)
        self.node.connected(connection.number, connection.pid)
        self.node.receive(connection.number, hello, monotonic_ns())
        self.flush()
        if rest:
            connection.data_received(rest)

    def _admit(self, raw: socket.socket) -> int:
        """The peer's pid, if it may connect."""
        credentials = raw.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        pid, uid, gid = _PEERCRED.unpack(credentials)
        if uid not in (0, os.geteuid()) and not (self._config.group_access and gid == os.getegid()):
            raise ProtocolError(f"user {uid} may not connect: the node runs as {os.geteuid()}")
        if len(self.connections) >= self._config.connections_max:
            raise ProtocolError(f"{self._config.connections_max} connections are open already")
        return int(pid)

    def _hand_out(self, raw: socket.socket, request: wire.FetchExtents) -> None:
        """Send descriptors of extents to a process of the session that owns them."""
        session = self.node.sessions.get(request.session)
        if session is None:
            raise ProtocolError("no such session")
        if request.boot not in (b"", self.node.boot):
            raise ProtocolError("these extents are of an earlier boot")
        if len(request.extents) > _EXTENTS_MAX or len(request.known) > wire.KNOWN_EXTENTS_MAX:
            raise ProtocolError(f"more extents at once than {_EXTENTS_MAX}, or too many known")
        owners = {extent.number: extent.domain for extent in self.node.pages.slots.extents}
        descriptors: list[int] = []
        for number in request.extents:
            descriptor = self.memory.descriptor(number)
            if descriptor is None or owners.get(number) != session.domain:
                raise ProtocolError(f"extent {number} is not of tenant {session.domain!r}")
            descriptors.append(descriptor)
        gone = [number for number in request.known if owners.get(number) != session.domain]
        answer = wire.encode(wire.ExtentsFollow(request.extents, gone))
        socket.send_fds(raw, [answer], descriptors)

    def _refuse(self, raw: socket.socket, error: Exception) -> None:
        code = error.code if isinstance(error, KVStoreError) else "protocol"
        self.node.pages.counts["refused_connections"] += 1
        log.warning("connection refused: %s", str(error) or type(error).__name__)
        try:
            raw.send(wire.encode(wire.Failure(1, code, str(error))))
        except OSError:
            log.debug("the refused peer had left")
        raw.close()

    def _watch(self, raw: socket.socket, pid: int) -> None:
        """Learn from the kernel when the peer's process ends."""
        if pid in self._pidfds and not _alive(self._pidfds[pid]):
            self._ended(pid)  # the number was given to another process before we were told
        if pid <= 0 or pid in self._pidfds:
            return
        try:
            pidfd = raw.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
        except OSError:  # before Linux 6.5
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                log.warning("process %d cannot be watched (%s)", pid, error)
                return
        self._pidfds[pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pid)

    def _ended(self, pid: int) -> None:
        self._forget_pid(pid)
        for number in self.node.process_ended(pid, monotonic_ns()):
            self.connections[number].transport.abort()
        self.flush()

    def _unwatch(self, pid: int) -> None:
        """Stop watching a process that nothing depends on any more."""
        if pid in self._pidfds and not self.node.waits_for(pid):
            self._forget_pid(pid)

    def _forget_pid(self, pid: int) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfds[pid])
        os.close(self._pidfds.pop(pid))


class Connection(asyncio.Protocol):
    """One connection of a session after its handshake."""

    transport: asyncio.Transport

    def __init__(
        self, server: SocketServer, number: int, pid: int,
        first: tuple[socket.socket, wire.Hello, bytes],
    ) -> None:  # fmt: skip
        """Belong to ``server`` as ``number``; ``pid`` is the peer, ``first`` what it began with."""
        self.number = number
        self.pid = pid
        self._server = server
        self._first = first
        self._raw = first[0]
        self._reader = wire.FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop took the socket over."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class
        self._server.begin(self, *self._first)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            bodies = self._reader.feed(data)
        except ProtocolError as error:
            self.answer(wire.Failure(0, error.code, str(error)))
            self.transport.close()
            return
        for body in bodies:
            if self.transport.is_closing():
                return
            self._server.receive(self, body)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer left, or was cut off."""
        self._server.lost(self)

    def answer(self, answer: wire.Answer) -> None:
        """Send one answer; a peer that lets them pile up is cut off.

        What the socket takes goes out now: the transport would send it only when this turn of the
        loop ends, after the events of the same request have been published.
        """
        frame = wire.encode(answer)
        waiting = self.transport.get_write_buffer_size()
        if not waiting:
            try:
                frame = frame[self._raw.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:
                self.transport.abort()
                return
        if frame:
            self.transport.write(frame)
        if waiting > UNSENT_BYTES_MAX:
            log.warning("process %d does not read its answers: cut off", self.pid)
            self.transport.abort()


async def _first_frame(loop: asyncio.AbstractEventLoop, raw: socket.socket) -> tuple[bytes, bytes]:
    """The body of the first frame, and what came after it."""
    data = b""
    while True:
        if len(data) >= 4:
            end = wire.frame_length(data) + 4
            if len(data) >= end:
                return data[4:end], data[end:]
        more = await loop.sock_recv(raw, 1 << 16)
        if not more:
            raise ProtocolError("closed before its first message was whole")
        data += more


def _listen(path: Path, *, group_access: bool) -> socket.socket:
    """A listening socket at ``path``; a dead node's socket file there is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise ConfigError(f"socket.path={path}: something else is there")
            if _answers(path):
                raise ConfigError(f"socket.path={path}: another node listens there")
            path.unlink()
        previous = os.umask(0o117 if group_access else 0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(previous)
        listener.listen(128)
        listener.setblocking(False)  # noqa: FBT003
    except OSError as error:
        listener.close()
        raise ConfigError(f"socket.path={path}: {error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True


def _alive(pidfd: int | None) -> bool:
    """Whether the process behind a pidfd still runs; one that cannot be watched is taken to."""
    if pidfd is None:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)
