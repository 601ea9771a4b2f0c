"""Goal: a worker whose KV memory is on a device: tried at the start, loads, stores, and failures.

The device does its work late and out of order (:class:`kvstore.testing.device.LateDevice`).
"""

import logging
from threading import Event
from threading import enumerate as enumerate_threads
from time import monotonic

import numpy as np
import pytest

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.engine import start
from kvstore.engine.messages import Blocks, Load, Store
from kvstore.engine.opening import Opening
from kvstore.engine.start import prefault, round_trip, try_device
from kvstore.engine.worker import GroupMemory, ShardMemory, WorkerSide
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import DeviceUnavailable
from tests.engine.engine import BLOCK, IDENTITY, PAGE, SHARD

torch = pytest.importorskip("torch")

from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier import gpu, lane  # noqa: E402

LOG = logging.getLogger(__name__)
BLOCKS = [8, 3, 5, 6, 11, 2]


@pytest.fixture
def device(monkeypatch):
    late = LateDevice(3)
    monkeypatch.setattr(gpu, "open_device", lambda name: late)
    return late


@pytest.fixture
def store(device):
    with KVStore.open(8 << 20, extent_bytes=1 << 20) as store:
        yield store
        device.stalled = False
        device.finish()


@pytest.fixture
def memory():
    return np.zeros((4, 16, 128), dtype=np.uint8)


@pytest.fixture(params=[False, True], ids=["planes", "outermost"])
def pool(request, memory):
    if request.param:
        return KVPool((int(memory.ctypes.data),), 512, 512, 16, 1, "cpu:0")
    return KVPool(tuple(int(plane.ctypes.data) for plane in memory), 128, 128, 16, 1, "cpu:0")


@pytest.fixture
def side(store, pool):
    opening = Opening(store, IDENTITY, [SHARD], monotonic)
    return WorkerSide(opening, [GroupMemory([ShardMemory(pool, 0)], PAGE, BLOCK, 4)], monotonic)


def ended(side, wait_until):
    """Poll until a job has ended; returns its end."""
    found = {}
    wait_until(lambda: found.update(side.poll().report.ended) or found)
    return found


def blocks_of(memory, pool):
    if len(pool.planes) == 1:
        flat = memory.reshape(16, 512)
        return [flat[block].tobytes() for block in BLOCKS]
    return [memory[:, block].tobytes() for block in BLOCKS]


def test_a_device_is_tried_at_the_start_and_its_speeds_are_logged(store, pool, memory, caplog):
    caplog.set_level(logging.INFO)
    assert try_device(store, pool, SHARD.page_bytes(IDENTITY), LOG) == ""
    assert round_trip(store, IDENTITY, SHARD, pool, LOG) == ""
    assert not memory.any()
    assert "GB/s to it" in caplog.text
    prefault([pool], LOG)


def test_a_device_that_cannot_be_used_is_said_with_its_reason(store, pool, device):
    device.failures.append(("pinned", DeviceUnavailable("more than RLIMIT_MEMLOCK allows")))
    assert "RLIMIT_MEMLOCK" in try_device(store, pool, SHARD.page_bytes(IDENTITY), LOG)
    device.failures.append(("memory", torch.OutOfMemoryError("CUDA out of memory")))
    assert "out of memory" in round_trip(store, IDENTITY, SHARD, pool, LOG)


@pytest.mark.parametrize("verb", ["write", "load"])
def test_an_engine_does_not_start_while_the_self_test_may_still_write_to_its_blocks(
    store, pool, device, monkeypatch, verb
):
    """A page that comes later would lie in a block that has another request's KV."""

    def stalled(space, *given):
        device.stalled = True
        return restore(space, *given)

    restore = Space.restore_to_kvpool
    monkeypatch.setattr(Space, "restore_to_kvpool", stalled)
    monkeypatch.setattr(start, "_END_WAIT_S", 0.01)
    device.stalled = verb == "write"
    with pytest.raises(DeviceUnavailable, match="might still write to blocks") as raised:
        round_trip(store, IDENTITY, SHARD, pool, LOG)
    assert raised.value.cause == "deadline"


def test_blocks_that_the_self_test_used_are_empty_though_the_device_was_late(
    store, pool, device, memory, monkeypatch
):
    wait_idle = lane.DeviceCopy.wait_idle

    def goes_on(copy, timeout_s):
        device.stalled = False
        return wait_idle(copy, timeout_s)

    monkeypatch.setattr(lane.DeviceCopy, "wait_idle", goes_on)
    device.stalled = True
    assert "has not finished" in round_trip(store, IDENTITY, SHARD, pool, LOG)
    device.stalled = False
    device.finish()
    assert not memory.any()


def test_a_start_does_not_wait_longer_for_a_device_and_uses_it_when_it_is_ready(
    store, pool, device, side, monkeypatch, wait_until
):
    """Pinning memory, or the first copy, may take as long as the driver likes."""
    begun, goes_on, real = Event(), Event(), device.pinned

    def pinned(size):
        begun.set()
        assert goes_on.wait(30.0)
        return real(size)

    monkeypatch.setattr(device, "pinned", pinned)
    monkeypatch.setattr(start, "DEVICE_WAIT_S", 0.01)
    monkeypatch.setattr(lane, "DEADLINE_S", 0.01)
    page_bytes = SHARD.page_bytes(IDENTITY)
    assert "not ready after" in try_device(store, pool, page_bytes, LOG)
    assert begun.wait(10.0)
    space = side.opening.get()
    keys = space.page_keys(range(3 * PAGE))
    space.put(keys, [np.full(space.page_bytes[0], 9, dtype=np.uint8)] * 3)
    side.start_loads([Load(1, "r", keys, [Blocks(0, 0, BLOCKS)], 10.0, False)])
    assert ended(side, wait_until)[1].pages == 0
    side.counts.note_troubles(store.troubles, store.device_failures)
    assert side.counts.take()["device_failures_deadline"] == 1

    goes_on.set()
    wait_until(lambda: not any("device-trial" in one.name for one in enumerate_threads()))
    monkeypatch.setattr(lane, "DEADLINE_S", 10.0)
    side.start_loads([Load(2, "r", keys, [Blocks(0, 0, BLOCKS)], 10.0, False)])
    assert ended(side, wait_until)[2].pages == 3
    monkeypatch.setattr(start, "DEVICE_WAIT_S", 10.0)
    assert try_device(store, pool, page_bytes, LOG) == ""


@pytest.mark.parametrize("layerwise", [False, True])
def test_what_a_worker_stored_from_a_device_it_loads_there(
    store, side, memory, pool, device, wait_until, layerwise
):
    space = side.opening.get()
    keys = space.page_keys(range(3 * PAGE))

    def step() -> None:
        memory[:] = np.random.default_rng(5).integers(0, 256, memory.shape, dtype=np.uint8)

    device.current().run(step)  # the step that writes the blocks has only been queued
    side.start_stores([Store(1, keys, [Blocks(0, 0, BLOCKS)])])
    assert ended(side, wait_until)[1].pages == 3
    stored = blocks_of(memory, pool)

    memory[:] = 0
    side.start_loads([Load(2, "r", keys, [Blocks(0, 0, BLOCKS)], 10.0, layerwise)])
    if layerwise:
        for layer in range(4):
            side.wait_layer(0, layer)
        seen = []
        device.current().run(lambda: seen.append(blocks_of(memory, pool)))
        assert device.current().record().wait(10.0)
        assert seen == [stored], "the step sees all layers"
    assert ended(side, wait_until)[2].pages == 3
    assert blocks_of(memory, pool) == stored
    assert not any(name.startswith("device_failures") for name in side.counts.take())


def test_blocks_of_a_load_stay_held_until_the_device_is_idle(
    store, side, memory, pool, device, wait_until
):
    space = side.opening.get()
    keys = space.page_keys(range(3 * PAGE))
    size = space.page_bytes[0]
    space.put(keys, [np.full(size, 9, dtype=np.uint8)] * 3)
    device.stalled = True
    side.start_loads([Load(1, "r", keys, [Blocks(0, 0, BLOCKS)], 10.0, False)])
    wait_until(lambda: store.troubles["device_unavailable"])
    assert not side.poll().received
    later = monotonic() + 20.0
    side.clock = lambda: later
    outcome = side.poll()
    assert outcome.received == outcome.failed == {"r"}, "the request is computed"
    assert not side.poll().report.ended, "the blocks are not given back"
    side.counts.note_troubles(store.troubles, store.device_failures)
    taken = side.counts.take()
    assert taken["device_failures_deadline"] == 1
    assert "troubles" not in taken, "the node is well"

    device.stalled = False
    assert ended(side, wait_until)[1].pages == 0


def test_a_store_that_fails_on_the_device_is_counted_with_its_reason(
    store, side, memory, pool, device, wait_until, caplog
):
    space = side.opening.get()
    device.failures.append(("run", RuntimeError("CUDA error: unspecified launch failure")))
    side.start_stores([Store(1, space.page_keys(range(3 * PAGE)), [Blocks(0, 0, BLOCKS)])])
    assert ended(side, wait_until)[1].pages == 0
    counts = side.counts.take()
    assert (counts["device_failures_copy"], counts["store_failures"]) == (1, 1)
    assert "unspecified launch failure" in caplog.text
