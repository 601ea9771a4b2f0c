"""Answers are looked for before the thread sleeps, as long as that helps."""

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from kvstore.client.endpoint import set_timeout
from kvstore.mover import answers
from kvstore.mover.answers import PAUSE_MAX, AnswerReader

ROOM = 1 << 16


@pytest.fixture(params=["library", "python"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[AnswerReader, socket.socket, socket.socket]]:
    if request.param == "python":
        monkeypatch.setattr(answers, "_receive", None)
    elif answers._receive is None:
        pytest.skip("no compiler made the library")
    mine, theirs = socket.socketpair()
    set_timeout(mine, 10.0)
    yield AnswerReader(mine, ROOM), mine, theirs
    mine.close()
    theirs.close()


def test_what_has_come_is_returned_and_no_more_than_the_room(pair):
    reader, _, theirs = pair
    theirs.sendall(b"answer")
    assert bytes(reader.receive()) == b"answer"
    theirs.sendall(bytes(ROOM + 5))
    assert len(reader.receive()) + len(reader.receive()) == ROOM + 5


def test_an_answer_that_comes_later_is_waited_for(pair):
    reader, _, theirs = pair
    later = threading.Timer(0.05, theirs.sendall, [b"late"])
    later.start()
    assert bytes(reader.receive()) == b"late"
    later.join()


def test_nothing_is_returned_when_the_peer_has_closed(pair):
    reader, _, theirs = pair
    theirs.close()
    assert bytes(reader.receive()) == b""


def test_the_timeout_of_the_socket_ends_a_wait(pair):
    reader, mine, _ = pair
    set_timeout(mine, 0.02)
    with pytest.raises(BlockingIOError):
        reader.receive()


def test_a_socket_that_is_shut_down_or_closed_meanwhile_ends_a_wait(pair):
    reader, mine, _ = pair
    later = threading.Timer(0.05, mine.shutdown, [socket.SHUT_RDWR])
    later.start()
    assert bytes(reader.receive()) == b""
    later.join()
    mine.close()
    with pytest.raises(OSError, match="descriptor"):
        reader.receive()


def test_a_signal_is_handled_during_a_wait(pair):
    reader, _, theirs = pair
    before = signal.signal(signal.SIGUSR1, lambda *_: theirs.sendall(b"handled"))
    later = threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGUSR1])
    try:
        later.start()
        assert bytes(reader.receive()) == b"handled"
    finally:
        later.join()
        signal.signal(signal.SIGUSR1, before)


class Looks:
    """What the library is asked, and whether it has to sleep, as a test decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int = 2) -> None:
        self.asked: list[bool] = []
        self.sleeps = False
        monkeypatch.setattr(answers, "_receive", self)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
        with socket.socket() as unused:
            self.reader = AnswerReader(unused, ROOM)

    def __call__(self, descriptor, memory, room, look_ns, slept) -> int:
        self.asked.append(look_ns > 0)
        slept._obj.value = self.sleeps or not look_ns
        return 1

    def ask(self, answers_: int, *, sleeps: bool) -> int:
        """So many answers; how many of them were looked for."""
        self.asked.clear()
        self.sleeps = sleeps
        for _ in range(answers_):
            self.reader.receive()
        return sum(self.asked)


def test_while_answers_come_at_once_each_is_looked_for(monkeypatch):
    looks = Looks(monkeypatch)
    assert looks.ask(100, sleeps=False) == 100


def test_where_answers_come_later_hardly_any_is_looked_for(monkeypatch):
    looks = Looks(monkeypatch)
    assert looks.ask(200, sleeps=True) <= 10
    assert looks.ask(10 * (PAUSE_MAX + 1), sleeps=True) == 10


def test_when_answers_come_at_once_again_each_is_looked_for_again(monkeypatch):
    looks = Looks(monkeypatch)
    looks.ask(500, sleeps=True)
    looks.ask(PAUSE_MAX, sleeps=False)
    assert looks.ask(100, sleeps=False) == 100


def test_where_half_of_the_looks_are_in_vain_there_are_few(monkeypatch):
    looks = Looks(monkeypatch)
    asked = sum(looks.ask(1, sleeps=at % 2 == 0) for at in range(2000))
    assert asked < 200


def test_with_one_core_nothing_is_looked_for(monkeypatch):
    assert Looks(monkeypatch, cores=1).ask(10, sleeps=False) == 0
