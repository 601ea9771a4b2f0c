"""Connections with publishers of KV events: ZMTP over a stream; every wait has a deadline.

A publisher is connected to, or it connects to us: engines bind their socket or connect it.

Data is read only when the caller asks for it. If a publisher sends faster than we read, batches
wait at the publisher, and are lost there, visibly. So a publisher cannot make us buffer more than
one message.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

from kvstore.events import zmtp
from kvstore.index.credentials import PeerCredentials
from kvstore.index.tunnel import open_tunnel
from kvstore.process.connecting import open_connection
from kvstore.process.listeners import Listener, Unix, parse_endpoint
from kvstore.protocol.errors import InvalidArgument

CONNECT_S: Final = 5.0
"""Maximum time for connecting and the handshake."""
MESSAGE_BYTES_MAX: Final = 4 << 20
"""Batches of nodes have up to half a MiB; engines that do not limit them send some MiB."""
_LIMITS: Final = zmtp.MessageLimits(MESSAGE_BYTES_MAX, frames=8)
_READ_BYTES: Final = 32 << 10
"""Bytes per read: about one message with tokens, or a hundred without. Reading messages of two
bytes takes some 20 ms."""
_BUFFER_BYTES: Final = 64 << 10


class EventConnection:
    """An open connection after its handshake; :meth:`open` opens one.

    Attributes:
        beats: the peer answers :meth:`ping`.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: zmtp.ZmtpPeer
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._peer = peer
        self._early: list[zmtp.Message] = []

    @classmethod
    async def open(
        cls, endpoint: str, side: zmtp.Side, credentials: str | PeerCredentials, timeout_s: float
    ) -> "EventConnection":
        """Connect and shake hands.

        Args:
            endpoint: ``ipc://``, ``tcp://`` or ``peer://``.
            side: type of our socket.
            credentials: for a publisher over TCP a token, empty = none; for a peer service what to
                show there.
            timeout_s: maximum time for connecting and the handshake.

        Raises:
            OSError: no connection in time.
            PeerError: the peer is not a publisher, or it refuses us.
        """
        async with asyncio.timeout(timeout_s):
            if isinstance(credentials, PeerCredentials):
                reader, writer, first = await open_tunnel(
                    endpoint, credentials, replay=side is not zmtp.SUB, limit_bytes=_BUFFER_BYTES
                )
                peer = zmtp.ZmtpPeer(side, _LIMITS)
                peer.feed(first)
            else:
                reader, writer = await _connect(endpoint)
                shown = credentials.encode() if endpoint.startswith("tcp:") else b""
                peer = zmtp.ZmtpPeer(side, _LIMITS, token=shown)
            channel = cls(reader, writer, peer)
            await channel.shake_hands()
            return channel

    async def shake_hands(self) -> None:
        """Complete the handshake, or close the connection.

        Raises:
            OSError: the connection broke.
            PeerError: the peer is not a publisher, or it refuses us.
        """
        try:
            self._answer()
            while not self._peer.ready:
                self._early += await self._read()
        except BaseException:
            self.close()
            raise

    @property
    def beats(self) -> bool:
        """Whether the peer answers :meth:`ping`."""
        return self._peer.beats

    async def send(self, frames: Sequence[bytes]) -> None:
        """Send a message.

        Raises:
            OSError: the connection is broken.
        """
        self._write(zmtp.encode(frames))
        await self._writer.drain()

    async def ping(self) -> None:
        """Send a PING; the next :meth:`receive` returns when it is answered.

        Raises:
            OSError: the connection is broken.
        """
        self._write(zmtp.PING)
        await self._writer.drain()

    async def receive(self) -> list[zmtp.Message]:
        """Wait for data; returns the complete messages.

        The list is empty after a PONG or a partial message. Cancelling it loses no data.

        Raises:
            OSError: the connection is broken or closed.
            PeerError: invalid data.
        """
        if self._early:
            early, self._early = self._early, []
            return early
        return await self._read()

    def close(self) -> None:
        """Close the connection at once."""
        self._writer.transport.abort()

    async def _read(self) -> list[zmtp.Message]:
        data = await self._reader.read(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the publisher has closed the connection")
        messages = self._peer.feed(data)
        self._answer()
        return messages

    def _answer(self) -> None:
        """Send pending protocol commands; close the connection if the peer does not read them."""
        said = self._peer.outgoing()
        if said:
            self._write(said)
            if self._writer.transport.get_write_buffer_size() > _BUFFER_BYTES:
                raise ConnectionResetError("the publisher does not read")

    def _write(self, data: bytes) -> None:
        if self._writer.transport.is_closing():  # uvloop raises a RuntimeError
            raise ConnectionResetError("the connection is closed")
        self._writer.write(data)


class EventListener:
    """An endpoint of ours that a publisher connects to; both engines can do that.

    One publisher is followed at a time. Of several that connect meanwhile, the newest waits: an
    engine that was restarted takes the place of its former self.

    Args:
        endpoint: ``ipc://`` or ``tcp://``; a port ``*`` is any free one. :meth:`start` binds it.
    """

    def __init__(self, endpoint: str) -> None:
        self._asked = endpoint
        self._binding: _Binding | None = None
        self._listener: Listener | None = None
        self._server: asyncio.Server | None = None
        self._waiting: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._came = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """The actual endpoint."""
        assert self._listener is not None
        return str(self._listener.endpoint)

    async def start(self, timeout_s: float) -> None:
        """Bind the endpoint and accept connections, if that has not been done yet.

        It may be called again after an error. What takes longer than ``timeout_s`` goes on until
        then.

        Args:
            timeout_s: maximum time for binding.

        Raises:
            OSError: it cannot be bound, or not in time; the message says why.
        """
        if self._server is not None:
            return
        binding = self._binding = self._binding or _Binding(self._asked)
        try:
            async with asyncio.timeout(timeout_s):
                await binding.ended.wait()
        except TimeoutError:
            raise OSError(f"cannot listen there: it takes more than {timeout_s:g} s") from None
        self._binding = None
        listener = binding.made.result()
        try:
            self._server = await asyncio.start_server(
                self._accepted, sock=listener.socket, limit=_BUFFER_BYTES
            )
        except BaseException:
            listener.close()
            raise
        self._listener = listener

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before, self._waiting = self._waiting, (reader, writer)
        if before is not None:
            before[1].transport.abort()
        self._came.set()

    async def accept(self, timeout_s: float) -> EventConnection:
        """Wait until a publisher connects, without a limit, then shake hands.

        Args:
            timeout_s: maximum time for the handshake.

        Raises:
            OSError: the connection broke, or the handshake took too long.
            PeerError: it is not a publisher.
        """
        await self._came.wait()
        self._came.clear()
        assert self._waiting is not None
        (reader, writer), self._waiting = self._waiting, None
        channel = EventConnection(reader, writer, zmtp.ZmtpPeer(zmtp.SUB, _LIMITS, server=True))
        async with asyncio.timeout(timeout_s):
            await channel.shake_hands()
        return channel

    def close(self) -> None:
        """Stop listening, and close a connection that waits."""
        if self._waiting is not None:
            self._waiting[1].transport.abort()
            self._waiting = None
        if self._binding is not None:
            self._binding.abandon()
            self._binding = None
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()


class _Binding:
    """Binds an endpoint in a thread, because a name server or a file system may hang.

    Attributes:
        made: the listener.
        ended: it was made, or failed.

    Raises:
        OSError: no thread can be started.
    """

    def __init__(self, endpoint: str) -> None:
        self.made: Future[Listener] = Future()
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        thread = threading.Thread(
            target=self._bind, args=(endpoint,), name="kvstore-bind", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def _bind(self, endpoint: str) -> None:
        try:
            where = parse_endpoint("events_bind", endpoint)
            self.made.set_result(Listener("events_bind", where, 0o600))
        except InvalidArgument as error:
            self.made.set_exception(OSError(str(error)))
        finally:
            if not self.made.done():
                self.made.set_exception(OSError("cannot listen there, after a bug"))
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self.ended.set)

    def abandon(self) -> None:
        """Close the listener as soon as it is made."""
        self.made.add_done_callback(_close_made)


def _close_made(made: Future[Listener]) -> None:
    if made.exception() is None:
        made.result().close()


async def _connect(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        where = parse_endpoint("events", endpoint)
        if isinstance(where, Unix):
            return await asyncio.open_unix_connection(where.path, limit=_BUFFER_BYTES)
        host = where.host or "127.0.0.1"
        return await open_connection(host, where.port, limit_bytes=_BUFFER_BYTES)
    except (InvalidArgument, ValueError) as error:  # a host name that IDNA cannot encode
        raise OSError(str(error)) from error
