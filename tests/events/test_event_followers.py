"""Goal: what one follower of events does costs that follower, never the publisher or the rest."""

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvstore.events import connection, zmtp
from kvstore.events import server as eventserver
from kvstore.events.publisher import (
    END_OF_REPLAY,
    ClearedEvent,
    EventPublisher,
    FollowerAccess,
    RemovedEvent,
    StoredEvent,
)
from kvstore.protocol.errors import InvalidArgument

TOPIC = b"kvstore@n@aa"
WAIT_S = 10.0


class Follower:
    """A connection that speaks only when it is told to, and reads only when it is told to."""

    def __init__(
        self, endpoint: str | None, side: zmtp.Side = zmtp.SUB, token: bytes = b""
    ) -> None:
        assert endpoint is not None
        scheme, _, where = endpoint.partition("://")
        if scheme == "ipc":
            self.raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.raw.connect(where)
        else:
            host, _, port = where.rpartition(":")
            self.raw = socket.create_connection((host, int(port)))
        self.raw.settimeout(WAIT_S)
        self.peer = zmtp.ZmtpPeer(side, zmtp.MessageLimits(8 << 20, 8), token=token)
        self.messages: list[zmtp.Message] = []

    def meet(self) -> "Follower":
        """Shake hands."""
        while not self.peer.ready:
            self.messages += self.peer.feed(self.raw.recv(1 << 16))
            self.raw.sendall(self.peer.outgoing())
        return self

    def say(self, *frames: bytes) -> None:
        self.raw.sendall(zmtp.encode(frames))

    def hear(self) -> zmtp.Message:
        """The next message."""
        while not self.messages:
            data = self.raw.recv(1 << 16)
            assert data, "cut off"
            self.messages += self.peer.feed(data)
        return self.messages.pop(0)

    def is_cut_off(self) -> bool:
        """Wait for the end of the connection."""
        try:
            while self.raw.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        return True

    def close(self) -> None:
        self.raw.close()


Follow = Callable[..., Follower]


@pytest.fixture
def follow() -> Iterator[Follow]:
    """Connections that are closed with the test."""
    made: list[Follower] = []

    def follower(*args: object, **kwargs: object) -> Follower:
        made.append(Follower(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield follower
    for one in made:
        one.close()


@contextmanager
def publishing(folder: Path, **options: object) -> Iterator[EventPublisher]:
    where = f"ipc://{folder}/events"
    with EventPublisher(where, f"{where}.replay", topic=TOPIC, **options) as publisher:  # type: ignore[arg-type]
        yield publisher


def serves(publisher: EventPublisher, follow: Follow) -> bool:
    """Somebody new gets a batch."""
    one = follow(publisher.bound_endpoint).meet()
    one.say(b"\x01")
    one.raw.sendall(zmtp.PING)
    assert one.raw.recv(100) == b"\x04\x05\x04PONG"  # so the subscription has been taken note of
    publisher.publish([ClearedEvent()])
    heard = one.hear()
    one.close()
    return heard[0] == TOPIC


STRANGE = {
    "no zmq": (b"GET / HTTP/1.1\r\n\r\n", "greeting"),
    "a message without an end": (b"\x01\x01x" * 9, "too_long"),
    "a long message": (b"\x02" + (1 << 40).to_bytes(8, "big"), "too_long"),
    "no subscription": (b"\x00\x03abc", "request"),
    "many subscriptions": (
        b"".join(zmtp.encode([b"\x01" + bytes([n])]) for n in range(17)), "request",
    ),
    "talk": (b"\x00\x01\x01\x00\x01\x00" * 5_000, "flood"),
    "pings": (zmtp.PING * 20_000, "flood"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGE)
def test_what_no_follower_says_ends_its_own_connection_and_is_counted(
    kind, tmp_path, follow, wait_until
):
    data, cause = STRANGE[kind]
    with publishing(tmp_path) as publisher:
        rude = follow(publisher.bound_endpoint)
        if cause != "greeting":
            rude.meet()
        with contextlib.suppress(OSError):  # it is cut off before it has said all
            rude.raw.sendall(data)

        assert rude.is_cut_off()
        wait_until(lambda: publisher.stats().followers == 0)
        assert publisher._server.faults.counts == {cause: 1}
        assert publisher.stats().followers_cut == 1
        assert serves(publisher, follow)


def test_who_does_not_finish_its_handshake_is_sent_away(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(connection, "_HANDSHAKE_S", 0.05)
    monkeypatch.setattr(eventserver, "_CHECK_S", 0.01)
    with publishing(tmp_path) as publisher:
        silent = follow(publisher.bound_endpoint)

        assert silent.is_cut_off()
        assert publisher._server.faults.counts == {"handshake": 1}


def test_when_all_places_are_taken_the_slowest_handshake_makes_room_and_followers_stay(
    tmp_path, follow, monkeypatch, wait_until
):
    monkeypatch.setattr(eventserver, "PEERS_MAX", 4)
    with publishing(tmp_path) as publisher:
        friend = follow(publisher.bound_endpoint).meet()
        friend.say(b"\x01")
        silent = [follow(publisher.bound_endpoint) for _ in range(3)]
        wait_until(lambda: publisher.stats().followers == 4)
        others = [follow(publisher.bound_endpoint) for _ in range(5)]

        assert all(one.is_cut_off() for one in (*silent, *others[:2]))
        for one in others[2:]:
            one.meet()
        refused = follow(publisher.bound_endpoint)
        assert refused.is_cut_off()
        publisher.publish([ClearedEvent()])
        assert friend.hear()[0] == TOPIC
        assert publisher._server.faults.counts["full"] == 6


def test_who_takes_nothing_loses_batches_and_is_cut_off_at_last(
    tmp_path, follow, monkeypatch, wait_until
):
    monkeypatch.setattr(eventserver, "_CHECK_S", 0.01)
    with publishing(tmp_path, queue_max=2_000) as publisher:
        deaf = follow(publisher.bound_endpoint).meet()
        deaf.say(b"\x01")
        deaf.raw.sendall(zmtp.PING)
        deaf.raw.recv(100)
        big = RemovedEvent(block_hashes=[bytes(32)] * 2_000, medium="CPU")  # 68 kB
        for _ in range(200):
            publisher.publish([big])
        wait_until(lambda: publisher.stats().batches_lost > 0)

        held = max(f.waiting_bytes for f in list(publisher._server._followers.values()))
        assert held <= eventserver._LIVE_BYTES_MAX
        monkeypatch.setattr(connection, "_DEAF_S", 0.2)
        wait_until(lambda: publisher.stats().followers == 0)
        assert publisher._server.faults.counts == {"deaf": 1}
        assert serves(publisher, follow)


def test_a_replay_waits_where_it_is_kept_and_not_for_each_who_asked(tmp_path, follow, wait_until):
    big = RemovedEvent(block_hashes=[bytes(32)] * 2_000, medium="CPU")
    with publishing(tmp_path, queue_max=500) as publisher:
        for _ in range(300):
            publisher.publish([big])
        wait_until(lambda: publisher.stats().batches_sent == 300)
        asking = [follow(publisher.bound_replay_endpoint, zmtp.DEALER).meet() for _ in range(4)]
        for one in asking:
            one.say(b"", bytes(8))
        for one in asking:
            assert one.hear()[2] == bytes(8)

        held = [f.waiting_bytes for f in publisher._server._followers.values()]
        assert max(held) <= eventserver._REPLAY_BYTES + 70_000
        numbers = [asking[0].hear()[2] for _ in range(300)]
        assert numbers[-1] == END_OF_REPLAY
        assert numbers[:-1] == [n.to_bytes(8, "big") for n in range(1, 300)]


def test_a_publisher_without_descriptors_lets_nobody_in_and_lives_on(spawn, tmp_path, follow):
    """libzmq ends the whole process there."""
    code = (
        "import resource, sys, threading\n"
        "from kvstore.events.publisher import ClearedEvent, EventPublisher\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, hard))\n"
        "where = sys.argv[1]\n"
        "with EventPublisher(where, where + '.replay', topic=b'kvstore@n@aa') as publisher:\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
        "    while True:\n"
        "        publisher.publish([ClearedEvent()])\n"
        "        threading.Event().wait(0.01)\n"
    )
    where = f"ipc://{tmp_path}/events"
    process = spawn([sys.executable, "-c", code, where], ready="ready")
    ends = (where, f"{where}.replay")
    crowd = [follow(ends[n % 2], (zmtp.SUB, zmtp.DEALER)[n % 2]) for n in range(80)]
    for one in crowd[:20]:
        with contextlib.suppress(OSError):  # who is slow makes room for others
            one.meet()
    for one in crowd:
        one.close()
    later = follow(where).meet()
    later.say(b"\x01")

    assert later.hear()[0] == TOPIC
    assert process.returncode is None
    assert "no_descriptor" in process.stderr


def test_a_token_is_asked_for_over_tcp_and_a_unix_socket_has_permissions(tmp_path, follow):
    token, unix = b"sixteen characters", f"ipc://{tmp_path}/events"
    with EventPublisher(
        unix, "tcp://127.0.0.1:*", topic=TOPIC, access=FollowerAccess(token)
    ) as publisher:
        assert serves(publisher, follow)
        asking = follow(publisher.bound_replay_endpoint, zmtp.DEALER, token).meet()
        asking.say(b"", bytes(8))
        assert asking.hear()[2] == bytes(8)
        stranger = follow(publisher.bound_replay_endpoint, zmtp.DEALER, b"another token, as long")
        with pytest.raises(zmtp.PeerError, match="refuses"):
            stranger.meet()


def test_a_token_that_no_handshake_can_carry_is_refused(tmp_path):
    with pytest.raises(InvalidArgument) as refused:
        EventPublisher(f"ipc://{tmp_path}/events", access=FollowerAccess(b"x" * 256))

    assert refused.value.field == "access"


def test_much_at_once_is_published_in_pieces_that_say_the_same(tmp_path, follow, wait_until):
    hashes = [n.to_bytes(32, "big") for n in range(40_000)]
    tokens = list(range(80_000))
    stored = StoredEvent(
        block_hashes=hashes, parent_block_hash=b"p" * 32, token_ids=tokens, block_size=2,
        medium="CPU", space="ab" * 32, shard=3,
    )  # fmt: skip
    removed = RemovedEvent(block_hashes=hashes, medium="CPU", space="ab" * 32, shard=3)
    with publishing(tmp_path) as publisher:
        publisher.publish([stored, ClearedEvent(), removed, ClearedEvent()])
        wait_until(lambda: publisher.stats().batches_sent == publisher.sequence_next)
        kept = list(publisher._server._kept._batches)

    batches = [msgspec.msgpack.decode(one.payload)[1] for one in kept]
    events = [event for batch in batches for event in batch]
    assert len(batches) > 4
    assert all(len(one.payload) < 1 << 20 for one in kept)
    ones = [e for e in events if e["type"] == "BlockStored"]
    others = [e for e in events if e["type"] == "BlockRemoved"]
    assert [h for e in ones for h in e["block_hashes"]] == hashes
    assert [t for e in ones for t in e["token_ids"]] == tokens
    assert [e["parent_block_hash"] for e in ones] == [
        b"p" * 32, *(e["block_hashes"][-1] for e in ones[:-1]),
    ]  # fmt: skip
    assert [h for e in others for h in e["block_hashes"]] == hashes
    assert {(e["shard"], e["space"]) for e in (*ones, *others)} == {(3, "ab" * 32)}
    kinds = [e["type"] for e in events]
    assert kinds == [
        *["BlockStored"] * len(ones), "AllBlocksCleared", *["BlockRemoved"] * len(others),
        "AllBlocksCleared",
    ]  # fmt: skip
