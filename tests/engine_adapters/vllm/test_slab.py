"""Goal: a worker's slab saves reads of the node, is off unless asked for, and is counted."""

from time import monotonic

import numpy as np
import pytest

from engine_adapters.vllm.options import read_options
from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from kvstore.engine.counts import SERIES, AdapterCounts
from kvstore.engine.messages import Blocks, Load
from kvstore.engine.opening import Opening
from kvstore.engine.options import SLAB_BYTES_MIN
from kvstore.engine.worker import GroupMemory, ShardMemory, WorkerSide
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import ConfigError
from tests.engine.engine import BLOCK, IDENTITY, PAGE, SHARD


def test_a_slab_is_off_unless_it_is_asked_for_and_lies_where_the_kv_tensors_are():
    assert read_options({}).device_slab is None
    chosen = read_options({"device_slab_bytes": "2097152"}).device_slab
    assert chosen == DeviceSlabConfig(device="cpu", capacity_bytes=2 << 20)
    for size in (-1, SLAB_BYTES_MIN - 1):
        with pytest.raises(ConfigError, match="device_slab_bytes"):
            read_options({"device_slab_bytes": size})


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_worker_loads_from_its_slab_what_it_has_loaded_before(layerwise, wait_until):
    slab = read_options({"device_slab_bytes": SLAB_BYTES_MIN}).device_slab
    with KVStore.open(8 << 20, extent_bytes=1 << 20, device_slab=slab) as store:
        opening = Opening(store, IDENTITY, [SHARD], monotonic)
        space = opening.get()
        assert space is not None
        memory = np.zeros((4, 16, 128), dtype=np.uint8)
        planes = tuple(int(plane.ctypes.data) for plane in memory)
        pool = KVPool(planes, 128, 128, 16, 1)
        side = WorkerSide(opening, [GroupMemory([ShardMemory(pool, 0)], PAGE, BLOCK, 4)], monotonic)
        keys = space.page_keys(range(3 * PAGE))
        pages = [
            np.random.default_rng(at).integers(0, 256, space.page_bytes[0], dtype=np.uint8)
            for at in range(3)
        ]
        space.put(keys, pages)

        def load(number: int) -> float:
            memory[:] = 0
            blocks = [Blocks(0, 0, [8, 3, 5, 6, 11, 2])]
            side.start_loads([Load(number, f"r{number}", keys, blocks, 10.0, layerwise)])
            if layerwise:
                for layer in range(4):
                    side.wait_layer(0, layer)
            ended = []
            wait_until(lambda: ended.extend(side.poll().report.ended) or ended)
            for page, at in enumerate(((8, 3), (5, 6), (11, 2))):
                assert memory[:, at].tobytes() == bytes(pages[page])
            wait_until(lambda: store.slab_stats()["pending_bytes"] == 0)
            return store.stats()["counts"]["loaded_bytes"]

        first = load(1)
        assert load(2) == first, "the node was not asked"
        side.counts.note_slab(store.slab_stats())
        taken = side.counts.take()
        assert (taken["slab_pages"], taken["slab_promoted_pages"]) == (3, 3)
        assert taken["loaded_tokens"] == 2 * 3 * PAGE
        side.counts.note_slab(store.slab_stats())
        assert "slab_pages" not in side.counts.take(), "nothing is counted twice"


def test_a_worker_without_a_slab_counts_none():
    counts = AdapterCounts()
    counts.note_slab({})
    assert counts.take() == {}
    assert {"slab_pages", "slab_promoted_pages", "slab_evicted_pages", "slab_errors"} <= set(SERIES)
