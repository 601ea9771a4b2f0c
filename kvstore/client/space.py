"""A space as one engine uses it: lookups, puts, gets, and copies between pages and its KV pool."""

from collections.abc import Sequence
from time import perf_counter
from typing import Final, overload

import numpy.typing as npt

from kvstore import mover
from kvstore.client.device import BlocksOnDevice
from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.loads import DISK_WAIT_S, LoadState
from kvstore.client.node_link import NodeLink
from kvstore.client.resources import LOADS, Opened, StoreResources
from kvstore.client.results import MISS, Hit, PageViews, PutResult, RestoreResult
from kvstore.client.shard_loads import ShardLoader
from kvstore.client.stores import Backoff, Keep, ShardPages, Storer, summed
from kvstore.config.cluster import NODES_MAX
from kvstore.mover.kvpool import KVPool, PoolPages, pieces_of_each
from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, InvalidArgument, KVStoreError, TooFewCopies
from kvstore.protocol.page import PrefixKeys, ShardSpec, SpaceIdentity, Tokens, page_keys
from kvstore.state.table.slab import PageSet

BATCH_BYTES: Final = 256 << 20
"""Maximum bytes pinned or reserved by one message: longer calls are split, to block less."""
SYNC_WAIT_S: Final = 30.0
"""Maximum wait of a durable put until its pages survive a crash."""
REPLICATE_WAIT_S: Final = 10.0
"""Maximum wait until further nodes have a batch of pages."""
REPLICATE_PAGES: Final = 4096
"""Maximum pages of one message that asks for copies."""


class Space:
    """The pages of one space, as the shards of one engine. All methods are thread-safe.

    Get one from :meth:`KVStore.space`.

    ``keys`` are always consecutive keys of one chain: the result of :meth:`page_keys`, or a slice
    of it. ``shard`` is an index into ``shards``; one that is out of range raises
    ``InvalidArgument``.

    Attributes:
        identity: what must be equal, besides tokens, for two engines to share pages.
        shards: the engine's shards.
        page_bytes: bytes of one page of each shard.
        pages: the name of the pages of each shard in a device slab.
    """

    def __init__(
        self, resources: StoreResources, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> None:
        if not shards:
            raise InvalidArgument("shards", "at least one is needed")
        self._resources = resources
        self.identity = identity
        self.shards = tuple(shards)
        self.pages = tuple(PageSet(identity, spec) for spec in shards)
        self.page_bytes = tuple(pages.page_bytes for pages in self.pages)
        self._opened: dict[int, Opened] = {}
        self._loads = ShardLoader(resources, self.pages, self.numbers)
        self._stores = Storer(resources, self.pages, self.numbers)

    def page_keys(
        self, tokens: Tokens, *, known: PrefixKeys | None = None, seed: bytes = b""
    ) -> PrefixKeys:
        """Keys of all full pages of ``tokens``; see :func:`kvstore.page_keys`.

        Raises:
            InvalidArgument: a token id does not fit 32 bits.
        """
        return page_keys(tokens, self.identity.page_tokens, seed=seed, known=known)

    def lookup(
        self, keys: PrefixKeys, shards: Sequence[int] | None = None, wait_s: float = 0.0, *,
        holder: str = "", held: int = 0,
    ) -> Hit:  # fmt: skip
        """Find the longest prefix of ``keys`` that every shard has, at the node or in the slab.

        The pages are not pinned: they may be evicted before they are read. In a cluster, the node
        also finds out which further pages other nodes have. While it does so, for a moment, they
        are pending.

        Args:
            keys: prefix keys from the start of the chain.
            shards: indexes of the shards that must have a page; None = all.
            wait_s: maximum seconds to wait while more of the prefix is being written; at most 60.
            holder: name of a node (:attr:`KVStore.node_name`) that has pages of this prefix, as far
                as the caller knows. It saves this node a query to the directory. A wrong name is
                harmless: pages that the other node does not have are misses.
            held: number of leading pages that ``holder`` has.

        Returns:
            The hit. It has 0 pages if nothing is stored, or if the node does not answer or fails.
        """
        for shard in shards or ():
            self._size(shard)
        if not len(keys):
            return MISS
        resources, found = self._resources, wire.Found(0, 0, 0)
        try:
            link = resources.waiting_link("lookup") if wait_s > 0 else resources.link
            opened = self.numbers(link)
            numbers = opened.shards
            wanted = numbers if shards is None else [numbers[shard] for shard in shards]
            wait_ms = min(int(wait_s * 1000), 60_000)
            request = wire.Lookup(0, opened.space, wanted, keys.packed, wait_ms)
            named = holder.isascii() and len(holder) <= wire.HOLDER_CHARS_MAX
            if named and holder != link.node_name:
                request.holder, request.held = holder, min(max(0, held), len(keys))
            answer = link.request(request, resources.timeout_s + wait_s, opened.epoch)
            assert isinstance(answer, wire.Found)
            found = answer
        except KVStoreError as error:
            resources.note_trouble(error)
        on_device = self._on_device(keys, shards)
        pages = max(found.pages, on_device)
        on_disk = min(found.on_disk, pages - on_device)
        tiers = {"host": pages - on_device - on_disk}
        tiers |= {tier: n for tier, n in (("gpu", on_device), ("ssd", on_disk)) if n}
        each = sum(self.page_bytes)
        seconds = self._loads.seconds((pages - on_device) * each, on_disk * each)
        remote = max(0, found.pages + found.remote - pages)
        remote_s = found.remote_s * remote / found.remote if remote else 0.0
        return Hit(pages, found.pending, tiers, seconds, remote, remote_s)

    def put(
        self, keys: PrefixKeys, pages: Sequence[mover.Buffer], shard: int = 0, *,
        ttl_s: float = 0.0, read_once: bool = False, no_store: bool = False,
        durable: bool = False, replicas: int = 1,
    ) -> PutResult:  # fmt: skip
        """Store pages; return when others can read them.

        Args:
            keys: one key for each page.
            pages: C-contiguous buffers of ``page_bytes[shard]`` bytes each. They are copied; the
                caller must not change them until this returns, and may reuse them after that.
            shard: index of the shard to which all pages belong.
            ttl_s: the pages expire after this many seconds; 0 = never. Such pages are never
                written to an SSD.
            read_once: the pages are dropped after their first read and are never written to an SSD.
            no_store: the pages are never written to an SSD.
            durable: return when these pages and all pages before them survive a crash of the node;
                this can take 30 seconds. It excludes the three options above.
            replicas: return when this number of nodes, this node included, has these pages and all
                pages before them: 1 to 16. This can take 10 seconds for each batch of pages (256
                MiB or less). More than 1 excludes ``ttl_s`` and ``read_once``.

        Raises:
            InvalidArgument: the number of pages, a buffer or a combination of options is wrong;
                ``field`` names it.
            TooFewCopies: fewer nodes have the pages than ``replicas``; ``copies`` says how many.
                The pages are stored at this node. Retryable.
            LayoutMismatch: the node has this space with another layout.
            CapacityError: no free space for some pages; the others are stored. Retryable.
            DurabilityUnavailable: ``durable`` was requested, but the node never syncs, or a page
                may not be written to an SSD. The pages may be stored in memory.
            TransferTimeout, PeerUnreachable: the node did not answer; the pages may or may not be
                stored. Retryable.
        """
        size = self._size(shard)
        if len(pages) != len(keys):
            raise InvalidArgument("pages", f"{len(pages)} pages for {len(keys)} keys")
        source = mover.Pieces.of_buffers(pages, size)
        if durable and (ttl_s or read_once or no_store):
            raise InvalidArgument(
                "durable",
                "pages with a TTL, read-once pages and no_store puts are never written to disk",
            )
        keep = Keep(ttl_s, read_once=read_once, memory_only=no_store)
        if replicas != 1 and (ttl_s or read_once):
            raise InvalidArgument("replicas", "pages with a TTL and read-once pages are not copied")
        if not 1 <= replicas <= NODES_MAX:
            raise InvalidArgument("replicas", f"{replicas} is outside 1..{NODES_MAX}")
        result = self.put_pieces(keys, source, shard, keep)
        if durable:
            self.persist(keys, shard)
        if replicas > 1:
            self.replicate(keys, replicas, shard)
        return result

    def replicate(self, keys: PrefixKeys, replicas: int, shard: int = 0) -> None:
        """Copy stored pages, and all pages before them, to further nodes.

        This node asks the others to fetch the pages; nodes that already have them count too. It
        waits up to 10 seconds for each batch of pages (256 MiB or less).

        Args:
            keys: the pages, stored before.
            replicas: number of nodes that should have them, this node included: 1 to 16.
            shard: index of the shard to which the pages belong.

        Raises:
            TooFewCopies: fewer nodes have them; ``copies`` says how many. Retryable.
            InvalidArgument: ``replicas`` is out of range.
            CapacityError: some pages are not stored here, or the node is too busy. Retryable.
            TransferTimeout, PeerUnreachable: the node did not answer. Retryable.
        """
        if not 1 <= replicas <= NODES_MAX:
            raise InvalidArgument("replicas", f"{replicas} is outside 1..{NODES_MAX}")
        # Not the connection of puts that wait for free slots: copying can take much longer.
        link = self._resources.waiting_link("replicate")
        fewest, draining = replicas, 0
        for start, stop in self._batches(len(keys), shard, REPLICATE_PAGES):
            opened = self.numbers(link)
            if link.node_minor < wire.COPIES_MINOR:
                raise TooFewCopies("the node is too old to copy pages to other nodes", 1)
            number, wait_ms = opened.shards[shard], int(REPLICATE_WAIT_S * 1000)
            request = wire.Replicate(
                0, opened.space, number, keys[start:stop].packed, replicas, wait_ms
            )
            answer = link.request(
                request, self._resources.timeout_s + REPLICATE_WAIT_S, opened.epoch
            )
            assert isinstance(answer, wire.Replicated)
            if answer.copies < fewest:
                fewest, draining = answer.copies, answer.draining
        if fewest < replicas:
            left_out = f" ({draining} not asked: draining)" if draining else ""
            raise TooFewCopies(
                f"{fewest} of {replicas} nodes have the {len(keys)} pages{left_out}; try again"
                " later",
                fewest,
            )

    def persist(self, keys: PrefixKeys, shard: int = 0) -> None:
        """Make stored pages durable: return when they and all pages before them survive a crash.

        It waits up to 30 seconds for the disk for each batch of pages (256 MiB or less).

        Args:
            keys: the pages, stored before.
            shard: index of the shard to which the pages belong.

        Raises:
            CapacityError: some pages are not stored, or the disk has no room now. Retryable.
            DurabilityUnavailable: the node has no SSD tier or never syncs, or a page may not be
                written to an SSD.
            TransferTimeout: the pages are not synced yet; they may be later. Retryable.
            PeerUnreachable: the node is away. Retryable.
        """
        batches = self._batches(len(keys), shard)
        # Not the connection of puts that wait for free slots: a sync can take much longer.
        link = self._resources.waiting_link("persist")
        for start, stop in batches:
            opened = self.numbers(link)
            number, wait_ms = opened.shards[shard], int(SYNC_WAIT_S * 1000)
            request = wire.Persist(0, opened.space, number, keys[start:stop].packed, wait_ms)
            link.request(request, self._resources.timeout_s + SYNC_WAIT_S, opened.epoch)

    def keep_conversation(
        self, keys: PrefixKeys, name: str, ttl_s: float, bytes_max: int = 0
    ) -> None:
        """Keep the stored pages of a conversation for a time, whatever the eviction policy says.

        The node keeps them on its SSDs if it has any, else in memory, within its budget for
        conversations and the quota of the space. They give way when a tenant or space that keeps
        less needs the budget. ``kvstore conversations`` and the metrics
        ``kvstore_not_kept_pages_total`` and ``kvstore_gave_way_pages_total`` show what is not kept.
        A later call with the same name sets a new end and adds pages. Returns at once; if the node
        is away, nothing is kept.

        Args:
            keys: prefix keys from the start of the chain; pages that are not stored yet, and all
                after them, are not kept.
            name: name of the conversation, 1 to 256 characters.
            ttl_s: seconds for which to keep the pages from now on: more than 0 and at most ten
                years. The node limits it to ``admin.conversations_s_max``, by default a day.
            bytes_max: maximum bytes of the conversation in all shards; 0 = no limit of its own.

        Raises:
            InvalidArgument: an argument is out of its range.
        """
        if not 0 < ttl_s * 1000 <= wire.TTL_MS_MAX:
            raise InvalidArgument("ttl_s", f"{ttl_s} is not above 0, or above ten years")
        if bytes_max < 0:
            raise InvalidArgument("bytes_max", f"{bytes_max} is negative")
        ttl_ms = max(1, int(ttl_s * 1000))
        for start in range(0, len(keys), wire.KEEP_KEYS_MAX):
            packed = keys[start : start + wire.KEEP_KEYS_MAX].packed
            self._tell_conversation(name, packed, ttl_ms, bytes_max)

    def end_conversation(self, name: str) -> None:
        """Stop keeping the pages of a conversation, so they may be evicted; returns at once.

        Raises:
            InvalidArgument: the name does not have 1 to 256 characters.
        """
        self._tell_conversation(name, b"", 0, 0)

    def _tell_conversation(self, name: str, packed: bytes, ttl_ms: int, bytes_max: int) -> None:
        if not 0 < len(name) <= wire.CONVERSATION_CHARS_MAX:
            raise InvalidArgument("name", f"has 1 to {wire.CONVERSATION_CHARS_MAX} characters")
        link = self._resources.link
        try:
            opened = self.numbers(link)
        except KVStoreError as error:
            self._resources.note_trouble(error)
            return
        if link.node_minor >= wire.CONVERSATIONS_MINOR:
            message = wire.KeepConversation(opened.space, name, packed, ttl_ms, bytes_max)
            link.send_later(message, opened.epoch)

    def put_pieces(
        self, keys: PrefixKeys, source: mover.Pieces | BlocksOnDevice, shard: int,
        keep: Keep | None = None, only: range | None = None,
    ) -> PutResult:  # fmt: skip
        """:meth:`put` for pages that consist of pieces; the memory must stay valid."""
        parts = [PutResult(0)]
        keep = keep or Keep()
        if only is not None:
            taken = self._stores.put_turns(keys, source, shard, keep, only)
            if taken is not None:
                return taken
        for start, stop in self._batches(len(keys), shard):
            at, backoff = start, Backoff()
            link, wait_s = self._resources.link, 0.0
            while at < stop:
                part, busy = self._stores.put(
                    keys[at:stop], source.pages(at, stop), shard, keep, link, wait_s
                )
                decided = stop - at - part.refused
                at += decided
                parts.append(part)
                if not part.refused or not busy or backoff.is_over(decided, wait_s):
                    break
                # Pages are being written to disk to free slots: wait for it on another connection.
                parts[-1] = part._replace(refused=0)
                link, wait_s = self._resources.waiting_link("store"), DISK_WAIT_S
            if parts[-1].refused:
                parts.append(PutResult(0, refused=len(keys) - stop))
                break
        total = summed(parts)
        if total.refused:
            raise CapacityError(
                f"{total.refused} of {len(keys)} pages were not stored: no slot is free and none"
                " may be evicted, the quota is used up, or the page before them is gone"
            )
        return total

    @overload
    def get(self, keys: PrefixKeys, out: None = None, shard: int = 0) -> PageViews: ...
    @overload
    def get(self, keys: PrefixKeys, out: Sequence[mover.Buffer], shard: int = 0) -> int: ...
    def get(
        self, keys: PrefixKeys, out: Sequence[mover.Buffer] | None = None, shard: int = 0
    ) -> PageViews | int:
        """Read pages from the first key up to the first missing page; all are verified.

        Pages that only other nodes of the cluster have are fetched first, for at most two seconds.

        Args:
            keys: the pages to read.
            out: writable C-contiguous buffers of ``page_bytes[shard]`` bytes, one for each key.
                They stay the caller's. Pages are verified as they are copied; after this returns,
                buffers beyond the returned number hold nothing valid. None = no copy: the pages are
                verified and then viewed in the node's memory, under a lease; :class:`PageViews`
                says what that promises.
            shard: the shard to read.

        Returns:
            With ``out`` the number of pages that were copied, else views of the pages; 0 pages if
            the store fails.

        Raises:
            InvalidArgument: ``out`` does not fit the keys or the shard.
        """
        size = self._size(shard)
        if out is None:
            return self._loads.view(keys, shard) if len(keys) else PageViews([], lambda: None)
        if len(out) != len(keys):
            raise InvalidArgument("out", f"{len(out)} buffers for {len(keys)} keys")
        target = mover.Pieces.of_buffers(out, size, writable=True)
        return self.load_pieces(keys, target, shard, None, "page")

    def restore_to_kvpool(
        self, keys: PrefixKeys, pool: KVPool, blocks: npt.ArrayLike, shard: int = 0,
        order: mover.Order = "page",
    ) -> RestoreJob:  # fmt: skip
        """Copy pages into an engine's blocks, in the background.

        Pages that only other nodes of the cluster have are fetched first. Leave them out of
        ``keys`` if that takes longer than computing them (:attr:`Hit.remote_seconds`).

        The engine may reuse the blocks only after the job has ended, even if it was cancelled.
        Blocks of pages beyond ``result().pages`` hold no valid KV.

        Args:
            keys: the pages to copy.
            pool: where the engine keeps K and V.
            blocks: block numbers, integers of any shape, in page order:
                ``pool.blocks_per_page(page_bytes[shard])`` for each key.
            shard: the shard to read.
            order: ``page``: page after page, the fastest. ``segment``: layer after layer;
                :meth:`RestoreJob.wait_layer` returns when a layer is copied.

        Returns:
            The job. If the store fails, it restores 0 pages; it raises nothing.

        Raises:
            InvalidArgument: the blocks do not fit the keys or the pool.
            LayoutMismatch: a page is not a whole number of the pool's blocks.
        """
        size = self._size(shard)
        progress, state = mover.Progress(), LoadState()
        there: BlocksOnDevice | None = None
        if pool.device == "cpu":
            target = pool.pieces(blocks, size, len(keys), by_layer=order == "segment")

            def load() -> int:
                return self.load_pieces(keys, target, shard, progress, order, state)
        else:
            at_once, table = self.batch_pages(shard), pool.table(blocks, size, len(keys))
            there, load = self._loads.device_load(
                keys, pool, table, shard, progress, order, at_once, state
            )
        submitted, runs = perf_counter(), 0

        def run() -> RestoreResult:
            nonlocal runs
            state.may_wait, state.waits = runs > 0, False  # the second time, its thread may wait
            runs += 1
            pages = load()
            return RestoreResult(pages, pages * size, perf_counter() - submitted)

        layered = order == "segment" and (pool.device == "cpu" or there is not None)
        resources = self._resources
        return RestoreJob(
            resources.loads, run, progress, layered=layered, slow=resources.slow_loads,
            blocks=there, waits=lambda: state.waits,
        )  # fmt: skip

    def restore_shards(
        self, keys: PrefixKeys, blocks: npt.ArrayLike, parts: Sequence[tuple[KVPool, int]],
        order: mover.Order = "page",
    ) -> list[RestoreJob]:  # fmt: skip
        """Copy pages of several shards into an engine's blocks, in the background.

        It is :meth:`restore_to_kvpool` for each, but for up to 64 MiB to pools in host memory
        without a slab, page after page, in one job, with one request for the leases of all.

        Args:
            keys: the pages to copy.
            blocks: block numbers, the same for all shards.
            parts: for each shard where the engine keeps K and V of it, and the shard.
            order: see :meth:`restore_to_kvpool`.

        Returns:
            One job for all, which restores the pages that all shards have, or one for each part.

        Raises:
            InvalidArgument: the blocks do not fit the keys or a pool.
            LayoutMismatch: a page is not a whole number of a pool's blocks.
        """
        return self._loads.restore_shards(self, keys, blocks, parts, order)

    def extract_from_kvpool(
        self, pool: KVPool, blocks: npt.ArrayLike, keys: PrefixKeys, shard: int = 0, *,
        ttl_s: float = 0.0, read_once: bool = False, no_store: bool = False,
        only: range | None = None,
    ) -> StoreJob[PutResult]:  # fmt: skip
        """Store pages from an engine's blocks, in the background.

        The engine must not change the blocks until the job has ended.

        With ``only``, several writers that hold the same pages (ranks, for example) share the work:
        each names its part, and all of them call this with the same keys at about the same time. A
        page waits up to a second for the page before it. If that page does not arrive, this writer
        stores all of ``keys`` itself, also in its calls of the next ten seconds.

        Args:
            pool: where the engine keeps K and V. If it is on a device, the job begins when the
                device has finished the work that the calling thread has queued on its current
                stream.
            blocks: block numbers, integers of any shape, in page order:
                ``pool.blocks_per_page(page_bytes[shard])`` for each key.
            keys: one key for each page.
            shard: index of the shard to which the pages belong.
            ttl_s: see :meth:`put`.
            read_once: see :meth:`put`.
            no_store: see :meth:`put`.
            only: indexes into ``keys`` of the pages that this writer stores, ascending; None = all.

        Returns:
            The job; its ``result()`` is what :meth:`put` returns, or raises what that raises.

        Raises:
            InvalidArgument: the blocks do not fit the keys or the pool.
            DeviceUnavailable: the pool is on a device that cannot be used.
            LayoutMismatch: a page is not a whole number of the pool's blocks.
        """
        size = self._size(shard)
        keep = Keep(ttl_s, read_once=read_once, memory_only=no_store)
        stores = self._resources.stores
        if pool.device != "cpu":
            table = pool.table(blocks, size, len(keys))
            there = self._resources.devices.blocks(pool, table)
            return StoreJob(
                stores, lambda: self.put_pieces(keys, there, shard, keep, only), blocks=there
            )
        source = pool.pieces(blocks, size, len(keys))
        return StoreJob(stores, lambda: self.put_pieces(keys, source, shard, keep, only))

    def extract_shards(
        self, parts: Sequence[tuple[KVPool, npt.ArrayLike, PrefixKeys, int]]
    ) -> StoreJob[list[PutResult | KVStoreError]]:
        """Store pages of several shards from an engine's blocks, in the background.

        It is :meth:`extract_from_kvpool` for each, with fewer requests: for slots of all shards
        together, and to commit all.

        Args:
            parts: for each shard the pool in host memory, the blocks, the keys, and the shard.

        Returns:
            The job; its ``result()`` has for each part what :meth:`put` returns, or raises.

        Raises:
            InvalidArgument: the blocks do not fit the keys or the pool, or it is on a device.
            LayoutMismatch: a page is not a whole number of the pool's blocks.
        """
        asked = []
        for pool, blocks, keys, shard in parts:
            if pool.device != "cpu":
                raise InvalidArgument("parts", f"a pool is on {pool.device}")
            asked.append(PoolPages(pool, blocks, self._size(shard), len(keys)))
        pages = [
            ShardPages(keys, pieces, shard)
            for (_, _, keys, shard), pieces in zip(parts, pieces_of_each(asked), strict=True)
        ]
        return StoreJob(self._resources.stores, lambda: self._put_shards(pages))

    def prefetch(self, keys: PrefixKeys, shard: int = 0) -> StoreJob[int]:
        """Load pages from the SSD tier, and from other nodes, into host memory, in the background.

        They are not pinned and may be evicted again.

        Args:
            keys: the pages to load.
            shard: the shard to load.

        Returns:
            The job; its ``result()`` is the number of leading pages that are in memory.
        """
        self._size(shard)

        def run() -> int:
            there = 0
            for start, stop in self._batches(len(keys), shard):
                count = self._loads.warm(keys[start:stop], shard, lambda: None)
                there += count
                if count < stop - start:
                    break
            return there

        return StoreJob(self._resources.slow_loads, run)

    # ---- copying ----------------------------------------------------------------------------

    def _put_shards(self, parts: Sequence[ShardPages]) -> list[PutResult | KVStoreError]:
        """Put pages of several shards, as many together as a batch may have."""
        batches: list[list[ShardPages]] = [[]]
        for part in parts:
            if batches[-1] and self._share([*batches[-1], part]) > 1.0:
                batches.append([])
            batches[-1].append(part)
        return [result for batch in batches for result in self._put_batch(batch)]

    def _share(self, parts: Sequence[ShardPages]) -> float:
        """The pages of these parts, as a share of what one message may reserve."""
        return sum(len(part.keys) / self.batch_pages(part.shard) for part in parts)

    def _put_batch(self, parts: Sequence[ShardPages]) -> list[PutResult | KVStoreError]:
        if len(parts) == 1:  # perhaps a single page, for which a slot is reserved
            return [self._put_rest(parts[0], PutResult(0, refused=len(parts[0].keys)))]
        try:
            begun = self._stores.put_together(parts, Keep(), self._resources.link)
        except KVStoreError as error:
            return [error] * len(parts)
        return [
            self._put_rest(part, result)
            if isinstance(result, PutResult) and result.refused else result
            for part, result in zip(parts, begun, strict=True)
        ]  # fmt: skip

    def _put_rest(self, part: ShardPages, begun: PutResult) -> PutResult | KVStoreError:
        """Put the pages that were refused, which are the last ones: slots may become free."""
        start = len(part.keys) - begun.refused
        source = part.source.pages(start, len(part.keys))
        try:
            rest = self.put_pieces(part.keys[start:], source, part.shard)
        except KVStoreError as error:
            return error
        return summed([begun._replace(refused=0), rest])

    def numbers(self, link: NodeLink | None = None) -> Opened:
        """Space and shard numbers on the current connection; opens the space after a reconnect."""
        link = link or self._resources.link
        epoch = link.epoch
        opened = self._opened.get(id(link))
        if opened is None or opened.epoch != epoch:
            request = wire.OpenSpace(0, self.identity, list(self.shards))
            answer = link.request(request, self._resources.timeout_s, epoch)
            assert isinstance(answer, wire.SpaceOpened)
            opened = self._opened[id(link)] = Opened(epoch, answer.space, answer.shards)
        return opened

    def load_pieces(
        self, keys: PrefixKeys, target: mover.Pieces, shard: int,
        progress: mover.Progress | None, order: mover.Order, state: LoadState | None = None,
    ) -> int:  # fmt: skip
        """Copy and verify the leading run of pages; returns its length."""
        at_once = self.batch_pages(shard)
        state = state or LoadState()
        return self._loads.load(keys, target, shard, progress, order, at_once, state)

    def _on_device(self, keys: PrefixKeys, shards: Sequence[int] | None) -> int:
        """Length of the prefix of ``keys`` that the slab has for all shards."""
        promotion = self._resources.promotion
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
            raise InvalidArgument(
                "shard", f"{shard} is not one of the space's {len(self.page_bytes)} shards"
            )
        return self.page_bytes[shard]

    def batch_pages(self, shard: int) -> int:
        """Maximum pages that one message may pin or reserve."""
        quota = self._resources.link.quota_bytes or 2 * BATCH_BYTES
        most = min(BATCH_BYTES, quota // (LOADS + 1))  # loads and a store fit at the same time
        return max(1, min(wire.BATCH_KEYS_MAX, most // self._size(shard)))

    def _batches(
        self, count: int, shard: int, most: int = wire.BATCH_KEYS_MAX
    ) -> list[tuple[int, int]]:
        each = min(most, self.batch_pages(shard))
        return [(start, min(start + each, count)) for start in range(0, count, each)]
