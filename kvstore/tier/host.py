"""L2: host memory as memfd extents that clients map. Nothing but page bytes lies in them.

The bytes of a page are written by the client that puts it and read by the clients that get it; the
node only owns the memory. Extents are pre-faulted in the background: a first touch costs 5 to 40
times a copy.

After a restart, mappings that clients still have of the previous boot's memory keep it alive.
:func:`stale_bytes` finds them, so that the new node can hold back as much of its own.
"""

import errno
import logging
import mmap
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.errors import TierUnavailable

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"/memfd:kvstore:([\w.-]+):([0-9a-f]+):\d+ \(deleted\)$")
_CLOSE_TIMEOUT_S: Final = 30.0
_TOUCH_BYTES: Final = 64 << 20
_IDLE_S: Final = 5.0


class HostMemory:
    """The memory behind the extents of one node.

    Args:
        node: names the node; no other node of this machine has that name.
        boot: this boot's id.
        extent_bytes: bytes of each extent.
        prefault: touch new memory in the background.
    """

    def __init__(self, node: str, boot: bytes, extent_bytes: int, *, prefault: bool) -> None:
        """Own no memory yet; :meth:`create` makes it."""
        self._prefix = f"kvstore:{node}:{boot.hex()}:"
        self._extent_bytes = extent_bytes
        self._descriptors: dict[int, int] = {}
        #: Extents that this process has mapped for its own moves, and where.
        self._mapped: dict[int, tuple[mmap.mmap, int]] = {}
        self._waiting: list[int] = []
        self._populated: set[int] = set()
        #: Protects the three above; never held while memory is touched.
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._closing = False
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(target=self._prefault, name="kvstore-prefault")
            self._thread.start()

    def create(self, numbers: Iterable[int]) -> None:
        """Make the memory of these extents.

        Raises:
            TierUnavailable: the system gives no more memory or descriptors.
        """
        for number in numbers:
            try:
                descriptor = os.memfd_create(f"{self._prefix}{number}", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, self._extent_bytes)
            except OSError as error:
                advice = ""
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    advice = ": raise ulimit -n, or host.extent_bytes (each extent takes one)"
                raise TierUnavailable(f"extent {number}: {error.strerror}{advice}") from error
            with self._lock:
                self._descriptors[number] = descriptor
                self._waiting.append(number)
                self._wake.notify()

    def replace(self, old: int, new: int, in_use: bool = False) -> None:  # noqa: FBT001, FBT002
        """Give the memory of ``old`` back, for whoever still maps it too, and make ``new``.

        Memory that somebody may still read is only let go of: it lasts while it is mapped.
        """
        with self._lock:
            descriptor = self._descriptors.pop(old)
            self._populated.discard(old)
            if old in self._waiting:
                self._waiting.remove(old)
        self._unmap(old)
        # Not truncated: a client that still maps it must read zeros, not die of SIGBUS.
        if not in_use:
            with mmap.mmap(descriptor, self._extent_bytes) as memory:
                memory.madvise(mmap.MADV_REMOVE)
        os.close(descriptor)
        self.create([new])

    def descriptor(self, number: int) -> int | None:
        """The memfd of an extent (owned by this object), or None when there is no such extent."""
        return self._descriptors.get(number)

    def address(self, number: int) -> int:
        """Where an extent is in this process, which maps it now if it did not before.

        Valid until the extent is replaced or :meth:`close`; call it from one thread.

        Raises:
            TierUnavailable: it cannot be mapped.
        """
        known = self._mapped.get(number)
        if known is None:
            try:
                memory = mmap.mmap(self._descriptors[number], self._extent_bytes)
            except OSError as error:
                raise TierUnavailable(f"extent {number} cannot be mapped: {error}") from error
            start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            known = self._mapped[number] = (memory, start)
        return known[1]

    def _unmap(self, number: int) -> None:
        known = self._mapped.pop(number, None)
        if known is not None:
            known[0].close()

    def read(self, number: int, offset: int, into: memoryview) -> int:
        """Copy bytes of an extent; the caller holds a page in it, so that it stays.

        Returns:
            bytes read.

        Raises:
            TierUnavailable: there is no such extent, or it cannot be read.
        """
        descriptor = self._descriptors.get(number)
        if descriptor is None:
            raise TierUnavailable(f"extent {number} does not exist")
        try:
            return os.preadv(descriptor, [into], offset)
        except OSError as error:
            raise TierUnavailable(f"extent {number}: {error}") from error

    def populated_bytes(self) -> int:
        """Bytes that have been pre-faulted."""
        return len(self._populated) * self._extent_bytes

    def close(self) -> None:
        """Stop pre-faulting and close the descriptors; mappings of clients stay theirs."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        for number in list(self._mapped):
            self._unmap(number)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _stopping(self) -> bool:
        return self._closing

    def _prefault(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closing:
                    self._wake.wait(_IDLE_S)
                if self._stopping():
                    return
                number = self._waiting.pop(0)
                descriptor = os.dup(self._descriptors[number])
            try:
                self._touch(descriptor)
            except TierUnavailable as error:
                log.warning("extent %d is not pre-faulted: %s", number, error)
                continue
            finally:
                os.close(descriptor)
            with self._lock:
                if number in self._descriptors and not self._stopping():
                    self._populated.add(number)

    def _touch(self, descriptor: int) -> None:
        with mmap.mmap(descriptor, self._extent_bytes) as memory:
            address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
            for start in range(0, self._extent_bytes, _TOUCH_BYTES):
                if self._stopping():
                    return
                length = min(_TOUCH_BYTES, self._extent_bytes - start)
                mover.populate(address + start, length, write=True)


def stale_bytes(node: str, boot: bytes, proc: Path = Path("/proc")) -> int:
    """Memory of earlier boots of this node that processes still map.

    Args:
        node: the node's name.
        boot: the present boot, whose memory does not count.
        proc: where the process file system is.

    Returns:
        bytes; memory of processes this user may not inspect is not seen.
    """
    sizes: dict[str, int] = {}
    for maps in proc.glob("[0-9]*/maps"):
        try:
            lines = maps.read_text(errors="replace").splitlines()
        except OSError:
            continue  # it ended, or it is another user's
        for line in lines:
            found = _NAME.search(line)
            if found is None or found.group(1) != node or found.group(2) == boot.hex():
                continue
            span, _, offset, _, inode, *_ = line.split()
            start, stop = (int(part, 16) for part in span.split("-"))
            end = int(offset, 16) + stop - start
            sizes[inode] = max(sizes.get(inode, 0), end)
    return sum(sizes.values())
