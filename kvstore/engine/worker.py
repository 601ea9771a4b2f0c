"""The worker side of an adapter: copies pages between the engine's KV memory and the store.

Copies run in the store's background threads; the engine's step only starts them and polls. When a
load is late, its request continues without it, and the scheduler holds the blocks until the job has
really ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import DEBUG, WARNING
from typing import Final, NamedTuple

from kvstore.client.jobs import RestoreJob, StoreJob
from kvstore.client.results import PutResult
from kvstore.client.space import Space
from kvstore.engine.counts import AdapterCounts
from kvstore.engine.identity import EngineFacts, cover
from kvstore.engine.messages import Blocks, Load, Report, Store
from kvstore.engine.opening import Opening
from kvstore.engine.ranks import HeldShard
from kvstore.mover import Order
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.errors import DeviceUnavailable, InvalidArgument, KVStoreError
from kvstore.protocol.page import PrefixKeys

IDLE_WAIT_S: Final = 0.02
"""Maximum wait for the oldest load in a step that computes nothing. Otherwise the engine repeats
such steps as fast as it can, and its two busy processes take CPU time from the load. A request that
arrives meanwhile waits at most this long."""
END_TIMEOUT_S: Final = 60.0
"""Maximum wait, in a step, for the end of cancelled layer-wise loads."""
LAST_WAIT_S: Final = 0.5
"""Maximum wait for the end of each one after that: while the process was stopped, time has passed
in which the load could not end."""


class ShardMemory(NamedTuple):
    """One shard of a KV group in this worker: some heads, or all, of each block.

    Attributes:
        pool: memory of the shard.
        shard: index of the shard in the space's shards.
        held: the rank's turn to write pages; None = it writes all.
    """

    pool: KVPool
    shard: int
    held: HeldShard | None = None

    def own_pages(self, first: int, count: int) -> range | None:
        """See :meth:`HeldShard.own_pages`; None = all."""
        if self.held is None or self.held.copies == 1:
            return None
        return self.held.own_pages(first, count)


class GroupMemory(NamedTuple):
    """One KV group in this worker.

    Attributes:
        shards: the group's shards that this rank holds; together they fill its blocks.
        page_tokens: tokens per page.
        block_tokens: tokens per block.
        layers: number of the group's layers in this worker. The engine waits for each of them.
        whole_only: some pages of a load are useless without all of them: the engine keeps nothing
            that lies before a window or a state, so it cannot compute what is missing.
    """

    shards: Sequence[ShardMemory]
    page_tokens: int
    block_tokens: int
    layers: int
    whole_only: bool = False

    @property
    def page_blocks(self) -> int:
        """Blocks per page."""
        return self.page_tokens // self.block_tokens


def memory_of(
    facts: EngineFacts, page_tokens: int, pool: KVPool, place: int, rank: int, stage: int = 0
) -> GroupMemory:
    """The shards of a KV group in a worker.

    Args:
        facts: facts of the engine.
        page_tokens: tokens per page.
        pool: the group's blocks. If the rank holds several shards of it, a plane has the blocks of
            a layer, and a block has one head behind the other.
        place: index of the group in ``facts.groups``.
        rank: tensor-parallel rank of the worker.
        stage: pipeline stage of the worker.

    Raises:
        InvalidArgument: the blocks of the pool are not made of so many heads.
    """
    group = facts.groups[place]
    whole_only = group.window_tokens > 0 or group.state
    split, held = facts.split(group), cover(facts, rank, place, stage)
    first, stop = facts.stages[stage] if facts.stages else (0, group.layers)
    layers = stop - first
    if len(held) == 1:
        shards = [ShardMemory(pool, *held[0])]
        return GroupMemory(shards, page_tokens, group.block_tokens, layers, whole_only)
    each, rest = divmod(pool.block_bytes, split.rank_heads)
    if rest:
        what = f"{pool.block_bytes} are not those of {split.rank_heads} heads"
        raise InvalidArgument("block_bytes", what)
    shards = []
    for shard, one in held:
        first, stop = one.heads
        shards.append(ShardMemory(pool.part(first * each, (stop - first) * each), shard, one))
    return GroupMemory(shards, page_tokens, group.block_tokens, layers, whole_only)


class StepOutcome(NamedTuple):
    """The results of a step for the engine.

    Attributes:
        received: requests whose loads have ended, successfully or not.
        failed: received requests that must be computed from the start.
        invalid_blocks: target blocks of loads that contain nothing valid.
        report: report for the scheduler side.
    """

    received: set[str]
    failed: set[str]
    invalid_blocks: set[int]
    report: Report


@dataclass(slots=True)
class _Loading:
    """A load in flight.

    Attributes:
        parts: the restore of each shard of each group.
        refused: a part could not be started, or was used before it was loaded: no page counts.
        late: its request has stopped waiting.
        waited: group and layer of each for which the engine has waited.
    """

    load: Load
    parts: list[tuple[Blocks, RestoreJob]]
    began: float
    refused: bool = False
    late: bool = False
    waited: set[tuple[int, int]] = field(default_factory=set)

    @property
    def deadline(self) -> float:
        return self.began + self.load.wait_s


@dataclass(slots=True)
class _Storing:
    """A store in flight.

    Attributes:
        together: the extract of shards that have requests in common; None = there is none.
        sizes: bytes of a page of each shard of ``together``, in the same order.
        alone: the extract of each other shard, and bytes of its page.
    """

    store: Store
    began: float
    together: StoreJob[list[PutResult | KVStoreError]] | None = None
    sizes: list[int] = field(default_factory=list)
    alone: list[tuple[StoreJob[PutResult], int]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return (self.together is None or self.together.done) and all(
            job.done for job, _ in self.alone
        )

    def shard_results(self) -> list[tuple[PutResult | KVStoreError, int]]:
        """For each shard its result, and bytes of its page."""
        found: list[tuple[PutResult | KVStoreError, int]] = []
        if self.together is not None:
            try:
                found += zip(self.together.result(0.0), self.sizes, strict=True)
            except KVStoreError as error:
                found += [(error, size) for size in self.sizes]
        for job, size in self.alone:
            try:
                found.append((job.result(0.0), size))
            except KVStoreError as error:
                found.append((error, size))
        return found


@dataclass(slots=True)
class WorkerSide:
    """Starts and polls jobs; called only by the worker's step thread.

    Attributes:
        opening: source of the space.
        groups: the worker's KV memory, in the order of ``EngineFacts.groups``.
        clock: monotonic seconds.
        steps_ahead: maximum steps that the engine starts before an earlier one is known to have
            succeeded.
        early_stage: it is a stage of a pipeline before the last one, whose steps the engine may not
            end.
    """

    opening: Opening
    groups: Sequence[GroupMemory]
    clock: Callable[[], float]
    steps_ahead: int = 0
    early_stage: bool = False
    counts: AdapterCounts = field(default_factory=AdapterCounts)
    _loads: list[_Loading] = field(default_factory=list)
    _stores: list[_Storing] = field(default_factory=list)
    _said: str = ""
    _said_unwaited: bool = False
    _idle_steps: int = 0
    _not_begun: Sequence[Store] = ()

    @property
    def _whole_only(self) -> bool:
        """Whether a load without all of its pages is worth nothing; see :class:`GroupMemory`.

        Of several groups an engine cannot be told which blocks are invalid.
        """
        return len(self.groups) > 1 or self.groups[0].whole_only

    def start_loads(self, loads: Sequence[Load]) -> None:
        """Start restores."""
        for load in loads:
            loading = _Loading(load, [], self.clock())
            self._loads.append(loading)
            for blocks in load.blocks:
                # The engine goes on from the last page of each group: of KV, of a window, of a
                # state. Where it has no block for it, nothing would be there.
                loading.refused |= not (blocks.blocks and blocks.blocks[-1])
                jobs = self._restore(load, blocks) if blocks.blocks else []
                loading.refused |= jobs is None
                loading.parts += [(blocks, job) for job in jobs or ()]

    def wait_layer(self, place: int, layer: int) -> None:
        """Wait until a layer of all layer-wise loads is loaded, or has failed.

        If the engine uses a layer before it is loaded, the whole load is invalid, even if it ends
        successfully later. If it does not wait for some layer, so is the load: nobody knows when
        that layer was used.

        Args:
            place: index of the layer's group.
            layer: index of the layer in the group.
        """
        for loading in self._loads:
            if not loading.load.layerwise:
                continue
            loading.waited.add((place, layer))
            for blocks, job in loading.parts:
                if blocks.group != place:
                    continue
                there = job.wait_layer(layer, max(0.0, loading.deadline - self.clock()))
                if not (there or job.done or loading.refused):
                    loading.refused = True
                    self.counts.add("load_timeouts")

    def begin_step(self, stores: Sequence[Store]) -> None:
        """A step begins that computes the KV of these stores; :meth:`end_step` starts them.

        An engine that decodes speculatively may not end the steps of a pipeline's first stages:
        their stores start with the next step, or else their blocks would never be free. The blocks
        have not changed since, as stores hold them. Any other step that was not ended has failed,
        and nothing of it is stored.
        """
        if self.early_stage:
            self.end_step()
        for store in self._not_begun:
            self._stores.append(_Storing(store, self.clock()))
            self.counts.add("store_failures")
        self._not_begun = stores

    def end_step(self) -> None:
        """The KV of the step are computed: start its stores, unless they were started."""
        stores, self._not_begun = self._not_begun, ()
        self.start_stores(stores)

    def start_stores(self, stores: Sequence[Store]) -> None:
        """Start stores; the blocks must not change until the scheduler has their report."""
        space = self.opening.get()
        for store in stores:
            storing = _Storing(store, self.clock())
            self._stores.append(storing)
            if space is None:
                self.counts.add("store_failures")
                continue
            together = []
            for blocks in store.blocks:
                count = len(blocks.blocks) // self.groups[blocks.group].page_blocks
                keys = store.keys[blocks.first : blocks.first + count]
                for memory in self.groups[blocks.group].shards:
                    only = memory.own_pages(store.page + blocks.first, count)
                    if only is None and memory.pool.device == "cpu":
                        together.append((memory.pool, blocks.blocks, keys, memory.shard))
                    elif only is None or only:  # otherwise all of them are other ranks' to write
                        self._extract(space, storing, blocks, keys, memory, only)
            if together:
                self._extract_together(space, storing, together)

    def poll(self, *, idle: bool = False, others: int = 0, number: int = 0) -> StepOutcome:
        """Return the ended jobs; wait for layer-wise loads, which end with their step.

        Args:
            idle: the step computes nothing. It waits shortly for a load, but not if the next step
                may be one that computes: the engine begins that one when an earlier step that
                computes, or in which a load ended, has ended on all ranks.
            others: see :class:`Step`.
            number: see :class:`Step`.
        """
        outcome = StepOutcome(set(), set(), set(), Report(step=number))
        if others:
            outcome.report.end(others, 0)
        if idle and self._idle_steps >= self.steps_ahead:
            self._wait_idle()
        self._refuse_unwaited()
        self._cancel_late_layers()
        until = self.clock() + END_TIMEOUT_S
        for loading in list(self._loads):
            self._poll_load(loading, until, outcome)
        self._idle_steps = self._idle_steps + 1 if idle and not outcome.received else 0
        for storing in list(self._stores):
            if storing.done:
                self._stores.remove(storing)
                outcome.report.end(storing.store.job, self._stored(storing))
        return outcome

    def _extract(
        self, space: Space, storing: _Storing, blocks: Blocks, keys: PrefixKeys,
        memory: ShardMemory, only: range | None,
    ) -> None:  # fmt: skip
        try:
            job = space.extract_from_kvpool(
                memory.pool, blocks.blocks, keys, memory.shard, only=only
            )
        except KVStoreError as error:
            self.counts.add("store_failures")
            self._note("store", error)
            return
        storing.alone.append((job, space.page_bytes[memory.shard]))

    def _extract_together(
        self, space: Space, storing: _Storing,
        parts: Sequence[tuple[KVPool, Sequence[int], PrefixKeys, int]],
    ) -> None:  # fmt: skip
        try:
            storing.together = space.extract_shards(parts)
        except KVStoreError as error:
            self.counts.add("store_failures", len(parts))
            self._note("store", error)
            return
        storing.sizes = [space.page_bytes[shard] for *_, shard in parts]

    def _restore(self, load: Load, blocks: Blocks) -> list[RestoreJob] | None:
        """Start the restores of all shards of a group; None = that is not possible."""
        space = self.opening.get()
        if space is None:
            return None
        count = len(blocks.blocks) // self.groups[blocks.group].page_blocks
        keys = load.keys[blocks.first : blocks.first + count]
        order: Order = "segment" if load.layerwise else "page"
        parts = [(memory.pool, memory.shard) for memory in self.groups[blocks.group].shards]
        try:
            return space.restore_shards(keys, blocks.blocks, parts, order)
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

    def _ends(self, loading: _Loading, until: float) -> bool:
        """Whether all jobs of a load have ended, or do by ``until``."""
        return all(job.wait(max(0.0, until - self.clock())) for _, job in loading.parts)

    def _refuse_unwaited(self) -> None:
        """Refuse and cancel layer-wise loads with a layer for which the engine has not waited."""
        for loading in self._loads:
            if not loading.load.layerwise or loading.refused:
                continue
            wanted = {
                (blocks.group, layer)
                for blocks in loading.load.blocks
                for layer in range(self.groups[blocks.group].layers)
            }
            if wanted <= loading.waited:
                continue
            loading.refused = True
            for _, job in loading.parts:
                job.cancel()
            self.counts.add("unwaited_loads")
            if not self._said_unwaited:
                self._said_unwaited = True
                self.opening.log.warning(
                    "the engine computed layers without waiting for their loads (in a graph of a"
                    " whole step?): such loads fail, and are computed; set load: async"
                )

    def _cancel_late_layers(self) -> None:
        """Cancel layer-wise loads, which end with their step; all before the end of any is awaited.

        One that waits for a disk or for other nodes ends at once, on a device after that wait.
        """
        for loading in self._loads:
            waits = loading.load.layerwise and not loading.late
            if waits and not self._ends(loading, loading.deadline):
                for _, job in loading.parts:
                    job.cancel()

    def _poll_load(self, loading: _Loading, until: float, outcome: StepOutcome) -> None:
        load, now = loading.load, self.clock()
        ended = self._ends(loading, now)
        if not ended and not loading.late and (load.layerwise or loading.deadline <= now):
            if load.layerwise:
                # The engine has used these blocks: nothing may be written to them after this.
                ended = self._ends(loading, until)
                ended = ended or self._ends(loading, self.clock() + LAST_WAIT_S)
                if not ended:
                    self.opening.log.error(
                        "a cancelled load has not ended after %.0f s", END_TIMEOUT_S
                    )
                    loading.refused = loading.late = True
                    outcome.report.late.add(load.job)
                    self._finish(load, 0, outcome)
            else:
                for _, job in loading.parts:
                    job.cancel()
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
        """A load for which a request waited has ended."""
        if not load.layerwise:
            outcome.received.add(load.request)
        if pages == len(load.keys):
            return
        if self._whole_only:
            outcome.failed.add(load.request)
            return
        (blocks,) = load.blocks
        each = self.groups[0].page_blocks
        outcome.invalid_blocks.update(b for b in blocks.blocks[pages * each :] if b)

    def _loaded(self, loading: _Loading) -> tuple[int, float]:
        """Number of leading pages that the engine can use, and seconds; updates the counts."""
        load = loading.load
        pages, seconds = 0 if loading.refused else len(load.keys), 0.0
        for blocks, job in loading.parts:
            result = job.result(0.0)
            count = len(blocks.blocks) // self.groups[blocks.group].page_blocks
            if result.pages < count:
                pages = min(pages, 0 if self._whole_only else result.pages)
            self.counts.add("loaded_bytes", result.size_bytes)
            seconds = max(seconds, result.seconds)
        self.counts.add("loads")
        self.counts.add("load_seconds", self.clock() - loading.began)
        if not loading.late:
            tokens = max(0, pages * self.groups[0].page_tokens - load.known)
            self.counts.add("loaded_tokens", tokens)
        return pages, seconds

    def _stored(self, storing: _Storing) -> int:
        """Number of pages that are in the store now; updates the counts."""
        pages = 0
        for result, size in storing.shard_results():
            if isinstance(result, KVStoreError):
                self.counts.add("store_failures")
                self._note("store", result)
                continue
            pages += result.stored + result.existing + result.pending
            self.counts.add("stored_pages", result.stored)
            self.counts.add("existing_pages", result.existing + result.pending)
            self.counts.add("stored_bytes", result.stored * size)
        self.counts.add("stores")
        self.counts.add("store_seconds", self.clock() - storing.began)
        return pages

    def _note(self, what: str, error: KVStoreError) -> None:
        """Log an error, if the client itself has not warned; count those of the device."""
        if what == "store" and isinstance(error, DeviceUnavailable):
            # Those of loads are in the client's counts.
            self.counts.add(f"device_failures_{error.cause}")
        # Of a device nobody else speaks.
        known, self._said = str(error) == self._said, str(error)
        level = DEBUG if known or not isinstance(error, DeviceUnavailable) else WARNING
        self.opening.log.log(level, "a %s failed: %s", what, error)
