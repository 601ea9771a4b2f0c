"""Goal: what the session with a peer sends, and when it gives up."""

from typing import Any

import numpy as np
import pytest

from kvstore.cluster.effects import CloseLink, Ended, PeerStanding, Send, StartTransfer
from kvstore.cluster.session import (
    FETCHES_MAX,
    HELLO_NS,
    LATE_MAX,
    MS,
    PING_NS,
    SILENT_NS,
    SPACES_MAX,
    PeerSession,
)
from kvstore.cluster.ways import Way, ways_of
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    CapacityError,
    LayoutMismatch,
    PageCorrupt,
    PeerUnreachable,
    TierUnavailable,
    TransferTimeout,
)
from kvstore.state.remote.jobs import PeerFetch
from kvstore.state.tree.node import ORDINARY
from kvstore.transport.base import TransferEnd
from tests.cluster.session_parts import (
    KEYS,
    LOCAL,
    PLACE,
    SHARD,
    addresses,
    identity,
    job,
    welcome,
)


class Talk:
    """A session that is up, and what it wants."""

    def __init__(self) -> None:
        self.session = PeerSession("a", LOCAL, ["fast", "tcp"], PLACE)
        self.session.opened(0)
        (hello,) = self.sent()
        assert hello == LOCAL.hello(hello.id)
        self.session.received(welcome(hello.id), 1)

    def effects(self) -> list[Any]:
        effects, self.session.effects = self.session.effects, []
        return effects

    def sent(self) -> list[Any]:
        return [one.message for one in self.effects() if isinstance(one, Send)]

    def lend(self, made: PeerFetch, now_ns: int = 2, kept: bytes = b"") -> wire.Lent:
        """Bring a fetch to where its pages are read."""
        self.session.fetch(made, now_ns)
        (request,) = self.sent()
        if isinstance(request, wire.OpenSpace):
            self.session.received(wire.SpaceOpened(request.id, 5, [3]), now_ns)
            (request,) = self.sent()
        pages = len(made.slots)
        digests, ticket = b"d" * 16 * pages, b"t" * 16
        lent = wire.Lent(request.id, addresses(pages), digests, 0, 0, 1_000, ticket, kept)
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


def test_the_ways_of_a_lease_are_in_the_readers_order_with_what_the_owner_told_of_each():
    talk = Talk()
    talk.session.closed()
    talk.effects()
    talk.session.opened(2)
    (hello,) = talk.sent()
    both = {"tcp": ":7401", "other": "z:1", "fast": "old:1"}
    talk.session.received(welcome(hello.id, transports=both), 3)
    made = job(1, 1_000 * MS)
    talk.session.fetch(made, 3)
    (opening,) = talk.sent()
    talk.session.received(wire.SpaceOpened(opening.id, 5, [3]), 3)
    (asked,) = talk.sent()
    told = {"fast": ("new:2", b"p" * 8), "unknown": ("z:1", b"q" * 8)}
    lent = wire.Lent(asked.id, addresses(1), b"d" * 16, 0, 0, 9, b"t" * 16, places=told)

    talk.session.received(lent, 4)

    host = PLACE.rpartition(":")[0]
    assert only(talk.effects(), StartTransfer).ways == (
        Way("fast", "new:2", b"p" * 8), Way("tcp", f"{host}:7401", b""),
    )  # fmt: skip


@pytest.mark.parametrize(
    "endpoint",
    ["", "a", "a:", "a:0", "a:65536", "a:1x", "a b:1", "a\0:1", "[a:1", "a:1\n", "x" * 200],
)
def test_an_endpoint_that_is_none_does_not_reach_a_library_that_would_end(endpoint):
    lent = wire.Lent(
        1, addresses(1), b"d" * 16, 0, 0, 9, b"t" * 16, places={"fast": (endpoint, b"p" * 8)}
    )

    (fast, tcp) = ways_of(lent, {"fast": "z:2", "tcp": "z:1"}, "z")

    assert fast.addresses == b"", "without addresses no transport reads by them"
    assert tcp == Way("tcp", "z:1", b"")


def test_places_that_are_not_one_for_each_page_end_the_session():
    talk = Talk()
    talk.session.fetch(job(1, 1_000 * MS), 2)
    (opening,) = talk.sent()
    talk.session.received(wire.SpaceOpened(opening.id, 5, [3]), 3)
    (asked,) = talk.sent()
    told = {"fast": ("a:1", b"p" * 7)}
    lent = wire.Lent(asked.id, addresses(1), b"d" * 16, 0, 0, 9, b"t" * 16, places=told)

    talk.session.received(lent, 4)

    assert only(talk.effects(), CloseLink).cause == "protocol"


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


def test_the_time_of_a_page_with_a_ttl_runs_from_the_request_for_it():
    talk = Talk()
    rows = [(wire.NO_TTL, 0, 0), (200, 0, 1), (1 << 63, 1, 1), (0, 0, 1)]
    talk.lend(job(1, 1_000 * MS), 7, np.array(rows, dtype=wire.KEPT).tobytes())

    talk.session.transfer_ended(TransferEnd(1, b"\1\1\1\1", None, settled=True))

    end = only(talk.effects(), Ended).end
    far_ns = 7 + wire.TTL_MS_MAX * MS
    assert end.kept == [
        ORDINARY, (7 + 200 * MS, False, True), (far_ns, True, True), (7, False, True),
    ]  # fmt: skip


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

    assert talk.sent() == [wire.Release(asked.lease, read=False)]


def test_what_arrived_counts_although_the_session_broke_meanwhile():
    talk = Talk()
    talk.lend(job(1, 1_000 * MS))
    talk.session.closed()
    assert talk.effects() == [PeerStanding("a", b"")]

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
    session = PeerSession("a", LOCAL, ["tcp"], PLACE)
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

    alone = PeerSession("a", LOCAL, ["fast"], PLACE)
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
    closing, standing = talk.effects()
    assert closing.cause == "silent"
    assert standing == PeerStanding("a", b"")

    greeting = PeerSession("a", LOCAL, ["tcp"], PLACE)
    greeting.opened(7)
    greeting.effects.clear()
    greeting.advance(6 + HELLO_NS)
    assert greeting.effects == []
    greeting.advance(7 + HELLO_NS)
    assert greeting.effects.pop().cause == "silent"


def test_a_pong_that_nobody_asked_for_closes_the_connection():
    talk = Talk()
    talk.session.advance(1 + PING_NS)
    (ping,) = talk.sent()
    talk.session.received(wire.Pong(ping.id), 2 + PING_NS)
    assert talk.effects() == []

    talk.session.received(wire.Pong(ping.id), 3 + PING_NS)

    closing = only(talk.effects(), CloseLink)
    assert (closing.cause, closing.why) == ("protocol", "Pong answers no request")


def test_a_pong_that_comes_after_another_answer_is_an_answer_still():
    talk = Talk()
    talk.session.fetch(job(1, 9_000 * MS), 2)
    (opening,) = talk.sent()
    talk.session.advance(1 + PING_NS)
    (first,) = talk.sent()
    talk.session.received(wire.SpaceOpened(opening.id, 5, [3]), 2 + PING_NS)
    talk.effects()
    talk.session.advance(2 + 2 * PING_NS)
    (second,) = talk.sent()

    talk.session.received(wire.Pong(first.id), 3 + 2 * PING_NS)
    talk.session.received(wire.Pong(second.id), 4 + 2 * PING_NS)

    assert talk.effects() == []


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


def test_a_peer_is_given_up_while_more_of_its_leases_are_late():
    talk = Talk()
    talk.session.fetch(job(1, 1_000 * MS), 2)
    talk.session.received(wire.SpaceOpened(talk.sent()[0].id, 5, [3]), 2)
    for number in range(LATE_MAX):
        talk.session.fetch(job(10 + number, 2 * MS), 1 * MS)
        talk.session.advance(2 * MS)
    talk.effects()
    last = [5_000, 5_001, 5_002]
    for number in last:
        talk.session.fetch(job(number, 3 * MS), 2 * MS)
    talk.session.advance(3 * MS)

    effects = talk.effects()
    assert only(effects, CloseLink).cause == "silent"
    assert [one.end.job for one in effects if isinstance(one, Ended)] == [5_000, 1, 5_001, 5_002]


def test_fetches_that_ended_before_their_space_was_opened_are_forgotten():
    talk = Talk()
    for number in range(20):
        talk.session.fetch(job(number, 10 + number), 2)
        talk.session.advance(10 + number)
    assert len([one for one in talk.effects() if isinstance(one, Ended)]) == 20
    (place,) = talk.session._places.values()
    assert place.waiting == []
