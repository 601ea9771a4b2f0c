"""The service for other nodes: one more face of the node, over TCP with mutual TLS.

The first message of a connection says what it is: PeerHello makes it the session of another node,
FollowEvents hands it to the follower of KV events. A node has one session; a newer connection of
the same node ends the older one. Everything runs on the loop that owns the node.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, cast

from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.standing import Refusals
from kvstore.config.addresses import is_wildcard, read_address
from kvstore.node.desk import Desk
from kvstore.process.faults import Faults
from kvstore.process.listeners import Listener, parse_endpoint
from kvstore.protocol import wire
from kvstore.protocol.counts import PeerServiceCounts
from kvstore.protocol.errors import (
    ConfigError,
    InvalidArgument,
    KVStoreError,
    ProtocolError,
    printable,
    reason,
)
from kvstore.server.frames import FrameConnection, FrameConnections
from kvstore.server.handshakes import FirstFrame, Handshakes
from kvstore.server.loans import Loans
from kvstore.server.served import ServedPeer
from kvstore.state.tree.sessions import Peer
from kvstore.transport.base import Transport

log = logging.getLogger(__name__)

SESSIONS_MAX: Final = 256
FOLLOWERS_MAX: Final = 128
"""Maximum connections that follow events."""
_FIRST_IDENTITY: Final = -(1 << 40)
"""Identities of nodes count down from here; those of processes are never as low."""

ServeEvents = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter, wire.FollowEvents], Awaitable[None]
]


class PeerService:
    """Serves other nodes of the cluster, once :meth:`listen` and :meth:`serve` are called.

    Args:
        listen: ``host:port``; port 0 = any.
        local: this node, as it introduces itself.
        knows: whether the cluster has a node of the given name.
        desk: the desk of this node.
        loans: lends pages.
        serve_events: owns the connection of a follower until it returns; it may be cancelled.
        tls: the server's certificate, and the authority of its peers; None = plain TCP.

    Attributes:
        endpoint: ``host:port`` of the listening socket, once it listens.
    """

    def __init__(
        self, listen: str, local: LocalNode, knows: Callable[[str], bool], desk: Desk,
        loans: Loans, serve_events: ServeEvents, tls: ssl.SSLContext | None,
    ) -> None:  # fmt: skip
        self.endpoint = ""
        self.faults = Faults(log, "a connection of another node was refused")
        self._listen = listen
        self._local = local
        self._knows = knows
        self._desk = desk
        self._loans = loans
        self._serve_events = serve_events
        self._tls = tls
        counts = desk.node.pages.counts
        self._frames = FrameConnections(counts, self._receive, self._lost)
        self._handshakes = Handshakes()
        self._refusals = Refusals()
        self._serials = count(1)
        self._served: dict[int, ServedPeer] = {}
        self._followers: set[asyncio.Task[None]] = set()
        self._listener: Listener | None = None

    def listen(self) -> None:
        """Create the listening socket; peers may connect, and :meth:`serve` serves them.

        Raises:
            ConfigError: the address cannot be used.
        """
        try:
            place = parse_endpoint("cluster.listen", f"tcp://{self._listen}")
            self._listener = Listener("cluster.listen", place, 0)
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error
        self.endpoint = str(self._listener.endpoint).removeprefix("tcp://")

    async def serve(self) -> None:
        """Accept connections until cancelled."""
        assert self._listener is not None
        await self._handshakes.serve(self._listener.socket, self._handshake)

    def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._listener is not None:
            self._listener.close()
        self._frames.close()
        for served in list(self._served.values()):
            self._end(served)
        for task in self._followers:
            task.cancel()

    def stats(self) -> PeerServiceCounts:
        """Open sessions, followers, accepted connections, and faults by cause."""
        return PeerServiceCounts(
            sessions=sorted(one.node for one in self._served.values()),
            followers=len(self._followers), accepted_connections=self._handshakes.accepted,
            refused=dict(self.faults.counts), loans=self._loans.stats(),
        )  # fmt: skip

    # ---- the first message ------------------------------------------------------------------

    async def _handshake(self, raw: Any) -> None:
        """Read the first message and become what it says, or answer and close."""
        loop = asyncio.get_running_loop()
        opening = _Opening()
        try:
            async with self._handshakes.limits() as heard:
                await loop.connect_accepted_socket(lambda: opening, raw, ssl=self._tls)
                body, rest = await opening.first
                heard()
                request = wire.decode_request(body)
                if not isinstance(request, wire.PeerHello | wire.FollowEvents):
                    raise ProtocolError(f"{type(request).__name__} before PeerHello")
                opening.name = request.node
                self._admit(request)
        except TimeoutError:
            self._turn_away(opening, ProtocolError("no message in time, or its place was needed"))
            return
        except (KVStoreError, OSError) as error:
            self._turn_away(opening, error)
            return
        except BaseException:
            opening.abort()
            raise
        transport = opening.transport
        assert transport is not None
        if transport.is_closing():
            return
        transport.resume_reading()
        if isinstance(request, wire.FollowEvents):
            self._follow(transport, request, rest)
            return
        connection = FrameConnection(
            self._frames, None, partial(self._begin, hello=request, rest=rest)
        )
        transport.set_protocol(connection)
        connection.connection_made(transport)

    def _admit(self, request: wire.PeerHello | wire.FollowEvents) -> None:
        self._local.admit(request, self._knows)
        if isinstance(request, wire.FollowEvents):
            if len(self._followers) >= FOLLOWERS_MAX:
                raise ProtocolError(f"{FOLLOWERS_MAX} connections follow events already")
        elif len(self._served) >= SESSIONS_MAX:
            raise ProtocolError(f"{SESSIONS_MAX} nodes have sessions already")
        else:
            self._refusals.admitted(request.node)

    def _turn_away(self, opening: "_Opening", error: Exception) -> None:
        cause = error.code if isinstance(error, KVStoreError) else "connection"
        field = getattr(error, "field", "")
        if field and opening.name:
            self.faults.count(field)
            self._refusals.refused(opening.name, field, reason(error))
        else:
            self.faults.note(field or cause, reason(error))
        transport = opening.transport
        # uvloop refuses data for a connection that the other side has closed.
        if transport is None or transport.is_closing() or not isinstance(error, KVStoreError):
            opening.abort()
        else:
            said = printable(str(error))
            transport.write(wire.encode(wire.Failure(1, error.code, said, field)))
            transport.close()

    # ---- sessions ---------------------------------------------------------------------------

    def _begin(self, connection: FrameConnection, hello: wire.PeerHello, rest: bytes) -> None:
        for older in list(self._served.values()):
            if older.node == hello.node:
                older.connection.cut()
                self._end(older)
        connection.number = next(self._serials)
        identity = _FIRST_IDENTITY - connection.number
        connection.peer = Peer(identity, watched=False, remote=True)
        connection.whose = f"node {hello.node}"
        self._frames.add(connection)
        self._served[connection.number] = ServedPeer(
            connection, hello.node, self._desk, self._loans
        )
        local = self._local
        transports = advertised_transports(self._loans.transports)
        connection.answer(
            wire.PeerWelcome(
                hello.id, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, local.name, local.boot,
                transports,
            )
        )  # fmt: skip
        if rest:
            connection.data_received(rest)

    def _receive(self, connection: FrameConnection, request: wire.Request) -> None:
        served = self._served.get(connection.number)
        if served is None:
            return  # a newer connection of its node has taken its place
        try:
            served.receive(request)
        except ProtocolError as error:
            self.faults.note("request", str(error))
            self._frames.refuse(connection, error, getattr(request, "id", 0))

    def _lost(self, connection: FrameConnection) -> None:
        served = self._served.get(connection.number)
        if served is not None:
            self._end(served)

    def _end(self, served: ServedPeer) -> None:
        if self._served.pop(served.connection.number, None) is not None:
            served.lost()

    # ---- events -----------------------------------------------------------------------------

    def _follow(
        self, transport: asyncio.Transport, request: wire.FollowEvents, rest: bytes
    ) -> None:
        """Give the connection to the follower of events."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        if rest:
            reader.feed_data(rest)
        task = loop.create_task(self._tunnel(reader, writer, request))
        self._followers.add(task)
        task.add_done_callback(self._followers.discard)

    async def _tunnel(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        request: wire.FollowEvents,
    ) -> None:  # fmt: skip
        try:
            await self._serve_events(reader, writer, request)
        except Exception as error:  # whatever it is: a peer must not end the node
            self.faults.note("events", f"{type(error).__name__}: {reason(error)}")
        finally:
            writer.transport.abort()


class _Opening(asyncio.Protocol):
    """A connection until its first message is complete; nothing is read after it.

    Attributes:
        first: the first frame's body, and the bytes after it.
        transport: None until the connection, and its TLS, exist.
        name: the name that the other node gives itself; empty before its first message.
    """

    def __init__(self) -> None:
        self.first: asyncio.Future[tuple[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.name = ""
        self._frame = FirstFrame()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has taken over the socket."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Collect the first frame."""
        if self.first.done():
            return
        try:
            found = self._frame.add(data)
        except ProtocolError as error:
            self._refuse(error)
            return
        if found is not None:
            assert self.transport is not None
            self.transport.pause_reading()
            self.first.set_result(found)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The peer has closed it."""
        if not self.first.done():
            self._refuse(ProtocolError("closed before its first message was complete"))

    def _refuse(self, error: ProtocolError) -> None:
        self.first.set_exception(error)
        self.first.exception()  # or the loop reports it if nobody waits any more

    def abort(self) -> None:
        """Close it at once."""
        self.first.cancel()
        if self.transport is not None:
            self.transport.abort()


def advertised_transports(transports: Sequence[Transport]) -> dict[str, str]:
    """Name and endpoint of each transport through which this node can be read now.

    An endpoint whose host stands for all addresses is told without it.
    """
    advertised: dict[str, str] = {}
    for endpoint, name in ((one.endpoint, one.name) for one in transports):
        if endpoint:
            host, port = read_address(endpoint)
            advertised[name] = f":{port}" if is_wildcard(host) else endpoint
    return advertised
