"""The connections of sessions: bytes in, messages to the desk, answers out.

A client cannot make the others wait: what it sends at once is taken in turns, and while it does not
read its answers nothing more is read from it.
"""

import asyncio
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable
from time import monotonic
from typing import Final, cast

from kvstore import wire
from kvstore.errors import ProtocolError
from kvstore.node.desk import Desk
from kvstore.server.processes import Processes, credentials
from kvstore.server.rounds import Rounds
from kvstore.state.tree.sessions import Peer

log = logging.getLogger(__name__)

UNSENT_BYTES_HIGH: Final = 1 << 20
"""While more than this waits to be sent nothing is read, nor taken of what was."""
UNSENT_BYTES_MAX: Final = 16 << 20
"""A client that does not read its answers (to requests that waited) is cut off beyond this."""
UNREAD_BYTES_MAX: Final = 256 << 20
"""Bytes that came and were not taken yet, of all connections."""
STATS_SHARE: Final = 20
"""Statistics that took long to gather are told again for so many times as long."""


class SessionConnections:
    """All connections of sessions with one node.

    Args:
        desk: where their messages are carried out.
        stats: gives the JSON that answers ``Stats``.

    Attributes:
        open: those that said Hello, by their number at the desk.
        unread_bytes: what came on them and was not taken yet.
    """

    def __init__(self, desk: Desk, stats: Callable[[], bytes]) -> None:
        self.open: dict[int, SessionConnection] = {}
        self.unread_bytes = 0
        self._desk = desk
        self._node = desk.node
        self._counts = desk.node.pages.counts
        self._stats = stats
        self._told = b""
        self._told_until_s = 0.0
        self._processes = Processes(desk.process_ended)
        self._rounds = Rounds()

    def close(self) -> None:
        """Cut all of them off."""
        for connection in list(self.open.values()):
            connection.transport.abort()
        self._processes.close()

    def begin(self, connection: "SessionConnection", hello: wire.Hello, rest: bytes) -> None:
        """Say Hello to the node, before this or another connection of the process can be lost.

        Args:
            connection: the loop has taken its socket over.
            hello: its first message.
            rest: what came after that.
        """
        try:
            connection.peer = self._watch(connection)
        except ProtocolError as error:
            self.refuse(connection, error)
            return
        connection.number = self._desk.connect(connection.peer, connection)
        self.open[connection.number] = connection
        self._desk.receive(connection.number, hello)
        if rest:
            connection.data_received(rest)

    def receive(self, connection: "SessionConnection", body: bytes | memoryview) -> None:
        """Carry out one message."""
        try:
            request = wire.decode_request(body)
        except ProtocolError as error:
            self.refuse(connection, error)
            return
        if isinstance(request, wire.Stats):
            connection.answer(wire.StatsReply(request.id, self._stats_json()))
            return
        self._desk.receive(connection.number, request)

    def refuse(self, connection: "SessionConnection", error: ProtocolError) -> None:
        """What came on a connection is no message: say so, and end the connection."""
        self._counts["refused_protocol"] += 1
        log.warning("connection of process %s ended: %s", connection.peer.pid or "?", error)
        connection.answer(wire.Failure(0, error.code, str(error)))
        connection.transport.close()

    def want(self, connection: "SessionConnection") -> None:
        """A connection has messages that may be taken; see :meth:`SessionConnection.take`."""
        self._rounds.want(connection.peer.identity, connection.take)

    def unread(self, change_bytes: int) -> None:
        """A connection holds so many bytes more that were not taken yet.

        When all hold too many, the process with the most of them loses its largest message.
        """
        self.unread_bytes += change_bytes
        if self.unread_bytes > UNREAD_BYTES_MAX and change_bytes > 0:
            held: Counter[int] = Counter()
            for one in self.open.values():
                held[one.peer.identity] += one.unread_bytes
            largest = max(
                self.open.values(), key=lambda one: (held[one.peer.identity], one.unread_bytes)
            )
            self.refuse(largest, ProtocolError("too many long messages are on their way"))

    def lost(self, connection: "SessionConnection") -> None:
        """A connection closed."""
        if self.open.pop(connection.number, None) is None:
            return  # its Hello was refused
        identity = connection.peer.identity
        ended = not self._processes.runs(identity)
        self._desk.disconnect(connection.number, ended=ended)
        if not self._node.waits_for(identity):
            self._processes.forget(identity)

    def _stats_json(self) -> bytes:
        """The node's statistics; many engines that ask all the time get the same for a while."""
        start_s = monotonic()
        if start_s >= self._told_until_s:
            self._told = self._stats()
            took_s = monotonic() - start_s
            self._told_until_s = start_s + STATS_SHARE * took_s if took_s > 0.001 else 0.0
        return self._told

    def _watch(self, connection: "SessionConnection") -> Peer:
        """Learn from the kernel who the peer is, and when its process ends."""
        pid = credentials(connection.raw).pid
        process = self._processes.add(connection.raw, pid)
        return Peer(process.identity, pid, process.watched, connection.tenants)


class SessionConnection(asyncio.Protocol):
    """One connection of a session after its handshake.

    Args:
        server: all connections, which take its messages.
        tenants: which ones its process may belong to; None = any.
        first: its socket, its Hello, and what came after that.

    Attributes:
        number: names it at the desk; 0 until its Hello was taken there.
        peer: who is at the other end, once the server has looked.
        raw: its socket, which belongs to the loop's transport.
        unread_bytes: what came and was not taken yet, but for the first message of it.
    """

    transport: asyncio.Transport

    def __init__(
        self, server: SessionConnections, tenants: frozenset[str] | None,
        first: tuple[socket.socket, wire.Hello, bytes],
    ) -> None:  # fmt: skip
        """Belong to the server; :meth:`connection_made` begins."""
        self.number = 0
        self.peer = Peer(0)
        self.tenants = tenants
        self.raw = first[0]
        self._server = server
        self._first = first
        self._reader = wire.FrameReader()
        self.unread_bytes = 0
        #: The next messages, as far as they are cut already; the others are in the reader.
        self._bodies: deque[bytes | memoryview] = deque()
        #: More messages are to be taken when it is this connection's turn.
        self._more = False
        self._congested = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop took the socket over."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_HIGH)
        _, hello, rest = self._first
        self._server.begin(self, hello, rest)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            body = self._reader.add(data)
        except ProtocolError as error:
            self._server.refuse(self, error)
            return
        if body is not None:
            self._bodies.append(body)
        self._count_unread(self._reader.unread_bytes)
        if self._bodies:
            self._server.want(self)
            self._read_or_pause()

    def take(self, end_s: float) -> bool:
        """Take messages until then; whether there are more that may be taken."""
        self._more = False
        body = self._next()
        while body is not None:
            self._server.receive(self, body)
            if monotonic() > end_s:
                self._more = not self._congested and not self.transport.is_closing()
                break
            body = self._next()
        self._count_unread(self._reader.unread_bytes)
        self._read_or_pause()
        return self._more

    def pause_writing(self) -> None:
        """The client does not read its answers."""
        self._congested = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        """It has read some."""
        self._congested = False
        self._server.want(self)
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer left, or was cut off."""
        self._bodies.clear()
        self._reader = wire.FrameReader()
        self._count_unread(0)
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
                frame = frame[self.raw.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:
                self.transport.abort()
                return
        if frame:
            self.transport.write(frame)
        if waiting > UNSENT_BYTES_MAX:
            log.warning("process %s does not read its answers: cut off", self.peer.pid or "?")
            self.transport.abort()

    def cut(self) -> None:
        """Close it at once; what was not sent is lost."""
        self.transport.abort()

    def _next(self) -> bytes | memoryview | None:
        """The next message, if one may be taken."""
        if self._congested or self.transport.is_closing():
            return None
        if self._bodies:
            return self._bodies.popleft()
        try:
            return self._reader.next()
        except ProtocolError as error:
            self._server.refuse(self, error)
            return None

    def _read_or_pause(self) -> None:
        """Read only while the client reads too, and what it has sent has been taken."""
        pause = self._more or self._congested or bool(self._bodies)
        if pause == self._paused or self.transport.is_closing():
            return
        self._paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _count_unread(self, size_bytes: int) -> None:
        change, self.unread_bytes = size_bytes - self.unread_bytes, size_bytes
        if change:
            self._server.unread(change)
