"""Goal: a lane copies with the threads that the machine has to spare, and none works on late."""

import resource
import threading

import numpy as np
import pytest

pytest.importorskip("torch")

from kvstore import mover
from kvstore.protocol.errors import DeviceUnavailable
from kvstore.testing.device import EngineMemory
from kvstore.tier import lane
from kvstore.tier.gpu import HostDevice
from kvstore.tier.lane import DeviceCopy, Lane

MIB = 1 << 20
THREADS = 4
WAIT_S = 10.0


@pytest.mark.parametrize(
    ("processors", "threads"), [(1, 1), (2, 2), (4, 4), (6, 4), (12, 6), (16, 8), (192, 8)]
)
def test_a_lane_leaves_processors_to_the_engine(processors, threads, monkeypatch):
    monkeypatch.setattr(lane.os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert lane.thread_count() == threads
    assert lane.slice_count(MIB) == threads + 2


@pytest.mark.parametrize(("size", "slices"), [(4, 10), (20, 6), (32, 4), (80, 3)])
def test_a_ring_of_large_pages_has_fewer_slices(size, slices, monkeypatch):
    monkeypatch.setattr(lane, "thread_count", lambda: 8)
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert lane.slice_count(size * MIB) == slices


@pytest.mark.parametrize(
    ("limit", "slices"), [(8 << 10, 3), (48 * MIB, 3), (256 * MIB, 8), (8 << 30, 10)]
)
def test_rings_fit_into_what_may_be_locked(limit, slices, monkeypatch):
    """Those of all lanes of a process: one that takes all it may leaves the others without."""
    monkeypatch.setattr(lane, "thread_count", lambda: 8)
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (limit, limit))
    assert lane.slice_count(4 * MIB) == slices


def test_two_threads_fill_the_fewest_slices_at_a_time(memory, monkeypatch):
    monkeypatch.setattr(lane, "slice_count", lambda _: lane.SLICES_MIN)
    two, real = threading.Barrier(2), mover.scatter

    def scatter(*given):
        two.wait(WAIT_S)
        return real(*given)

    monkeypatch.setattr(mover, "scatter", scatter)
    assert restored(memory, memory.pages()) == 2 * THREADS
    assert memory.read() == [row.tobytes() for row in memory.host]
    assert len(memory.lanes[0]._ring) == 3 * memory.size


def test_a_trial_takes_no_more_of_the_device_than_a_slice():
    one = Lane(HostDevice("cpu:0"))
    assert one.speed(MIB, inwards=True) > 0
    assert len(one._staging) == lane.SLICE_BYTES
    assert one.close()


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setattr(lane, "thread_count", lambda: THREADS)
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
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


def threads_that_start(monkeypatch, most):
    """The first ``most`` threads of lanes start, those after them do not."""
    real, started = threading.Thread.start, []

    def start(self):
        if self.name.startswith("kvstore-device"):
            if len(started) == most:
                raise RuntimeError("can't start new thread")
            started.append(self)
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return started


@pytest.mark.parametrize("most", [1, 3])
def test_the_threads_that_start_do_all_the_work(most, memory, monkeypatch):
    started = threads_that_start(monkeypatch, most)
    assert restored(memory, memory.pages()) == 2 * THREADS
    assert memory.read() == [row.tobytes() for row in memory.host]
    assert len(started) == most


@pytest.mark.parametrize("move", [lambda memory: restored(memory, memory.pages()), extracted])
def test_work_for_which_there_is_no_thread_is_never_done(move, memory, monkeypatch):
    """Not when a thread has started at last: the ring and the slots have other owners by then."""
    done = []
    for name in ("scatter", "gather"):
        monkeypatch.setattr(mover, name, lambda *given: done.append(given))
    with monkeypatch.context() as context:
        threads_that_start(context, 0)
        with pytest.raises(DeviceUnavailable, match="new thread"):
            move(memory)
    assert [one._threads.submit(lambda: 7).result(WAIT_S) for one in memory.lanes] == [7, 7]
    assert not done


def test_a_lane_that_is_closed_does_nothing(memory):
    assert restored(memory, memory.pages()) == 2 * THREADS
    threads = list(memory.lanes[0]._threads._running)
    assert memory.lanes[0].close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        memory.lanes[0]._threads.submit(lambda: 7)
