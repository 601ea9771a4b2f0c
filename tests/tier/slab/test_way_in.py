"""Pages reach a device as they verified: through memory of our own, and read once.

The device is played by host memory that is not mapped: all but streams runs as it does there.
"""

import weakref

import numpy as np
import pytest
import torch

from kvstore import mover
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import CanonicalLayout, ShardSpec, SpaceIdentity, page_keys, page_seeds
from kvstore.state.table.slab import PageSet
from kvstore.tier import lane
from kvstore.tier.gpu import HostDevice
from kvstore.tier.lane import DeviceCopy
from kvstore.tier.slab import DeviceSlab
from tests.faulted import FaultedMemory

TOKENS = 16
IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=TOKENS, tenant="t")
PAGES = PageSet(IDENTITY, ShardSpec(layout=CanonicalLayout(512), layers=(0, 2), heads=(0, 2)))
SIZE = PAGES.page_bytes
COUNT = 9


@pytest.fixture
def slab():
    opened = DeviceSlab("cpu", 4 << 20, mapped=False)
    yield opened
    opened.check()
    opened.close()


@pytest.fixture
def keys():
    return page_keys(range(TOKENS * COUNT), TOKENS)


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, (COUNT, SIZE), dtype=np.uint8)


def digests(keys, content):
    addresses = np.array([row.ctypes.data for row in content], dtype=np.uint64)
    return mover.digest(addresses, SIZE, page_seeds(keys.packed, PAGES.seed)).tobytes()


def addresses_from(start):
    return np.arange(COUNT, dtype=np.uint64) * np.uint64(SIZE) + np.uint64(start)


def loaded(slab, keys):
    """What an engine gets of these pages: as many as there are, page by page."""
    planes = np.zeros((4, COUNT, SIZE // 4), dtype=np.uint8)
    block = SIZE // 4
    addresses = tuple(plane.ctypes.data for plane in planes)
    pool = KVPool(addresses, block, block, COUNT, 2, "cpu")
    table, after = np.arange(COUNT).reshape(-1, 1), HostDevice("cpu").current().record()
    count = slab.load_blocks(PAGES, keys, pool, table, after, DeviceCopy())
    return [planes[:, page].tobytes() for page in range(count)]


def test_a_page_on_its_way_to_a_device_is_read_once(slab, keys, content):
    """What is read once cannot have changed between its digest and the device's copy."""
    taken = slab.reserve(PAGES, keys, digests(keys, content))
    with FaultedMemory(content.tobytes()) as memory:
        assert slab.fill(taken, keys, addresses_from(memory.address)) == COUNT
        assert memory.touched.total() <= 1.1 * content.nbytes // 4096
    assert loaded(slab, keys) == [row.tobytes() for row in content]


def test_a_slab_that_was_made_in_inference_mode_is_filled_by_any_thread(keys, content):
    """An engine makes it in the middle of a step; promotions are other threads'."""
    with torch.inference_mode():
        slab = DeviceSlab("cpu", 4 << 20, mapped=False)
    taken = slab.reserve(PAGES, keys, digests(keys, content))

    assert slab.fill(taken, keys, addresses_from(content.ctypes.data)) == COUNT
    assert slab.stats()["broken"] == ""
    assert loaded(slab, keys) == [row.tobytes() for row in content]
    slab.close()


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("wrong", [0, 1, 4, 8])
def test_pages_up_to_the_first_that_does_not_verify_are_ready(
    slab, keys, content, monkeypatch, at_once, wrong
):
    monkeypatch.setattr(lane, "SLICE_BYTES", at_once * SIZE + 1)
    taken = slab.reserve(PAGES, keys, digests(keys, content))
    content[wrong, 77] ^= 1

    assert slab.fill(taken, keys, addresses_from(content.ctypes.data)) == wrong
    assert slab.run(PAGES, keys.packed) == wrong
    assert loaded(slab, keys) == [row.tobytes() for row in content[:wrong]]


def test_a_fill_that_is_cancelled_leaves_nothing(slab, keys, content):
    progress = mover.Progress()
    progress.cancel()
    taken = slab.reserve(PAGES, keys, digests(keys, content))

    assert slab.fill(taken, keys, addresses_from(content.ctypes.data), progress) == 0
    assert slab.run(PAGES, keys.packed) == 0


def test_larger_pages_get_larger_memory_and_closing_gives_it_back(slab, keys, content, monkeypatch):
    monkeypatch.setattr(lane, "SLICE_BYTES", SIZE // 2)
    slab.fill(slab.reserve(PAGES, keys, digests(keys, content)), keys,
              addresses_from(content.ctypes.data))  # fmt: skip

    assert len(slab._way_in._ring) == lane.slice_count(SIZE) * SIZE
    slab.close()
    assert slab._way_in._ring is None


def test_memory_that_a_late_device_may_still_use_is_not_freed(monkeypatch):
    made = DeviceSlab("cpu", 4 << 20, mapped=False)
    memory = weakref.ref(made._memory)
    close = made._way_out.close
    monkeypatch.setattr(made._way_out, "close", lambda: (close(), False)[1])
    monkeypatch.setattr("kvstore.tier.slab._in_use", in_use := [])
    made.close()
    assert len(made._memory) == 0
    assert memory() is in_use.pop()
