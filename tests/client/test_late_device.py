"""Goal: a store moves pages to and from a device, and no fault of the device reaches an engine.

The device does everything late and out of order, and fails when it is told to. What an engine sees:
a job that restored nothing or raised by name, and that is not done while the device may still touch
its blocks.
"""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client import jobs
from kvstore.client.store import KVStore
from kvstore.protocol.errors import CapacityError, DeviceUnavailable, InvalidArgument
from tests.client.conftest import (
    CAPACITY_BYTES,
    EXTENT_BYTES,
    SIZE,
    Pool,
    content,
    new_keys,
    open_space,
)
from tests.client.slabs import BLOCK, get, host_byte

torch = pytest.importorskip("torch")

from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier import gpu, lane  # noqa: E402

BLOCKS = np.array([9, 2, 3, 15, 0, 4, 5, 6, 12, 11, 10, 1])
COUNT = len(BLOCKS)


@pytest.fixture(params=[0, 1])
def device(request, monkeypatch) -> LateDevice:
    late = LateDevice(request.param)
    monkeypatch.setattr(gpu, "open_device", lambda name: late)
    monkeypatch.setattr(lane, "SLICE_BYTES", 2 * SIZE)
    return late


@pytest.fixture
def store(device) -> Iterator[KVStore]:
    with KVStore.open(CAPACITY_BYTES, extent_bytes=EXTENT_BYTES) as opened:
        yield opened
        device.stalled = False
        device.finish()


def found(pool: Pool) -> list[bytes]:
    return [pool.page(np.array([block])) for block in BLOCKS]


def clear(pool: Pool) -> None:
    for plane in pool.planes:
        plane[:] = 0


def stored(store):
    """A space with some pages, and an empty pool on the device."""
    space = open_space(store)
    keys, pages = new_keys(space, COUNT), content(COUNT, SIZE)
    space.put(keys, pages)
    pool = Pool(4, BLOCK, 16)
    return space, keys, [bytes(page) for page in pages], pool


@pytest.mark.parametrize("order", ["page", "segment"])
@pytest.mark.parametrize("gap", [0, 3, 64])
def test_pages_go_to_a_device_and_come_back(store, device, gap, order):
    space = open_space(store)
    keys, pages = new_keys(space, COUNT), content(COUNT, SIZE)
    space.put(keys, pages)
    pool = Pool(4, BLOCK, 16, gap)
    job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS, order=order)
    if order == "segment":
        assert job.wait_layer(1, 10.0)
        assert job.verified_pages == COUNT
        assert device.current().record().wait(10.0)
        assert found(pool) == [bytes(page) for page in pages]
    assert job.result().pages == COUNT
    assert job.done
    assert found(pool) == [bytes(page) for page in pages]

    other = other_keys(space)
    job = space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, other)
    assert job.result().stored == COUNT
    assert get(space, other) == [bytes(page) for page in pages]
    assert store.stats()["leases"] == 0


def test_only_pages_that_are_not_stored_leave_the_device(store, device):
    space, keys, _, pool = stored(store)
    assert space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS).result().pages == COUNT
    result = space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, keys).result()
    assert (result.stored, result.existing) == (0, COUNT)


def test_a_store_reads_what_the_step_before_it_wrote(store, device):
    space, pool = open_space(store), Pool(4, BLOCK, 16)
    keys = new_keys(space, COUNT)

    def step() -> None:
        for number, plane in enumerate(pool.planes):
            plane[:] = number + 1

    device.current().run(step)
    assert space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, keys).result().stored == COUNT
    (page, *_) = get(space, keys)
    assert set(page) == {1, 2, 3, 4}


def test_a_damaged_page_is_quarantined_and_never_reaches_the_device(store, device):
    space, keys, pages, pool = stored(store)
    host_byte(store, space, keys, 5).value ^= 1
    assert space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS).result().pages == 5
    assert found(pool)[:5] == pages[:5]
    assert not any(any(page) for page in found(pool)[5:])
    assert store.troubles == {"corrupt": 1}
    assert space.lookup(keys).pages == 5


def other_keys(space):
    """Of pages that are not stored."""
    tokens = space.identity.page_tokens * COUNT
    return space.page_keys(np.arange(1_000_000, 1_000_000 + tokens))


@pytest.mark.parametrize("where", ["memory", "run", "pinned"])
def test_a_device_that_fails_costs_a_miss_and_the_next_job_works(store, device, where):
    space, keys, pages, pool = stored(store)
    other = other_keys(space)
    kind = DeviceUnavailable if where == "pinned" else torch.OutOfMemoryError
    for move in ("restore", "extract"):
        device.failures.append((where, kind("no memory on the device")))
        if move == "restore":
            job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS)
            assert job.result().pages == 0
            assert store.troubles["device_unavailable"] == 1
        else:
            store_job = space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, other)
            with pytest.raises(DeviceUnavailable, match="no memory on the device"):
                store_job.result()
        assert not device.failures
    assert space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS).result().pages == COUNT
    assert space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, other).result().stored == COUNT
    assert get(space, other) == pages
    assert store.stats()["leases"] == 0


def test_blocks_of_a_restore_that_never_ends_are_not_given_back(store, device, wait_until):
    space, keys, _, pool = stored(store)
    device.stalled = True
    job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS)
    wait_until(lambda: store.troubles["device_unavailable"] == 1)
    assert not job.done
    assert not job.wait(0.0)
    assert store.stats()["leases"] == 0, "the node is not kept waiting"
    again = space.restore_to_kvpool(keys, Pool(4, BLOCK, 16).on("cpu:0"), BLOCKS)
    assert again.result().pages == 0
    assert store.troubles["device_unavailable"] == 2

    device.stalled = False
    wait_until(lambda: job.done)
    assert job.result().pages == 0
    clear(pool)
    device.finish()
    assert not any(any(page) for page in found(pool)), "nothing is written after the end"
    assert space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS).result().pages == COUNT


def test_blocks_of_a_store_that_never_ends_are_not_given_back(store, device, wait_until):
    space, pool = open_space(store), Pool(4, BLOCK, 16)
    keys = new_keys(space, COUNT)
    device.stalled = True
    job = space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, keys)
    wait_until(lambda: job._ended.is_set())
    assert not job.done
    device.stalled = False
    wait_until(lambda: job.done)
    with pytest.raises(DeviceUnavailable, match="has not finished"):
        job.result()
    assert space.lookup(keys).pages == 0
    assert space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, keys).result().stored == COUNT


def test_a_layer_of_a_restore_that_failed_is_never_there(store, device):
    space, keys, _, pool = stored(store)
    device.failures.append(("memory", torch.OutOfMemoryError("full")))
    job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS, order="segment")
    assert not job.wait_layer(0, 10.0)
    assert job.result().pages == 0


def test_a_cancelled_restore_ends(store, device):
    space, keys, _, pool = stored(store)
    job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS)
    job.cancel()
    assert job.wait(10.0)


def test_a_device_of_an_unknown_kind_or_number_is_refused_by_name(store, monkeypatch):
    monkeypatch.undo()
    for name, error in (("tpu:0", InvalidArgument), ("cuda:99", DeviceUnavailable)):
        with pytest.raises(error, match=name):
            gpu.open_device(name)
    assert gpu.open_device("cpu:0").name == "cpu:0"


def test_more_pinned_memory_than_the_process_may_lock_is_refused_with_the_limits_name(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    gpu.LockedMemory().add(8 << 20)
    with pytest.raises(DeviceUnavailable, match="RLIMIT_MEMLOCK"):
        gpu.LockedMemory().add((8 << 20) + 1)


def test_an_extract_after_close_is_refused(store, device):
    space, pool = open_space(store), Pool(4, BLOCK, 16)
    keys = new_keys(space, 1)
    store.close()
    with pytest.raises((DeviceUnavailable, CapacityError)):
        space.extract_from_kvpool(pool.on("cpu:0"), [0], keys).result()


def test_a_pool_that_is_first_used_in_inference_mode_works_in_other_threads(store, device):
    """vLLM calls us in that mode; tensors made in it may not be written outside of it."""
    space, keys, pages, pool = stored(store)
    with torch.inference_mode():
        job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS)
        store.device_pool(pool.on("cpu:0")).speeds(SIZE)
    assert job.result().pages == COUNT
    assert space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS).result().pages == COUNT
    assert found(pool) == pages
    other = other_keys(space)
    with torch.inference_mode():
        job = space.extract_from_kvpool(pool.on("cpu:0"), BLOCKS, other)
    assert job.result().stored == COUNT


@pytest.mark.timeout(20)
def test_nobody_waits_for_layers_of_a_restore_that_was_not_queued(store, device, monkeypatch):
    space, keys, _, pool = stored(store)
    monkeypatch.setattr(jobs, "QUEUE_MAX", 0)
    job = space.restore_to_kvpool(keys, pool.on("cpu:0"), BLOCKS, order="segment")
    assert job.refused
    assert not job.wait_layer(0, 3600.0)
    assert job.done


def test_a_restore_without_layers_has_ended_when_that_is_told(store, device, monkeypatch):
    space, _, _, pool = stored(store)
    end, submitted, had_ended = lane.DeviceCopy.end, threading.Event(), []

    def told(copy: lane.DeviceCopy) -> None:
        assert submitted.wait(10.0)
        had_ended.append(job._ended.is_set())
        end(copy)

    monkeypatch.setattr(lane.DeviceCopy, "end", told)
    absent = new_keys(space, COUNT, start=1_000_000)
    job = space.restore_to_kvpool(absent, pool.on("cpu:0"), BLOCKS, order="segment")
    submitted.set()
    assert not job.wait_layer(0, 10.0)
    assert job.done
    assert had_ended == [True]
