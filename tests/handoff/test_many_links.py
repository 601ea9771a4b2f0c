"""Goal: links to many ranks are all there when the last is made; none is left when one fails."""

import socket
import threading

import numpy as np
import pytest

from kvstore.handoff import connecting, decode, greeting, links
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.greeting import SealedStream
from kvstore.handoff.messages import HandoffPing
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.sending import Senders
from kvstore.handoff.states import FailureCode, Patience, State
from kvstore.protocol.errors import InvalidArgument
from tests.conftest import wait_for
from tests.handoff.pair import SECRET, SPACE, Memory, managers, push_all
from tests.handoff.ranked import BLOCK_TOKENS, HEADS, ranked, whole_of
from tests.handoff.test_unequal_ranks import split

SILENCE_S = 2.5


def test_the_first_link_is_not_silent_while_the_others_are_made(wait_until, monkeypatch):
    pings = []
    received = Senders.received

    def counted(self, link, message, now_ns):
        if isinstance(message, HandoffPing):
            pings.append(link)
        return received(self, link, message, now_ns)

    link_to, made = decode.link_to, []

    def slow(rank, *arguments):
        if rank.record.rank:  # longer than the silence: so many pings of a link that is there
            wait_for(lambda: made, 15)
            first = made[0].number
            wait_for(lambda: pings.count(first) >= SILENCE_S / links.PING_S + 1, 15)
        made.append(link_to(rank, *arguments))
        return made[-1]

    monkeypatch.setattr(Senders, "received", counted)
    monkeypatch.setattr(decode, "link_to", slow)
    with ranked(split(heads=2), split(), Patience(silence_s=SILENCE_S)) as engines:
        senders, (receiver,) = engines.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        whole = whole_of(1, 4)
        engines.push(senders, whole, [0, 1, 2, 3])
        wait_until(lambda: receiver.progress.ended)

        assert receiver.failure is None
        assert engines.wrong(whole, [0, 1, 2, 3]) == []
        assert engines.decode[0].stats()["links"] == len(made) == 2


@pytest.mark.parametrize("what", ["closed", "lost"])
def test_links_are_not_used_if_one_ends_while_others_are_made(what, wait_until, monkeypatch):
    link_to, made = decode.link_to, []

    def broken(rank, peer, *arguments):
        made.append(link_to(rank, peer, *arguments))
        if len(made) == 2:
            if what == "closed":
                engines.decode[0]._over.set()
                engines.decode[0]._links[peer].close()
            else:
                made[0].close()
        return made[-1]

    monkeypatch.setattr(decode, "link_to", broken)
    monkeypatch.setattr(connecting, "LINKING_MAX", 1)
    with ranked(split(heads=4), split()) as engines:
        receiver = engines.decode[0].receiver(1, engines.registry.url, BLOCK_TOKENS)
        if what == "closed":
            wait_until(lambda: receiver.state == State.FAILED)
            assert len(made) == 2, "no more are made for a manager that is closed"
        else:  # it is tried again, with all links
            wait_until(lambda: engines.decode[0].stats()["links"] == HEADS)
            assert len(made) == 2 * HEADS
            assert {one.is_closed for one in made[:HEADS]} == {True}
            engines.decode[0].close()
            assert receiver.failure.code == FailureCode.CLOSED
        wait_until(lambda: engines.decode[0].stats()["threads"] == 0)


def test_what_is_written_may_take_as_long_as_the_silence(wait_until, monkeypatch):
    send, limits = SealedStream.send, set()

    def noted(self, body, after, limit_s):
        limits.add(limit_s)
        send(self, body, after, limit_s)

    monkeypatch.setattr(SealedStream, "send", noted)
    with managers(Patience.of_silence(20.0)) as pair:
        sender, receiver = pair.begin(1, 4)
        receiver.announce(0, [0, 1, 2, 3])
        push_all(sender, pair.here, [0, 1, 2, 3])
        wait_until(lambda: receiver.state == State.SUCCESS)
    assert limits == {20.0}


def test_a_silence_that_other_deadlines_would_not_keep_is_refused_or_they_are_longer():
    for silence_s, field in ((16.0, "transferring_s"), (float("inf"), "less")):
        with pytest.raises(InvalidArgument, match=field):
            Patience(silence_s=silence_s)
    assert Patience.of_silence(2.0) == Patience()
    long = Patience.of_silence(70.0)
    assert (long.bootstrapping_s, long.waiting_s, long.transferring_s) == (70.0, 70.0, 70.0)
    for silence_s in (0.5, 300.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument, match="silence_s"):
            Patience.of_silence(silence_s)


def test_who_sends_what_is_planned_once_a_greeting_and_not_under_the_lock(wait_until, monkeypatch):
    plan, planned = greeting.plan_ranks, []

    def noted(*parts):
        planned.append(any(one._lock._is_owned() for one in engines.prefill))
        return plan(*parts)

    monkeypatch.setattr(greeting, "plan_ranks", noted)
    with ranked(split(heads=2), split()) as engines:
        for manager in engines.prefill:
            manager._lock = threading.RLock()
        engines.decode[0].receiver(1, engines.registry.url, BLOCK_TOKENS)
        wait_until(lambda: engines.decode[0].stats()["links"] == 2)
    assert planned == [False] * 4, "once for each connection"


class Transport:
    """Stands for another transport: a writer or a landing engine that can be left open."""

    transport = "for tests"
    gather_memory = np.zeros(0, dtype=np.uint8)
    staged_address = 0

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins
        self.closed = 0

    def begin(self, *_) -> None:
        if not self.begins:
            raise RuntimeError("can't start new thread")

    def close(self) -> None:
        self.closed += 1


def test_a_manager_that_cannot_start_leaves_nothing_open():
    pool = Memory().pool
    before = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for arguments, field in (
            ({"listen": taken.getsockname()}, "listen"),
            ({"registry": "ftp://nowhere"}, "registry"),
            ({"registry": "http://a..b:80"}, "registry"),
        ):
            writer = Transport()
            with pytest.raises(InvalidArgument, match=field):
                PrefillManager(pool, SPACE, SECRET, writer=writer, **arguments)
            assert writer.closed == 1
    for make in (
        lambda one: PrefillManager(pool, SPACE, SECRET, writer=one),
        lambda one: DecodeManager(pool, SPACE, SECRET, engine=one),
    ):
        transport = Transport(begins=False)
        with pytest.raises(RuntimeError):
            make(transport)
        assert transport.closed == 1
    assert threading.active_count() == before


@pytest.mark.parametrize("name", ["kvstore-handoff-ticker", "kvstore-handoff-lease"])
def test_a_manager_without_a_thread_for_its_clock_leaves_nothing_open(name, monkeypatch):
    start = threading.Thread.start

    def limited(thread):
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    pool, writer, before = Memory().pool, Transport(), threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", limited)
    try:
        with pytest.raises(RuntimeError, match="thread"):
            PrefillManager(pool, SPACE, SECRET, writer=writer, registry=registry.url)
        assert writer.closed == 1
        assert wait_for(lambda: threading.active_count() == before)
    finally:
        registry.close()
