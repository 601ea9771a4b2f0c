"""Extents as a client process sees them: mapped read-only, and writable only to put.

Mappings do not pass to a forked child (``MADV_DONTFORK``), so a child can neither read nor write a
slot that its parent's session owns. Nothing here touches memory outside of a slot that a move
holds: memory that the node has given back stays given back.

An extent whose number nothing names any more is **gone**: its memory belongs to nobody. It is
unmapped once no move uses it; the node tells which are gone when it is asked for descriptors.
"""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.client import forks
from kvstore.errors import ProtocolError, TierUnavailable, TransferTimeout
from kvstore.tier import kernel
from kvstore.wire import unpack_addresses

FETCH_WAIT_S: Final = 5.0
"""Longest wait for another thread that maps extents."""
_TOUCH_BYTES: Final = 2 << 20

Fetch = Callable[[Sequence[int], Sequence[int], Callable[[int], None]], Sequence[int]]
"""Hands descriptors of extents over, and tells which of those that are known are gone; see
:func:`kvstore.client.endpoint.fetch_extents`."""


class Region:
    """One mapping of an extent. It goes when nothing refers to it, an array over it included.

    It keeps no descriptor, and a forked child, where other memory may be at its address, leaves it
    alone.

    Attributes:
        address: where it begins.
        size: its bytes.
        cold: parts of ``_TOUCH_BYTES`` that nothing has touched here.
    """

    def __init__(self, descriptor: int, *, write: bool) -> None:
        """Map all of it.

        Raises:
            TierUnavailable: there is no room for it in this process.
        """
        self.size = size = os.fstat(descriptor).st_size
        try:
            self.address = address = kernel.map_shared(descriptor, size, write=write)
            weakref.finalize(self, _unmap, address, size, forks.generation()).atexit = False
            kernel.keep_from_children(address, size)
        except OSError as error:
            raise TierUnavailable(f"an extent of {size} bytes cannot be mapped: {error}") from error
        self.cold = set(range(-(-size // _TOUCH_BYTES))) if write else set[int]()
        self.__array_interface__ = {
            "version": 3, "shape": (size,), "typestr": "|u1", "data": (address, not write),
        }  # fmt: skip

    def touch(self, offset: int, size: int) -> None:
        """Make writing to a slot cheap, whoever owns the rest of the part it lies in.

        The kernel maps what is read in sixteens of memory pages, and what is written one by one:
        the first copies would take four times as long.
        """
        for part in range(offset // _TOUCH_BYTES, (offset + size - 1) // _TOUCH_BYTES + 1):
            if part in self.cold:
                self.cold.discard(part)
                start = part * _TOUCH_BYTES
                length = min(_TOUCH_BYTES, self.size - start)
                mover.populate(self.address + start, length, write=False)


def _unmap(address: int, size: int, generation: int) -> None:
    if generation == forks.generation():
        kernel.unmap(address, size)


class Mapping:
    """The memory of one boot of a node in this process.

    Args:
        boot: the boot whose memory this is.
        fetch: gets descriptors of extents.
    """

    def __init__(self, boot: bytes, fetch: Fetch) -> None:
        self.boot = boot
        self._fetch = fetch
        self._read: dict[int, Region] = {}
        self._write: dict[int, Region] = {}
        #: Moves that use each extent.
        self._users: Counter[int] = Counter()
        #: Extents that are gone but used; all and only those that :meth:`_drop` waits for.
        self._gone: set[int] = set()
        #: To be unmapped by :meth:`sweep`.
        self._dropped: list[Region] = []
        self._descriptors: list[int] = []
        self._locks()

    def _locks(self) -> None:
        #: Protects what is mapped and by whom it is used; nobody waits under it.
        self._lock = threading.Lock()
        #: Held by whoever maps extents; taken before ``_lock``.
        self._adding = threading.Lock()

    def use(self) -> "Use":
        """What a move locates here stays mapped until it ends it."""
        return Use(self)

    def known(self) -> list[int]:
        """Extents that are mapped and not known to be gone."""
        with self._lock:
            return [number for number in self._numbers() if number not in self._gone]

    def retire(self, gone: Iterable[int]) -> None:
        """These numbers will never be named again: :meth:`sweep` unmaps what no move uses."""
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
        """Unmap what was dropped; it may take a while, and is never done by a move."""
        with self._lock:
            dropped, self._dropped = self._dropped, []
        dropped.clear()

    def close(self) -> None:
        """Unmap all. No move may go on; arrays over a view that are still held keep its extent."""
        with self._lock:
            self._gone |= self._numbers()
            for number in self._numbers():
                self._drop(number, used=False)
        self.sweep()

    def forked(self) -> None:
        """In a forked child: nothing is mapped here."""
        self._locks()
        while self._descriptors:
            os.close(self._descriptors.pop())

    # ---- inside -----------------------------------------------------------------------------

    def take(self, use: "Use", slots: list[tuple[int, int, int]], *, write: bool) -> list[Region]:
        """The region of each slot, kept for ``use``; see :class:`Use`."""
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
        """As :meth:`take`; None when not all are mapped."""
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
        """Map extents that are not; the caller holds ``_adding``."""
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
    """What one move or view uses of a mapping; it stays mapped until :meth:`end`.

    Attributes:
        extents: numbers of the extents it has located slots in.
    """

    def __init__(self, mapping: Mapping) -> None:
        """Use nothing yet; see :meth:`Mapping.use`."""
        self._mapping = mapping
        self.extents: set[int] = set()

    @property
    def boot(self) -> bytes:
        """See :class:`Mapping`."""
        return self._mapping.boot

    def locate(self, addresses: bytes, size: int, *, write: bool) -> npt.NDArray[np.uint64]:
        """Where the slots of ``size`` bytes at these :data:`~kvstore.wire.ADDRESS` es are.

        Returns:
            shape (n,), uint64 addresses in this process.

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
        """Read-only arrays of ``size`` bytes over the slots at ``addresses``; raises the same."""
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
        """Nothing of it is touched any more."""
        extents, self.extents = self.extents, set()
        self._mapping.leave(extents)


def _no_descriptor(descriptor: int) -> None:
    os.close(descriptor)
