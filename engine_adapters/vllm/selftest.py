"""Stores and loads one page when a worker starts, to detect problems before the first request."""

import ctypes
import logging
import os
from time import perf_counter
from typing import Final

import msgspec

from kvstore.client.store import KVStore
from kvstore.errors import KVStoreError
from kvstore.mover import Pieces
from kvstore.mover.kvpool import KVPool
from kvstore.page import KEY_BYTES, PrefixKeys, ShardSpec, SpaceIdentity

log = logging.getLogger("vllm.kvstore")

_SCOPE: Final = "selftest"
_TTL_S: Final = 10.0
_WAIT_S: Final = 5.0
_END_WAIT_S: Final = 60.0


def round_trip(store: KVStore, identity: SpaceIdentity, shard: ShardSpec, pool: KVPool) -> str:
    """Store a page of random bytes from the engine's memory and restore it.

    The engine's blocks must not be in use yet; the blocks used here are zeroed at the end.

    Returns:
        The error as text; empty if the page was restored, or no node runs yet.
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
                # The engine is about to use these blocks: nothing may be written to them later.
                restoring.cancel()
                restoring.wait(_END_WAIT_S)
            came_back = restored.pages == 1 and _read(pieces) == pattern
        finally:
            _write(pieces, bytes(size))
    except KVStoreError as error:
        return f"{error.code}: {error}"
    if not came_back:
        return "a page was not restored as it was stored"
    log.info(
        "kvstore: stored and restored a page of %d bytes in %.1f ms; layout %s",
        size, (perf_counter() - began) * 1000, shard.digest.hex()[:16],
    )  # fmt: skip
    return ""


def _write(pieces: Pieces, data: bytes) -> None:
    at = 0
    for address, length in zip(pieces.address.tolist(), pieces.length.tolist(), strict=True):
        ctypes.memmove(address, data[at : at + length], length)
        at += length


def _read(pieces: Pieces) -> bytes:
    both = zip(pieces.address.tolist(), pieces.length.tolist(), strict=True)
    return b"".join(ctypes.string_at(address, length) for address, length in both)
