"""Chunks of vLLM's primary tier, in a store of this process."""

from collections.abc import Iterator
from time import monotonic

import numpy as np
import pytest

from engine_adapters.vllm.opening import Opening
from engine_adapters.vllm.tiering import Moved, Tiering
from kvstore.client import KVStore
from kvstore.page import OpaqueLayout, ShardSpec, SpaceIdentity

ROW = 4096
IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=16)
LAYOUT = OpaqueLayout("vllm", "1", "", 16, ROW)
SHARD = ShardSpec(layout=LAYOUT, layers=(0, 1), heads=(0, 1), window_pages=1)
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(4)]


@pytest.fixture
def store() -> Iterator[KVStore]:
    """A store of this process."""
    opened = KVStore.open(8 << 20, extent_bytes=1 << 20)
    yield opened
    opened.close()


def make(store: KVStore, rows: np.ndarray) -> Tiering:
    one, two, three = (Opening(store, IDENTITY, [SHARD], monotonic) for _ in range(3))
    return Tiering((one, two, three), rows, monotonic, 30.0)


def ended(tier: Tiering) -> Moved:
    tier.drain(30.0)
    (moved,) = tier.finished()
    return moved


def filled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, ROW), dtype=np.uint8)


def test_chunks_come_back_byte_equal_through_a_manager_made_anew(store: KVStore) -> None:
    rows = filled(1)
    first = make(store, rows)
    first.store(1, KEYS, [0, 1, 2, 3])
    assert ended(first).whole
    first.close(30.0)
    target = filled(2)
    second = make(store, target)
    second.load(2, [KEYS[3], KEYS[0]], [5, 6])
    assert ended(second) == Moved(2, [KEYS[3], KEYS[0]], True, 2 * ROW)
    assert (target[5] == rows[3]).all()
    assert (target[6] == rows[0]).all()
    second.close(30.0)


def test_a_load_names_the_keys_that_were_there_and_counts_the_failure(store: KVStore) -> None:
    tier = make(store, filled(1))
    tier.store(1, KEYS[:1], [0])
    assert ended(tier).whole
    tier.load(2, KEYS[:2], [1, 2])
    assert ended(tier) == Moved(2, KEYS[:1], False, ROW)
    assert tier.take() == {"load_failures": 1}
    tier.close(30.0)


def test_a_key_of_a_weak_hash_is_a_miss_and_is_never_stored(store: KVStore) -> None:
    tier = make(store, filled(1))
    weak = bytes(20)
    assert tier.lookup(weak) is False
    tier.store(1, [weak], [0])
    assert ended(tier).good == []
    tier.close(30.0)


def test_a_closed_tier_lets_go_of_the_memory_it_was_given(store: KVStore) -> None:
    memory = memoryview(bytearray(8 * ROW)).cast("B", (8, ROW))
    tier = make(store, np.asarray(memory))
    tier.store(1, KEYS[:1], [0])
    assert ended(tier).whole
    tier.close(30.0)
    memory.release()
