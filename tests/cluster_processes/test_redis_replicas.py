"""Goal: a replica, whose primary may be gone for long, is believed by nobody who only reads."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis import Redis

from bench.store_servers import RedisServer
from kvstore.cluster.access import StoreServers
from kvstore.cluster.page_store import ChangedPages, DirectoryFault
from kvstore.cluster.records import NodeRecord, write_record
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.cluster.redis_records import RedisStore
from kvstore.cluster.watched import WatchedMembership
from kvstore.protocol.errors import PeerUnreachable
from tests.cluster_processes.store_scenes import start_server
from tests.loops import eventually, in_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

RECORD = NodeRecord(name="a", boot=b"a" * 16, endpoint="10.0.0.1:7400")
NAME = b"n" * 13


class Pair:
    """A replica and its primary, which may change places."""

    def __init__(self, replica: RedisServer, primary: RedisServer) -> None:
        self.replica, self.primary = replica, primary
        self.servers = StoreServers((replica.endpoint, primary.endpoint))
        follow(replica, primary)


def follow(one: RedisServer, other: RedisServer) -> None:
    """Make a server a replica of another one."""
    with Redis(*address(one)) as direct:
        direct.replicaof(*address(other))


def address(server: RedisServer) -> tuple[str, int]:
    host, port = server.endpoint.split(":")
    return host, int(port)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    replica, primary = (start_server("redis", tmp_path / name) for name in ("r1", "r2"))
    with replica, primary:
        assert isinstance(replica, RedisServer)
        assert isinstance(primary, RedisServer)
        yield Pair(replica, primary)


@in_loop
async def test_records_are_read_at_the_primary_only(pair: Pair) -> None:
    store = RedisStore(pair.servers, "blue")
    try:
        with pytest.raises(PeerUnreachable, match="read only replica"):
            await store.open()
        await store.open()
        assert await store.claim("a", write_record(RECORD), None) is None
        async with aclosing(store.watch()) as changes:
            assert (await anext(changes)).keys() == {"a"}
            follow(pair.primary, pair.replica)
            with pytest.raises(PeerUnreachable, match="read only replica"):
                await anext(changes)
        with pytest.raises(PeerUnreachable, match="read only replica"):
            await store.check()
    finally:
        await store.close()


@in_loop
async def test_pages_are_looked_up_at_the_primary_only(pair: Pair) -> None:
    writer = RedisPages(redis_clients(StoreServers((pair.primary.endpoint,)), CALL_S), "blue")
    reader = RedisPages(redis_clients(pair.servers, CALL_S), "blue")
    try:
        number = await writer.claim("a", b"a" * 16, "token")
        assert await writer.change(number, "token", 1, [ChangedPages(True, "", NAME)])
        with pytest.raises(DirectoryFault) as caught:
            await reader.find([NAME])
        assert caught.value.cause == "refused"
        assert (await reader.find([NAME])).holders.keys() == {number}
    finally:
        await writer.close()
        await reader.close()


@in_loop
async def test_a_process_that_only_watches_finds_the_primary(pair: Pair) -> None:
    node = RedisStore(StoreServers((pair.primary.endpoint,)), "blue")
    membership = WatchedMembership(RedisStore(pair.servers, "blue"), lambda: None)
    with Redis(*address(pair.replica)) as direct:
        direct.replicaof("127.0.0.1", 1)  # where nobody answers
    running = asyncio.create_task(membership.run())
    try:
        await node.open()
        assert await node.claim("a", write_record(RECORD), None) is None
        await eventually(lambda: membership.nodes == {"a": RECORD})
        assert membership.standing.state == "current"
    finally:
        running.cancel()
        await asyncio.wait([running])
        await node.close()
