"""Goal: whatever a server answers in place of etcd, its caller is told so, and goes on."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from aetcd import rpc

from kvstore.cluster.etcd import EtcdStore
from kvstore.protocol.errors import PeerUnreachable
from tests.cluster.fake_etcd import FakeEtcd
from tests.loops import in_loop

UNDECODABLE = b"\xff\xff\xff"
GRANTED = rpc.LeaseGrantResponse(ID=7, TTL=10).SerializeToString()
REFUSED = rpc.TxnResponse(succeeded=False).SerializeToString()
FOUND = rpc.RangeResponse(header=rpc.ResponseHeader(revision=5)).SerializeToString()


async def watch(store: EtcdStore) -> object:
    async with aclosing(store.watch()) as changes:
        await anext(changes)
        return await anext(changes)


CALLS: dict[str, Callable[[EtcdStore], Coroutine[Any, Any, object]]] = {
    "settings": lambda store: store.settings(b"{}"),
    "claim": lambda store: store.claim("a", b"{}", None),
    "check": lambda store: store.check(),
    "watch": watch,
}


@pytest.mark.parametrize(
    ("call", "answers"),
    [
        ("settings", {"Txn": UNDECODABLE}), ("settings", {"Txn": REFUSED}),
        ("claim", {"LeaseGrant": UNDECODABLE}), ("claim", {"Txn": UNDECODABLE}),
        ("claim", {"Txn": REFUSED}), ("check", {"Range": UNDECODABLE}),
        ("watch", {"Range": UNDECODABLE}), ("watch", {"Watch": UNDECODABLE}),
    ],
)  # fmt: skip
@in_loop
async def test_a_store_of_records_that_answers_otherwise_is_one_that_is_away(
    call, answers, monkeypatch
):
    fake = FakeEtcd()
    fake.answers = {"LeaseGrant": GRANTED, "Range": FOUND, **answers}
    fake.watched.put_nowait(rpc.WatchResponse(created=True).SerializeToString())
    fake.watched.put_nowait(answers.get("Watch", b""))
    store = fake.store(monkeypatch)
    await store.open()
    async with asyncio.timeout(10):
        with pytest.raises(PeerUnreachable, match=r"etcd: its answer|ended the watch"):
            await CALLS[call](store)


@in_loop
async def test_a_call_whose_connection_was_closed_meanwhile_is_to_a_store_that_is_away(monkeypatch):
    fake = FakeEtcd()
    store = fake.store(monkeypatch)
    await store.open()
    await fake.close()
    for call in CALLS.values():
        with pytest.raises(PeerUnreachable, match="etcd: UsageError"):
            await call(store)
