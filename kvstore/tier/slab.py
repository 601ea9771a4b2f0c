"""L1: whole pages in device memory, for the engine in this process only.

One allocation on ``cuda:N``, or in host memory (``cpu``) without a GPU.
:class:`~kvstore.state.table.slab.SlabIndex` decides which page is in which slot; this module copies
and verifies bytes:

* A page becomes READY only if its bytes match its digest. The node's memory is shared: a device
  that copied from it directly would read it again after it was digested. So pages go through the
  private ring of a :class:`~kvstore.tier.lane.Lane`, and are verified on their way into it.
* A load from a slab in host memory digests each page again during the copy, which takes no extra
  time. Device memory is not read back for a digest: it was verified when it was written, no other
  process can write to it, and it has ECC.

It imports torch, as three other modules of ``kvstore`` do: :mod:`kvstore.tier.gpu`,
:mod:`kvstore.tier.push_memory`, and :mod:`kvstore.testing.device`. All are imported only when
memory on a device is asked for.
"""

import logging
import os
import threading
import weakref
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore import mover
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import (
    CapacityError,
    DeviceUnavailable,
    InvalidArgument,
    TierUnavailable,
)
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKeys, page_seeds
from kvstore.state.table.slab import Held, PageSet, Reservation, SlabIndex
from kvstore.state.tree.slots import SLOT_ALIGNMENT
from kvstore.tier.gpu import HostDevice, item_of, open_device, plane_view
from kvstore.tier.lane import Device, DeviceCopy, DeviceEvent, Lane, PagesInHost

log = logging.getLogger(__name__)

EXTENT_BYTES: Final = 64 << 20
EXTENTS_MIN: Final = 8
EXTENTS_MAX: Final = 64
"""Slots of two sizes share a slab by extents, so a small slab also needs several; larger extents
allow larger pages."""
STAGE_BYTES: Final = 64 << 20
"""Maximum bytes gathered at a time on a device before they are copied to an engine's blocks."""
_slabs: "weakref.WeakSet[DeviceSlab]" = weakref.WeakSet()
_in_use: Final[list[torch.Tensor]] = []
"""Memory of slabs whose device has failed or is late: it may be in use, so it is never freed."""


class DeviceSlab:
    """The slab of one client; thread-safe.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        capacity_bytes: size of the allocation; rounded down to whole extents.
        mapped: copy as for host memory; None = only on ``cpu``. Tests pass False to run the device
            code on ``cpu``.
        streams: the device whose streams it uses; None = ``device``. Tests pass one that is late.

    Attributes:
        device: ``cpu`` or ``cuda:N``.

    Raises:
        InvalidArgument: unknown kind of device, or capacity of less than a slot.
        TierUnavailable: the device does not exist, or has not enough free memory.
    """

    @torch.inference_mode(mode=False)
    def __init__(
        self, device: str, capacity_bytes: int, *, mapped: bool | None = None,
        streams: Device | None = None,
    ) -> None:  # fmt: skip
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
        on_host = chosen.type == "cpu"
        self._mapped = on_host if mapped is None else mapped
        self._device = streams or (HostDevice("cpu") if on_host else open_device(self.device))
        self._way_in, self._way_out = Lane(self._device), Lane(self._device)
        for lane in (self._way_in, self._way_out):
            # Queued work may still use what this memory was before.
            lane.stream.wait(self._device.current().record())
        self._index = SlabIndex(self._extent_bytes, count)
        self._errors = 0
        self._broken = ""
        self._too_large = 0
        self._users = 0
        self._open = True
        #: Protects the index and the fields above; notified when a user has finished.
        self._changed = threading.Condition()
        _slabs.add(self)

    @property
    def mapped(self) -> bool:
        """Whether loads to host memory can be served from this slab."""
        return self._mapped

    # ---- content ----------------------------------------------------------------------------

    def serves(self, pool: KVPool, pages: PageSet) -> bool:
        """Whether these pages can be copied from here directly to the pool.

        The pool is on this device, the slab works, and a page fits its extents.
        """
        return pool.device == self.device and self._usable and self._fits(pages)

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
            fits = self._fits(pages)
            taken = self._index.reserve(pages, keys, digests, always=always) if fits else None
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
                pages = PagesInHost(sources[part], size, digests, seeds)
                good = self._bring(pages, self._offsets(taken.slots).tolist(), progress)
        except DeviceUnavailable as error:
            self._failed(error)
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
        self, pages: PageSet, keys: PrefixKeys, pool: KVPool, table: npt.NDArray[np.int64],
        after: DeviceEvent, copy: DeviceCopy,
    ) -> int:  # fmt: skip
        """Copy the leading run to blocks on the device; returns the number of pages.

        It does not raise. If the device fails, no page counts, and the blocks may be written until
        ``copy`` is idle.

        Args:
            pages: the set of pages; :meth:`serves` them.
            keys: consecutive keys.
            pool: a pool on this slab's device.
            table: the blocks of each page, shape (pages, blocks of a page).
            after: the blocks are not written before the device has reached this event.
            copy: told about the work, and that all layers come together.
        """
        assert pool.device == self.device
        held = self._pin(pages, keys)
        try:
            if held.slots:
                with self._way_out.turn(copy):
                    self._copy_out(held, pages.page_bytes, pool, table, after)
                    end = self._way_out.stream.record()
                    self._way_out.reached(end)
                copy.note_layers([end])
            return len(held.slots)
        except DeviceUnavailable as error:
            self._failed(error)
            return 0
        finally:
            self._unpin(held)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no copy is in progress; returns False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._users, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Serve nothing more, wait for copies in progress, and free the memory."""
        with self._changed:
            self._open = False
        if self.drain(timeout_s):
            idle = [lane.close() for lane in (self._way_in, self._way_out)]
            if not all(idle):
                _in_use.append(self._memory)
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

    def _fits(self, pages: PageSet) -> bool:
        """Whether a page fits an extent; warns the first time that one does not."""
        if pages.slot_bytes <= self._extent_bytes:
            return True
        if not self._too_large:
            self._too_large = pages.slot_bytes
            log.warning(
                "pages of %d bytes do not fit the slab's extents of %d: no page is promoted;"
                " device_slab.capacity_bytes must be %d or more",
                pages.page_bytes, self._extent_bytes, pages.slot_bytes * EXTENTS_MIN,
            )  # fmt: skip
        return False

    def _failed(self, error: DeviceUnavailable) -> None:
        """Note a failed copy; unless only memory is missing, it may go on: the slab ends."""
        with self._changed:
            self._errors += 1
            if self._broken:
                return
            if error.cause in {"memory", "memlock"}:
                log.warning("the slab on %s cannot be used now: %s", self.device, error)
                return
            self._broken = f"broken ({error})"
            _in_use.append(self._memory)
        log.error("the slab on %s is disabled, pages come from the node: %s", self.device, error)

    def _offsets(self, slots: list[Any]) -> npt.NDArray[np.int64]:
        places = (self._index.slots.address(slot) for slot in slots)
        offsets = (number * self._extent_bytes + offset for number, _, offset in places)
        return np.fromiter(offsets, dtype=np.int64, count=len(slots)) + self._start

    def _addresses(self, slots: list[Any]) -> mover.Addresses:
        return self._offsets(slots).astype(np.uint64) + np.uint64(self._memory.data_ptr())

    def _bring(self, pages: PagesInHost, starts: list[int], progress: mover.Progress | None) -> int:
        """Copy pages to these offsets, up to the first that fails verification.

        Raises:
            DeviceUnavailable: the device fails or does not finish.
        """
        lane, size = self._way_in, pages.size
        targets = [self._memory[start : start + size] for start in starts]
        assert len(targets) == len(pages.sources)

        def deliver(first: int, count: int, memory: Any) -> None:
            for at, target in enumerate(targets[first : first + count]):
                target.copy_(memory[at * size : (at + 1) * size], non_blocking=True)

        with lane.turn(DeviceCopy()):
            good = lane.bring(pages, deliver, progress)
            lane.reached(lane.stream.record())
        return good

    def _copy_out(
        self, held: Held, size: int, pool: KVPool, table: npt.NDArray[np.int64], after: DeviceEvent
    ) -> None:
        """Queue copies of some pages at a time to each plane."""
        item, kind = item_of(pool)
        planes = [plane_view(self._device, pool, at, item, kind) for at in pool.planes]
        offsets, at_once = self._offsets(held.slots).tolist(), max(1, STAGE_BYTES // size)
        self._way_out.stream.wait(after)
        for start in range(0, len(offsets), at_once):
            part = offsets[start : start + at_once]
            blocks = table[start : start + len(part)]
            rows = [self._memory[at : at + size] for at in part]
            self._way_out.stream.run(partial(_spread, rows, planes, blocks))

    def forked(self) -> None:
        """In a forked child: the parent owns the memory; everything is a miss."""
        self._changed = threading.Condition()
        self._users = 0
        self._open = False


def _spread(pages: list[Any], planes: list[Any], table: npt.NDArray[np.int64]) -> None:
    """Copy pages to their blocks in each plane; run on the stream."""
    staged = torch.stack(pages).view(len(pages), len(planes), table.shape[1], -1)
    # Else torch would wait for the stream, and with it for the engine, without a limit.
    index = torch.from_numpy(np.ascontiguousarray(table.reshape(-1)))
    index = index.to(staged.device, non_blocking=True)
    for number, plane in enumerate(planes):
        blocks = staged[:, number].reshape(len(index), -1)
        plane.index_copy_(0, index, blocks.view(plane.dtype))


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


def _after_fork() -> None:
    for slab in list(_slabs):
        slab.forked()


# A child of a fork has neither the parent's threads nor its CUDA context.
os.register_at_fork(after_in_child=_after_fork)
