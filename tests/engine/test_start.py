"""The page that a worker sends to the node and back before the engine serves."""

import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvstore.client.jobs import RestoreJob
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.engine import start
from kvstore.engine.start import prefault, round_trip, try_device
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import TransferTimeout
from tests.engine.engine import IDENTITY, SHARD

LOG = logging.getLogger(__name__)


@pytest.fixture
def store():
    with KVStore.open(8 << 20, extent_bytes=1 << 20) as store:
        yield store


@pytest.fixture
def memory():
    return np.zeros((4, 16, 128), dtype=np.uint8)


@pytest.fixture
def pool(memory):
    return KVPool(tuple(int(plane.ctypes.data) for plane in memory), 128, 128, 16, 1)


def test_a_page_that_comes_back_says_nothing_and_leaves_nothing(store, memory, pool):
    assert round_trip(store, IDENTITY, SHARD, pool, LOG) == ""
    assert not memory.any()


def test_no_byte_of_a_page_that_is_late_lands_when_the_engine_serves(
    store, memory, pool, monkeypatch, wait_until
):
    ended = []

    def out_of_time(job, timeout_s):
        raise TransferTimeout("it has not ended")

    def slow(space, keys, target, shard, progress, order, state):
        wait_until(lambda: progress.cancelled)
        pages = real(
            space, keys, target, shard, None, order, state
        )  # what was under way all the same
        ended.append(pages)
        return pages

    real = Space.load_pieces
    monkeypatch.setattr(Space, "load_pieces", slow)
    monkeypatch.setattr(RestoreJob, "result", out_of_time)

    assert "transfer_timeout" in round_trip(store, IDENTITY, SHARD, pool, LOG)
    assert ended == [1]
    assert not memory.any()


def test_an_engine_starts_where_no_further_thread_can(pool, memory, monkeypatch, caplog):
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(start.mover, "is_native", True)
    store = SimpleNamespace(device_pool=lambda pool: None)

    prefault([pool], LOG)
    assert "can't start new thread" in caplog.text
    on_device = KVPool((int(memory.ctypes.data),), 512, 512, 16, 1, "cpu:0")
    assert "can't start new thread" in try_device(store, on_device, 512, LOG)
