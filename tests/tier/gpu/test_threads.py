"""Goal: a lane copies with as many threads as the machine has to spare, all at once."""

import resource
import threading

import numpy as np
import pytest

pytest.importorskip("torch")

from kvstore import mover
from kvstore.testing.device import EngineMemory
from kvstore.tier import lane
from kvstore.tier.gpu import HostDevice
from kvstore.tier.lane import DeviceCopy

THREADS = 4
WAIT_S = 10.0


@pytest.mark.parametrize(
    ("processors", "threads"), [(1, 1), (2, 2), (4, 4), (6, 4), (12, 6), (16, 8), (192, 8)]
)
def test_a_lane_leaves_processors_to_the_engine(processors, threads, monkeypatch):
    monkeypatch.setattr(lane.os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert lane.thread_count() == threads
    assert lane.slice_count() == threads + 2
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    assert lane.slice_count() == min(threads, 2) + 2, "a small ring where memory is limited"


@pytest.mark.parametrize("way", ["restore", "extract"])
def test_all_threads_of_a_lane_copy_at_the_same_time(way, monkeypatch):
    monkeypatch.setattr(lane, "thread_count", lambda: THREADS)
    monkeypatch.setattr(lane.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    memory = EngineMemory(HostDevice("cpu:0"), 4, 4096, 0, 1, 2 * THREADS)
    monkeypatch.setattr(lane, "SLICE_BYTES", memory.size)
    together = threading.Barrier(THREADS)
    name = "scatter" if way == "restore" else "gather"
    real = getattr(mover, name)

    def copy(*given):
        together.wait(WAIT_S)  # broken if fewer than all threads come
        return real(*given)

    monkeypatch.setattr(mover, name, copy)
    pool, pages = memory.pool, memory.pages()
    try:
        if way == "restore":
            fence = pool.fence()
            assert pool.restore(pages, memory.table, fence, DeviceCopy()) == 2 * THREADS
            assert memory.read() == [row.tobytes() for row in memory.host]
        else:
            memory.write(memory.host)
            wanted = [row.tobytes() for row in memory.host]
            memory.host[:] = 0
            found = pool.extract(
                memory.table, memory.addresses, memory.size, memory.seeds, pool.fence(),
                DeviceCopy(),
            )  # fmt: skip
            assert [row.tobytes() for row in memory.host] == wanted
            assert np.array_equal(found, memory.digests)
    finally:
        memory.close()
