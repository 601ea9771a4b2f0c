"""Extents mapped in a client process: read-only, or writable for puts.

Forked children do not inherit mappings (``MADV_DONTFORK``), so a child can neither read nor write a
slot that its parent's session owns. Only slots held by a move are touched: memory that the node has
freed is not allocated again by this process.

An extent whose number is never used again is **gone**: its memory has no owner. It is unmapped when
no move uses it; the node reports such extents when it is asked for descriptors.
"""

import os
import resource
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.client import forks
from kvstore.mover.memory import keep_from_children, map_shared, unmap
from kvstore.protocol.errors import KVStoreError, ProtocolError, TierUnavailable, TransferTimeout
from kvstore.protocol.wire import unpack_addresses

FETCH_WAIT_S: Final = 5.0
"""Maximum wait for another thread that maps extents."""
_TOUCH_BYTES: Final = 2 << 20
_PREPARED_MAX: Final = 4096
"""Extents that are mapped before they are needed, twice each: Linux allows 65,530 mappings."""
_PREPARED_AT_ONCE: Final = 64
"""Extents whose descriptors are open at a time."""

Fetch = Callable[[Sequence[int], Sequence[int], Callable[[int], None]], Sequence[int]]
"""Gets descriptors of extents, and returns which of the known ones are gone; see
:func:`kvstore.client.endpoint.fetch_extents`."""


class Region:
    """One mapping of an extent; unmapped when nothing refers to it, including arrays over it.

    It keeps no descriptor. A forked child does not unmap it, because other memory may have its
    address there.

    Attributes:
        address: its start address.
        size: size in bytes.
        cold: indexes of parts of ``_TOUCH_BYTES`` that were not touched yet.
    """

    def __init__(self, descriptor: int, *, write: bool) -> None:
        """Map the whole extent.

        Raises:
            TierUnavailable: this process cannot map it.
        """
        self.size = size = os.fstat(descriptor).st_size
        try:
            self.address = address = map_shared(descriptor, size, write=write)
            weakref.finalize(self, _unmap, address, size, forks.generation()).atexit = False
            keep_from_children(address, size)
        except OSError as error:
            raise TierUnavailable(f"an extent of {size} bytes cannot be mapped: {error}") from error
        self.cold = set(range(-(-size // _TOUCH_BYTES))) if write else set[int]()
        self.__array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (address, not write),
        }  # fmt: skip

    def touch(self, offset: int, size: int) -> None:
        """Make the first write to a slot fast; the rest of its part may belong to others.

        The kernel maps pages that are read in groups of sixteen, and pages that are written one by
        one: without this the first copies would take four times as long.
        """
        for part in range(offset // _TOUCH_BYTES, (offset + size - 1) // _TOUCH_BYTES + 1):
            if part in self.cold:
                self.cold.discard(part)
                start = part * _TOUCH_BYTES
                length = min(_TOUCH_BYTES, self.size - start)
                mover.populate(self.address + start, length, write=False)


def _unmap(address: int, size: int, generation: int) -> None:
    if generation == forks.generation():
        unmap(address, size)


class Mapping:
    """The memory of one boot of a node in this process.

    Args:
        boot: id of the boot.
        fetch: gets descriptors of extents.
    """

    def __init__(self, boot: bytes, fetch: Fetch) -> None:
        self.boot = boot
        self._fetch = fetch
        self._read: dict[int, Region] = {}
        self._write: dict[int, Region] = {}
        #: Number of moves that use each extent.
        self._users: Counter[int] = Counter()
        #: Extents that are gone but still used; :meth:`_drop` waits for their users.
        self._gone: set[int] = set()
        #: Mappings for :meth:`sweep` to unmap.
        self._dropped: list[Region] = []
        self._descriptors: list[int] = []
        self._locks()

    def _locks(self) -> None:
        #: Protects the mappings and their users; never held during a wait.
        self._lock = threading.Lock()
        #: Held by the thread that maps extents; taken before ``_lock``.
        self._adding = threading.Lock()

    def use(self) -> "Use":
        """Start a use: extents that it locates stay mapped until it ends."""
        return Use(self)

    def prepare(self, numbers: Sequence[int]) -> None:
        """Map extents now, to read and to write, so that the first puts and loads find them mapped.

        What cannot be mapped now is mapped when it is needed. A process with a limited address
        space (``ulimit -v``) maps no more than it uses.
        """
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            return
        with suppress(KVStoreError), self._adding:
            for first in range(0, min(len(numbers), _PREPARED_MAX), _PREPARED_AT_ONCE):
                for write in (False, True):
                    self._add(set(numbers[first : first + _PREPARED_AT_ONCE]), write=write)

    def known(self) -> list[int]:
        """Extents that are mapped and not known to be gone."""
        with self._lock:
            return [number for number in self._numbers() if number not in self._gone]

    def retire(self, gone: Iterable[int]) -> None:
        """Mark extents as gone; :meth:`sweep` unmaps them when no move uses them."""
        with self._lock:
            for number in set(gone) & self._numbers():
                self._gone.add(number)
                self._drop(number)

    def ask(self) -> None:
        """Ask the node which extents are gone.

        Raises:
            TransferTimeout, PeerUnreachable: no answer.
            KVStoreError: the node refuses.
        """
        known = self.known()
        if known:
            self.retire(self._fetch((), known, _no_descriptor))

    def sweep(self) -> None:
        """Unmap dropped extents; may be slow, so moves never call it."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        dropped.clear()

    def close(self) -> None:
        """Unmap all; no move may be in progress. Arrays of a view keep their extent mapped."""
        with self._lock:
            self._gone |= self._numbers()
            for number in self._numbers():
                self._drop(number, used=False)
        self.sweep()

    def forked(self) -> None:
        """In a forked child: nothing is mapped; close copies of descriptors."""
        self._locks()
        while self._descriptors:
            os.close(self._descriptors.pop())

    # ---- internal ---------------------------------------------------------------------------

    def take(self, use: "Use", slots: list[tuple[int, int, int]], *, write: bool) -> list[Region]:
        """The region of each slot, kept mapped for ``use``; see :class:`Use`."""
        regions = self._held(use, slots, write=write)
        if regions is None:
            if not self._adding.acquire(timeout=FETCH_WAIT_S):
                raise TransferTimeout("other extents took too long to map")
            try:
                self._add({number for number, _, _ in slots}, write=write)
                regions = self._held(use, slots, write=write)
            finally:
                self._adding.release()
        if regions is None:
            raise ProtocolError("an extent was gone before it could be used")
        return regions

    def leave(self, numbers: set[int]) -> None:
        """A use of these extents has ended."""
        with self._lock:
            for number in numbers:
                self._users[number] -= 1
                if not self._users[number]:
                    del self._users[number]
                    if number in self._gone:
                        self._drop(number)

    def _numbers(self) -> set[int]:
        return self._read.keys() | self._write.keys()

    def _held(
        self, use: "Use", slots: list[tuple[int, int, int]], *, write: bool
    ) -> list[Region] | None:
        """Like :meth:`take`; None if an extent is not mapped."""
        known = self._write if write else self._read
        with self._lock:
            try:
                regions = [known[number] for number, _, _ in slots]
            except KeyError:
                return None
            for number in {number for number, _, _ in slots} - use.extents:
                use.extents.add(number)
                self._users[number] += 1
        return regions

    def _add(self, wanted: set[int], *, write: bool) -> None:
        """Map missing extents; the caller holds ``_adding``."""
        known = self._write if write else self._read
        missing = sorted(wanted - known.keys())
        try:
            gone = self._fetch(missing, self.known(), self._descriptors.append)
            for number, descriptor in zip(missing, self._descriptors, strict=True):
                region = Region(descriptor, write=write)
                with self._lock:
                    known[number] = region
        finally:
            while self._descriptors:
                os.close(self._descriptors.pop())
        self.retire(gone)

    def _drop(self, number: int, *, used: bool | None = None) -> None:
        """Unmap an extent that is gone, unless a move uses it; the caller holds ``_lock``."""
        if number in self._users if used is None else used:
            return
        self._gone.discard(number)
        for known in (self._read, self._write):
            region = known.pop(number, None)
            if region is not None:
                self._dropped.append(region)


class Use:
    """A move's or view's use of a mapping; its extents stay mapped until :meth:`end`.

    :meth:`Mapping.use` makes it.

    Attributes:
        extents: numbers of the extents that it uses.
    """

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self.extents: set[int] = set()

    @property
    def boot(self) -> bytes:
        """See :class:`Mapping`."""
        return self._mapping.boot

    def locate(self, addresses: bytes, size: int, *, write: bool) -> npt.NDArray[np.uint64]:
        """Addresses of slots of ``size`` bytes at :data:`~kvstore.protocol.wire.ADDRESS` values.

        Returns:
            Addresses in this process, shape (n,), uint64.

        Raises:
            ProtocolError: a slot is not within its extent.
            KVStoreError: an extent cannot be mapped.
        """
        places = self._places(addresses, size, write=write)
        if write:
            for region, offset in places:
                if region.cold:
                    region.touch(offset, size)
        return np.array([region.address + offset for region, offset in places], dtype=np.uint64)

    def views(self, addresses: bytes, size: int) -> list[npt.NDArray[np.uint8]]:
        """Read-only arrays of ``size`` bytes over the slots; raises the same as :meth:`locate`."""
        places = self._places(addresses, size, write=False)
        arrays = {region: np.asarray(region) for region in {region for region, _ in places}}
        return [arrays[region][offset : offset + size] for region, offset in places]

    def _places(self, addresses: bytes, size: int, *, write: bool) -> list[tuple[Region, int]]:
        slots = unpack_addresses(addresses)
        regions = self._mapping.take(self, slots, write=write)
        for region, (number, _, offset) in zip(regions, slots, strict=True):
            if offset + size > region.size:
                raise ProtocolError(f"{size} bytes at {offset} are not within extent {number}")
        return [(region, offset) for region, (_, _, offset) in zip(regions, slots, strict=True)]

    def end(self) -> None:
        """End the use; its addresses and arrays must not be used any more."""
        extents, self.extents = self.extents, set()
        self._mapping.leave(extents)


def _no_descriptor(descriptor: int) -> None:
    os.close(descriptor)
