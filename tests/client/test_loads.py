"""Goal: a load does not wait for the copies of another."""

import threading

import numpy as np
import pytest

from kvstore import mover
from kvstore.client.jobs import StoreJob
from kvstore.client.resources import LOADS
from kvstore.client.store import KVStore
from tests.client.conftest import SIZE, TIMEOUT_S, Pool, new_keys, open_space


@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_restore_does_not_wait_for_another_that_takes_long(store, order):
    space = open_space(store)
    source, target = Pool(4, SIZE // 4, 4), Pool(4, SIZE // 4, 4)
    source.fill(1)
    keys = new_keys(space, 2)
    space.extract_from_kvpool(source.kvpool, [3, 1], keys).result(TIMEOUT_S)
    began, gate = threading.Event(), threading.Event()
    long = StoreJob(store._resources.loads, lambda: began.set() or gate.wait(TIMEOUT_S))
    try:
        assert began.wait(TIMEOUT_S)
        job = space.restore_to_kvpool(keys, target.kvpool, [0, 1], order=order)

        assert job.result(TIMEOUT_S).pages == 2
        assert not long.done
    finally:
        gate.set()
    assert target.page(np.array([0, 1])) == source.page(np.array([3, 1]))


def test_loads_that_copy_at_a_time_and_a_store_fit_the_quota():
    """The quota is half of the pool: a batch of each must fit, or one of them is cut short."""
    with KVStore.open(1 << 20, extent_bytes=1 << 20) as store:
        space = open_space(store, page_tokens=32)
        at_once = space.batch_pages(0) * space.page_bytes[0]

        assert (LOADS + 1) * at_once <= store._resources.link.quota_bytes == 1 << 19


@pytest.mark.parametrize("order", ["page", "segment"])
def test_a_load_that_was_cancelled_asks_for_nothing(store, order, monkeypatch):
    space = open_space(store)
    source, target = Pool(4, SIZE // 4, 4), Pool(4, SIZE // 4, 4)
    source.fill(1)
    keys = new_keys(space, 2)
    space.extract_from_kvpool(source.kvpool, [3, 1], keys).result(TIMEOUT_S)
    pieces = target.kvpool.pieces([0, 1], SIZE, 2, by_layer=order == "segment")
    asked: list[object] = []
    acquire = space._loads.acquire
    monkeypatch.setattr(
        space._loads, "acquire", lambda *to, **how: asked.append(to) or acquire(*to, **how)
    )
    cancelled = mover.Progress()
    cancelled.cancel()

    assert space.load_pieces(keys, pieces, 0, cancelled, order) == 0
    assert not asked
    assert space.load_pieces(keys, pieces, 0, mover.Progress(), order) == 2
    assert len(asked) == 1
