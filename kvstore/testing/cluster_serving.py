"""The side of a simulated node that others see: their sessions with it, and its loans.

The sessions are the product's. Loans stand in for :class:`kvstore.server.loans.Loans`, which needs
a loop and a thread.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Final, cast

from kvstore.cluster.greeting import LocalNode
from kvstore.mover.memory import memory_at
from kvstore.node.desk import Desk
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.server.frames import FrameConnection
from kvstore.server.loans import LentPages, Loan, Loans
from kvstore.server.served import ServedPeer
from kvstore.state.remote.jobs import FetchEnd, PeerFetch
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import ORDINARY, Retention
from kvstore.state.tree.sessions import Peer
from kvstore.testing.cluster_wires import Circuit
from kvstore.testing.timeline import PAGE_BYTES, Timeline, page_content
from kvstore.transport.base import TICKET_BYTES, Range, Transport

CHECK_NS_MAX: Final = 5_000_000
"""Longest time of checking a reported page."""
_FIRST_IDENTITY: Final = -(1 << 40)

Later = Callable[[int, Callable[[], None]], None]
"""Makes a call after so many nanoseconds, in a turn of one life of a node."""


class LentRetentions:
    """How long the pages that a node has lent stay there; it outlives the node."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes, bytes], set[Retention]] = defaultdict(set)

    def add(self, pages: LentPages, table: PageTable) -> None:
        """These are lent now."""
        space = next(one for one in table.spaces if one.identity == pages.identity)
        for at in range(0, len(pages.keys), KEY_BYTES):
            key, bit = PrefixKey(pages.keys[at : at + KEY_BYTES]), 1 << pages.number
            page = space.index.get(key)
            assert page is not None
            stays = Retention(
                page.expires.get(pages.number, 0), bool(page.read_once & bit),
                bool(page.memory_only & bit),
            )  # fmt: skip
            self._known[pages.identity.digest, pages.shard.digest, key].add(stays)

    def check(self, end: FetchEnd, job: PeerFetch, now_ns: int) -> None:
        """Assert that no page stays longer where it has come to, unless its time is over anyway."""
        kept = end.kept or [ORDINARY] * (len(end.digests) // DIGEST_BYTES)
        for at, stays in enumerate(kept):
            key = job.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            for there in self._known[job.identity.digest, job.shard.digest, key]:
                sooner = 0 < stays.expires_ns <= max(there.expires_ns, now_ns)
                if stays[1:] == there[1:] and (sooner or not there.expires_ns):
                    break
            else:
                raise AssertionError(f"a page stays {stays}, which was not lent so")


class SimulatedLoans:
    """All leases of other nodes; see :class:`kvstore.server.loans.Loans`.

    Attributes:
        open: loans that have not been released.
        counts: reports by outcome.
        transports: the one of the simulation.
    """

    def __init__(
        self, time: Timeline, later: Later, transport: Transport, address: Callable[[int], int],
        lent: "LentRetentions", table: PageTable,
    ) -> None:  # fmt: skip
        self._lent = lent
        self._table = table
        self.open: set[Loan] = set()
        self.counts: Counter[str] = Counter()
        self.transports: Sequence[Transport] = [transport]
        self._time = time
        self._later = later
        self._address = address

    def add(self, pages: LentPages, lease_ms: int, release: Callable[[], None]) -> Loan:
        """Open leased pages to the transport."""
        size = pages.page_bytes
        ranges = [
            (Range(extent, generation, offset, size), self._address(extent) + offset)
            for extent, generation, offset in pages.addresses
        ]
        self._lent.add(pages, self._table)
        loan = Loan(pages, self._time.random.randbytes(TICKET_BYTES), release)
        open_ns = lease_ms * 750_000  # so that a read can be broken off before the lease ends
        for transport in self.transports:
            transport.grant(loan.ticket, ranges, self._time.now_ns + open_ns)
        self._later(open_ns, lambda: self.end(loan))
        self.open.add(loan)
        return loan

    def end(self, loan: Loan, *, at_once: bool = False) -> None:
        """Close the ticket, and release the lease after the checks of its pages."""
        if not loan.ended:
            loan.ended = True
            for transport in self.transports:
                transport.revoke(loan.ticket)
            if self._time.random.random() < 0.3:  # a read that is being broken off
                loan.transfers = 1
                self._later(self._time.random.randrange(CHECK_NS_MAX), lambda: self._broken(loan))
        if at_once:
            for check in list(loan.checks):
                check.cancel()
            loan.checks.clear()
        self._release(loan)

    def _broken(self, loan: Loan) -> None:
        loan.transfers = 0
        self._release(loan)

    def report(self, loan: Loan, report: wire.Corrupt, confirmed: Callable[[], bool]) -> None:
        """Check a reported page; ``confirmed`` is called if its bytes are wrong here too."""
        position = loan.pages.position(report)
        if position < 0 or position in loan.checked:
            return
        loan.checked.add(position)
        check: Future[bool] = Future()
        loan.checks.add(check)
        delay_ns = self._time.random.randrange(CHECK_NS_MAX)
        self._later(delay_ns, lambda: self._check(loan, position, check, confirmed))

    def _check(
        self, loan: Loan, position: int, check: "Future[bool]", confirmed: Callable[[], bool]
    ) -> None:
        loan.checks.discard(check)
        if not check.cancelled():
            extent, _, offset = loan.pages.addresses[position]
            key = loan.pages.keys[position * 32 : (position + 1) * 32]
            wrong = memory_at(self._address(extent) + offset, PAGE_BYTES) != page_content(
                key, loan.pages.shard
            )
            true = wrong and confirmed()
            self.counts["reports_true" if true else "reports_false"] += 1
        self._release(loan)

    def _release(self, loan: Loan) -> None:
        running = any(not check.cancelled() for check in loan.checks)
        if loan.ended and not running and not loan.transfers and loan in self.open:
            self.open.remove(loan)
            loan.release()


class ServedCircuit:
    """The serving end of a connection; stands for a ``FrameConnection``.

    Attributes:
        circuit: the connection, of which this is end 1.
        number: names it.
        peer: as the desk knows it.
        node: name of the other node; empty before its hello.
    """

    def __init__(self, number: int, lost: Callable[["ServedCircuit"], None]) -> None:
        self.circuit: Circuit | None = None
        self.number = number
        self.peer = Peer(_FIRST_IDENTITY - number, watched=False, remote=True)
        self.node = ""
        self._lost = lost

    def answer(self, answer: wire.Answer) -> None:
        """Send an answer."""
        assert self.circuit is not None
        self.circuit.send(0, wire.encode(answer))

    def cut(self) -> None:
        """Close the connection."""
        assert self.circuit is not None
        self.circuit.close(1)
        self._lost(self)


class SimulatedService:
    """The peer service of one life of a node; see :class:`kvstore.server.peers.PeerService`.

    Args:
        local: the node, as it introduces itself.
        desk: of the node.
        loans: lends pages.
        later: of the node.
        endpoint: of its transport.
        known: names of the nodes of the cluster.
    """

    def __init__(
        self, local: LocalNode, desk: Desk, loans: SimulatedLoans, later: Later, endpoint: str,
        known: Sequence[str],
    ) -> None:  # fmt: skip
        self._local = local
        self._desk = desk
        self._loans = loans
        self._later = later
        self._endpoint = endpoint
        self._known = known
        self._numbers = count(1)
        self._served: dict[int, ServedPeer] = {}

    def accept(self) -> ServedCircuit:
        """A connection comes; its circuit is set by the caller."""
        return ServedCircuit(
            next(self._numbers), lambda served: self._later(0, lambda: self.lost(served))
        )

    def receive(self, served: ServedCircuit, frame: bytes) -> None:
        """Process one message."""
        for body in wire.FrameReader().feed(frame):
            request = wire.decode_request(body)
            if not served.node:
                self._greet(served, request)
                continue
            session = self._served.get(served.number)
            if session is None:
                continue  # a newer connection of its node has taken its place
            try:
                session.receive(request)
            except ProtocolError as error:
                number = getattr(request, "id", 0)
                served.answer(wire.Failure(number, error.code, str(error)))
                served.cut()

    def lost(self, served: ServedCircuit) -> None:
        """A connection is gone."""
        session = self._served.pop(served.number, None)
        if session is not None:
            session.lost()

    def _greet(self, served: ServedCircuit, hello: wire.Request) -> None:
        try:
            if not isinstance(hello, wire.PeerHello):
                raise ProtocolError(f"{type(hello).__name__} before PeerHello")
            self._local.admit(hello, self._known.__contains__)
        except KVStoreError as error:
            served.answer(wire.Failure(1, error.code, str(error)))
            served.cut()
            return
        for older in list(self._served.values()):
            if older.node == hello.node:
                older.connection.cut()
                self.lost(cast("ServedCircuit", older.connection))
        served.node = hello.node
        self._served[served.number] = ServedPeer(
            cast("FrameConnection", served), hello.node, self._desk, cast("Loans", self._loans)
        )
        local, major, minor = self._local, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR
        transports = {transport.name: self._endpoint for transport in self._loans.transports}
        served.answer(wire.PeerWelcome(hello.id, major, minor, local.name, local.boot, transports))
