"""Goal: what somebody else has put into a real Redis costs neither memory nor the other records."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from redis import Redis

from bench.store_servers import RedisServer
from kvstore.cluster import redis_records
from kvstore.cluster.access import StoreServers
from kvstore.cluster.page_store import AnnouncedNumber, ChangedPages
from kvstore.cluster.records import RECORD_BYTES_MAX, NodeRecord, write_record
from kvstore.cluster.redis_client import redis_clients
from kvstore.cluster.redis_pages import CALL_S, RedisPages
from kvstore.cluster.redis_records import RECORDS_MAX, RedisStore
from kvstore.cluster.roster import Roster
from tests.cluster_processes.store_scenes import start_server
from tests.loops import in_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

RECORD = NodeRecord(name="a", boot=b"a" * 16, endpoint="10.0.0.1:7400")
Z = NodeRecord(name="z", boot=b"z" * 16, endpoint="10.0.0.2:7400")
PREFIX = "kvstore:{blue}:"


def opened(folder: Path) -> tuple[RedisServer, Redis, StoreServers]:
    server = start_server("redis", folder)
    assert isinstance(server, RedisServer)
    host, port = server.endpoint.split(":")
    return server, Redis(host, int(port)), StoreServers((server.endpoint,))


@in_loop
async def test_records_that_are_long_or_no_text_are_left_out_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    server, direct, servers = opened(tmp_path)
    with server, direct:
        for number in range(64):
            direct.set(f"{PREFIX}node:long{number}", b"x" * (1 << 20))
            direct.zadd(f"{PREFIX}nodes", {f"long{number}": "inf"})
        direct.lpush(f"{PREFIX}node:list", "x")
        direct.zadd(f"{PREFIX}nodes", {"list": "inf"})
        direct.zadd(f"{PREFIX}nodes", {b"\x1b[2J" * 99_999: "inf"})
        store = RedisStore(servers, "blue")
        try:
            await store.open()
            assert await store.claim("a", write_record(RECORD), None) is None
            async with aclosing(store.watch()) as changes:
                records = await anext(changes)
        finally:
            await store.close()

    assert max(map(len, records.values())) == RECORD_BYTES_MAX + 1
    roster = Roster(1.0)
    roster.tell(records, time.monotonic())
    assert roster.nodes == {"a": RECORD}
    assert roster.unreadable == 65


@in_loop
async def test_more_records_than_are_read_hide_neither_the_own_nor_those_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_records, "POLL_S", 0.05)
    server, direct, servers = opened(tmp_path)
    with server, direct:
        ours, other = RedisStore(servers, "blue"), RedisStore(servers, "blue")
        try:
            await ours.open()
            await other.open()
            assert await other.claim("z", write_record(Z), None) is None
            async with asyncio.timeout(30), aclosing(ours.watch()) as changes:
                assert (await anext(changes)).keys() == {"z"}
                soon = 1_000 * (direct.time()[0] + 5)  # earlier than any lease ends
                made_up = {f"m{number}": soon for number in range(RECORDS_MAX + 1)}
                direct.mset({f"{PREFIX}node:{name}": b"{}" for name in made_up})
                direct.zadd(f"{PREFIX}nodes", made_up)
                assert await ours.claim("a", write_record(RECORD), None) is None
                records = await anext(changes)
                while len(records) < RECORDS_MAX:
                    records = await anext(changes)
        finally:
            await ours.close()
            await other.close()

    assert len(records) == RECORDS_MAX
    assert records["a"] == write_record(RECORD)
    assert records["z"] == write_record(Z)


@in_loop
async def test_an_entry_that_is_long_or_no_text_is_that_of_nobody(tmp_path: Path) -> None:
    server, direct, servers = opened(tmp_path)
    first, second, third = (bytes([number]) * 13 for number in (1, 2, 3))
    store = RedisPages(redis_clients(servers, CALL_S), "blue")
    with server, direct:
        try:
            number = await store.claim("a", b"a" * 16, "token")
            direct.set(b"k" + first, b"%d," % number * (1 << 18))
            direct.lpush(b"k" + second, "x")
            direct.set(b"k" + third, b"%d" % number)

            async with asyncio.timeout(CALL_S):
                found = await store.find([first + second + third])
        finally:
            await store.close()

    assert found.runs == [[(2, ""), (1, str(number))]]
    assert [one.node for one in found.holders.values()] == ["a"]


DAMAGED = {
    "no hash": lambda direct, key: direct.set(key, "x"),
    "no time": lambda direct, key: direct.hset(key, "until", "x"),
    "no fields": lambda direct, key: (direct.delete(key), direct.hset(key, "until", "9e15")),
    "no boot id": lambda direct, key: direct.hset(key, "boot", "zz"),
    "no text": lambda direct, key: direct.hset(key, "node", b"\xff"),
}


@pytest.mark.parametrize("how", DAMAGED)
@in_loop
async def test_a_damaged_number_is_that_of_nobody_and_costs_no_other(
    tmp_path: Path, how: str
) -> None:
    server, direct, servers = opened(tmp_path)
    one, two = bytes([1]) * 13, bytes([2]) * 13
    store = RedisPages(redis_clients(servers, CALL_S), "blue")
    with server, direct:
        try:
            first = await store.claim("a", b"a" * 16, "ta")
            assert await store.change(first, "ta", 1, [ChangedPages(True, "", one)])
            direct.zadd(f"{PREFIX}numbers", {"nonsense": 1, "-3": 1})
            DAMAGED[how](direct, f"{PREFIX}holder:{first}")

            second = await store.claim("b", b"b" * 16, "tb")
            assert await store.change(second, "tb", 1, [ChangedPages(True, "", one + two)])
            found = await store.find([one + two])
            assert [holder.node for holder in found.holders.values()] == ["b"]
            if how == "no hash":
                assert second != first, "entries may have it"
            assert await store.renew({second: AnnouncedNumber("tb", 1)}) == []
            if how in ("no hash", "no time", "no fields"):
                assert await store.renew({first: AnnouncedNumber("ta", 1)}) == [first]
                assert not await store.change(first, "ta", 2, [])
            await store.withdraw(first, "ta")
        finally:
            await store.close()
