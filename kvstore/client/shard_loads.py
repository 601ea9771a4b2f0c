"""Loads pages of several shards of a prompt together, with one wait for the node's leases."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.client.jobs import MustWaitError, RestoreJob, StoreJob
from kvstore.client.loads import LEASE_S, Loader, LoadState, _Leased, names
from kvstore.client.mapping import Use
from kvstore.client.resources import Opened
from kvstore.client.results import RestoreResult
from kvstore.mover.kvpool import KVPool, PoolPages, pieces_of_each
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKeys, page_seeds

if TYPE_CHECKING:
    from kvstore.client.space import Space


TOGETHER_BYTES_MAX: Final = 64 << 20
"""Bytes of a load above which each shard has a job of its own: several threads copy them."""


class ShardTarget(NamedTuple):
    """Where pages of one shard go.

    Attributes:
        pieces: in host memory, for each page.
        shard: index of the shard in the space.
    """

    pieces: mover.Pieces
    shard: int


class ShardLoader(Loader):
    """Loads pages of one space, also those of several shards in one job.

    That is one thread. What is saved are jobs, and all waits for leases but one, which is more
    than several threads gain for a short load.
    """

    def restore_shards(
        self, space: "Space", keys: PrefixKeys, blocks: npt.ArrayLike,
        parts: Sequence[tuple[KVPool, int]], order: mover.Order,
    ) -> list[RestoreJob]:  # fmt: skip
        """See :meth:`kvstore.client.space.Space.restore_shards`."""
        for pool, shard in parts:
            pool.table(blocks, self._pages[shard].page_bytes, len(keys))  # all are refused, or none
        size = len(keys) * sum(self._pages[shard].page_bytes for _, shard in parts)
        alone = len(parts) < 2 or order == "segment" or size > TOGETHER_BYTES_MAX
        alone = alone or self._resources.promotion is not None
        share = sum(1.0 / space.batch_pages(shard) for _, shard in parts)
        alone = alone or share > 1.0  # a page of all shards is more than may be leased at a time
        if alone or any(pool.device != "cpu" for pool, _ in parts):
            return [
                space.restore_to_kvpool(keys, pool, blocks, shard, order) for pool, shard in parts
            ]
        asked = [
            PoolPages(pool, blocks, self._pages[shard].page_bytes, len(keys))
            for pool, shard in parts
        ]
        targets = [
            ShardTarget(pieces, shard)
            for pieces, (_, shard) in zip(pieces_of_each(asked), parts, strict=True)
        ]
        return [self._together(keys, targets, int(1.0 / share))]

    def _together(
        self, keys: PrefixKeys, targets: Sequence[ShardTarget], at_once: int
    ) -> RestoreJob:
        """Start a job that copies and verifies the leading run which all shards have.

        Args:
            keys: consecutive keys.
            targets: for each shard; the store has no slab.
            at_once: maximum pages of each shard leased at a time.
        """
        progress, state = mover.Progress(), LoadState()
        page_bytes = sum(self._pages[one.shard].page_bytes for one in targets)
        submitted, runs = perf_counter(), 0

        def run() -> RestoreResult:
            nonlocal runs
            state.may_wait = runs > 0  # the second time, it is on a thread that may wait
            runs += 1
            if state.may_wait and not progress.cancelled:
                part = keys[state.loaded : state.loaded + at_once]
                self._warm_shards(part, targets[1:], progress)
            began, waits, before = perf_counter(), self._resources.waits, state.loaded
            self._load_shards(keys, targets, progress, at_once, state)
            if self._resources.waits == waits:
                size = (state.loaded - before) * page_bytes
                self._note_load(size, perf_counter() - began)
            return RestoreResult(
                state.loaded, state.loaded * page_bytes, perf_counter() - submitted
            )

        resources = self._resources
        return RestoreJob(resources.loads, run, progress, layered=False, slow=resources.slow_loads)

    def _warm_shards(
        self, keys: PrefixKeys, targets: Sequence[ShardTarget], progress: mover.Progress
    ) -> None:
        """Let the node begin to bring these pages to memory; what fails is tried again later."""

        def warm(shard: int) -> None:
            if not progress.cancelled:
                self.warm(keys, shard, lambda: None)

        for _, shard in targets:
            StoreJob(self._resources.slow_loads, partial(warm, shard))

    def _load_shards(
        self, keys: PrefixKeys, targets: Sequence[ShardTarget], progress: mover.Progress,
        at_once: int, state: LoadState,
    ) -> None:  # fmt: skip
        """Load until a page is missing; ``state`` says how far that came."""
        try:
            whole = True
            while whole and state.loaded < len(keys) and not progress.cancelled:
                start, stop = state.loaded, min(state.loaded + at_once, len(keys))
                parts = [
                    one if stop - start == len(keys)
                    else one._replace(pieces=one.pieces.pages(start, stop))
                    for one in targets
                ]  # fmt: skip
                state.loaded += self._batch(
                    keys[start:stop], parts, progress, may_wait=state.may_wait
                )
                whole = state.loaded == stop
        except KVStoreError as error:
            self._resources.note_trouble(error)

    def _batch(
        self, keys: PrefixKeys, parts: Sequence[ShardTarget], progress: mover.Progress, *,
        may_wait: bool,
    ) -> int:  # fmt: skip
        """Copy the leading run of some pages; returns its length.

        Raises:
            KVStoreError: the node is away, or refuses a shard.
            MustWaitError: pages are to be brought to memory, and the load may not wait.
        """
        link, count = self._resources.link, len(keys)
        # Open the space before using the memory, so that both belong to the same connection.
        opened = self._numbers(link)
        # Pages that are read once stay, unless all shards have been copied.
        releases = [wire.Release(next(names), read=False) for _ in parts]
        with ExitStack() as undo:
            memory = undo.enter_context(link.moving())
            for release in releases:
                undo.callback(link.send_later, release, opened.epoch)
            leases = [release.lease for release in releases]
            answers = self._answers(opened, keys, parts, leases, may_wait=may_wait)
            for part, answer in zip(parts, answers, strict=True):
                count = min(count, self._copy(opened, memory, answer, keys, part, progress))
                if progress.cancelled:  # the other shards need not be waited for
                    return 0
            for release in releases:
                release.read = count > 0
        return count

    def _answers(
        self, opened: Opened, keys: PrefixKeys, parts: Sequence[ShardTarget],
        leases: Sequence[int], *, may_wait: bool,
    ) -> Iterator[wire.Acquired]:  # fmt: skip
        """The lease of each shard: one after the other if each may wait, else all together."""
        if may_wait:
            for (_, shard), lease in zip(parts, leases, strict=True):
                yield self.acquire(opened, keys, shard, lease, LoadState())
            return
        asked = [
            wire.Acquire(
                0, lease, opened.space, opened.shards[shard], keys.packed, int(LEASE_S * 1000),
                begins=not keys.parent, parent=keys.parent,
            )
            for (_, shard), lease in zip(parts, leases, strict=True)
        ]  # fmt: skip
        timeout_s = self._resources.timeout_s
        found: list[wire.Acquired] = []
        for answer in self._resources.link.request_all(asked, timeout_s, opened.epoch):
            if isinstance(answer, KVStoreError):
                raise answer
            assert isinstance(answer, wire.Acquired)
            found.append(answer)
        if any(answer.more for answer in found):
            raise MustWaitError
        yield from found

    def _copy(
        self, opened: Opened, memory: Use, answer: wire.Acquired, keys: PrefixKeys,
        part: ShardTarget, progress: mover.Progress,
    ) -> int:  # fmt: skip
        """Copy the leased pages of one shard; returns the length of the verified run."""
        pages = self._pages[part.shard]
        digests = np.frombuffer(answer.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        there = len(digests)
        if not there:
            return 0
        leased = _Leased(
            opened, memory, answer,
            memory.locate(answer.addresses, pages.page_bytes, write=False), digests,
            page_seeds(keys.packed[: there * KEY_BYTES], pages.seed),
        )  # fmt: skip
        target = part.pieces if there == len(keys) else part.pieces.pages(0, there)
        good = mover.scatter(
            leased.sources, pages.page_bytes, digests, leased.seeds, target, progress, "page"
        )
        return self._verified(leased, keys, part.shard, good, progress)
