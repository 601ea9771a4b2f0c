"""Extents as a client process sees them: mapped read-only, and writable only to put.

Mappings do not pass to a forked child (``MADV_DONTFORK``), so a child can neither read nor write a
slot that its parent's session owns.
"""

import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.errors import TierUnavailable
from kvstore.wire import unpack_addresses

log = logging.getLogger(__name__)

#: Mappings inherited through a fork: never unmapped, because their addresses may be re-used.
_inherited: Final[list["Mapping"]] = []


class Observer(Protocol):
    """Whoever must know which of the node's memory is readable in this process."""

    def mapped(self, address: int, size: int) -> None:
        """An extent can be read from now on."""

    def unmapping(self, address: int) -> None:
        """An extent is about to go; it goes when this returns."""


class Mapping:
    """The memory of one boot of a node in this process.

    Args:
        boot: the boot whose memory this is.
        fetch: gives descriptors of extents; the mapping closes them.
    """

    def __init__(self, boot: bytes, fetch: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Map nothing yet."""
        self.boot = boot
        self._fetch = fetch
        self._read: dict[int, npt.NDArray[np.uint8]] = {}
        self._write: dict[int, npt.NDArray[np.uint8]] = {}
        #: Address of each array above: asking numpy takes longer than all the rest of `locate`.
        self._read_starts: dict[int, int] = {}
        self._write_starts: dict[int, int] = {}
        self._memories: list[mmap.mmap] = []
        #: Protects the five above and ``_observer``.
        self._lock = threading.Lock()
        self._populating: list[threading.Thread] = []
        self._closing = False
        self._observer: Observer | None = None

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of every extent that is or will be mapped to be read; cheap if told."""
        if self._observer is observer:
            return
        with self._lock:
            self._observer = observer
            for number, array in self._read.items():
                observer.mapped(self._read_starts[number], len(array))

    def locate(self, addresses: bytes, *, write: bool) -> npt.NDArray[np.uint64]:
        """Where the slots at these :data:`~kvstore.wire.ADDRESS` es are in this process.

        Returns:
            shape (n,), uint64 addresses, valid until :meth:`close`.
        """
        slots = unpack_addresses(addresses)
        starts = self._write_starts if write else self._read_starts
        if not all(number in starts for number, _, _ in slots):
            self._arrays({number for number, _, _ in slots}, write=write)
        return np.array([starts[number] + at for number, _, at in slots], dtype=np.uint64)

    def views(self, addresses: bytes, size: int) -> list[npt.NDArray[np.uint8]]:
        """Read-only arrays of ``size`` bytes over the slots at ``addresses``."""
        slots = unpack_addresses(addresses)
        arrays = self._arrays({number for number, _, _ in slots}, write=False)
        return [arrays[number][offset : offset + size] for number, _, offset in slots]

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, read-only and writable mappings counted apart."""
        return sum(len(memory) for memory in self._memories)

    def close(self) -> None:
        """Unmap. Arrays given out by :meth:`views` must be gone; what they hold stays mapped."""
        self._closing = True
        for thread in self._populating:
            thread.join()
        with self._lock:
            if self._observer is not None:
                for start in self._read_starts.values():
                    self._observer.unmapping(start)
            for known in (self._read, self._write, self._read_starts, self._write_starts):
                known.clear()
            for memory in self._memories:
                try:
                    memory.close()
                except BufferError:
                    continue  # a view of it lives on; the memory goes with the view
            self._memories.clear()

    def abandon(self) -> None:
        """In a forked child: forget everything without unmapping anything."""
        _inherited.append(self)

    def _arrays(self, wanted: set[int], *, write: bool) -> dict[int, npt.NDArray[np.uint8]]:
        known = self._write if write else self._read
        if wanted <= known.keys():
            return known
        starts = self._write_starts if write else self._read_starts
        with self._lock:
            missing = [number for number in wanted if number not in known]
            descriptors = self._fetch(missing)
            try:
                for number, descriptor in zip(missing, descriptors, strict=True):
                    array = self._map(descriptor, write=write)
                    starts[number] = array.ctypes.data  # before `known`: who finds that needs it
                    known[number] = array
                    if self._observer is not None and not write:
                        self._observer.mapped(starts[number], len(array))
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        return known

    def _map(self, descriptor: int, *, write: bool) -> npt.NDArray[np.uint8]:
        size = os.fstat(descriptor).st_size
        access = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
        try:
            memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, access)
        except OSError as error:
            raise TierUnavailable(f"an extent of {size} bytes cannot be mapped: {error}") from error
        memory.madvise(mmap.MADV_DONTFORK)
        array = np.frombuffer(memory, dtype=np.uint8)
        self._memories.append(memory)
        thread = threading.Thread(
            target=self._populate, args=(array.ctypes.data, size, write), daemon=True,
            name="kvstore-populate",
        )  # fmt: skip
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: first copies will be slow, that is all
            log.warning("memory is not pre-faulted: %s", error)
        else:
            self._populating.append(thread)
        return array

    def _populate(self, address: int, size: int, write: bool) -> None:  # noqa: FBT001
        step = 32 << 20
        for start in range(0, size, step):
            if self._closing:
                return
            try:
                mover.populate(address + start, min(step, size - start), write=write)
            except TierUnavailable as error:
                log.warning("memory is not pre-faulted, first copies will be slow: %s", error)
                return
