"""Connections of framed messages: received bytes to requests, answers to bytes.

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

from kvstore.process.faults import Faults
from kvstore.protocol import wire
from kvstore.protocol.errors import ProtocolError
from kvstore.server.rounds import LONG_S, Rounds
from kvstore.state.tree.sessions import Peer

log = logging.getLogger(__name__)

UNSENT_BYTES_HIGH: Final = 1 << 20
"""While more bytes than this wait to be sent, nothing is read or processed."""
UNSENT_BYTES_MAX: Final = 16 << 20
"""Beyond this, a client that does not read answers (to requests that waited) is disconnected."""
UNREAD_BYTES_MAX: Final = 256 << 20
"""Maximum unprocessed bytes of all connections of a face together."""
LINGER_S: Final = 2.0
"""How long a refused client has to read its answers."""


class FrameConnections:
    """All connections of one face of the node.

    Args:
        counts: counts refused messages.
        receive: processes one request of a connection.
        lost: called once for each connection of ``open`` after it was closed.

    Attributes:
        open: connections after their first message, by number.
        unread_bytes: unprocessed bytes of all connections.
    """

    def __init__(
        self, counts: dict[str, int], receive: Callable[["FrameConnection", wire.Request], None],
        lost: Callable[["FrameConnection"], None],
    ) -> None:  # fmt: skip
        self.open: dict[int, FrameConnection] = {}
        self.unread_bytes = 0
        self._counts = counts
        self._receive = receive
        self._lost = lost
        self._rounds = Rounds()
        self._faults = Faults(log, "a connection was ended")

    def add(self, connection: "FrameConnection") -> None:
        """A connection has its number and peer: it counts from now on."""
        self.open[connection.number] = connection

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self.open.values()):
            connection.cut()

    def receive(self, connection: "FrameConnection", body: bytes | memoryview) -> None:
        """Process one message."""
        try:
            request = wire.decode_request(body)
        except ProtocolError as error:
            self.refuse(connection, error)
            return
        self._receive(connection, request)

    def refuse(self, connection: "FrameConnection", error: ProtocolError, request: int = 0) -> None:
        """Answer an invalid message with a failure, and close the connection."""
        self._counts["refused_protocol"] += 1
        self._faults.note("protocol", f"{connection.whose}: {error}")
        connection.answer(wire.Failure(request, error.code, str(error)))
        connection.refused()

    def want(self, connection: "FrameConnection") -> None:
        """A connection has messages to process; see :meth:`FrameConnection.take`."""
        self._rounds.want(connection.peer.identity, connection.take, long=connection.long)

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

    def end(self, connection: "FrameConnection") -> None:
        """A connection was closed: its end has its turn, for a thousand may close together."""
        self._rounds.want(connection.peer.identity, connection.end)

    def lost(self, connection: "FrameConnection") -> None:
        """The end of a connection has its turn."""
        if self.open.pop(connection.number, None) is not None:  # else its first message was refused
            self._lost(connection)


class FrameConnection(asyncio.Protocol):
    """One connection after its first message.

    Args:
        all_of_face: all connections; processes the messages.
        raw: its socket, if answers may be written to it directly; None = through the transport.
        begin: called once the loop has taken over the socket.

    Attributes:
        long: its last turn was long: who puts many pages goes on with that.
        number: its number among the connections of the face; 0 until its first message was
            processed.
        peer: identity of the peer, once known.
        raw: its socket, which belongs to the loop's transport.
        unread_bytes: unprocessed bytes, without the first message.
        whose: the peer, in words for the log.
    """

    transport: asyncio.Transport

    def __init__(
        self, all_of_face: FrameConnections, raw: socket.socket | None,
        begin: Callable[["FrameConnection"], None],
    ) -> None:  # fmt: skip
        self.long = False
        self.number = 0
        self.peer = Peer(0)
        self.raw = raw
        self.unread_bytes = 0
        self.whose = "process ?"
        self._server = all_of_face
        self._begin = begin
        self._reader = wire.FrameReader()
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
        self._begin(self)

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
        now_s = began_s = monotonic()
        first = body = self._next()
        while body is not None:
            self._server.receive(self, body)
            now_s = monotonic()
            if now_s > end_s:
                self._more = not self._congested and not self.transport.is_closing()
                break
            body = self._next()
        if first is not None:  # else the turn before was its last one, and says how long they are
            self.long = now_s - began_s > LONG_S
        self._count_unread(self._reader.unread_bytes)
        self._read_or_pause()
        return self._more

    def end(self, _end_s: float) -> bool:
        """Leave the connections of the face, in its turn; returns that there is no more."""
        self._server.lost(self)
        return False

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
        self._forget_unread()
        self._server.end(self)

    def answer(self, answer: wire.Answer) -> None:
        """Send one answer; close the connection if too many are unread.

        Bytes are written to the socket directly: the transport would write them only at the end of
        this turn of the loop, after the events of the same request were published.
        """
        frame = wire.encode(answer)
        waiting = self.transport.get_write_buffer_size()
        if self.raw is not None and not waiting:
            try:
                frame = frame[self.raw.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:
                self.transport.abort()
                return
        if frame and not self.transport.is_closing():
            self.transport.write(frame)
        if waiting > UNSENT_BYTES_MAX:
            log.warning("%s does not read its answers: disconnected", self.whose)
            self.transport.abort()

    def refused(self) -> None:
        """Close it when its client has read its answers, or after LINGER_S; drop what it sent."""
        self.transport.close()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.abort)
        self._forget_unread()

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

    def _forget_unread(self) -> None:
        self._bodies.clear()
        self._reader = wire.FrameReader()
        self._count_unread(0)

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
