"""Turns the events of each worker into changes of the index's table. Pure.

A :class:`WorkerFeed` turns one worker's events into changes. Those of all workers are gathered and
applied together: the table takes many at once far faster than few.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.index.apply import EngineScope, EventIngest, KvGroup
from kvstore.index.batch import ChangeBatch
from kvstore.index.blocks import BlockLimits, Workspace
from kvstore.index.control import Source
from kvstore.index.directory import PageHolder
from kvstore.index.expected import ExpectedChange
from kvstore.index.scope import key_chains, scope_seed
from kvstore.index.writer import IndexWriter

EXPECTED: Final = "EXPECTED"
"""Medium of pages that a worker will probably have."""
CHANGES_MAX: Final = 8_192
"""Changes that are gathered before they are applied."""
_ROOMY: Final = 0.9
"""A table that is filled up to this part has room for a node's pages."""
_SWEEP_SLOTS: Final = 200_000
"""Slots that one step of cleaning up looks at: a millisecond."""


class PageFeeds:
    """The feeds of all workers, and the table that they change.

    Args:
        writer: writes the table.
        secret: seeds all chain values; readers of the table have it too.
    """

    def __init__(self, writer: IndexWriter, secret: int) -> None:
        self._writer = writer
        self._space = Workspace(secret)
        self._batch = ChangeBatch()

    def __len__(self) -> int:
        return len(self._writer)

    @property
    def sets(self) -> int:
        """Distinct sets of holders."""
        return self._writer.stats().sets

    @property
    def left_out(self) -> int:
        """Pages of all workers that were left out because something was full."""
        stats = self._writer.stats()
        return stats.left_out + stats.refused_holders + stats.lost

    @property
    def has_room(self) -> bool:
        """Whether many more pages fit."""
        return len(self._writer) <= _ROOMY * self._writer.layout.entries_max

    def feed(self, source: Source, blocks_max: int) -> "WorkerFeed":
        """A feed for one source; the worker has no other.

        Args:
            source: whose events.
            blocks_max: maximum blocks of an engine with its own hashes.
        """
        return WorkerFeed(self, source, blocks_max)

    def flush(self) -> None:
        """Apply the gathered changes."""
        if self._batch.used:
            self._writer.apply(*self._batch.changes())
            self._batch.clear()

    def flush_if_full(self) -> None:
        """Apply the gathered changes, if there are enough."""
        if self._batch.used >= CHANGES_MAX:
            self.flush()

    def drop(self, worker: str) -> None:
        """Drop all entries of a worker; they do not count from now on."""
        self.flush()
        self._writer.drop(worker)

    def expect(self, change: ExpectedChange) -> None:
        """Apply the beginning or the end of an expectation."""
        holder = self._writer.holder(PageHolder(change.worker, EXPECTED, "", 0))
        if holder is not None:
            count = len(change.chains)
            holders = np.full(count, holder, dtype=np.int32)
            self._writer.apply(change.chains, holders, np.full(count, change.begin))

    def advance(self, now_ns: int) -> bool:
        """Apply the gathered changes, show that the writer lives, and clean up a part of the table.

        Args:
            now_ns: the monotonic clock.

        Returns:
            Whether there is more to clean up.
        """
        self.flush()
        self._writer.beat(now_ns)
        return self._writer.sweep(_SWEEP_SLOTS)

    def pages(self) -> dict[str, dict[str, int]]:
        """Pages by worker and medium; of several shards or KV groups, the maximum."""
        most: dict[str, Counter[str]] = {}
        for holder, count in self._writer.pages().items():
            of_worker = most.setdefault(holder.worker, Counter())
            of_worker[holder.medium] = max(of_worker[holder.medium], count)
        return {worker: dict(counts) for worker, counts in most.items()}

    # What the feeds use

    def holder(self, worker: str, medium: str, shard: str, group: int) -> int | None:
        """Number of a holder; None if there are too many."""
        return self._writer.holder(PageHolder(worker, medium, shard, group))

    def live(self, worker: str, *, counts: bool) -> None:
        """Whether a worker's pages count, with all that was gathered until now."""
        self.flush()
        self._writer.set_live(worker, live=counts)

    def lacks(self, worker: str) -> int:
        """Pages of a worker that were left out because something was full, since it was dropped."""
        return self._writer.lacks(worker)

    @property
    def workspace(self) -> Workspace:
        """The state that all feeds share."""
        return self._space

    @property
    def batch(self) -> ChangeBatch:
        """The gathered changes."""
        return self._batch


class WorkerFeed:
    """The events of one worker, and all of its entries.

    Attributes:
        batches: batches applied.
    """

    def __init__(self, feeds: PageFeeds, source: Source, blocks_max: int) -> None:
        self._feeds = feeds
        self._worker = source.worker
        scope = EngineScope(source.domain, None, source.block_tokens)
        self._ingest = EventIngest(
            source.worker, scope, feeds.holder, self._dropped, feeds.workspace,
            BlockLimits(blocks=blocks_max),
        )  # fmt: skip
        self._counts = True
        self._ended = False
        self.batches = 0
        self.live(counts=False)

    @property
    def workspace(self) -> Workspace:
        """The buffers for decoding events."""
        return self._feeds.workspace

    @property
    def published(self) -> float:
        """Publication time of the newest batch, seconds since the epoch."""
        return self._ingest.published

    @property
    def skipped(self) -> int:
        """Events that were not applied."""
        return self._ingest.skipped + self._ingest.without_holder

    @property
    def unmapped(self) -> int:
        """Blocks that could not be mapped to tokens, or have another size than the others."""
        blocks = self._ingest.blocks
        return blocks.unmapped + blocks.dropped + self._ingest.other_size

    @property
    def waiting(self) -> int:
        """Blocks whose parent is not known yet."""
        return self._ingest.blocks.waiting

    @property
    def left_out(self) -> int:
        """Its pages that were left out because something was full, since :meth:`clear`."""
        return self._feeds.lacks(self._worker)

    @property
    def has_room(self) -> bool:
        """Whether many more pages fit into the table."""
        return self._feeds.has_room

    @property
    def kind(self) -> str:
        """``keys`` or ``tokens``; empty until an engine's event has shown it."""
        return self._ingest.kind or ""

    @property
    def block_tokens(self) -> int:
        """Tokens in a block of an engine; 0 until an event has shown it."""
        return self._ingest.block_tokens

    @property
    def groups(self) -> dict[int, KvGroup]:
        """KV groups of an engine."""
        return self._ingest.groups

    @property
    def full(self) -> bool:
        """Never: changes that do not fit are left out and counted."""
        return False

    def apply(self, payload: bytes) -> Iterator[None]:
        """Apply one batch in steps, so that the caller can yield between them.

        Raises:
            UnreadableError: the payload cannot be read; some of its events may have been applied.
        """
        if self._ended:
            return
        for _ in self._ingest.apply(payload, self._feeds.batch):
            self._feeds.flush_if_full()
            yield
        self._feeds.flush_if_full()
        self.batches += 1

    def add(self, space: str, shard: str, medium: str, keys: bytes) -> None:
        """Add pages of a snapshot.

        Args:
            space: hex digest of their space.
            shard: digest of their shard, as in events.
            medium: their medium.
            keys: their prefix keys of 32 bytes, packed.
        """
        holder = self._ingest.listed(medium, shard) if not self._ended else None
        if holder is None:
            return
        chains = self.chains_of(space, keys)
        batch = self._feeds.batch
        at = batch.make_room()
        batch.chains.array[at : at + len(chains)] = chains
        batch.add(len(chains), holder, stored=True)
        self._feeds.flush_if_full()

    def chains_of(self, space: str, keys: bytes) -> npt.NDArray[np.uint64]:
        """Chain values of prefix keys in a space."""
        return key_chains(keys, scope_seed(self._feeds.workspace.secret, "keys", space))

    def flush(self) -> None:
        """Apply the gathered changes, so that the table shows them."""
        self._feeds.flush()

    def clear(self) -> None:
        """Drop all entries of this worker."""
        if not self._ended:
            self._ingest.clear()

    def _dropped(self, worker: str) -> None:
        self._feeds.drop(worker)
        if not self._counts:
            self._feeds.live(worker, counts=False)

    def live(self, *, counts: bool) -> None:
        """Whether its pages count."""
        if not self._ended and self._counts != counts:
            self._counts = counts
            self._feeds.live(self._worker, counts=counts)

    def end(self) -> None:
        """Drop all entries; nothing is applied any more."""
        self.clear()
        self._ended = True
