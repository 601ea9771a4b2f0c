"""One connection of a session: bytes in, messages to the node, answers out.

A client cannot make the others wait: what it sends at once is taken in turns, and while it does not
read its answers nothing more is read from it.
"""

import asyncio
import logging
import socket
from collections import deque
from time import monotonic
from typing import Final, Protocol, cast

from kvstore import wire
from kvstore.errors import ProtocolError
from kvstore.state.tree.sessions import Peer

log = logging.getLogger(__name__)

UNSENT_BYTES_HIGH: Final = 1 << 20
"""While more than this waits to be sent nothing is read, nor taken of what was."""
UNSENT_BYTES_MAX: Final = 16 << 20
"""A client that does not read its answers (to requests that waited) is cut off beyond this."""


class ConnectionOwner(Protocol):
    """What takes a connection's messages."""

    def begin(self, connection: "SessionConnection", hello: wire.Hello, rest: bytes) -> None:
        """The loop took the socket over; ``rest`` came after its Hello."""

    def receive(self, connection: "SessionConnection", body: bytes | memoryview) -> None:
        """A message came."""

    def refuse(self, connection: "SessionConnection", error: ProtocolError) -> None:
        """What came can be no message."""

    def want(self, connection: "SessionConnection") -> None:
        """The connection has messages that may be taken; see :meth:`SessionConnection.take`."""

    def unread(self, change_bytes: int) -> None:
        """A connection holds more, or fewer, bytes that were not taken yet."""

    def lost(self, connection: "SessionConnection") -> None:
        """The connection is closed."""


class SessionConnection(asyncio.Protocol):
    """One connection of a session after its handshake.

    Args:
        server: takes its messages.
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
        self, server: ConnectionOwner, tenants: frozenset[str] | None,
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

    @property
    def process(self) -> int:
        """Whose it is."""
        return self.peer.identity

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
