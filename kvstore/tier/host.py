"""L2: host memory as memfd extents that clients map. Nothing but page bytes lies in them.

The bytes of a page are written by the client that puts it and read by the clients that get it; the
node only owns the memory. Extents are pre-faulted in the background: a first touch costs 5 to 40
times a copy.

A client gets the descriptor of an extent, so it can do to it what the kernel allows to whoever has
one. The files are sealed: nobody can make one shorter, which would end every process that touches
what is missing, longer, or seal it further, which could keep the node from giving memory back.
"""

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvstore import mover
from kvstore.errors import TierUnavailable
from kvstore.state.slots import Replacement
from kvstore.tier import kernel
from kvstore.tier.stale import Inode, MemoryRecord, inode_of

log = logging.getLogger(__name__)

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RETRY_S: Final = 0.1
"""Between two attempts to make memory that could not be had."""
_CLOSE_TIMEOUT_S: Final = 30.0
_TOUCH_BYTES: Final = 64 << 20
_IDLE_S: Final = 5.0


@dataclass(slots=True)
class _Exchange:
    """Memory that goes and memory that is to come for it.

    Attributes:
        descriptor: of what goes; None: it has gone.
        in_use: somebody may still read what goes.
        number: of the extent that is to have memory.
    """

    descriptor: int | None
    in_use: bool
    number: int


class HostMemory:
    """The memory behind the extents of one node.

    Args:
        node: names the node; no other node of this machine has that name.
        boot: this boot's id.
        extent_bytes: bytes of each extent.
        prefault: touch new memory in the background.
        record: is told of all memory that is made; None: nobody asks after a restart.

    Attributes:
        failures: how often memory could not be exchanged; it is tried again.
    """

    def __init__(
        self, node: str, boot: bytes, extent_bytes: int, *, prefault: bool,
        record: MemoryRecord | None = None,
    ) -> None:  # fmt: skip
        """Own no memory yet; :meth:`create` makes it."""
        self.failures = 0
        self._prefix = f"kvstore:{node}:{boot.hex()}:"
        self._extent_bytes = extent_bytes
        self._record = record
        self._descriptors: dict[int, int] = {}
        self._inodes: dict[int, Inode] = {}
        #: Extents that this process has mapped for its own moves, and where.
        self._mapped: dict[int, int] = {}
        #: Extents whose memory could not be exchanged yet, in order.
        self._unfinished: list[_Exchange] = []
        self._retry_s = 0.0
        self._waiting: list[int] = []
        self._populated: set[int] = set()
        #: The extent that is being touched, and whether its memory was given back meanwhile.
        self._touching, self._in_vain = -1, False
        #: Protects the descriptors and the four above; never held while memory is touched.
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._closing = False
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(
                target=self._prefault, name="kvstore-prefault", daemon=True
            )
            self._thread.start()

    def create(self, numbers: Iterable[int]) -> None:
        """Make the memory of these extents.

        Raises:
            TierUnavailable: the system gives no more memory or descriptors; those before are made.
        """
        made: list[Inode] = []
        try:
            for number in numbers:
                try:
                    made.append(self._create(number))
                except OSError as error:
                    advice = ""
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        advice = ": raise ulimit -n, or host.extent_bytes (each extent takes one)"
                    raise TierUnavailable(f"extent {number}: {error.strerror}{advice}") from error
        finally:
            if self._record is not None and made:
                self._record.add(made)

    def replace(self, replaced: list[Replacement]) -> None:
        """Exchange memory: what nobody may look at any more goes, also for whoever still maps it.

        Memory that somebody may still read is only let go of: it lasts while it is mapped.

        Old memory goes before new memory is made, so this takes neither more memory nor more
        descriptors. What cannot be done now is tried again by later calls, with and without
        anything new; until then there is no memory for the new number.

        Args:
            replaced: emptied.
        """
        if not replaced and not (self._unfinished and monotonic() >= self._retry_s):
            return
        before = len(self._unfinished)
        while replaced:
            old, new, in_use = replaced.pop(0)
            self._unfinished.append(self._exchange(old, new, in_use=in_use))
        why = ""
        for exchange in self._unfinished[:]:
            try:
                self._finish(exchange)
            except (OSError, TierUnavailable) as error:
                self.failures += 1
                why = why or str(error)
            else:
                self._unfinished.remove(exchange)
        self._retry_s = monotonic() + RETRY_S
        if len(self._unfinished) > before:
            log.error(
                "%d extents have no memory for the moment (%s): what is put there is refused until"
                " it can be had", len(self._unfinished), why,
            )  # fmt: skip
        elif before and not self._unfinished:
            log.warning("every extent has its memory again")

    def descriptor(self, number: int) -> int | None:
        """The memfd of an extent (owned by this object), or None when there is no such memory."""
        return self._descriptors.get(number)

    def address(self, number: int) -> int:
        """Where an extent is in this process, which maps it now if it did not before.

        Valid until the extent is replaced or :meth:`close`; call it from one thread.

        Raises:
            TierUnavailable: it has no memory now, or cannot be mapped.
        """
        known = self._mapped.get(number)
        if known is None:
            descriptor = self._descriptors.get(number)
            if descriptor is None:
                raise TierUnavailable(f"extent {number} has no memory now")
            known = self._mapped[number] = self._map(number, descriptor)
        return known

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

    def missing_bytes(self) -> int:
        """Bytes of extents that have no memory for the moment; see :meth:`replace`."""
        return len(self._unfinished) * self._extent_bytes

    def close(self) -> None:
        """Stop pre-faulting and close descriptors and record; mappings of clients stay theirs."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
        for number in list(self._mapped):
            self._unmap(number)
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        for exchange in self._unfinished:
            if exchange.descriptor is not None:
                os.close(exchange.descriptor)
        self._descriptors.clear()
        self._unfinished.clear()
        if self._record is not None:
            self._record.close()

    # ---- inside -----------------------------------------------------------------------------

    def _create(self, number: int) -> Inode:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(f"{self._prefix}{number}", flags)
        try:
            os.ftruncate(descriptor, self._extent_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            inode = self._inodes[number] = inode_of(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        with self._lock:
            self._descriptors[number] = descriptor
            self._waiting.append(number)
            self._wake.notify()
        return inode

    def _exchange(self, old: int, new: int, *, in_use: bool) -> _Exchange:
        """Take an extent out."""
        for unfinished in self._unfinished:
            if unfinished.number == old:  # it never came to be
                self._unfinished.remove(unfinished)
                return _Exchange(unfinished.descriptor, unfinished.in_use, new)
        with self._lock:
            descriptor = self._descriptors.pop(old)
            self._populated.discard(old)
            if old in self._waiting:
                self._waiting.remove(old)
            if old == self._touching:
                self._in_vain = not in_use
        self._unmap(old)
        inode = self._inodes.pop(old)
        if self._record is not None and not in_use:
            self._record.remove(inode)
        return _Exchange(descriptor, in_use, new)

    def _finish(self, exchange: _Exchange) -> None:
        """Give the old memory back, then make the new."""
        if exchange.descriptor is not None:
            if not exchange.in_use:
                # Not truncated: a client that still maps it must read zeros, not die of SIGBUS.
                kernel.punch(exchange.descriptor, self._extent_bytes)
            old, exchange.descriptor = exchange.descriptor, None
            os.close(old)
        self.create([exchange.number])

    def _map(self, number: int, descriptor: int) -> int:
        try:
            return kernel.map_shared(descriptor, self._extent_bytes)
        except OSError as error:
            raise TierUnavailable(f"extent {number} cannot be mapped: {error}") from error

    def _unmap(self, number: int) -> None:
        known = self._mapped.pop(number, None)
        if known is not None:
            kernel.unmap(known, self._extent_bytes)

    def _stopping(self) -> bool:
        return self._closing

    def _prefault(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._closing:
                    self._wake.wait(_IDLE_S)
                if self._stopping():
                    return
                self._touching = number = self._waiting.pop(0)
                self._in_vain = False
                try:
                    address = self._map(number, self._descriptors[number])
                except TierUnavailable as error:
                    log.warning("extent %d is not pre-faulted: %s", number, error)
                    continue
            try:
                self._touch(number, address)
            except (TierUnavailable, OSError) as error:
                log.warning("extent %d is not pre-faulted: %s", number, error)
            finally:
                kernel.unmap(address, self._extent_bytes)

    def _touch(self, number: int, address: int) -> None:
        """Fault an extent in; what is replaced meanwhile takes no memory afterwards."""
        for start in range(0, self._extent_bytes, _TOUCH_BYTES):
            length = min(_TOUCH_BYTES, self._extent_bytes - start)
            mover.populate(address + start, length, write=True)
            with self._lock:
                there, in_vain = number in self._descriptors, self._in_vain
            if in_vain:
                kernel.give_back(address, self._extent_bytes)
            if not there or self._stopping():
                return
        with self._lock:
            if number in self._descriptors:
                self._populated.add(number)
