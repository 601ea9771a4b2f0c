"""L2: host memory as memfd extents that clients map. They contain nothing but page bytes.

The client that puts a page writes its bytes, and the clients that get it read them; the node only
owns the memory. Extents are pre-faulted in the background: a first touch takes 5 to 40 times as
long as a copy.

A client gets the descriptor of an extent and can do with it what the kernel allows. The files are
sealed: no process can shrink one (processes that access the missing part would end with SIGBUS),
grow one, or add a seal that would keep the node from freeing memory.
"""

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from kvstore import mover
from kvstore.mover.memory import give_back, keep_from_children, map_shared, unmap
from kvstore.protocol.errors import TierUnavailable
from kvstore.state.tree.slots import Replacement
from kvstore.tier import kernel
from kvstore.tier.stale import MemoryRecord, inode_of

log = logging.getLogger(__name__)

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
RETRY_S: Final = 0.1
"""Seconds between two attempts to create memory."""
MEMORY_WAIT_S: Final = 0.8
"""How long a client's request waits for memory that is being replaced; a client waits a second."""
_CLOSE_TIMEOUT_S: Final = 5.0
_TOUCH_BYTES: Final = 64 << 20
_IDLE_S: Final = 5.0


@dataclass(slots=True)
class _Exchange:
    """The replacement of one extent's memory.

    Attributes:
        number: number of the new extent.
        descriptor: of the old memory; None = it was freed.
        mapped: address of the old memory in this process; 0 = not mapped.
        in_use: a client may still read the old memory.
        thread: carries out the replacement.
        error: why the last attempt failed.
        done: the new memory exists.
    """

    number: int
    descriptor: int | None
    mapped: int
    in_use: bool
    thread: threading.Thread | None = None
    error: str = ""
    done: bool = False


class HostMemory:
    """The memory behind the extents of one node; there is none before :meth:`create`.

    Args:
        node: the node's name, unique on this machine.
        boot: id of this boot.
        extent_bytes: bytes of each extent.
        prefault: touch new memory in the background.
        record: records all memory that is created, for a restart; None = no record.

    Attributes:
        failures: how often memory could not be replaced; each was retried.
        leaving: called with the number of an extent before its memory is removed.
    """

    def __init__(
        self, node: str, boot: bytes, extent_bytes: int, *, prefault: bool,
        record: MemoryRecord | None = None,
    ) -> None:  # fmt: skip
        self.failures = 0
        self.leaving: Callable[[int], None] = lambda _number: None
        self._prefix = f"kvstore:{node}:{boot.hex()}:"
        self._extent_bytes = extent_bytes
        self._record = record
        self._descriptors: dict[int, int] = {}
        #: Number of each extent that this process has mapped for its own copies → its address.
        self._mapped: dict[int, int] = {}
        #: Number of each extent that has no memory yet → its replacement in progress.
        self._exchanges: dict[int, _Exchange] = {}
        self._retry_s = 0.0
        self._failing = False
        self._waiting: list[int] = []
        self._populated: set[int] = set()
        #: The extent that is being touched, and whether its memory was freed meanwhile.
        self._touching, self._in_vain = -1, False
        #: Protects the descriptors, the numbers of exchanges, and the four fields above; never held
        #: while memory is touched.
        self._lock = threading.Lock()
        self._made = threading.Condition(self._lock)
        self._wake = threading.Condition(self._lock)
        self._closing = False
        self._thread: threading.Thread | None = None
        if prefault:
            self.start_prefault()

    def start_prefault(self) -> None:
        """Touch all memory in the background from now on; until then it can be mapped faster."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._prefault, name="kvstore-prefault", daemon=True)
        self._thread.start()

    def create(self, numbers: Iterable[int]) -> None:
        """Create the memory of these extents.

        Raises:
            TierUnavailable: no more memory or descriptors; the extents before it exist.
        """
        made: list[tuple[int, int]] = []
        try:
            for number in numbers:
                try:
                    made.append((number, self._new(number)))
                except OSError as error:
                    raise TierUnavailable(f"extent {number}: {_advised(error)}") from error
        finally:
            self._note([descriptor for _, descriptor in made])
            with self._lock:
                for number, descriptor in made:
                    self._take_in(number, descriptor)

    def replace(self, replaced: list[Replacement]) -> None:
        """Start to replace memory, and continue earlier replacements; call it often.

        Memory that no client may read any more is freed, even if one still maps it. Memory that a
        client may still read is only closed: it exists while it is mapped. Old memory is freed
        before new memory is created, so a replacement needs neither more memory nor more
        descriptors. Both run in a thread: freeing takes half a second per GB, and any process with
        a descriptor can delay it without limit. Until the new memory exists, its number is
        :meth:`pending`; a failure is retried.

        Args:
            replaced: the replacements; the list is emptied.
        """
        while replaced:
            old, new, in_use = replaced.pop(0)
            self.leaving(old)
            self._begin(self._taken_out(old, new, in_use=in_use))
        if self._exchanges:
            self._go_on()

    def pending(self, number: int) -> bool:
        """Whether an extent is waiting for its memory."""
        return number in self._exchanges and number not in self._descriptors

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait for the memory of an extent; returns False on timeout."""
        with self._made:
            return self._made.wait_for(lambda: number in self._descriptors, timeout_s)

    def descriptor(self, number: int) -> int | None:
        """The memfd of an extent (owned by this object), or None if it has no memory."""
        return self._descriptors.get(number)

    def address(self, number: int) -> int:
        """The address of an extent in this process; maps it if necessary.

        Valid until the extent is replaced, or :meth:`close`; call it from one thread.

        Raises:
            TierUnavailable: it has no memory now, or mapping fails.
        """
        known = self._mapped.get(number)
        if known is None:
            descriptor = self._descriptors.get(number)
            if descriptor is None:
                raise TierUnavailable(f"extent {number} has no memory now")
            known = self._mapped[number] = self._map(number, descriptor)
        return known

    def read(self, number: int, offset: int, into: memoryview) -> int:
        """Copy bytes of an extent; the caller must hold a page in it, so that it stays.

        Returns:
            Bytes read.

        Raises:
            TierUnavailable: the extent does not exist, or cannot be read.
        """
        assert 0 <= offset <= self._extent_bytes - len(into)
        descriptor = self._descriptors.get(number)
        if descriptor is None:
            raise TierUnavailable(f"extent {number} does not exist")
        try:
            return os.preadv(descriptor, [into], offset)
        except OSError as error:
            raise TierUnavailable(f"extent {number}: {error}") from error

    def populated_bytes(self) -> int:
        """Pre-faulted bytes."""
        return len(self._populated) * self._extent_bytes

    def missing_bytes(self) -> int:
        """Bytes of extents that are :meth:`pending`."""
        return len(self._exchanges) * self._extent_bytes

    def close(self) -> None:
        """Stop pre-faulting, and close descriptors and the record; clients keep their mappings."""
        with self._lock:
            self._closing = True
            self._wake.notify()
        deadline = monotonic() + _CLOSE_TIMEOUT_S
        threads = [one.thread for one in self._exchanges.values()]
        for thread in [self._thread, *threads]:
            if thread is not None and thread.ident is not None:
                thread.join(max(0.0, deadline - monotonic()))
        for number in list(self._mapped):
            self._unmap(number)
        with self._lock:
            descriptors = list(self._descriptors.values())
            self._descriptors.clear()
        for exchange in self._exchanges.values():
            if exchange.thread is not None and exchange.thread.is_alive():
                log.error("the memory of an extent is still being freed, so it is not closed")
            elif exchange.descriptor is not None:
                descriptors.append(exchange.descriptor)
        self._exchanges.clear()
        for descriptor in descriptors:
            os.close(descriptor)
        if self._record is not None:
            self._record.close()

    def forked(self) -> None:
        """In a forked child: close the parent's descriptors, which would keep its memory alive."""
        leaving = [one.descriptor for one in self._exchanges.values()]
        inherited = [*self._descriptors.values(), *leaving]
        self._descriptors, self._exchanges, self._mapped = {}, {}, {}
        for descriptor in inherited:
            if descriptor is not None:
                os.close(descriptor)

    # ---- creating ---------------------------------------------------------------------------

    def _new(self, number: int) -> int:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create(f"{self._prefix}{number}", flags)
        try:
            os.ftruncate(descriptor, self._extent_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _note(self, made: list[int]) -> None:
        """Record new memory, before any client gets it."""
        if self._record is not None and made:
            self._record.add(map(inode_of, made))

    def _take_in(self, number: int, descriptor: int) -> None:
        """Use new memory; the lock is held."""
        assert number not in self._descriptors, "pages would lose their bytes"
        self._descriptors[number] = descriptor
        self._waiting.append(number)
        self._wake.notify()
        self._made.notify_all()

    # ---- replacing --------------------------------------------------------------------------

    def _taken_out(self, old: int, new: int, *, in_use: bool) -> _Exchange:
        """Remove an extent; returns the replacement of its memory."""
        with self._lock:
            known = self._exchanges.pop(old, None)
            if known is not None and not known.done:  # it never got memory
                known.number = new
                return known
            assert new not in self._descriptors, "a number names one memory"
            descriptor = self._descriptors.pop(old)
            self._populated.discard(old)
            if old in self._waiting:
                self._waiting.remove(old)
            if old == self._touching:
                self._in_vain = not in_use
        if self._record is not None and not in_use:
            self._record.remove(inode_of(descriptor))
        return _Exchange(new, descriptor, self._mapped.pop(old, 0), in_use)

    def _begin(self, exchange: _Exchange) -> None:
        assert self._exchanges.get(exchange.number, exchange) is exchange
        self._exchanges[exchange.number] = exchange
        # If the thread has ended, it may have made the memory since it got its last number.
        if exchange.thread is not None and (exchange.thread.is_alive() or exchange.done):
            return
        exchange.error = ""
        exchange.thread = threading.Thread(
            target=self._carry_out, args=(exchange,), name="kvstore-exchange", daemon=True
        )
        try:
            exchange.thread.start()
        except RuntimeError as error:  # no more threads
            exchange.error = str(error)

    def _carry_out(self, exchange: _Exchange) -> None:
        try:
            if exchange.mapped:
                mapped, exchange.mapped = exchange.mapped, 0
                unmap(mapped, self._extent_bytes)
            if exchange.descriptor is not None:
                if not exchange.in_use:
                    # Not truncated: a client that maps it must read zeros, not end with SIGBUS.
                    kernel.punch(exchange.descriptor, self._extent_bytes)
                old, exchange.descriptor = exchange.descriptor, None
                os.close(old)
            if self._stopping():
                return
            descriptor = self._new(exchange.number)
            self._note([descriptor])
        except OSError as error:
            exchange.error = _advised(error)
            return
        with self._lock:
            if self._closing:
                os.close(descriptor)
                return
            exchange.done = True
            self._take_in(exchange.number, descriptor)

    def _go_on(self) -> None:
        """Remove finished replacements, log failed ones, and retry the first of them."""
        failed: list[_Exchange] = []
        for number, exchange in list(self._exchanges.items()):
            if exchange.done:
                assert number in self._descriptors
                del self._exchanges[number]
            elif exchange.error:
                failed.append(exchange)
        if not failed:
            if self._failing and not self._exchanges:
                self._failing = False
                log.warning("all extents have memory again")
            return
        if monotonic() < self._retry_s:
            return
        self.failures += 1
        self._retry_s = monotonic() + RETRY_S
        if not self._failing:
            self._failing = True
            log.error(
                "%d extents have no memory now (%s): puts to them are refused until"
                " it is available", len(failed), failed[0].error,
            )  # fmt: skip
        self._begin(failed[0])

    # ---- internal ---------------------------------------------------------------------------

    def _map(self, number: int, descriptor: int) -> int:
        try:
            address = map_shared(descriptor, self._extent_bytes)
            try:
                keep_from_children(address, self._extent_bytes)
            except OSError:
                unmap(address, self._extent_bytes)
                raise
        except OSError as error:
            raise TierUnavailable(f"extent {number} cannot be mapped: {error}") from error
        return address

    def _unmap(self, number: int) -> None:
        known = self._mapped.pop(number, None)
        if known is not None:
            unmap(known, self._extent_bytes)

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
                unmap(address, self._extent_bytes)

    def _touch(self, number: int, address: int) -> None:
        """Pre-fault an extent; one that is replaced meanwhile uses no memory afterwards."""
        for start in range(0, self._extent_bytes, _TOUCH_BYTES):
            length = min(_TOUCH_BYTES, self._extent_bytes - start)
            # A client may be writing to it already: only the native mover writes nothing back.
            mover.populate(address + start, length, write=mover.is_native)
            with self._lock:
                there, in_vain = number in self._descriptors, self._in_vain
            if in_vain:
                give_back(address, self._extent_bytes)
            if not there or self._stopping():
                return
        with self._lock:
            if number in self._descriptors:
                self._populated.add(number)


def _advised(error: OSError) -> str:
    advice = ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        advice = ": raise ulimit -n, or host.extent_bytes (each extent uses one)"
    return f"{error.strerror}{advice}"
