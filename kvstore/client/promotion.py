"""The device slab of one store: what is loaded from it, and how pages get there.

A page that was loaded from the node, and verified, is **promoted**: copied to the slab under the
lease of that load, in the background. The engine does not wait for it; the lease is given back when
the copy has ended. Pages that leave by themselves (a TTL, read once) are not promoted: the slab
would keep them longer than whoever stored them allowed.
"""

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from kvstore import mover
from kvstore.client.jobs import StoreJob, Worker
from kvstore.config import DeviceSlabConfig
from kvstore.errors import CapacityError
from kvstore.page import DIGEST_BYTES, PrefixKeys
from kvstore.state.table.slab import PageSet, Reservation

if TYPE_CHECKING:
    from kvstore.tier.gpu import DeviceSlab

PENDING_SHARE: Final = 8
"""Promotions in the background hold at most one part in so many of the session's quota: a load must
not be refused because the one before it still has its lease."""


class Promotion:
    """The slab, and the promotions under way; every thread may use it.

    Attributes:
        slab: where pages are promoted to.
    """

    def __init__(self, slab: "DeviceSlab") -> None:
        self.slab = slab
        self._worker = Worker("kvstore-promote")
        #: Protects the two below.
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._moves: set[mover.Progress] = set()

    @classmethod
    def open(cls, config: DeviceSlabConfig | None) -> "Promotion | None":
        """The slab that ``config`` describes; None for none.

        Raises:
            InvalidArgument, TierUnavailable: it cannot be had; says why.
        """
        if config is None:
            return None
        try:
            from kvstore.tier.gpu import DeviceSlab
        except ImportError as error:
            from kvstore.errors import TierUnavailable

            raise TierUnavailable(
                f"device_slab needs torch ({error}); install kvstore[torch]"
            ) from error
        return cls(DeviceSlab(config.device, config.capacity_bytes))

    def promote(
        self, pages: PageSet, keys: PrefixKeys, sources: mover.Addresses, digests: bytes,
        undo: ExitStack, quota_bytes: int,
    ) -> None:  # fmt: skip
        """Promote verified pages; what ``undo`` gives back is kept until they are copied.

        Args:
            pages: whose.
            keys: consecutive, of which the slab may have none, some or all.
            sources: shape (n,), uint64, n at least ``len(keys)``: where they are in host memory.
            digests: 16 bytes a page, of at least so many.
            undo: what the caller would do at its end; taken over if the copy runs later.
            quota_bytes: what the session may hold; 0 = not known.
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
        """Promote pages now, whatever must go for them, as many as there is room for."""
        try:
            taken = self.slab.reserve(pages, keys, digests[: len(keys) * DIGEST_BYTES], always=True)
        except CapacityError:
            return  # none is missing, or all of the slab is in use
        self.slab.fill(taken, keys, sources, progress)

    def stats(self) -> dict[str, Any]:
        """The slab's, and what waits for it."""
        return {**self.slab.stats(), "pending_bytes": self._pending_bytes}

    def close(self) -> None:
        """Give up what is not promoted yet, and give the slab's memory back."""
        for progress in list(self._moves):  # without the lock, which a fork may have left taken
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
