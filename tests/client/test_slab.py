"""Goal: a slab saves reads of the node, and never shows a page that the node would not have."""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import mover
from kvstore.client.loads import LoadState
from kvstore.client.promotion import Promotion
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import InvalidArgument, TierUnavailable
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec
from tests.client.conftest import (
    CAPACITY_BYTES,
    EXTENT_BYTES,
    FLAT,
    READY,
    SLAB,
    Pool,
    arguments,
    content,
    new_keys,
    open_space,
)
from tests.client.slabs import BLOCK, SIZE, get, host_byte, loaded_bytes, settle, slab_of


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, device_slab=SLAB) as opened:
        yield opened


@pytest.fixture
def stored(store, wait_until):
    """A space with six pages, all of them in the slab too."""
    space = open_space(store)
    keys, pages = new_keys(space, 6), content(6, SIZE)
    space.put(keys, pages)
    assert get(space, keys) == [bytes(page) for page in pages]
    settle(store, wait_until)
    assert slab_of(store).run(space.pages[0], keys.packed) == 6
    return space, keys, [bytes(page) for page in pages]


def slab_address(store: KVStore, space: Space, keys: PrefixKeys, index: int) -> int:
    slab = slab_of(store)
    held = slab._pin(space.pages[0], keys)
    try:
        return int(slab._addresses(held.slots)[index])
    finally:
        slab._unpin(held)


def test_the_second_load_asks_the_node_for_nothing(store, stored):
    space, keys, pages = stored
    before = loaded_bytes(store)
    assert get(space, keys) == pages
    assert loaded_bytes(store) == before
    hit = space.lookup(keys)
    assert (hit.pages, hit.tiers, hit.load_seconds) == (6, {"host": 0, "gpu": 6}, 0.0)
    stats = store.stats()["slab"]
    assert (stats["pages_promoted"], stats["pages_hit"], stats["device"]) == (6, 6, "cpu")


def test_what_the_slab_lacks_comes_from_the_node_in_the_same_load(store, stored, wait_until):
    space, keys, pages = stored
    slab_of(store).forget(space.pages[0], keys[4])
    before = loaded_bytes(store)
    assert space.lookup(keys).tiers == {"host": 2, "gpu": 4}
    assert get(space, keys) == pages
    assert loaded_bytes(store) - before == 2 * SIZE, "page 5 follows a gap"
    settle(store, wait_until)
    assert slab_of(store).run(space.pages[0], keys.packed) == 6


@pytest.mark.parametrize("order", ["page", "segment"])
@pytest.mark.parametrize("in_slab", [0, 4, 6])
def test_a_restore_is_the_same_wherever_its_pages_are(store, stored, order, in_slab):
    space, keys, pages = stored
    slab_of(store).forget(space.pages[0], keys[in_slab:].packed)
    pool, blocks = Pool(4, BLOCK, 16), np.array([9, 2, 3, 15, 0, 7])
    job = space.restore_to_kvpool(keys, pool.kvpool, blocks, order=order)
    for layer in range(2):
        assert job.wait_layer(layer, 10.0)
        part = slice(layer, layer + 1)
        each = SIZE // 2
        for page, block in enumerate(blocks):
            there = pool.page(np.array([block]), part)
            assert there == pages[page][layer * each : (layer + 1) * each]
    assert job.result().pages == 6
    if order == "segment":
        assert job.verified_pages == 6


def test_a_page_that_changed_in_the_slab_is_read_from_the_node(store, stored):
    space, keys, pages = stored
    address = slab_address(store, space, keys, 3)
    ctypes.c_ubyte.from_address(address + 17).value ^= 1
    assert get(space, keys) == pages
    stats = store.slab_stats()
    assert (stats["errors"], stats["pages_forgotten"]) == (1, 1)
    assert store.troubles == {}, "nothing became a miss"


def test_layers_announced_by_the_slab_are_all_that_come(store, stored):
    """A page behind a damaged one is not loaded after its layers were announced."""
    space, keys, _ = stored
    ctypes.c_ubyte.from_address(slab_address(store, space, keys, 3)).value ^= 1
    pool = Pool(4, BLOCK, 16)
    job = space.restore_to_kvpool(keys, pool.kvpool, np.arange(6), order="segment")
    assert job.wait_layer(1, 10.0)
    assert job.verified_pages == 3
    assert job.result().pages == 3


def test_a_page_that_changes_on_its_way_into_the_slab_is_not_kept(store, monkeypatch, wait_until):
    space = open_space(store)
    keys, pages = new_keys(space, 4), content(4, SIZE)
    space.put(keys, pages)
    slab, real = slab_of(store), slab_of(store).fill

    def fill(taken, keys, sources, progress=None):
        changed = np.frombuffer(ctypes.string_at(int(sources[2]), SIZE), dtype=np.uint8).copy()
        changed[5] ^= 1
        sources[2] = changed.ctypes.data
        return real(taken, keys, sources, progress)

    monkeypatch.setattr(slab, "fill", fill)
    assert len(get(space, keys)) == 4
    settle(store, wait_until)
    assert slab.run(space.pages[0], keys.packed) == 2
    assert store.slab_stats()["pages_failed"] == 2


def test_a_cancelled_promotion_keeps_nothing(store, wait_until, monkeypatch):
    space = open_space(store)
    keys, pages = new_keys(space, 4), content(4, SIZE)
    space.put(keys, pages)
    slab, real = slab_of(store), slab_of(store).fill

    def fill(taken, keys, sources, progress=None):
        progress.cancel()
        return real(taken, keys, sources, progress)

    monkeypatch.setattr(slab, "fill", fill)
    assert len(get(space, keys)) == 4
    settle(store, wait_until)
    assert slab.run(space.pages[0], keys.packed) == 0
    assert store.slab_stats()["writing_bytes"] == 0


@pytest.mark.parametrize("keep", [{"ttl_s": 60.0}, {"read_once": True}])
def test_pages_that_leave_by_themselves_are_not_kept(store, keep):
    space = open_space(store)
    keys, pages = new_keys(space, 4), content(4, SIZE)
    space.put(keys[:2], pages[:2])
    space.put(keys[2:], pages[2:], **keep)
    assert len(get(space, keys)) == 4
    store._resources.promotion._worker.close()
    assert slab_of(store).run(space.pages[0], keys.packed) == 2
    assert store.slab_stats()["pages"] == 2


def test_pages_are_found_only_under_their_own_space_and_shard(store, stored):
    space, keys, _ = stored
    fields = {"model": space.identity.model}
    other_heads = ShardSpec(layout=FLAT.layout, layers=(0, 2), heads=(2, 4))
    for other in (
        open_space(store, page_tokens=8, **fields),
        open_space(store, revision="2", **fields),
        open_space(store, scope="mine", **fields),
        open_space(store, other_heads, **fields),
    ):
        assert other.lookup(keys).pages == 0
        assert get(other, keys) == []
    both = open_space(store, FLAT, other_heads, **fields)
    assert both.lookup(keys).pages == 0, "one shard has nothing"
    assert both.lookup(keys, shards=[0]).tiers["gpu"] == 6


def test_a_quarantined_page_leaves_the_slab(store, wait_until):
    space = open_space(store)
    keys, pages = new_keys(space, 4), content(4, SIZE)
    space.put(keys, pages)
    assert len(get(space, keys[2:])) == 2
    settle(store, wait_until)
    host_byte(store, space, keys, 2).value ^= 1
    assert len(get(space, keys)) == 2
    assert store.troubles == {"corrupt": 1}
    assert slab_of(store).run(space.pages[0], keys[2:].packed) == 0


def test_the_slab_serves_while_the_node_is_away_and_after_it_comes_back_empty(
    own_daemon, spawn, wait_until
):
    with own_daemon.connect(device_slab=SLAB) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 3), content(3, SIZE)
        space.put(keys, pages)
        get(space, keys)
        settle(store, wait_until)
        own_daemon.process.stop()
        wait_until(lambda: not store.connected)
        assert space.lookup(keys).tiers == {"host": 0, "gpu": 3}
        assert get(space, keys) == [bytes(page) for page in pages]
        spawn(arguments(own_daemon.socket), ready=READY)
        wait_until(lambda: store.connected)
        assert get(space, keys) == [bytes(page) for page in pages]
        assert space.lookup(keys).tiers == {"host": 0, "gpu": 3}
        assert space.put(keys, pages).stored == 3, "the node has lost them"


def test_a_promotion_that_may_not_wait_is_made_at_once(store, monkeypatch):
    monkeypatch.setattr("kvstore.client.promotion.PENDING_SHARE", 1 << 40)
    space = open_space(store)
    keys, pages = new_keys(space, 3), content(3, SIZE)
    space.put(keys, pages)
    get(space, keys)
    assert slab_of(store).run(space.pages[0], keys.packed) == 3
    assert store._resources.promotion._worker._threads == []


def test_a_closed_worker_leaves_the_promotion_to_the_caller(store):
    space = open_space(store)
    keys, pages = new_keys(space, 3), content(3, SIZE)
    space.put(keys, pages)
    store._resources.promotion._worker.close()
    get(space, keys)
    assert store.slab_stats()["pending_bytes"] == 0
    assert slab_of(store).run(space.pages[0], keys.packed) == 3
    assert store.stats()["leases"] == 0


def test_a_forked_child_has_no_slab_and_reads_from_the_node(own_daemon, wait_until):
    with own_daemon.connect(device_slab=SLAB) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 3), content(3, SIZE)
        space.put(keys, pages)
        get(space, keys)
        settle(store, wait_until)
        child = os.fork()
        if not child:
            alone = store.slab_stats() is None
            os._exit(0 if alone and get(space, keys) == [bytes(page) for page in pages] else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert slab_of(store).run(space.pages[0], keys.packed) == 3


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        (DeviceSlabConfig(device="tpu:0", capacity_bytes=1 << 20), InvalidArgument, "tpu"),
        (DeviceSlabConfig(device="meta", capacity_bytes=1 << 20), InvalidArgument, "neither"),
        (DeviceSlabConfig(device="cpu", capacity_bytes=1), InvalidArgument, "no page"),
        (DeviceSlabConfig(device="cpu", capacity_bytes=1 << 60), TierUnavailable, "smaller"),
        (DeviceSlabConfig(device="cuda:99", capacity_bytes=1 << 20), TierUnavailable, "CUDA"),
    ],
)
def test_a_slab_that_cannot_be_had_is_refused_by_name(config, error, words):
    with pytest.raises(error, match=words):
        KVStore.open(CAPACITY_BYTES, device_slab=config)


def test_without_torch_a_slab_is_refused_and_a_store_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "kvstore.tier.slab", None)
    with pytest.raises(TierUnavailable, match="torch"):
        KVStore.open(CAPACITY_BYTES, device_slab=SLAB)
    with KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES) as store:
        assert store.slab_stats() is None
        assert "slab" not in store.stats()


def test_an_engine_may_empty_its_slab_and_reads_on_from_the_node(store, stored):
    space, keys, pages = stored
    assert store.clear_slab() == 6
    assert store.clear_slab() == store.slab_stats()["pages"] == 0
    assert get(space, keys) == pages
    with KVStore.open(1 << 20, extent_bytes=1 << 20) as bare:
        assert bare.clear_slab() == 0


@pytest.mark.parametrize("mapped", [True, False])
def test_whatever_threads_do_at_once_no_wrong_byte_is_loaded(mapped):
    """A small slab that evicts all the time; loads and forgets from four threads."""
    from kvstore.tier.slab import DeviceSlab

    slab = DeviceSlab("cpu", 1 << 20, mapped=mapped)
    if not mapped:
        slab.device = "cpu:0"
    with KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES) as store:
        promotion = store._resources.promotion = Promotion(slab)
        small = ShardSpec(layout=CanonicalLayout(64), layers=(0, 1), heads=(0, 2))
        spaces = [open_space(store), open_space(store, small), open_space(store)]
        prompts = []
        for space in spaces:
            for start in range(0, 1200, 240):
                size = space.page_bytes[0]
                keys, pages = new_keys(space, 40, start), content(40, size, start)
                space.put(keys, pages)
                prompts.append((space, keys, [bytes(page) for page in pages]))
        wrong: list[str] = []

        def engine(seed: int) -> None:
            chance = np.random.default_rng(seed)
            for _ in range(60):
                space, keys, pages = prompts[chance.integers(len(prompts))]
                first = int(chance.integers(20))
                part, expected = keys[first:], pages[first:]
                if mapped:
                    found = get(space, part)
                else:
                    pool = Pool(4 if space.page_bytes[0] == SIZE else 2, BLOCK, 64)
                    blocks = chance.permutation(64)[: len(part)]
                    plain = pool.kvpool
                    device = KVPool(plain.planes, BLOCK, BLOCK, 64, 2, slab.device)
                    table, progress = blocks.reshape(-1, 1), mover.Progress()
                    _, load = space._loads.device_load(
                        part, device, table, 0, progress, "page", 16, LoadState()
                    )
                    found = [pool.page(np.array([block])) for block in blocks[: load()]]
                if found != expected[: len(found)]:
                    wrong.append(f"{space.identity.model}: {first}")
                # Loads to a device that meet in one page may miss it; a store makes one at a time.
                if mapped and len(found) < len(part):
                    wrong.append(f"a miss: {len(found)} of {len(part)}")
                if chance.random() < 0.2:
                    slab.forget(space.pages[0], part[:5].packed)

        threads = [threading.Thread(target=engine, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50.0)
        promotion._worker.close()
        slab.check()
        stats = slab.stats()
        assert wrong == []
        assert stats["pages_hit"] > 100
        assert stats["pages_evicted"] > 50
        assert (stats["writing_bytes"], stats["in_use_bytes"]) == (0, 0)
        assert store.stats()["leases"] == 0


def test_a_client_shows_its_slab_as_prometheus_series(store, stored):
    from kvstore.server.metrics import render_slab

    space, keys, _ = stored
    assert len(get(space, keys)) == len(keys)

    text = render_slab(store.slab_stats()).decode()

    assert f"kvstore_slab_pages_hit_total {len(keys)}.0" in text
    assert f"kvstore_slab_pages_promoted_total {len(keys)}.0" in text
    assert f'kvstore_slab_bytes{{state="ready"}} {float(len(keys) * SIZE)}' in text
    assert "kvstore_slab_broken 0.0" in text
