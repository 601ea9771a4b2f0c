"""The store in one process: keep the KV of a prompt, and restore it into other blocks of a pool.

Run it with ``python examples/embedded.py``; a test does.
"""

import numpy as np

from kvstore import CanonicalLayout, KVPool, KVStore, ShardSpec, SpaceIdentity

LAYERS, HEADS, HEAD_DIM, BLOCK_TOKENS, BLOCKS = 2, 4, 64, 16, 64


def main() -> None:
    """Store three pages, restore them elsewhere, compare."""
    # An engine's KV pool: K and V of each layer, [blocks, block_tokens, heads, head_dim].
    shape = (BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM)
    planes = [np.zeros(shape, dtype=np.float32) for _ in range(2 * LAYERS)]
    block_bytes = planes[0][0].nbytes
    pool = KVPool(tuple(plane.ctypes.data for plane in planes), block_bytes, block_bytes, BLOCKS)

    with KVStore.open(capacity_bytes=64 << 20) as store:
        space = store.space(
            SpaceIdentity(model="example", kv_dtype="float32", page_tokens=64),
            [ShardSpec(layout=CanonicalLayout(HEAD_DIM), layers=(0, LAYERS), heads=(0, HEADS))],
        )
        tokens = np.arange(200)
        keys = space.page_keys(tokens)  # 3 full pages; the last 8 tokens have no key
        assert space.lookup(keys).pages == 0

        computed = np.arange(12)  # the engine's blocks of these pages: 4 blocks a page
        for plane in planes:
            plane[computed] = np.random.default_rng(0).random((12, *shape[1:]))
        stored = space.extract_from_kvpool(pool, computed, keys).result()

        elsewhere = np.array([40, 21, 33, 50, 20, 61, 44, 30, 31, 25, 60, 22])
        hit = space.lookup(keys)
        restored = space.restore_to_kvpool(keys[: hit.pages], pool, elsewhere).result()
        equal = all((plane[elsewhere] == plane[computed]).all() for plane in planes)
    print(f"stored {stored.stored} pages, restored {restored.pages}, equal: {equal}")  # noqa: T201
    assert equal


if __name__ == "__main__":
    main()
