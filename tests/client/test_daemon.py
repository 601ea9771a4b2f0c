"""Goal: the daemon as engines, operators and strangers meet it: socket, HTTP, events."""

import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvstore.events.publisher import EventBatch, RemovedEvent, StoredEvent
from kvstore.mover.kvpool import KVPool
from kvstore.protocol import wire
from kvstore.server import client
from tests.client.conftest import (
    FLAT,
    SIZE,
    TIMEOUT_S,
    Daemon,
    Pool,
    content,
    identity,
    new_keys,
    open_space,
    still_serves,
)


class Raw:
    """A stranger on the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(str(path))
        self._reader = wire.FrameReader()
        self._bodies: list[bytes] = []

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> wire.Answer | None:
        """The next answer; None when the daemon has closed the connection."""
        while not self._bodies:
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._bodies += self._reader.feed(data)
        return wire.decode_answer(self._bodies.pop(0))

    def hello(self, major: int = wire.PROTOCOL_MAJOR) -> wire.Answer | None:
        self.send(wire.encode(wire.Hello(1, major, 0, "stranger")))
        return self.answer()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def raw(daemon: Daemon) -> Iterator[Raw]:
    stranger = Raw(daemon.socket)
    yield stranger
    stranger.close()


# Strangers

# A Hello with one field more than we know: a later minor version may have it, so it is skipped.
DEEP = b"\x98\x01\x01\x01\x00\xa1e\xc4\x00\xc4\x00" + b"\x91" * 50_000
HOSTILE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(64),
    "nested without end": struct.pack("<I", len(DEEP)) + DEEP,
    "oversized": struct.pack("<I", wire.FRAME_BYTES_MAX + 1) + b"x",
    "no hello": wire.encode(wire.Lookup(1, 0, [0], bytes(32))),
    "an answer": wire.encode(wire.Found(1, 2, 3)),
    "extents of nobody": wire.encode(wire.FetchExtents(b"guess", [0])),
    "half a frame": struct.pack("<I", 100) + b"abc",
}


@pytest.mark.parametrize("first", HOSTILE)
def test_garbage_as_a_first_message_is_answered_and_cut_off(daemon, raw, first):
    raw.send(HOSTILE[first])
    raw._socket.shutdown(socket.SHUT_WR)

    answer = raw.answer()

    assert answer is None or isinstance(answer, wire.Failure)
    if isinstance(answer, wire.Failure):
        assert answer.code == "protocol"
        assert raw.answer() is None
    assert still_serves(daemon)


@pytest.mark.parametrize("later", ["http", "zeros", "nested without end", "oversized", "an answer"])
def test_garbage_after_hello_is_cut_off(daemon, raw, later):
    assert isinstance(raw.hello(), wire.Welcome)
    raw.send(HOSTILE[later])

    answer = raw.answer()
    assert isinstance(answer, wire.Failure)
    assert answer.code == "protocol"
    assert raw.answer() is None
    assert still_serves(daemon)


def test_a_client_of_another_major_version_is_told_both_versions(daemon, raw):
    answer = raw.hello(major=wire.PROTOCOL_MAJOR + 1)

    assert isinstance(answer, wire.Failure)
    assert answer.code == "protocol"
    assert f"{wire.PROTOCOL_MAJOR + 1}.0" in answer.message
    assert f"{wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}" in answer.message


def test_strangers_that_leave_in_the_middle_leave_nothing(daemon, wait_until):
    wait_until(lambda: daemon.ask("/v1/stats")["connections"] == 0)
    for message in (b"", b"\x01", wire.encode(wire.Hello(1, 1, 0, "brief"))):
        stranger = Raw(daemon.socket)
        stranger.send(message)
        stranger.close()

    wait_until(lambda: daemon.ask("/v1/stats")["connections"] == 0)
    assert still_serves(daemon)


def test_messages_sent_with_hello_in_one_go_are_answered_in_order(daemon, raw):
    raw.send(
        wire.encode(wire.Hello(1, wire.PROTOCOL_MAJOR, 0, "eager"))
        + wire.encode(wire.OpenSpace(2, identity(), [FLAT]))
        + wire.encode(wire.Stats(3))
    )

    answers = [raw.answer() for _ in range(3)]
    assert [type(answer) for answer in answers] == [
        wire.Welcome, wire.SpaceOpened, wire.StatsReply
    ]  # fmt: skip
    assert [answer.id for answer in answers] == [1, 2, 3]


def test_only_the_owner_may_use_the_socket(daemon):
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600


# Engines


def test_two_engines_share_pages(daemon):
    with daemon.connect(name="first") as first, daemon.connect(name="second") as second:
        mine = open_space(first)
        theirs = open_space(second, model=mine.identity.model)
        keys = new_keys(mine, 4)
        source, target = Pool(4, SIZE // 4, 4), Pool(4, SIZE // 4, 4)
        source.fill(3)

        mine.extract_from_kvpool(source.kvpool, [2, 0, 3, 1], keys).result(TIMEOUT_S)
        result = theirs.restore_to_kvpool(keys, target.kvpool, [1, 2, 3, 0]).result(TIMEOUT_S)

        assert result.pages == 4
        for here, there in zip([2, 0, 3, 1], [1, 2, 3, 0], strict=True):
            for one, other in zip(source.planes, target.planes, strict=True):
                assert bytes(one[here]) == bytes(other[there])
        assert {"first", "second"} <= {
            session["name"] for session in daemon.ask("/v1/stats")["sessions"]
        }


def test_the_ranks_of_one_engine_are_one_session_and_hit_together(daemon):
    ranks = [msgspec.structs.replace(FLAT, heads=(2 * at, 2 * at + 2)) for at in (0, 1)]
    with daemon.connect(name="tp2") as leader:
        with daemon.connect(name="tp2", session=leader.session_token) as follower:
            assert follower.session_token == leader.session_token
            scheduler = open_space(leader, *ranks)
            model = scheduler.identity.model
            first = open_space(leader, ranks[0], model=model)
            second = open_space(follower, ranks[1], model=model)
            keys = new_keys(scheduler, 3)

            first.put(keys, content(3, SIZE))
            assert scheduler.lookup(keys).pages == 0, "rank 1 has nothing yet"
            second.put(keys[:2], content(2, SIZE, seed=2))
            assert scheduler.lookup(keys).pages == 2

            sessions = daemon.ask("/v1/stats")["sessions"]
            (mine,) = [session for session in sessions if session["name"] == "tp2"]
            assert mine["processes"] == 2
        assert scheduler.lookup(keys).pages == 2, "its rank left, its pages stay"


def test_a_refusal_reaches_the_caller_with_its_field(daemon):
    with daemon.connect() as store:
        space = open_space(store)
        pool = KVPool((0, 0), 7, 7, 1)
        with pytest.raises(Exception, match="block_bytes"):
            space.restore_to_kvpool(new_keys(space, 1), pool, [0])


# HTTP


def test_health_readiness_metrics_and_statistics_are_served(daemon):
    assert daemon.ask("/healthz") == {"status": "ok"}
    ready = {"status": "ready", "withheld_bytes": 0, "ssd": "off", "unwatched_processes": 0,
             "cluster": "off", "membership": "off", "directory": "off", "registered_bytes": 0,
             "registered_huge_bytes": 0}  # fmt: skip
    assert daemon.ask("/readyz") == ready
    with daemon.connect(name="measured") as store:
        space = open_space(store)
        keys = new_keys(space, 3)
        space.put(keys, content(3, SIZE))
        space.lookup(keys)
        store.report_prefill(0.0005)
        stats = store.stats()
        assert stats["host"]["capacity_bytes"] == 64 << 20
        (mine,) = [one for one in stats["sessions"] if one["name"] == "measured"]
        assert mine["prefill_s_per_token"] == 0.0005
        assert space.identity.digest.hex() in {one["space"] for one in stats["spaces"]}
        assert daemon.ask("/v1/stats").keys() == stats.keys()
    metrics = daemon.ask("/metrics").decode()
    assert 'kvstore_host_bytes{state="ready"}' in metrics
    assert "kvstore_stored_pages_total" in metrics


def test_pages_are_listed_a_stretch_at_a_time(daemon):
    with daemon.connect() as store:
        space = open_space(store)
        keys = new_keys(space, 7)
        space.put(keys, content(7, SIZE))
        label = space.identity.digest.hex()
        rows, cursor, stretches = [], 0, 0
        while cursor is not None:
            page = daemon.ask(f"/v1/pages?space={label}&limit=3&cursor={cursor}")
            assert page["total"] == 7
            rows += page["pages"]
            cursor, stretches = page["next"], stretches + 1

    assert stretches == 3
    assert [row["key"] for row in rows] == [key.hex() for key in keys]
    assert [row["parent"] for row in rows] == [None, *(key.hex() for key in keys[:-1])]
    for row in rows:
        assert row["tier"] == "host"
        assert row["shards"]["0"]["state"] == "ready"
        assert row["shards"]["0"]["bytes"] == SIZE
        assert len(row["shards"]["0"]["digest"]) == 32


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/pages?space=unknown", 404),
        ("/v1/pages", 422),
        ("/v1/pages?space=x&limit=0", 422),
        ("/v1/pages?space=x&limit=100000", 422),
        ("/v1/pages?space=x&cursor=-1", 422),
        ("/nothing", 404),
    ],
)
def test_what_http_cannot_answer_has_a_status(daemon, path, status):
    assert client.send(daemon.admin, "GET", path, timeout_s=TIMEOUT_S)[0] == status


# Events


def test_stored_and_removed_pages_are_published(daemon, wait_until):
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    try:
        subscriber.rcvtimeo = int(TIMEOUT_S * 1000)
        subscriber.subscribe(b"")
        subscriber.connect(daemon.events)
        with daemon.connect() as store:
            space = open_space(store)
            label = space.identity.digest.hex()
            # A PUB socket drops what it sends before a subscription has come: knock until heard.
            knock = open_space(store)
            knocks = iter(range(10_000))
            wait_until(
                lambda: (
                    knock.put(new_keys(knock, 1, 100 * next(knocks)), content(1, SIZE))
                    and subscriber.poll(20)
                )
            )
            keys = new_keys(space, 3)
            space.put(keys, content(3, SIZE), ttl_s=0.02)
            mine: list[StoredEvent | RemovedEvent] = []
            sequences: list[int] = []
            while not mine or not isinstance(mine[-1], RemovedEvent):
                topic, sequence, payload = subscriber.recv_multipart()
                batch = msgspec.msgpack.decode(payload, type=EventBatch)
                sequences.append(int.from_bytes(sequence, "big"))
                mine += [e for e in batch.events if getattr(e, "space", "") == label]
    finally:
        subscriber.close(linger=0)
        context.term()

    stored, removed = mine
    assert isinstance(stored, StoredEvent)
    assert topic.startswith(b"kvstore@local@")
    assert stored.block_hashes == list(keys)
    assert stored.parent_block_hash is None
    assert stored.token_ids == [], "prompts are nobody's business unless events.tokens says so"
    assert (stored.block_size, stored.medium, stored.shard) == (4, "CPU", 0)
    assert removed.block_hashes == list(reversed(keys)), "leaves first"
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
