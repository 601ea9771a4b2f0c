"""One connection to a publisher of KV events: ZMTP over a stream, every wait with a deadline.

Nothing is read before it is wanted: what a publisher sends faster than we take it stays with it,
and is lost there, visibly. So no publisher can make us hold more than one message.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from kvstore.errors import InvalidArgument
from kvstore.events import zmtp
from kvstore.process.listeners import Unix, parse_endpoint

MESSAGE_BYTES_MAX: Final = 4 << 20
"""Nodes' batches have up to half a MiB, those of engines that take no notice of size some MiB."""
_LIMITS: Final = zmtp.MessageLimits(MESSAGE_BYTES_MAX, frames=8)
_READ_BYTES: Final = 8 << 10
"""Messages of two bytes each are dealt with in a few milliseconds."""
_BUFFER_BYTES: Final = 64 << 10


class EventConnection:
    """An open connection, handshake done.

    Attributes:
        beats: the other side answers :meth:`ping`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: zmtp.ZmtpPeer
    ) -> None:
        """See :meth:`open`."""
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._early: list[zmtp.Message] = []

    @classmethod
    async def open(
        cls, endpoint: str, side: zmtp.Side, token: str, timeout_s: float
    ) -> "EventConnection":
        """Connect and shake hands.

        Args:
            endpoint: ``ipc://`` or ``tcp://``.
            side: what we are.
            token: what the publisher asks for over TCP; empty for nothing.
            timeout_s: for all of it.

        Raises:
            OSError: nobody is there, or not in time.
            PeerError: it is no such publisher, or it refuses us.
        """
        async with asyncio.timeout(timeout_s):
            reader, writer = await _connect(endpoint)
            shown = token.encode() if endpoint.startswith("tcp:") else b""
            channel = cls(reader, writer, zmtp.ZmtpPeer(side, _LIMITS, token=shown))
            try:
                channel._answer()
                while not channel._peer.ready:
                    channel._early += await channel._read()
            except BaseException:
                channel.close()
                raise
            return channel

    @property
    def beats(self) -> bool:
        """Whether the other side answers :meth:`ping`."""
        return self._peer.beats

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken.
        """
        self._writer.write(zmtp.encode(frames))
        await self._writer.drain()

    async def ping(self) -> None:
        """Ask for a sign of life, which the next :meth:`receive` notices.

        Raises:
            OSError: the connection is broken.
        """
        self._writer.write(zmtp.PING)
        await self._writer.drain()

    async def receive(self) -> list[zmtp.Message]:
        """The next messages; none when there was only a sign of life or a part of one.

        When a deadline cuts it short, nothing is lost.

        Raises:
            OSError: the connection is broken or closed.
            PeerError: what came is no message.
        """
        if self._early:
            early, self._early = self._early, []
            return early
        return await self._read()

    def close(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()

    async def _read(self) -> list[zmtp.Message]:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the publisher has closed the connection")
        messages = self._peer.feed(data)
        self._answer()
        return messages

    def _answer(self) -> None:
        """Say what the protocol wants to be said; who asks without reading the answers is left."""
        said = self._peer.outgoing()
        if said:
            self._writer.write(said)
            if self._writer.transport.get_write_buffer_size() > _BUFFER_BYTES:
                raise ConnectionResetError("the publisher does not read")


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        where = parse_endpoint("events", endpoint)
        if isinstance(where, Unix):
            return await asyncio.open_unix_connection(where.path, limit=_BUFFER_BYTES)
        host = where.host or "127.0.0.1"
        return await asyncio.open_connection(host, where.port, limit=_BUFFER_BYTES)
    except (InvalidArgument, ValueError) as error:  # a host name that IDNA cannot say
        raise OSError(str(error)) from error
