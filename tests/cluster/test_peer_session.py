"""Goal: whatever the other node, its transport and time do, each fetch has one end, in time, and no
lease, slot or byte is left or believed too early."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore import wire
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.session import (
    FETCHES_MAX,
    HELLO_NS,
    LATE_MAX,
    MS,
    PING_NS,
    SILENT_NS,
    SPACES_MAX,
    CancelTransfer,
    CloseLink,
    Ended,
    PeerSession,
    Send,
    SlotsSettled,
    StartTransfer,
)
from kvstore.errors import (
    CapacityError,
    LayoutMismatch,
    PageCorrupt,
    PeerUnreachable,
    TierUnavailable,
    TransferError,
    TransferTimeout,
)
from kvstore.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.remote.jobs import FetchEnd, PeerFetch
from kvstore.state.tree.slots import Slot
from kvstore.transport.base import Arrival, TransferEnd

LOCAL = LocalNode("blue", "b", b"b" * 16, "scheme 1")
SHARD = ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1))
KEYS = page_keys(range(8), 2)


def identity(scope: str = "") -> SpaceIdentity:
    return SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2, scope=scope)


def job(number: int, deadline_ns: int, keys: PrefixKeys = KEYS, scope: str = "") -> PeerFetch:
    slots = [Slot(at) for at in range(len(keys))]
    return PeerFetch(number, "a", identity(scope), SHARD, b"", keys.packed, slots, deadline_ns)


def addresses(pages: int) -> bytes:
    return wire.pack_addresses([(1, 7, at * 4096) for at in range(pages)])


def welcome(number: int, **fields: Any) -> wire.PeerWelcome:
    told = {"node": "a", "boot": b"a" * 16, "transports": {"x": "a:0", "tcp": "a:1"}, **fields}
    return wire.PeerWelcome(number, 1, wire.PROTOCOL_MINOR, **told)


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
        self.session = PeerSession("a", LOCAL, ["tcp"])
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
        one = st.sampled_from([Arrival.MISSING, Arrival.WRONG, Arrival.RIGHT, Arrival.RIGHT])
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
                assert (effect.transport, effect.endpoint) == ("tcp", "a:1")
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


class Talk:
    """A session that is up, and what it wants."""

    def __init__(self) -> None:
        self.session = PeerSession("a", LOCAL, ["fast", "tcp"])
        self.session.opened(0)
        (hello,) = self.sent()
        assert hello == LOCAL.hello(hello.id)
        self.session.received(welcome(hello.id), 1)

    def effects(self) -> list[Any]:
        effects, self.session.effects = self.session.effects, []
        return effects

    def sent(self) -> list[Any]:
        return [one.message for one in self.effects() if isinstance(one, Send)]

    def lend(self, made: PeerFetch, now_ns: int = 2) -> wire.Lent:
        """Bring a fetch to where its pages are read."""
        self.session.fetch(made, now_ns)
        (request,) = self.sent()
        if isinstance(request, wire.OpenSpace):
            self.session.received(wire.SpaceOpened(request.id, 5, [3]), now_ns)
            (request,) = self.sent()
        pages = len(made.slots)
        lent = wire.Lent(request.id, addresses(pages), b"d" * 16 * pages, 0, 0, 1_000, b"t" * 16)
        self.session.received(lent, now_ns)
        (started,) = self.effects()
        assert isinstance(started, StartTransfer)
        return lent


def only(effects: list[Any], kind: type) -> Any:
    (one,) = (effect for effect in effects if isinstance(effect, kind))
    return one


def test_a_space_is_opened_once_for_fetches_that_come_together_and_later():
    talk = Talk()
    for number in (1, 2):
        talk.session.fetch(job(number, 1_000 * MS), 2)
    (opening,) = talk.sent()
    assert opening == wire.OpenSpace(opening.id, identity(), [SHARD])
    talk.session.received(wire.SpaceOpened(opening.id, 5, [3]), 3)
    talk.session.fetch(job(3, 1_000 * MS), 4)

    asked = talk.sent()

    assert [(one.space, one.shard, one.keys) for one in asked] == [(5, 3, KEYS.packed)] * 3
    assert len({one.lease for one in asked}) == 3
    assert {(one.lease_ms, one.wait_ms) for one in asked} == {(999, 499)}


def test_wrong_pages_are_reported_before_their_lease_is_released():
    talk = Talk()
    talk.lend(job(1, 1_000 * MS))

    talk.session.transfer_ended(TransferEnd(1, bytes([1, 2, 1, 2]), None, settled=True))

    effects = talk.effects()
    sent = [one.message for one in effects if isinstance(one, Send)]
    assert [type(one) for one in sent] == [wire.Corrupt, wire.Corrupt, wire.Release]
    assert [one.key for one in sent[:2]] == [KEYS[1], KEYS[3]]
    end = only(effects, Ended).end
    assert end.digests == b"d" * 16
    assert isinstance(end.error, PageCorrupt)


def test_a_lease_that_comes_after_the_deadline_is_released():
    talk = Talk()
    talk.session.fetch(job(1, 100 * MS), 2)
    (opening,) = talk.sent()
    talk.session.received(wire.SpaceOpened(opening.id, 5, [3]), 3)
    (asked,) = talk.sent()
    talk.session.advance(100 * MS)
    assert isinstance(only(talk.effects(), Ended).end.error, TransferTimeout)

    lent = wire.Lent(asked.id, addresses(1), b"d" * 16, 0, 0, 9, b"t" * 16)
    talk.session.received(lent, 101 * MS)

    assert talk.sent() == [wire.Release(asked.lease)]


def test_what_arrived_counts_although_the_session_broke_meanwhile():
    talk = Talk()
    talk.lend(job(1, 1_000 * MS))
    talk.session.closed()
    assert talk.effects() == []

    talk.session.transfer_ended(TransferEnd(1, b"\1\1\0\0", PeerUnreachable("x"), settled=True))

    (ended,) = talk.effects()
    assert ended.end.digests == b"d" * 32, "and no Release to another connection"


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        ({"node": "c"}, "refused"),
        ({"major": 2}, "refused"),
        ({"minor": 4}, "refused"),
        ({"id": 77}, "protocol"),
    ],
)
def test_a_welcome_that_differs_closes_the_connection(told, cause):
    session = PeerSession("a", LOCAL, ["tcp"])
    session.opened(0)
    answer = welcome(session.effects.pop().message.id)
    for name, value in told.items():
        setattr(answer, name, value)

    session.received(answer, 1)

    (closing,) = session.effects
    assert closing.cause == cause
    assert not session.up


def test_a_fetch_that_cannot_begin_ends_at_once():
    talk = Talk()
    talk.session.fetch(job(1, 5), 5)
    assert isinstance(only(talk.effects(), Ended).end.error, TransferTimeout)
    for number in range(FETCHES_MAX):
        talk.session.fetch(job(10 + number, 1_000), 6)
    talk.effects()
    talk.session.fetch(job(2, 1_000), 6)
    assert isinstance(only(talk.effects(), Ended).end.error, CapacityError)

    alone = PeerSession("a", LOCAL, ["fast"])
    alone.fetch(job(1, 1_000), 5)
    assert isinstance(alone.effects.pop().end.error, PeerUnreachable)
    alone.opened(5)
    hello = alone.effects.pop().message
    alone.received(welcome(hello.id, transports={"fast": "", "tcp": "a:1"}), 6)
    alone.fetch(job(1, 1_000), 5)
    assert isinstance(alone.effects.pop().end.error, TierUnavailable)
    assert alone.fetches == 0


def test_silence_is_asked_about_and_then_ends_the_connection():
    talk = Talk()
    assert talk.session.next_deadline_ns() == 1 + PING_NS
    talk.session.advance(1 + PING_NS)
    (ping,) = talk.sent()
    assert isinstance(ping, wire.Ping)
    talk.session.received(wire.Pong(ping.id), 2 + PING_NS)
    talk.session.advance(2 + 2 * PING_NS)
    assert len(talk.sent()) == 1
    talk.session.advance(2 + 2 * PING_NS + SILENT_NS)
    (closing,) = talk.effects()
    assert closing.cause == "silent"

    greeting = PeerSession("a", LOCAL, ["tcp"])
    greeting.opened(7)
    greeting.effects.clear()
    greeting.advance(6 + HELLO_NS)
    assert greeting.effects == []
    greeting.advance(7 + HELLO_NS)
    assert greeting.effects.pop().cause == "silent"


def test_a_refused_space_ends_its_fetches_and_too_many_spaces_begin_the_session_again():
    talk = Talk()
    talk.session.fetch(job(1, 1_000 * MS), 2)
    (opening,) = talk.sent()
    failure = wire.Failure(opening.id, "layout_mismatch", "heads: 1", "heads")
    talk.session.received(failure, 3)
    assert isinstance(only(talk.effects(), Ended).end.error, LayoutMismatch)
    assert talk.session.up

    for at in range(SPACES_MAX + 1):
        talk.session.fetch(job(10 + at, 1_000 * MS, scope=str(at)), 4)
        (opening,) = talk.sent()
        if at < SPACES_MAX:
            talk.session.received(wire.SpaceOpened(opening.id, at, [0]), 4)
            talk.effects()
    talk.session.received(wire.Failure(opening.id, "capacity", "full"), 5)
    assert only(talk.effects(), CloseLink).cause == "spaces"


def test_a_peer_that_never_answers_leases_is_given_up():
    talk = Talk()
    talk.session.fetch(job(1, 1_000 * MS), 2)
    talk.session.received(wire.SpaceOpened(talk.sent()[0].id, 5, [3]), 2)
    for number in range(LATE_MAX + 1):
        talk.session.fetch(job(10 + number, 2 * MS), 1 * MS)
        talk.session.advance(2 * MS)

    assert only(talk.effects(), CloseLink).cause == "silent"
    assert not talk.session.up
