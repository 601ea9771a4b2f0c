"""Between a node and its admin process: frames on a pair of sockets.

The admin process asks, the node answers; both sides frame as the node's socket does
(:mod:`kvstore.wire`). Operations and answers travel as msgpack inside of :class:`Ask` and
:class:`Answered`, because only who asked knows which type to expect.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from kvstore.errors import ProtocolError
from kvstore.wire import FrameReader

ASK_BYTES_MAX: Final = 1 << 20
"""Of one operation: the longest has 10,000 keys in hex."""
ASKS_MAX: Final = 512
"""Operations that may be under way; more than the admin process serves connections."""
ALIVE_S: Final = 2.0
"""The admin process says so often that it is there."""


class Caller(msgspec.Struct, array_like=True, frozen=True):
    """Who asks: with which role, and from where."""

    role: str = ""
    address: str = ""


class Ask(msgspec.Struct, array_like=True, tag=1):
    """Carry out an operation, named after its type.

    Attributes:
        id: names it on this channel.
        by: who asks, for the log.
    """

    id: int
    operation: str
    by: Caller
    arguments: msgspec.Raw


class Abandon(msgspec.Struct, array_like=True, tag=2):
    """Nobody waits for this answer any more."""

    id: int


class Alive(msgspec.Struct, array_like=True, tag=3):
    """The admin process runs."""


class Serving(msgspec.Struct, array_like=True, tag=4):
    """From now on requests are answered."""


class Said(msgspec.Struct, array_like=True, tag=5):
    """A line for the node's log."""

    level: int
    logger: str
    text: str


class Begin(msgspec.Struct, array_like=True, tag=6):
    """What the admin process needs to know; the node's first message.

    Attributes:
        listeners: descriptors of listening sockets, which it has inherited.
        tokens: role → bearer token.
        group: whether peers of the node's group may operate over the Unix socket.
        tenants: whether these have tenants of their own.
        open_metrics: whether ``/metrics`` wants no token.
        token_file: where a token that was made at this start is; empty = none was.
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
    """What the operation gave."""

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
        kind: union of the messages that come.
        received: is called with each.
        lost: is called once when the other end has gone, or said what cannot be understood.
        frame_bytes_max: a longer one is not understood.

    Attributes:
        closed: nothing comes any more.
    """

    def __init__(
        self, kind: Any, received: Callable[[Any], None], lost: Callable[[], None],
        frame_bytes_max: int,
    ) -> None:  # fmt: skip
        """Wait for the loop to connect it."""
        self.closed = False
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._received = received
        self._lost = lost
        self._frame_bytes_max = frame_bytes_max
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop took the socket over."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        try:
            messages = [self._decoded(body) for body in self._reader.feed(data)]
        except _NOT_UNDERSTOOD:
            self.close()  # what does not speak this is not the process that was started
            return
        for message in messages:
            if not self.closed:
                self._received(message)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The other end has gone."""
        self.closed = True
        self._lost()

    def send(self, message: FromAdmin | FromNode) -> None:
        """Send one message; nothing happens once the channel is closed."""
        if self._transport is not None and not self.closed:
            body = _ENCODER.encode(message)
            self._transport.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        """Say and hear nothing more."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _decoded(self, body: bytes | memoryview) -> Any:
        if len(body) > self._frame_bytes_max:
            raise ProtocolError(f"a frame of {len(body)} bytes")
        return self._decoder.decode(body)
