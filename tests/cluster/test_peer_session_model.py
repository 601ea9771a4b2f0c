"""Goal: whatever the other node, its transport and time do, each fetch has one end, in time, and no
lease, slot or byte is left or believed too early."""

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.cluster.effects import (
    CancelTransfer,
    CloseLink,
    Ended,
    Send,
    SlotsSettled,
    StartTransfer,
)
from kvstore.cluster.session import MS, PeerSession
from kvstore.cluster.ways import Way
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    TransferError,
)
from kvstore.state.remote.jobs import FetchEnd, PeerFetch
from kvstore.transport.base import PageArrival, TransferEnd
from tests.cluster.session_parts import KEYS, LOCAL, PLACE, addresses, job, welcome


@dataclass
class Known:
    """What a test knows of one fetch."""

    job: PeerFetch
    end: FetchEnd | None = None
    told_settled: bool = False
    lease: int = 0
    lent: wire.Lent | None = None
    reading: bool = False
    right: int = 0


class SessionMachine(RuleBasedStateMachine):
    """The other node, the transport and time, all in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.session = PeerSession("a", LOCAL, ["tcp"], PLACE)
        self.now_ns = 1
        self.connected = False
        self.asked: list[Any] = []
        self.fetches: dict[int, Known] = {}
        self.leases: dict[int, int] = {}  # at the other node: lease → fetch
        self.wanted: dict[int, int] = {}  # Acquire → fetch
        self.settling: list[int] = []  # transfers that are over when SlotsSettled is told

    # ---- what happens

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        self.session.opened(self.now_ns)
        self.carry_out()

    @precondition(lambda self: self.connected)
    @rule()
    def lose_the_connection(self) -> None:
        self.forget_connection()
        self.session.closed()
        self.carry_out()

    @rule(pages=st.integers(1, 4), wait_ms=st.integers(0, 3_000), scope=st.sampled_from(["", "s"]))
    def fetch(self, pages: int, wait_ms: int, scope: str) -> None:
        number = len(self.fetches) + 1
        made = job(number, self.now_ns + wait_ms * MS, KEYS[:pages], scope)
        self.fetches[number] = Known(made)
        self.session.fetch(made, self.now_ns)
        self.carry_out()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), pages=st.integers(0, 4), refused=st.booleans())
    def answer(self, data: st.DataObject, pages: int, refused: bool) -> None:
        self.give(data.draw(st.integers(0, len(self.asked) - 1)), pages, refused=refused)

    @precondition(lambda self: self.asked)
    @rule(pages=st.integers(1, 4))
    def answer_everything(self, pages: int) -> None:
        while self.asked:
            self.give(0, pages, refused=False)

    def give(self, position: int, pages: int, *, refused: bool) -> None:
        request = self.asked.pop(position)
        answer: wire.Answer = wire.Failure(getattr(request, "id", 0), "capacity", "full")
        if isinstance(request, wire.PeerHello):
            if not refused:
                answer = welcome(request.id)
        elif isinstance(request, wire.OpenSpace):
            if not refused:
                answer = wire.SpaceOpened(request.id, 9, [4])
        elif isinstance(request, wire.Acquire):
            answer = self.lend(request, pages) if not refused else answer
        else:
            answer = wire.Pong(request.id)
        self.session.received(answer, self.now_ns)
        self.carry_out()

    def lend(self, request: wire.Acquire, pages: int) -> wire.Answer:
        pages = min(pages, len(request.keys) // 32)
        ticket = b"t" * 16 if pages else b""
        digests = bytes([request.lease % 251]) * 16 * pages
        lent = wire.Lent(request.id, addresses(pages), digests, 0, 0, 1_000, ticket)
        known = self.fetches[self.wanted.pop(request.id)]
        if pages:
            self.leases[request.lease] = known.job.job
            known.lease = request.lease
        known.lent = lent
        return lent

    @precondition(lambda self: self.running())
    @rule(data=st.data(), settled=st.booleans(), fails=st.booleans())
    def end_transfer(self, data: st.DataObject, settled: bool, fails: bool) -> None:
        known = data.draw(st.sampled_from(self.running()))
        assert known.lent is not None
        pages = len(known.lent.digests) // 16
        one = st.sampled_from(
            [PageArrival.MISSING, PageArrival.WRONG, PageArrival.RIGHT, PageArrival.RIGHT]
        )
        good = bytes(data.draw(st.lists(one, min_size=pages, max_size=pages)))
        known.reading = False
        known.right = len(good) - len(good.lstrip(b"\x01"))
        number = known.job.job
        if not settled:
            known.reading = True
            self.settling.append(number)
        error = TransferError("broken") if fails else None
        self.session.transfer_ended(TransferEnd(number, good, error, settled))
        self.carry_out()

    @precondition(lambda self: self.settling)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.settling))
        self.settling.remove(number)
        self.fetches[number].reading = False
        self.session.transfer_settled(number)
        self.carry_out()

    @rule(passed_ms=st.sampled_from([1, 40, 300, 1_001, 2_001]))
    def pass_time(self, passed_ms: int) -> None:
        self.now_ns += passed_ms * MS
        self.session.advance(self.now_ns)
        self.carry_out()
        late = [one for one in self.fetches.values() if one.job.deadline_ns <= self.now_ns]
        assert all(one.end is not None for one in late)
        assert not (due := self.session.next_deadline_ns()) or due > self.now_ns

    # ---- what must be so

    @invariant()
    def only_what_is_being_read_is_leased(self) -> None:
        assert set(self.leases) == {
            one.lease for one in self.fetches.values()
            if one.reading and one.end is None and one.lease in self.leases
        }  # fmt: skip

    @invariant()
    def nothing_is_expected_of_a_closed_connection(self) -> None:
        session = self.session
        expected = [session._leasing, session._late, session._opening, session._places]
        assert self.connected or not any(expected)

    @invariant()
    def the_session_knows_what_may_still_be_written(self) -> None:
        left = [one for one in self.fetches.values() if one.end is None or not one.told_settled]
        assert self.session.fetches == len(left)

    def teardown(self) -> None:
        self.now_ns += 10_000 * MS
        self.session.advance(self.now_ns)
        self.carry_out()
        self.forget_connection()
        self.session.closed()
        self.carry_out()
        for known in self.running():
            known.reading = False
            end = TransferEnd(known.job.job, bytes(len(known.job.slots)), None, settled=True)
            self.session.transfer_ended(end)
        for number in self.settling:
            self.fetches[number].reading = False
            self.session.transfer_settled(number)
        self.carry_out()
        assert all(one.end is not None and one.told_settled for one in self.fetches.values())
        assert self.session.fetches == 0
        assert self.session.next_deadline_ns() == 0

    # ---- effects

    def running(self) -> list[Known]:
        """Fetches whose transfer has not ended."""
        return [
            one for one in self.fetches.values()
            if one.reading and one.job.job not in self.settling
        ]  # fmt: skip

    def forget_connection(self) -> None:
        self.connected = False
        self.asked.clear()
        self.leases.clear()
        self.wanted.clear()

    def carry_out(self) -> None:
        while self.session.effects:
            effects, self.session.effects = self.session.effects, []
            for effect in effects:
                self.carry(effect)

    def carry(self, effect: Any) -> None:
        match effect:
            case Send(message):
                assert self.connected
                self.sent(message)
            case StartTransfer():
                known = self.fetches[effect.fetch.job]
                assert effect.ways == (Way("tcp", "a:1", b""),)
                assert known.lent is effect.lent
                assert known.end is None
                assert self.now_ns <= effect.deadline_ns <= known.job.deadline_ns
                known.reading = True
            case CancelTransfer(number):
                assert self.fetches[number].reading
            case Ended(end):
                self.ended(end)
            case SlotsSettled(number):
                known = self.fetches[number]
                assert known.end is not None
                assert not known.told_settled
                assert not known.reading
                known.told_settled = True
            case CloseLink():
                self.forget_connection()
                self.session.closed()

    def sent(self, message: wire.Request) -> None:
        match message:
            case wire.Acquire():
                fetch = self.session._leasing[message.id].job
                assert message.keys == fetch.keys
                self.wanted[message.id] = fetch.job
                self.asked.append(message)
            case wire.Release(lease):
                del self.leases[lease]
            case wire.Corrupt():
                assert message.boot == b"a" * 16
                assert (message.space, message.shard, message.generation) == (9, 4, 7)
                assert self.leases, "its lease must not be released before"
            case _:
                self.asked.append(message)

    def ended(self, end: FetchEnd) -> None:
        known = self.fetches[end.job]
        assert known.end is None, "one end each"
        assert end.settled == (not known.reading)
        if end.settled:
            right = known.right if known.lent is not None else 0
            told = known.lent.digests[: right * 16] if known.lent is not None else b""
            assert end.digests == told
        else:
            assert end.digests == b"", "bytes may still land over pages that had arrived"
        known.end = end
        known.told_settled = end.settled


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=200, stateful_step_count=40)
