"""Prepares the engine's memory when a worker starts.

The self-test stores and loads one page, to detect problems before the first request. Then the
memory is touched, so that first loads are not slowed down.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from time import perf_counter
from typing import Final, Protocol

import msgspec

from kvstore import mover
from kvstore.client.jobs import RestoreJob
from kvstore.client.store import KVStore
from kvstore.mover import Pieces
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import DeviceUnavailable, KVStoreError
from kvstore.protocol.page import KEY_BYTES, PrefixKeys, ShardSpec, SpaceIdentity

_SCOPE: Final = "selftest"
_TTL_S: Final = 10.0
_WAIT_S: Final = 5.0
_END_WAIT_S: Final = 60.0
DEVICE_WAIT_S = 30.0
"""How long the start of an engine waits for its device, whose two copies take milliseconds."""


def round_trip(
    store: KVStore, identity: SpaceIdentity, shard: ShardSpec, pool: KVPool, log: logging.Logger
) -> str:
    """Store a page of random bytes from the engine's memory and restore it.

    The engine's blocks must not be in use yet; the blocks used here are zeroed at the end, unless
    the device fails at that, which is returned.

    Args:
        store: the worker's client.
        identity: identity of the engine's space; the page is stored in a separate one.
        shard: the worker's shard.
        pool: the engine's memory.
        log: the engine's log; the time is logged there.

    Returns:
        The error as text; empty if the page was restored, or no node runs yet.

    Raises:
        DeviceUnavailable: copies to the blocks have not ended after 60 s, and may still end when
            the blocks have KV: the engine must not start.
    """
    if not store.connected:
        return ""
    began, wrong = perf_counter(), ""
    restoring: RestoreJob | None = None
    try:
        space = store.space(msgspec.structs.replace(identity, scope=_SCOPE), [shard])
        size = space.page_bytes[0]
        count = pool.blocks_per_page(size)
        if pool.block_count <= count:
            return ""
        blocks = list(range(1, count + 1))
        memory = _memory_of(store, pool, blocks, size)
    except KVStoreError as error:
        return f"{error.code}: {error}"
    pattern = os.urandom(size)
    keys = PrefixKeys(os.urandom(KEY_BYTES))
    try:
        memory.write(pattern)
        space.extract_from_kvpool(pool, blocks, keys, ttl_s=_TTL_S).result(_WAIT_S)
        memory.write(bytes(size))
        restoring = space.restore_to_kvpool(keys, pool, blocks)
        if restoring.result(_WAIT_S).pages != 1 or memory.read() != pattern:
            wrong = "a page was not restored as it was stored"
    except KVStoreError as error:
        wrong = f"{error.code}: {error}"
    # The engine is about to use these blocks: nothing may be written to them later.
    if restoring is not None:
        restoring.cancel()
        _must_end(restoring.wait, pool)
    _must_end(memory.wait_idle, pool)
    try:
        memory.write(bytes(size))
    except KVStoreError as error:
        wrong = wrong or f"{error.code}: {error}"
        _must_end(memory.wait_idle, pool)
    if wrong:
        return wrong
    log.info(
        "kvstore: stored and restored a page of %d bytes in %.1f ms; layout %s",
        size, (perf_counter() - began) * 1000, shard.digest.hex()[:16],
    )  # fmt: skip
    return ""


def prefault(pools: Sequence[KVPool], log: logging.Logger) -> None:
    """Touch the engine's KV memory in the background, so that first loads are not slowed down.

    A first touch takes several times as long as a copy. This needs the native mover, which can
    touch memory while the engine writes to it.

    Args:
        pools: pools whose blocks are touched.
        log: the engine's log.
    """
    pools = [pool for pool in pools if pool.device == "cpu"]
    if not mover.is_native or not pools:
        return

    def touch() -> None:
        for pool in pools:
            for plane in pool.planes:
                size = (pool.block_count - 1) * pool.block_stride_bytes + pool.block_bytes
                try:
                    mover.populate(plane, size, write=True)
                except KVStoreError as error:
                    log.debug("KV memory was not touched in advance: %s", error)
                    return

    try:
        threading.Thread(target=touch, name="kvstore-prefault", daemon=True).start()
    except RuntimeError as error:
        log.debug("KV memory was not touched in advance: %s", error)


def try_device(store: KVStore, pool: KVPool, page_bytes: int, log: logging.Logger) -> str:
    """Allocate what copies to and from a pool's device need, and try both ways.

    A driver that does not answer cannot be interrupted: then the trial goes on in its thread. Loads
    fail until it has ended, and stores wait for the driver, too.

    Args:
        store: the worker's client.
        pool: the engine's memory.
        page_bytes: bytes of a page.
        log: the engine's log; the speeds are logged there.

    Returns:
        The error as text; empty if both ways work, or the pool is in host memory.
    """
    if pool.device == "cpu":
        return ""
    tried: Future[tuple[float, float]] = Future()
    try:
        device = store.device_pool(pool)

        def run() -> None:
            try:
                tried.set_result(device.speeds(page_bytes))
            except KVStoreError as error:
                tried.set_exception(error)

        threading.Thread(target=run, name="kvstore-device-trial", daemon=True).start()
        there, back = tried.result(DEVICE_WAIT_S)
    except TimeoutError:
        return (
            f"not ready after {DEVICE_WAIT_S:.0f} s: its driver does not answer (see nvidia-smi,"
            " dmesg); it is used as soon as it is ready"
        )
    except KVStoreError as error:
        return f"{error.code}: {error}"
    except RuntimeError as error:
        return f"it was not tried: {error}"
    log.info(
        "kvstore: %s is ready: %.1f GB/s to it, %.1f GB/s from it, %s",
        pool.device, there / 1e9, back / 1e9,
        "whole blocks" if len(pool.planes) == 1 else f"{len(pool.planes)} planes",
    )  # fmt: skip
    return ""


def _must_end(wait: Callable[[float], bool], pool: KVPool) -> None:
    """Wait until nothing is written to the blocks any more.

    Args:
        wait: waits for so many seconds; returns whether that is so.
        pool: the engine's memory.

    Raises:
        DeviceUnavailable: it is not so after 60 s.
    """
    if not wait(_END_WAIT_S):
        raise DeviceUnavailable(
            f"{pool.device} did not say within {_END_WAIT_S:.0f} s that a copy of the self-test has"
            " ended; it might still write to blocks that the engine is about to use: see its errors"
            " (nvidia-smi, dmesg), and start the engine again",
            "deadline",
        )


class _Memory(Protocol):
    """The blocks of one page."""

    def wait_idle(self, timeout_s: float) -> bool: ...
    def write(self, data: bytes) -> None: ...
    def read(self) -> bytes: ...


def _memory_of(store: KVStore, pool: KVPool, blocks: Sequence[int], size: int) -> _Memory:
    if pool.device == "cpu":
        return _HostMemory(pool.pieces(blocks, size, 1))
    return store.device_pool(pool).page(pool.table(blocks, size, 1), size)


class _HostMemory:
    def __init__(self, pieces: Pieces) -> None:
        self._pieces = list(zip(pieces.address.tolist(), pieces.length.tolist(), strict=True))

    def wait_idle(self, timeout_s: float) -> bool:
        del timeout_s
        return True  # a write has ended when it returns

    def write(self, data: bytes) -> None:
        at = 0
        for address, length in self._pieces:
            ctypes.memmove(address, data[at : at + length], length)
            at += length

    def read(self) -> bytes:
        return b"".join(ctypes.string_at(address, length) for address, length in self._pieces)
