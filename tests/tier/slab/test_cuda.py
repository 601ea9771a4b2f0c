"""What only a CUDA device can show: real streams, pinned memory, a pool in device memory."""

import numpy as np
import pytest
import torch

from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import CanonicalLayout, ShardSpec
from tests.client.conftest import content, new_keys, open_space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SHARD = ShardSpec(layout=CanonicalLayout(128), layers=(0, 4), heads=(0, 2))
BLOCKS, PAGES = 64, 24


def open_store(capacity_bytes: int = 64 << 20) -> KVStore:
    slab = DeviceSlabConfig(device="cuda:0", capacity_bytes=capacity_bytes)
    return KVStore.open(64 << 20, extent_bytes=16 << 20, device_slab=slab)


def device_pool(block_bytes: int, gap: int) -> tuple[torch.Tensor, KVPool]:
    stride = block_bytes + gap
    memory = torch.zeros((8, BLOCKS, stride), dtype=torch.uint8, device="cuda:0")
    planes = tuple(memory.data_ptr() + at * BLOCKS * stride for at in range(8))
    return memory, KVPool(planes, block_bytes, stride, BLOCKS, 2, "cuda:0")


@pytest.mark.parametrize("gap", [0, 3, 64])
@pytest.mark.parametrize("order", ["page", "segment"])
def test_pages_reach_a_pool_on_the_device_and_come_from_the_slab_the_second_time(gap, order):
    with open_store() as store:
        space = open_space(store, SHARD)
        keys, pages = new_keys(space, PAGES), content(PAGES, space.page_bytes[0])
        space.put(keys, pages)
        memory, pool = device_pool(space.page_bytes[0] // 8, gap)
        blocks = np.random.default_rng(1).permutation(BLOCKS)[:PAGES]
        for turn in range(2):
            memory.zero_()
            before = store.stats()["counts"].get("loaded_bytes", 0)
            job = space.restore_to_kvpool(keys, pool, blocks, order=order)
            assert job.wait_layer(3, 30.0)
            assert job.result().pages == PAGES
            found = memory.cpu().numpy()[:, :, : pool.block_bytes]
            for page, block in enumerate(blocks):
                assert found[:, block].tobytes() == bytes(pages[page])
            read = store.stats()["counts"]["loaded_bytes"] - before
            assert read == (0 if turn else PAGES * space.page_bytes[0])
        assert space.lookup(keys).tiers["gpu"] == PAGES


def test_pages_pass_through_pinned_memory_of_our_own_however_many_there_are(monkeypatch):
    from kvstore.tier import lane

    with open_store() as store:
        space = open_space(store, SHARD)
        monkeypatch.setattr(lane, "SLICE_BYTES", 3 * space.page_bytes[0])
        keys, pages = new_keys(space, PAGES), content(PAGES, space.page_bytes[0])
        space.put(keys, pages)
        memory, pool = device_pool(space.page_bytes[0] // 8, 0)
        assert space.restore_to_kvpool(keys, pool, np.arange(PAGES)).result().pages == PAGES
        ring = store._resources.promotion.slab._way_in._ring
        assert ring.is_pinned()
        assert len(ring) == lane.slice_count(lane.SLICE_BYTES) * lane.SLICE_BYTES
        found = memory.cpu().numpy()
        assert all(found[:, at].tobytes() == bytes(pages[at]) for at in range(PAGES))


def test_blocks_are_not_written_before_the_engine_is_done_with_them():
    """What the engine has queued on its stream still sees the blocks as they were."""
    with open_store() as store:
        space = open_space(store, SHARD)
        keys, pages = new_keys(space, 8), content(8, space.page_bytes[0])
        space.put(keys, pages)
        memory, pool = device_pool(space.page_bytes[0] // 8, 0)
        space.restore_to_kvpool(keys, pool, np.arange(8)).result()
        memory.fill_(7)
        torch.cuda._sleep(200_000_000)
        before = memory.clone()
        job = space.restore_to_kvpool(keys, pool, np.arange(8))
        assert job.result().pages == 8
        assert bool((before == 7).all())


def test_more_than_the_device_has_is_refused_by_name():
    from kvstore.protocol.errors import TierUnavailable

    with pytest.raises(TierUnavailable, match="smaller"):
        open_store(1 << 50)
