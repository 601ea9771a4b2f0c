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
from kvstore.state.sessions import Peer

log = logging.getLogger(__name__)

TURN_S: Final = 0.002
"""How long one connection's messages are taken before it is the others' turn."""
UNSENT_BYTES_HIGH: Final = 1 << 20
"""While more than this waits to be sent nothing is read."""
UNSENT_BYTES_MAX: Final = 16 << 20
"""A client that does not read its answers (to requests that waited) is cut off beyond this."""


class Server(Protocol):
    """What takes a connection's messages."""

    def begin(self, connection: "Connection", hello: wire.Hello, rest: bytes) -> None:
        """The loop took the socket over; ``rest`` came after its Hello."""

    def receive(self, connection: "Connection", body: bytes | memoryview) -> None:
        """A message came."""

    def refuse(self, connection: "Connection", error: ProtocolError) -> None:
        """What came can be no message."""

    def unread(self, connection: "Connection", change_bytes: int) -> None:
        """The connection holds more, or fewer, bytes of a message that is not whole yet."""

    def lost(self, connection: "Connection") -> None:
        """The connection is closed."""


class Connection(asyncio.Protocol):
    """One connection of a session after its handshake.

    Args:
        server: takes its messages.
        tenants: which ones its process may belong to; None = any.
        first: its socket, its Hello, and what came after that.

    Attributes:
        number: names it at the desk; 0 until its Hello was taken there.
        peer: who is at the other end, once the server has looked.
        raw: its socket, which belongs to the loop's transport.
    """

    transport: asyncio.Transport

    def __init__(
        self, server: Server, tenants: frozenset[str] | None,
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
        self._unread_bytes = 0
        self._bodies: deque[bytes | memoryview] = deque()
        #: More messages are to be taken in the next turn.
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
            self._bodies += self._reader.feed(data)
        except ProtocolError as error:
            self._server.refuse(self, error)
            return
        self._count_unread(self._reader.unread_bytes)
        if not self._more:
            self._take_turn()

    def pause_writing(self) -> None:
        """The client does not read its answers."""
        self._congested = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        """It has read some."""
        self._congested = False
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer left, or was cut off."""
        self._bodies.clear()
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

    def _take_turn(self) -> None:
        """Take messages until the turn ends; go on in the next one if there are more."""
        self._more = False
        end_s = monotonic() + TURN_S
        while self._bodies:
            if self.transport.is_closing():
                self._bodies.clear()
                return
            self._server.receive(self, self._bodies.popleft())
            if self._bodies and monotonic() > end_s:
                self._more = True
                asyncio.get_running_loop().call_soon(self._take_turn)
                break
        self._read_or_pause()

    def _read_or_pause(self) -> None:
        """Read only while the client reads too, and what it has sent has been taken."""
        pause = self._more or self._congested
        if pause == self._paused or self.transport.is_closing():
            return
        self._paused = pause
        if pause:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _count_unread(self, size_bytes: int) -> None:
        change, self._unread_bytes = size_bytes - self._unread_bytes, size_bytes
        if change:
            self._server.unread(self, change)
