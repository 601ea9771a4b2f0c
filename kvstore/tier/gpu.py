"""KV pools on a device: gathers pages there, and scatters them to an engine's blocks.

Everything is done in torch operations, which run alike on ``cuda`` and on ``cpu``. In a device's
staging memory pages lie in page order, so one copy moves them between there and the host; one
operation for each plane gathers or spreads the blocks of all pages that are staged. That is a whole
job on ``cuda``; on ``cpu`` it is less than a page (:class:`_Parts`). A pool with one plane of large
blocks (the layout with blocks outermost) needs neither: its blocks are copied directly.
"""

import ctypes
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore import mover
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import DeviceUnavailable, InvalidArgument
from kvstore.tier.lane import (
    Device,
    DeviceCopy,
    DeviceEvent,
    DeviceStream,
    Lane,
    PagesInHost,
)

DIRECT_BYTES: Final = 256 << 10
"""Blocks of this size or more are copied one by one if a pool has one plane: copies of smaller ones
do not keep a device busy."""
STAGING_BYTES: Final = 256 << 20
"""Bytes that a client moves at a time (``BATCH_BYTES`` of :mod:`kvstore.client.space`): each
operation is started once per job of the lane. Allocated as jobs need it, for each direction."""
HOST_STAGING_BYTES: Final = 1 << 20
"""Staging memory that stays in a core's own cache; starting an operation costs little there."""
_POLL_S: Final = 0.0001
_ITEMS: Final = ((16, torch.complex128), (8, torch.int64), (1, torch.uint8))
"""Bytes and type of the items in which blocks are moved; only their size matters."""

Table = npt.NDArray[np.int64]
"""Block numbers, shape (pages, blocks of a page)."""


class DevicePool:
    """An engine's KV pool on a device; thread-safe.

    Args:
        pool: the pool, on ``device``.
        device: its device.
        way_in: the lane of restores; may be shared by the pools of a device.
        way_out: the lane of extracts.

    Attributes:
        launches: operations that it has started on the device besides plain copies, in all jobs.
    """

    # An engine may call us in inference mode; tensors made there cannot be written outside of it.
    @torch.inference_mode(mode=False)
    def __init__(self, pool: KVPool, device: Device, way_in: Lane, way_out: Lane) -> None:
        self._pool = pool
        self._device = device
        self._in, self._out = way_in, way_out
        item, self._type = item_of(pool)
        self._planes = [plane_view(device, pool, at, item, self._type) for at in pool.planes]
        self._direct = len(self._planes) == 1 and pool.block_bytes >= DIRECT_BYTES
        self._table: tuple[Table, Any] | None = None
        self.launches = 0

    def fence(self) -> DeviceEvent:
        """An event after all work that the calling thread's engine has queued so far."""
        return self._device.current().record()

    def engine_stream(self) -> DeviceStream:
        """The stream of the calling thread's engine, for :meth:`DeviceCopy.wait_layer`."""
        return self._device.current()

    def restore(
        self, pages: PagesInHost, table: Table, after: DeviceEvent, copy: DeviceCopy,
        progress: mover.Progress | None = None, *, by_layer: bool = False,
    ) -> int:  # fmt: skip
        """Copy pages from host memory to blocks; returns how many leading pages are valid.

        Every byte is verified while it is copied to private memory; pages after the first that
        fails are not copied.

        Args:
            pages: the pages.
            table: the blocks of each page.
            after: the blocks are not written before the device has reached this event.
            copy: told about the work, and about layers.
            progress: for cancellation.
            by_layer: return when all layers are queued, so that the engine waits for each; else
                when the device has finished.

        Raises:
            DeviceUnavailable: the device fails or does not finish. The blocks hold nothing valid,
                and may be written until ``copy`` is idle.
        """
        with self._in.turn(copy):
            stream, size = self._in.stream, pages.size
            if self._direct:
                stream.wait(after)
                good = self._in.bring(pages, self._to_blocks(table, size), progress)
                layers = [stream.record()] * self._pool.layer_count if good else []
            else:
                good, layers = self._restore_staged(pages, table, after, progress)
            if by_layer:
                copy.note_layers(layers)
            else:
                self._in.reached(stream.record())
        return good

    def extract(
        self, table: Table, targets: mover.Addresses, size: int, seeds: npt.NDArray[np.uint64],
        after: DeviceEvent, copy: DeviceCopy,
    ) -> mover.Digests:  # fmt: skip
        """Copy pages from blocks to host memory; returns the digests of the copied bytes.

        Args:
            table: the blocks of each page.
            targets: start address of each page, shape (n,), uint64.
            size: bytes of a page.
            seeds: seed of each page's digest, shape (n,), uint64.
            after: the blocks are not read before the device has reached this event.
            copy: told about the work.

        Raises:
            DeviceUnavailable: the device fails or does not finish. Nothing is written to the
                targets any more, but the blocks may be read until ``copy`` is idle.
        """
        with self._out.turn(copy):
            stream = self._out.stream
            stream.wait(after)
            if self._direct:
                return self._out.take(self._from_blocks(table, size), targets, size, seeds)
            parts = self._parts(table, size)
            staged = self._out.staging(parts.size)

            def fetch(first: int, count: int, memory: Any) -> None:
                for number, there, here in parts.cut(first, count):
                    if not there.start:
                        self._gather(staged, parts, number)
                    memory[here].copy_(staged[there], non_blocking=True)

            return self._out.take(fetch, targets, size, seeds)

    def page(self, table: Table, size: int) -> "DevicePage":
        """The blocks of one page, to be read and written without a node."""
        return DevicePage(self, table, size)

    def speeds(self, page_bytes: int) -> tuple[float, float]:
        """Try both lanes; returns bytes per second to the device and from it.

        Raises:
            DeviceUnavailable: one does not work; the message says why.
        """
        there = self._in.speed(page_bytes, inwards=True)
        return there, self._out.speed(page_bytes, inwards=False)

    # ---- internal ---------------------------------------------------------------------------

    def _parts(self, table: Table, size: int) -> "_Parts":
        return _Parts(table, size, len(self._planes), self._device.staging_bytes)

    def _staged(self, staged: Any, parts: "_Parts", number: int) -> Any:
        """A part in staging memory as (pages, planes, blocks of a page, items of a block)."""
        (pages, each), planes = parts.blocks(number).shape, len(parts.planes(number))
        used = staged[: pages * planes * parts.plane_bytes]
        return used.view(self._type).view(pages, planes, each, -1)

    def _restore_staged(
        self, pages: PagesInHost, table: Table, after: DeviceEvent,
        progress: mover.Progress | None,
    ) -> tuple[int, list[DeviceEvent]]:  # fmt: skip
        """Restore through staging memory; returns the valid pages, and an event for each layer."""
        stream = self._in.stream
        parts = self._parts(table, pages.size)
        staged, every = self._in.staging(parts.size), range(len(self._planes))

        def deliver(first: int, count: int, memory: Any) -> None:
            for number, there, here in parts.cut(first, count):
                if number and not there.start:  # the staging memory is full
                    self._spread(staged, parts, number - 1, every)
                staged[there].copy_(memory[here], non_blocking=True)

        if parts.last:
            stream.wait(after)  # otherwise the copy of the only part need not wait for the engine
        good = self._in.bring(pages, deliver, progress)
        if not good:
            return 0, []
        stream.wait(after)
        valid = self._parts(table[:good], pages.size)  # the last of these is in staging memory
        each, events = self._pool.planes_per_layer, []
        for first in range(0, len(every), each):
            layer = every[first : first + each]
            stream.run(lambda layer=layer: self._spread(staged, valid, valid.last, layer))  # type: ignore[misc]
            events.append(stream.record())
        return good, events

    def _gather(self, staged: Any, parts: "_Parts", number: int) -> None:
        """Copy the blocks of a part to staging memory; run on the stream."""
        there, index = self._staged(staged, parts, number), self._index(parts.blocks(number))
        for at, plane in enumerate(parts.planes(number)):
            if len(index) == 1:  # faster on cpu, but only for adjacent memory
                torch.index_select(self._planes[plane], 0, index[0], out=there[0, at])
            else:
                torch.ops.aten.index.Tensor_out(self._planes[plane], [index], out=there[:, at])
            self.launches += 1

    def _spread(self, staged: Any, parts: "_Parts", number: int, planes: range) -> None:
        """Copy a part's planes that are among ``planes`` to their blocks; run on the stream."""
        there, index = self._staged(staged, parts, number), self._index(parts.blocks(number))
        for at, plane in enumerate(parts.planes(number)):
            if plane in planes:
                self._planes[plane].index_put_((index,), there[:, at])
                self.launches += 1

    def _index(self, table: Table) -> Any:
        """The table on the device; the last one is kept, because all layers of a job use it."""
        found = self._table
        if found is None or found[0] is not table:
            # Else torch would wait for the stream, and with it for the engine, without a limit.
            index = torch.from_numpy(np.ascontiguousarray(table))
            index = index.to(self._planes[0].device, non_blocking=True)
            self._table = found = (table, index)
        return found[1]

    def _to_blocks(self, table: Table, size: int) -> Callable[[int, int, Any], None]:
        def deliver(first: int, count: int, memory: Any) -> None:
            blocks = memory.view(self._type).view(count * table.shape[1], -1)
            for row, block in enumerate(table[first : first + count].reshape(-1).tolist()):
                self._planes[0][block].copy_(blocks[row], non_blocking=True)

        assert table.shape[1] * self._pool.block_bytes == size
        return deliver

    def _from_blocks(self, table: Table, size: int) -> Callable[[int, int, Any], None]:
        def fetch(first: int, count: int, memory: Any) -> None:
            blocks = memory.view(self._type).view(count * table.shape[1], -1)
            for row, block in enumerate(table[first : first + count].reshape(-1).tolist()):
                blocks[row].copy_(self._planes[0][block], non_blocking=True)

        assert table.shape[1] * self._pool.block_bytes == size
        return fetch


class _Parts:
    """How the pages of a job are staged: as many at a time as fit, or else some planes of one.

    Parts have numbers, in the order of their bytes. Each is staged at the start of the memory; only
    a part of several pages can come or go in more than one slice of the ring.

    Args:
        table: the blocks of each page.
        size: bytes of a page.
        planes: planes of the pool.
        staging_bytes: bytes of the largest part, if that is a plane of a page or more.

    Attributes:
        plane_bytes: bytes of a page in one plane.
        size: bytes of the largest part.
        last: number of the last part.
    """

    def __init__(self, table: Table, size: int, planes: int, staging_bytes: int) -> None:
        self.plane_bytes = size // planes
        self._page_bytes = size
        self._pages = min(len(table), max(1, staging_bytes // size))
        most = min(planes, max(1, staging_bytes // self.plane_bytes))
        self._planes = [range(planes)[at : at + most] for at in range(0, planes, most)]
        self._blocks = [table[at : at + self._pages] for at in range(0, len(table), self._pages)]
        self.size = self._pages * most * self.plane_bytes
        self.last = len(self._blocks) * len(self._planes) - 1

    def blocks(self, number: int) -> Table:
        """The blocks of a part's pages; the same object for all parts of these pages."""
        return self._blocks[number // len(self._planes)]

    def planes(self, number: int) -> range:
        """The planes of a part."""
        return self._planes[number % len(self._planes)]

    def cut(self, first: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Cut adjacent pages at the bounds of parts.

        Returns:
            Numbers of parts, with the bytes of each in staging memory and from the first page on.
        """
        page, end = first, first + count
        while page < end:
            group, at = divmod(page, self._pages)
            pages = min(self._pages - at, end - page)
            for part, planes in enumerate(self._planes):
                there = at * self._page_bytes
                here = (page - first) * self._page_bytes + planes.start * self.plane_bytes
                size = pages * len(planes) * self.plane_bytes
                number = group * len(self._planes) + part
                yield number, slice(there, there + size), slice(here, here + size)
            page += pages


class DevicePage:
    """The blocks of one page on a device.

    Args:
        pool: their pool.
        table: their numbers, shape (1, blocks of a page).
        size: bytes of the page.
    """

    def __init__(self, pool: DevicePool, table: Table, size: int) -> None:
        self._pool, self._table = pool, table
        self._page = np.zeros(size, dtype=np.uint8)
        self._address = np.array([self._page.ctypes.data], dtype=np.uint64)
        self._seeds = np.zeros(1, dtype=np.uint64)
        self._writes: list[DeviceCopy] = []

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no :meth:`write` changes the blocks any more; False on timeout."""
        deadline = monotonic() + timeout_s
        return all(copy.wait_idle(max(0.0, deadline - monotonic())) for copy in self._writes)

    def write(self, data: bytes) -> None:
        """Replace the page's bytes.

        Raises:
            DeviceUnavailable: the device fails or does not finish.
        """
        assert len(data) == len(self._page)
        self._page[:] = np.frombuffer(data, dtype=np.uint8)
        digests = mover.digest(self._address, len(data), self._seeds)
        pages = PagesInHost(self._address, len(data), digests, self._seeds)
        self._writes.append(DeviceCopy())
        self._pool.restore(pages, self._table, self._pool.fence(), self._writes[-1])

    def read(self) -> bytes:
        """The page's bytes.

        Raises:
            DeviceUnavailable: the device fails or does not finish.
        """
        fence, copy = self._pool.fence(), DeviceCopy()
        self._pool.extract(self._table, self._address, len(self._page), self._seeds, fence, copy)
        return self._page.tobytes()


class HostDevice:
    """Host memory as a device (``cpu:N``): work is done at once. For tests and benchmarks.

    Args:
        name: its name.
        staging_bytes: see :class:`Device`.
    """

    def __init__(self, name: str, staging_bytes: int = HOST_STAGING_BYTES) -> None:
        self.name = name
        self.staging_bytes = staging_bytes

    def stream(self) -> DeviceStream:
        """See :class:`Device`."""
        return _HostStream()

    def current(self) -> DeviceStream:
        """See :class:`Device`."""
        return _HostStream()

    @torch.inference_mode(mode=False)
    def pinned(self, size: int) -> Any:
        """See :class:`Device`."""
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    @torch.inference_mode(mode=False)
    def memory(self, size: int, stream: DeviceStream) -> Any:
        """See :class:`Device`."""
        del stream
        return torch.zeros(size, dtype=torch.uint8, device="cpu")

    @torch.inference_mode(mode=False)
    def view(self, address: int, size: int) -> Any:
        """See :class:`Device`."""
        found = (ctypes.c_ubyte * size).from_address(address)
        return torch.from_numpy(np.ctypeslib.as_array(found))


class _HostEvent:
    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        return True


class _HostStream:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> _HostEvent:
        return _HostEvent()

    def wait(self, event: DeviceEvent) -> None:
        del event


class CudaDevice:
    """A CUDA device.

    Args:
        name: ``cuda`` or ``cuda:N``.

    Raises:
        DeviceUnavailable: it does not exist.
    """

    def __init__(self, name: str) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        self._device = torch.device("cuda", torch.device(name).index or 0)
        if self._device.index >= count:
            raise DeviceUnavailable(f"{name}: this process sees {count} CUDA devices")
        self.name = str(self._device)
        self.staging_bytes = STAGING_BYTES

    def stream(self) -> "DeviceStream":
        """See :class:`Device`."""
        return _CudaStream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def current(self) -> DeviceStream:
        """See :class:`Device`."""
        return _CudaStream(torch.cuda.current_stream(self._device))

    @torch.inference_mode(mode=False)
    def pinned(self, size: int) -> Any:
        """See :class:`Device`."""
        locked.add(size)
        try:
            memory = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            locked.remove(size)
            raise DeviceUnavailable(
                f"{size} bytes cannot be pinned: {error}; check RLIMIT_MEMLOCK (ulimit -l) and"
                " free memory",
                "memlock",
            ) from error
        # Its storage, which lives as long as any tensor over it, whichever way that was made.
        weakref.finalize(memory.untyped_storage(), locked.remove, size)
        return memory

    @torch.inference_mode(mode=False)
    def memory(self, size: int, stream: DeviceStream) -> Any:
        """See :class:`Device`."""
        # Of the pool that torch keeps for this stream: no earlier work of another one uses it.
        assert isinstance(stream, _CudaStream)
        with stream.chosen():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    @torch.inference_mode(mode=False)
    def view(self, address: int, size: int) -> Any:
        """See :class:`Device`."""
        return torch.as_tensor(_DeviceArray(address, size), device=self._device)


class _CudaStream:
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Do what follows on this stream, and leave the thread's other devices alone.

        A thread begins with device 0. When torch leaves a stream of another device, it chooses
        device 0 again, which takes some hundred MiB of that device's memory. It does not if the
        stream's own device was chosen first.
        """
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            yield

    def run(self, work: Callable[[], None]) -> None:
        with self.chosen():
            work()

    def record(self) -> "_CudaEvent":
        return _CudaEvent(self.stream.record_event())

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, _CudaEvent)
        self.stream.wait_event(event.event)


class _CudaEvent:
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self, timeout_s: float) -> bool:
        return poll(self.event.query, timeout_s)


class _DeviceArray:
    """Device memory at an address, in the interface that torch accepts."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def open_device(name: str) -> Device:
    """The device with this name.

    Raises:
        InvalidArgument: not ``cuda``, ``cuda:N`` or ``cpu:N``.
        DeviceUnavailable: it does not exist.
    """
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or not (number.isdecimal() or name == "cuda"):
        raise InvalidArgument("pool", f"is on {name!r}: not cpu, cuda:N or cpu:N")
    return CudaDevice(name) if kind == "cuda" else HostDevice(name)


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something is done; False on timeout. torch has no wait with a deadline."""
    deadline = monotonic() + timeout_s
    while not done():
        if monotonic() > deadline:
            return False
        sleep(_POLL_S)
    return True


class LockedMemory:
    """The pinned memory of all rings of this process, within what it may lock; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # memory may be freed by a collection in this thread
        self._bytes = 0

    def add(self, size: int) -> None:
        """Count memory that is about to be pinned.

        Raises:
            DeviceUnavailable: together it is more than the process may lock; names the limit.
        """
        most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        with self._lock:
            total = self._bytes + size
            if most == resource.RLIM_INFINITY or total <= most:
                self._bytes = total
                return
        raise DeviceUnavailable(
            f"{total} bytes of pinned memory are more than RLIMIT_MEMLOCK allows ({most}): raise it"
            " (ulimit -l unlimited, LimitMEMLOCK=infinity, docker run --ulimit memlock=-1)",
            "memlock",
        )

    def remove(self, size: int) -> None:
        """Forget memory that is no longer pinned."""
        with self._lock:
            assert self._bytes >= size
            self._bytes -= size


locked: Final = LockedMemory()
"""That of this process."""


def plane_view(device: Device, pool: KVPool, address: int, item: int, kind: Any) -> Any:
    """A plane as a tensor, shape (blocks, items of a block).

    Args:
        device: of the pool.
        pool: the pool.
        address: of the plane.
        item: bytes of an item.
        kind: type of the items.
    """
    size = (pool.block_count - 1) * pool.block_stride_bytes + pool.block_bytes
    flat = device.view(address, size).view(kind)
    shape = pool.block_count, pool.block_bytes // item
    return flat.as_strided(shape, (pool.block_stride_bytes // item, 1))


def item_of(pool: KVPool) -> tuple[int, Any]:
    """Bytes and type of the largest items of which all blocks consist."""
    places = [*pool.planes, pool.block_bytes]
    places += [pool.block_stride_bytes] if pool.block_count > 1 else []
    return next((size, kind) for size, kind in _ITEMS if not any(at % size for at in places))
