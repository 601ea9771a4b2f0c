"""A space as one engine uses it: lookups, puts, gets, and moves between pages and its KV pool."""

import logging
from collections.abc import Sequence
from time import monotonic, perf_counter
from typing import Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvstore import mover, wire
from kvstore.client.buffers import Buffer, addresses, same_length
from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.leases import DISK_WAIT_S, names
from kvstore.client.link import NodeLink
from kvstore.client.loads import Loads
from kvstore.client.mapping import Use
from kvstore.client.resources import Opened, Services
from kvstore.client.results import MISS, Hit, PageViews, PutResult, RestoreResult
from kvstore.errors import CapacityError, InvalidArgument, KVStoreError
from kvstore.mover.kvpool import KVPool
from kvstore.page import (
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    Tokens,
    page_keys,
    page_seeds,
)
from kvstore.state.table.slab import PageSet
from kvstore.state.tree.actions import PageStatus

log = logging.getLogger(__name__)

BATCH_BYTES: Final = 256 << 20
"""Most bytes pinned or reserved by one message: a longer call is cut, so that it blocks less."""
SYNC_WAIT_S: Final = 30.0
"""How long a durable put waits until its pages survive a crash."""


class Keep(NamedTuple):
    """How long pages are to be kept, and where; see :meth:`Space.put`."""

    ttl_s: float = 0.0
    read_once: bool = False
    memory_only: bool = False


class Space:
    """The pages of one space, as the shards of one engine.

    Attributes:
        identity: what decides, besides tokens, whether KV may be shared.
        shards: the engine's shards; the ``shard`` arguments below index them.
        page_bytes: bytes of a page of each shard.
        pages: what the pages of each shard are to a device slab.
    """

    def __init__(
        self, services: Services, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> None:
        """Made by :meth:`KVStore.space`."""
        if not shards:
            raise InvalidArgument("shards", "at least one is needed")
        self._services = services
        self.identity = identity
        self.shards = tuple(shards)
        self.pages = tuple(PageSet(identity, spec) for spec in shards)
        self.page_bytes = tuple(pages.page_bytes for pages in self.pages)
        self._opened: dict[int, Opened] = {}
        self._loads = Loads(services, self.pages, self.numbers)

    def page_keys(
        self, tokens: Tokens, *, known: PrefixKeys | None = None, seed: bytes = b""
    ) -> PrefixKeys:
        """Keys of all full pages of ``tokens``; see :func:`kvstore.page.page_keys`."""
        return page_keys(tokens, self.identity.page_tokens, seed=seed, known=known)

    def lookup(
        self, keys: PrefixKeys, shards: Sequence[int] | None = None, wait_s: float = 0.0
    ) -> Hit:
        """How long a prefix of ``keys`` is there for every shard, at the node or in our own slab.

        Args:
            keys: from the start of the chain.
            shards: which of the engine's shards are needed; all by default.
            wait_s: how long to wait while more of the prefix is being written.
        """
        if not len(keys):
            return MISS
        services = self._services
        try:
            link = services.waiting_link("lookup") if wait_s > 0 else services.link
            opened = self.numbers(link)
            numbers = opened.shards
            wanted = numbers if shards is None else [numbers[shard] for shard in shards]
            wait_ms = min(int(wait_s * 1000), 60_000)
            request = wire.Lookup(0, opened.space, wanted, keys.packed, wait_ms)
            answer = link.request(request, services.timeout_s + wait_s, opened.epoch)
            assert isinstance(answer, wire.Found)
            found: wire.Found | None = answer
        except KVStoreError as error:
            services.note_trouble(error)
            found = None
        on_device = self._on_device(keys, shards)
        if found is None:
            if not on_device:
                return MISS
            found = wire.Found(0, 0, 0)
        pages = max(found.pages, on_device)
        on_disk = min(found.on_disk, pages - on_device)
        tiers = {"host": pages - on_device - on_disk}
        tiers |= {tier: n for tier, n in (("gpu", on_device), ("ssd", on_disk)) if n}
        each = sum(self.page_bytes)
        seconds = services.load_seconds((pages - on_device) * each, on_disk * each)
        return Hit(pages, found.pending, tiers, seconds)

    def put(
        self,
        keys: PrefixKeys,
        pages: Sequence[Buffer],
        shard: int = 0,
        *,
        ttl_s: float = 0.0,
        read_once: bool = False,
        no_store: bool = False,
        durable: bool = False,
    ) -> PutResult:
        """Store pages; returns when others can read them.

        Args:
            keys: one for each page, consecutive.
            pages: C-contiguous buffers of ``page_bytes[shard]`` bytes; not kept.
            shard: whose pages they are.
            ttl_s: they leave by themselves after so long; 0 = never. Such pages never go to disk.
            read_once: they leave when their first reader is done, and never go to disk.
            no_store: they never go to disk.
            durable: return when these pages, and all before them, survive a crash of the node.

        Raises:
            InvalidArgument, LayoutMismatch: what was passed cannot be these pages.
            CapacityError: no room for some of them (the others are stored); retryable.
            DurabilityUnavailable: ``durable``, and the node syncs nothing, or a page was stored
                never to go to disk; they may be stored.
            TransferTimeout, PeerUnreachable: it is not known whether they were stored; retryable.
        """
        size = self._size(shard)
        if len(pages) != len(keys):
            raise InvalidArgument("pages", f"{len(pages)} pages for {len(keys)} keys")
        source = mover.Pieces.contiguous(addresses(pages, size), size)
        if durable and (ttl_s or read_once or no_store):
            raise InvalidArgument("durable", "such pages never go to disk")
        keep = Keep(ttl_s, read_once=read_once, memory_only=no_store)
        result = self.put_pieces(keys, source, shard, keep)
        if durable:
            self.persist(keys, shard)
        return result

    def persist(self, keys: PrefixKeys, shard: int = 0) -> None:
        """Return when these stored pages, and all before them, survive a crash of the node.

        Raises:
            CapacityError: some are not stored, or the disk has no room now; retryable.
            DurabilityUnavailable: the node has no SSD tier or syncs nothing, or a page was stored
                never to go to disk.
            TransferTimeout: they are not synced yet, but may be later; retryable.
        """
        # Not the one that puts wait on for room: a sync can take much longer.
        link = self._services.waiting_link("persist")
        for start, stop in self._batches(len(keys), shard):
            opened = self.numbers(link)
            number, wait_ms = opened.shards[shard], int(SYNC_WAIT_S * 1000)
            request = wire.Persist(0, opened.space, number, keys[start:stop].packed, wait_ms)
            link.request(request, self._services.timeout_s + SYNC_WAIT_S, opened.epoch)

    def put_pieces(
        self, keys: PrefixKeys, source: mover.Pieces, shard: int, keep: Keep | None = None
    ) -> PutResult:
        """:meth:`put` for pages that lie in pieces; the memory must stay until it returns."""
        total = PutResult(0)
        keep = keep or Keep()
        for start, stop in self._batches(len(keys), shard):
            at, deadline = start, monotonic() + DISK_WAIT_S
            link, wait_s = self._services.link, 0.0
            while at < stop:
                part, busy = self._put_batch(
                    keys[at:stop], source.pages(at, stop), shard, keep, link, wait_s
                )
                decided = stop - at - part.refused
                at += decided
                if not part.refused or not busy or (not decided and monotonic() > deadline):
                    total = total.plus(part)
                    break
                # Pages are being written to disk to make room: wait for it on another connection.
                total = total.plus(part._replace(refused=0))
                link, wait_s = self._services.waiting_link("store"), DISK_WAIT_S
                deadline = monotonic() + DISK_WAIT_S
            if total.refused:
                total = total._replace(refused=total.refused + len(keys) - stop)
                break
        if total.refused:
            raise CapacityError(
                f"{total.refused} of {len(keys)} pages were not stored: no slot is free and none"
                " may be evicted, the quota is used up, or the page before them is gone"
            )
        return total

    @overload
    def get(self, keys: PrefixKeys, out: None = None, shard: int = 0) -> PageViews: ...
    @overload
    def get(self, keys: PrefixKeys, out: Sequence[Buffer], shard: int = 0) -> int: ...
    def get(
        self, keys: PrefixKeys, out: Sequence[Buffer] | None = None, shard: int = 0
    ) -> PageViews | int:
        """Read the leading run of pages that is there, verified.

        Args:
            keys: consecutive; whole prefixes are what is worth asking for.
            out: buffers of ``page_bytes[shard]`` bytes to copy into, verified as they are copied;
                without it the pages are verified and then viewed where they are, under a lease.
                See :class:`PageViews` for what that promises.
            shard: whose pages.

        Returns:
            how many pages were copied, or views of them (empty on any trouble).
        """
        if out is None:
            return self._loads.view(keys, shard) if len(keys) else PageViews([], lambda: None)
        size = self._size(shard)
        if len(out) != len(keys):
            raise InvalidArgument("out", f"{len(out)} buffers for {len(keys)} keys")
        target = mover.Pieces.contiguous(addresses(out, size, writable=True), size)
        return self.load_pieces(keys, target, shard, None, "page")

    def restore_to_kvpool(
        self, keys: PrefixKeys, pool: KVPool, blocks: npt.ArrayLike, shard: int = 0,
        order: mover.Order = "page",
    ) -> RestoreJob:  # fmt: skip
        """Copy pages into an engine's blocks, in the background.

        Blocks may be used for anything else only after the job has ended, cancelled or not. Those
        of pages beyond ``result().pages`` hold no valid KV.

        Args:
            keys: consecutive.
            pool: where the engine keeps K and V.
            blocks: block numbers, in page order.
            shard: whose pages.
            order: ``page``: fastest. ``segment``: all pages are verified first, then layer after
                layer is copied, and ``wait_layer(i)`` returns when layer i is there (of a pool on
                a device: when all are).

        Raises:
            InvalidArgument: what was passed cannot be these pages, or the pool is on a device
                where this store has no slab.
        """
        size = self._size(shard)
        target = pool.pieces(blocks, size, by_layer=order == "segment")
        same_length(keys, blocks, pool.blocks_per_page(size))
        progress, load = mover.Progress(), None
        if pool.device != "cpu":
            at_once = self._batch_pages(shard)
            load = self._loads.device_load(keys, pool, blocks, shard, progress, at_once)

        def run() -> RestoreResult:
            start = perf_counter()
            if load is not None:
                pages = load()
            else:
                pages = self.load_pieces(keys, target, shard, progress, order)
            return RestoreResult(pages, pages * size, perf_counter() - start)

        layered = order == "segment" and load is None
        return RestoreJob(self._services.loads, run, progress, layered=layered)

    def extract_from_kvpool(
        self, pool: KVPool, blocks: npt.ArrayLike, keys: PrefixKeys, shard: int = 0, *,
        ttl_s: float = 0.0, read_once: bool = False, no_store: bool = False,
    ) -> StoreJob[PutResult]:  # fmt: skip
        """Store pages straight from an engine's blocks, in the background.

        The blocks must not change until the job has ended. Arguments as for :meth:`put`.
        """
        size = self._size(shard)
        if pool.device != "cpu":
            raise InvalidArgument("pool", f"is on {pool.device}; pages are stored from host memory")
        source = pool.pieces(blocks, size)
        same_length(keys, blocks, pool.blocks_per_page(size))
        keep = Keep(ttl_s, read_once=read_once, memory_only=no_store)
        return StoreJob(self._services.stores, lambda: self.put_pieces(keys, source, shard, keep))

    def prefetch(self, keys: PrefixKeys, shard: int = 0) -> StoreJob[int]:
        """Bring pages from disk to memory, in the background; the job tells how many are there.

        They may be evicted again at any time after.
        """

        def run() -> int:
            there = 0
            for start, stop in self._batches(len(keys), shard):
                count = self._loads.leases.warm(keys[start:stop], shard, lambda: None)
                there += count
                if count < stop - start:
                    break
            return there

        return StoreJob(self._services.loads, run)

    # ---- moving -----------------------------------------------------------------------------

    def numbers(self, link: NodeLink | None = None) -> Opened:
        """Space and shard numbers on the present connection, opened anew after a reconnect."""
        link = link or self._services.link
        epoch = link.epoch
        opened = self._opened.get(id(link))
        if opened is None or opened.epoch != epoch:
            request = wire.OpenSpace(0, self.identity, list(self.shards))
            answer = link.request(request, self._services.timeout_s, epoch)
            assert isinstance(answer, wire.SpaceOpened)
            opened = self._opened[id(link)] = Opened(epoch, answer.space, answer.shards)
        return opened

    def load_pieces(
        self, keys: PrefixKeys, target: mover.Pieces, shard: int,
        progress: mover.Progress | None, order: mover.Order,
    ) -> int:  # fmt: skip
        """Copy and verify the leading run of pages that is there; returns its length."""
        at_once = self._batch_pages(shard)
        return self._loads.load(keys, target, shard, progress, order, at_once)

    def _on_device(self, keys: PrefixKeys, shards: Sequence[int] | None) -> int:
        """How long a prefix of ``keys`` our slab has of every shard."""
        promotion = self._services.promotion
        if promotion is None:
            return 0
        wanted = range(len(self.pages)) if shards is None else shards
        runs = (promotion.slab.run(self.pages[shard], keys.packed) for shard in wanted)
        return min(runs, default=0)

    def _size(self, shard: int) -> int:
        """Bytes of a page of ``shard``.

        Raises:
            InvalidArgument: the engine has no such shard.
        """
        if not 0 <= shard < len(self.page_bytes):
            raise InvalidArgument("shard", f"{shard} is none of {len(self.page_bytes)}")
        return self.page_bytes[shard]

    def _batch_pages(self, shard: int) -> int:
        """Pages that one message may pin or reserve."""
        quota = self._services.link.quota_bytes or 2 * BATCH_BYTES
        most = min(BATCH_BYTES, quota // 2)  # half, so that a load and a store fit side by side
        return max(1, min(wire.BATCH_KEYS_MAX, most // self.page_bytes[shard]))

    def _batches(self, count: int, shard: int) -> list[tuple[int, int]]:
        each = self._batch_pages(shard)
        return [(start, min(start + each, count)) for start in range(0, count, each)]

    def _put_batch(
        self, keys: PrefixKeys, source: mover.Pieces, shard: int, keep: Keep, link: NodeLink,
        wait_s: float,
    ) -> tuple[PutResult, bool]:  # fmt: skip
        """Put pages on one connection; also tells whether room for those refused is being made."""
        opened = self.numbers(link)  # before the memory: a request of its epoch is of its memory
        put = next(names)
        tokens = b"" if keys.tokens is None else keys.tokens.tobytes()
        with link.moving() as memory:
            number = opened.shards[shard]
            request = wire.BeginPut(
                0, put, opened.space, number, keys.packed, keys.parent, tokens, int(wait_s * 1000)
            )
            try:
                granted = link.request(request, self._services.timeout_s + wait_s, opened.epoch)
                assert isinstance(granted, wire.PutGranted)
                statuses = granted.statuses
                if granted.addresses:
                    digests = self._write(memory, granted, keys, source, shard)
                    commit = wire.CommitPut(
                        0, put, digests, int(keep.ttl_s * 1000), keep.read_once, keep.memory_only
                    )
                    committed = link.request(commit, self._services.timeout_s, opened.epoch)
                    assert isinstance(committed, wire.Committed)
                    statuses += committed.statuses
            except BaseException:
                link.send(wire.AbortPut(put), opened.epoch)  # nothing of it is written any more
                raise
        refused = (PageStatus.NO_ROOM, PageStatus.NO_PARENT, PageStatus.DROPPED)
        result = PutResult(
            statuses.count(PageStatus.STORED),
            statuses.count(PageStatus.EXISTS),
            statuses.count(PageStatus.PENDING),
            sum(statuses.count(status) for status in refused),
        )
        waits = PageStatus.NO_PARENT not in statuses and PageStatus.DROPPED not in statuses
        return result, granted.busy and waits

    def _write(
        self, memory: Use, granted: wire.PutGranted, keys: PrefixKeys, source: mover.Pieces,
        shard: int,
    ) -> bytes:  # fmt: skip
        targets = memory.locate(granted.addresses, self.page_bytes[shard], write=True)
        seeds = page_seeds(keys.packed, self.pages[shard].seed)
        if len(targets) < len(keys):
            chosen = np.flatnonzero(
                np.frombuffer(granted.statuses, dtype=np.uint8) == PageStatus.GRANTED
            )
            source, seeds = source.choose(chosen), seeds[chosen]
        return mover.gather(targets, self.page_bytes[shard], source, seeds).tobytes()
