"""All use of kvstore by the reference engine.

The engine calls these methods from its step thread; none blocks longer than one lookup:

* :meth:`StoreAdapter.begin` when a request is admitted: lookup, then a restore in the background;
* :meth:`StoreAdapter.poll` in each step: handles ended restores and puts;
* :meth:`StoreAdapter.offer` when pages are full: a put in the background;
* :meth:`StoreAdapter.flush` before a handoff is answered.

Two rules protect bytes. A job holds references to its blocks until it has *ended*, whatever happens
to its request. And blocks whose restore did not verify are zeroed before they are reused, because a
failed copy may have left anything in them.

One rule protects the engine: every :class:`KVStoreError` is handled here. It becomes a miss or a
skipped page, is counted, and is logged once per code.
"""

import hashlib
import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from engine_adapters.reference.jobs import PutJob, RestoreJobs, joint_result
from engine_adapters.reference.metrics import Metrics
from engine_adapters.reference.pool import PagedPool
from engine_adapters.reference.prefix_tree import BlockAllocator
from engine_adapters.reference.request import Request, State
from engine_adapters.reference.restoring import Chosen, RestoreChoices
from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.results import MISS, Hit, PutResult, RestoreResult
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.engine.conversations import RetainedConversations
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.load_choice import PromptsAhead
from kvstore.engine.opening import Opening
from kvstore.engine.options import Loads, Retain
from kvstore.engine.pace import Pace
from kvstore.engine.transfer import Transfer
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import PrefixKeys, ShardSpec, SpaceIdentity

_log = logging.getLogger(__name__)

HANDOFF_SCOPE: Final = "handoff"
TAIL_TTL_S: Final = 60.0
PUTS_MAX: Final = 16
"""Maximum puts in flight; further pages wait for one to end, until their request ends."""
RESTORE_TIMEOUT_S: Final = 5.0
"""After this time a restore is cancelled."""
FLUSH_TIMEOUT_S: Final = 10.0
"""Maximum wait of a handoff for its puts."""


class _Spaces(NamedTuple):
    shared: Space
    handoff: Space


class Ready(NamedTuple):
    """A request whose lookup and restore have ended; the K/V of ``tokens`` are in the pool."""

    request: Request
    tokens: int


class StoreAdapter:
    """One engine's use of one store. All calls come from the engine's step thread."""

    def __init__(
        self, store: KVStore, identity: SpaceIdentity, shards: Sequence[ShardSpec],
        pool: PagedPool, allocator: BlockAllocator, metrics: Metrics, loads: Loads, retain: Retain,
    ) -> None:  # fmt: skip
        """Create the adapter; the node need not run.

        Args:
            store: the store; closed by :meth:`close`.
            identity: identity of the shared pages; handoffs use it with another scope.
            shards: of each rank of the pool, its part of each page.
            pool: the engine's pool; jobs use its addresses, so it must outlive them.
            allocator: allocator of the pool.
            metrics: the engine's metrics.
            loads: what is restored of a hit.
            retain: how long the pages of a conversation are kept.
        """
        self._store = store
        private = msgspec.structs.replace(identity, scope=HANDOFF_SCOPE)
        self._shared = Opening(store, identity, shards, time.monotonic, log=_log)
        self._handoff = Opening(store, private, shards, time.monotonic, logging.DEBUG, _log)
        self._page_bytes = shards[0].page_bytes(identity)
        self._page_tokens = identity.page_tokens
        self._page_blocks = identity.page_tokens // pool.block_tokens
        self._pool = pool
        self._kvpools = [pool.for_transfers(rank) for rank in range(pool.ranks)]
        self._allocator = allocator
        self._metrics = metrics
        self._pace = Pace()
        self._conversations = RetainedConversations(self._shared.get, retain)
        self._counts = AdapterCounts()
        page_bytes = self._page_bytes * len(self._kvpools)
        self._choices = RestoreChoices(
            self._lookup, self._pace, loads, self._page_tokens, page_bytes, self._counts.add
        )
        self._numbers = itertools.count(1)
        self._restores: list[RestoreJobs] = []
        self._puts: list[PutJob] = []
        self._logged: set[str] = set()
        self._troubles: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        """Whether there is something to poll for."""
        return bool(self._choices.waiting or self._restores or self._puts)

    @property
    def takes_pages(self) -> bool:
        """Whether the node takes pages, as far as is known."""
        return self._open() is not None

    @property
    def node_name(self) -> str:
        """Name of the store's node; empty while unknown."""
        return self._store.node_name

    # Store to engine

    def begin(self, request: Request, now: float, others: Callable[[], PromptsAhead]) -> bool:
        """Look up a longer prefix than the local one.

        Args:
            request: has its blocks.
            now: monotonic seconds.
            others: returns the prompts that are computed before it.

        Returns:
            True if the request must wait until :meth:`poll` returns it; it keeps its blocks.
        """
        chosen = self._choices.begin(request, others, now)
        return chosen is None or self._start_restore(request, chosen, now)

    def begin_beside(self, request: Request, now: float) -> int:
        """Restore what the node has of the beginning of a request whose rest is pushed.

        Returns:
            How many tokens at the beginning need not be pushed. If it is more than
            ``request.computed``, :meth:`poll` returns the request.
        """
        hit = self._lookup(request)._replace(pending=0, remote=0)  # those are pushed as well
        chosen = self._choices.at_once(request, hit, now)
        request.stored_pages = hit.pages
        if not self._start_restore(request, chosen, now):
            return request.computed
        pages = self._restores[-1].first_page + self._restores[-1].pages
        return pages * self._page_tokens

    def poll(self, now: float) -> list[Ready]:
        """Advance all jobs in flight; never blocks.

        Returns:
            Requests that can continue, each once.
        """
        self._count_troubles()
        self._metrics.note_loads(self._counts.take())
        ready = [
            Ready(request, request.computed)
            for request, chosen in self._choices.poll(now)
            if not self._start_restore(request, chosen, now)
        ]
        for restore in [r for r in self._restores if self._has_ended(r, now)]:
            self._restores.remove(restore)
            tokens = self._end_restore(restore, now)
            if restore.request.state in (State.RESTORING, State.TRANSFER):
                ready.append(Ready(restore.request, tokens))
        for put in [p for p in self._puts if all(job.wait(0.0) for job in p.jobs)]:
            self._puts.remove(put)
            self._end_put(put, now)
        self._conversations.advance(put.request.id for put in self._puts)
        return ready

    def abort(self, request: Request) -> None:
        """Cancel a request; its jobs keep their blocks until they have ended."""
        self._choices.forget(request)
        for restore in self._restores:
            if restore.request is request:
                restore.cancel()

    def _lookup(self, request: Request) -> Hit:
        spaces = self._open()
        if spaces is None or not len(request.keys):
            return MISS
        try:
            return spaces.shared.lookup(request.keys, **self._promise(request))
        except KVStoreError as error:
            self._trouble("lookup", error)
            return MISS

    def _promise(self, request: Request) -> dict[str, Any]:
        """The node where the prefill engine has stored pages, and how many."""
        handoff = request.from_handoff
        if handoff is None:
            return {}
        held = handoff.promised_pages(self._page_tokens)
        return {"holder": handoff.kvstore_node, "held": held}

    def _start_restore(self, request: Request, chosen: Chosen, now: float) -> bool:
        """Restore pages beyond the local prefix; returns False if there are none."""
        first, hit = request.computed // self._page_tokens, chosen.hit
        there = hit.pages + hit.remote
        pages = max(first, min(there, (len(request.tokens) - 1) // self._page_tokens))
        handoff, request.from_handoff = request.from_handoff, None  # a tail can be read once
        restore = RestoreJobs(
            request=request,
            first_page=first,
            pages=pages - first,
            remote=max(0, pages - max(first, hit.pages)),
            page_jobs=[],
            blocks=request.blocks[first * self._page_blocks : pages * self._page_blocks],
            tail_jobs=[],
            tail_blocks=[],
            tail_tokens=0,
            deadline=now + RESTORE_TIMEOUT_S,
            number=next(self._numbers),
        )
        spaces = self._open()
        if spaces is None:
            return False
        if restore.pages:
            keys = request.keys[first:pages]
            restore.page_jobs = self._submit_restore(spaces.shared, keys, restore.blocks)
        # The tail is useful only after all full pages of the prompt.
        full, tail_tokens = divmod(request.prompt_tokens, self._page_tokens)
        if handoff is not None and handoff.tail_key and tail_tokens and pages == full:
            tail = request.blocks[pages * self._page_blocks : (pages + 1) * self._page_blocks]
            keys = _tail_key(handoff.handoff_id, request)
            self._find_tail(spaces.handoff, keys, handoff)
            restore.tail_jobs = self._submit_restore(spaces.handoff, keys, tail)
            restore.tail_blocks, restore.tail_tokens = tail, tail_tokens
        if not restore.jobs():
            return False
        self._allocator.retain(restore.blocks + restore.tail_blocks)
        self._restores.append(restore)
        if chosen.load.choice is not None:
            self._choices.decisions.began(restore.number, chosen.load, now)
        return True

    def _find_tail(self, space: Space, keys: PrefixKeys, handoff: Transfer) -> None:
        """Tell the node where the tail is: no directory knows a page that was stored just now."""
        if handoff.kvstore_node in ("", self.node_name):
            return
        try:
            space.lookup(keys, holder=handoff.kvstore_node, held=1)
        except KVStoreError as error:
            self._trouble("lookup", error)

    def _submit_restore(
        self, space: Space, keys: PrefixKeys, blocks: list[int]
    ) -> list[RestoreJob]:
        """A job for each rank; none for those after one that is refused."""
        started: list[RestoreJob] = []
        try:
            for rank, pool in enumerate(self._kvpools):
                started.append(space.restore_to_kvpool(keys, pool, blocks, rank))
        except KVStoreError as error:
            self._trouble("restore", error)
        return started

    def _has_ended(self, restore: RestoreJobs, now: float) -> bool:
        if all(job.wait(0.0) for job in restore.jobs()):
            return True
        if now >= restore.deadline and not restore.cancelled:
            self._choices.decisions.late(restore.number, now)
            restore.cancel()
        return False

    def _end_restore(self, restore: RestoreJobs, now: float) -> int:
        """Handle an ended restore; returns the number of tokens whose K/V are in the pool."""
        restored = self._restore_outcome(restore.page_jobs)
        tail = self._restore_outcome(restore.tail_jobs)
        whole = restored.pages == restore.pages and not restore.cancelled
        self._choices.decisions.ended(restore.number, restored.seconds, whole=whole)
        pages = min(restored.pages, restore.pages)
        size_bytes = restored.size_bytes + tail.size_bytes
        unverified = restore.blocks[pages * self._page_blocks :]
        if not tail.pages:
            unverified += restore.tail_blocks
        if unverified:
            self._pool.zero(unverified)
        self._allocator.release(restore.blocks + restore.tail_blocks)
        request, end = restore.request, restore.first_page + pages
        if restore.remote:  # what did not come is computed, and then stored here
            request.stored_pages = min(request.stored_pages, end)
        fetched = max(0, pages - (restore.pages - restore.remote))
        self._metrics.remote_tokens.inc(fetched * self._page_tokens)
        tokens = pages * self._page_tokens
        if tail.pages and pages == restore.pages:
            tokens += restore.tail_tokens
        timings = request.timings
        timings.restored_tokens += tokens
        timings.restored_bytes += size_bytes
        self._metrics.restore_bytes.inc(size_bytes)
        self._metrics.restore_seconds.inc(now - restore.deadline + RESTORE_TIMEOUT_S)
        return restore.first_page * self._page_tokens + tokens

    def _restore_outcome(self, jobs: Sequence[RestoreJob]) -> RestoreResult:
        """The pages that are there at all ranks."""
        results: list[RestoreResult] = []
        try:
            results += [job.result(0.0) for job in jobs]
        except KVStoreError as error:
            self._trouble("restore", error)
        return joint_result(results) if len(results) == len(self._kvpools) else RestoreResult(0)

    # Engine to store

    def store_full_pages(self, request: Request, now: float, *, final: bool = False) -> None:
        """Store the full pages that were not stored yet, in the background.

        Args:
            request: its K/V up to ``computed`` are in the pool and will not change.
            now: monotonic seconds.
            final: also pages with output tokens; pages over the limit are skipped.
        """
        limit = request.computed if final else min(request.computed, request.prompt_tokens)
        first, pages = request.stored_pages, limit // self._page_tokens
        if pages <= first:
            return
        spaces = self._open()
        if spaces is None or len(self._puts) >= PUTS_MAX:
            if final:
                self._metrics.store_pages.labels("skipped").inc(pages - first)
            return
        blocks = request.blocks[first * self._page_blocks : pages * self._page_blocks]
        request.stored_pages = pages
        self._submit_put(spaces.shared, request, request.keys[first:pages], blocks, now)

    def finished(self, request: Request) -> None:
        """A request has ended: keep its pages when its puts have, if it is of a conversation."""
        pages = request.stored_pages
        self._conversations.finished(request.id, request, lambda: request.keys[:pages])
        self._conversations.advance(put.request.id for put in self._puts)

    def flush(self, request: Request, now: float) -> bool:
        """Store everything that a handoff of ``request`` needs.

        Returns:
            True if the answer can be sent: every put has ended, or the time limit has passed.
        """
        self.store_full_pages(request, now)
        if not request.handoff_id:
            self._offer_tail(request, now)
        sent = bool(request.handoff_id) and (
            request.stored_pages >= request.prompt_tokens // self._page_tokens
        )
        if sent and all(put.request is not request for put in self._puts):
            return True
        refused = self._open() is None
        return refused or now - request.phase_began > FLUSH_TIMEOUT_S

    def _offer_tail(self, request: Request, now: float) -> None:
        """Store the prompt's unfilled last page under a key that only the answer makes known."""
        spaces = self._open()
        if spaces is None or len(self._puts) >= PUTS_MAX:
            return
        request.handoff_id = uuid.uuid4().hex
        full, tokens = divmod(request.prompt_tokens, self._page_tokens)
        if not tokens:
            return
        blocks = request.blocks[full * self._page_blocks : (full + 1) * self._page_blocks]
        end = (full + 1) * self._page_tokens
        self._pool.zero_slots(self._pool.slots(request.blocks, request.prompt_tokens, end))
        key = _tail_key(request.handoff_id, request)
        name = key.packed.hex()
        self._submit_put(spaces.handoff, request, key, blocks, now, tail_key=name)

    def _submit_put(
        self, space: Space, request: Request, keys: PrefixKeys, blocks: list[int], now: float,
        tail_key: str | None = None,
    ) -> None:  # fmt: skip
        ttl_s, read_once = TAIL_TTL_S if tail_key else 0.0, tail_key is not None
        jobs: list[StoreJob[PutResult]] = []
        try:
            for rank, pool in enumerate(self._kvpools):
                job = space.extract_from_kvpool(
                    pool, blocks, keys, rank, ttl_s=ttl_s, read_once=read_once
                )
                jobs.append(job)
        except KVStoreError as error:
            self._trouble("store", error)
            refused = len(self._kvpools) - len(jobs)
            self._metrics.store_pages.labels("failed").inc(refused * len(keys))
        if jobs:
            self._allocator.retain(blocks)
            self._puts.append(PutJob(request, jobs, blocks, len(keys), now, tail_key))

    def _end_put(self, put: PutJob, now: float) -> None:
        self._allocator.release(put.blocks)
        self._metrics.store_seconds.inc(now - put.began)
        stored = 0
        for job in put.jobs:
            try:
                result = job.result(0.0)
            except KVStoreError as error:
                self._trouble("store", error)
                self._metrics.store_pages.labels("failed").inc(put.pages)
                continue
            stored += 1
            self._metrics.store_bytes.inc(result.stored * self._page_bytes)
            self._metrics.store_pages.labels("stored").inc(result.stored)
            self._metrics.store_pages.labels("existing").inc(result.existing + result.pending)
        if put.tail_key and stored == len(self._kvpools):
            put.request.tail_key = put.tail_key

    # Other

    def observe_prefill(self, tokens: int, pairs: float, seconds: float, now: float) -> None:
        """Measure a step that computed prompts, and report its speed from time to time.

        Args:
            tokens: tokens of prompts that it computed.
            pairs: see :meth:`Pace.note_step`.
            seconds: it took so long.
            now: monotonic seconds.
        """
        if self._pace.note_step(tokens, seconds, pairs) and self._pace.report_due(now):
            try:
                self._store.report_prefill(self._pace.seconds_per_token)
            except KVStoreError as error:
                self._trouble("report", error)

    def close(self, timeout_s: float) -> bool:
        """Cancel restores, wait for all jobs, then close the store.

        Blocks of ended jobs are released. Call it after the step thread has ended.

        Returns:
            False if a job still runs; then the pool's memory must not be freed.
        """
        self._choices.forget_all()
        for restore in self._restores:
            restore.cancel()
        jobs: list[RestoreJob | StoreJob[PutResult]] = []
        jobs += [job for restore in self._restores for job in restore.jobs()]
        jobs += [job for put in self._puts for job in put.jobs]
        share = timeout_s / max(len(jobs), 1)
        ended = [job.wait(share) for job in jobs]
        self.poll(time.monotonic())
        self._store.close()
        return all(ended)

    def _open(self) -> _Spaces | None:
        """Both spaces; None while the store refuses one of them."""
        shared = self._shared.get()
        handoff = self._handoff.get() if shared is not None else None
        return None if shared is None or handoff is None else _Spaces(shared, handoff)

    def _count_troubles(self) -> None:
        """Count reads that became misses because of an error."""
        totals: Counter[str] = Counter()
        for troubles in (self._store.troubles, self._shared.troubles, self._handoff.troubles):
            for code, count in list(troubles.items()):
                totals[code] += count
        for code, count in totals.items():
            self._metrics.store_errors.labels(code).inc(count - self._troubles[code])
        self._troubles = totals

    def _trouble(self, doing: str, error: KVStoreError) -> None:
        self._metrics.store_errors.labels(error.code).inc()
        if error.code not in self._logged:
            self._logged.add(error.code)
            _log.warning("store, %s: %s (%s; logged once)", doing, error, error.code)


def _tail_key(handoff_id: str, request: Request) -> PrefixKeys:
    """The key of a prompt's unfilled last page.

    It names the prompt: a router may mix handoffs up, and a client may write what it likes. Then
    nothing is found, and the tail is computed.
    """
    tokens = np.asarray(request.tokens[: request.prompt_tokens], dtype="<i8").tobytes()
    name = hashlib.sha256(handoff_id.encode("utf-8", "surrogatepass")).digest()
    return PrefixKeys(hashlib.sha256(name + tokens).digest())
