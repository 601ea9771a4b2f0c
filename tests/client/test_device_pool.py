"""Goal: a pool on a device is filled through the slab, with what the node has and nothing else.

What the slab cannot take comes without it. The device is played by host memory: all but streams
runs as it does there; a device that is late is at the end.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from kvstore import mover
from kvstore.client.loads import LoadState
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec
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

torch = pytest.importorskip("torch")

from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier import gpu, lane  # noqa: E402
from kvstore.tier.slab import DeviceSlab  # noqa: E402


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES, device_slab=SLAB) as opened:
        yield opened


@pytest.fixture
def device(store, monkeypatch):
    """The store's slab as if it were on a device, and pools there."""
    slab = slab_of(store)
    monkeypatch.setattr(slab, "_mapped", False)
    monkeypatch.setattr(slab, "device", "cpu:0")
    return slab


def restored(space: Space, keys: PrefixKeys, pool: Pool) -> list[bytes]:
    """What a load puts into the first blocks of a pool on the device."""
    for plane in pool.planes:
        plane[:] = 0
    blocks = np.arange(len(keys))
    count = space.restore_to_kvpool(keys, pool.on("cpu:0"), blocks).result().pages
    return [pool.page(blocks[at : at + 1]) for at in range(count)]


@pytest.mark.parametrize(("gap", "capacity"), [(0, 1 << 20), (3, 1 << 20), (64, 8 * SIZE)])
@pytest.mark.parametrize("keep", [{}, {"ttl_s": 60.0}])
def test_a_pool_on_a_device_is_filled_through_the_slab(store, monkeypatch, gap, capacity, keep):
    from kvstore.tier import slab as tier_slab

    slab = DeviceSlab("cpu", capacity, mapped=False)
    slab.device = "cpu:0"
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
        job = space.restore_to_kvpool(keys, pool.on("cpu:0"), blocks, order=order)
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
    job = space.restore_to_kvpool(keys, pool.on("cpu:0"), np.arange(5))
    assert job.result().pages == 2
    assert store.troubles == {"corrupt": 1}
    assert not any(pool.planes[0][block].any() for block in (2, 3, 4))
    assert space.lookup(keys).pages == 2


def test_a_slab_that_fails_is_used_no_more_and_its_slots_go_to_nobody(store, device, monkeypatch):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)

    def fails(*arguments):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device._way_in, "bring", fails)
    pool = Pool(4, BLOCK, 16)
    for _ in range(2):
        assert restored(space, keys, pool) == [bytes(page) for page in pages], "by the lane"
        stats = store.slab_stats()
        assert "illegal memory access" in stats["broken"]
        assert (stats["errors"], stats["writing_bytes"]) == (1, 2 * SIZE)
    assert (space.lookup(keys).tiers, device.run(space.pages[0], keys.packed)) == ({"host": 2}, 0)
    assert get(space, keys) == [bytes(page) for page in pages]
    assert store.stats()["leases"] == 0


def test_a_slab_without_memory_for_the_moment_costs_no_miss_and_is_used_again(
    store, device, monkeypatch
):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)
    pool, stack = Pool(4, BLOCK, 16), torch.stack

    def full(*arguments, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "stack", full)
    assert restored(space, keys, pool) == [bytes(page) for page in pages]
    monkeypatch.setattr(torch, "stack", stack)
    hits = store.slab_stats()["pages_hit"]
    assert restored(space, keys, pool) == [bytes(page) for page in pages]
    stats = store.slab_stats()
    assert (stats["broken"], stats["errors"], stats["in_use_bytes"]) == ("", 1, 0)
    assert stats["pages_hit"] == hits + 2


def test_a_slab_that_fails_while_pages_leave_it_costs_no_miss(store, device, monkeypatch):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)

    def fails(*arguments):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(device, "_copy_out", fails)
    assert restored(space, keys, Pool(4, BLOCK, 16)) == [bytes(page) for page in pages]
    assert store.slab_stats()["errors"] == 1
    assert "unspecified launch failure" in store.slab_stats()["broken"]


def test_pages_that_do_not_fit_the_slab_reach_the_device_without_it(store, device):
    large = ShardSpec(layout=CanonicalLayout(4096), layers=(0, 2), heads=(0, 2))
    space = open_space(store, large)
    keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
    space.put(keys, pages)
    pool = Pool(4, space.page_bytes[0] // 4, 16)
    assert restored(space, keys, pool) == [bytes(page) for page in pages]
    assert store.slab_stats()["pages"] == 0


def test_a_slab_whose_slots_are_all_in_use_leaves_the_load_to_the_lane(store, device, monkeypatch):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)
    monkeypatch.setattr(device._index, "reserve", lambda *arguments, **named: None)
    assert restored(space, keys, Pool(4, BLOCK, 16)) == [bytes(page) for page in pages]
    assert store.slab_stats()["pages"] == 0


def test_a_device_that_fails_before_a_load_begins_costs_a_miss(store, device, monkeypatch):
    """The engine's step has asked for it: nothing may be raised there."""
    space = open_space(store)
    keys = new_keys(space, 2)
    space.put(keys, content(2, SIZE))
    pool = Pool(4, BLOCK, 16)
    lane = store.device_pool(pool.on("cpu:0"))

    def fails():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(lane, "fence", fails)
    assert space.restore_to_kvpool(keys, pool.on("cpu:0"), [0, 1]).result().pages == 0
    assert store.device_failures == {"copy": 1}


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
        keys, Pool(4, BLOCK, 4).on("cpu:0"), table, 0, progress, "page", 8, LoadState()
    )
    assert there is not None
    assert load() == 0
    assert there.copy.idle()


@pytest.fixture(params=[0, 1])
def late(request, store, monkeypatch) -> Iterator[LateDevice]:
    """The device of the store's slab and lanes: it does everything late and out of order."""
    device = LateDevice(request.param)
    monkeypatch.setattr(gpu, "open_device", lambda name: device)
    slab = DeviceSlab("cpu", 1 << 20, mapped=False, streams=device)
    slab.device = "cpu:0"
    slab_of(store).close()
    store._resources.promotion.slab = slab
    yield device
    device.stalled = False
    device.finish()


@pytest.mark.parametrize("order", ["page", "segment"])
def test_pages_come_through_a_slab_whose_device_is_late(store, late, monkeypatch, order):
    monkeypatch.setattr(lane, "SLICE_BYTES", 2 * SIZE)
    space = open_space(store)
    keys, pages = new_keys(space, 9), content(9, SIZE)
    space.put(keys, pages)
    for turn in range(2):
        pool = Pool(4, BLOCK, 16)
        seen = []
        late.current().run(lambda pool=pool, seen=seen: seen.append(pool.planes[0].any()))
        job = space.restore_to_kvpool(keys, pool.on("cpu:0"), np.arange(9), order=order)
        assert job.wait_layer(1, 10.0)
        assert job.result().pages == 9
        assert [pool.page(np.array([at])) for at in range(9)] == [bytes(page) for page in pages]
        assert seen == [False], "blocks were written while the engine still used them"
        assert store.slab_stats()["pages_hit"] == 9 * (turn + 1)
    slab_of(store).check()
    assert store.stats()["leases"] == 0


def test_a_device_that_hangs_while_pages_enter_the_slab_costs_a_miss(store, late, wait_until):
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)
    pool = Pool(4, BLOCK, 16)
    late.stalled = True
    hanging = space.restore_to_kvpool(keys, pool.on("cpu:0"), [0, 1])
    wait_until(lambda: store.device_failures == {"deadline": 1})
    assert "has not finished a copy" in store.slab_stats()["broken"]
    assert not hanging.done, "the device may still write its blocks"
    assert store.stats()["leases"] == 0, "the node is not kept waiting"

    late.stalled = False
    wait_until(lambda: hanging.done)
    assert hanging.result().pages == 0
    assert restored(space, keys, pool) == [bytes(page) for page in pages]


def test_a_device_that_hangs_while_pages_leave_the_slab_keeps_the_blocks(store, late, wait_until):
    """They go to nobody, and not to the lane either: the late copy would write over its pages."""
    space = open_space(store)
    keys, pages = new_keys(space, 2), content(2, SIZE)
    space.put(keys, pages)
    pool = Pool(4, BLOCK, 16)
    assert restored(space, keys, pool) == [bytes(page) for page in pages]
    late.stalled = True
    hanging = space.restore_to_kvpool(keys, pool.on("cpu:0"), [4, 5])
    wait_until(lambda: store.device_failures == {"deadline": 1})
    assert "has not finished a copy" in store.slab_stats()["broken"]
    assert not hanging.done, "the device may still write its blocks"
    assert store.slab_stats()["in_use_bytes"] == 2 * SIZE, "and read these slots"
    _, way_in, _ = store._resources.devices._lanes["cpu:0"]
    assert way_in._ring is None, "the lane was not tried"
    store.close()

    late.stalled = False
    wait_until(lambda: hanging.done)
    assert hanging.result().pages == 0
    late_bytes = [pool.page(np.array([at])) for at in (4, 5)]
    assert late_bytes == [bytes(page) for page in pages], "its slots were left alone"
