"""Connections by hand: what a well-behaved client would not do, or only by bad luck."""

import contextlib
import json
import select
import socket

from kvstore.protocol import wire
from kvstore.server.handshakes import SILENT_MAX
from tests.conftest import WaitUntil
from tests.faults.conftest import Daemon, Scene
from tests.open_files import open_files

ANSWER_WAIT_S = 5.0
HELLO = wire.Hello(1, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, "by hand")


def connect(daemon: Daemon) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_WAIT_S)
    try:
        connection.connect(daemon.address.removeprefix("unix://"))
    except OSError:
        connection.close()
        raise
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
    return sum(link == "anon_inode:[pidfd]" for _, link in open_files(daemon.pid))


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


def patiently(daemon: Daemon, wait_until: WaitUntil) -> socket.socket:
    """Connect, also while the kernel has more who want to than it keeps."""
    made: list[socket.socket] = []

    def tried() -> bool:
        with contextlib.suppress(BlockingIOError):
            made.append(connect(daemon))
        return bool(made)

    wait_until(tried, 10.0, "somebody is let in")
    return made[0]


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


def test_who_keeps_long_messages_half_sent_is_cut_off_and_nobody_else(frail: Scene):
    """256 MiB of them may be under way."""
    head = b"\x96\x05\x02\x00\x91\x00\xc6" + (wire.FRAME_BYTES_MAX - 12).to_bytes(4, "big")
    half = wire.FRAME_BYTES_MAX.to_bytes(4, "little") + head + bytes(wire.FRAME_BYTES_MAX - 4096)
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(connect(frail.daemon))
        honest.sendall(wire.encode(HELLO))
        assert isinstance(receive(honest), wire.Welcome)
        hostile = [stack.enter_context(connect(frail.daemon)) for _ in range(16)]
        for one in hostile:
            one.sendall(wire.encode(HELLO) + half)
            assert isinstance(receive(one), wire.Welcome)
        keys = bytes(range(1, 33)) * wire.BATCH_KEYS_MAX
        honest.sendall(wire.encode(wire.Lookup(2, 0, [0], keys)))

        assert isinstance(receive(honest), wire.Failure), "it has no such space, and was heard"
        honest.sendall(wire.encode(wire.Ping(3)))
        assert isinstance(receive(honest), wire.Pong)
        told = select.select(hostile, [], [], ANSWER_WAIT_S)[0]
        assert len(told) == 1
        refused = receive(told[0])
        assert isinstance(refused, wire.Failure)
        assert "too many long messages" in refused.message


def test_who_connects_and_says_nothing_keeps_nobody_out(frail: Scene, wait_until: WaitUntil):
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(patiently(frail.daemon, wait_until)) for _ in range(300)]
        for _ in range(3):
            honest = stack.enter_context(patiently(frail.daemon, wait_until))
            honest.sendall(wire.encode(HELLO))
            assert isinstance(receive(honest), wire.Welcome)
        turned_away = select.select(silent, [], [], 0)[0]
        assert len(turned_away) >= len(silent) - SILENT_MAX, "they made room before their time"
        answer = receive(silent[0])
        assert isinstance(answer, wire.Failure)
        assert "no message in time" in answer.message
