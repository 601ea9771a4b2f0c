"""Goal: SSD directories and clients from before pages were kept as runs still work.

``protocol_1_2`` was written by commit 80766266 (version 0.1.0, protocol 1.2), on x86-64:

* ``ssd.tar.xz``: two directories that a node of two ranks left when it was killed: four sealed
  segments and an open one of 256 KiB, ``ssd.write=through``, ``ssd.sync=always``. All puts were
  durable: prompt ``LONG`` of both ranks; ``BRANCH``, which leaves it after 20 pages; a prompt of
  another model. Then an operator evicted page 36 of ``LONG`` and what follows, and two of these
  pages were put again by rank 0, with other bytes.
* ``frames.txt``: what its client sent in ``test_a_client_of_protocol_1_2_...``, one frame a line,
  in hex.
"""

import hashlib
import mmap
import os
import socket
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvstore.client.space import Space
from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity
from kvstore.tier.directories import Directory
from kvstore.tier.record import IDENTITY_NAME, decode_identity
from kvstore.tier.ssd import SSDLog
from tests.client.conftest import READY, TIMEOUT_S, Daemon, arguments
from tests.conftest import Spawn

FOLDER = Path(__file__).parent / "protocol_1_2"
RANKS = [ShardSpec(layout=CanonicalLayout(64), layers=(0, 2), heads=(at, at + 1)) for at in (0, 1)]
PAGE_BYTES = 4096
LONG = range(160)
BRANCH = [*range(80), *range(1000, 1040)]
EXTENT_BYTES = 4 << 20


def identity(model: str) -> SpaceIdentity:
    return SpaceIdentity(model=model, kv_dtype="float32", page_tokens=4)


def content(model: str, rank: int, key: bytes, version: int = 0) -> bytes:
    """The bytes of a page; its second put had other ones."""
    seed = hashlib.sha256(f"{model} {rank} {key.hex()} {version}".encode()).digest()
    return seed * (PAGE_BYTES // len(seed))


def node_of_today(spawn: Spawn, folder: Path) -> Daemon:
    """A node of today on two SSD directories."""
    command = arguments(
        folder / "kv.sock", node__name="node-of-old", host__capacity_bytes="16MiB",
        host__extent_bytes=EXTENT_BYTES, ssd__directories=f"{folder}/a,{folder}/b",
        ssd__capacity_bytes="2MiB", ssd__segment_bytes="256KiB", ssd__sync="always",
        ssd__write="through",
    )  # fmt: skip
    return Daemon(spawn(command, ready=READY))


def read(space: Space, tokens: Any, rank: int) -> list[bytes]:
    """The pages of a prompt that the node has for a rank."""
    keys = space.page_keys(np.asarray(tokens))
    out = [np.zeros(PAGE_BYTES, dtype=np.uint8) for _ in keys]
    space.prefetch(keys, rank).result()
    return [bytes(page) for page in out[: space.get(keys, out, rank)]]


def expected(space: Space, tokens: Any, rank: int, pages: int) -> list[bytes]:
    keys, model = space.page_keys(np.asarray(tokens)), space.identity.model
    again = 36 if tokens is LONG and rank == 0 else pages
    return [content(model, rank, key, int(at >= again)) for at, key in enumerate(keys[:pages])]


def check_old_pages(daemon: Daemon) -> None:
    with daemon.connect(name="new") as store:
        space, other = (
            store.space(identity("first"), RANKS),
            store.space(identity("second"), RANKS[:1]),
        )
        assert read(space, LONG, 0) == expected(space, LONG, 0, 38)
        assert read(space, LONG, 1) == expected(space, LONG, 1, 36)
        assert read(space, BRANCH, 0) == expected(space, BRANCH, 0, 30)
        assert read(space, BRANCH, 1) == expected(space, BRANCH, 1, 20)
        assert read(other, range(40), 0) == expected(other, range(40), 0, 10)
        long = space.page_keys(np.asarray(LONG))
        assert space.lookup(long).pages == 36, "the pages that were evicted have not come back"
        assert space.lookup(long, shards=[0]).pages == 38


def test_an_ssd_log_from_before_runs_is_read_and_goes_on(spawn: Spawn, tmp_path: Path):
    with tarfile.open(FOLDER / "ssd.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")

    daemon = node_of_today(spawn, tmp_path)

    check_old_pages(daemon)
    with daemon.connect(name="new") as store:
        space = store.space(identity("first"), RANKS)
        more = space.page_keys(np.arange(5000, 5080))
        pages = [content("first", 0, key) for key in more]
        assert space.put(more, pages, durable=True).stored == 20
    daemon.process.kill()

    daemon = node_of_today(spawn, tmp_path)

    check_old_pages(daemon)
    with daemon.connect(name="new") as store:
        space = store.space(identity("first"), RANKS)
        assert read(space, range(5000, 5080), 0) == pages


def test_a_start_changes_no_segment_of_a_log_from_before_runs(tmp_path: Path):
    """Nothing is converted, so a crash in the middle of a start loses nothing.

    Only the identities get fields that earlier versions ignore; they are replaced as a whole.
    """
    with tarfile.open(FOLDER / "ssd.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    directories = [Directory(tmp_path / name, 1 << 20) for name in ("a", "b")]

    log = SSDLog("node-of-old", directories, 256 << 10, threads=0)
    found = log.recover()
    log.close()

    assert [len(one.entries) > 0 for one in found.segments] == [True] * 5
    assert not found.untouched
    for path, content_before in before.items():
        if path.name == IDENTITY_NAME:
            was, now = decode_identity(content_before), decode_identity(path.read_bytes())
            assert now == replace(was, id=now.id, directories=now.directories)
            assert len(now.id) == 16
        else:
            assert path.read_bytes() == content_before
    assert before.keys() == {path for path in tmp_path.rglob("*") if path.is_file()}


# ---- a client of protocol 1.2 ---------------------------------------------------------------


class Welcome(msgspec.Struct, array_like=True, tag=2):
    """As in protocol 1.2; so are the other answers."""

    id: int
    major: int
    minor: int
    boot: bytes
    node: str
    session: bytes
    extent_bytes: int
    quota_bytes: int


class SpaceOpened(msgspec.Struct, array_like=True, tag=4):
    id: int
    space: int
    shards: list[int]


class Found(msgspec.Struct, array_like=True, tag=6):
    id: int
    pages: int
    pending: int
    on_disk: int = 0


class Acquired(msgspec.Struct, array_like=True, tag=8):
    id: int
    addresses: bytes
    digests: bytes
    more: int = 0
    lasting: int = 0


class PutGranted(msgspec.Struct, array_like=True, tag=11):
    id: int
    statuses: bytes
    addresses: bytes
    busy: bool = False


class Committed(msgspec.Struct, array_like=True, tag=13):
    id: int
    statuses: bytes


class StatsReply(msgspec.Struct, array_like=True, tag=19):
    id: int
    json: bytes


class ExtentsFollow(msgspec.Struct, array_like=True, tag=21):
    extents: list[int]


class Failure(msgspec.Struct, array_like=True, tag=22):
    id: int
    code: str
    message: str
    field: str = ""


class Pong(msgspec.Struct, array_like=True, tag=24):
    id: int


class Persisted(msgspec.Struct, array_like=True, tag=26):
    id: int


OLD_ANSWERS = msgspec.msgpack.Decoder(
    Welcome | SpaceOpened | Found | Acquired | PutGranted | Committed | StatsReply | ExtentsFollow
    | Failure | Pong | Persisted
)  # fmt: skip
ADDRESS = np.dtype([("extent", "<u4"), ("generation", "<u4"), ("offset", "<u8")])
HELLO, OPEN_SPACE, LOOKUP, ACQUIRE, RELEASE = 1, 3, 5, 7, 9
COMMIT_PUT, ABORT_PUT, CORRUPT, SETTLED, REPORT_PREFILL, STATS = 12, 14, 15, 16, 17, 18
FETCH_EXTENTS, PING, PERSIST = 20, 23, 25
NO_ANSWER = {RELEASE, ABORT_PUT, CORRUPT, SETTLED, REPORT_PREFILL}
GRANTED, STORED = bytes([0]), bytes([5])


class OldClient:
    """Sends recorded messages; it puts in only what the node chose: session, extents, slots.

    Args:
        path: of the node's socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = b""
        self.extents: dict[int, mmap.mmap] = {}
        self.connection = self._connect()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(self.path))
        return connection

    def close(self) -> None:
        self.connection.close()
        for memory in self.extents.values():
            memory.close()

    def ask(self, message: list[Any]) -> Any:
        """Send a message; returns the answer as a client of that time decodes it."""
        if message[0] == HELLO and message[5]:
            self.connection.close()
            self.connection = self._connect()
            message = [*message[:5], self.session, *message[6:]]
        self.connection.sendall(_frame(message))
        if message[0] in NO_ANSWER:
            return None
        length = int.from_bytes(self._receive(4), "little")
        answer = OLD_ANSWERS.decode(self._receive(length))
        assert answer.id == message[1]
        if isinstance(answer, Welcome):
            self.session = answer.session
        return answer

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.connection.recv(size - len(data))
            assert more, "the node closed the connection"
            data += more
        return data

    def fetch(self, extent: int) -> None:
        """Map an extent; its descriptor comes on a connection of its own."""
        with self._connect() as connection:
            connection.sendall(_frame([FETCH_EXTENTS, self.session, [extent]]))
            data, (descriptor,), _, _ = socket.recv_fds(connection, 1 << 16, 8)
        assert OLD_ANSWERS.decode(data[4:]).extents == [extent]
        self.extents[extent] = mmap.mmap(descriptor, EXTENT_BYTES)
        os.close(descriptor)

    def slots(self, addresses: bytes) -> list[memoryview]:
        """The memory of pages, where the node says they are."""
        found = []
        for extent, _, offset in np.frombuffer(addresses, ADDRESS).tolist():
            if extent not in self.extents:
                self.fetch(extent)
            found.append(memoryview(self.extents[extent])[offset : offset + PAGE_BYTES])
        return found


def _frame(message: list[Any]) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


class Replay:
    """The recorded messages, one after the other.

    Args:
        client: sends them.
        messages: as they were recorded.
    """

    def __init__(self, client: OldClient, messages: list[Any]) -> None:
        self.client = client
        self.left = iter(messages)
        self.digests: dict[int, bytes] = {}
        self.keys: dict[int, bytes] = {}

    def ask(self, tag: int) -> Any:
        """Send the next message, which is of this kind."""
        message = next(self.left)
        assert message[0] == tag
        return self.client.ask(message)

    def put(self, rank: int, pages: int) -> None:
        """Put pages, with the bytes that the recorded digests are of."""
        _, _, _, space, shard, keys, *_ = message = next(self.left)
        granted = self.client.ask(message)
        assert (space, shard, granted.statuses) == (0, rank, GRANTED * pages)
        for at, slot in enumerate(self.client.slots(granted.addresses)):
            slot[:] = content("recorded", rank, keys[32 * at : 32 * at + 32])
            slot.release()
        message = next(self.left)
        if message[0] == FETCH_EXTENTS:  # it mapped the extent only then
            message = next(self.left)
        assert message[0] == COMMIT_PUT
        assert self.client.ask(message).statuses == STORED * pages
        self.digests[rank] = self.digests.get(rank, b"") + message[3]
        self.keys[rank] = self.keys.get(rank, b"") + keys

    def read(self, rank: int) -> Acquired:
        """Lease the pages that were put, and compare them."""
        acquired: Acquired = self.ask(ACQUIRE)
        assert acquired.digests == self.digests[rank]
        for at, slot in enumerate(self.client.slots(acquired.addresses)):
            assert slot == content("recorded", rank, self.keys[rank][32 * at : 32 * at + 32])
            slot.release()
        assert next(self.left)[0] == FETCH_EXTENTS
        return acquired


def test_a_client_of_protocol_1_2_gets_answers_that_it_understands(spawn: Spawn, tmp_path: Path):
    """Every message that it knew, as it was recorded."""
    lines = (FOLDER / "frames.txt").read_text().split()
    messages = [msgspec.msgpack.decode(bytes.fromhex(line)[4:]) for line in lines]
    client = OldClient(node_of_today(spawn, tmp_path).socket)
    replay = Replay(client, messages)
    ask = replay.ask

    welcome = ask(HELLO)
    assert (welcome.major, welcome.node, welcome.extent_bytes) == (1, "node-of-old", EXTENT_BYTES)
    assert ask(SETTLED) is None
    assert ask(OPEN_SPACE) == SpaceOpened(2, 0, [0, 1])
    assert ask(LOOKUP) == Found(3, 0, 0)
    replay.put(rank=0, pages=3)
    replay.put(rank=1, pages=3)
    replay.put(rank=0, pages=1)
    assert ask(LOOKUP) == Found(10, 4, 0)
    acquired = replay.read(rank=0)
    assert (acquired.more, acquired.lasting) == (0, 3), "the last one has a TTL"
    assert ask(RELEASE) is None
    assert ask(REPORT_PREFILL) is None

    again = ask(HELLO)
    assert (again.session, again.boot) == (welcome.session, welcome.boot)
    assert ask(SETTLED) is None
    assert ask(OPEN_SPACE) == SpaceOpened(2, 0, [0, 1])
    assert ask(PERSIST) == Persisted(3)
    assert b"old-engine" in ask(STATS).json
    begin = next(replay.left)
    assert client.ask(begin).statuses == GRANTED * 2
    assert client.ask([LOOKUP, 949, 0, [1], begin[5], 0]) == Found(949, 0, 2), "being written"
    assert ask(ABORT_PUT) is None
    assert ask(PING) == Pong(901)
    corrupt = next(replay.left)
    generation = np.frombuffer(acquired.addresses, ADDRESS)["generation"][2]
    assert client.ask([*corrupt[:4], int(generation)]) is None
    assert ask(SETTLED) is None
    assert next(replay.left, None) is None
    left = client.ask([LOOKUP, 950, 0, [0], replay.keys[0], 0])
    assert left == Found(950, 2, 0), "the corrupt page and what follows have left"
    client.close()
