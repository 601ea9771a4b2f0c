"""The contract of KV pools on a device, and a device that is late.

::

    contract = DevicePoolContract(LateDevice)
    for check in DevicePoolContract.CHECKS:
        getattr(contract, check)()      # AssertionError says what was broken

:class:`LateDevice` does nothing before somebody waits for it, and the work of its streams in random
order, as far as events allow. Who reads memory before its event finds what was there before.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, ClassVar, Final

import numpy as np

from kvstore import mover
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import KEY_BYTES, page_seeds
from kvstore.tier import lane as lanes
from kvstore.tier.lane import Device, DeviceCopy, DeviceEvent, DeviceStream, Lane, PagesInHost

BLOCKS: Final = 48
_GARBAGE: Final = 0xA5


class LateDevice:
    """Host memory as a device that does its work late and out of order; thread-safe.

    Args:
        seed: decides the order.
        staging_bytes: see :class:`kvstore.tier.lane.Device`.
        hurried: say that every event was reached although it was not: like code that does not wait.
        unordered: streams do not wait for events: like code that does not let them. The host does.

    Attributes:
        name: ``cpu:0``.
        stalled: no work is done any more.
        failures: the next operations that fail, as exceptions; ``pinned``, ``memory`` or ``run``
            before each says where.
    """

    def __init__(
        self, seed: int = 0, *, hurried: bool = False, unordered: bool = False,
        staging_bytes: int = 64 << 20,
    ) -> None:  # fmt: skip
        from kvstore.tier.gpu import HostDevice

        self.name = "cpu:0"
        self.staging_bytes = staging_bytes
        self.stalled = False
        self.failures: deque[tuple[str, Exception]] = deque()
        self.hurried = hurried
        self.unordered = unordered or hurried
        self._host = HostDevice(self.name)
        self._random = Random(seed)
        self._streams: list[LateStream] = []
        self._engine = LateStream(self)
        self._working = threading.RLock()

    def stream(self) -> "LateStream":
        """See :class:`kvstore.tier.lane.Device`."""
        return LateStream(self)

    def current(self) -> "LateStream":
        """The engine's stream."""
        return self._engine

    def pinned(self, size: int) -> Any:
        """Memory with garbage in it."""
        self.fail("pinned")
        return self._host.pinned(size).fill_(_GARBAGE)

    def memory(self, size: int, stream: DeviceStream) -> Any:
        """Memory with garbage in it."""
        self.fail("memory")
        return self._host.memory(size, stream).fill_(_GARBAGE)

    def view(self, address: int, size: int) -> Any:
        """See :class:`kvstore.tier.lane.Device`."""
        return self._host.view(address, size)

    def fail(self, where: str) -> None:
        """Raise the next failure, if it is for this place."""
        if self.failures and self.failures[0][0] == where:
            raise self.failures.popleft()[1]

    def join(self, stream: "LateStream") -> None:
        """Add a stream."""
        self._streams.append(stream)

    def step(self) -> bool:
        """Do one piece of work of any stream that may go on; returns whether there was one."""
        with self._working:
            ready = [] if self.stalled else [one for one in self._streams if one.ready]
            if not ready:
                return False
            self._random.choice(ready).step()
            return True

    def finish(self) -> None:
        """Do all work that can be done."""
        while self.step():
            pass


class LateStream:
    """A stream of a :class:`LateDevice`."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.reached = 0
        self._queued = 0
        self._work: deque[Callable[[], None] | LateEvent] = deque()
        device.join(self)

    @property
    def queued(self) -> int:
        """Pieces of work that are not done."""
        return len(self._work)

    @property
    def ready(self) -> bool:
        """Whether its next work can be done."""
        if not self._work:
            return False
        head = self._work[0]
        return not isinstance(head, LateEvent) or head.happened

    def step(self) -> None:
        """Do the next work."""
        head = self._work.popleft()
        try:
            if not isinstance(head, LateEvent):
                head()
        finally:
            self.reached += 1

    def run(self, work: Callable[[], None]) -> None:
        """See :class:`kvstore.tier.lane.DeviceStream`."""
        self.device.fail("run")
        self._add(work)

    def record(self) -> "LateEvent":
        """See :class:`kvstore.tier.lane.DeviceStream`."""
        return LateEvent(self, self._queued)

    def wait(self, event: DeviceEvent) -> None:
        """See :class:`kvstore.tier.lane.DeviceStream`."""
        assert isinstance(event, LateEvent)
        if not self.device.unordered:
            self._add(event)

    def _add(self, work: "Callable[[], None] | LateEvent") -> None:
        self._work.append(work)
        self._queued += 1


class LateEvent:
    """A point on a :class:`LateStream`."""

    def __init__(self, stream: LateStream, at: int) -> None:
        self._stream, self._at = stream, at

    @property
    def happened(self) -> bool:
        """Whether it was reached; does no work."""
        return self._stream.reached >= self._at

    def done(self) -> bool:
        """See :class:`kvstore.tier.lane.DeviceEvent`; the device does some work meanwhile."""
        return self.happened or (self._stream.device.step() and self.happened)

    def wait(self, timeout_s: float) -> bool:
        """See :class:`kvstore.tier.lane.DeviceEvent`; a stalled device fails it at once."""
        del timeout_s
        device = self._stream.device
        while not device.hurried and not self.happened and device.step():
            pass
        return self.happened or device.hurried


class EngineMemory:
    """An engine's blocks on a device, and pages in host memory.

    Args:
        device: the device.
        planes: number of planes.
        block_bytes: bytes of a block in a plane.
        gap: bytes between two blocks.
        each: blocks of a page.
        outermost: the planes of a block are adjacent; else the blocks of a plane.
        count: pages.

    Attributes:
        pool: the device's pool.
        memory: the tensor of all blocks.
        layers: number of layers.
        table: the blocks of each page, in random order.
        host: pages in host memory, shape (count, page bytes).
    """

    def __init__(
        self, device: Device, planes: int, block_bytes: int, gap: int, each: int, count: int,
        *, outermost: bool = False,
    ) -> None:  # fmt: skip
        from kvstore.tier.gpu import DevicePool

        stride = block_bytes + gap
        self.device = device
        self._stream = device.stream()
        self.memory = device.memory(planes * BLOCKS * stride, self._stream)
        start, inner = self.memory.data_ptr(), stride * (planes if outermost else BLOCKS)
        step = stride if outermost else inner
        addresses = tuple(start + at * step for at in range(planes))
        self.block_stride = stride * planes if outermost else stride
        per_layer = 2 if planes % 2 == 0 else 1
        described = KVPool(
            addresses, block_bytes, self.block_stride, BLOCKS, per_layer, device.name
        )
        self.lanes = Lane(device), Lane(device)
        self.pool: DevicePool = DevicePool(described, device, *self.lanes)
        self._offsets = [at * step for at in range(planes)]
        self.layers = described.layer_count
        self.block_bytes = block_bytes
        self.size = planes * block_bytes * each
        random = np.random.default_rng(planes * block_bytes + gap)
        self.table = random.permutation(BLOCKS)[: count * each].reshape(count, each)
        self.host = random.integers(0, 256, (count, self.size), dtype=np.uint8)
        keys = random.integers(0, 256, count * KEY_BYTES, dtype=np.uint8).tobytes()
        self.seeds = page_seeds(keys, planes)
        self.addresses = np.array([row.ctypes.data for row in self.host], dtype=np.uint64)
        self.digests = mover.digest(self.addresses, self.size, self.seeds)
        self.fill(0)

    def pages(self) -> PagesInHost:
        """The pages in host memory, with the digests that they had at first."""
        return PagesInHost(self.addresses, self.size, self.digests, self.seeds)

    def fill(self, byte: int) -> None:
        """The engine fills all its blocks; queued on its stream."""

        def work() -> None:
            self.memory.fill_(byte)

        self.device.current().run(work)

    def write(self, content: np.ndarray[Any, Any]) -> None:
        """The engine writes pages to their blocks; queued on its stream."""
        new = np.zeros(len(self.memory), dtype=np.uint8)
        for page, row in enumerate(content):
            for at, block in self._parts(page):
                new[block : block + self.block_bytes] = row[at : at + self.block_bytes]
        import torch

        fresh = torch.from_numpy(new)

        def work() -> None:
            self.memory.copy_(fresh)

        self.device.current().run(work)

    def read(self) -> list[bytes]:
        """What the blocks of each page hold, after all that the engine has queued."""
        assert self.device.current().record().wait(10.0)
        found = self.memory.cpu().numpy()
        return [
            b"".join(found[at : at + self.block_bytes].tobytes() for _, at in self._parts(page))
            for page in range(len(self.table))
        ]

    def close(self) -> None:
        """Free all."""
        for lane in self.lanes:
            lane.close()

    def _parts(self, page: int) -> Iterator[tuple[int, int]]:
        """Offset in the page, and offset in the memory, of each block."""
        at = 0
        for offset in self._offsets:
            for block in self.table[page].tolist():
                yield at, offset + block * self.block_stride
                at += self.block_bytes


class DevicePoolContract:
    """The checks.

    Args:
        open_device: opens a device.
        slice_pages: pages of a slice of the ring.
    """

    CHECKS: ClassVar[tuple[str, ...]] = (
        "check_pages_reach_their_blocks_byte_for_byte",
        "check_pages_leave_their_blocks_byte_for_byte",
        "check_blocks_are_read_after_the_step_that_writes_them",
        "check_blocks_are_written_after_the_work_that_reads_them",
        "check_pages_after_a_damaged_one_stay_away",
        "check_layers_are_there_when_their_event_is_reached",
        "check_two_jobs_after_each_other_do_not_mix",
        "check_operations_do_not_grow_with_pages",
        "check_a_cancelled_restore_ends",
        "check_both_ways_are_measured",
    )
    SHAPES: ClassVar[tuple[tuple[int, int, int, int, bool], ...]] = (
        (6, 4096, 0, 2, False), (8, 512, 0, 3, True), (4, 520, 24, 1, False), (3, 33, 2, 4, False),
        (1, 256 << 10, 0, 2, False), (1, 4096, 64, 2, False),
    )  # fmt: skip
    """Planes, bytes of a block, gap, blocks of a page, blocks outermost."""
    PAGES: ClassVar[int] = 11

    def __init__(self, open_device: Callable[[], Device], slice_pages: int = 1) -> None:
        self._open = open_device
        self._slice_pages = slice_pages

    def check_pages_reach_their_blocks_byte_for_byte(self) -> None:
        """Every shape is restored completely, and no other block is touched."""
        for memory in self._memories():
            memory.fill(7)
            assert self._restore(memory) == len(memory.table)
            assert memory.read() == [row.tobytes() for row in memory.host]

    def check_pages_leave_their_blocks_byte_for_byte(self) -> None:
        """Every shape is extracted completely, with the digests of its bytes."""
        for memory in self._memories():
            memory.write(memory.host)
            self._extract(memory, memory.host)

    def check_blocks_are_read_after_the_step_that_writes_them(self) -> None:
        """An extract waits for what the engine had queued, and only for that."""
        for memory in self._memories():
            memory.fill(1)
            memory.write(memory.host)
            after = memory.pool.fence()
            self._extract(memory, memory.host, after)

    def check_blocks_are_written_after_the_work_that_reads_them(self) -> None:
        """A restore waits for work of the engine that still reads the blocks."""
        for memory in self._memories():
            memory.fill(9)
            seen: list[bool] = []
            view = memory.memory

            def look(view: Any = view, seen: list[bool] = seen) -> None:
                seen.append(bool((view.cpu() == 9).all()))

            memory.device.current().run(look)
            assert self._restore(memory) == len(memory.table)
            assert memory.device.current().record().wait(10.0)
            assert seen == [True], "a block was written while the engine still read it"

    def check_pages_after_a_damaged_one_stay_away(self) -> None:
        """The leading run is restored; the blocks of other pages are as they were."""
        for wrong in (0, 4, self.PAGES - 1):
            for memory in self._memories():
                memory.fill(3)
                memory.host[wrong, memory.size // 2] ^= 1
                assert self._restore(memory) == wrong
                found, old = memory.read(), bytes([3]) * memory.size
                assert found[:wrong] == [row.tobytes() for row in memory.host[:wrong]]
                assert found[wrong:] == [old] * (self.PAGES - wrong)

    def check_layers_are_there_when_their_event_is_reached(self) -> None:
        """A layer-wise restore is complete for work that waits for its last layer."""
        for memory in self._memories():
            memory.fill(5)
            copy, pool = DeviceCopy(), memory.pool
            good = pool.restore(memory.pages(), memory.table, pool.fence(), copy, by_layer=True)
            assert good == len(memory.table)
            assert not copy.wait_layer(0, 0.0, pool.engine_stream()), "more may be queued"
            copy.end()
            engine, layers = pool.engine_stream(), memory.layers
            assert all(copy.wait_layer(layer, 1.0, engine) for layer in range(layers))
            assert memory.read() == [row.tobytes() for row in memory.host]
            assert copy.wait_idle(10.0)
            assert copy.idle()

    def check_two_jobs_after_each_other_do_not_mix(self) -> None:
        """The ring and the staging memory are used again only when the device has left them."""
        for memory in self._memories():
            pool, first, second = memory.pool, DeviceCopy(), DeviceCopy()
            half = len(memory.table) // 2
            whole = memory.pages()
            parts = slice(0, half), slice(half, None)
            for part, copy in zip(parts, (first, second), strict=True):
                pages = PagesInHost(
                    whole.sources[part], whole.size, whole.digests[part], whole.seeds[part]
                )
                pool.restore(pages, memory.table[part], pool.fence(), copy, by_layer=True)
            assert first.wait_idle(10.0)
            assert second.wait_idle(10.0)
            assert memory.read() == [row.tobytes() for row in memory.host]

    def check_operations_do_not_grow_with_pages(self) -> None:
        """At most two operations a layer and job, however many pages."""
        for memory in self._memories():
            pool = memory.pool
            assert self._restore(memory) == len(memory.table)
            self._extract(memory, memory.host)
            assert pool.launches <= 2 * 2 * memory.layers

    def check_a_cancelled_restore_ends(self) -> None:
        """It restores nothing, and the device is idle."""
        for memory in self._memories():
            progress, copy = mover.Progress(), DeviceCopy()
            progress.cancel()
            pool = memory.pool
            assert pool.restore(memory.pages(), memory.table, pool.fence(), copy, progress) == 0
            assert copy.wait_idle(10.0)

    def check_both_ways_are_measured(self) -> None:
        """Both lanes copy."""
        for memory in self._memories():
            assert all(speed > 0 for speed in memory.pool.speeds(memory.size))

    # ---- internal ---------------------------------------------------------------------------

    def _memories(self) -> Iterator[EngineMemory]:
        for planes, block_bytes, gap, each, outermost in self.SHAPES:
            with self._memory(planes, block_bytes, gap, each, outermost=outermost) as memory:
                yield memory

    @contextmanager
    def _memory(
        self, planes: int, block_bytes: int, gap: int, each: int, *, outermost: bool
    ) -> Iterator[EngineMemory]:
        with ExitStack() as undo:
            memory = EngineMemory(
                self._open(), planes, block_bytes, gap, each, self.PAGES, outermost=outermost
            )
            undo.callback(memory.close)
            # Several slices, which are used more than once.
            before = lanes.SLICE_BYTES
            undo.callback(setattr, lanes, "SLICE_BYTES", before)
            lanes.SLICE_BYTES = self._slice_pages * memory.size
            yield memory

    def _restore(self, memory: EngineMemory) -> int:
        copy, pool = DeviceCopy(), memory.pool
        good = pool.restore(memory.pages(), memory.table, pool.fence(), copy)
        assert copy.idle(), "a restore has returned while the device writes its blocks"
        return good

    def _extract(
        self, memory: EngineMemory, expected: np.ndarray[Any, Any],
        after: DeviceEvent | None = None,
    ) -> None:  # fmt: skip
        pool, copy = memory.pool, DeviceCopy()
        found = np.zeros_like(expected)
        targets = np.array([row.ctypes.data for row in found], dtype=np.uint64)
        digests = pool.extract(
            memory.table, targets, memory.size, memory.seeds, after or pool.fence(), copy
        )
        assert found.tobytes() == expected.tobytes(), "other bytes than the blocks have"
        wanted = mover.digest(targets, memory.size, memory.seeds)
        assert digests.tobytes() == wanted.tobytes(), "digests of other bytes"
        assert copy.wait_idle(10.0)
