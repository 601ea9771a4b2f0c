"""A space as one engine uses it: lookups, puts, gets, and moves between pages and its KV pool."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from time import perf_counter
from typing import Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvstore import mover, wire
from kvstore.errors import CapacityError, InvalidArgument, KVStoreError, PeerUnreachable
from kvstore.jobs import RestoreJob, StoreJob, Worker
from kvstore.kvpool import KVPool
from kvstore.link import NodeLink
from kvstore.mapping import Mapping
from kvstore.page import (
    DIGEST_BYTES,
    KEY_BYTES,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    Tokens,
    digest_seed,
    page_keys,
    page_seeds,
)
from kvstore.results import MISS, Hit, PageViews, PutResult, RestoreResult
from kvstore.state.outcomes import PageStatus

log = logging.getLogger(__name__)

LEASE_S: Final = 30.0
BATCH_BYTES: Final = 256 << 20
"""Most bytes pinned or reserved by one message: a longer call is cut, so that it blocks less."""
LOAD_BYTES_PER_S_GUESS: Final = 5e9
_SAID_MAX: Final = 100

VERIFY = True
"""A test switches it off, to show that without the check wrong bytes would reach an engine."""

_names: Final = count(1)
"""Names leases and puts; never repeats in a process."""


Buffer = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""What holds the bytes of one page; any dtype."""


class Services:
    """What the spaces of one store share.

    Attributes:
        link: the node.
        waiting_link: gives a connection of its own for lookups that wait, so that nothing else
            waits behind them.
        timeout_s: longest wait for any answer.
        loads: runs restores.
        stores: runs extracts.
        troubles: error code → how often a read became a miss because of it.
        load_bytes_per_s: how fast loads have been.
    """

    def __init__(
        self, link: NodeLink, waiting_link: Callable[[], NodeLink], timeout_s: float
    ) -> None:
        """Start the workers (their threads start with their first job)."""
        self.link = link
        self.waiting_link = waiting_link
        self.timeout_s = timeout_s
        self.loads = Worker("kvstore-load")
        self.stores = Worker("kvstore-store")
        self.troubles: Counter[str] = Counter()
        self.load_bytes_per_s = LOAD_BYTES_PER_S_GUESS
        self._said: set[str] = set()

    def note_load(self, size: int, seconds: float) -> None:
        """Learn from a finished load (moving average over about ten)."""
        if size and seconds > 0:
            self.load_bytes_per_s += 0.1 * (size / seconds - self.load_bytes_per_s)

    def note_trouble(self, error: KVStoreError) -> None:
        """A read became a miss."""
        self.troubles[error.code] += 1
        if isinstance(error, PeerUnreachable):
            return
        # A node that refuses does so at every lookup: said once, the rest is counted.
        level = logging.WARNING if str(error) not in self._said else logging.DEBUG
        if len(self._said) < _SAID_MAX:
            self._said.add(str(error))
        log.log(level, "a read became a miss: %s", error)


class Opened(NamedTuple):
    """What a space and the engine's shards are called on one connection."""

    epoch: int
    space: int
    shards: list[int]


class Space:
    """The pages of one space, as the shards of one engine.

    Attributes:
        identity: what decides, besides tokens, whether KV may be shared.
        shards: the engine's shards; the ``shard`` arguments below index them.
        page_bytes: bytes of a page of each shard.
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
        self.page_bytes = tuple(spec.page_bytes(identity) for spec in shards)
        self._seeds = tuple(digest_seed(identity, spec) for spec in shards)
        self._opened: dict[int, Opened] = {}

    def page_keys(
        self, tokens: Tokens, *, known: PrefixKeys | None = None, seed: bytes = b""
    ) -> PrefixKeys:
        """Keys of all full pages of ``tokens``; see :func:`kvstore.page.page_keys`."""
        return page_keys(tokens, self.identity.page_tokens, seed=seed, known=known)

    def lookup(
        self, keys: PrefixKeys, shards: Sequence[int] | None = None, wait_s: float = 0.0
    ) -> Hit:
        """How long a prefix of ``keys`` is there for every shard.

        Args:
            keys: from the start of the chain.
            shards: which of the engine's shards are needed; all by default.
            wait_s: how long to wait while more of the prefix is being written.
        """
        if not len(keys):
            return MISS
        link = self._services.waiting_link() if wait_s > 0 else self._services.link
        try:
            opened = self.numbers(link)
            numbers = opened.shards
            wanted = numbers if shards is None else [numbers[shard] for shard in shards]
            wait_ms = min(int(wait_s * 1000), 60_000)
            request = wire.Lookup(0, opened.space, wanted, keys.packed, wait_ms)
            found = link.request(request, self._services.timeout_s + wait_s, opened.epoch)
        except KVStoreError as error:
            self._services.note_trouble(error)
            return MISS
        assert isinstance(found, wire.Found)
        size = found.pages * sum(self.page_bytes)
        seconds = size / self._services.load_bytes_per_s
        return Hit(found.pages, found.pending, {"host": found.pages}, seconds)

    def put(
        self,
        keys: PrefixKeys,
        pages: Sequence[Buffer],
        shard: int = 0,
        *,
        ttl_s: float = 0.0,
        read_once: bool = False,
    ) -> PutResult:
        """Store pages; returns when others can read them.

        Args:
            keys: one for each page, consecutive.
            pages: C-contiguous buffers of ``page_bytes[shard]`` bytes; not kept.
            shard: whose pages they are.
            ttl_s: they leave by themselves after so long; 0 = never.
            read_once: they leave when their first reader is done.

        Raises:
            InvalidArgument, LayoutMismatch: what was passed cannot be these pages.
            CapacityError: no room for some of them (the others are stored); retryable.
            TransferTimeout, PeerUnreachable: it is not known whether they were stored; retryable.
        """
        size = self._size(shard)
        if len(pages) != len(keys):
            raise InvalidArgument("pages", f"{len(pages)} pages for {len(keys)} keys")
        addresses = _addresses(pages, size)
        source = mover.Pieces.contiguous(addresses, size)
        return self.put_pieces(keys, source, shard, ttl_s=ttl_s, read_once=read_once)

    def put_pieces(
        self,
        keys: PrefixKeys,
        source: mover.Pieces,
        shard: int,
        *,
        ttl_s: float = 0.0,
        read_once: bool = False,
    ) -> PutResult:
        """:meth:`put` for pages that lie in pieces; the memory must stay until it returns."""
        total = PutResult(0)
        for start, stop in self._batches(len(keys), shard):
            part = self._put_batch(
                keys[start:stop], source.pages(start, stop), shard, ttl_s, read_once=read_once
            )
            total = PutResult(*(a + b for a, b in zip(total, part, strict=True)))
            if part.refused:
                left = len(keys) - stop
                total = total._replace(refused=total.refused + left)
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
            out: buffers of ``page_bytes[shard]`` bytes to copy into; without it the pages are
                viewed where they are, under a lease.
            shard: whose pages.

        Returns:
            how many pages were copied, or views of them (empty on any trouble).
        """
        if out is None:
            return self._view(keys, shard) if len(keys) else PageViews([], lambda: None)
        size = self._size(shard)
        if len(out) != len(keys):
            raise InvalidArgument("out", f"{len(out)} buffers for {len(keys)} keys")
        target = mover.Pieces.contiguous(_addresses(out, size, writable=True), size)
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
                layer is copied, and ``wait_layer(i)`` returns when layer i is there.
        """
        size = self._size(shard)
        target = pool.pieces(blocks, size, by_layer=order == "segment")
        _same_length(keys, blocks, pool.blocks_per_page(size))
        progress = mover.Progress()

        def run() -> RestoreResult:
            start = perf_counter()
            pages = self.load_pieces(keys, target, shard, progress, order)
            seconds = perf_counter() - start
            self._services.note_load(pages * size, seconds)
            return RestoreResult(pages, pages * size, seconds)

        return RestoreJob(self._services.loads, run, progress, layered=order == "segment")

    def extract_from_kvpool(
        self, pool: KVPool, blocks: npt.ArrayLike, keys: PrefixKeys, shard: int = 0, *,
        ttl_s: float = 0.0, read_once: bool = False,
    ) -> StoreJob[PutResult]:  # fmt: skip
        """Store pages straight from an engine's blocks, in the background.

        The blocks must not change until the job has ended. Arguments as for :meth:`put`.
        """
        size = self._size(shard)
        source = pool.pieces(blocks, size)
        _same_length(keys, blocks, pool.blocks_per_page(size))
        return StoreJob(
            self._services.stores,
            lambda: self.put_pieces(keys, source, shard, ttl_s=ttl_s, read_once=read_once),
        )

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
        loaded = 0
        at_once = order == "segment" and len(keys)
        whole = [(0, len(keys))] if at_once else self._batches(len(keys), shard)
        try:
            for start, stop in whole:
                part = target.pages(start, stop)
                count = self._load_batch(keys[start:stop], part, shard, progress, order)
                loaded += count
                if count < stop - start:
                    break
        except KVStoreError as error:
            self._services.note_trouble(error)
        return loaded

    def _size(self, shard: int) -> int:
        """Bytes of a page of ``shard``.

        Raises:
            InvalidArgument: the engine has no such shard.
        """
        if not 0 <= shard < len(self.page_bytes):
            raise InvalidArgument("shard", f"{shard} is none of {len(self.page_bytes)}")
        return self.page_bytes[shard]

    def _batches(self, count: int, shard: int) -> list[tuple[int, int]]:
        quota = self._services.link.quota_bytes or 2 * BATCH_BYTES
        most = min(BATCH_BYTES, quota // 2)  # half, so that a load and a store fit side by side
        each = max(1, min(wire.BATCH_KEYS_MAX, most // self.page_bytes[shard]))
        return [(start, min(start + each, count)) for start in range(0, count, each)]

    def _put_batch(
        self, keys: PrefixKeys, source: mover.Pieces, shard: int, ttl_s: float, *, read_once: bool
    ) -> PutResult:
        link = self._services.link
        opened = self.numbers()  # before the memory: a request of its epoch is of its memory
        put = next(_names)
        tokens = b"" if keys.tokens is None else keys.tokens.tobytes()
        with link.moving() as memory:
            number = opened.shards[shard]
            request = wire.BeginPut(0, put, opened.space, number, keys.packed, keys.parent, tokens)
            granted = link.request(request, self._services.timeout_s, opened.epoch)
            assert isinstance(granted, wire.PutGranted)
            statuses = granted.statuses
            if granted.addresses:
                try:
                    digests = self._write(memory, granted, keys, source, shard)
                except BaseException:
                    link.send(wire.AbortPut(put))
                    raise
                commit = wire.CommitPut(0, put, digests, int(ttl_s * 1000), read_once)
                committed = link.request(commit, self._services.timeout_s, opened.epoch)
                assert isinstance(committed, wire.Committed)
                statuses += committed.statuses
        refused = (PageStatus.NO_ROOM, PageStatus.NO_PARENT, PageStatus.DROPPED)
        return PutResult(
            statuses.count(PageStatus.STORED),
            statuses.count(PageStatus.EXISTS),
            statuses.count(PageStatus.PENDING),
            sum(statuses.count(status) for status in refused),
        )

    def _write(
        self, memory: Mapping, granted: wire.PutGranted, keys: PrefixKeys, source: mover.Pieces,
        shard: int,
    ) -> bytes:  # fmt: skip
        targets = memory.locate(granted.addresses, write=True)
        seeds = page_seeds(keys.packed, self._seeds[shard])
        if len(targets) < len(keys):
            chosen = np.flatnonzero(
                np.frombuffer(granted.statuses, dtype=np.uint8) == PageStatus.GRANTED
            )
            source, seeds = source.choose(chosen), seeds[chosen]
        return mover.gather(targets, self.page_bytes[shard], source, seeds).tobytes()

    def _load_batch(
        self, keys: PrefixKeys, target: mover.Pieces, shard: int,
        progress: mover.Progress | None, order: mover.Order,
    ) -> int:  # fmt: skip
        link = self._services.link
        lease = next(_names)
        opened = self.numbers()  # before the memory, as in _put_batch
        with link.moving() as memory:
            leased = self._acquire(opened, keys, shard, lease)
            count = len(leased.digests) // DIGEST_BYTES
            if not count:
                return 0
            try:
                good = mover.scatter(
                    memory.locate(leased.addresses, write=False),
                    self.page_bytes[shard],
                    np.frombuffer(leased.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES),
                    page_seeds(keys.packed[: count * KEY_BYTES], self._seeds[shard]),
                    target if count == len(keys) else target.pages(0, count),
                    progress,
                    order,
                )
                return self._verified(opened, keys, shard, leased, good, progress)
            finally:
                link.send_later(wire.Release(lease))

    def _view(self, keys: PrefixKeys, shard: int) -> PageViews:
        link = self._services.link
        with ExitStack() as undo:
            try:
                opened = self.numbers()  # before the memory, as in _put_batch
                memory = undo.enter_context(link.moving())
                lease = next(_names)
                undo.callback(link.send_later, wire.Release(lease))
                leased = self._acquire(opened, keys, shard, lease)
                size = self._size(shard)
                expected = np.frombuffer(leased.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
                seeds = page_seeds(keys.packed[: len(expected) * KEY_BYTES], self._seeds[shard])
                found = mover.digest(memory.locate(leased.addresses, write=False), size, seeds)
                good = (found == expected).all(axis=1)
                count = self._verified(opened, keys, shard, leased, good)
                views = memory.views(leased.addresses, size)[:count]
            except KVStoreError as error:
                self._services.note_trouble(error)
                return PageViews([], lambda: None)
            return PageViews(views, undo.pop_all().close)

    def _acquire(self, opened: Opened, keys: PrefixKeys, shard: int, lease: int) -> wire.Acquired:
        number, lease_ms = opened.shards[shard], int(LEASE_S * 1000)
        request = wire.Acquire(0, lease, opened.space, number, keys.packed, lease_ms)
        leased = self._services.link.request(request, self._services.timeout_s, opened.epoch)
        assert isinstance(leased, wire.Acquired)
        return leased

    def _verified(
        self, opened: Opened, keys: PrefixKeys, shard: int, leased: wire.Acquired,
        good: npt.NDArray[np.bool_], progress: mover.Progress | None = None,
    ) -> int:  # fmt: skip
        """Length of the verified run; reports the first page that failed (unless cancelled)."""
        if bool(good.all()) or not VERIFY:
            return len(good)
        first = int(np.argmin(good))
        if progress is None or not progress.cancelled:
            slot = np.frombuffer(leased.addresses, dtype=wire.ADDRESS)[first]
            number, generation = opened.shards[shard], int(slot["generation"])
            if self._services.link.epoch == opened.epoch:
                self._services.link.send(
                    wire.Corrupt(opened.space, number, keys[first], generation)
                )
            self._services.troubles["corrupt"] += 1
            log.error("page %s failed its digest: quarantined, a miss", keys[first].hex()[:16])
        return first


def _addresses(
    buffers: Sequence[Buffer], size: int, *, writable: bool = False
) -> npt.NDArray[np.uint64]:
    """Where the buffers' bytes are.

    Raises:
        InvalidArgument: one has another size, is not contiguous, or may not be written.
    """
    found = np.empty(len(buffers), dtype=np.uint64)
    field, need = "pages", "C-contiguous"
    if writable:
        field, need = "out", "writable and C-contiguous"
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, np.ndarray):
            array, contiguous = buffer, buffer.flags.c_contiguous
        else:
            view = memoryview(buffer)
            contiguous = view.c_contiguous
            array = np.frombuffer(view if contiguous else b"", dtype=np.uint8)
        if not contiguous or (writable and not array.flags.writeable):
            raise InvalidArgument(field, f"page {index} is not {need}")
        if array.nbytes != size:
            raise InvalidArgument(field, f"page {index} has {array.nbytes} bytes, not {size}")
        found[index] = array.__array_interface__["data"][0]  # twice as fast as array.ctypes
    return found


def _same_length(keys: PrefixKeys, blocks: npt.ArrayLike, per_page: int) -> None:
    have = np.size(np.asarray(blocks))
    if have != len(keys) * per_page:
        raise InvalidArgument("blocks", f"{have} blocks for {len(keys)} keys of {per_page} each")
