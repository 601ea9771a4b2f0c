"""Connections to other nodes: one per node, kept up, with a pure session on each."""

import asyncio
import ssl
from collections.abc import Callable
from time import monotonic, monotonic_ns
from typing import Final

from kvstore.cluster.effects import CarriedOut, CloseLink, Effect, Send
from kvstore.cluster.session import PeerSession
from kvstore.cluster.standing import Standing
from kvstore.process.connecting import open_connection
from kvstore.process.listeners import Tcp, parse_endpoint
from kvstore.protocol import wire
from kvstore.protocol.counts import PeerSessionCounts
from kvstore.protocol.errors import ProtocolError, reason
from kvstore.state.remote.jobs import PeerBring, PeerFetch
from kvstore.transport.base import TransferEnd

CONNECT_S: Final = 5.0
"""Time limit of connecting, including the TLS handshake."""
BACKOFF_S: Final = (0.1, 5.0)
"""The first and the longest pause between attempts to connect."""
STEADY_S: Final = 5.0
"""After a session of this duration, the pause is the first one again."""
UNSENT_BYTES_MAX: Final = 16 << 20
"""Maximum unsent requests to a node that does not read them."""
ANSWER_BYTES_MAX: Final = 2 << 20
"""Maximum size of an answer: a lease of 4,096 pages takes a tenth of it."""
_READ_BYTES: Final = 64 << 10

Carry = Callable[["PeerLink", CarriedOut], None]


class PeerLink:
    """The connection to one other node.

    Args:
        session: the session with it.
        place: ``host:port`` of its peer service.
        tls: this node's certificate, and the authority of its peers; None = plain TCP.
        carry: carries out the session's decisions about transfers and fetches.
    """

    def __init__(
        self, session: PeerSession, place: str, tls: ssl.SSLContext | None, carry: Carry
    ) -> None:
        endpoint = parse_endpoint("cluster.nodes", f"tcp://{place}")
        assert isinstance(endpoint, Tcp)
        self._session = session
        self._standing = Standing(session.peer, place)
        self._endpoint = endpoint
        self._tls = tls
        self._carry = carry
        self._writer: asyncio.StreamWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        #: When the session of this connection came up; 0 = it has not.
        self._up_s = 0.0

    async def run(self) -> None:
        """Keep the connection up until cancelled."""
        pause_s, longest_s = BACKOFF_S
        try:
            while True:
                self._up_s = 0.0
                await self._connect()
                if self._up_s and monotonic() - self._up_s >= STEADY_S:
                    pause_s = BACKOFF_S[0]
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def fetch(self, job: PeerFetch) -> None:
        """Start a fetch."""
        self._session.fetch(job, monotonic_ns())
        self._carry_out()

    @property
    def up(self) -> bool:
        """Whether the other node has welcomed this one."""
        return self._session.up

    def bring(self, job: PeerBring) -> None:
        """Ask the other node to fetch pages from here."""
        self._session.bring(job, monotonic_ns())
        self._carry_out()

    def transfer_ended(self, end: TransferEnd) -> None:
        """A transfer of the session has ended."""
        self._session.transfer_ended(end)
        self._carry_out()

    def transfer_settled(self, job: int) -> None:
        """An ended transfer does not write any more."""
        self._session.transfer_settled(job)
        self._carry_out()

    def end(self) -> None:
        """End all fetches now; :meth:`run` must be cancelled next. Transfers may settle later."""
        self._session.left()
        self._carry_out()
        self._standing.left()
        self._abort()

    def stats(self, *, draining: bool) -> PeerSessionCounts:
        """Whether the other node has welcomed this one, running fetches, and faults by cause."""
        session, standing = self._session, self._standing
        return PeerSessionCounts(
            up=standing.up, draining=draining, endpoint=standing.place, fault=standing.fault(),
            faults=dict(standing.faults), boot=session.boot.hex(), transport=session.transport,
            fetches=session.fetches,
        )  # fmt: skip

    async def _connect(self) -> None:
        """Connect, and read answers until the connection is closed."""
        host, port = self._endpoint.host, self._endpoint.port
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await open_connection(host, port, tls=self._tls)
        except ssl.SSLError as error:
            self._standing.failed("tls", reason(error))
            return
        except (TimeoutError, OSError, ValueError) as error:  # a name that no host can have
            self._standing.failed("unreachable", reason(error))
            return
        self._writer = writer
        self._session.opened(monotonic_ns())
        self._carry_out()
        try:
            await self._read(reader)
        except ProtocolError as error:
            self._standing.failed(error.code, str(error))
        except ssl.SSLError as error:  # of TLS 1.3, which refuses certificates after connecting
            self._standing.failed("tls", reason(error))
        except OSError as error:
            self._standing.failed("closed", reason(error))
        finally:
            self._writer = None
            writer.transport.abort()
            self._session.closed()
            self._carry_out()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = wire.FrameReader()
        while data := await reader.read(_READ_BYTES):
            for body in frames.feed(data):
                if len(body) > ANSWER_BYTES_MAX:
                    raise ProtocolError(f"an answer of {len(body)} bytes")
                self._session.received(wire.decode_answer(body), monotonic_ns())
                self._carry_out()
        if self._writer is not None:  # it was not closed here
            self._standing.failed("closed", "the other node closed the connection")

    def _carry_out(self) -> None:
        session = self._session
        if session.up and not self._up_s:
            self._up_s = monotonic()
            self._standing.came(session.boot, session.transport)
        while session.effects:
            effects, session.effects = session.effects, []
            for effect in effects:
                self._apply(effect)
        self._schedule()

    def _apply(self, effect: Effect) -> None:
        match effect:
            case Send(message):
                self._send(message)
            case CloseLink(cause, why, field):
                self._standing.failed(cause, why, field)
                self._abort()
            case _:
                self._carry(self, effect)

    def _send(self, message: wire.Request) -> None:
        writer = self._writer
        if writer is None or writer.transport.is_closing():
            return
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            self._standing.failed("deaf", "it does not read its requests")
            self._abort()
            return
        writer.write(wire.encode(message))

    def _abort(self) -> None:
        """Close the connection at once; reading it ends."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ns = self._session.next_deadline_ns()
        if deadline_ns:
            delay_s = max(0.0, (deadline_ns - monotonic_ns()) / 1e9)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._session.advance(monotonic_ns())
        self._carry_out()
