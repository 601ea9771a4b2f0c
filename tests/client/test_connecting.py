"""Goal: a link comes back by itself, tells what is over, and leaves nothing open behind it."""

import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from kvstore.client import endpoint, link
from kvstore.client.endpoint import fetch_extents, nobody_listens, open_socket
from kvstore.client.exchange import Connection
from kvstore.client.link import Link
from kvstore.protocol import wire
from kvstore.protocol.errors import PeerUnreachable, ProtocolError, TransferTimeout
from tests.client.peer import SHORT_S, TIMEOUT_S, answer

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


def test_the_socket_of_a_node_that_is_not_there_is_named_once(tmp_path):
    path = str(tmp_path / "nobody.sock")
    made = Link(path, "engine")
    with pytest.raises(PeerUnreachable) as refused:
        made.request(wire.Ping(0), TIMEOUT_S)
    made.close()

    assert str(refused.value).count(path) == 1


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
        (wire.encode(wire.ExtentsFollow([2, 1])), 2, 2, ProtocolError),
        (wire.encode(wire.Pong(1)), 2, 2, ProtocolError),
        (wire.encode(wire.Failure(1, "protocol", "no such session")), 0, 0, ProtocolError),
        (wire.encode(wire.ExtentsFollow([1, 2]))[:-1], 2, 2, PeerUnreachable),
        (struct.pack("<I", 1 << 30) + b"x", 0, 0, ProtocolError),
    ],
    ids=[
        "as asked",
        "one is missing",
        "in another order",
        "another answer",
        "refused",
        "cut off",
        "no frame",
    ],
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
