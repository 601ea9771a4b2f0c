"""What another node asks on its session: the requests it may make, and their answers.

A session at the node belongs to one tenant, so the session of two nodes has a line at the desk for
each tenant whose pages are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore import wire
from kvstore.errors import CapacityError, InvalidArgument, KVStoreError, ProtocolError
from kvstore.node.desk import Desk
from kvstore.page import KEY_BYTES, ShardSpec, SpaceIdentity
from kvstore.server.frames import FrameConnection
from kvstore.server.loans import LentPages, Loan, Loans

ASKED_MAX: Final = 1024
"""Maximum requests of one node that wait for their answers."""
TENANTS_MAX: Final = 256
"""Maximum tenants whose pages one node reads."""


class TenantLine:
    """The line of one tenant.

    Attributes:
        number: its number at the desk.
        refusal: why the node refused the session; None = it did not.
    """

    def __init__(
        self, answered: Callable[["TenantLine", wire.Answer], None], connection: FrameConnection
    ) -> None:
        self.number = 0
        self.refusal: wire.Failure | None = None
        self._answered = answered
        self._connection = connection
        self._welcomed = False

    def answer(self, answer: wire.Answer) -> None:
        """Pass an answer of the node on; the first one is that to Hello."""
        if self._welcomed:
            self._answered(self, answer)
            return
        self._welcomed = True
        if isinstance(answer, wire.Failure):
            self.refusal = answer

    def cut(self) -> None:
        """The node has given the line up: so is the whole session."""
        self._connection.cut()


@dataclass(frozen=True, slots=True)
class _OpenedSpace:
    line: TenantLine
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
        self._lines: dict[str, TenantLine] = {}
        self._spaces: dict[int, _OpenedSpace] = {}
        #: Requests that wait for their answers, by id.
        self._asked: dict[int, wire.OpenSpace | wire.Lookup | wire.Acquire] = {}
        #: Leases that were not released, and all loans that hold pages still.
        self._leases: dict[int, Loan] = {}
        self._held: set[Loan] = set()
        self._lost = False

    def receive(self, request: wire.Request) -> None:
        """Process one request.

        Raises:
            ProtocolError: another node may not make such a request.
        """
        match request:
            case wire.Ping():
                self.connection.answer(wire.Pong(request.id))
            case wire.OpenSpace() | wire.Lookup() | wire.Acquire():
                try:
                    self._ask(request)
                except KVStoreError as error:
                    field = getattr(error, "field", "")
                    failure = wire.Failure(request.id, error.code, str(error), field)
                    self.connection.answer(failure)
            case wire.Release():
                loan = self._leases.pop(request.lease, None)
                if loan is not None:
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

    def _ask(self, request: wire.OpenSpace | wire.Lookup | wire.Acquire) -> None:
        if request.id in self._asked:
            raise InvalidArgument("id", f"{request.id} waits for its answer")
        if len(self._asked) >= ASKED_MAX:
            raise CapacityError(f"{ASKED_MAX} requests of this node wait for their answers")
        if isinstance(request, wire.OpenSpace):
            line = self._line(request.identity.tenant)
        else:
            line = self._space(request.space).line
        if isinstance(request, wire.Acquire):
            waiting = (one for one in self._asked.values() if isinstance(one, wire.Acquire))
            if request.lease in self._leases or request.lease in {one.lease for one in waiting}:
                raise InvalidArgument("lease", f"{request.lease} is in use")
        self._asked[request.id] = request
        self._desk.receive(line.number, request)

    def _line(self, tenant: str) -> TenantLine:
        """The line of a tenant; the first request for it opens one."""
        line = self._lines.get(tenant)
        if line is None:
            if len(self._lines) >= TENANTS_MAX:
                raise CapacityError(f"this node reads pages of {TENANTS_MAX} tenants already")
            line = TenantLine(self._answered, self.connection)
            line.number = self._desk.connect(self.connection.peer, line)
            major, minor = wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR
            self._desk.receive(line.number, wire.Hello(1, major, minor, f"peer {self.node}"))
            if line.refusal is not None:
                self._desk.disconnect(line.number, ended=True)
                raise CapacityError(line.refusal.message)
            self._lines[tenant] = line
        return line

    def _space(self, number: int) -> _OpenedSpace:
        space = self._spaces.get(number)
        if space is None:
            raise InvalidArgument("space", f"{number} is not open in this session")
        return space

    def _report(self, report: wire.Corrupt) -> None:
        """Check a page of a lease; the node hears of it only if its bytes are wrong here."""
        loans = self._leases.values()
        loan = next((one for one in loans if one.pages.position(report) >= 0), None)
        if loan is None or report.boot not in (b"", self._desk.node.boot):
            self._loans.counts["reports_ignored"] += 1
            return
        line = self._space(report.space).line

        def confirmed() -> None:
            if not self._lost:
                self._desk.receive(line.number, report)

        self._loans.report(loan, report, confirmed)

    def _leave(self) -> None:
        """Disconnect at the desk, which releases everything, once nothing is held any more."""
        if self._lost and not self._held:
            lines, self._lines = self._lines, {}
            for line in lines.values():
                self._desk.disconnect(line.number, ended=True)

    # ---- answers ----------------------------------------------------------------------------

    def _answered(self, line: TenantLine, answer: wire.Answer) -> None:
        if self._lost:
            return
        request = self._asked.pop(getattr(answer, "id", 0), None)
        if isinstance(answer, wire.SpaceOpened) and isinstance(request, wire.OpenSpace):
            self._opened(line, request, answer)
        elif isinstance(answer, wire.Acquired) and isinstance(request, wire.Acquire):
            answer = self._lend(line, request, answer)
        self.connection.answer(answer)

    def _opened(self, line: TenantLine, request: wire.OpenSpace, answer: wire.SpaceOpened) -> None:
        known = self._spaces.get(answer.space)
        shards = dict(known.shards) if known is not None else {}
        shards.update(zip(answer.shards, request.shards, strict=True))
        self._spaces[answer.space] = _OpenedSpace(line, request.identity, shards)

    def _lend(self, line: TenantLine, request: wire.Acquire, answer: wire.Acquired) -> wire.Answer:
        """Open leased pages to the transports."""
        addresses = wire.unpack_addresses(answer.addresses)
        ticket = b""
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
                    self._desk.receive(line.number, wire.Release(request.lease))

            try:
                loan = self._loans.add(pages, answer.lease_ms, release)
            except KVStoreError as error:
                self._desk.receive(line.number, wire.Release(request.lease))
                return wire.Failure(request.id, error.code, str(error))
            self._leases[request.lease] = loan
            self._held.add(loan)
            ticket = loan.ticket
        return wire.Lent(
            request.id, answer.addresses, answer.digests, answer.more, answer.lasting,
            answer.lease_ms, ticket,
        )  # fmt: skip
