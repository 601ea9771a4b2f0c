"""Goal: a lane copies with the threads that the machine has to spare, and none works on late."""

import threading

import numpy as np
import pytest

pytest.importorskip("torch")

from kvstore import mover
from kvstore.protocol.errors import DeviceUnavailable
from kvstore.testing.device import EngineMemory, LateDevice
from kvstore.tier import lane
from kvstore.tier.gpu import HostDevice
from kvstore.tier.lane import DeviceCopy, Lane, PagesInHost

MIB = 1 << 20
THREADS = 4
WAIT_S = 10.0
BUSY_S = 0.2
"""How long two threads have work, so that a third one is started; late work takes twice that."""


@pytest.mark.parametrize(
    ("processors", "threads"), [(1, 1), (2, 2), (4, 4), (6, 4), (12, 6), (16, 8), (192, 8)]
)
def test_a_lane_leaves_processors_to_the_engine(processors, threads, monkeypatch):
    monkeypatch.setattr(lane.os, "sched_getaffinity", lambda _: set(range(processors)))
    assert lane.thread_count() == threads
    assert lane.slice_count(MIB) == threads + 2


@pytest.mark.parametrize(("size", "slices"), [(4, 10), (20, 6), (32, 4), (80, 3)])
def test_a_ring_of_large_pages_has_fewer_slices(size, slices, monkeypatch):
    monkeypatch.setattr(lane, "thread_count", lambda: 8)
    assert lane.slice_count(size * MIB) == slices


def test_a_ring_has_the_fewest_slices_where_no_more_can_be_locked(monkeypatch):
    """Two threads fill them at a time all the same."""
    monkeypatch.setattr(lane, "thread_count", lambda: THREADS)
    device = LateDevice()
    memory = EngineMemory(device, 4, 4096, 0, 1, 2 * THREADS)
    monkeypatch.setattr(lane, "SLICE_BYTES", memory.size)
    device.failures.append(("pinned", DeviceUnavailable("cannot be pinned", "memlock")))
    two, real = threading.Barrier(2), mover.scatter

    def scatter(*given):
        two.wait(WAIT_S)
        return real(*given)

    monkeypatch.setattr(mover, "scatter", scatter)
    try:
        fence = memory.pool.fence()
        restored = memory.pool.restore(memory.pages(), memory.table, fence, DeviceCopy())
        assert restored == 2 * THREADS
        assert memory.read() == [row.tobytes() for row in memory.host]
        assert len(memory.lanes[0]._ring) == 3 * memory.size
    finally:
        memory.close()


def test_a_trial_takes_no_more_of_the_device_than_a_slice():
    one = Lane(HostDevice("cpu:0"))
    assert one.speed(MIB, inwards=True) > 0
    assert len(one._staging) == lane.SLICE_BYTES
    assert one.close()


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(lane, "thread_count", lambda: THREADS)
    made = EngineMemory(HostDevice("cpu:0"), 4, 4096, 0, 1, 2 * THREADS)
    monkeypatch.setattr(lane, "SLICE_BYTES", made.size)
    yield made
    made.close()


def restored(memory, pages):
    return memory.pool.restore(pages, memory.table, memory.pool.fence(), DeviceCopy())


def extracted(memory):
    return memory.pool.extract(
        memory.table, memory.addresses, memory.size, memory.seeds, memory.pool.fence(),
        DeviceCopy(),
    )  # fmt: skip


@pytest.mark.parametrize("way", ["restore", "extract"])
def test_all_threads_of_a_lane_copy_at_the_same_time(way, memory, monkeypatch):
    together = threading.Barrier(THREADS)
    name = "scatter" if way == "restore" else "gather"
    real = getattr(mover, name)

    def copy(*given):
        together.wait(WAIT_S)  # broken if fewer than all threads come
        return real(*given)

    monkeypatch.setattr(mover, name, copy)
    if way == "restore":
        assert restored(memory, memory.pages()) == 2 * THREADS
        assert memory.read() == [row.tobytes() for row in memory.host]
    else:
        memory.write(memory.host)
        wanted = memory.host.copy()
        memory.host[:] = 0
        assert np.array_equal(extracted(memory), memory.digests)
        assert np.array_equal(memory.host, wanted)


def third_thread_does_not_start(monkeypatch):
    real, started = threading.Thread.start, []

    def start(self):
        if self.name.startswith("kvstore-device"):
            started.append(self)
            if len(started) == 3:
                raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)


def other_pages(memory):
    """Other bytes under the same names, all whole."""
    other = np.random.default_rng(5).integers(0, 256, memory.host.shape, dtype=np.uint8)
    addresses = np.array([row.ctypes.data for row in other], dtype=np.uint64)
    digests = mover.digest(addresses, memory.size, memory.seeds)
    return other, PagesInHost(addresses, memory.size, digests, memory.seeds)


def test_a_load_that_got_no_thread_does_not_write_into_the_next_one(memory, monkeypatch):
    """A pool of threads queues work before it starts the thread that is to do it."""
    third_thread_does_not_start(monkeypatch)
    other, pages = other_pages(memory)
    first, third = {int(one) for one in pages.sources[:2]}, int(pages.sources[2])
    verified, written = threading.Event(), threading.Event()
    real = mover.scatter

    def scatter(sources, *given):
        source = int(sources[0])
        if source in first:
            verified.wait(BUSY_S)
        if source == third:
            verified.wait(2 * BUSY_S)
        done = real(sources, *given)
        if source == third:
            written.set()
        if source == int(memory.addresses[2]):
            verified.set()
            assert written.wait(WAIT_S)
        return done

    monkeypatch.setattr(mover, "scatter", scatter)
    with pytest.raises(DeviceUnavailable, match="new thread"):
        restored(memory, pages)
    assert restored(memory, memory.pages()) == 2 * THREADS
    assert memory.read() == [row.tobytes() for row in memory.host]
    assert len(other) == 2 * THREADS, "its memory is alive"


def test_a_store_that_got_no_thread_writes_nothing_after_it_has_failed(memory, monkeypatch):
    third_thread_does_not_start(monkeypatch)
    memory.write(memory.host)
    failed, real = threading.Event(), mover.gather

    def gather(*given):
        failed.wait(BUSY_S)
        return real(*given)

    monkeypatch.setattr(mover, "gather", gather)
    memory.host[:] = 0
    with pytest.raises(DeviceUnavailable, match="new thread"):
        extracted(memory)
    memory.host[:] = 0
    failed.set()
    memory.lanes[1].close()  # waits for threads that still work
    assert not memory.host.any(), "the place may have another owner by now"
