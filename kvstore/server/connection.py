"""Connections of sessions: received bytes to messages for the desk, answers to bytes.

A client cannot delay others: its messages are processed in turns, and while it does not read its
answers, nothing more is read from it.
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
"""While more bytes than this wait to be sent, nothing is read or processed."""
UNSENT_BYTES_MAX: Final = 16 << 20
"""Beyond this, a client that does not read answers (to requests that waited) is disconnected."""
UNREAD_BYTES_MAX: Final = 256 << 20
"""Maximum unprocessed bytes of all connections together."""
STATS_SHARE: Final = 20
"""Statistics are cached for this many times the duration of gathering them."""


class SessionConnections:
    """All connections of sessions with one node.

    Args:
        desk: processes their messages.
        stats: returns the JSON for ``Stats``.

    Attributes:
        open: connections after their Hello, by their number at the desk.
        unread_bytes: unprocessed bytes of all connections.
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
        """Close all connections."""
        for connection in list(self.open.values()):
            connection.transport.abort()
        self._processes.close()

    def begin(self, connection: "SessionConnection", hello: wire.Hello, rest: bytes) -> None:
        """Pass Hello to the node, before this or another connection of the process can be lost.

        Args:
            connection: a connection whose socket the loop has taken over.
            hello: its first message.
            rest: bytes received after it.
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
        """Process one message."""
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
        """Answer an invalid message with a failure, and close the connection."""
        self._counts["refused_protocol"] += 1
        log.warning("connection of process %s ended: %s", connection.peer.pid or "?", error)
        connection.answer(wire.Failure(0, error.code, str(error)))
        connection.transport.close()

    def want(self, connection: "SessionConnection") -> None:
        """A connection has messages to process; see :meth:`SessionConnection.take`."""
        self._rounds.want(connection.peer.identity, connection.take)

    def unread(self, change_bytes: int) -> None:
        """Add to the unprocessed bytes.

        If all connections together have too many, the process with the most loses the connection
        with its largest message.
        """
        self.unread_bytes += change_bytes
        if self.unread_bytes > UNREAD_BYTES_MAX and change_bytes > 0:
            held: Counter[int] = Counter()
            for one in self.open.values():
                held[one.peer.identity] += one.unread_bytes
            largest = max(
                self.open.values(), key=lambda one: (held[one.peer.identity], one.unread_bytes)
            )
            self.refuse(largest, ProtocolError("too many long messages at a time"))

    def lost(self, connection: "SessionConnection") -> None:
        """A connection was closed."""
        if self.open.pop(connection.number, None) is None:
            return  # its Hello was refused
        identity = connection.peer.identity
        ended = not self._processes.runs(identity)
        self._desk.disconnect(connection.number, ended=ended)
        if not self._node.waits_for(identity):
            self._processes.forget(identity)

    def _stats_json(self) -> bytes:
        """The node's statistics; cached, because many engines may request them often."""
        start_s = monotonic()
        if start_s >= self._told_until_s:
            self._told = self._stats()
            took_s = monotonic() - start_s
            self._told_until_s = start_s + STATS_SHARE * took_s if took_s > 0.001 else 0.0
        return self._told

    def _watch(self, connection: "SessionConnection") -> Peer:
        """Ask the kernel for the peer's identity, and watch its process."""
        pid = credentials(connection.raw).pid
        process = self._processes.add(connection.raw, pid)
        return Peer(process.identity, pid, process.watched, connection.tenants)


class SessionConnection(asyncio.Protocol):
    """One connection of a session after its handshake.

    Args:
        server: all connections; processes the messages.
        tenants: tenants that its process may use; None = any.
        first: its socket, its Hello, and the bytes received after it.

    Attributes:
        number: its number at the desk; 0 until its Hello was processed.
        peer: identity of the peer, once known.
        raw: its socket, which belongs to the loop's transport.
        unread_bytes: unprocessed bytes, without the first message.
    """

    transport: asyncio.Transport

    def __init__(
        self, server: SessionConnections, tenants: frozenset[str] | None,
        first: tuple[socket.socket, wire.Hello, bytes],
    ) -> None:  # fmt: skip
        """Store the arguments; :meth:`connection_made` starts."""
        self.number = 0
        self.peer = Peer(0)
        self.tenants = tenants
        self.raw = first[0]
        self._server = server
        self._first = first
        self._reader = wire.FrameReader()
        self.unread_bytes = 0
        #: The next messages that are already split; the others are in the reader.
        self._bodies: deque[bytes | memoryview] = deque()
        #: More messages must be processed in this connection's next turn.
        self._more = False
        self._congested = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop has taken over the socket."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's own class
        self.transport.set_write_buffer_limits(high=UNSENT_BYTES_HIGH)
        _, hello, rest = self._first
        self._server.begin(self, hello, rest)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
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
        """Process messages until ``end_s``; returns whether more can be processed."""
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
        """The client does not read its answers: stop processing its messages."""
        self._congested = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        """The client has read some answers: continue."""
        self._congested = False
        self._server.want(self)
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The connection was closed by either side."""
        self._bodies.clear()
        self._reader = wire.FrameReader()
        self._count_unread(0)
        self._server.lost(self)

    def answer(self, answer: wire.Answer) -> None:
        """Send one answer; close the connection if too many are unread.

        Bytes are written to the socket directly: the transport would write them only at the end of
        this turn of the loop, after the events of the same request were published.
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
            log.warning("process %s does not read its answers: disconnected", self.peer.pid or "?")
            self.transport.abort()

    def cut(self) -> None:
        """Close it at once; unsent bytes are lost."""
        self.transport.abort()

    def _next(self) -> bytes | memoryview | None:
        """The next message, if one can be processed."""
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
        """Read only while the client reads its answers and its messages have been processed."""
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
