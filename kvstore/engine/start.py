"""What a worker does with the engine's memory before the engine serves.

One page goes to the node and back, so that what is wrong shows before the first request; then the
memory is touched, so that no load pays for that.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import Final

import msgspec

from kvstore import mover
from kvstore.client.store import KVStore
from kvstore.errors import KVStoreError
from kvstore.mover import Pieces
from kvstore.mover.kvpool import KVPool
from kvstore.page import KEY_BYTES, PrefixKeys, ShardSpec, SpaceIdentity

_SCOPE: Final = "selftest"
_TTL_S: Final = 10.0
_WAIT_S: Final = 5.0
_END_WAIT_S: Final = 60.0


def round_trip(
    store: KVStore, identity: SpaceIdentity, shard: ShardSpec, pool: KVPool, log: logging.Logger
) -> str:
    """Store a page of random bytes from the engine's memory and restore it.

    The engine's blocks must not be in use yet; those that were used are zero afterwards.

    Args:
        store: the worker's.
        identity: of the engine's space; the page goes to one beside it.
        shard: the worker's.
        pool: its memory.
        log: the engine's: how long it took is said there.

    Returns:
        what is wrong, in words; empty when the page came back as it was, or nobody is there yet.
    """
    if not store.connected:
        return ""
    began = perf_counter()
    try:
        space = store.space(msgspec.structs.replace(identity, scope=_SCOPE), [shard])
        size = space.page_bytes[0]
        count = pool.blocks_per_page(size)
        if pool.block_count <= count:
            return ""
        blocks = list(range(1, count + 1))
        pieces = pool.pieces(blocks, size, 1)
        pattern = os.urandom(size)
        keys = PrefixKeys(os.urandom(KEY_BYTES))
        try:
            _write(pieces, pattern)
            space.extract_from_kvpool(pool, blocks, keys, ttl_s=_TTL_S).result(_WAIT_S)
            _write(pieces, bytes(size))
            restoring = space.restore_to_kvpool(keys, pool, blocks)
            try:
                restored = restoring.result(_WAIT_S)
            finally:
                # The engine is about to use these blocks: no byte may come later.
                restoring.cancel()
                restoring.wait(_END_WAIT_S)
            came_back = restored.pages == 1 and _read(pieces) == pattern
        finally:
            _write(pieces, bytes(size))
    except KVStoreError as error:
        return f"{error.code}: {error}"
    if not came_back:
        return "a page did not come back as it was stored"
    log.info(
        "kvstore: a page of %d bytes went to the node and back in %.1f ms; layout %s",
        size, (perf_counter() - began) * 1000, shard.digest.hex()[:16],
    )  # fmt: skip
    return ""


def prefault(pools: Sequence[KVPool], log: logging.Logger) -> None:
    """Touch the engine's KV memory in the background, so that no first load pays for it.

    A first touch costs several times a copy, and the engine owns the memory either way. Without the
    native mover nothing is touched: only that one may do it while the engine writes.

    Args:
        pools: whose blocks.
        log: the engine's.
    """
    if not mover.is_native:
        return

    def touch() -> None:
        for pool in pools:
            for plane in pool.planes:
                size = (pool.block_count - 1) * pool.block_stride_bytes + pool.block_bytes
                try:
                    mover.populate(plane, size, write=True)
                except KVStoreError as error:
                    log.debug("KV memory is not touched ahead: %s", error)
                    return

    threading.Thread(target=touch, name="kvstore-prefault", daemon=True).start()


def _write(pieces: Pieces, data: bytes) -> None:
    at = 0
    for address, length in zip(pieces.address.tolist(), pieces.length.tolist(), strict=True):
        ctypes.memmove(address, data[at : at + length], length)
        at += length


def _read(pieces: Pieces) -> bytes:
    both = zip(pieces.address.tolist(), pieces.length.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, length) for address, length in both)
