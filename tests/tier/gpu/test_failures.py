"""Goal: what fails or hangs on a device is named by its cause, and no wait for it is endless."""

import gc
import time
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore.client.device import DevicePools  # noqa: E402
from kvstore.mover.kvpool import KVPool  # noqa: E402
from kvstore.protocol.errors import DeviceUnavailable  # noqa: E402
from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier import gpu, lane  # noqa: E402
from kvstore.tier.lane import DeviceCopy, Lane  # noqa: E402

SIZE = 4096


class Never:
    """What torch has for an event, on a device that does not go on."""

    def __init__(self) -> None:
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return False


class Broken:
    """An event of a device that has failed: whoever asks gets an error."""

    def done(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def wait(self, timeout_s: float) -> bool:
        return self.done()


def test_a_wait_for_an_event_that_never_comes_ends_at_its_deadline():
    event = Never()
    began = time.monotonic()
    assert not gpu._CudaEvent(event).wait(0.05)
    assert 0.05 <= time.monotonic() - began < 5.0
    assert event.asked > 1

    event.asked = 0
    assert not gpu._CudaEvent(event).wait(0.0)
    assert event.asked >= 1, "an event that is there needs no time"


def test_a_copy_that_never_ends_fails_at_the_deadline_and_the_next_one_at_once(monkeypatch):
    monkeypatch.setattr(lane, "DEADLINE_S", 0.05)
    one = Lane(LateDevice())
    monkeypatch.setattr(one.stream, "record", lambda: gpu._CudaEvent(Never()))
    for least in (0.05, 0.0):
        began = time.monotonic()
        with pytest.raises(DeviceUnavailable, match="has not finished") as raised:
            one.speed(SIZE, inwards=True)
        assert least <= time.monotonic() - began < 5.0
        assert raised.value.cause == "deadline"
    one.close()


def test_who_waits_for_another_job_waits_until_the_deadline(monkeypatch):
    monkeypatch.setattr(lane, "DEADLINE_S", 0.01)
    one = Lane(LateDevice())
    late = pytest.raises(DeviceUnavailable, match="too long")
    with one.turn(DeviceCopy()), late as raised, one.turn(DeviceCopy()):
        pytest.fail("two jobs have the lane")
    assert raised.value.cause == "deadline"
    one.close()


@pytest.mark.parametrize(
    ("where", "error", "cause"),
    [
        ("memory", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "memory"),
        ("memory", MemoryError(), "memory"),
        ("run", RuntimeError("CUDA error: unspecified launch failure"), "copy"),
        ("pinned", DeviceUnavailable("cannot be pinned", "memlock"), "memlock"),
    ],
)
def test_a_failure_has_a_cause(where, error, cause):
    device = LateDevice()
    one = Lane(device)
    device.failures.append((where, error))
    with pytest.raises(DeviceUnavailable) as raised:
        one.speed(SIZE, inwards=True)
    assert raised.value.cause == cause
    assert one.speed(SIZE, inwards=True) > 0, "the next job works"
    one.close()


def test_small_pages_are_copied_after_memory_for_larger_ones_was_refused():
    device = LateDevice()
    one = Lane(device)
    assert one.speed(SIZE, inwards=True) > 0
    device.failures.append(("pinned", DeviceUnavailable("cannot be pinned", "memlock")))
    with pytest.raises(DeviceUnavailable):
        one.speed(64 << 20, inwards=True)

    assert one.speed(SIZE, inwards=True) > 0
    one.close()


def test_all_lanes_are_closed_though_one_cannot_tell_whether_it_is_idle(monkeypatch):
    """After an error that it cannot recover from, every call of a CUDA device raises it again."""
    closed: list[lane._Threads] = []
    monkeypatch.setattr(gpu, "open_device", LateDevice)
    pools, memory = DevicePools(), np.zeros(16 * SIZE, dtype=np.uint8)
    for name in ("cpu:0", "cpu:1"):
        pool = KVPool((int(memory.ctypes.data),), SIZE, SIZE, 16, 1, name)
        pools.pool(pool).speeds(SIZE)
    lanes = [one for _, *both in pools._lanes.values() for one in both]
    for at in (0, 3):
        monkeypatch.setattr(lanes[at], "_last", Broken())
    end = lane._Threads.end

    def ended(self):
        closed.append(self)
        end(self)

    monkeypatch.setattr(lane._Threads, "end", ended)
    pools.close()

    assert len(closed) == len(lanes) == 4
    assert [one._ring is None for one in lanes] == [False, True, True, False]


@pytest.fixture
def cuda(monkeypatch) -> gpu.CudaDevice:
    """A CUDA device as far as pinned memory needs one, in a process that may lock 16 MiB."""
    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch, "zeros", lambda size, *, dtype, device, pin_memory: zeros(size, dtype=dtype)
    )
    monkeypatch.setattr(gpu, "locked", gpu.LockedMemory())
    monkeypatch.setattr(gpu.resource, "getrlimit", lambda which: (16 << 20, 16 << 20))
    return gpu.CudaDevice("cuda:0")


def in_inference_mode(memory: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return memory[:8]


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memory[:8],
        in_inference_mode,
        lambda memory: memory.detach(),
        lambda memory: memory.numpy(),
        lambda memory: memory.untyped_storage(),
        lambda memory: torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()),
    ],
    ids=["part", "inference", "detached", "array", "storage", "over"],
)
def test_the_rings_of_a_process_are_together_no_more_than_it_may_lock(view, cuda, monkeypatch):
    first = cuda.pinned(12 << 20)
    with pytest.raises(DeviceUnavailable, match=r"25165824 bytes.*RLIMIT_MEMLOCK") as raised:
        cuda.pinned(12 << 20)
    assert raised.value.cause == "memlock"
    part = view(first)
    del first
    with pytest.raises(DeviceUnavailable, match="RLIMIT_MEMLOCK"):
        cuda.pinned(12 << 20)  # its memory is still in use
    del part

    def full(*how, **more):
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as context:
        context.setattr(torch, "zeros", full)
        with pytest.raises(DeviceUnavailable, match="cannot be pinned"):
            cuda.pinned(12 << 20)
    assert len(cuda.pinned(16 << 20)) == 16 << 20, "what failed and what was freed is not counted"


def test_memory_of_the_host_is_the_hosts_whatever_an_engine_has_made_the_default():
    with torch.device("meta"):
        for made in (gpu.HostDevice("cpu:0").pinned(8), gpu.HostDevice("cpu:0").memory(8, None)):
            assert made.device.type == "cpu"


def test_a_stream_of_another_device_leaves_the_first_device_alone(monkeypatch):
    """CUDA takes memory of a thread's device when a stream is left; a thread begins with 0."""
    order: list[str] = []

    @contextmanager
    def chosen(what: str):
        order.append(f"{what} chosen")
        yield
        order.append(f"{what} left")

    class OfThird:
        device = "cuda:2"

    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen(device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: chosen("its stream"))
    gpu._CudaStream(OfThird()).run(lambda: order.append("work"))
    assert order == [
        "cuda:2 chosen", "its stream chosen", "work", "its stream left", "cuda:2 left",
    ]  # fmt: skip


def test_a_forked_child_frees_nothing_of_its_parents_device(monkeypatch):
    """CUDA aborts a child that does; and a grandchild has what the child has kept."""
    monkeypatch.setattr(gpu, "open_device", LateDevice)
    monkeypatch.setattr("kvstore.client.forks._of_parents", [])
    pools, memory = DevicePools(), np.zeros(16 * SIZE, dtype=np.uint8)
    pools.pool(KVPool((int(memory.ctypes.data),), SIZE, SIZE, 16, 1, "cpu:0")).speeds(SIZE)
    ((device, *lanes),) = pools._lanes.values()
    of_parent = [weakref.ref(one) for one in (device, *lanes, lanes[0]._ring)]
    del device, lanes
    for _ in range(2):
        pools.forked()
    gc.collect()
    assert all(one() is not None for one in of_parent)
    with pytest.raises(DeviceUnavailable, match="parent of this fork"):
        pools.pool(KVPool((int(memory.ctypes.data),), SIZE, SIZE, 16, 1, "cpu:0"))
    for one in of_parent[1:3]:
        one().close()
