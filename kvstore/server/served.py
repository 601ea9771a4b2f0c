"""The requests that another node may make on its session, and their answers.

It has one line at the desk. Its session may open spaces of all tenants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvstore.node.desk import Desk
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument, KVStoreError, ProtocolError
from kvstore.protocol.page import KEY_BYTES, ShardSpec, SpaceIdentity
from kvstore.server.frames import FrameConnection
from kvstore.server.loans import LentPages, Loan, Loans

BREAK_OFF_MS: Final = 2_000
"""A lease lasts so long after its ticket, at most as long as that: a transfer that still reads its
memory is broken off meanwhile."""
ASKED_MAX: Final = 1024
"""Maximum requests of one node that wait for their answers."""
_Asked = wire.OpenSpace | wire.Lookup | wire.Acquire | wire.Bring


@dataclass(frozen=True, slots=True)
class _OpenedSpace:
    identity: SpaceIdentity
    shards: dict[int, ShardSpec]


class ServedPeer:
    """The session that another node has with this one.

    Args:
        connection: its connection.
        node: its name.
        desk: the desk of this node.
        loans: lends pages.
    """

    def __init__(self, connection: FrameConnection, node: str, desk: Desk, loans: Loans) -> None:
        self.connection = connection
        self.node = node
        self._desk = desk
        self._loans = loans
        self._spaces: dict[int, _OpenedSpace] = {}
        #: Requests that wait for their answers, by id.
        self._asked: dict[int, _Asked] = {}
        #: Leases that were not released, and all loans that hold pages still.
        self._leases: dict[int, Loan] = {}
        self._held: set[Loan] = set()
        self._lost = False
        self._welcomed = False
        self._number = desk.connect(replace(connection.peer, node=node), self)
        major, minor = wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR
        desk.receive(self._number, wire.Hello(1, major, minor, f"peer {node}"))

    def cut(self) -> None:
        """The node has given the line up: so is the session."""
        self.connection.cut()

    def receive(self, request: wire.Request) -> None:
        """Process one request.

        Raises:
            ProtocolError: another node may not make such a request.
        """
        match request:
            case wire.Ping():
                self.connection.answer(wire.Pong(request.id))
            case wire.OpenSpace() | wire.Lookup() | wire.Acquire() | wire.Bring():
                try:
                    self._ask(request)
                except KVStoreError as error:
                    field = getattr(error, "field", "")
                    failure = wire.Failure(request.id, error.code, str(error), field)
                    self.connection.answer(failure)
            case wire.Release():
                loan = self._leases.pop(request.lease, None)
                if loan is not None:
                    loan.read = request.read
                    self._loans.end(loan)
            case wire.Corrupt():
                self._report(request)
            case _:
                name = type(request).__name__
                raise ProtocolError(f"{name} is not a request that another node may make")

    def lost(self) -> None:
        """The connection was closed: what it held is released when nobody reads it any more.

        That is at once, but for transfers that are being broken off.
        """
        self._lost = True
        self._leases.clear()
        for loan in list(self._held):
            self._loans.end(loan, at_once=True)
        self._leave()

    # ---- requests ---------------------------------------------------------------------------

    def _ask(self, request: _Asked) -> None:
        if request.id in self._asked:
            raise InvalidArgument("id", f"{request.id} is in use: its request was not answered yet")
        if len(self._asked) >= ASKED_MAX:
            raise CapacityError(f"{ASKED_MAX} requests of this node wait for their answers")
        if isinstance(request, wire.Lookup):
            self._refuse_unopened(request.space, request.shards)
        if isinstance(request, wire.Bring):
            self._refuse_unopened(request.space, [request.shard])
        if isinstance(request, wire.Acquire):
            self._refuse_unopened(request.space, [request.shard])
            waiting = (one for one in self._asked.values() if isinstance(one, wire.Acquire))
            used = {one.lease for one in waiting} | {one.pages.lease for one in self._held}
            if request.lease in used:
                raise InvalidArgument("lease", f"{request.lease} is in use")
            if request.lease_ms > 0:
                request.lease_ms += BREAK_OFF_MS
        self._asked[request.id] = request
        self._desk.receive(self._number, request)

    def _space(self, number: int) -> _OpenedSpace:
        space = self._spaces.get(number)
        if space is None:
            raise InvalidArgument("space", f"{number} is not open in this session")
        return space

    def _refuse_unopened(self, space: int, shards: Sequence[int]) -> None:
        """The node knows more shards of a space: those that others have open."""
        if not set(shards) <= self._space(space).shards.keys():
            raise InvalidArgument("shards", f"one is not open in space {space} of this session")

    def _report(self, report: wire.Corrupt) -> None:
        """Check a page of a lease; the node hears of it only if its bytes are wrong here."""
        loans = self._leases.values()
        loan = next((one for one in loans if one.pages.position(report) >= 0), None)
        if loan is None or report.boot not in (b"", self._desk.node.boot):
            self._loans.counts["reports_ignored"] += 1
            return

        def confirmed() -> bool:
            # A node that was stopped may have let go of the lease before it made the check.
            if self._lost or not self._is_leased(loan.pages.lease):
                return False
            self._desk.receive(self._number, report)
            return True

        self._loans.report(loan, report, confirmed)

    def _is_leased(self, number: int) -> bool:
        """Whether the node holds the pages of a lease for this session still."""
        process = self._desk.node.processes.get(self._number)
        return process is not None and number in process.leases

    def _leave(self) -> None:
        """Disconnect at the desk, which releases everything, once nothing is held any more."""
        if self._lost and not self._held:
            self._desk.disconnect(self._number, ended=True)

    # ---- answers ----------------------------------------------------------------------------

    def answer(self, answer: wire.Answer) -> None:
        """Pass an answer of the node on; the first one is that to Hello."""
        if self._lost:
            return
        if not self._welcomed:
            self._welcomed = True
            if isinstance(answer, wire.Failure):
                self.cut()
            return
        request = self._asked.pop(getattr(answer, "id", 0), None)
        if isinstance(answer, wire.SpaceOpened) and isinstance(request, wire.OpenSpace):
            self._opened(request, answer)
        elif isinstance(answer, wire.Acquired) and isinstance(request, wire.Acquire):
            answer = self._lend(request, answer)
        self.connection.answer(answer)

    def _opened(self, request: wire.OpenSpace, answer: wire.SpaceOpened) -> None:
        known = self._spaces.get(answer.space)
        shards = dict(known.shards) if known is not None else {}
        shards.update(zip(answer.shards, request.shards, strict=True))
        self._spaces[answer.space] = _OpenedSpace(request.identity, shards)

    def _lend(self, request: wire.Acquire, answer: wire.Acquired) -> wire.Answer:
        """Open leased pages to the transports."""
        addresses = wire.unpack_addresses(answer.addresses)
        open_ms = answer.lease_ms - min(BREAK_OFF_MS, answer.lease_ms // 2)
        ticket, places = b"", {}
        if addresses:
            space = self._space(request.space)
            pages = LentPages(
                request.lease, request.space, request.shard, space.identity,
                space.shards[request.shard], request.keys[: len(addresses) * KEY_BYTES],
                answer.digests, addresses,
            )  # fmt: skip

            def release() -> None:
                self._leases.pop(request.lease, None)
                self._held.discard(loan)
                if self._lost:
                    self._leave()
                else:
                    self._desk.receive(self._number, wire.Release(request.lease, loan.read))

            try:
                loan = self._loans.add(pages, open_ms, release)
            except KVStoreError as error:
                self._desk.receive(self._number, wire.Release(request.lease, read=False))
                return wire.Failure(request.id, error.code, str(error))
            self._leases[request.lease] = loan
            self._held.add(loan)
            ticket, places = loan.ticket, loan.places
        return wire.Lent(
            request.id, answer.addresses, answer.digests, answer.more, answer.lasting,
            open_ms, ticket, answer.kept, places,
        )  # fmt: skip
