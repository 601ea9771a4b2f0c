"""What tests of a client's slab share."""

import ctypes
from collections.abc import Callable

import numpy as np

from kvstore.client.loads import LoadState
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys
from tests.client.conftest import SIZE

BLOCK = 64 * 4 * 4 * 2
"""Bytes of 4 tokens of 2 heads: one block of a plane is one page's."""


def get(space: Space, keys: PrefixKeys) -> list[bytes]:
    out = [np.zeros(space.page_bytes[0], dtype=np.uint8) for _ in range(len(keys))]
    return [bytes(one) for one in out[: space.get(keys, out)]]


def slab_of(store: KVStore):
    return store._resources.promotion.slab


def settle(store: KVStore, wait_until: Callable[..., None]) -> None:
    wait_until(lambda: store.slab_stats()["pending_bytes"] == 0)
    slab_of(store).check()


def loaded_bytes(store: KVStore) -> int:
    return store.stats()["counts"].get("loaded_bytes", 0)


def host_byte(store: KVStore, space: Space, keys: PrefixKeys, index: int, shard: int = 0):
    lease = 1 << 40
    leased = space._loads.acquire(space.numbers(), keys, shard, lease, LoadState())
    with store._link.moving() as memory:
        address = int(memory.locate(leased.addresses, SIZE, write=True)[index])
    store._link.send(wire.Release(lease))
    return ctypes.c_ubyte.from_address(address)
