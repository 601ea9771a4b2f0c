"""Goal: one contract, whether the node is in this process or behind a socket."""

import ctypes
import threading

import msgspec
import numpy as np
import pytest

from kvstore.client.loads import LoadState
from kvstore.client.results import Hit, PutResult
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument, LayoutMismatch
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec
from tests.client.conftest import (
    FLAT,
    OPAQUE,
    SIZE,
    TIMEOUT_S,
    Pool,
    content,
    identity,
    new_keys,
    open_space,
)


def read(space: Space, keys: PrefixKeys, shard: int = 0) -> list[bytes]:
    """The pages that are there, by copy and by view, which must agree."""
    out = [np.zeros(space.page_bytes[shard], dtype=np.uint8) for _ in range(len(keys))]
    count = space.get(keys, out, shard)
    with space.get(keys, shard=shard) as views:
        assert [bytes(view) for view in views.arrays] == [bytes(one) for one in out[:count]]
        assert all(not view.flags.writeable for view in views.arrays)
    return [bytes(one) for one in out[:count]]


def test_what_was_put_is_what_is_read(store):
    space = open_space(store)
    keys, pages = new_keys(space, 5), content(5, SIZE)
    assert space.lookup(keys) == Hit(0, 0, {"host": 0}, 0.0)

    assert space.put(keys, pages) == PutResult(stored=5)

    hit = space.lookup(keys)
    assert (hit.pages, hit.pending, hit.tiers) == (5, 0, {"host": 5})
    assert hit.load_seconds > 0
    assert read(space, keys) == [bytes(page) for page in pages]
    assert not store.troubles


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.array])
def test_pages_may_be_any_kind_of_buffer(store, kind):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)

    space.put(keys, [kind(bytes(page)) if kind is not np.array else page for page in pages])

    assert read(space, keys) == [bytes(page) for page in pages]


def test_a_second_put_finds_the_pages_there(store):
    space = open_space(store)
    keys = new_keys(space, 4)
    space.put(keys[:2], content(2, SIZE))

    assert space.put(keys, content(4, SIZE, seed=2)) == PutResult(stored=2, existing=2)
    assert read(space, keys)[:2] == [bytes(page) for page in content(2, SIZE)]


def test_a_longer_prompt_reads_the_prefix_that_is_there(store):
    space = open_space(store)
    keys = new_keys(space, 6)
    space.put(keys[:4], content(4, SIZE))

    assert space.lookup(keys).pages == 4
    assert len(read(space, keys)) == 4
    assert len(read(space, keys[2:])) == 2, "and a stretch from the middle"


def test_spaces_shards_and_tenants_do_not_share_pages(store):
    model = identity().model
    space = open_space(store, model=model)
    keys = new_keys(space, 2)
    space.put(keys, content(2, SIZE))

    for fields in ({"revision": "2"}, {"scope": "private"}, {"kv_dtype": "uint8"}):
        other = open_space(store, **{"model": model, **fields})
        assert other.lookup(keys).pages == 0, fields
    rank = open_space(store, msgspec.structs.replace(FLAT, heads=(2, 4)), model=model)
    assert rank.lookup(keys).pages == 0


def test_all_ranks_or_none(store):
    shards = [msgspec.structs.replace(FLAT, heads=(at, at + 2)) for at in (0, 2)]
    space = open_space(store, *shards)
    keys = new_keys(space, 4)
    space.put(keys, content(4, SIZE), shard=0)
    space.put(keys[:3], content(3, SIZE, seed=2), shard=1)

    assert space.lookup(keys).pages == 3
    assert space.lookup(keys, shards=[0]).pages == 4
    assert len(read(space, keys, shard=1)) == 3
    assert read(space, keys, 0)[:3] != read(space, keys, 1)


def test_a_page_that_is_read_once_is_gone_after_its_reader(store):
    space = open_space(store)
    keys = new_keys(space, 2)
    space.put(keys, content(2, SIZE), read_once=True)
    assert space.prefetch(keys).result(10) == 2, "which reads none of them"

    with space.get(keys) as views:
        assert len(views) == 2
    assert space.lookup(keys).pages == 0


def test_a_page_with_a_time_to_live_leaves_by_itself(store, wait_until):
    space = open_space(store)
    keys = new_keys(space, 2)
    space.put(keys, content(2, SIZE), ttl_s=0.05)

    wait_until(lambda: space.lookup(keys).pages == 0)


def test_a_lookup_waits_for_a_page_that_is_being_written(store, wait_until):
    space = open_space(store)
    keys = new_keys(space, 3)
    opened = space.numbers()
    number, (shard,) = opened.space, opened.shards
    begin = wire.BeginPut(0, 1 << 40, number, shard, keys.packed, b"")
    assert isinstance(store._link.request(begin, TIMEOUT_S), wire.PutGranted)
    assert space.lookup(keys) == Hit(0, 3, {"host": 0}, 0.0)
    found: list[Hit] = []
    waiter = threading.Thread(target=lambda: found.append(space.lookup(keys, wait_s=TIMEOUT_S)))

    waiter.start()
    wait_until(lambda: store.stats()["waiting_requests"] == 1)
    store._link.request(wire.CommitPut(0, 1 << 40, bytes(48)), TIMEOUT_S)
    waiter.join(TIMEOUT_S)

    assert [(hit.pages, hit.pending) for hit in found] == [(3, 0)]


def test_a_lookup_waits_no_longer_than_it_was_told(store):
    space = open_space(store)
    keys = new_keys(space, 3)
    opened = space.numbers()
    number, (shard,) = opened.space, opened.shards
    begin = wire.BeginPut(0, 1 << 41, number, shard, keys.packed, b"")
    store._link.request(begin, TIMEOUT_S)

    hit = space.lookup(keys, wait_s=0.05)

    assert (hit.pages, hit.pending) == (0, 3)
    store._link.send(wire.AbortPut(1 << 41))


def test_no_keys_are_a_miss_without_trouble(store):
    space = open_space(store)
    keys = new_keys(space, 0)
    pool = Pool(4, 512, 4)

    assert space.lookup(keys).pages == 0
    assert space.put(keys, []) == PutResult(0)
    assert space.get(keys, []) == 0
    assert len(space.get(keys)) == 0
    for order in ("page", "segment"):
        job = space.restore_to_kvpool(keys, pool.kvpool, [], order=order)
        assert job.result(TIMEOUT_S).pages == 0
    assert not store.troubles


# Moves between pages and an engine's pool


LAYOUTS = {
    "float32": ("float32", CanonicalLayout(8)),
    "bfloat16": ("bfloat16", CanonicalLayout(16)),
    "opaque": ("uint8", OPAQUE),
}


@pytest.mark.parametrize("order", ["page", "segment"])
@pytest.mark.parametrize("block_tokens", [1, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_extracted_from_one_pool_is_restored_into_another(
    store, layout, block_tokens, order
):
    dtype, kind = LAYOUTS[layout]
    if layout == "opaque":
        kind = msgspec.structs.replace(
            kind, block_tokens=block_tokens, block_bytes=24 * block_tokens
        )
    spec = ShardSpec(layout=kind, layers=(0, 3), heads=(0, 2))
    space = open_space(store, spec, kv_dtype=dtype, page_tokens=64)
    per_layer = 1 if layout == "opaque" else 2
    block_bytes = space.page_bytes[0] // (3 * per_layer) // (64 // block_tokens)
    pages, per_page = 4, 64 // block_tokens
    source = Pool(3 * per_layer, block_bytes, pages * per_page + 3, 0, per_layer)
    target = Pool(3 * per_layer, block_bytes, 2 * pages * per_page, 32, per_layer)
    source.fill(5)
    target.fill(6)
    chance = np.random.default_rng(7)
    mine = chance.permutation(pages * per_page + 3)[: pages * per_page].reshape(pages, per_page)
    theirs = chance.permutation(2 * pages * per_page)[: pages * per_page].reshape(pages, per_page)
    others = np.setdiff1d(np.arange(2 * pages * per_page), theirs)
    before = target.page(others)
    keys = new_keys(space, pages)

    stored = space.extract_from_kvpool(source.kvpool, mine, keys).result(TIMEOUT_S)
    assert stored == PutResult(stored=pages)
    assert read(space, keys) == [source.page(blocks) for blocks in mine]

    job = space.restore_to_kvpool(keys, target.kvpool, theirs, order=order)
    for layer in range(3):
        assert job.wait_layer(layer, TIMEOUT_S)
        part = slice(layer, layer + 1)
        for one, other in zip(mine, theirs, strict=True):
            assert target.page(other, part) == source.page(one, part)
    result = job.result(TIMEOUT_S)
    assert (result.pages, result.size_bytes) == (pages, pages * space.page_bytes[0])
    assert target.page(others) == before, "blocks of others are not touched"


def test_a_restore_of_more_than_there_is_restores_the_prefix(store):
    space = open_space(store)
    source, target = Pool(4, SIZE // 4, 4), Pool(4, SIZE // 4, 4)
    source.fill(1)
    keys = new_keys(space, 4)
    space.extract_from_kvpool(source.kvpool, [3, 1], keys[:2]).result(TIMEOUT_S)

    result = space.restore_to_kvpool(keys, target.kvpool, [0, 1, 2, 3]).result(TIMEOUT_S)

    assert result.pages == 2
    assert target.page(np.array([0, 1])) == source.page(np.array([3, 1]))
    assert not target.page(np.array([2, 3])).strip(b"\0")


@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_cancelled_restore_ends_and_reports_only_pages_that_are_whole(store, order):
    space = open_space(store, page_tokens=512)
    size = space.page_bytes[0]
    source, target = Pool(4, size // 4, 8), Pool(4, size // 4, 8)
    source.fill(1)
    keys = new_keys(space, 8)
    space.extract_from_kvpool(source.kvpool, np.arange(8), keys).result(TIMEOUT_S)

    job = space.restore_to_kvpool(keys, target.kvpool, np.arange(8), order=order)
    job.cancel()

    assert job.wait(TIMEOUT_S)
    for page in range(job.result(0).pages):
        assert target.page(np.array([page])) == source.page(np.array([page]))
    assert space.lookup(keys).pages == 8, "cancelling is no corruption"
    assert not store.troubles


@pytest.mark.parametrize("looked_at", ["copied", "viewed"])
def test_a_flipped_byte_is_a_miss_counted_and_gone_and_nothing_else_is(
    store, looked_at, wait_until
):
    space = open_space(store)
    keys, pages = new_keys(space, 6), content(6, SIZE)
    space.put(keys, pages)
    other = open_space(store)
    other.put(keys, pages)
    leased = space._loads.acquire(space.numbers(), keys, 0, 1 << 42, LoadState())
    with store._link.moving() as memory:
        address = int(memory.locate(leased.addresses, 1, write=True)[3])
    byte = ctypes.c_ubyte.from_address(address + SIZE - 1)
    byte.value ^= 0x10
    store._link.send(wire.Release(1 << 42))
    out = [np.zeros(SIZE, dtype=np.uint8) for _ in range(6)]
    before = store.stats()["counts"].get("removed_corrupt", 0)

    if looked_at == "copied":
        assert space.get(keys, out) == 3
    else:
        with space.get(keys) as views:
            assert len(views) == 3
            out[:3] = [view.copy() for view in views.arrays]

    assert store.troubles == {"corrupt": 1}
    assert space.lookup(keys).pages == 3
    # A node that needed long for its statistics gives them out once more.
    wait_until(lambda: store.stats()["counts"].get("removed_corrupt", 0) == before + 3)
    assert [bytes(one) for one in out[:3]] == [bytes(page) for page in pages[:3]]
    assert read(other, keys) == [bytes(page) for page in pages]
    assert space.put(keys, pages) == PutResult(stored=3, existing=3)
    assert read(space, keys) == [bytes(page) for page in pages]


# Mistakes


def test_wrong_buffers_are_refused_by_name(store):
    space = open_space(store)
    keys = new_keys(space, 2)
    good = content(2, SIZE)
    strided = np.zeros((SIZE, 2), dtype=np.uint8)[:, 0]
    read_only = np.zeros(SIZE, dtype=np.uint8)
    read_only.flags.writeable = False

    for pages in (good[:1], content(3, SIZE), content(2, SIZE - 1), content(2, 2 * SIZE),
                  [good[0], strided], [good[0], memoryview(strided)]):  # fmt: skip
        with pytest.raises(InvalidArgument) as refused:
            space.put(keys, pages)
        assert refused.value.field == "pages"
    for out in (good[:1], content(2, SIZE - 1), [good[0], read_only], [good[0], bytes(SIZE)]):
        with pytest.raises(InvalidArgument) as refused:
            space.get(keys, out)
        assert refused.value.field == "out"
    assert space.lookup(keys).pages == 0


@pytest.mark.parametrize("shard", [1, -1])
def test_a_shard_that_the_engine_does_not_have_is_refused_by_name(store, shard):
    space = open_space(store)
    keys = new_keys(space, 2)
    space.put(keys, content(2, SIZE))

    for ask in (
        lambda: space.lookup(keys, [shard]),
        lambda: space.put(keys, content(2, SIZE), shard),
        lambda: space.get(keys, shard=shard),
        lambda: space.get(keys, content(2, SIZE), shard),
        lambda: space.persist(keys, shard),
        lambda: space.prefetch(keys, shard),
    ):
        with pytest.raises(InvalidArgument) as refused:
            ask()
        assert refused.value.field == "shard"


@pytest.mark.parametrize(
    ("blocks", "field"),
    [([0, 1, 2], "blocks"), ([0], "blocks"), ([0, 8], "blocks"), ([0, -1], "blocks")],
)
def test_wrong_blocks_are_refused_by_name(store, blocks, field):
    space = open_space(store)
    keys = new_keys(space, 2)
    pool = Pool(4, SIZE // 4, 8)

    for move in (
        lambda: space.restore_to_kvpool(keys, pool.kvpool, blocks),
        lambda: space.extract_from_kvpool(pool.kvpool, blocks, keys),
    ):
        with pytest.raises(InvalidArgument) as refused:
            move()
        assert refused.value.field == field


def test_a_pool_of_other_blocks_is_refused_by_name(store):
    space = open_space(store)
    pool = Pool(4, SIZE // 4 - 16, 8)

    with pytest.raises(LayoutMismatch) as refused:
        space.restore_to_kvpool(new_keys(space, 2), pool.kvpool, [0, 1])
    assert refused.value.field == "block_bytes"


@pytest.mark.parametrize(
    ("change", "field"),
    [({"layout": CanonicalLayout(32)}, "head_dim"), ({"window_pages": 2}, "window_pages")],
)
def test_a_layout_that_contradicts_the_space_is_refused_by_name(store, change, field):
    model = open_space(store).identity.model

    with pytest.raises(LayoutMismatch) as refused:
        open_space(store, msgspec.structs.replace(FLAT, **change), model=model)
    assert refused.value.field == field


def test_a_page_larger_than_an_extent_is_refused_by_name(store):
    with pytest.raises(InvalidArgument) as refused:
        open_space(store, page_tokens=16_384)
    assert refused.value.field == "page_bytes"


def test_a_space_without_shards_is_refused_by_name(store):
    with pytest.raises(InvalidArgument) as refused:
        store.space(identity(), [])
    assert refused.value.field == "shards"


def test_a_full_pool_whose_pages_are_all_read_takes_no_more_until_they_are_not():
    with KVStore.open(1 << 20, extent_bytes=1 << 20) as store:
        space = open_space(store, page_tokens=32)  # 16 pages of 64 KiB
        size = space.page_bytes[0]
        first, second = new_keys(space, 8), new_keys(space, 9, start=10_000)
        space.put(first, content(8, size))
        with space.get(first) as views:
            assert len(views) == 8
            seen = [bytes(view) for view in views.arrays]
            with pytest.raises(CapacityError) as refused:
                space.put(second, content(9, size, seed=2))
            assert refused.value.retryable
            assert [bytes(view) for view in views.arrays] == seen
        for start in range(0, 9, 3):  # the quota is half of the pool
            keys = second[start : start + 3]
            space.put(keys, content(9, size, seed=2)[start : start + 3])
        assert space.lookup(second).pages == 9
        assert 0 < space.lookup(first).pages < 8, "evicted from the tail"


def test_a_closed_store_misses_and_stores_nothing(store):
    space = open_space(store)
    keys = new_keys(space, 1)
    space.put(keys, content(1, SIZE))

    store.close()
    store.close()

    assert not store.connected
    assert space.lookup(keys).pages == 0
    assert space.get(keys, content(1, SIZE)) == 0
    assert len(space.get(keys)) == 0
    with pytest.raises(Exception, match=r"closed|not connected") as refused:
        space.put(keys, content(1, SIZE))
    assert getattr(refused.value, "retryable", False)
    pool = Pool(4, SIZE // 4, 1)
    assert space.restore_to_kvpool(keys, pool.kvpool, [0]).result(TIMEOUT_S).pages == 0
    with pytest.raises(CapacityError):
        space.extract_from_kvpool(pool.kvpool, [0], keys).result(TIMEOUT_S)
