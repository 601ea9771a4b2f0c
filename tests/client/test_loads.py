"""Goal: a load does not wait for the copies of another."""

import threading

import msgspec
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


@pytest.mark.parametrize("cancels", [False, True])
def test_a_cancelled_layerwise_load_ends_in_its_wait_for_a_disk_and_writes_nothing_later(
    store, monkeypatch, wait_until, cancels
):
    space = open_space(store)
    source, target = Pool(4, SIZE // 4, 4), Pool(4, SIZE // 4, 4)
    source.fill(1)
    keys = new_keys(space, 2)
    space.extract_from_kvpool(source.kvpool, [3, 1], keys).result(TIMEOUT_S)
    before, waiting, gate = target.page(np.array([0, 1])), threading.Event(), threading.Event()
    ask, warm, asked = space._loads._ask, space._loads.warm, []

    def on_disk(*to, **how):
        asked.append(ask(*to, **how))
        none = {"addresses": b"", "digests": b"", "more": 2} if len(asked) <= 2 else {}
        return msgspec.structs.replace(asked[-1], **none)

    def slowly(*to):
        waiting.set()
        assert gate.wait(TIMEOUT_S)
        return warm(*to)

    monkeypatch.setattr(space._loads, "_ask", on_disk)
    monkeypatch.setattr(space._loads, "warm", slowly)
    job = space.restore_to_kvpool(keys, target.kvpool, [0, 1], order="segment")
    try:
        assert waiting.wait(TIMEOUT_S)
        if cancels:
            job.cancel()
            assert job.done
            assert not job.wait_layer(0, TIMEOUT_S)
            assert job.result(0.0).pages == 0
    finally:
        gate.set()
    wait_until(lambda: job.done and not store._resources.slow_loads._running)

    assert len(asked) == 4, "at first, on the slow thread, and twice in the wait"
    assert job.result(0.0).pages == (0 if cancels else 2)
    assert (target.page(np.array([0, 1])) == before) is cancels
