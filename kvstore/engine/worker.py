"""A worker's half: moves pages between the engine's KV memory and the store.

Moves run in the store's background threads; the engine's step only starts them and asks which have
ended. A load that a request should not wait for any longer is given up: the request goes on without
it, and the blocks stay held (by the scheduler) until the job has really ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.results import PutResult
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.messages import Blocks, Load, Report, Store
from kvstore.engine.opening import Opening
from kvstore.errors import KVStoreError
from kvstore.mover import Order
from kvstore.mover.kvpool import KVPool

IDLE_WAIT_S: Final = 0.005
"""Longest wait for the oldest load in a step that computes nothing. The engine repeats such steps
as fast as it can, and its two busy processes take the cores from the load; a request that comes
meanwhile waits no longer than this."""
_END_TIMEOUT_S: Final = 60.0
"""Longest wait, in a step, for the end of a layer-wise load that was given up."""


class GroupMemory(NamedTuple):
    """One KV group in this worker.

    Attributes:
        pool: its memory.
        shard: its index among the space's shards.
        page_tokens: tokens in a page.
        block_tokens: tokens in a block.
    """

    pool: KVPool
    shard: int
    page_tokens: int
    block_tokens: int

    @property
    def page_blocks(self) -> int:
        """Blocks in a page."""
        return self.page_tokens // self.block_tokens


class StepOutcome(NamedTuple):
    """What the engine must be told after a step.

    Attributes:
        received: requests whose loads are over, for good or not.
        failed: those among them that must be computed from the start.
        invalid_blocks: blocks that were to be loaded and hold nothing valid.
        report: for the scheduler side.
    """

    received: set[str]
    failed: set[str]
    invalid_blocks: set[int]
    report: Report


@dataclass(slots=True)
class _Loading:
    """A load in flight.

    Attributes:
        parts: what is restored in each group.
        refused: something of it could not be begun, or was computed on before it was there: no page
            of it counts.
        late: its request does not wait any more.
    """

    load: Load
    parts: list[tuple[Blocks, RestoreJob]]
    began: float
    refused: bool = False
    late: bool = False

    @property
    def deadline(self) -> float:
        return self.began + self.load.wait_s


@dataclass(slots=True)
class _Storing:
    store: Store
    jobs: list[StoreJob[PutResult]]
    sizes: list[int]
    began: float


@dataclass(slots=True)
class WorkerSide:
    """Starts and watches moves; all calls from the worker's step thread.

    Attributes:
        opening: gives the space.
        groups: the worker's KV memory, in the order of ``EngineFacts.groups``.
        clock: monotonic seconds.
    """

    opening: Opening
    groups: Sequence[GroupMemory]
    clock: Callable[[], float]
    counts: AdapterCounts = field(default_factory=AdapterCounts)
    _loads: list[_Loading] = field(default_factory=list)
    _stores: list[_Storing] = field(default_factory=list)

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Begin to restore."""
        for load in loads:
            loading = _Loading(load, [], self.clock())
            self._loads.append(loading)
            for blocks in load.blocks:
                if not blocks.blocks:
                    continue
                job = self._restore(load, blocks)
                if job is None:
                    loading.refused = True
                else:
                    loading.parts.append((blocks, job))

    def wait_layer(self, place: int, layer: int) -> None:
        """Wait until a layer of all layer-wise loads is there, or is known not to come.

        A load whose layer the engine computes on before it is there counts for nothing, also if it
        ends well after that.

        Args:
            place: the layer's group.
            layer: its index in the group.
        """
        for loading in self._loads:
            if not loading.load.layerwise:
                continue
            for blocks, job in loading.parts:
                if blocks.group != place:
                    continue
                there = job.wait_layer(layer, max(0.0, loading.deadline - self.clock()))
                if not (there or job.done or loading.refused):
                    loading.refused = True
                    self.counts.add("load_timeouts")

    def start_stores(self, stores: Sequence[Store]) -> None:
        """Begin to store; the blocks do not change until the scheduler hears of the end."""
        space = self.opening.get()
        for store in stores:
            storing = _Storing(store, [], [], self.clock())
            self._stores.append(storing)
            if space is None:
                self.counts.add("store_failures")
                continue
            for blocks in store.blocks:
                memory = self.groups[blocks.group]
                first, count = blocks.first, len(blocks.blocks) // memory.page_blocks
                keys = store.keys[first : first + count]
                try:
                    job = space.extract_from_kvpool(memory.pool, blocks.blocks, keys, memory.shard)
                except KVStoreError as error:
                    self.counts.add("store_failures")
                    self._note("store", error)
                    continue
                storing.jobs.append(job)
                storing.sizes.append(space.page_bytes[memory.shard])

    def poll(self, *, idle: bool = False) -> StepOutcome:
        """What has ended. Layer-wise loads are waited for: they end with their step.

        Args:
            idle: the step computes nothing, so that a short wait holds up nobody.
        """
        outcome = StepOutcome(set(), set(), set(), Report())
        if idle:
            self._wait_idle()
        for loading in list(self._loads):
            self._poll_load(loading, outcome)
        for storing in list(self._stores):
            if all(job.done for job in storing.jobs):
                self._stores.remove(storing)
                outcome.report.end(storing.store.job, self._stored(storing))
        return outcome

    def _restore(self, load: Load, blocks: Blocks) -> RestoreJob | None:
        space = self.opening.get()
        if space is None:
            return None
        memory = self.groups[blocks.group]
        count = len(blocks.blocks) // memory.page_blocks
        keys = load.keys[blocks.first : blocks.first + count]
        order: Order = "segment" if load.layerwise else "page"
        try:
            return space.restore_to_kvpool(keys, memory.pool, blocks.blocks, memory.shard, order)
        except KVStoreError as error:
            self._note("load", error)
            return None

    def _wait_idle(self) -> None:
        waiting = [loading for loading in self._loads if not loading.late]
        if waiting:
            oldest = waiting[0]
            until = min(self.clock() + IDLE_WAIT_S, oldest.deadline)
            for _, job in oldest.parts:
                job.wait(max(0.0, until - self.clock()))

    def _poll_load(self, loading: _Loading, outcome: StepOutcome) -> None:
        load = loading.load
        left_s = loading.deadline - self.clock()
        # A layer-wise load ends with the step it was for: its last layer is there by now.
        wait_s = max(0.0, left_s) if load.layerwise else 0.0
        ended = all(job.wait(wait_s) for _, job in loading.parts)
        if not ended and not loading.late and (load.layerwise or left_s <= 0):
            for _, job in loading.parts:
                job.cancel()
            if load.layerwise:
                # The engine has computed on these blocks: no byte may come after this.
                ended = all(job.wait(_END_TIMEOUT_S) for _, job in loading.parts)
                if not ended:
                    self.opening.log.error(
                        "a cancelled load has not ended after %.0f s", _END_TIMEOUT_S
                    )
                    loading.refused = loading.late = True
                    self._finish(load, 0, outcome)
            else:
                loading.late = True
                self.counts.add("load_timeouts")
                outcome.received.add(load.request)
                outcome.failed.add(load.request)
                outcome.report.late.add(load.job)
        if not ended:
            return
        self._loads.remove(loading)
        pages, seconds = self._loaded(loading)
        outcome.report.end(load.job, pages, seconds)
        if not loading.late:
            self._finish(load, pages, outcome)

    def _finish(self, load: Load, pages: int, outcome: StepOutcome) -> None:
        """A load that a request waited for is over."""
        if not load.layerwise:
            outcome.received.add(load.request)
        if pages == len(load.keys):
            return
        if len(self.groups) > 1:
            outcome.failed.add(load.request)
            return
        (blocks,) = load.blocks
        each = self.groups[0].page_blocks
        outcome.invalid_blocks.update(b for b in blocks.blocks[pages * each :] if b)

    def _loaded(self, loading: _Loading) -> tuple[int, float]:
        """Leading pages that are valid in every group, and what moving took; accounts for them."""
        load = loading.load
        pages, seconds = 0 if loading.refused else len(load.keys), 0.0
        for blocks, job in loading.parts:
            result = job.result(0.0)
            count = len(blocks.blocks) // self.groups[blocks.group].page_blocks
            if result.pages < count:
                # Of a window, what comes after the gap is of no use: a hit needs all of it.
                whole = len(self.groups) == 1
                pages = min(pages, result.pages if whole else 0)
            self.counts.add("loaded_bytes", result.size_bytes)
            seconds += result.seconds
        self.counts.add("loads")
        self.counts.add("load_seconds", self.clock() - loading.began)
        if not loading.late:
            self.counts.add("loaded_tokens", pages * self.groups[0].page_tokens)
        return pages, seconds

    def _stored(self, storing: _Storing) -> int:
        """Pages that are in the store now; accounts for them."""
        pages = 0
        for job, size in zip(storing.jobs, storing.sizes, strict=True):
            try:
                result = job.result(0.0)
            except KVStoreError as error:
                self.counts.add("store_failures")
                self._note("store", error)
                continue
            pages += result.stored + result.existing + result.pending
            self.counts.add("stored_pages", result.stored)
            self.counts.add("existing_pages", result.existing + result.pending)
            self.counts.add("stored_bytes", result.stored * size)
        self.counts.add("stores")
        self.counts.add("store_seconds", self.clock() - storing.began)
        return pages

    def _note(self, what: str, error: KVStoreError) -> None:
        """The client has warned of a node that is away; the rest is counted."""
        self.opening.log.debug("a %s failed: %s", what, error)
