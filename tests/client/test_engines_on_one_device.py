"""Goal: engines on one device and one node use their own memory, and their faults stay their own.

Each engine is a process with a context of its own on the device, played by a
:class:`kvstore.testing.device.LateDevice`. The memory of the device is one.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event

import numpy as np
import pytest

from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import PrefixKeys
from tests.client.conftest import (
    READY,
    SIZE,
    Daemon,
    Pool,
    arguments,
    content,
    new_keys,
    open_space,
)
from tests.client.slabs import BLOCK, get

torch = pytest.importorskip("torch")

from kvstore.testing.device import LateDevice  # noqa: E402
from kvstore.tier import gpu, lane  # noqa: E402

BLOCKS = np.array([9, 2, 3, 15, 0, 4, 5, 6, 12, 11, 10, 1])
COUNT = len(BLOCKS)
SLICE_BYTES = 2 * SIZE
RING_BYTES = lane.slice_count(SLICE_BYTES) * SLICE_BYTES
STAGING_BYTES = 16 * SIZE
"""What a job of all pages stages: the next power of two."""


class Memory:
    """The memory of a device, shared by its processes."""

    def __init__(self, size: int = 1 << 40) -> None:
        self.left = size

    def take(self, size: int) -> None:
        if size > self.left:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        self.left -= size

    def give_back(self, size: int) -> None:
        self.left += size


class OwnContext(LateDevice):
    """The device as one process has it.

    Attributes:
        rings: bytes of pinned memory that it has now, each piece.
    """

    def __init__(self, seed: int, shared: Memory) -> None:
        super().__init__(seed)
        self.shared = shared
        self.rings: list[int] = []

    def pinned(self, size):
        ring = super().pinned(size)
        self.rings.append(size)
        weakref.finalize(ring, self.rings.remove, size)
        return ring

    def memory(self, size, stream):
        self.shared.take(size)
        memory = super().memory(size, stream)
        weakref.finalize(memory, self.shared.give_back, size)
        return memory


class Slow(OwnContext):
    """A device that waits in the middle of its work while it is told to.

    Attributes:
        begun: it has work, and waits.
        goes_on: it does not wait.
    """

    def __init__(self, seed: int, shared: Memory) -> None:
        super().__init__(seed, shared)
        self.begun, self.goes_on = Event(), Event()
        self.goes_on.set()

    def step(self):
        if any(stream.queued for stream in self._streams):
            self.begun.set()
            assert self.goes_on.wait(60.0), "nobody let it go on"
        return super().step()


class Engine:
    """A store, a space and a pool on the device."""

    def __init__(self, store: KVStore, device: LateDevice, seed: int) -> None:
        self.store, self.device = store, device
        self.pool = Pool(4, BLOCK, 16)
        self.seed = seed
        self.space: Space

    def open(self, other: "Engine | None" = None) -> "Engine":
        if other is None:
            self.space = open_space(self.store)
        else:
            identity, shards = other.space.identity, list(other.space.shards)
            self.space = self.store.space(identity, shards)
        return self

    def keys(self) -> PrefixKeys:
        """Of the pages that this engine computes."""
        return new_keys(self.space, COUNT, self.seed * 10_000)

    def blocks(self) -> list[bytes]:
        return [self.pool.page(np.array([block])) for block in BLOCKS]

    def clear(self) -> None:
        for plane in self.pool.planes:
            plane[:] = 0

    def load(self, keys: PrefixKeys):
        return self.space.restore_to_kvpool(keys, self.pool.on("cpu:0"), BLOCKS)

    def save(self, keys: PrefixKeys):
        return self.space.extract_from_kvpool(self.pool.on("cpu:0"), BLOCKS, keys)

    @property
    def failures(self) -> int:
        return self.store.troubles.get("device_unavailable", 0)


@pytest.fixture
def shared(request) -> Memory:
    """The device's memory: without limit, unless a test says how many bytes."""
    return Memory(getattr(request, "param", 1 << 40))


@pytest.fixture(params=[0, 1])
def engines(request, shared, daemon: Daemon, monkeypatch) -> Iterator[list[Engine]]:
    monkeypatch.setattr(lane, "SLICE_BYTES", SLICE_BYTES)
    with ExitStack() as stack:
        both = []
        for seed in (1, 2):
            device = OwnContext(request.param + seed, shared)
            monkeypatch.setattr(gpu, "open_device", lambda name, device=device: device)
            store = stack.enter_context(daemon.connect())
            made = Engine(store, device, seed).open(both[0] if both else None)
            store.device_pool(made.pool.on("cpu:0"))
            both.append(made)
        yield both
        for one in both:
            one.device.stalled = False
            one.device.finish()


@pytest.fixture
def slow(own_daemon: Daemon, monkeypatch) -> Iterator[Engine]:
    """An engine whose device waits where it is told to."""
    device = Slow(0, Memory())
    monkeypatch.setattr(lane, "SLICE_BYTES", SLICE_BYTES)
    monkeypatch.setattr(gpu, "open_device", lambda name: device)
    with own_daemon.connect() as store:
        yield Engine(store, device, 1).open()
        device.goes_on.set()
        device.finish()


def leases(engines: list[Engine]) -> int:
    """Leases at the node, once it knows what both engines have released."""
    return [int(one.store.stats()["leases"]) for one in engines][-1]


def test_engines_load_their_own_pages_and_each_others(engines):
    for one in engines:
        one.pool.fill(one.seed)
    wrote = [one.blocks() for one in engines]
    storing = [one.save(one.keys()) for one in engines]
    assert [job.result().stored for job in storing] == [COUNT, COUNT]
    for turn in range(3):
        whose = [turn % 2, 1 - turn % 2]
        for one in engines:
            one.clear()
        loads = [one.load(engines[at].keys()) for one, at in zip(engines, whose, strict=True)]
        assert [job.result().pages for job in loads] == [COUNT, COUNT]
        assert [one.blocks() for one in engines] == [wrote[at] for at in whose]


def test_a_copy_that_fails_costs_only_its_own_engine_a_miss(engines):
    one, other = engines
    one.pool.fill(5)
    assert one.save(one.keys()).result().stored == COUNT
    wrote = one.blocks()
    one.device.failures.append(("run", RuntimeError("CUDA error: an illegal memory access")))
    one.clear()
    failing, loading = one.load(one.keys()), other.load(one.keys())
    assert (failing.result().pages, loading.result().pages) == (0, COUNT)
    assert not any(any(page) for page in one.blocks())
    assert other.blocks() == wrote
    assert [each.failures for each in engines] == [1, 0]
    assert one.load(one.keys()).result().pages == COUNT
    assert one.blocks() == wrote


def test_a_device_that_hangs_for_one_engine_holds_only_that_engines_blocks(engines, wait_until):
    one, other = engines
    pages = content(COUNT, SIZE)
    other.space.put(other.keys(), pages)
    one.device.stalled = True
    hanging = one.load(other.keys())
    wait_until(lambda: one.failures == 1)
    for _ in range(3):
        other.clear()
        assert other.load(other.keys()).result().pages == COUNT
        assert other.blocks() == [bytes(page) for page in pages]
    other.pool.fill(7)
    assert other.save(one.keys()).result().stored == COUNT
    assert get(one.space, one.keys()) == other.blocks(), "its engine reads it without the device"
    assert not hanging.done, "the device may still write its blocks"
    assert other.failures == 0
    assert leases(engines) == 0, "the node is not kept waiting"

    one.device.stalled = False
    wait_until(lambda: hanging.done)
    assert one.load(other.keys()).result().pages == COUNT


@pytest.mark.parametrize("shared", [STAGING_BYTES], indirect=True)
def test_an_engine_without_room_on_the_device_computes_until_there_is_some(engines, shared):
    one, other = engines
    pages = content(COUNT, SIZE)
    one.space.put(one.keys(), pages)
    assert one.load(one.keys()).result().pages == COUNT
    assert shared.left == 0
    for turn in (1, 2):
        assert other.load(one.keys()).result().pages == 0
        assert other.failures == turn
        assert not any(any(page) for page in other.blocks())
        assert one.load(one.keys()).result().pages == COUNT, "the one that has it goes on"
    assert one.failures == 0
    assert leases(engines) == 0

    one.store.close()
    assert shared.left == STAGING_BYTES
    assert other.load(one.keys()).result().pages == COUNT
    assert other.blocks() == [bytes(page) for page in pages]


def test_an_engine_pins_a_ring_for_each_direction_whatever_it_moves(engines, shared):
    """However many KV groups, pages and jobs, and whatever the other engine does."""
    one, other = engines
    before = shared.left
    more = Pool(4, BLOCK, 16)
    one.pool.fill(1)
    assert one.save(one.keys()).result().stored == COUNT
    assert (one.device.rings, other.device.rings) == ([RING_BYTES], [])
    for pool in (one.pool, more):
        for _ in range(2):
            job = one.space.restore_to_kvpool(one.keys(), pool.on("cpu:0"), BLOCKS)
            assert job.result().pages == COUNT
    assert [more.page(np.array([block])) for block in BLOCKS] == one.blocks()
    assert (one.device.rings, other.device.rings) == ([RING_BYTES] * 2, [])
    assert before - shared.left == 2 * STAGING_BYTES
    assert other.load(one.keys()).result().pages == COUNT
    assert (one.device.rings, other.device.rings) == ([RING_BYTES] * 2, [RING_BYTES])
    assert before - shared.left == 3 * STAGING_BYTES

    one.store.close()
    assert (one.device.rings, other.device.rings) == ([], [RING_BYTES])
    assert before - shared.left == STAGING_BYTES


@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_node_that_is_killed_and_started_anew_while_copies_run_costs_a_miss(
    slow, own_daemon, spawn, wait_until, verb
):
    pages = content(COUNT, SIZE)
    slow.space.put(slow.keys(), pages)
    slow.pool.fill(3)
    wrote, other = slow.blocks(), new_keys(slow.space, COUNT, 77_000)
    slow.device.begun.clear()
    slow.device.goes_on.clear()
    job = slow.load(slow.keys()) if verb == "load" else slow.save(other)
    assert slow.device.begun.wait(10.0), "a copy runs"

    own_daemon.process.kill()
    wait_until(lambda: not slow.store.connected)
    spawn(arguments(own_daemon.socket), ready=READY)
    wait_until(lambda: slow.store.connected)
    assert not job.done, "the device still uses its blocks"
    slow.device.goes_on.set()

    if verb == "load":
        count = job.result().pages
        assert slow.blocks()[:count] == [bytes(page) for page in pages[:count]]
        assert job.done
    else:
        with pytest.raises(KVStoreError):
            job.result()
        assert slow.blocks() == wrote
    assert slow.space.lookup(slow.keys()).pages == slow.space.lookup(other).pages == 0
    wrote = slow.blocks()
    assert slow.save(other).result().stored == COUNT
    slow.clear()
    assert slow.load(other).result().pages == COUNT
    assert slow.blocks() == wrote
    assert leases([slow]) == 0
