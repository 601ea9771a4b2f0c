"""Goal: what somebody else has put into etcd costs neither memory nor the other records."""

import asyncio
from contextlib import aclosing
from typing import Any

from aetcd import rpc

from kvstore.cluster import etcd
from kvstore.cluster.records import RECORD_BYTES_MAX, NodeRecord, write_record
from kvstore.cluster.roster import Roster
from tests.cluster.fake_etcd import FakeEtcd
from tests.loops import in_loop

OWN = write_record(NodeRecord(name="own", boot=b"o" * 16, endpoint="10.0.0.1:7400"))
PREFIX = b"/kvstore/blue/nodes/"
GRANTED = rpc.LeaseGrantResponse(ID=7, TTL=10).SerializeToString()


class Records:
    """Records as etcd keeps them, and how it answers."""

    def __init__(self, monkeypatch: Any) -> None:
        self.etcd = FakeEtcd()
        self.etcd.answers = {"Range": self._range, "Txn": self._txn, "LeaseGrant": GRANTED}
        self.etcd.watched.put_nowait(rpc.WatchResponse(created=True).SerializeToString())
        self.store = self.etcd.store(monkeypatch)
        self.revision = 0
        self.lists = 0
        self._created: dict[bytes, tuple[int, bytes]] = {}

    def put(self, *names: str, value: bytes = b"{}") -> None:
        events = []
        for name in names:
            self.revision += 1
            key = PREFIX + name.encode()
            created, _ = self._created.get(key, (self.revision, b""))
            self._created[key] = (created, value)
            kv = rpc.KeyValue(key=key, value=value, mod_revision=self.revision)
            events.append(rpc.Event(kv=kv))
        self._tell(events)

    def delete(self, name: str) -> None:
        self.revision += 1
        del self._created[PREFIX + name.encode()]
        kv = rpc.KeyValue(key=PREFIX + name.encode(), mod_revision=self.revision)
        self._tell([rpc.Event(type=rpc.Event.DELETE, kv=kv)])

    def _tell(self, events: list[Any]) -> None:
        self.etcd.watched.put_nowait(rpc.WatchResponse(events=events).SerializeToString())

    def _range(self, request: Any) -> bytes:
        self.lists += bool(request.range_end)
        found = [
            rpc.KeyValue(key=key, value=value, create_revision=created)
            for key, (created, value) in self._created.items()
            if key == request.key or request.range_end
        ]
        if request.sort_target == rpc.RangeRequest.CREATE:
            found.sort(key=lambda one: one.create_revision)
        else:
            found.sort(key=lambda one: one.key)
        kept = found[: request.limit or None]
        header = rpc.ResponseHeader(revision=self.revision)
        more = len(kept) < len(found)
        return bytes(rpc.RangeResponse(header=header, kvs=kept, more=more).SerializeToString())

    def _txn(self, request: Any) -> bytes:
        put = request.success[0].request_put
        self.put(put.key.decode().rpartition("/")[2], value=put.value)
        return bytes(rpc.TxnResponse(succeeded=True).SerializeToString())


@in_loop
async def test_of_too_many_records_those_that_were_there_first_are_read_and_the_own_one(
    monkeypatch,
):
    monkeypatch.setattr(etcd, "RECORDS_MAX", 3)
    there = Records(monkeypatch)
    there.put("y", "z")
    there.put(*(f"a{number}" for number in range(100)))
    await there.store.open()
    assert await there.store.claim("own", OWN, None) is None
    there.etcd.watched = asyncio.Queue()
    there.etcd.watched.put_nowait(rpc.WatchResponse(created=True).SerializeToString())
    async with asyncio.timeout(10), aclosing(there.store.watch()) as changes:
        assert (await anext(changes)).keys() == {"y", "z", "own"}
        there.put(*(f"b{number}" for number in range(100)))
        there.put("z", value=b"new")
        assert (await anext(changes)).keys() == {"y", "z", "own"}
        records = await anext(changes)
        assert (records["z"], records["own"]) == (b"new", OWN)
        assert there.lists == 1

        there.delete("y")
        there.delete("a0")
        assert (await anext(changes)).keys() == {"z", "a1", "own"}, "there is a place"
        assert there.lists == 2
        assert (await anext(changes)).keys() == {"z", "a1", "own"}, "it was in the list"
        there.delete("own")
        assert (await anext(changes)).keys() == {"z", "a1", "a2"}


@in_loop
async def test_what_came_while_the_records_were_listed_again_does_not_come_twice(monkeypatch):
    monkeypatch.setattr(etcd, "RECORDS_MAX", 2)
    there = Records(monkeypatch)
    await there.store.open()
    there.put("a", "b", "c")
    there.etcd.watched = asyncio.Queue()
    there.etcd.watched.put_nowait(rpc.WatchResponse(created=True).SerializeToString())
    async with asyncio.timeout(10), aclosing(there.store.watch()) as changes:
        assert (await anext(changes)).keys() == {"a", "b"}
        there.delete("a")
        there.put("b", value=b"old")
        there.put("b", value=b"new")
        there.delete("c")
        there.put("d")
        for _ in range(4):
            assert await anext(changes) == {"b": b"new", "d": b"{}"}
        assert there.lists == 2


@in_loop
async def test_of_a_long_record_the_beginning_is_read_and_the_others_whole(monkeypatch):
    there = Records(monkeypatch)
    there.put("long", value=b"x" * (1 << 20))
    there.put("n" * (1 << 20))
    there.put("own", value=OWN)
    there.etcd.watched = asyncio.Queue()
    there.etcd.watched.put_nowait(rpc.WatchResponse(created=True).SerializeToString())
    await there.store.open()
    async with asyncio.timeout(10), aclosing(there.store.watch()) as changes:
        first = await anext(changes)
        there.put("later", value=b"y" * (1 << 20))
        second = await anext(changes)
    for records, unreadable in ((first, 2), (second, 3)):
        assert max(map(len, records.values())) == RECORD_BYTES_MAX + 1
        assert max(map(len, records)) == RECORD_BYTES_MAX + 1
        roster = Roster(1.0)
        roster.tell(records, 0.0)
        assert roster.nodes.keys() == {"own"}
        assert roster.unreadable == unreadable
