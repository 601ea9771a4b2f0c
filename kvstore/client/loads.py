"""Loads pages of one space into an engine's memory: from the slab, then from the node.

Pages at the node are leased first, and brought to its memory if necessary, from its disk or from
other nodes.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count as counted_from
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.client.device import BlocksOnDevice
from kvstore.client.jobs import MustWaitError
from kvstore.client.mapping import Use
from kvstore.client.node_link import NodeLink
from kvstore.client.promotion import Promotion
from kvstore.client.resources import Opened, StoreResources
from kvstore.client.results import PageViews
from kvstore.mover.kvpool import KVPool
from kvstore.protocol import wire
from kvstore.protocol.errors import DeviceUnavailable, KVStoreError
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKeys, page_seeds
from kvstore.state.table.slab import PageSet

log = logging.getLogger(__name__)

LEASE_S: Final = 30.0
DISK_WAIT_S: Final = 2.0
"""How long a load waits for pages from disk or from other nodes, and a put for free slots, at a
time."""

SETTLE_S: Final = 0.1
"""How long a load waits for a slab's last copies before it goes on without the slab."""

names: Final = counted_from(1)
"""Numbers of leases and puts; never repeated in a process."""

VERIFY = True
"""Tests switch it off, to show that without verification wrong bytes would reach an engine."""


@dataclass(slots=True)
class LoadState:
    """The progress of a load, which may continue on another thread.

    Attributes:
        loaded: leading pages that are loaded.
        may_wait: whether the load may wait for a disk or for other nodes; otherwise it raises
            :class:`~kvstore.client.jobs.MustWaitError` where it would.
        waits: it waits for them, or has failed: if it is cancelled now, it writes nothing more.
    """

    loaded: int = 0
    may_wait: bool = True
    waits: bool = False


class _Leased(NamedTuple):
    """A run of pages under a lease, mapped in this process.

    Attributes:
        sources: shape (n,), uint64: addresses of the pages.
        digests: shape (n, 16), uint8: expected digests.
        seeds: shape (n,), uint64: seeds of the digests.
    """

    opened: Opened
    memory: Use
    answer: wire.Acquired
    sources: mover.Addresses
    digests: mover.Digests
    seeds: npt.NDArray[np.uint64]


class Loader:
    """Loads pages of one space.

    Args:
        resources: the store's shared resources: node and slab.
        pages: for each shard of the engine, its pages' name in the slab.
        numbers: returns the numbers of the space on a connection.
    """

    def __init__(
        self, resources: StoreResources, pages: tuple[PageSet, ...],
        numbers: Callable[[NodeLink], Opened],
    ) -> None:  # fmt: skip
        self._resources = resources
        self._pages = pages
        self._numbers = numbers

    def load(
        self, keys: PrefixKeys, target: mover.Pieces, shard: int,
        progress: mover.Progress | None, order: mover.Order, at_once: int, state: LoadState,
    ) -> int:  # fmt: skip
        """Copy and verify the leading run; returns its length in pages.

        Args:
            keys: consecutive keys.
            target: destination in host memory.
            shard: index of the shard.
            progress: progress of the job: its cancellation, and its waits for layers.
            order: page after page, or layer after layer (``segment``).
            at_once: maximum pages leased at a time.
            state: where the load begins, and whether it may wait.

        Raises:
            MustWaitError: it must wait and may not; ``state`` says how far it is.
        """
        loaded = first = state.loaded
        start = perf_counter()
        waits = self._resources.waits
        at_once = max(1, len(keys) if order == "segment" else at_once)
        try:
            if self._resources.promotion is not None and not (loaded or _is_cancelled(progress)):
                loaded, final = self._from_slab(keys, target, shard, progress, order)
                if final:
                    return loaded
                first, start = loaded, perf_counter()
            while loaded < len(keys) and not _is_cancelled(progress):
                stop = min(loaded + at_once, len(keys))
                part = target.pages(loaded, stop)
                state.loaded = loaded
                count = self._from_node(keys[loaded:stop], part, shard, progress, order, state)
                loaded += count
                if loaded < stop:
                    break
        except KVStoreError as error:
            self._resources.note_trouble(error)
        size = (loaded - first) * self._pages[shard].page_bytes
        if self._resources.waits == waits:
            self._note_load(size, perf_counter() - start)
        return loaded

    def device_load(
        self, keys: PrefixKeys, pool: KVPool, table: npt.NDArray[np.int64], shard: int,
        progress: mover.Progress, order: mover.Order, at_once: int, state: LoadState,
    ) -> tuple[BlocksOnDevice | None, Callable[[], int]]:  # fmt: skip
        """Prepare a load to blocks on a device; call the second result in the background.

        It raises :class:`~kvstore.client.jobs.MustWaitError` as :meth:`load` does. If the device
        cannot be used now, it loads nothing.

        Args:
            keys: consecutive keys.
            pool: a pool on a device.
            table: block table of the pages, shape (pages, blocks of a page).
            shard: index of the shard.
            progress: progress of the job, which may be cancelled.
            order: ``segment`` = the engine waits for layers.
            at_once: maximum pages leased at a time.
            state: where the load begins, and whether it may wait.

        Returns:
            The blocks, unless the device cannot be used; and the load, which returns the length of
            the loaded run in pages.
        """
        try:
            there = self._resources.devices.blocks(pool, table)
        except KVStoreError as error:
            self._resources.note_trouble(error)
            return None, lambda: 0
        promotion = self._resources.promotion

        def load() -> int:
            if (
                promotion is not None
                and promotion.slab.serves(pool, self._pages[shard])
                and not self._slab_load(
                    keys, pool, there, shard, promotion, progress, at_once, state
                )
            ):
                return state.loaded
            return self._load_to_device(keys, there, shard, progress, order, at_once, state)

        return there, load

    def _slab_load(
        self, keys: PrefixKeys, pool: KVPool, target: BlocksOnDevice, shard: int,
        promotion: Promotion, progress: mover.Progress, at_once: int, state: LoadState,
    ) -> bool:  # fmt: skip
        """Load through the slab on the pool's device; ``state`` says how far that came.

        Returns:
            Whether the rest can be loaded without the slab: the device does nothing for it any
            more, and the node has not failed.

        Raises:
            MustWaitError: see :meth:`load`.
        """
        slab, pages, count = promotion.slab, self._pages[shard], 1
        try:
            while count and state.loaded < len(keys) and not progress.cancelled:
                stop = min(state.loaded + at_once, len(keys))
                rest, part = keys[state.loaded : stop], target.pages(state.loaded, stop)
                count = slab.load_blocks(pages, rest, pool, part.table, part.after, part.copy)
                count = count or self._through_slab(
                    rest, pool, part, shard, promotion, progress, may_wait=state.may_wait
                )
                state.loaded += count
        except KVStoreError as error:
            self._resources.note_trouble(error)
            return False
        finally:
            progress.before = state.loaded
        if target.copy.wait_idle(SETTLE_S):
            return True
        late = f"{pool.device} has not finished a copy from the slab"
        self._resources.note_trouble(DeviceUnavailable(late, "deadline"))
        return False

    def _load_to_device(
        self, keys: PrefixKeys, target: BlocksOnDevice, shard: int, progress: mover.Progress,
        order: mover.Order, at_once: int, state: LoadState,
    ) -> int:  # fmt: skip
        """Load the leading run to blocks on a device; returns its length in pages."""
        loaded, start, waits = state.loaded, perf_counter(), self._resources.waits
        first = loaded
        try:
            while loaded < len(keys) and not progress.cancelled:
                state.loaded = loaded
                stop = min(loaded + at_once, len(keys))
                part = target.pages(loaded, stop)
                # Layers are complete only with the last pages.
                by_layer = order == "segment" and stop == len(keys)
                loaded += self._to_blocks(
                    keys[loaded:stop], part, shard, progress,
                    by_layer=by_layer, may_wait=state.may_wait,
                )  # fmt: skip
                if loaded < stop:
                    break
        except KVStoreError as error:
            self._resources.note_trouble(error)
        progress.before = loaded
        if self._resources.waits == waits:
            size = (loaded - first) * self._pages[shard].page_bytes
            self._note_load(size, perf_counter() - start)
        return loaded

    def view(self, keys: PrefixKeys, shard: int) -> PageViews:
        """Verified views of the leading run, under a lease."""
        with ExitStack() as undo:
            try:
                leased = self._lease(keys, shard, undo, LoadState())
                size = self._pages[shard].page_bytes
                good = (mover.digest(leased.sources, size, leased.seeds) == leased.digests).all(1)
                count = self._verified(leased, keys, shard, good)
                views = leased.memory.views(leased.answer.addresses, size)[:count]
            except KVStoreError as error:
                self._resources.note_trouble(error)
                return PageViews([], lambda: None)
            return PageViews(views, undo.pop_all().close)

    def warm(self, keys: PrefixKeys, shard: int, then: Callable[[], None]) -> int:
        """Bring a run to memory, call ``then`` while it is pinned; returns the pages in memory.

        Raises:
            KVStoreError: the node is away, or refuses.
        """
        lease = next(names)
        # Within a move, because a closed link would disconnect before the lease is released.
        with self._resources.slow_link() as link, link.moving():
            opened = self._numbers(link)
            try:
                leased = self._ask(opened, keys, shard, lease, link, DISK_WAIT_S)
                then()
            finally:
                link.send_later(wire.Release(lease, read=False), opened.epoch)
        return len(leased.digests) // DIGEST_BYTES

    def seconds(self, size: int, on_disk: int) -> float:
        """Estimated seconds for loading ``size`` bytes, ``on_disk`` of them from disk."""
        return size / self._resources.load_bytes_per_s + on_disk / self._resources.disk_bytes_per_s

    # ---- internal ---------------------------------------------------------------------------

    def _note_load(self, size: int, seconds: float) -> None:
        """Update the load speed after a load from memory (moving average over about ten)."""
        speeds = self._resources
        if size and seconds > 0:
            speeds.load_bytes_per_s += 0.1 * (size / seconds - speeds.load_bytes_per_s)

    def _note_disk(self, size: int, seconds: float) -> None:
        """Update the disk speed after a wait for pages from disk."""
        speeds = self._resources
        if size and seconds > 0:
            speeds.disk_bytes_per_s += 0.1 * (size / seconds - speeds.disk_bytes_per_s)

    def _from_slab(
        self, keys: PrefixKeys, target: mover.Pieces, shard: int,
        progress: mover.Progress | None, order: mover.Order,
    ) -> tuple[int, bool]:  # fmt: skip
        """Load the leading run of the slab; returns its length, and whether the load is over."""
        assert self._resources.promotion is not None
        slab, pages = self._resources.promotion.slab, self._pages[shard]
        run = slab.run(pages, keys.packed)
        if not run:
            return 0, not len(keys)
        # The copy of the last pages reports layers. If the slab copies them, all layers have been
        # reported at its end, so later pages would be reported as loaded too early.
        last = run == len(keys)
        part = target if last else target.pages(0, run)
        loaded = slab.load(pages, keys[:run], part, progress, order if last else "page")
        if last and order == "segment":
            return loaded, True
        if progress is not None:
            progress.before = loaded
        return loaded, loaded == len(keys)

    def _from_node(
        self, keys: PrefixKeys, target: mover.Pieces, shard: int,
        progress: mover.Progress | None, order: mover.Order, state: LoadState,
    ) -> int:  # fmt: skip
        with ExitStack() as undo:
            leased = self._lease(keys, shard, undo, state)
            # First it says that it goes on, and then it looks: RestoreJob.cancel the other way.
            state.waits = False
            count = 0 if _is_cancelled(progress) else len(leased.sources)
            if not count:
                return 0
            target = target if count == len(keys) else target.pages(0, count)
            size = self._pages[shard].page_bytes
            good = mover.scatter(
                leased.sources, size, leased.digests, leased.seeds, target, progress, order
            )
            count = self._verified(leased, keys, shard, good, progress)
            promotion = self._resources.promotion
            kept = min(count, leased.answer.lasting)
            if kept and promotion is not None and promotion.slab.mapped:
                promotion.promote(
                    self._pages[shard], keys[:kept], leased.sources, leased.answer.digests,
                    undo, self._resources.link.quota_bytes,
                )  # fmt: skip
            return count

    def _to_blocks(
        self, keys: PrefixKeys, target: BlocksOnDevice, shard: int, progress: mover.Progress, *,
        by_layer: bool, may_wait: bool,
    ) -> int:  # fmt: skip
        """Load the leading run from the node to blocks on a device; returns its length."""
        from kvstore.tier.lane import PagesInHost

        with ExitStack() as undo:
            leased = self._lease(keys, shard, undo, LoadState(may_wait=may_wait))
            there, size = len(leased.sources), self._pages[shard].page_bytes
            if not there:
                return 0
            pages = PagesInHost(leased.sources, size, leased.digests, leased.seeds)
            count = target.pool.restore(
                pages, target.table[:there], target.after, target.copy, progress, by_layer=by_layer
            )
            if count < there and not progress.cancelled:
                self._quarantine(leased, keys, shard, count)
            return count

    def _through_slab(
        self, keys: PrefixKeys, pool: KVPool, target: BlocksOnDevice, shard: int,
        promotion: Promotion, progress: mover.Progress, *, may_wait: bool,
    ) -> int:  # fmt: skip
        """Load the leading run from the node through the slab to the blocks; returns its length."""
        slab, pages = promotion.slab, self._pages[shard]
        with ExitStack() as undo:
            leased = self._lease(keys, shard, undo, LoadState(may_wait=may_wait))
            there = len(leased.sources)
            promotion.stage(pages, keys[:there], leased.sources, leased.answer.digests, progress)
            count = slab.load_blocks(
                pages, keys[:there], pool, target.table, target.after, target.copy
            )
            # Pages that expire at the node must not stay here either.
            slab.forget(pages, keys[leased.answer.lasting : there].packed)
            if count < there and not progress.cancelled:
                source, seed = leased.sources[count : count + 1], leased.seeds[count : count + 1]
                found = mover.digest(source, pages.page_bytes, seed)
                if VERIFY and not np.array_equal(found[0], leased.digests[count]):
                    self._quarantine(leased, keys, shard, count)
            return count

    def _lease(self, keys: PrefixKeys, shard: int, undo: ExitStack, state: LoadState) -> _Leased:
        """Lease the leading run; ``undo`` releases it."""
        link, lease = self._resources.link, next(names)
        # Open the space before using the memory, so that both belong to the same connection.
        opened = self._numbers(link)
        memory = undo.enter_context(link.moving())
        undo.callback(link.send_later, wire.Release(lease), opened.epoch)
        answer = self.acquire(opened, keys, shard, lease, state)
        digests = np.frombuffer(answer.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        packed = keys.packed[: len(digests) * KEY_BYTES]
        return _Leased(
            opened, memory, answer,
            memory.locate(answer.addresses, self._pages[shard].page_bytes, write=False), digests,
            page_seeds(packed, self._pages[shard].seed),
        )  # fmt: skip

    def acquire(
        self, opened: Opened, keys: PrefixKeys, shard: int, lease: int, state: LoadState
    ) -> wire.Acquired:
        """Lease the run; pages on disk or at other nodes are brought to memory.

        Raises:
            KVStoreError: the node is away, or refuses.
            MustWaitError: pages are to be brought to memory, and the load may not wait.
        """
        link = self._resources.link
        leased = self._ask(opened, keys, shard, lease)
        if not leased.more:
            return leased
        # Otherwise it would count towards the quota twice, and pages that are read once as read.
        link.send(wire.Release(lease, read=False), opened.epoch)
        state.waits = True
        if not state.may_wait:
            raise MustWaitError

        def again() -> None:
            nonlocal leased
            leased = self._ask(opened, keys, shard, lease)

        known, remote, start = len(leased.digests), leased.remote, perf_counter()
        self._resources.waits += 1
        self.warm(keys, shard, again)
        brought = max(0, len(leased.digests) - known) // DIGEST_BYTES
        size = brought * self._pages[shard].page_bytes
        if not remote:  # the time of a wait for other nodes tells nothing of the disk
            self._note_disk(size, perf_counter() - start)
        return leased

    def _ask(
        self, opened: Opened, keys: PrefixKeys, shard: int, lease: int,
        link: NodeLink | None = None, wait_s: float = 0.0,
    ) -> wire.Acquired:  # fmt: skip
        number, lease_ms = opened.shards[shard], int(LEASE_S * 1000)
        wait_ms, link = int(wait_s * 1000), link or self._resources.link
        request = wire.Acquire(
            0, lease, opened.space, number, keys.packed, lease_ms, wait_ms, not keys.parent,
            parent=keys.parent,
        )  # fmt: skip
        leased = link.request(request, self._resources.timeout_s + wait_s, opened.epoch)
        assert isinstance(leased, wire.Acquired)
        return leased

    def _verified(
        self, leased: _Leased, keys: PrefixKeys, shard: int, good: npt.NDArray[np.bool_],
        progress: mover.Progress | None = None,
    ) -> int:  # fmt: skip
        """Length of the verified run; reports the first page that failed, unless cancelled."""
        if bool(good.all()) or not VERIFY:
            return len(good)
        first = int(np.argmin(good))
        if not _is_cancelled(progress):
            self._quarantine(leased, keys, shard, first)
        return first

    def _quarantine(self, leased: _Leased, keys: PrefixKeys, shard: int, index: int) -> None:
        """Report a corrupt page: from now on it is a miss, at the node and in the slab."""
        opened, link = leased.opened, self._resources.link
        slot = np.frombuffer(leased.answer.addresses, dtype=wire.ADDRESS)[index]
        number, generation = opened.shards[shard], int(slot["generation"])
        boot = leased.memory.boot
        link.send(wire.Corrupt(opened.space, number, keys[index], generation, boot), opened.epoch)
        if self._resources.promotion is not None:
            self._resources.promotion.slab.forget(self._pages[shard], keys[index])
        self._resources.troubles["corrupt"] += 1
        log.error(
            "page %s failed its digest: quarantined; it counts as a miss", keys[index].hex()[:16]
        )


def _is_cancelled(progress: mover.Progress | None) -> bool:
    return progress is not None and progress.cancelled
