"""Goal: a node is asked to bring pages, each request ends once, at its deadline at the latest."""

from typing import Any

import pytest

from kvstore.cluster import bringing
from kvstore.cluster.bringing import BRINGS_MAX, BringEnded
from kvstore.cluster.effects import CloseLink, Send
from kvstore.cluster.session import MS, PeerSession
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    CapacityError,
    KVStoreError,
    LayoutMismatch,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
)
from kvstore.state.remote.jobs import PeerBring
from tests.cluster.session_parts import KEYS, LOCAL, PLACE, SHARD, identity, job, welcome

S = 1_000 * MS


class Asking:
    """A session, what it sent, and which requests have ended how."""

    def __init__(self, **said: Any) -> None:
        self.session = PeerSession("a", LOCAL, ["tcp"], PLACE)
        self.ends: dict[int, tuple[int, type[KVStoreError] | None]] = {}
        self.closed: list[CloseLink] = []
        self.session.opened(0)
        (hello,) = self.sent()
        self.session.received(welcome(hello.id, **said), 1)

    def sent(self) -> list[Any]:
        effects, self.session.effects = self.session.effects, []
        for one in effects:
            if isinstance(one, BringEnded):
                assert one.end.number not in self.ends, "an end is told once"
                error = type(one.end.error) if one.end.error is not None else None
                self.ends[one.end.number] = one.end.pages, error
            if isinstance(one, CloseLink):
                self.closed.append(one)
        return [one.message for one in effects if isinstance(one, Send)]

    def bring(self, number: int, deadline_ns: int = 2 * S, scope: str = "") -> list[Any]:
        made = PeerBring(number, "a", identity(scope), SHARD, KEYS.packed, 1, 9, deadline_ns)
        self.session.bring(made, 2)
        return self.sent()

    def say(self, answer: wire.Answer, now_ns: int = 3) -> list[Any]:
        self.session.received(answer, now_ns)
        return self.sent()

    def opened(self) -> list[Any]:
        """Ask for the first time, and have the space opened."""
        (asked,) = self.bring(1)
        assert isinstance(asked, wire.OpenSpace)
        return self.say(wire.SpaceOpened(asked.id, 5, [3]))


def test_a_request_waits_for_its_space_and_is_answered():
    asking = Asking()
    (asked,) = asking.opened()
    assert asked == wire.Bring(asked.id, 5, 3, KEYS.packed, 1, asked.wait_ms, 9)
    assert 1_900 < asked.wait_ms < 2_000, "its answer comes in time"
    asking.say(wire.Brought(asked.id, 3))
    assert asking.ends == {1: (3, None)}

    (asked,) = asking.bring(2)
    assert isinstance(asked, wire.Bring), "the space is open"
    asking.say(wire.Brought(asked.id, 0))
    assert asking.ends[2] == (0, None)


def test_a_fetch_and_a_request_share_an_open_space():
    asking = Asking()
    asking.session.fetch(job(7, 2 * S), 2)
    (opening,) = asking.sent()
    assert asking.bring(1) == []
    acquire, asked = asking.say(wire.SpaceOpened(opening.id, 5, [3]))
    assert isinstance(acquire, wire.Acquire)
    assert isinstance(asked, wire.Bring)


def test_a_refused_space_ends_the_requests_that_wait_for_it():
    asking = Asking()
    (opening,) = asking.bring(1)
    asking.bring(2)
    asking.say(wire.Failure(opening.id, "layout_mismatch", "page_tokens: 3", "page_tokens"))
    assert asking.ends == {1: (0, LayoutMismatch), 2: (0, LayoutMismatch)}
    assert not asking.closed


def test_a_refused_request_ends():
    asking = Asking()
    (asked,) = asking.opened()
    asking.say(wire.Failure(asked.id, "capacity", "the quota is used up"))
    assert asking.ends == {1: (0, CapacityError)}
    assert not asking.closed


def test_without_an_answer_it_ends_at_its_deadline_and_a_late_answer_is_ignored():
    asking = Asking()
    (first,) = asking.opened()
    (second,) = asking.bring(2)
    assert asking.session.next_deadline_ns() <= 2 * S
    asking.session.advance(2 * S - 1)
    (ping,) = asking.sent()
    asking.say(wire.Pong(ping.id), 2 * S - 1)
    asking.session.advance(2 * S)
    asking.sent()
    assert asking.ends == {1: (0, TransferTimeout), 2: (0, TransferTimeout)}
    asking.say(wire.Brought(first.id, 2), 2 * S + 1)
    asking.say(wire.Failure(second.id, "capacity", "full"), 2 * S + 1)
    assert not asking.closed


def test_a_request_whose_space_is_not_opened_ends_at_its_deadline():
    asking = Asking()
    (opening,) = asking.bring(1, deadline_ns=1 * S)
    asking.session.advance(1 * S)
    asking.sent()
    assert asking.ends == {1: (0, TransferTimeout)}
    assert asking.say(wire.SpaceOpened(opening.id, 5, [3]), 1 * S + 1) == []


def test_a_lost_connection_ends_all_requests():
    asking = Asking()
    asking.opened()
    asking.bring(2, scope="other")
    asking.session.closed()
    asking.sent()
    assert asking.ends == {1: (0, PeerUnreachable), 2: (0, PeerUnreachable)}
    assert asking.bring(3) == []
    assert asking.ends[3] == (0, PeerUnreachable)


def test_a_node_of_an_older_protocol_is_not_asked():
    asking = Asking(minor=5)
    assert asking.bring(1) == []
    assert asking.ends == {1: (0, ProtocolError)}


def test_requests_of_a_session_are_bounded():
    asking = Asking()
    for number in range(BRINGS_MAX + 1):
        asking.bring(number)
    assert asking.ends == {BRINGS_MAX: (0, CapacityError)}


def test_a_request_whose_time_is_over_is_not_sent():
    asking = Asking()
    assert asking.bring(1, deadline_ns=2) == []
    assert asking.ends == {1: (0, TransferTimeout)}


@pytest.mark.parametrize("pages", [-1, 4])
def test_an_answer_that_fits_no_request_closes_the_connection(pages):
    asking = Asking()
    (asked,) = asking.opened()
    asking.say(wire.Brought(asked.id, pages))
    (closed,) = asking.closed
    assert closed.cause == "protocol"
    assert asking.ends == {1: (0, PeerUnreachable)}


def test_a_node_that_leaves_too_many_requests_unanswered_is_given_up(monkeypatch):
    monkeypatch.setattr(bringing, "UNANSWERED_MAX", 1)
    asking = Asking()
    asking.opened()
    asking.bring(2)
    asking.session.advance(2 * S - 1)
    (ping,) = asking.sent()
    asking.say(wire.Pong(ping.id), 2 * S - 1)
    asking.session.advance(2 * S)
    asking.sent()
    (closed,) = asking.closed
    assert closed.cause == "silent"
    assert asking.session.next_deadline_ns() == 0
