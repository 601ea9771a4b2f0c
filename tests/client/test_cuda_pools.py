"""What only a CUDA device can show of pools there: real streams, events and pinned memory."""

from contextlib import ExitStack

import numpy as np
import pytest

from kvstore.client.store import KVStore
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import CanonicalLayout, ShardSpec
from tests.client.conftest import content, new_keys, open_space

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SHARD = ShardSpec(layout=CanonicalLayout(4096), layers=(0, 4), heads=(0, 2))
BLOCKS, PAGES = 64, 24


def pool_of(memory: "torch.Tensor", page_bytes: int, *, outermost: bool) -> KVPool:
    start = memory.data_ptr()
    if outermost:
        return KVPool((start,), page_bytes, page_bytes, BLOCKS, 1, "cuda:0")
    block = page_bytes // 8
    planes = tuple(start + at * BLOCKS * block for at in range(8))
    return KVPool(planes, block, block, BLOCKS, 2, "cuda:0")


@pytest.mark.parametrize("outermost", [False, True])
@pytest.mark.parametrize("order", ["page", "segment"])
def test_what_a_kernel_wrote_is_stored_and_comes_back(outermost, order):
    with KVStore.open(64 << 20, extent_bytes=16 << 20) as store:
        space = open_space(store, SHARD)
        size = space.page_bytes[0]
        memory = torch.zeros(BLOCKS * size, dtype=torch.uint8, device="cuda:0")
        pool = pool_of(memory, size, outermost=outermost)
        assert all(speed > 0 for speed in store.device_pool(pool).speeds(size))
        blocks = np.random.default_rng(1).permutation(BLOCKS)[:PAGES]
        fresh = torch.from_numpy(np.concatenate(content(BLOCKS, size))).cuda()
        torch.cuda._sleep(100_000_000)
        memory.copy_(fresh)  # queued behind the sleep: a store that does not wait stores zeros
        keys = new_keys(space, PAGES)
        assert space.extract_from_kvpool(pool, blocks, keys).result().stored == PAGES
        memory.zero_()
        torch.cuda._sleep(100_000_000)
        before = memory.clone()  # a load that does not wait is seen here
        job = space.restore_to_kvpool(keys, pool, blocks, order=order)
        if order == "segment":
            assert job.wait_layer(3, 30.0)
            after = memory.clone()
        assert job.result().pages == PAGES
        if order == "page":
            after = memory.clone()
        assert not bool(before.any())
        rows = (BLOCKS, size) if outermost else (8, BLOCKS, size // 8)
        chosen = torch.from_numpy(blocks).cuda()
        dim = 0 if outermost else 1
        found = after.view(rows).index_select(dim, chosen)
        assert torch.equal(found, fresh.view(rows).index_select(dim, chosen))


def test_two_engines_on_one_device_keep_their_blocks_apart():
    """Two stores, as two engines on one GPU have: all four lanes copy at once."""
    with ExitStack() as undo:
        stores = [
            undo.enter_context(KVStore.open(64 << 20, extent_bytes=16 << 20)) for _ in range(2)
        ]
        spaces = [open_space(store, SHARD) for store in stores]
        size = spaces[0].page_bytes[0]
        memories = [
            torch.from_numpy(np.concatenate(content(BLOCKS, size, seed))).cuda() for seed in (1, 2)
        ]
        wrote = [memory.clone() for memory in memories]
        pools = [pool_of(memory, size, outermost=False) for memory in memories]
        blocks = np.random.default_rng(1).permutation(BLOCKS)[:PAGES]
        keys = [new_keys(space, PAGES) for space in spaces]
        moves = list(zip(spaces, pools, keys, strict=True))
        storing = [space.extract_from_kvpool(pool, blocks, own) for space, pool, own in moves]
        assert [job.result().stored for job in storing] == [PAGES, PAGES]
        for memory in memories:
            memory.view(8, BLOCKS, -1)[:, torch.from_numpy(blocks).cuda()] = 0
        loads = [space.restore_to_kvpool(own, pool, blocks) for space, pool, own in moves]
        assert [job.result().pages for job in loads] == [PAGES, PAGES]
        assert all(map(torch.equal, memories, wrote))
