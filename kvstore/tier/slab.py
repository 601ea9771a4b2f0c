"""L1: whole pages in device memory, for the engine in this process only.

One allocation on ``cuda:N``, or in host memory (``cpu``) without a GPU.
:class:`~kvstore.state.table.slab.SlabIndex` decides which page is in which slot; this module copies
and verifies bytes:

* A page becomes READY only if its bytes match its digest. The node's memory is shared: a device
  that copied from it directly would read it again after it was digested. So pages are verified
  during a copy to private pinned memory, and the device copies from there; of two halves one is
  filled while the device reads the other.
* A load from a slab in host memory digests each page again during the copy, which takes no extra
  time. Device memory is not read back for a digest: it was verified when it was written, no other
  process can write to it, and it has ECC.

It imports torch, as four other modules of ``kvstore`` do: :mod:`kvstore.tier.gpu`,
:mod:`kvstore.tier.push_memory`, :mod:`kvstore.tier.staging`, and :mod:`kvstore.testing.device`. All
are imported only when memory on a device is asked for.
"""

import ctypes
import logging
import os
import threading
import weakref
from contextlib import suppress
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvstore import mover
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import CapacityError, InvalidArgument, TierUnavailable
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKeys, page_seeds
from kvstore.state.table.slab import Held, PageSet, Reservation, SlabIndex
from kvstore.state.tree.slots import SLOT_ALIGNMENT
from kvstore.tier.staging import Pages, WayIn, on_stream

log = logging.getLogger(__name__)

EXTENT_BYTES: Final = 64 << 20
EXTENTS_MIN: Final = 8
EXTENTS_MAX: Final = 64
"""Slots of two sizes share a slab by extents, so a small slab also needs several; larger extents
allow larger pages."""
STAGE_BYTES: Final = 64 << 20
"""Maximum bytes gathered at a time on a device before they are copied to an engine's blocks."""
_slabs: "weakref.WeakSet[DeviceSlab]" = weakref.WeakSet()


class Fence(NamedTuple):
    """A point on the engine's stream: its blocks are not written before the device reaches it."""

    event: Any


class DeviceSlab:
    """The slab of one client; thread-safe.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        capacity_bytes: size of the allocation; rounded down to whole extents.
        mapped: copy as for host memory; None = only on ``cpu``. Tests pass False to run the device
            code on ``cpu``.

    Attributes:
        device: ``cpu`` or ``cuda:N``.

    Raises:
        InvalidArgument: unknown kind of device, or capacity of less than a slot.
        TierUnavailable: the device does not exist, or has not enough free memory.
    """

    @torch.inference_mode(mode=False)
    def __init__(self, device: str, capacity_bytes: int, *, mapped: bool | None = None) -> None:
        if capacity_bytes < SLOT_ALIGNMENT:
            raise InvalidArgument("device_slab", f"{capacity_bytes} bytes hold no page")
        chosen = _device(device)
        extent = max(
            min(EXTENT_BYTES, capacity_bytes // EXTENTS_MIN), capacity_bytes // EXTENTS_MAX,
            SLOT_ALIGNMENT,
        )  # fmt: skip
        self._extent_bytes = extent // SLOT_ALIGNMENT * SLOT_ALIGNMENT
        count = capacity_bytes // self._extent_bytes
        self.device = str(chosen)
        try:
            # Slots begin at multiples of SLOT_ALIGNMENT of the memory, so that copies are aligned.
            size = count * self._extent_bytes + SLOT_ALIGNMENT
            self._memory = torch.empty(size, dtype=torch.uint8, device=chosen)
        except RuntimeError as error:
            raise TierUnavailable(
                f"{capacity_bytes} bytes on {device}: {error}; make device_slab.capacity_bytes"
                " smaller"
            ) from error
        self._start = -self._memory.data_ptr() % SLOT_ALIGNMENT
        self._mapped = chosen.type == "cpu" if mapped is None else mapped
        self._stream = _stream(chosen)
        self._index = SlabIndex(self._extent_bytes, count)
        self._errors = 0
        self._broken = ""
        self._too_large = 0
        self._users = 0
        self._open = True
        self._way_in = WayIn(chosen, self._stream)
        #: Protects the index and the fields above; notified when a user has finished.
        self._changed = threading.Condition()
        _slabs.add(self)

    @property
    def mapped(self) -> bool:
        """Whether loads to host memory can be served from this slab."""
        return self._mapped

    # ---- content ----------------------------------------------------------------------------

    def serves(self, pool: KVPool) -> bool:
        """Whether pages can be copied from here directly to the pool."""
        return pool.device == self.device

    def run(self, pages: PageSet, packed: bytes) -> int:
        """Number of leading keys whose pages are in the slab."""
        with self._changed:
            return self._index.run(pages, packed) if self._usable else 0

    def forget(self, pages: PageSet, packed: bytes) -> int:
        """Remove pages; returns how many were in the slab."""
        with self._changed:
            return self._index.forget(pages, packed)

    def clear(self) -> int:
        """Remove all pages; returns how many."""
        with self._changed:
            return self._index.clear()

    def stats(self) -> dict[str, Any]:
        """Sizes and counts, as plain values."""
        with self._changed:
            stats = self._index.stats()
            return {**stats, "device": self.device, "errors": self._errors, "broken": self._broken}

    def check(self) -> None:
        """Assert every invariant of the index."""
        with self._changed:
            self._index.check()

    # ---- writing ----------------------------------------------------------------------------

    def reserve(
        self, pages: PageSet, keys: PrefixKeys, digests: bytes, *, always: bool = False
    ) -> Reservation:
        """Reserve slots for pages that are not in the slab; call :meth:`fill` afterwards.

        Args:
            pages: the set of pages.
            keys: consecutive keys.
            digests: 16 bytes for each of ``keys``.
            always: also evict others for pages that are read for the first time.

        Raises:
            CapacityError: nothing to add, or no slot can be freed.
        """
        with self._changed:
            if not self._usable:
                raise CapacityError(f"the slab is {self._broken or 'closed'}")
            if pages.slot_bytes > self._extent_bytes and not self._too_large:
                self._too_large = pages.slot_bytes
                log.warning(
                    "pages of %d bytes do not fit the slab's extents of %d: no page is promoted;"
                    " device_slab.capacity_bytes must be %d or more",
                    pages.page_bytes, self._extent_bytes, pages.slot_bytes * EXTENTS_MIN,
                )  # fmt: skip
            taken = self._index.reserve(pages, keys, digests, always=always)
            if taken is None:
                raise CapacityError("no slot of the slab is free, and none may be taken")
            assert len(taken.digests) == len(taken.slots) * DIGEST_BYTES
            self._users += 1
            return taken

    def fill(
        self, taken: Reservation, keys: PrefixKeys, sources: mover.Addresses,
        progress: mover.Progress | None = None,
    ) -> int:  # fmt: skip
        """Copy pages to reserved slots; those before the first that is corrupt become READY.

        Args:
            taken: the result of :meth:`reserve`; released in any case.
            keys: the keys given there.
            sources: addresses of the pages in host memory, shape (len(keys),), uint64.
            progress: for cancellation.

        Returns:
            How many pages became READY.
        """
        count, good = len(taken.slots), 0
        part = slice(taken.first, taken.first + count)
        size, seeds = taken.pages.page_bytes, page_seeds(keys[part].packed, taken.pages.seed)
        digests = np.frombuffer(taken.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        try:
            if self._mapped:
                target = mover.Pieces.contiguous(self._addresses(taken.slots), size)
                ok = mover.scatter(sources[part], size, digests, seeds, target, progress)
                good = count if ok.all() else int(np.argmin(ok))
            else:
                pages = Pages(sources[part], size, digests, seeds)
                starts = self._offsets(taken.slots).tolist()
                targets = [self._memory[start : start + size] for start in starts]
                good = self._way_in.copy(pages, targets, progress)
        except RuntimeError as error:
            self._break(error)
            return 0
        finally:
            with self._changed:
                self._users -= 1
                assert self._users >= 0
                if not self._broken:  # otherwise a copy may be in progress: keep the slots
                    self._index.commit(taken, good)
                self._changed.notify_all()
        return good

    # ---- reading ----------------------------------------------------------------------------

    def load(
        self, pages: PageSet, keys: PrefixKeys, target: mover.Pieces,
        progress: mover.Progress | None = None, order: mover.Order = "page",
    ) -> int:  # fmt: skip
        """Copy the leading run to host memory; returns how many pages are valid.

        A page that fails verification is forgotten and not valid. Copies nothing if the slab is not
        :attr:`mapped`.
        """
        if not self._mapped or not len(keys):
            return 0
        held = self._pin(pages, keys)
        count = len(held.slots)
        try:
            if not count:
                return 0
            ok = mover.scatter(
                self._addresses(held.slots), pages.page_bytes,
                np.frombuffer(held.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
                page_seeds(keys.packed[: count * KEY_BYTES], pages.seed),
                target if count == len(keys) else target.pages(0, count), progress, order,
            )  # fmt: skip
            good = count if ok.all() else int(np.argmin(ok))
            if good < count and not (progress is not None and progress.cancelled):
                log.error(
                    "page %s failed its digest in the slab: copy removed", keys[good].hex()[:16]
                )
                with self._changed:
                    self._errors += 1
                    self._index.forget(pages, keys[good])
            return good
        finally:
            self._unpin(held)

    def load_blocks(
        self, pages: PageSet, keys: PrefixKeys, pool: KVPool, blocks: npt.NDArray[np.int64],
        fence: Fence | None = None,
    ) -> int:  # fmt: skip
        """Copy the leading run to blocks on the device; returns the number of pages.

        Args:
            pages: the set of pages.
            keys: consecutive keys.
            pool: a pool on this slab's device.
            blocks: block numbers, in page order.
            fence: the result of :meth:`fence` when the engine requested the load.
        """
        assert self.serves(pool)
        held = self._pin(pages, keys)
        try:
            if held.slots:
                self._copy_out(held, pages.page_bytes, pool, blocks, fence)
            return len(held.slots)
        except torch.OutOfMemoryError as error:
            self._finish()
            with self._changed:
                self._errors += 1
            log.warning("no memory on %s to scatter pages to blocks: %s", self.device, error)
            return 0
        except RuntimeError as error:
            self._break(error)
            return 0
        finally:
            self._unpin(held)

    def fence(self) -> Fence | None:
        """A fence after all work that the engine has queued so far, for :meth:`load_blocks`."""
        if self._stream is None:
            return None
        return Fence(torch.cuda.current_stream(self._stream.device).record_event())

    def drain(self, timeout_s: float) -> bool:
        """Wait until no copy is in progress; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._users, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Serve nothing more, wait for copies in progress, and free the memory."""
        with self._changed:
            self._open = False
        if self.drain(timeout_s):
            self._way_in.close()
            self._memory = self._memory.new_empty(0)
        else:
            log.error("the slab's memory is not freed: a copy has not ended for %s s", timeout_s)

    # ---- internal ---------------------------------------------------------------------------

    @property
    def _usable(self) -> bool:
        return self._open and not self._broken

    def _pin(self, pages: PageSet, keys: PrefixKeys) -> Held:
        with self._changed:
            held = self._index.pin(pages, keys.packed if self._usable else b"")
            self._users += 1
            return held

    def _unpin(self, held: Held) -> None:
        with self._changed:
            self._users -= 1
            assert self._users >= 0
            if not self._broken:
                self._index.unpin(held)
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        """Stop using the slab after a device error: copies may still be in progress."""
        with suppress(RuntimeError):
            self._finish()  # when we return, the engine may use its blocks again
        with self._changed:
            self._errors += 1
            if self._broken:
                return
            self._broken = f"broken ({error})"
        log.error("the slab on %s is disabled, pages come from the node: %s", self.device, error)

    def _offsets(self, slots: list[Any]) -> npt.NDArray[np.int64]:
        places = (self._index.slots.address(slot) for slot in slots)
        offsets = (number * self._extent_bytes + offset for number, _, offset in places)
        return np.fromiter(offsets, dtype=np.int64, count=len(slots)) + self._start

    def _addresses(self, slots: list[Any]) -> mover.Addresses:
        return self._offsets(slots).astype(np.uint64) + np.uint64(self._memory.data_ptr())

    def _finish(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._stream is not None:
            self._stream.record_event().synchronize()

    def _copy_out(
        self, held: Held, size: int, pool: KVPool, blocks: npt.NDArray[np.int64],
        fence: Fence | None,
    ) -> None:  # fmt: skip
        """Gather some pages at a time, and scatter them to each plane."""
        each = pool.blocks_per_page(size)
        planes = [_plane(pool, address, self._memory.device) for address in pool.planes]
        offsets, at_once = self._offsets(held.slots).tolist(), max(1, STAGE_BYTES // size)
        with on_stream(self._stream):
            if fence is not None and self._stream is not None:
                self._stream.wait_event(fence.event)
            for start in range(0, len(offsets), at_once):
                part = offsets[start : start + at_once]
                staged = torch.stack([self._memory[at : at + size] for at in part])
                staged = staged.view(len(part), len(planes), each, pool.block_bytes)
                chosen = blocks[start * each : (start + len(part)) * each]
                table = torch.from_numpy(np.ascontiguousarray(chosen)).to(self._memory.device)
                for number, plane in enumerate(planes):
                    rows = staged[:, number].reshape(-1, pool.block_bytes)
                    plane.index_copy_(0, table, rows.view(plane.dtype))
            self._finish()

    def forked(self) -> None:
        """In a forked child: the parent owns the memory; everything is a miss."""
        self._changed = threading.Condition()
        self._users = 0
        self._open = False


def _device(name: str) -> torch.device:
    """The device with this name, with an explicit number.

    Raises:
        InvalidArgument: not ``cpu``, ``cuda`` or ``cuda:N``.
        TierUnavailable: it does not exist.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument("device_slab", f"{name!r} is not a device: {error}") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise InvalidArgument("device_slab", f"{name!r} is neither cpu nor cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise TierUnavailable(f"{name}: this process sees {count} CUDA devices; use cpu")
    return torch.device("cuda", device.index or 0)


def _stream(device: torch.device) -> Any:
    """A new stream, after all queued work that may still use the allocated memory."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _host(address: int, size: int) -> torch.Tensor:
    """Host memory as a tensor; the caller keeps it mapped."""
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address)))


class _DeviceArray:
    """Device memory at an address, in the interface that torch accepts."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def _plane(pool: KVPool, address: int, device: torch.device) -> torch.Tensor:
    """A plane of a pool, shape (blocks, items per block); int64 items if aligned, else bytes."""
    size = (pool.block_count - 1) * pool.block_stride_bytes + pool.block_bytes
    if device.type == "cuda":
        flat = torch.as_tensor(_DeviceArray(address, size), device=device)
    else:
        flat = _host(address, size)
    wide = not (address | pool.block_bytes | pool.block_stride_bytes) % 8
    flat, item = (flat.view(torch.int64), 8) if wide else (flat, 1)
    return flat.as_strided(
        (pool.block_count, pool.block_bytes // item), (pool.block_stride_bytes // item, 1)
    )


def _after_fork() -> None:
    for slab in list(_slabs):
        slab.forked()


# A child of a fork has neither the parent's threads nor its CUDA context.
os.register_at_fork(after_in_child=_after_fork)
