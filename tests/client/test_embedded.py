"""Goal: the node in this process ends as carefully as the one behind a socket."""

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvstore.client.loads import LoadState
from kvstore.client.store import KVStore
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument, TierUnavailable
from tests.client.conftest import (
    CAPACITY_BYTES,
    TIMEOUT_S,
    content,
    mapped_bytes,
    new_keys,
    open_space,
)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"capacity_bytes": 100}, "capacity_bytes"),
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"capacity_bytes": 1 << 20, "extent_bytes": 0}, "extent_bytes"),
        ({"capacity_bytes": 1 << 20, "extent_bytes": 70_000}, "extent_bytes"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_name(sizes, field):
    with pytest.raises(InvalidArgument) as refused:
        KVStore.open(**sizes)
    assert refused.value.field == field


def test_memory_stays_mapped_until_the_last_move_has_ended(wait_until):
    store = KVStore.open(CAPACITY_BYTES)
    space = open_space(store)
    keys, pages = new_keys(space, 1), content(1, space.page_bytes[0])
    space.put(keys, pages)
    leased = space._loads.acquire(space.numbers(), keys, 0, 1 << 43, LoadState())
    with store._link.moving() as memory:
        (view,) = memory.views(leased.addresses, space.page_bytes[0])
        closing = threading.Thread(target=store.close)
        closing.start()
        wait_until(lambda: not store.connected)
        assert mapped_bytes(memory._mapping) > 0
        assert np.array_equal(view, pages[0])
        assert closing.is_alive()
        del view
    closing.join(TIMEOUT_S)

    assert not closing.is_alive()
    assert mapped_bytes(memory._mapping) == 0


def test_a_lookup_that_waits_ends_with_the_store(wait_until):
    store = KVStore.open(CAPACITY_BYTES)
    space = open_space(store)
    keys = new_keys(space, 2)
    opened = space.numbers()
    begin = wire.BeginPut(0, 1 << 44, opened.space, opened.shards[0], keys.packed, b"")
    store._link.request(begin, TIMEOUT_S)
    found: list[int] = []
    waiter = threading.Thread(target=lambda: found.append(space.lookup(keys, wait_s=50).pages))
    waiter.start()
    wait_until(lambda: store.stats()["waiting_requests"] == 1)

    store.close()
    waiter.join(TIMEOUT_S)

    assert found == [0]
    assert store.troubles == {"peer_unreachable": 1}


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing more."""
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_where_no_descriptor_is_left_reads_miss_and_puts_are_refused():
    with KVStore.open(CAPACITY_BYTES) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
        store._link._mapping.close()  # as after a change of tenants
        with no_descriptors(), pytest.raises(CapacityError):
            space.put(keys, pages)
        space.put(keys, pages)
        store._link._mapping.close()  # as a process that has only looked keys up
        with no_descriptors():
            out = content(2, space.page_bytes[0])
            assert space.get(keys, out) == 0
            assert len(space.get(keys)) == 0
        assert store.troubles == {"capacity": 2}


def test_puts_and_reads_of_a_store_that_is_open_need_no_descriptor():
    with KVStore.open(CAPACITY_BYTES) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
        out = content(2, space.page_bytes[0])
        with no_descriptors():
            assert space.put(keys, pages).stored == 2
            assert space.get(keys, out) == 2
        assert all(np.array_equal(one, page) for one, page in zip(out, pages, strict=True))


def test_memory_is_touched_in_the_background_if_that_is_asked_for(wait_until):
    with KVStore.open(CAPACITY_BYTES, prefault=True) as store:
        wait_until(lambda: store._link.memory.populated_bytes() == CAPACITY_BYTES)


def test_memory_that_cannot_be_had_is_refused_and_leaves_nothing_behind():
    with no_descriptors(), pytest.raises(TierUnavailable, match="ulimit -n"):
        KVStore.open(CAPACITY_BYTES)
