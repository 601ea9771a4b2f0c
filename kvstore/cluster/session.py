"""The reading side of the session with one other node: answers and time in, effects out; pure.

A fetch goes through these stages. Its end is reported once, at its deadline at the latest::

    OPENING ──SpaceOpened──► LEASING ──Lent──► READING ──transfer ended──► reported
       │ refused, link lost     │ same            │ deadline             │ unsettled
       └──────► reported        └──► reported     └──► reported, UNSETTLED ◄─┘ ──settled──► reported

An unsettled transfer may still write into the slots, also over pages that have arrived: none of its
pages is delivered. Pages with a wrong digest are reported to their owner before their lease is
released. A lease whose answer arrives too late is released then.
"""

from collections.abc import Sequence
from itertools import count
from typing import Final

from kvstore.cluster.bringing import Bringing, OpenedPair
from kvstore.cluster.effects import (
    CancelTransfer,
    CloseLink,
    Effect,
    Ended,
    PeerStanding,
    Send,
    SlotsSettled,
    StartTransfer,
)
from kvstore.cluster.greeting import BOOT_BYTES, LocalNode, check_protocol
from kvstore.cluster.kept import retentions
from kvstore.cluster.underway import FetchStage, OpenedPlace, SessionFetch
from kvstore.cluster.ways import offered, ways_of
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    CapacityError,
    InvalidArgument,
    KVStoreError,
    PageCorrupt,
    PeerUnreachable,
    TierUnavailable,
    TransferTimeout,
    error_from_code,
)
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES
from kvstore.state.remote.jobs import FetchEnd, PeerBring, PeerFetch
from kvstore.state.tree.node import Retention
from kvstore.transport.base import PLACE_BYTES, TICKET_BYTES, PageArrival, TransferEnd

MS: Final = 1_000_000
HELLO_NS: Final = 5_000 * MS
"""Time limit for the answer to PeerHello."""
PING_NS: Final = 1_000 * MS
"""After this time without any answer, Ping is sent."""
SILENT_NS: Final = 2_000 * MS
"""After this time without an answer to Ping, the connection is closed."""
REPORT_NS: Final = 50 * MS
"""A transfer ends this long before its fetch, so that its result is reported in time."""
FETCHES_MAX: Final = 256
LATE_MAX: Final = 1024
"""Maximum answers that are still expected although their requests were given up."""
SPACES_MAX: Final = 128
"""If the other node opens no more spaces after this many, the session is restarted."""
_ADDRESS_BYTES: Final = wire.ADDRESS.itemsize


class PeerSession:
    """The session with one other node, over any number of connections one after another.

    Args:
        peer: name of the other node.
        local: this node.
        transports: names of the transports of this node, the preferred one first.
        place: ``host:port`` of the other node's peer service.

    Attributes:
        effects: decisions to carry out, in order; the caller empties it after each call.
        up: the other node has welcomed this one.
        boot: boot id of the other node; empty before the first welcome.
        transport: name of the preferred transport of both; empty = there is none.
    """

    def __init__(
        self, peer: str, local: LocalNode, transports: Sequence[str], place: str
    ) -> None:  # fmt: skip
        self.peer = peer
        self.effects: list[Effect] = []
        self.up = False
        self.boot = b""
        self.transport = ""
        self._local = local
        self._transports = transports
        self._host = place.rpartition(":")[0]
        self._endpoints: dict[str, str] = {}
        self._connection = 0
        self._connected = False
        self._numbers = count(1)
        #: Last answer, and when the unanswered PeerHello or Ping was sent; 0 = none is.
        self._heard_ns = 0
        self._asked_ns = 0
        self._hello = 0
        #: Pings of this connection without an answer.
        self._pings = 0
        self._places: dict[OpenedPair, OpenedPlace] = {}
        self._opening: dict[int, OpenedPair] = {}
        self._leasing: dict[int, SessionFetch] = {}
        #: Acquire that nobody waits for → its lease.
        self._late: dict[int, int] = {}
        self._fetches: dict[int, SessionFetch] = {}
        self._brings = Bringing(peer, self._numbers, lambda end: self.effects.append(end))
        #: Minor version of the other node's protocol.
        self._minor = 0

    @property
    def fetches(self) -> int:
        """Number of fetches whose slots may still be written."""
        return len(self._fetches)

    # ---- the connection ---------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """A connection to the other node exists."""
        assert not self._connected
        self._connected = True
        self._connection += 1
        self._heard_ns = self._asked_ns = now_ns
        self._pings = 0
        self._hello = next(self._numbers)
        self.effects.append(Send(self._local.hello(self._hello)))

    def closed(self) -> None:
        """The connection was closed: leases are void, transfers end by themselves."""
        if self.up:
            self.effects.append(PeerStanding(self.peer, b""))
        self._connected = self.up = False
        self._places.clear()
        self._opening.clear()
        self._leasing.clear()
        self._late.clear()
        self._brings.lost(self._unreachable())
        for fetch in list(self._fetches.values()):
            if fetch.stage in (FetchStage.OPENING, FetchStage.LEASING):
                self._end(fetch, self._unreachable())

    def left(self) -> None:
        """The other node left the cluster: all fetches end now."""
        for fetch in list(self._fetches.values()):
            if fetch.stage is FetchStage.READING:
                self._cancel(fetch, self._unreachable())
        self.closed()

    def received(self, answer: wire.Answer, now_ns: int) -> None:
        """An answer arrived."""
        if not self._connected:
            return  # of a connection that is being closed
        self._heard_ns, self._asked_ns = now_ns, 0
        if not self.up:
            self._greeted(answer)
            return
        match answer:
            case wire.Pong() if self._pings:
                self._pings -= 1
            case wire.Brought() if self._brings.answered(answer):
                pass
            case wire.SpaceOpened() if answer.id in self._opening:
                self._opened_space(answer, now_ns)
            case wire.Lent() if answer.id in self._leasing or answer.id in self._late:
                self._lent(answer, now_ns)
            case wire.Failure():
                self._failed(answer)
            case _:
                self._close("protocol", f"{type(answer).__name__} answers no request")

    def advance(self, now_ns: int) -> None:
        """Apply all deadlines up to ``now_ns``."""
        for fetch in list(self._fetches.values()):
            over = fetch.stage is FetchStage.UNSETTLED or fetch.job.job not in self._fetches
            if not over and now_ns >= fetch.job.deadline_ns:
                self._overdue(fetch)  # may close the connection, which ends others
        if not self._brings.advance(now_ns):
            self._close("silent", "too many requests were not answered in time")
        if not self._connected:
            return
        if self._asked_ns:
            limit_ns = SILENT_NS if self.up else HELLO_NS
            if now_ns >= self._asked_ns + limit_ns:
                self._close("silent", f"no answer for {limit_ns / 1e9:.0f} s")
        elif now_ns >= self._heard_ns + PING_NS:
            self._asked_ns = now_ns
            self._pings += 1
            self.effects.append(Send(wire.Ping(next(self._numbers))))

    def next_deadline_ns(self) -> int:
        """When :meth:`advance` must be called next; 0 = no deadline."""
        deadlines = self._brings.deadlines() + [
            one.job.deadline_ns
            for one in self._fetches.values()
            if one.stage is not FetchStage.UNSETTLED
        ]
        if self._connected:
            limit_ns = SILENT_NS if self.up else HELLO_NS
            asked, heard = self._asked_ns, self._heard_ns
            deadlines.append(asked + limit_ns if asked else heard + PING_NS)
        return min(deadlines, default=0)

    # ---- fetches ----------------------------------------------------------------------------

    def fetch(self, job: PeerFetch, now_ns: int) -> None:
        """Start a fetch; it ends at once if it cannot be started."""
        assert job.job not in self._fetches
        assert len(job.keys) == len(job.slots) * KEY_BYTES > 0
        fetch = SessionFetch(job)
        self._fetches[job.job] = fetch
        refusal = self._refusal(job, now_ns)
        if refusal is not None:
            self._end(fetch, refusal)
            return
        place = self._place((job.identity, job.shard))
        if place.numbers is None:
            place.waiting.append(fetch)
        else:
            self._acquire(fetch, place.numbers, now_ns)

    def bring(self, job: PeerBring, now_ns: int) -> None:
        """Ask the other node to fetch pages from here; ends at once if it cannot be asked."""
        if not self._brings.begin(job, now_ns, self._minor if self.up else None):
            return
        place = self._place((job.identity, job.shard))
        if place.numbers is not None:
            self.effects.append(Send(self._brings.ask(job, place.numbers, now_ns)))

    def transfer_ended(self, end: TransferEnd) -> None:
        """The transfer of a fetch has ended."""
        fetch = self._fetches[end.number]
        if fetch.stage is FetchStage.UNSETTLED:  # the fetch had ended before
            if end.settled:
                self.transfer_settled(end.number)
            return
        assert fetch.lent is not None
        assert len(end.good) == len(fetch.lent.digests) // DIGEST_BYTES
        wrong = [at for at, good in enumerate(end.good) if good == PageArrival.WRONG]
        for at in wrong:
            self._report(fetch, fetch.lent, at)
        right = len(end.good) - len(end.good.lstrip(bytes([PageArrival.RIGHT])))
        self._release(fetch, read=end.settled and right == len(end.good))
        error = end.error
        if error is None and wrong:
            error = PageCorrupt(f"{len(wrong)} pages of node {self.peer} came with wrong bytes")
        kept = retentions(fetch.lent.kept, fetch.asked_ns)[:right]
        digests = fetch.lent.digests[: right * DIGEST_BYTES]
        self._end(fetch, error, digests, settled=end.settled, kept=kept)

    def transfer_settled(self, job: int) -> None:
        """Nothing writes into the slots of a fetch any more."""
        fetch = self._fetches.pop(job)
        assert fetch.stage is FetchStage.UNSETTLED
        self.effects.append(SlotsSettled(job))

    # ---- internal ---------------------------------------------------------------------------

    def _greeted(self, answer: wire.Answer) -> None:
        if isinstance(answer, wire.Failure):
            self._close("refused", answer.message, answer.field)
            return
        if not isinstance(answer, wire.PeerWelcome) or answer.id != self._hello:
            self._close("protocol", f"{type(answer).__name__} before PeerWelcome")
            return
        try:
            check_protocol(answer.major, answer.minor)
            if answer.node != self.peer:
                raise InvalidArgument(
                    "node", f"the node there is {answer.node!r}, not {self.peer!r}"
                )
        except InvalidArgument as error:
            self._close("refused", str(error), error.field)
            return
        if len(answer.boot) != BOOT_BYTES:
            self._close("protocol", f"a boot id of {len(answer.boot)} bytes")
            return
        self.up = True
        self.boot, self._minor = answer.boot, answer.minor
        self.effects.append(PeerStanding(self.peer, self.boot))
        self._endpoints = offered(self._transports, answer.transports, self._host)
        self.transport = next(iter(self._endpoints), "")

    def _refusal(self, job: PeerFetch, now_ns: int) -> KVStoreError | None:
        if not self.up:
            return self._unreachable()
        if not self.transport:
            return TierUnavailable(f"this node and {self.peer} have no transport in common")
        if len(self._fetches) > FETCHES_MAX:
            return CapacityError(f"{FETCHES_MAX} fetches from node {self.peer} run already")
        if now_ns >= job.deadline_ns:
            return self._timeout()
        return None

    def _opened_space(self, answer: wire.SpaceOpened, now_ns: int) -> None:
        if len(answer.shards) != 1:
            self._close("protocol", f"{len(answer.shards)} shards were opened instead of 1")
            return
        pair = self._opening.pop(answer.id)
        place = self._places[pair]
        place.numbers = answer.space, answer.shards[0]
        waiting, place.waiting = place.waiting, []
        for fetch in waiting:
            if fetch.job.job in self._fetches:
                self._acquire(fetch, place.numbers, now_ns)
        self.effects += map(Send, self._brings.opened(pair, place.numbers, now_ns))

    def _place(self, pair: OpenedPair) -> OpenedPlace:
        """A space and shard on this connection; opened at the other node if needed."""
        place = self._places.get(pair)
        if place is None:
            place = self._places[pair] = OpenedPlace()
            request = next(self._numbers)
            self._opening[request] = pair
            self.effects.append(Send(wire.OpenSpace(request, pair[0], [pair[1]])))
        return place

    def _acquire(self, fetch: SessionFetch, numbers: tuple[int, int], now_ns: int) -> None:
        job = fetch.job
        left_ms = (job.deadline_ns - now_ns) // MS
        fetch.stage = FetchStage.LEASING
        fetch.connection, fetch.asked_ns = self._connection, now_ns
        fetch.request, fetch.lease = next(self._numbers), next(self._numbers)
        self._leasing[fetch.request] = fetch
        # Half of the time for loads from the owner's SSDs, the rest for the bytes.
        asked = wire.Acquire(
            fetch.request,
            fetch.lease,
            *numbers,
            job.keys,
            max(1, left_ms),
            max(0, left_ms // 2),
            copies=job.copies,
        )
        self.effects.append(Send(asked))

    def _lent(self, answer: wire.Lent, now_ns: int) -> None:
        late = self._late.pop(answer.id, 0)
        if late:
            if answer.digests:
                self.effects.append(Send(wire.Release(late, read=False)))
            return
        fetch = self._leasing[answer.id]
        pages, rest = divmod(len(answer.digests), DIGEST_BYTES)
        if (
            rest or pages > len(fetch.job.slots)
            or len(answer.addresses) != pages * _ADDRESS_BYTES
            or len(answer.ticket) != (TICKET_BYTES if pages else 0)
            or any(len(places) != pages * PLACE_BYTES for _, places in answer.places.values())
            or len(answer.kept) not in (0, pages * wire.KEPT.itemsize)
        ):  # fmt: skip
            self._close("protocol", "the parts of a lease do not match each other")
            return
        del self._leasing[answer.id]
        if not pages:
            self._end(fetch, None)
            return
        fetch.stage, fetch.lent = FetchStage.READING, answer
        deadline_ns = max(now_ns, fetch.job.deadline_ns - REPORT_NS)
        ways = ways_of(answer, self._endpoints, self._host)
        self.effects.append(StartTransfer(fetch.job, ways, answer, deadline_ns))

    def _failed(self, answer: wire.Failure) -> None:
        error = error_from_code(answer.code, answer.message, answer.field)
        if answer.id in self._opening:
            pair = self._opening.pop(answer.id)
            for fetch in self._places.pop(pair).waiting:
                if fetch.job.job in self._fetches:
                    self._end(fetch, error)
            self._brings.refused(pair, error)
            if isinstance(error, CapacityError) and len(self._places) >= SPACES_MAX:
                self._close("spaces", "the other node opens no more spaces in this session")
        elif answer.id in self._leasing:
            self._end(self._leasing.pop(answer.id), error)
        elif self._late.pop(answer.id, 0) == 0 and not self._brings.failed(answer.id, error):
            self._close("refused", answer.message)

    def _overdue(self, fetch: SessionFetch) -> None:
        if fetch.stage is FetchStage.READING:
            self._cancel(fetch, self._timeout())
            return
        if self._leasing.pop(fetch.request, None) is not None:
            self._late[fetch.request] = fetch.lease
        self._end(fetch, self._timeout())
        if len(self._late) > LATE_MAX:
            self._close("silent", f"{LATE_MAX} leases were not answered in time")

    def _cancel(self, fetch: SessionFetch, error: KVStoreError) -> None:
        """End a fetch whose transfer is in progress."""
        self.effects.append(CancelTransfer(fetch.job.job))
        self._release(fetch)
        self._end(fetch, error, settled=False)

    def _report(self, fetch: SessionFetch, lent: wire.Lent, at: int) -> None:
        """Report wrong bytes of a page to its owner."""
        place = self._places.get((fetch.job.identity, fetch.job.shard))
        if not self._holds(fetch) or place is None or place.numbers is None:
            return
        (_, generation, _) = wire.unpack_addresses(lent.addresses)[at]
        key = fetch.job.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
        self.effects.append(Send(wire.Corrupt(*place.numbers, key, generation, self.boot)))

    def _release(self, fetch: SessionFetch, *, read: bool = False) -> None:
        if self._holds(fetch):
            self.effects.append(Send(wire.Release(fetch.lease, read)))

    def _holds(self, fetch: SessionFetch) -> bool:
        """Whether the lease belongs to the current connection."""
        return self.up and fetch.connection == self._connection

    def _end(
        self, fetch: SessionFetch, error: KVStoreError | None, digests: bytes = b"", *,
        settled: bool = True, kept: Sequence[Retention] = (),
    ) -> None:  # fmt: skip
        """Report the end of a fetch; pages that may still be overwritten are not delivered."""
        place = self._places.get((fetch.job.identity, fetch.job.shard))
        if fetch.stage is FetchStage.OPENING and place is not None and fetch in place.waiting:
            place.waiting.remove(fetch)  # its OpenSpace may never be answered
        if settled:
            del self._fetches[fetch.job.job]
        else:
            fetch.stage = FetchStage.UNSETTLED
            digests, kept = b"", ()
        self.effects.append(Ended(FetchEnd(fetch.job.job, digests, error, settled, kept)))

    def _close(self, cause: str, why: str, field: str = "") -> None:
        """Close the connection; :meth:`closed` then handles its loss."""
        self.effects.append(CloseLink(cause, why, field))
        self.closed()

    def _unreachable(self) -> PeerUnreachable:
        return PeerUnreachable(f"no session with node {self.peer}")

    def _timeout(self) -> TransferTimeout:
        return TransferTimeout(f"node {self.peer} did not deliver the pages in time")
