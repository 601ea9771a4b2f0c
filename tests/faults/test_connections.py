"""Connections by hand: what a well-behaved client would not do, or only by bad luck."""

import json
import socket
from pathlib import Path

from kvstore import wire
from kvstore.server.socket import HANDSHAKE_TIMEOUT_S, HANDSHAKES_MAX
from tests.conftest import WaitUntil
from tests.faults.conftest import Daemon, Scene

ANSWER_WAIT_S = 5.0
HELLO = wire.Hello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "by hand")


def connect(daemon: Daemon) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_WAIT_S)
    connection.connect(daemon.address.removeprefix("unix://"))
    return connection


def receive(connection: socket.socket) -> wire.Answer:
    length = wire.frame_length(connection.recv(4, socket.MSG_WAITALL))
    return wire.decode_answer(connection.recv(length, socket.MSG_WAITALL))


def connections(connection: socket.socket) -> int:
    connection.sendall(wire.encode(wire.Stats(2)))
    answer = receive(connection)
    assert isinstance(answer, wire.StatsReply)
    found: int = json.loads(answer.json)["connections"]
    return found


def watched(daemon: Daemon) -> int:
    """How many processes the daemon asked the kernel to tell the end of."""
    links = (str(entry.readlink()) for entry in Path(f"/proc/{daemon.pid}/fd").iterdir())
    return sum(link == "anon_inode:[pidfd]" for link in links)


def test_a_process_that_swaps_its_connections_stays_watched(scene: Scene, wait_until: WaitUntil):
    before = watched(scene.daemon)
    old = connect(scene.daemon)
    try:
        old.sendall(wire.encode(HELLO))
        assert isinstance(receive(old), wire.Welcome)
        for _ in range(200):
            new = connect(scene.daemon)
            new.sendall(wire.encode(HELLO))
            old.close()
            old = new
            assert isinstance(receive(new), wire.Welcome)
            wait_until(lambda new=new: connections(new) == 1)
            assert watched(scene.daemon) == before + 1
    finally:
        old.close()


def test_connections_that_say_nothing_keep_nobody_out(scene: Scene):
    silent: list[socket.socket] = []
    try:
        for _ in range(HANDSHAKES_MAX - 16):
            silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            silent[-1].connect(scene.daemon.address.removeprefix("unix://"))
        last = connect(scene.daemon)
        silent.append(last)
        last.settimeout(HANDSHAKE_TIMEOUT_S / 2)
        last.sendall(wire.encode(HELLO))
        assert isinstance(receive(last), wire.Welcome)
    finally:
        for one in silent:
            one.close()


def test_what_is_sent_behind_hello_without_waiting_is_answered_in_order(scene: Scene):
    for size in (1, 7, 1000):
        connection = connect(scene.daemon)
        try:
            frames = b"".join(map(wire.encode, [HELLO, wire.Stats(2), wire.Stats(3)]))
            for start in range(0, len(frames), size):
                connection.sendall(frames[start : start + size])
            answers = [receive(connection) for _ in range(3)]
        finally:
            connection.close()

        assert isinstance(answers[0], wire.Welcome)
        assert [getattr(answer, "id", None) for answer in answers] == [1, 2, 3]
