"""The channel between a node and its admin process: frames on a socket pair.

The admin process sends operations, the node answers. Frames are those of the node's socket
(:mod:`kvstore.protocol.wire`). Operations and answers are msgpack inside of :class:`Ask` and
:class:`Answered`, because only the caller knows the expected type.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.wire import FrameReader

ASK_BYTES_MAX: Final = 1 << 20
"""Maximum size of one operation: the longest has 10,000 keys in hex."""
ASKS_MAX: Final = 512
"""Maximum operations in progress; more than the admin process has connections."""
ALIVE_S: Final = 2.0
"""Seconds between two :class:`Alive` messages of the admin process."""


class Caller(msgspec.Struct, array_like=True, frozen=True):
    """The client of a request: its role and address."""

    role: str = ""
    address: str = ""


class Ask(msgspec.Struct, array_like=True, tag=1):
    """Carry out an operation, named after its type.

    Attributes:
        id: id on this channel.
        by: the client, for the log.
    """

    id: int
    operation: str
    by: Caller
    arguments: msgspec.Raw


class Abandon(msgspec.Struct, array_like=True, tag=2):
    """Cancel an operation: the client does not wait any more."""

    id: int


class Alive(msgspec.Struct, array_like=True, tag=3):
    """The admin process runs."""


class Serving(msgspec.Struct, array_like=True, tag=4):
    """The admin process answers requests now."""


class Said(msgspec.Struct, array_like=True, tag=5):
    """A line for the node's log."""

    level: int
    logger: str
    text: str


class Begin(msgspec.Struct, array_like=True, tag=6):
    """The node's first message: the settings of the admin process.

    Attributes:
        listeners: descriptors of inherited listening sockets.
        tokens: role → bearer token.
        group: whether peers of the node's group may operate over the Unix socket.
        tenants: whether ``socket.tenants`` separates these.
        open_metrics: whether ``/metrics`` needs no token.
        token_file: file of the token generated at this start; empty = none.
        values: the configuration, for ``/v1/config``.
    """

    listeners: list[int]
    tokens: dict[str, str]
    group: bool
    tenants: bool
    open_metrics: bool
    token_file: str
    values: list[dict[str, Any]]


class Answered(msgspec.Struct, array_like=True, tag=7):
    """The result of an operation."""

    id: int
    result: msgspec.Raw


class Refused(msgspec.Struct, array_like=True, tag=8):
    """The operation was refused, with an HTTP status; nothing has changed."""

    id: int
    status: int
    code: str
    message: str
    field: str


FromAdmin = Ask | Abandon | Alive | Serving | Said
FromNode = Begin | Answered | Refused

_ENCODER: Final = msgspec.msgpack.Encoder()
_LENGTH: Final = struct.Struct("<I")
_NOT_UNDERSTOOD: Final = (ProtocolError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Channel(asyncio.Protocol):
    """One end of the channel.

    Args:
        kind: union of the types of received messages.
        received: called with each message.
        lost: called once when the peer closes the channel or sends an invalid message.
        frame_bytes_max: maximum size of a frame.

    Attributes:
        closed: no more messages are received.
    """

    def __init__(
        self, kind: Any, received: Callable[[Any], None], lost: Callable[[], None],
        frame_bytes_max: int,
    ) -> None:  # fmt: skip
        self.closed = False
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._received = received
        self._lost = lost
        self._frame_bytes_max = frame_bytes_max
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop has taken over the socket."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""
        try:
            messages = [self._decoded(body) for body in self._reader.feed(data)]
        except _NOT_UNDERSTOOD:
            self.close()  # invalid data: not the process that was started
            return
        for message in messages:
            if not self.closed:
                self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer has closed the channel."""
        self.closed = True
        self._lost()

    def send(self, message: FromAdmin | FromNode) -> None:
        """Send one message; ignored after the channel was closed."""
        if self._transport is not None and not self.closed:
            body = _ENCODER.encode(message)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Close the channel."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _decoded(self, body: bytes | memoryview) -> Any:
        if len(body) > self._frame_bytes_max:
            raise ProtocolError(f"a frame of {len(body)} bytes")
        return self._decoder.decode(body)
