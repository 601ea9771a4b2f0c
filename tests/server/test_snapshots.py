"""Goal: a follower that reads a node's snapshot and follows on has exactly the node's pages."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

import msgspec
import pytest

from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY, EventBatch, RemovedEvent, StoredEvent
from kvstore.index.channel import EventConnection
from kvstore.index.snapshot import (
    SnapshotEnd,
    SnapshotHead,
    SnapshotPages,
    audit,
    read_snapshot,
    sample,
)
from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, ShardSpec
from tests.client.conftest import (
    FLAT,
    READY,
    SIZE,
    TIMEOUT_S,
    Daemon,
    arguments,
    content,
    new_keys,
    open_space,
)
from tests.loops import in_loop

SHARD = FLAT.digest.hex()[:16]
MANY = 40_000
"""Pages whose snapshot does not fit into the buffers of a socket."""
TOKEN = "a token of sixteen or more"
MEDIA = {"host": "CPU", "ssd": "STORAGE"}
_BATCH = msgspec.msgpack.Decoder(EventBatch)

Page = tuple[str, str, str, bytes]
"""Space, digest of the shard, medium, key."""


class Follower:
    """What a follower knows: a snapshot, and the batches from its sequence on."""

    def __init__(self) -> None:
        self.pages: set[Page] = set()
        self.next = 0

    def add(self, part: SnapshotPages) -> None:
        keys = [part.keys[at : at + KEY_BYTES] for at in range(0, len(part.keys), KEY_BYTES)]
        self.pages |= {(part.space, part.shard, part.medium, key) for key in keys}

    def apply(self, number: int, payload: bytes) -> None:
        """Apply a batch if it is the next one; those before it have been applied."""
        if number < self.next:
            return
        assert number == self.next, "a gap"
        self.next = number + 1
        for event in _BATCH.decode(payload).events:
            assert isinstance(event, StoredEvent | RemovedEvent)
            where = (event.space, event.shard_digest, event.medium)
            pages = {(*where, bytes(key)) for key in event.block_hashes}
            if isinstance(event, StoredEvent):
                self.pages |= pages
            else:
                self.pages -= pages

    async def replay(self, daemon: Daemon) -> None:
        """Apply all batches that are kept, from the next one on."""
        channel = await EventConnection.open(daemon.replay, zmtp.DEALER, "", TIMEOUT_S)
        try:
            await channel.send([b"", self.next.to_bytes(8, "big")])
            async with asyncio.timeout(TIMEOUT_S):
                while True:
                    for _, _, number, payload in await channel.receive():
                        if number == END_OF_REPLAY:
                            return
                        self.apply(int.from_bytes(number, "big"), payload)
        finally:
            channel.close()


def truth(daemon: Daemon, label: str) -> set[Page]:
    """The pages of a space, as its operator sees them."""
    found: set[Page] = set()
    cursor: str | None = "0"
    while cursor is not None:
        answer = daemon.ask(f"/v1/pages?space={label}&limit=1000&cursor={cursor}")
        for row in answer["pages"]:
            for shard in row["shards"].values():
                tiers = [MEDIA[tier] for tier in shard["tiers"] if tier in MEDIA]
                found |= {(label, SHARD, tier, bytes.fromhex(row["key"])) for tier in tiers}
        cursor = answer["next"]
    return found


@contextmanager
def changing(daemon: Daemon) -> Iterator[str]:
    """Prompts are stored all the time, more than there is room for; gives the space's label."""
    stop = threading.Event()
    stored = threading.Semaphore(0)
    with daemon.connect() as store:
        space = open_space(store)
        pages = content(64, SIZE)

        def work() -> None:
            at = 0
            while not stop.is_set():
                space.put(new_keys(space, 64, at), pages)
                at += 1
                stored.release()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for _ in range(50):
                assert stored.acquire(timeout=TIMEOUT_S)
            yield space.identity.digest.hex()
        finally:
            stop.set()
            thread.join()


SETTINGS: dict[str, dict[str, object]] = {
    "memory": {"host__capacity_bytes": "16MiB", "host__extent_bytes": "4MiB"},
    "ssd": {
        "host__capacity_bytes": "16MiB", "host__extent_bytes": "4MiB",
        "ssd__capacity_bytes": "128MiB", "ssd__segment_bytes": "16MiB",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_snapshot_under_load_and_the_batches_since_are_the_nodes_pages(
    kind, spawn, tmp_path, wait_until
):
    settings = dict(SETTINGS[kind])
    if kind == "ssd":
        settings["ssd__directories"] = tmp_path / "ssd"
    daemon = Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))
    with changing(daemon) as label:
        followers = [asyncio.run(followed(daemon)) for _ in range(5)]
    media = set()
    for follower in followers:
        before = follower.next

        def is_exact(follower: Follower = follower) -> bool:
            asyncio.run(follower.replay(daemon))
            return follower.pages == truth(daemon, label)

        wait_until(is_exact)  # pages may still be written to disk
        assert follower.next > before, "pages came and went meanwhile"
        assert len(follower.pages) > 1_000
        media |= {page[2] for page in follower.pages}
    assert media == ({"CPU", "STORAGE"} if kind == "ssd" else {"CPU"})


async def followed(daemon: Daemon) -> Follower:
    """A follower with a snapshot, and nothing after it."""
    follower = Follower()
    async with aclosing(read_snapshot(daemon.replay)) as parts:
        async for part in parts:
            match part:
                case SnapshotHead(_, first):
                    follower.next = first
                case SnapshotPages():
                    follower.add(part)
                case SnapshotEnd(end, pages):
                    assert end >= follower.next
                    assert pages >= len(follower.pages)
    return follower


def test_the_head_and_the_end_tell_the_node_and_its_sequence(daemon):
    with daemon.connect() as store:
        space = open_space(store)
        keys = new_keys(space, 20)
        space.put(keys, content(20, SIZE))
        head, pages, end = asyncio.run(sample(daemon.replay))
        events = daemon.ask("/v1/stats")["events"]

    assert head.boot == daemon.ask("/v1/stats")["boot"]
    assert head.sequence_first == end.sequence_end == events["sequence_next"]
    assert end.pages == sum(len(one.keys) for one in pages) // KEY_BYTES


def test_an_audit_says_where_each_page_is_and_a_sample_shows_pages_that_are_there(daemon):
    with daemon.connect() as store:
        space = open_space(store)
        label = space.identity.digest.hex()
        keys = [bytes(key) for key in new_keys(space, 1_000)]
        for at in range(0, 1_000, 100):
            space.put(new_keys(space, 1_000)[at : at + 100], content(100, SIZE))
        asked = b"".join([*keys, *(bytes([at]) * 32 for at in range(100))])

        found = asyncio.run(audit(daemon.replay, "", label, SHARD, asked))
        other = asyncio.run(audit(daemon.replay, "", label, "0" * 16, asked))
        _, pages, _ = asyncio.run(sample(daemon.replay, keys=4_096))

    assert found.media == ["CPU", "STORAGE"]
    assert found.places.tolist() == [1] * 1_000 + [0] * 100
    assert found.end.pages == 1_000
    assert other.places.tolist() == [0] * 1_100
    mine = b"".join(one.keys for one in pages if one.space == label)
    shown = {mine[at : at + KEY_BYTES] for at in range(0, len(mine), KEY_BYTES)}
    assert shown <= set(keys)
    assert len(shown) > 100


def test_over_tcp_the_token_of_followers_is_needed(spawn, tmp_path):
    daemon = Daemon(
        spawn(
            arguments(
                tmp_path / "own.sock", events__endpoint="tcp://127.0.0.1:*",
                events__replay_endpoint="tcp://127.0.0.1:*", events__follow_token=TOKEN,
            ),
            ready=READY,
        )
    )  # fmt: skip

    async def parts(token: str) -> list[object]:
        return [part async for part in read_snapshot(daemon.replay, token)]

    for wrong in ("", "another token than it is"):
        with pytest.raises(zmtp.PeerError):
            asyncio.run(parts(wrong))
        with pytest.raises(zmtp.PeerError):
            asyncio.run(audit(daemon.replay, wrong, "ab", SHARD, bytes(32)))
    assert [type(one) for one in asyncio.run(parts(TOKEN))] == [SnapshotHead, SnapshotEnd]


@in_loop
async def test_a_node_that_ends_in_the_middle_gives_no_snapshot(spawn, tmp_path):
    command = arguments(tmp_path / "own.sock", host__capacity_bytes="256MiB")
    daemon = Daemon(spawn(command, ready=READY))
    small = ShardSpec(layout=CanonicalLayout(8), layers=(0, 1), heads=(0, 1))
    with daemon.connect() as store:
        space = open_space(store, small)
        pages = content(1_000, small.page_bytes(space.identity))
        for at in range(MANY // 1_000):
            space.put(new_keys(space, 1_000, at), pages)
    shown = 0

    async def read() -> None:
        nonlocal shown
        async with aclosing(read_snapshot(daemon.replay)) as parts:
            async for part in parts:
                assert not isinstance(part, SnapshotEnd)
                if isinstance(part, SnapshotPages):
                    shown += len(part.keys) // KEY_BYTES
                else:
                    os.kill(daemon.process.pid, signal.SIGKILL)

    with pytest.raises(ConnectionResetError):
        await read()
    assert shown < MANY, "what does not fit into the socket was never sent"
    again = Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))
    async with aclosing(read_snapshot(again.replay)) as parts:
        found = [part async for part in parts]
    assert [type(part) for part in found] == [SnapshotHead, SnapshotEnd]
