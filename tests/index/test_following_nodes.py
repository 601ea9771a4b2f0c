"""Goal: an index has exactly the pages of a real node, from a snapshot on, and finds out if not."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvstore.index import channel
from kvstore.index.control import FollowedWorker, IndexSettings, Source, SourceBounds
from kvstore.index.followers import Follower
from kvstore.index.scope import key_chains, scope_seed
from kvstore.protocol.page import PrefixKeys
from tests.client.conftest import READY, Daemon, arguments, content, new_keys, open_space
from tests.conftest import Spawn
from tests.index.publishers import KEYS, stored, usable
from tests.local_index import LocalIndex
from tests.loops import eventually, in_loop


@pytest.fixture
def own_daemon(spawn: Spawn, tmp_path: Path) -> Daemon:
    """A daemon that no other test uses."""
    return Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))


WORKER = "node/n"
PAGES = 8


@asynccontextmanager
async def following(*sources: Source, entries_max: int = 4096) -> AsyncIterator[LocalIndex]:
    bounds = SourceBounds(replay_s=5.0, verify_s=0.2, foreign_blocks=1000)
    index = LocalIndex(IndexSettings(entries_max, bounds))
    running = asyncio.create_task(index.run())
    try:
        async with asyncio.timeout(50):
            for source in sources:
                index.follow(source)
            yield index
    finally:
        running.cancel()
        await asyncio.wait([running])


def source(daemon: Daemon) -> Source:
    return Source(
        worker=WORKER, domain=WORKER, endpoint=daemon.events, replay_endpoint=daemon.replay,
        is_node=True,
    )  # fmt: skip


def state(index: LocalIndex) -> FollowedWorker:
    found = index.present().worker(WORKER)
    assert found is not None
    return found


def prefix(index: LocalIndex, space: str, keys: PrefixKeys) -> int:
    table = index.present().table
    assert table is not None
    return usable(table, WORKER, key_chains(keys.packed, scope_seed(table.secret, "keys", space)))


def follower(index: LocalIndex) -> Follower:
    [found] = index._service._followers
    return found


def told(index: LocalIndex, kind: str, space: str, keys: Sequence[bytes]) -> None:
    """Let the follower believe an event that its node never published."""
    shard = next(iter(index._service._followers)).sampled.pages()[0].shard
    event = {
        "type": kind, "block_hashes": list(keys), "parent_block_hash": None, "token_ids": [],
        "block_size": 64, "medium": "CPU", "space": space, "shard": 0, "shard_digest": shard,
    }  # fmt: skip
    for _ in follower(index).feed.apply(msgspec.msgpack.encode([1.0, [event], None])):
        pass
    follower(index).feed.flush()


@in_loop
async def test_a_node_is_known_from_its_snapshot_and_followed_on(own_daemon: Daemon) -> None:
    with own_daemon.connect() as store:
        space = open_space(store)
        label = space.identity.digest.hex()
        keys = new_keys(space, PAGES)
        space.put(keys[:4], content(4, space.page_bytes[0]))
        async with following(source(own_daemon)) as index:
            await eventually(lambda: state(index).current)
            assert prefix(index, label, keys) == 4
            assert (state(index).snapshots, state(index).resyncs) == (1, 0)
            space.put(keys[4:], content(4, space.page_bytes[0]))
            await eventually(lambda: prefix(index, label, keys) == PAGES)


@pytest.mark.parametrize("wrong", ["missing", "stale"])
@in_loop
async def test_an_audit_finds_what_is_wrong_and_everything_is_read_again(
    own_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setattr("kvstore.index.sampled.EVERY", 1)
    async with following(source(own_daemon)) as index:
        await eventually(lambda: state(index).current)
        with own_daemon.connect() as store:
            space = open_space(store)
            label = space.identity.digest.hex()
            keys, absent = new_keys(space, PAGES), PrefixKeys(bytes(range(32)))
            space.put(keys, content(PAGES, space.page_bytes[0]))
            await eventually(lambda: prefix(index, label, keys) == PAGES)
            auditor = index._service._auditor
            await auditor.audit(follower(index))
            result = auditor.last(WORKER)
            assert result.pages >= PAGES
            assert (result.missing, result.stale) == (0, 0)

            if wrong == "missing":
                told(index, "BlockRemoved", label, [keys[2]])
                assert prefix(index, label, keys) == 2
            else:
                told(index, "BlockStored", label, [absent[0]])
                follower(index).sampled.note(
                    msgspec.msgpack.encode([1.0, [_event(index, label, absent[0])], None])
                )
                assert prefix(index, label, absent) == 1
            await auditor.audit(follower(index))
            found = auditor.last(WORKER)
            assert (found.missing > 0, found.stale > 0) == (wrong == "missing", wrong == "stale")
            assert state(index).faults["drift"] == 1
            await eventually(lambda: state(index).current and state(index).resyncs == 1)
            assert prefix(index, label, keys) == PAGES
            assert prefix(index, label, absent) == 0
            assert state(index).snapshots == 2


@in_loop
async def test_pages_that_had_no_room_are_read_again_when_there_is_some_but_not_all_the_time(
    own_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Source(worker="node/o", domain="node/o", endpoint="tcp://127.0.0.1:1")
    async with following(source(own_daemon), entries_max=PAGES) as index:
        await eventually(lambda: state(index).current)
        feeds = index._service._pages
        full = feeds.feed(other, 1)
        listing = PrefixKeys(bytes(range(256)) * PAGES)
        full.add("ab" * 32, "cd" * 32, "CPU", listing.packed[: 32 * PAGES])
        full.flush()
        assert len(feeds) == PAGES
        with own_daemon.connect() as store:
            space = open_space(store)
            label = space.identity.digest.hex()
            keys = new_keys(space, PAGES // 2)
            space.put(keys, content(PAGES // 2, space.page_bytes[0]))
            await eventually(lambda: feeds.left_out > 0)
            audited = index._service._auditor.audit
            monkeypatch.setattr("kvstore.index.audit.AGAIN_S", 0.0)
            await audited(follower(index))
            assert state(index).missing > 0
            assert (prefix(index, label, keys), state(index).current) == (0, True), "it is full"
            full.end()
            await eventually(lambda: not len(feeds))
            monkeypatch.setattr("kvstore.index.audit.AGAIN_S", 600.0)
            await audited(follower(index))
            assert state(index).current, "its snapshot was read a moment ago"
            monkeypatch.setattr("kvstore.index.audit.AGAIN_S", 0.0)
            await audited(follower(index))
            await eventually(lambda: state(index).current and state(index).resyncs == 1)
            assert prefix(index, label, keys) == PAGES // 2


@in_loop
async def test_what_another_worker_lacks_excuses_no_page_that_is_missing(
    own_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.index.sampled.EVERY", 1)
    other = Source(worker="node/o", domain="node/o", endpoint="tcp://127.0.0.1:1")
    listing = b"".join(number.to_bytes(32, "little") for number in range(4 * PAGES))
    async with following(source(own_daemon), entries_max=2 * PAGES) as index:
        await eventually(lambda: state(index).current)
        feeds = index._service._pages
        with own_daemon.connect() as store:
            space = open_space(store)
            label = space.identity.digest.hex()
            keys = new_keys(space, PAGES)
            space.put(keys, content(PAGES, space.page_bytes[0]))
            await eventually(lambda: prefix(index, label, keys) == PAGES)
            full = feeds.feed(other, 1)
            full.add("ab" * 32, "cd" * 32, "CPU", listing)
            full.flush()
            assert full.left_out == feeds.left_out > 0
            assert not full.has_room
            told(index, "BlockRemoved", label, [keys[2]])
            assert prefix(index, label, keys) == 2
            await index._service._auditor.audit(follower(index))
            assert state(index).missing == 1
            await eventually(lambda: state(index).resyncs == 1)


def _event(index: LocalIndex, space: str, key: bytes) -> dict[str, object]:
    shard = follower(index).sampled.pages()[0].shard
    return {
        "type": "BlockStored", "block_hashes": [key], "parent_block_hash": None, "token_ids": [],
        "block_size": 64, "medium": "CPU", "space": space, "shard": 0, "shard_digest": shard,
    }  # fmt: skip


def applied(index: LocalIndex, batches: int) -> bool:
    return index.present().report.workers[0].batches == batches


@in_loop
async def test_a_publisher_may_connect_to_us_and_come_back() -> None:
    bound = channel.EventListener("tcp://127.0.0.1:*")
    await bound.start(channel.CONNECT_S)
    endpoint = bound.endpoint
    bound.close()
    engine = Source(worker="engine/e", domain="m", endpoint=endpoint, bind=True)
    async with following(engine) as index:
        for number in range(2):
            context = zmq.asyncio.Context()
            publisher = context.socket(zmq.XPUB)
            publisher.set(zmq.XPUB_VERBOSE, 1)
            try:
                publisher.connect(endpoint)
                assert await publisher.recv() == b"\x01"
                payload = msgspec.msgpack.encode([1.0, [stored(KEYS[: 3 + number])], None])
                topic = b"kv@e@%d" % number
                await publisher.send_multipart([topic, bytes(8), payload])
                await eventually(partial(applied, index, 1 + number))
                assert index.present().report.workers[0].current
            finally:
                publisher.close(linger=0)
                context.term()
            await eventually(lambda: not index.present().report.workers[0].connected)
        assert index.present().report.workers[0].restarts == 1
        assert index.present().report.workers[0].pages == {"CPU": 4}


@in_loop
async def test_of_two_publishers_that_connect_to_us_one_is_heard_at_a_time() -> None:
    bound = channel.EventListener("tcp://127.0.0.1:*")
    await bound.start(channel.CONNECT_S)
    endpoint = bound.endpoint
    bound.close()
    engine = Source(worker="engine/e", domain="m", endpoint=endpoint, bind=True)
    context = zmq.asyncio.Context()
    publishers = [context.socket(zmq.XPUB) for _ in range(2)]
    try:
        async with following(engine) as index:
            for number, publisher in enumerate(publishers):
                publisher.set(zmq.XPUB_VERBOSE, 1)
                publisher.set(zmq.LINGER, 0)
                publisher.connect(endpoint)
                if number == 0:
                    assert await publisher.recv() == b"\x01"
            for batch in range(3):
                payload = msgspec.msgpack.encode([1.0, [stored(KEYS[: 1 + batch])], None])
                sequence = batch.to_bytes(8, "big")
                await publishers[0].send_multipart([b"kv@e@0", sequence, payload])
                await eventually(partial(applied, index, 1 + batch))
            assert not await publishers[1].poll(0), "nobody subscribes to the second"
            publishers[0].close()
            assert await publishers[1].recv() == b"\x01"
            payload = msgspec.msgpack.encode([1.0, [stored(KEYS[:5])], None])
            await publishers[1].send_multipart([b"kv@e@1", bytes(8), payload])
            await eventually(partial(applied, index, 4))
            await eventually(lambda: index.present().report.workers[0].pages == {"CPU": 5})
    finally:
        for publisher in publishers:
            publisher.close()
        context.term()
