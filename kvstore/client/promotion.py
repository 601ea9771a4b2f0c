"""The device slab of one store, and how pages get into it.

A page that was loaded from the node and verified is **promoted**: copied to the slab in the
background, under the lease of that load. The engine does not wait for it; the lease is released
when the copy has ended. Pages with a TTL or read once are not promoted, because the slab would keep
them longer than allowed.
"""

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from kvstore import mover
from kvstore.client.jobs import StoreJob, Worker
from kvstore.config import DeviceSlabConfig
from kvstore.protocol.errors import CapacityError
from kvstore.protocol.page import DIGEST_BYTES, PrefixKeys
from kvstore.state.table.slab import PageSet, Reservation

if TYPE_CHECKING:
    from kvstore.tier.slab import DeviceSlab

PENDING_SHARE: Final = 8
"""Background promotions hold at most this fraction (1/8) of the session's quota, so that their
leases do not make the next load fail."""


class Promotion:
    """The slab, and promotions in progress; thread-safe.

    Attributes:
        slab: the slab.
    """

    def __init__(self, slab: "DeviceSlab") -> None:
        self.slab = slab
        self._worker = Worker("kvstore-promote")
        #: Protects the two fields below.
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._moves: set[mover.Progress] = set()

    @classmethod
    def open(cls, config: DeviceSlabConfig | None) -> "Promotion | None":
        """Create the slab described by ``config``; None = no slab.

        Raises:
            InvalidArgument, TierUnavailable: it cannot be created; the message says why.
        """
        if config is None:
            return None
        try:
            from kvstore.tier.slab import DeviceSlab
        except ImportError as error:
            from kvstore.protocol.errors import TierUnavailable

            raise TierUnavailable(
                f"device_slab needs torch ({error}); pip install '.[torch]' in the clone"
            ) from error
        return cls(DeviceSlab(config.device, config.capacity_bytes))

    def promote(
        self, pages: PageSet, keys: PrefixKeys, sources: mover.Addresses, digests: bytes,
        undo: ExitStack, quota_bytes: int,
    ) -> None:  # fmt: skip
        """Promote verified pages; their lease is kept until they are copied.

        Args:
            pages: the set of pages.
            keys: consecutive keys; some or all pages may be in the slab already.
            sources: addresses in host memory, shape (n,), uint64, n at least ``len(keys)``.
            digests: 16 bytes per page, at least for ``keys``.
            undo: the caller's clean-up; taken over if the copy runs in the background.
            quota_bytes: quota of the session; 0 = unknown.
        """
        try:
            taken = self.slab.reserve(pages, keys, digests[: len(keys) * DIGEST_BYTES])
        except CapacityError:
            return
        size = len(sources) * pages.slot_bytes
        progress = mover.Progress()
        with self._lock:
            later = self._pending_bytes + size <= quota_bytes // PENDING_SHARE
            if later:
                self._pending_bytes += size
            self._moves.add(progress)
        if not later:
            self._fill(taken, keys, sources, progress)
            return
        kept = undo.pop_all()

        def run() -> int:
            with kept:
                try:
                    return self._fill(taken, keys, sources, progress)
                finally:
                    with self._lock:
                        self._pending_bytes -= size

        job = StoreJob(self._worker, run)
        if job.refused:
            job.run()

    def stage(
        self, pages: PageSet, keys: PrefixKeys, sources: mover.Addresses, digests: bytes,
        progress: mover.Progress | None,
    ) -> None:  # fmt: skip
        """Promote as many pages as fit, now; evicts others if necessary."""
        try:
            taken = self.slab.reserve(pages, keys, digests[: len(keys) * DIGEST_BYTES], always=True)
        except CapacityError:
            return  # nothing to add, or the whole slab is in use
        self.slab.fill(taken, keys, sources, progress)

    def stats(self) -> dict[str, Any]:
        """Statistics of the slab, and bytes waiting for promotion."""
        return {**self.slab.stats(), "pending_bytes": self._pending_bytes}

    def close(self) -> None:
        """Cancel promotions in progress, and free the slab's memory."""
        for progress in list(self._moves):  # without the lock, which a fork may have left locked
            progress.cancel()
        self._worker.close()
        self.slab.close()

    def _fill(
        self, taken: Reservation, keys: PrefixKeys, sources: mover.Addresses,
        progress: mover.Progress,
    ) -> int:  # fmt: skip
        try:
            return self.slab.fill(taken, keys, sources, progress)
        finally:
            with self._lock:
                self._moves.discard(progress)
