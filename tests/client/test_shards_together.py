"""Goal: pages of several shards that are stored together are as if each had been stored alone."""

from typing import Any

import numpy as np
import pytest

from kvstore.client.exchange import Connection
from kvstore.client.results import PutResult
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument, KVStoreError, TransferTimeout
from kvstore.protocol.page import CanonicalLayout, ShardSpec
from tests.client.conftest import TIMEOUT_S, Pool, content, new_keys, open_space

HEADS = [
    ShardSpec(layout=CanonicalLayout(64), layers=(0, 2), heads=(head, head + 1))
    for head in range(3)
]


def filled(space: Any, seed: int, blocks: int) -> Pool:
    """A pool whose blocks are pages of a shard."""
    pool = Pool(4, space.page_bytes[0] // 4, blocks)
    pool.fill(seed)
    return pool


def pages_of(space: Any, keys: Any, shard: int) -> list[bytes]:
    out = content(len(keys), space.page_bytes[shard])
    return [bytes(one) for one in out[: space.get(keys, out, shard)]]


def test_what_is_stored_together_is_what_the_blocks_of_each_shard_hold(store):
    space = open_space(store, *HEADS)
    keys = new_keys(space, 6)
    pools = [filled(space, shard, 8) for shard in range(3)]
    tables = [np.random.default_rng(shard).permutation(8)[:6] for shard in range(3)]
    space.put(keys[:2], content(2, space.page_bytes[1]), 1)

    parts = [
        (pool.kvpool, table, keys, shard)
        for shard, (pool, table) in enumerate(zip(pools, tables, strict=True))
    ]
    first = space.extract_shards(parts).result(TIMEOUT_S)
    again = space.extract_shards(parts[:2]).result(TIMEOUT_S)

    assert first == [PutResult(6), PutResult(4, existing=2), PutResult(6)]
    assert again == [PutResult(0, existing=6)] * 2
    assert space.lookup(keys).pages == 6
    for shard, (pool, table) in enumerate(zip(pools, tables, strict=True)):
        known = 2 if shard == 1 else 0
        stored = [pool.page(np.array([block])) for block in table]
        assert pages_of(space, keys, shard)[known:] == stored[known:]


def test_it_takes_two_exchanges_and_none_to_commit_what_was_there(daemon, monkeypatch):
    exchanges: list[list[str]] = []
    request_all, request = Connection.request_all, Connection.request

    def all_counted(connection: Connection, messages: Any, deadline: float) -> Any:
        exchanges.append([type(message).__name__ for message in messages])
        return request_all(connection, messages, deadline)

    def counted(connection: Connection, message: Any, deadline: float) -> Any:
        exchanges.append([type(message).__name__])
        return request(connection, message, deadline)

    with daemon.connect() as store:
        space = open_space(store, *HEADS)
        keys = new_keys(space, 2)
        space.lookup(keys)
        monkeypatch.setattr(Connection, "request_all", all_counted)
        monkeypatch.setattr(Connection, "request", counted)
        pool = filled(space, 1, 2)
        parts = [(pool.kvpool, [0, 1], keys, shard) for shard in range(3)]
        for _ in range(2):
            space.extract_shards(parts).result(TIMEOUT_S)

    assert exchanges == [["BeginPut"] * 3, ["CommitPut"] * 3, ["BeginPut"] * 3]


@pytest.mark.parametrize(
    ("leased", "full"),
    [(9, set()), (10, {1, 2})],
    ids=["room once the first are committed", "room for the first"],
)
def test_shards_that_find_no_room_do_not_take_the_others_with_them(leased, full):
    with KVStore.open(1 << 20, extent_bytes=1 << 20) as store:
        space = open_space(store, *HEADS, page_tokens=16)  # of 16 KiB: the quota is 32 pages
        read, new = new_keys(space, leased), new_keys(space, 3, start=10_000)
        pool = filled(space, 1, 9)
        for shard in range(3):
            space.put(read, content(leased, space.page_bytes[0]), shard)
        with space.get(read, shard=0), space.get(read, shard=1), space.get(read, shard=2):
            parts = [(pool.kvpool, list(range(3 * at, 3 * at + 3)), new, at) for at in range(3)]
            results = space.extract_shards(parts).result(TIMEOUT_S)
        stored = [pages_of(space, new, shard) for shard in range(3)]

    for shard, result in enumerate(results):
        wanted = [pool.page(np.array([3 * shard + at])) for at in range(3)]
        if shard in full:
            assert isinstance(result, CapacityError)
            assert stored[shard] == wanted[: len(stored[shard])]
        else:
            assert result == PutResult(3)
            assert stored[shard] == wanted


def test_a_pool_on_a_device_and_blocks_that_do_not_fit_are_refused_by_name(store):
    space = open_space(store, *HEADS)
    keys, pool = new_keys(space, 2), filled(space, 1, 2)
    for parts, field in (
        ([(pool.on("cpu:0"), [0, 1], keys, 0)], "parts"),
        ([(pool.kvpool, [0, 1], keys, 0), (pool.kvpool, [0], keys, 1)], "blocks"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            space.extract_shards(parts)
        assert refused.value.field == field
    assert space.lookup(keys).pages == 0


# The requests


def test_answers_come_in_any_order_and_a_refusal_is_one_of_them(peer, connected):
    first: list[int] = []

    def answer(request: Any) -> wire.Answer | None:
        if not first:
            first.append(request.id)
            return None
        refusal = wire.Failure(request.id, "CAPACITY", "no")
        peer._open[-1].sendall(wire.encode(refusal))
        return wire.Pong(first[0])

    peer.answer = answer
    pong, refusal = connected.request_all([wire.Ping(0), wire.Ping(0)], TIMEOUT_S, connected.epoch)

    assert pong == wire.Pong(first[0])
    assert isinstance(refusal, KVStoreError)
    assert peer.names()[-2:] == ["Ping", "Ping"]
    assert connected.connected


@pytest.mark.parametrize("wrong", ["twice", "another"])
def test_an_answer_that_belongs_to_none_of_the_requests_ends_the_connection(
    peer, connected, wrong, wait_until
):
    epoch, real, pings = connected.epoch, peer.answer, []

    def answer(request: Any) -> wire.Answer | None:
        if isinstance(request, wire.Ping):
            pings.append(request.id)
        if len(pings) == 2:
            return wire.Pong(pings[0] if wrong == "twice" else request.id + 7)
        return real(request)

    peer.answer = answer
    with pytest.raises(KVStoreError, match="belongs to none"):
        connected.request_all([wire.Ping(0), wire.Ping(0)], TIMEOUT_S, epoch)
    peer.answer = real
    wait_until(lambda: connected.connected and connected.epoch > epoch)


def test_requests_of_which_one_is_not_answered_end_in_their_time(peer, connected, wait_until):
    epoch, pings = connected.epoch, []
    real = peer.answer

    def answer(request: Any) -> wire.Answer | None:
        if isinstance(request, wire.Ping):
            pings.append(request.id)
        return None if len(pings) == 2 else real(request)

    peer.answer = answer
    with pytest.raises(TransferTimeout):
        connected.request_all([wire.Ping(0), wire.Ping(0)], 0.5, epoch)
    wait_until(lambda: len(pings) == 2)
    peer.answer = real
    wait_until(lambda: connected.connected and connected.epoch > epoch)
    with pytest.raises(KVStoreError, match="reconnected"):
        connected.request_all([wire.Ping(0)], TIMEOUT_S, epoch)
