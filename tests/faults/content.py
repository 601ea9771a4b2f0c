"""The pages that all fault tests move: every byte follows from the chain and the page's index."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity, page_keys

PAGE_TOKENS = 64
PAGE_BYTES = 1 << 20

IDENTITY = SpaceIdentity(model="faults", kv_dtype="float32", page_tokens=PAGE_TOKENS)
SHARD = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 4), heads=(0, 4))


def open_space(store: KVStore) -> Space:
    space = store.space(IDENTITY, [SHARD])
    assert space.page_bytes == (PAGE_BYTES,)
    return space


def keys(chain: int, count: int) -> PrefixKeys:
    tokens = np.arange(count * PAGE_TOKENS, dtype=np.int64) + chain * 100_000
    return page_keys(tokens, PAGE_TOKENS)


def page(chain: int, index: int, page_bytes: int = PAGE_BYTES) -> npt.NDArray[np.uint8]:
    start = np.uint64((chain << 40) + (index << 20) + 1)
    words = (np.arange(page_bytes // 8, dtype=np.uint64) + start) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def pages(chain: int, count: int) -> list[npt.NDArray[np.uint8]]:
    return [page(chain, index) for index in range(count)]


def wrong_pages(chain: int, found: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    """Which of the pages of a chain, from its start, are not what they should be."""
    return [
        index
        for index, bytes_ in enumerate(found)
        if not np.array_equal(bytes_, page(chain, index))
    ]
