"""Goal: whatever a node or another thread does, a call ends in its time and says why."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic

import pytest

from kvstore import endpoint, exchange, link, wire
from kvstore.endpoint import fetch_extents, nobody_listens, open_socket
from kvstore.errors import KVStoreError, PeerUnreachable, ProtocolError, TransferTimeout
from kvstore.exchange import Connection
from kvstore.link import Link

TIMEOUT_S = 10.0
SHORT_S = 0.1


class Peer:
    """A node by hand: answers as a test says.

    Attributes:
        answer: gives the answer to a request; None for none.
        heard: every message that came, in order.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.heard: list[wire.Request] = []
        self.answer: Callable[[wire.Request], wire.Answer | None] = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        reader = wire.FrameReader()
        while True:
            try:
                data = connection.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            for body in reader.feed(data):
                request = wire.decode_request(body)
                self.heard.append(request)
                answered = self.answer(request)
                if answered is not None:
                    with contextlib.suppress(OSError):  # whoever asked has left
                        connection.sendall(wire.encode(answered))

    def names(self) -> list[str]:
        return [type(message).__name__ for message in self.heard]

    def drop(self) -> None:
        """Close every connection."""
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(TIMEOUT_S)
        self.drop()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for connection in self._open:
            connection.close()
        Path(self.path).unlink()


def answer(request: wire.Request, minor: int = wire.PROTOCOL_MINOR) -> wire.Answer | None:
    if isinstance(request, wire.Hello):
        return wire.Welcome(request.id, 1, minor, b"b" * 16, "peer", b"s" * 16, 1 << 20, 1 << 20)
    if isinstance(request, wire.Ping):
        return wire.Pong(request.id)
    return None


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path / "peer.sock")
    yield made
    made.close()


@pytest.fixture
def connected(peer: Peer) -> Iterator[Link]:
    made = Link(peer.path, "engine")
    assert made.connected
    yield made
    made.close()


class Held:
    """A lock that another thread holds inside."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._held, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self._lock:
            self._held.set()
            assert self._done.wait(TIMEOUT_S)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._held.wait(TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(TIMEOUT_S)


def connection_of(made: Link) -> Connection:
    assert made._connection is not None
    return made._connection


# What has no answer


def test_what_has_no_answer_does_not_wait_for_one_that_another_thread_waits_for(
    peer, connected, wait_until
):
    with Held(connection_of(connected)._turn):
        connected.send(wire.AbortPut(7))
        wait_until(lambda: wire.AbortPut(7) in peer.heard)

    assert connected.connected


def test_what_has_no_answer_does_not_wait_for_another_thread_that_writes(
    peer, connected, wait_until
):
    with Held(connection_of(connected)._writing):
        before = monotonic()
        connected.send(wire.AbortPut(7))
        connected.send_later(wire.Release(8))
        assert monotonic() - before < TIMEOUT_S / 2
        assert wire.AbortPut(7) not in peer.heard

    wait_until(lambda: peer.heard[-2:] == [wire.AbortPut(7), wire.Release(8)])


def test_what_was_said_first_arrives_first(peer, connected):
    connected.send_later(wire.Release(1))
    connected.send(wire.AbortPut(2))
    connected.send_later(wire.Release(3))
    connected.request(wire.Ping(0), TIMEOUT_S)

    assert peer.heard[1:4] == [wire.Release(1), wire.AbortPut(2), wire.Release(3)]
    assert peer.names()[4] == "Ping"


def test_what_was_meant_for_an_earlier_connection_is_said_on_no_other(peer, connected, wait_until):
    epoch = connected.epoch
    peer.drop()
    wait_until(lambda: connected.connected and connected.epoch > epoch)

    connected.send(wire.Corrupt(0, 0, b"k" * 32, 1), epoch)
    connected.send_later(wire.Release(5), epoch)
    connected.send(wire.ReportPrefill(0.5))
    connected.request(wire.Ping(0), TIMEOUT_S)

    assert "Corrupt" not in peer.names()
    assert "Release" not in peer.names()
    assert "ReportPrefill" in peer.names()


def test_nothing_is_said_on_a_connection_before_its_hello(peer, connected, wait_until):
    epoch = connected.epoch
    with Held(connected._state):  # it cannot connect again yet
        peer.drop()
        for number in range(100):
            connected.send_later(wire.Release(number))
    wait_until(lambda: connected.connected and connected.epoch > epoch)
    connected.request(wire.Ping(0), TIMEOUT_S)

    names = peer.names()
    assert names[names.index("Hello", 1) + 1 :] == ["Settled", "Ping"]


def test_a_node_that_takes_no_messages_is_given_up(peer, connected, monkeypatch, wait_until):
    monkeypatch.setattr(exchange, "POSTED_MAX", 10)
    epoch = connected.epoch
    with Held(connection_of(connected)._writing):
        for number in range(11):
            connected.send_later(wire.Release(number))
        wait_until(lambda: connected.epoch == epoch and not connected.connected)

    wait_until(lambda: connected.connected and connected.epoch > epoch)


# Requests


def test_a_request_that_only_waited_for_others_leaves_the_connection_alone(peer, connected):
    epoch = connected.epoch
    with Held(connection_of(connected)._turn), pytest.raises(TransferTimeout, match="other"):
        connected.request(wire.Ping(0), SHORT_S)

    assert connected.connected
    assert connected.request(wire.Ping(0), TIMEOUT_S) is not None
    assert connected.epoch == epoch


def test_a_request_without_an_answer_ends_the_connection_and_its_late_answer_meets_nobody(
    peer, connected, wait_until
):
    gate = threading.Event()

    def late(request: wire.Request) -> wire.Answer | None:
        assert gate.wait(TIMEOUT_S)
        return answer(request)

    peer.answer = late
    with pytest.raises(TransferTimeout):
        connected.request(wire.Ping(0), SHORT_S)
    peer.answer = answer
    gate.set()

    wait_until(lambda: connected.connected)
    assert isinstance(connected.request(wire.Ping(0), TIMEOUT_S), wire.Pong)
    assert connected.epoch == 2


def test_a_request_whose_time_is_up_before_its_turn_breaks_nothing(peer, connected):
    with pytest.raises(TransferTimeout, match="other"):
        connection_of(connected).request(wire.Ping(0), monotonic() - 1.0)

    assert connected.connected


def test_an_answer_to_another_request_is_no_answer(peer, connected):
    peer.answer = lambda request: wire.Pong(99)

    with pytest.raises(ProtocolError, match="does not belong"):
        connected.request(wire.Ping(0), TIMEOUT_S)


def test_a_request_for_an_earlier_connection_is_not_sent(peer, connected, wait_until):
    epoch = connected.epoch
    peer.drop()
    wait_until(lambda: connected.connected and connected.epoch > epoch)

    with pytest.raises(PeerUnreachable, match="anew"):
        connected.request(wire.Ping(0), TIMEOUT_S, epoch)
    assert "Ping" not in peer.names()


def test_a_request_that_a_slow_node_reads_byte_by_byte_ends_in_its_time(tmp_path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "slow.sock"))
    listener.listen(1)
    connection = Connection(str(tmp_path / "slow.sock"), 1)
    accepted, _ = listener.accept()
    ended = threading.Event()

    def sip() -> None:
        while not ended.wait(0.02) and accepted.recv(4096):
            pass

    thread = threading.Thread(target=sip)
    thread.start()
    before = monotonic()
    try:
        with pytest.raises((TransferTimeout, OSError)):
            connection.request(wire.Lookup(0, 0, [0], bytes(8 << 20)), before + 0.3)
    finally:
        ended.set()
        thread.join(TIMEOUT_S)
        connection.close("")
        accepted.close()
        listener.close()

    assert monotonic() - before < 2.0


def test_a_closed_link_answers_at_once_although_a_request_was_waiting(peer, connected, wait_until):
    peer.answer = lambda request: None if isinstance(request, wire.Lookup) else answer(request)
    errors: list[KVStoreError] = []

    def look() -> None:
        try:
            connected.request(wire.Lookup(0, 0, [0], b""), TIMEOUT_S)
        except KVStoreError as error:
            errors.append(error)

    waiting = threading.Thread(target=look)
    waiting.start()
    wait_until(lambda: "Lookup" in peer.names())
    before = monotonic()
    connected.close()
    waiting.join(TIMEOUT_S)

    assert monotonic() - before < TIMEOUT_S / 2
    assert isinstance(errors[0], PeerUnreachable)
    with pytest.raises(PeerUnreachable, match="closed"):
        connected.request(wire.Ping(0), TIMEOUT_S)


# Connecting


def test_a_link_that_closes_while_it_connects_leaves_no_connection(peer, wait_until):
    gate = threading.Event()
    peer.answer = lambda request: None
    made = Link(peer.path, "engine")
    assert not made.connected

    def late(request: wire.Request) -> wire.Answer | None:
        gate.wait(TIMEOUT_S)
        return answer(request)

    peer.answer = late
    count = len(peer.heard)
    wait_until(lambda: len(peer.heard) > count)
    made.close()
    gate.set()

    assert not made.connected
    assert made._thread is not None
    made._thread.join(TIMEOUT_S)
    assert made._connection is None


def test_a_link_without_a_thread_works_and_is_watched_later(peer, monkeypatch, wait_until):
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "kvstore-link":
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    made = Link(peer.path, "engine")
    assert isinstance(made.request(wire.Ping(0), TIMEOUT_S), wire.Pong)
    assert made._thread is None
    monkeypatch.undo()

    assert isinstance(made.request(wire.Ping(0), TIMEOUT_S), wire.Pong)
    assert made._thread is not None
    assert peer.names().count("Hello") == 1
    made.close()


def test_without_descriptors_a_link_goes_on_trying(peer, monkeypatch, wait_until):
    def refuse(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(endpoint.socket, "socket", refuse)
    made = Link(peer.path, "engine")
    assert "Too many open files" in made.why
    with pytest.raises(PeerUnreachable, match="Too many"):
        made.request(wire.Ping(0), TIMEOUT_S)
    monkeypatch.undo()

    wait_until(lambda: made.connected)
    made.close()


def test_a_node_that_is_not_there_is_told_from_one_that_does_not_answer(tmp_path):
    path = str(tmp_path / "nobody.sock")
    with pytest.raises(PeerUnreachable) as missing:
        open_socket(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    with pytest.raises(PeerUnreachable) as refused:
        open_socket(path)
    listener.listen(0)
    filled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    filled.connect(path)
    with pytest.raises(PeerUnreachable) as full:
        open_socket(path)
    filled.close()
    listener.close()

    assert [nobody_listens(caught.value) for caught in (missing, refused, full)] == [
        True, True, False
    ]  # fmt: skip


@pytest.mark.parametrize(("minor", "said"), [(2, []), (3, [wire.Settled(2)])])
def test_an_old_node_is_not_told_what_it_would_take_for_more(
    peer, connected, wait_until, minor, said
):
    peer.answer = lambda request: answer(request, minor)
    epoch = connected.epoch
    peer.drop()
    wait_until(lambda: connected.connected and connected.epoch > epoch)
    connected.request(wire.Ping(0), TIMEOUT_S)

    assert [one for one in peer.heard if isinstance(one, wire.Settled)] == said


def test_connections_of_one_link_are_numbered_and_those_of_another_are_not_its_own(
    peer, connected, wait_until
):
    peer.drop()
    wait_until(lambda: peer.names().count("Hello") == 2)
    other = Link(peer.path, "other")
    other.close()

    first, second, third = (one for one in peer.heard if isinstance(one, wire.Hello))
    assert first.origin == second.origin != third.origin
    assert (first.number, second.number, third.number) == (1, 2, 1)


def test_a_node_that_stays_silent_is_given_up_in_the_end(peer, connected, monkeypatch, caplog):
    monkeypatch.setattr(link, "SETTLE_WAIT_S", 0.0)
    peer.answer = lambda request: None
    with pytest.raises(TransferTimeout):
        connected.request(wire.Ping(0), SHORT_S)

    connected.close()

    assert connected._thread is not None
    connected._thread.join(TIMEOUT_S)
    assert not connected._thread.is_alive()
    assert "did not answer" in caplog.text


def test_a_node_that_has_no_room_for_a_connection_is_told_later_what_is_over(
    peer, connected, monkeypatch, wait_until
):
    tries: list[int] = []

    def refuse(path: str, number: int) -> Connection:
        tries.append(number)
        error = PeerUnreachable(f"{path}: try again")
        raise error from BlockingIOError()

    monkeypatch.setattr(link, "Connection", refuse)
    peer.drop()
    wait_until(lambda: tries)
    connected.close()
    count = len(tries)
    wait_until(lambda: len(tries) > count)
    monkeypatch.undo()

    wait_until(lambda: any(isinstance(message, wire.Settled) for message in peer.heard))
    assert connected._thread is not None
    connected._thread.join(TIMEOUT_S)
    assert not connected._thread.is_alive()


def test_a_child_has_no_socket_that_a_thread_of_its_parent_was_connecting(peer, tmp_path):
    peer.answer = lambda request: None
    opened = Connection(peer.path, 1)
    inode = os.fstat(opened._socket.fileno()).st_ino
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        found = [os.fstat(int(entry.name)).st_ino for entry in _own_descriptors()]
        os._exit(1 if inode in found else 0)
    os.close(read_end)
    os.close(write_end)

    assert os.waitpid(child, 0)[1] == 0
    opened.close("")


def _own_descriptors() -> list[Path]:
    entries = list(Path("/proc/self/fd").iterdir())
    return [entry for entry in entries if entry.exists()]


# Descriptors


class Extents:
    """Answers one FetchExtents with what a test says."""

    def __init__(self, path: Path, frame: bytes, descriptors: int) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._frame, self._count = frame, descriptors
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(1 << 16)
            memory = [os.memfd_create("extent") for _ in range(self._count)]
            half = len(self._frame) // 2
            socket.send_fds(connection, [self._frame[:half]], memory)
            connection.sendall(self._frame[half:])
            for descriptor in memory:
                os.close(descriptor)

    def close(self) -> None:
        self._thread.join(TIMEOUT_S)
        self._listener.close()


@pytest.mark.parametrize(
    ("frame", "count", "kept", "error"),
    [
        (wire.encode(wire.ExtentsFollow([1, 2], [0])), 2, 2, None),
        (wire.encode(wire.ExtentsFollow([1, 2])), 1, 1, ProtocolError),
        (wire.encode(wire.Pong(1)), 2, 2, ProtocolError),
        (wire.encode(wire.Failure(1, "protocol", "no such session")), 0, 0, ProtocolError),
        (wire.encode(wire.ExtentsFollow([1, 2]))[:-1], 2, 2, PeerUnreachable),
        (struct.pack("<I", 1 << 30) + b"x", 0, 0, ProtocolError),
    ],
    ids=["as asked", "one is missing", "another answer", "refused", "cut off", "no frame"],
)
def test_every_descriptor_that_came_is_handed_over_whatever_else_came(
    tmp_path, frame, count, kept, error
):
    node = Extents(tmp_path / "node.sock", frame, count)
    got: list[int] = []
    try:
        if error is None:
            assert fetch_extents(node.path, b"s", b"b", [1, 2], [0, 5], got.append) == [0]
        else:
            with pytest.raises(error):
                fetch_extents(node.path, b"s", b"b", [1, 2], [0, 5], got.append)
    finally:
        node.close()

    assert len(got) == kept
    assert not any(os.get_inheritable(descriptor) for descriptor in got)
    for descriptor in got:
        os.close(descriptor)
