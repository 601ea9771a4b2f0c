"""Goal: a pool on a device is filled through the slab, with what the node has and nothing else.

The device is played by host memory: all but streams runs as it does there.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import mover
from kvstore.client.loads import LoadState
from kvstore.client.store import KVStore
from kvstore.protocol.page import CanonicalLayout, ShardSpec
from tests.client.conftest import (
    CAPACITY_BYTES,
    EXTENT_BYTES,
    SLAB,
    Pool,
    content,
    new_keys,
    open_space,
)
from tests.client.slabs import BLOCK, SIZE, get, host_byte, slab_of


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, device_slab=SLAB) as opened:
        yield opened


@pytest.fixture
def device(store, monkeypatch):
    """The store's slab as if it were on a device, and pools there."""
    slab = slab_of(store)
    monkeypatch.setattr(slab, "_mapped", False)
    monkeypatch.setattr(slab, "device", "cuda:7")
    return slab


@pytest.mark.parametrize(("gap", "capacity"), [(0, 1 << 20), (3, 1 << 20), (64, 8 * SIZE)])
@pytest.mark.parametrize("keep", [{}, {"ttl_s": 60.0}])
def test_a_pool_on_a_device_is_filled_through_the_slab(store, monkeypatch, gap, capacity, keep):
    from kvstore.tier import slab as tier_slab

    slab = tier_slab.DeviceSlab("cpu", capacity, mapped=False)
    slab.device = "cuda:7"
    slab_of(store).close()
    store._resources.promotion.slab = slab
    monkeypatch.setattr(tier_slab, "STAGE_BYTES", 2 * SIZE)
    space = open_space(store)
    keys, pages = new_keys(space, 12), content(12, SIZE)
    space.put(keys, pages, **keep)
    pool, blocks = Pool(4, BLOCK, 16, gap), np.array([9, 2, 3, 15, 0, 4, 5, 6, 12, 11, 10, 1])
    for order in ("page", "segment"):
        for plane in pool.planes:
            plane[:] = 0
        job = space.restore_to_kvpool(keys, pool.on("cuda:7"), blocks, order=order)
        assert job.wait_layer(1, 10.0)
        assert job.result().pages == 12
        assert job.verified_pages == 12
        assert [pool.page(np.array([block])) for block in blocks] == [bytes(p) for p in pages]
        slab.check()
    assert store.slab_stats()["in_use_bytes"] == 0
    if keep:
        assert store.slab_stats()["pages"] == 0, "what expires does not stay"
    assert store.stats()["leases"] == 0


def test_a_damaged_page_never_reaches_a_device(store, device):
    space = open_space(store)
    keys, pages = new_keys(space, 5), content(5, SIZE)
    space.put(keys, pages)
    host_byte(store, space, keys, 2).value ^= 1
    pool = Pool(4, BLOCK, 16)
    job = space.restore_to_kvpool(keys, pool.on("cuda:7"), np.arange(5))
    assert job.result().pages == 2
    assert store.troubles == {"corrupt": 1}
    assert not any(pool.planes[0][block].any() for block in (2, 3, 4))
    assert space.lookup(keys).pages == 2


def test_a_device_that_fails_is_used_no_more_and_its_slots_go_to_nobody(store, device, monkeypatch):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)

    def fails(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device._way_in, "copy", fails)
    pool = Pool(4, BLOCK, 16)
    assert space.restore_to_kvpool(keys, pool.on("cuda:7"), [0, 1]).result().pages == 0
    stats = store.slab_stats()
    assert "illegal memory access" in stats["broken"]
    assert stats["writing_bytes"] == 2 * SIZE
    assert (space.lookup(keys).tiers, device.run(space.pages[0], keys.packed)) == ({"host": 2}, 0)
    assert space.restore_to_kvpool(keys, pool.on("cuda:7"), [0, 1]).result().pages == 0
    assert get(space, keys) == [bytes(page) for page in pages]


def test_a_device_without_memory_for_the_moment_is_a_miss_and_used_again(
    store, device, monkeypatch
):
    import torch

    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)
    pool, stack = Pool(4, BLOCK, 16), torch.stack

    def full(*arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "stack", full)
    assert space.restore_to_kvpool(keys, pool.on("cuda:7"), [0, 1]).result().pages == 0
    monkeypatch.setattr(torch, "stack", stack)
    assert space.restore_to_kvpool(keys, pool.on("cuda:7"), [0, 1]).result().pages == 2
    stats = store.slab_stats()
    assert (stats["broken"], stats["errors"], stats["in_use_bytes"]) == ("", 1, 0)


def test_a_device_that_fails_while_pages_leave_the_slab_is_a_miss(store, device, monkeypatch):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)

    def fails(*arguments):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(device, "_copy_out", fails)
    pool = Pool(4, BLOCK, 16)
    assert space.restore_to_kvpool(keys, pool.on("cuda:7"), [0, 1]).result().pages == 0
    assert store.slab_stats()["errors"] == 1


def test_pages_too_large_for_the_slab_are_said_once(store, caplog):
    large = ShardSpec(layout=CanonicalLayout(4096), layers=(0, 2), heads=(0, 2))
    space = open_space(store, large)
    keys = new_keys(space, 2)
    space.put(keys, content(2, space.page_bytes[0]))
    assert len(get(space, keys)) == len(get(space, keys)) == 2
    (said,) = [one.getMessage() for one in caplog.records if "do not fit" in one.getMessage()]
    assert str(8 * space.page_bytes[0]) in said
    assert store.slab_stats()["pages"] == 0


def test_a_cancelled_load_to_a_device_ends(store, device):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)
    progress = mover.Progress()
    progress.cancel()
    table = np.array([[0], [1]])
    there, load = space._loads.device_load(
        keys, Pool(4, BLOCK, 4).on("cuda:7"), table, 0, progress, "page", 8, LoadState()
    )
    assert there is None
    assert load() == 0
