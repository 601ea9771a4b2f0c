"""Goal: pages of several shards that move together are as if each had been moved alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import mover
from kvstore.client import shard_loads
from kvstore.client.exchange import Connection
from kvstore.client.loads import Loader
from kvstore.client.results import PutResult
from kvstore.client.shard_loads import ShardLoader
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument, KVStoreError, TransferTimeout
from kvstore.protocol.page import CanonicalLayout, ShardSpec
from tests.client.conftest import TIMEOUT_S, Pool, content, new_keys, open_space
from tests.client.slabs import host_byte

HEADS = [
    ShardSpec(layout=CanonicalLayout(64), layers=(0, 2), heads=(head, head + 1))
    for head in range(3)
]
WIDE = ShardSpec(layout=CanonicalLayout(64), layers=(0, 2), heads=(2, 4))


def filled(space: Any, seed: int, blocks: int) -> Pool:
    """A pool whose blocks are pages of a shard."""
    pool = Pool(4, space.page_bytes[0] // 4, blocks)
    pool.fill(seed)
    return pool


def pages_of(space: Any, keys: Any, shard: int) -> list[bytes]:
    out = content(len(keys), space.page_bytes[shard])
    return [bytes(one) for one in out[: space.get(keys, out, shard)]]


@pytest.mark.parametrize(("last", "copied"), [(HEADS[2], [16]), (WIDE, [6, 4, 6])])
def test_what_is_stored_together_is_what_the_blocks_of_each_shard_hold(
    store, monkeypatch, last, copied
):
    space, calls, gather = open_space(store, *HEADS[:2], last), list[int](), mover.gather
    keys = new_keys(space, 6)
    pools = [Pool(4, size // 4, 8) for size in space.page_bytes]
    for shard, pool in enumerate(pools):
        pool.fill(shard)
    tables = [np.random.default_rng(shard).permutation(8)[:6] for shard in range(3)]
    space.put(keys[:2], content(2, space.page_bytes[1]), 1)

    parts = [
        (pool.kvpool, table, keys, shard)
        for shard, (pool, table) in enumerate(zip(pools, tables, strict=True))
    ]
    monkeypatch.setattr(mover, "gather", lambda *a: calls.append(len(a[0])) or gather(*a))
    first = space.extract_shards(parts).result(TIMEOUT_S)
    again = space.extract_shards(parts[:2]).result(TIMEOUT_S)

    assert first == [PutResult(6), PutResult(4, existing=2), PutResult(6)]
    assert again == [PutResult(0, existing=6)] * 2
    assert calls == copied, "pages of one size in one call"
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


# Loads


def stored(store: KVStore, pages: int, **fields: Any) -> tuple[Any, Any, list[Any], list[Any]]:
    """A space with pages of all shards; keys, their content for each shard, and empty pools."""
    space = open_space(store, *HEADS, **fields)
    keys = new_keys(space, pages)
    wrote = [content(pages, space.page_bytes[0], seed) for seed in range(3)]
    for shard in range(3):
        space.put(keys, wrote[shard], shard)
    pools = [Pool(4, space.page_bytes[0] // 4, 8) for _ in HEADS]
    return space, keys, [[bytes(page) for page in one] for one in wrote], pools


def with_disk(directory: Path) -> KVStore:
    """A store in this process with an SSD tier."""
    return KVStore.open(
        4 << 20, extent_bytes=1 << 20, ssd_directories=[directory], ssd_capacity_bytes=64 << 20,
        sync="always",
    )  # fmt: skip


def restored(space: Any, keys: Any, pools: list[Any], table: Any, **order: str) -> list[Any]:
    """What each shard's blocks hold of the pages that count."""
    parts = [(pool.kvpool, shard) for shard, pool in enumerate(pools)]
    jobs = space.restore_shards(keys, table, parts, **order)
    pages = min(job.result(TIMEOUT_S).pages for job in jobs)
    return [[pool.page(np.array([block])) for block in table[:pages]] for pool in pools]


@pytest.mark.parametrize("order", ["page", "segment"])
def test_what_is_loaded_together_is_what_each_shard_has(store, order, wait_until):
    space, keys, wrote, pools = stored(store, 6)
    table = np.random.default_rng(3).permutation(8)[:6]

    assert restored(space, keys, pools, table, order=order) == wrote
    wait_until(lambda: store.stats()["leases"] == 0)  # promotions hold some for a while


def test_a_load_of_several_shards_takes_one_exchange(daemon, monkeypatch):
    exchanges: list[list[str]] = []
    request_all = Connection.request_all

    def counted(connection: Connection, messages: Any, deadline: float) -> Any:
        exchanges.append([type(message).__name__ for message in messages])
        return request_all(connection, messages, deadline)

    def alone(connection: Connection, message: Any, deadline: float) -> Any:
        raise AssertionError(f"{message} should be asked with the others")

    with daemon.connect() as store:
        space, keys, wrote, pools = stored(store, 4)
        monkeypatch.setattr(Connection, "request_all", counted)
        with monkeypatch.context() as during:
            during.setattr(Connection, "request", alone)
            assert restored(space, keys, pools, np.arange(4)) == wrote
        job, *others = space.restore_shards(
            keys, np.arange(4), [(pool.kvpool, shard) for shard, pool in enumerate(pools)]
        )
        assert not others
        result = job.result(TIMEOUT_S)
        assert (result.pages, result.size_bytes) == (4, 4 * sum(space.page_bytes))
        assert store.stats()["leases"] == 0

    assert exchanges == [["Acquire"] * 3] * 2


def test_a_large_load_has_a_job_for_each_shard(daemon, monkeypatch):
    with daemon.connect() as store:
        space, keys, wrote, pools = stored(store, 4)
        monkeypatch.setattr(shard_loads, "TOGETHER_BYTES_MAX", 4 * sum(space.page_bytes) - 1)
        parts = [(pool.kvpool, shard) for shard, pool in enumerate(pools)]

        jobs = space.restore_shards(keys, np.arange(4), parts)

        assert [job.result(TIMEOUT_S).pages for job in jobs] == [4, 4, 4]
        assert [[pool.page(np.array([n])) for n in range(4)] for pool in pools] == wrote


def test_a_load_of_more_than_a_message_may_pin_is_loaded_in_parts(daemon, monkeypatch):
    with daemon.connect() as store:
        space, keys, wrote, pools = stored(store, 7)
        monkeypatch.setattr("kvstore.client.space.BATCH_BYTES", 2 * sum(space.page_bytes) + 1)
        leased: list[int] = []
        monkeypatch.setattr(
            Connection, "request_all",
            lambda connection, messages, deadline, real=Connection.request_all: (
                leased.append(sum(len(message.keys) for message in messages) // 32)
                or real(connection, messages, deadline)
            ),
        )  # fmt: skip
        assert restored(space, keys, pools, np.arange(7)) == wrote
        assert leased == [6, 6, 6, 3]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_load_ends_where_one_shard_ends(store, missing, wait_until):
    space = open_space(store, *HEADS)
    keys = new_keys(space, 5)
    wrote = [content(5, space.page_bytes[0], seed) for seed in range(3)]
    for shard in range(3):
        count = 2 if shard == missing else 5
        space.put(keys[:count], wrote[shard][:count], shard)
    pools = [Pool(4, space.page_bytes[0] // 4, 8) for _ in HEADS]

    found = restored(space, keys, pools, np.arange(5))
    assert found == [[bytes(page) for page in one[:2]] for one in wrote]
    wait_until(lambda: store.stats()["leases"] == 0)  # promotions hold some for a while


def test_a_damaged_page_of_one_shard_ends_the_load_there_and_is_gone(daemon):
    with daemon.connect() as store:
        space, keys, wrote, pools = stored(store, 4)
        host_byte(store, space, keys, 1).value ^= 1  # of shard 0

        assert restored(space, keys, pools, np.arange(4)) == [one[:1] for one in wrote]
        assert store.troubles == {"corrupt": 1}
        assert space.lookup(keys).pages == 1


def test_a_damaged_page_of_each_shard_is_found_by_one_load(daemon):
    with daemon.connect() as store:
        space, keys, wrote, pools = stored(store, 2)
        for shard in range(3):
            host_byte(store, space, keys, 0, shard).value ^= 1
        assert restored(space, keys, pools, np.arange(2)) == [[], [], []]
        assert store.troubles == {"corrupt": 3}

        for shard in range(3):
            space.put(keys, content(2, space.page_bytes[0], shard), shard)
        assert restored(space, keys, pools, np.arange(2)) == wrote


def test_pages_that_are_read_once_stay_until_all_shards_have_them(daemon, monkeypatch):
    with daemon.connect() as store:
        space = open_space(store, *HEADS)
        keys = new_keys(space, 2)
        for shard in range(3):
            space.put(keys, content(2, space.page_bytes[0], shard), shard, read_once=True)
        pools = [Pool(4, space.page_bytes[0] // 4, 8) for _ in HEADS]
        copy, copied = ShardLoader._copy, []

        def fails(self: Any, *arguments: Any) -> int:
            copied.append(arguments)
            if len(copied) == 2:
                raise TransferTimeout("for once")
            return copy(self, *arguments)

        monkeypatch.setattr(ShardLoader, "_copy", fails)
        assert restored(space, keys, pools, np.arange(2)) == [[], [], []]
        assert space.lookup(keys).pages == 2
        assert [len(one) for one in restored(space, keys, pools, np.arange(2))] == [2, 2, 2]
        assert space.lookup(keys).pages == 0


def test_pages_on_disk_are_brought_to_memory_for_all_shards(tmp_path, wait_until):
    with with_disk(tmp_path) as store:
        space, keys, wrote, pools = stored(store, 6, model="on disk")
        for shard in range(3):
            space.persist(keys, shard)
    with with_disk(tmp_path) as store:
        space = open_space(store, *HEADS, model="on disk")
        assert space.lookup(keys).tiers == {"host": 0, "ssd": 6}
        assert restored(space, keys, pools, np.arange(6)) == wrote
        assert store._resources.waits > 0
        # The jobs that ask for the other shards end on a link of their own.
        wait_until(lambda: store.stats()["leases"] == 0)
        assert restored(space, keys, pools, np.arange(6)) == wrote


def test_a_cancelled_load_waits_for_no_further_shard(tmp_path, monkeypatch):
    with with_disk(tmp_path) as store:
        space, keys, _, pools = stored(store, 2, model="on disk")
        for shard in range(3):
            space.persist(keys, shard)
    asked: list[int] = []
    acquire = ShardLoader.acquire

    def counted(self: Any, opened: Any, keys: Any, shard: int, *rest: Any, **more: Any) -> Any:
        asked.append(shard)
        return acquire(self, opened, keys, shard, *rest, **more)

    def cancels(self: Any, *arguments: Any) -> int:
        arguments[-1].cancel()
        return 1

    monkeypatch.setattr(ShardLoader, "acquire", counted)
    monkeypatch.setattr(ShardLoader, "_copy", cancels)
    with with_disk(tmp_path) as store:
        space = open_space(store, *HEADS, model="on disk")
        assert restored(space, keys, pools, np.arange(2)) == [[], [], []]
    assert asked == [0]


def test_pages_of_which_one_is_too_large_together_are_loaded_apart(daemon, monkeypatch):
    with daemon.connect() as store:
        space, keys, _, pools = stored(store, 2)
        monkeypatch.setattr("kvstore.client.space.BATCH_BYTES", sum(space.page_bytes) - 1)
        parts = [(pool.kvpool, shard) for shard, pool in enumerate(pools)]
        jobs = space.restore_shards(keys, np.arange(2), parts)
        assert [job.result(TIMEOUT_S).pages for job in jobs] == [2, 2, 2]


def test_pages_that_are_read_once_stay_if_a_load_has_to_go_elsewhere(daemon, monkeypatch):
    with daemon.connect() as store:
        space = open_space(store, *HEADS)
        keys, pool = new_keys(space, 2), Pool(4, space.page_bytes[0] // 4, 8)
        wrote = content(2, space.page_bytes[0], 1)
        space.put(keys, wrote, read_once=True)
        ask, asked = Loader._ask, []

        def more_are_on_disk(self: Any, *arguments: Any) -> wire.Acquired:
            asked.append(arguments)
            answer = ask(self, *arguments)
            answer.more = int(len(asked) == 1)
            return answer

        monkeypatch.setattr(Loader, "_ask", more_are_on_disk)
        job = space.restore_to_kvpool(keys, pool.kvpool, np.arange(2))

        assert job.result(TIMEOUT_S).pages == 2
        assert len(asked) == 2
        assert space.lookup(keys).pages == 0


def test_a_load_of_a_node_that_is_away_is_a_miss(own_daemon, wait_until):
    with own_daemon.connect() as store:
        space, keys, _, pools = stored(store, 2)
        own_daemon.process.stop()
        wait_until(lambda: not store.connected)
        assert restored(space, keys, pools, np.arange(2)) == [[], [], []]
        assert store.troubles.total() == 1


def test_blocks_that_do_not_fit_start_no_load_of_any_shard(store):
    space, keys, _, pools = stored(store, 2)
    parts = [(pool.kvpool, shard) for shard, pool in enumerate(pools)]
    parts[2] = (Pool(4, space.page_bytes[0] // 4, 1).kvpool, 2)
    for order in ("page", "segment"):
        with pytest.raises(InvalidArgument) as refused:
            space.restore_shards(keys, [0, 1], parts, order)
        assert refused.value.field == "blocks"
    assert not any(plane.any() for pool in pools for plane in pool.planes)
    assert store.stats()["leases"] == 0


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
