"""Goal: a peer that knows the secret and behaves as no engine does costs nobody else anything."""

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.handoff import listening, prefill, rooms, shape, unopened
from kvstore.handoff.connecting import PURPOSES
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.greeting import SealedStream
from kvstore.handoff.listening import GREETINGS_MAX
from kvstore.handoff.messages import (
    Announce,
    Drained,
    Failed,
    HandoffPing,
    RenewRoom,
    encode_message,
)
from kvstore.handoff.ranks import plan_ranks
from kvstore.handoff.rooms import ROOM_MAX
from kvstore.handoff.sending import Senders
from kvstore.handoff.states import FailureCode, Patience, State
from kvstore.handoff.tables import LinkTarget, Speaker
from kvstore.protocol.errors import InvalidArgument
from kvstore.transport.streams import connect, host_and_port
from tests.handoff.pair import Pair, managers, push_all
from tests.handoff.test_cores import SECOND, SHAPE, announce

SOON_S = 5


class Peer:
    """Both connections of a link to prefill, greeted as by decode.

    ``between`` waits before the second one.
    """

    def __init__(
        self, pair: Pair, number: bytes, between: Callable[[], object] = lambda: None
    ) -> None:
        greeter, group = pair.decode._greeter, pair.decode._group
        [share] = plan_ranks(group.parts, group.parts).shares
        self.streams: list[SealedStream] = []
        for purpose in PURPOSES:
            until_ns = time.monotonic_ns() + SOON_S * 1_000_000_000
            stream = connect(*host_and_port(pair.prefill.address), None, until_ns)
            boot = pair.prefill._boot
            self.streams.append(greeter.greet(stream, purpose, number, boot, share))
            if len(self.streams) == 1:
                between()

    def say(self, message) -> None:
        self.streams[0].send(encode_message(message), [], SOON_S)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()


def test_a_link_that_comes_again_under_its_number_is_not_closed_in_place_of_the_old_one(wait_until):
    """Its jobs would have no end: nobody would look for them, and their blocks were never free."""
    number = os.urandom(16)
    with managers() as pair:
        old = Peer(pair, number)
        wait_until(lambda: pair.prefill.stats()["links"] == 1)
        link = pair.prefill._links[number]
        old.close()
        wait_until(lambda: pair.prefill.stats()["threads"] == 0)

        new = Peer(pair, number)
        wait_until(lambda: pair.prefill.stats()["links"] == 1)
        pair.prefill._drop(link, FailureCode.PEER_CLOSED, "the old link ends late")
        new.say(HandoffPing())

        assert pair.prefill.stats()["links"] == 1
        assert not pair.prefill._links[number].is_closed
        new.close()
        wait_until(lambda: pair.prefill.stats()["threads"] == 0)


def test_prefill_waits_for_the_second_connection_as_long_as_decode_may_take(
    wait_until, monkeypatch
):
    """First to connect, and then to greet."""
    monkeypatch.setattr(prefill, "GREETING_S", 0.1)
    monkeypatch.setattr(prefill, "CONNECT_S", 30.0)
    with managers() as pair:

        def later() -> None:
            over = time.monotonic() + 0.5  # five times as long as a greeting may take
            wait_until(lambda: time.monotonic() > over)

        peer = Peer(pair, os.urandom(16), later)
        peer.say(RenewRoom(7))
        wait_until(lambda: [one.room for one in pair.prefill.describe()] == [7])
        assert pair.prefill.stats()["links"] == 1
        peer.close()
        wait_until(lambda: pair.prefill.stats()["threads"] == 0)


def test_links_that_break_when_they_are_made_do_not_take_those_of_the_next_try(
    wait_until, monkeypatch
):
    """A handoff may begin in between; the first try, when it gives up, leaves the second alone."""
    add, tries = DecodeManager._add, []

    def added(self, peer, links):
        add(self, peer, links)
        tries.append(peer)
        if len(tries) == 1:
            self._fault(peer, FailureCode.PEER_CLOSED, "its writer has found it broken")
            both.append(pair.begin(2, 4))

    monkeypatch.setattr(DecodeManager, "_add", added)
    with managers() as pair:
        both = [pair.begin(1, 4)]
        wait_until(lambda: len(both) == 2)
        for at, (sender, receiver) in enumerate(both):
            receiver.announce(0, range(4 * at, 4 * at + 4))
            push_all(sender, pair.here, list(range(4 * at, 4 * at + 4)))
        wait_until(lambda: all(receiver.progress.ended for _, receiver in both))

        assert [receiver.state for _, receiver in both] == [State.SUCCESS] * 2
        assert len(tries) == 2
        for _, receiver in both:
            receiver.close()


def test_strangers_who_connect_and_say_nothing_keep_no_engine_out(wait_until):
    """More than may greet at a time: those that have said nothing for longest give way."""
    with managers() as pair, contextlib.ExitStack() as strangers:
        place = host_and_port(pair.prefill.address)
        for _ in range(3 * GREETINGS_MAX):
            strangers.enter_context(socket.create_connection(place, SOON_S))
        wait_until(lambda: pair.prefill.stats().get("greetings", 0) >= GREETINGS_MAX)

        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, range(4))
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.progress.ended)
        assert receiver.state == State.SUCCESS
        assert len(pair.prefill._listener._crowd) <= 2 * GREETINGS_MAX
        receiver.close()


def test_a_fault_of_ours_costs_one_connection_and_not_the_port(wait_until, monkeypatch):
    faults = [MemoryError("ours")]

    def fit(_connection):
        if faults:
            raise faults.pop()

    monkeypatch.setattr(listening, "fit_send_buffer", fit)
    with managers() as pair:
        place = host_and_port(pair.prefill.address)
        with socket.create_connection(place, SOON_S) as stranger:
            stranger.settimeout(SOON_S)
            assert stranger.recv(1) == b"", "closed at once"
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, range(4))
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.progress.ended)
        assert receiver.state == State.SUCCESS
        receiver.close()


def test_faults_of_ours_take_no_places_of_those_that_greet(wait_until, monkeypatch):
    with managers() as pair:
        start = pair.prefill._threads.start
        left = iter(range(2 * GREETINGS_MAX))

        def fail(run, name):
            if next(left, None) is not None:
                raise MemoryError("ours")
            return start(run, name)

        monkeypatch.setattr(pair.prefill._threads, "start", fail)
        for _ in range(2 * GREETINGS_MAX):
            place = host_and_port(pair.prefill.address)
            with socket.create_connection(place, SOON_S) as stranger:
                stranger.settimeout(SOON_S)
                assert stranger.recv(1) == b"", "closed at once"
        assert len(pair.prefill._listener._crowd) == 0
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, range(4))
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.progress.ended)
        assert receiver.state == State.SUCCESS
        receiver.close()


def codes_of(effects) -> list[str]:
    """Why prefill refuses, if it does."""
    told = [one.message for one in effects]
    return [one.failure.code for one in told if hasattr(one, "failure")]


def test_announcements_of_what_no_engine_has_asked_for_have_a_bound_together(monkeypatch):
    """One has up to a million blocks, and 512 rooms may be known from decode only."""
    monkeypatch.setattr(unopened, "BLOCKS_MAX", 8)
    core = Senders(SHAPE, Patience())
    assert codes_of(core.received(b"L", announce(1, [1, 2, 3, 4, 5]), 0)) == []
    assert codes_of(core.received(b"L", announce(2, [6, 7, 8, 9]), 0)) == ["refused"]
    assert codes_of(core.received(b"L", announce(3, [6, 7, 8]), 0)) == []
    assert codes_of(core.received(b"L", announce(4, [1]), 0)) == ["refused"]

    core.open(5, 48, 0)
    assert codes_of(core.received(b"L", announce(5, [1, 2, 3]), 0)) == []
    core.open(1, 80, 0)
    assert codes_of(core.received(b"L", announce(6, [1, 2, 3, 4, 5]), 0)) == []
    core.tick(61 * SECOND)  # nobody wants them any more
    core.tick(92 * SECOND)  # and they are forgotten
    assert codes_of(core.received(b"L", announce(7, list(range(8))), 92 * SECOND)) == []
    core.check()


def linked_from(core: Senders, **links: str) -> None:
    """Links of decode engines at these addresses; those whose names begin alike are one engine's.

    Each is of another rank of it.
    """
    for name, address in links.items():
        target = LinkTarget(name[:1].encode(), ord(name[-1]), SHAPE.whole, frozenset((0,)))
        core.linked(name.encode(), target, address)


def test_a_peer_that_fills_the_table_with_requests_that_never_come_gives_way(monkeypatch):
    """It renews them, so they do not end by themselves; and it has many links."""
    monkeypatch.setattr(unopened, "ROOMS_MAX", 7)
    core = Senders(SHAPE, Patience())
    linked_from(core, A1="10.0.0.1", A2="10.0.0.1", C="10.0.0.2")
    for room in range(1, 8):
        assert codes_of(core.received((b"A1", b"A2")[room % 2], announce(room, [1]), 0)) == []
    assert codes_of(core.received(b"A1", announce(8, [1]), 0)) == ["refused"]

    for room, oldest in ((11, 1), (12, 2), (13, 3)):
        given_up, drained = core.received(b"C", announce(room, [1]), 0)
        assert given_up.message.room == drained.message.room == oldest
        assert given_up.message.failure.code == FailureCode.REFUSED
        assert given_up.link == drained.link == (b"A1", b"A2")[oldest % 2]
    assert codes_of(core.received(b"C", announce(14, [1]), 0)) == ["refused"], "four and three"
    assert core.counts["gave_way"] == 3
    assert [one.room for one in core.describe(0)] == [4, 5, 6, 7, 11, 12, 13]
    core.check()


def test_engines_behind_one_address_share_what_it_has_and_take_nothing_from_others(monkeypatch):
    """It may be that of a gateway; or of an engine that says that it is many."""
    monkeypatch.setattr(unopened, "ROOMS_MAX", 8)
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1", B="10.0.0.1", C="10.0.0.2", D="10.0.0.1", E="10.0.0.1")
    for room in range(1, 9):
        core.received(b"A" if room <= 4 else b"C", announce(room, [1]), 0)

    def gave_way(link: bytes, room: int) -> list[int]:
        effects = core.received(link, announce(room, [1]), 0)
        return sorted({one.message.room for one in effects if one.link != link})

    assert [gave_way(b"B", room) for room in (11, 12, 13)] == [[1], [2], []]
    assert [gave_way(b"D", room) for room in (21, 22)] == [[3], []]
    assert gave_way(b"E", 31) == [11], "of its own address, as that has as much as the other"
    assert [one.room for one in core.describe(0)] == [4, 5, 6, 7, 8, 12, 21, 31]
    assert gave_way(b"A", 9) == []
    assert [core.received(b"C", announce(9, [1]), 0)[0].link] == [b"C"], "four and four"
    core.check()


SPEAKERS = st.builds(Speaker, st.sampled_from("abc"), st.sampled_from([b"1", b"2", b"3"]))


@given(st.dictionaries(SPEAKERS, st.integers(1, 9)), SPEAKERS, st.integers(1, 5))
def test_who_gives_way_has_more_than_who_takes_will_have(has, taker, more):
    def of(address: str) -> int:
        return sum(count for one, count in has.items() if one.address == address)

    gives = unopened._gives_way(Counter(has), taker, more)
    own = of(taker.address) + more
    if gives is None:
        assert all(of(address) <= own for address in "abc")
        assert all(has[one] <= has.get(taker, 0) + more for one in has if one[0] == taker[0])
    elif gives.address != taker.address:
        assert of(gives.address) == max(of(address) for address in "abc") > own
    else:
        assert all(of(address) <= own for address in "abc")
        assert has[gives] > has.get(taker, 0) + more
    if gives is not None:
        assert has[gives] == max(has[one] for one in has if one.address == gives.address)


def test_a_peer_that_announces_too_many_blocks_for_such_requests_gives_way(monkeypatch):
    monkeypatch.setattr(unopened, "BLOCKS_MAX", 9)
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1", C="10.0.0.2")
    for room, blocks in ((1, [1, 2]), (2, [3, 4]), (3, [5, 6]), (4, [7, 8]), (5, [9])):
        assert codes_of(core.received(b"A", announce(room, blocks), 0)) == []

    effects = core.received(b"C", announce(11, [1, 2, 3]), 0)

    assert [one.message.room for one in effects if one.link == b"A"] == [1, 1, 2, 2]
    assert codes_of(core.received(b"C", announce(12, [1, 2]), 0)) == ["refused"]
    assert codes_of(core.received(b"C", announce(13, [1]), 0)) == []
    assert [one.room for one in core.describe(0) if one.state != "FAILED"] == [3, 4, 5, 11, 13]
    core.check()


def test_a_request_that_gave_way_before_it_came_fails_as_a_push_and_is_not_refused(monkeypatch):
    """Its room was not used, so its client must not be told that it made a mistake."""
    monkeypatch.setattr(unopened, "ROOMS_MAX", 3)
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1", C="10.0.0.2", D="10.0.0.3")
    for room in (1, 2, 3):
        core.received(b"A", announce(room, [1]), 0)
    core.received(b"C", announce(11, [1]), 0)
    assert [one.room for one in core.describe(0)] == [2, 3, 11]
    assert codes_of(core.received(b"A", RenewRoom(1), 0)) == ["refused"], "decode is told again"
    assert [one.room for one in core.describe(0)] == [2, 3, 11]

    progress, effects = core.open(1, 16, 0)
    assert progress.state is State.FAILED
    assert "have fewer such requests" in progress.failure.message
    assert effects == []
    assert core.push(1, range(1), range(1), [0], np.zeros(0, dtype=np.uint64), 0) == []
    core.check()
    core.close(1, 0)
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, 16, 0)


def test_a_request_that_comes_after_its_push_has_ended_fails_as_a_push():
    """Decode gave up after a minute, say, and prefill had a long queue in front of its door."""
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1")
    core.received(b"A", announce(1, [1]), 0)
    core.tick(61 * SECOND)
    core.tick(92 * SECOND)
    assert core.describe(92 * SECOND) == []
    progress, _ = core.open(1, 16, 92 * SECOND)
    assert progress.failure.code == FailureCode.DEADLINE


def test_rooms_that_only_peers_have_spoken_of_are_not_used(monkeypatch):
    """Whoever makes up tens of thousands would else refuse requests of others."""
    monkeypatch.setattr(rooms, "ROOMS_KEPT", 4)
    monkeypatch.setattr(unopened, "MISSED_KEPT", 4)
    monkeypatch.setattr(unopened, "ROOMS_MAX", 8)
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1")
    core.open(1, 16, 0)
    core.close(1, 0)
    for round_ in range(8):
        for number in range(8):
            room = ROOM_MAX - 8 * round_ - number
            core.received(b"A", announce(room, [1]), 200 * round_ * SECOND)
        core.tick((200 * round_ + 61) * SECOND)
        core.tick((200 * round_ + 92) * SECOND)
        assert core.describe(0) == []
    with pytest.raises(InvalidArgument, match="used before"):
        core.open(1, 16, 0)
    assert core.open(2, 16, 0)[0].state is State.BOOTSTRAPPING
    assert len(core._missed._why) == 4


def test_a_request_that_has_come_gives_way_to_nobody(monkeypatch):
    monkeypatch.setattr(unopened, "ROOMS_MAX", 2)
    core = Senders(SHAPE, Patience())
    linked_from(core, A="10.0.0.1", C="10.0.0.2")
    for room in (1, 2, 3, 4):
        core.open(room, 16, 0)
        assert codes_of(core.received(b"A", announce(room, [1]), 0)) == []

    for room in (11, 12):
        assert codes_of(core.received(b"C", announce(room, [1]), 0)) == []
    assert codes_of(core.received(b"C", announce(13, [1]), 0)) == ["refused"]
    assert core.counts["gave_way"] == 0


def test_links_know_the_address_of_their_peer(wait_until):
    with managers() as pair:
        pair.begin(1, 4)
        wait_until(lambda: pair.prefill.stats()["links"] == 1)
        [link] = pair.prefill._links
        wait_until(lambda: pair.prefill._core._links.origin(link).address == "127.0.0.1")
        assert pair.prefill._core._links.origin(link).instance == pair.decode._group.instance


@pytest.mark.parametrize("states", [[], [bytes(4 << 20)]])
def test_blocks_that_are_too_many_are_counted_before_they_are_read(states, monkeypatch):
    """To read a million takes long, and others wait meanwhile."""
    monkeypatch.setattr(shape, "unpack_numbers", lambda _: pytest.fail("they are read"))
    core = Senders(SHAPE, Patience())
    core.open(1, 48, 0)
    message = Announce(1, 48, 0, b"" if states else bytes(4 << 20), 0, None, states)
    assert codes_of(core.received(b"L", message, 0)) == ["refused"]


def test_a_room_that_was_refused_stays_refused_when_a_place_is_free(monkeypatch):
    """Decode has its blocks back by then: what it sent before it knew must start nothing."""
    monkeypatch.setattr(unopened, "ROOMS_MAX", 1)
    core = Senders(SHAPE, Patience())
    core.received(b"L", RenewRoom(1), 0)
    answers = [core.received(b"L", RenewRoom(2), 0)]
    core.open(1, 16, 0)
    answers.append(core.received(b"L", announce(2, [3]), 0))

    kinds = [[type(one.message) for one in answer] for answer in answers]
    assert kinds == [[Failed, Drained]] * 2
    progress, _ = core.open(2, 16, 0)
    assert progress.state == State.FAILED
    assert core.push(2, range(1), range(1), [0], np.zeros(0, dtype=np.uint64), 0) == []
    core.check()
