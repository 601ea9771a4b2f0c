"""The connection of a simulated node to another one; stands for ``kvstore.cluster.links``."""

from collections.abc import Callable
from typing import Final

from kvstore.cluster.effects import CloseLink, Send
from kvstore.cluster.session import PeerSession
from kvstore.cluster.side import FetchLink, Peers
from kvstore.protocol import wire
from kvstore.protocol.counts import PeerSessionCounts
from kvstore.state.remote.jobs import PeerBring, PeerFetch
from kvstore.testing.cluster_serving import Later
from kvstore.testing.cluster_wires import Circuit
from kvstore.transport.base import TransferEnd

BACKOFF_NS: Final = 20_000_000

Dial = Callable[["SimulatedLink"], Circuit | None]
"""Connects a link, as end 0; None = nobody is there."""


class SimulatedLink(FetchLink):
    """Keeps a session with one other node up, while its own node lives.

    Args:
        session: with the other node.
        peers: carries out what the session decides.
        clock: the time in nanoseconds.
        later: of the node.
        dial: connects.
    """

    def __init__(
        self, session: PeerSession, peers: Peers, clock: Callable[[], int], later: Later, dial: Dial
    ) -> None:
        self.session = session
        self._peers = peers
        self._clock = clock
        self._later = later
        self._dial = dial
        self._circuit: Circuit | None = None
        self._reader = wire.FrameReader()
        self._timer_ns = 0
        self._ended = False

    def connect(self) -> None:
        """Connect now, or again and again."""
        if self._ended or self._circuit is not None:
            return
        self._circuit = self._dial(self)
        if self._circuit is None:
            self._later(BACKOFF_NS, self.connect)
            return
        self._reader = wire.FrameReader()
        self.session.opened(self._clock())
        self._carry_out()

    def receive(self, circuit: Circuit | None, frame: bytes) -> None:
        """An answer has come on a connection."""
        if circuit is not self._circuit:
            return
        for body in self._reader.feed(frame):
            self.session.received(wire.decode_answer(body), self._clock())
            self._carry_out()

    def closed(self, circuit: Circuit | None) -> None:
        """A connection is gone."""
        if circuit is not None and circuit is self._circuit:
            self._circuit = None
            self.session.closed()
            self._carry_out()
            self._later(BACKOFF_NS, self.connect)

    def end(self) -> None:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        self._ended = True
        self.session.left()
        self._carry_out()
        circuit = self._circuit
        if circuit is not None:
            circuit.close(0)
            self.closed(circuit)

    def fetch(self, job: PeerFetch) -> None:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        self.session.fetch(job, self._clock())
        self._carry_out()

    @property
    def up(self) -> bool:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        return self.session.up

    def bring(self, job: PeerBring) -> None:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        self.session.bring(job, self._clock())
        self._carry_out()

    def transfer_ended(self, end: TransferEnd) -> None:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        self.session.transfer_ended(end)
        self._carry_out()

    def transfer_settled(self, job: int) -> None:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        self.session.transfer_settled(job)
        self._carry_out()

    def stats(self, *, draining: bool) -> PeerSessionCounts:
        """See :class:`kvstore.cluster.side.FetchLink`."""
        session = self.session
        return PeerSessionCounts(
            up=session.up, draining=draining, endpoint="", fault=None, faults={},
            boot=session.boot.hex(), transport=session.transport, fetches=session.fetches,
        )  # fmt: skip

    def _carry_out(self) -> None:
        session = self.session
        while session.effects:
            effects, session.effects = session.effects, []
            for effect in effects:
                if isinstance(effect, Send):
                    if self._circuit is not None:
                        self._circuit.send(1, wire.encode(effect.message))
                elif isinstance(effect, CloseLink):
                    self._abort()
                else:
                    self._peers.carry(self, effect)
        due_ns = session.next_deadline_ns()
        if due_ns and (not self._timer_ns or due_ns < self._timer_ns):
            self._timer_ns = due_ns
            self._later(max(0, due_ns - self._clock()), self._tick)

    def _tick(self) -> None:
        if self._timer_ns and self._clock() >= self._timer_ns:
            self._timer_ns = 0
            self.session.advance(self._clock())
            self._carry_out()

    def _abort(self) -> None:
        """Close the connection; a new one follows."""
        circuit, self._circuit = self._circuit, None
        if circuit is not None:
            circuit.close(0)
            self._later(BACKOFF_NS, self.connect)
