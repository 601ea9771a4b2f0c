"""``KVStoreConnector``: passes vLLM's calls to the two sides; makes no decisions."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapters.vllm.drafts import DraftSteps, has_draft_layers
from engine_adapters.vllm.facts import check_stage, check_version, heads_apart, read_facts
from engine_adapters.vllm.label import label_of
from engine_adapters.vllm.names import DoubtfulImages, has_strong_hashes, names_of
from engine_adapters.vllm.options import (
    check_against,
    goes_on_behind_gaps,
    layout_for,
    page_tokens_of,
    read_options,
)
from engine_adapters.vllm.plugin import LiveConnectors, server_secret
from engine_adapters.vllm.stats import StoreMetrics, StoreStats
from engine_adapters.vllm.support import (
    drop_wrong_parameters,
    may_load,
    own_parameters,
    takes_whole,
)
from engine_adapters.vllm.tensors import pool_of
from kvstore.client.store import KVStore
from kvstore.engine.identity import cover, shard_specs, space_identity
from kvstore.engine.messages import Report, Step
from kvstore.engine.opening import Opening
from kvstore.engine.options import LoadOrder
from kvstore.engine.requests import PromptScope, Role, ScheduledRequest, Setup
from kvstore.engine.scheduler import SchedulerSide
from kvstore.engine.start import prefault, round_trip, try_device
from kvstore.engine.worker import GroupMemory, WorkerSide, memory_of

log = logging.getLogger("vllm.kvstore")

WORKER_TIMEOUT_S: Final = 0.5
"""Maximum time that a background copy waits for an answer of the node."""
_live: Final = LiveConnectors()


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A :class:`Step` for the workers."""

    step: Step


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """A :class:`Report` for the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine the reports of two ranks."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(self.report.joined(other.report))


class _Holder:
    """References to blocks, in vLLM's own reference counts."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[number] for number in blocks])

    def release(self, blocks: Sequence[int]) -> None:
        # Release the last block of a prefix first: the rest is useful without it.
        self._pool.free_blocks([self._pool.blocks[number] for number in reversed(blocks)])

    def forget(self, blocks: Sequence[int]) -> None:
        self._pool.evict_blocks(set(blocks))

    def free_soon(self, blocks: Iterable[int]) -> bool:
        return any(self._pool.blocks[number].ref_cnt == 1 for number in blocks)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Stores KV in the node of this machine and loads it; see docs/engines/vllm.md.

    vLLM creates one in its scheduler and one in each worker.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the configuration and connect; the node need not run.

        Raises:
            ConfigError: an option is wrong, the engine's KV cannot be shared, or the engine has
                such a connector already.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _live.join(self, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._options = read_options(transfer.kv_connector_extra_config)
        check_against(self._options, vllm_config)
        facts = read_facts(vllm_config, kv_cache_config, self._options.revision)
        self._facts = facts
        self._page_tokens = page_tokens_of(
            self._options, facts.groups, on_cpu=current_platform.is_cpu()
        )
        self._has_drafts = has_draft_layers(vllm_config)
        self._draft_steps = DraftSteps(vllm_config)
        self._identity = space_identity(facts, self._options.tenant, self._page_tokens)
        self._shards = shard_specs(facts, self._page_tokens)
        on_scheduler = role is KVConnectorRole.SCHEDULER
        side = "scheduler" if on_scheduler else f"worker{_worker_number()}"
        level = logging.WARNING if on_scheduler else logging.DEBUG  # one warning per engine
        self._store = KVStore.connect(
            self._options.address,
            name=f"vllm-{transfer.engine_id}-{side}",
            timeout_s=self._options.lookup_timeout_ms / 1000 if on_scheduler else WORKER_TIMEOUT_S,
            # Lookups run in the scheduler's process, where a slab would never be filled.
            device_slab=None if on_scheduler else self._options.device_slab,
            log_level=level,
            engine=label_of(vllm_config, self._options.engine, self._smallest_block),
        )
        self._opening = Opening(self._store, self._identity, self._shards, monotonic, level, log)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._report: WorkerReport | None = None
        self._invalid: set[int] = set()
        self._strong_hashes = has_strong_hashes(
            vllm_config.cache_config, vllm_config.model_config.multimodal_config
        )
        self._secret = server_secret()
        self._doubtful = DoubtfulImages(self._secret)
        if on_scheduler:
            self._begin_scheduling(transfer)

    def _begin_scheduling(self, transfer: Any) -> None:
        check_version()
        # vLLM reads it after it has made its scheduler's connector. By default a request fails if
        # its pages cannot be loaded, which is no choice for a cache.
        transfer.kv_load_failure_policy = "recompute"
        setup = Setup(
            engine=self._facts.engine,
            groups=self._facts.groups,
            page_tokens=self._page_tokens,
            hash_tokens=self._kv_cache_config.hash_block_size or self._smallest_block,
            ranks=self._facts.workers,
            role=Role(
                loads=transfer.kv_role in {"kv_both", "kv_consumer"},
                stores=transfer.kv_role in {"kv_both", "kv_producer"},
            ),
            takes_whole=takes_whole(self._facts.groups, vllm.__version__),
            drafts=self._has_drafts,
            recomputes=not goes_on_behind_gaps(self._vllm_config),
        )
        report = self._store.report_prefill
        self._scheduler = SchedulerSide(self._opening, setup, self._options, monotonic, report)
        held = [one for at in range(len(self._facts.groups)) for one in cover(self._facts, 0, at)]
        log.info(
            "kvstore: pages of %d tokens, %d bytes on each of %d ranks in %d of %d shards, at %s",
            self._page_tokens,
            sum(self._shards[one.shard].page_bytes(self._identity) for one in held),
            self._facts.workers, len(held), len(self._shards), self._options.address,
        )  # fmt: skip

    @property
    def _smallest_block(self) -> int:
        """Tokens of the smallest block of a KV group."""
        return min(group.block_tokens for group in self._facts.groups)

    @property
    def _steps_ahead(self) -> int:
        """Steps that vLLM begins before it knows how an earlier one ended."""
        config = self._vllm_config
        stages = int(config.parallel_config.pipeline_parallel_size)
        return int(getattr(config, "max_concurrent_batches", stages + 1)) - 1

    @property
    def _deciding(self) -> SchedulerSide:
        assert self._scheduler is not None, "not the scheduler's instance"
        return self._scheduler

    @property
    def _moving(self) -> WorkerSide:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    # ---- both sides -------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: it is a cache, requests do not depend on stores."""
        return False

    def shutdown(self) -> None:
        """Wait for jobs and disconnect from the node."""
        _live.leave(self)
        self._store.close()

    def get_kv_connector_stats(self) -> StoreStats | None:
        """The counts of this side since the last call."""
        side = self._scheduler or self._worker
        if side is None:
            return None
        side.counts.note_troubles(self._store.troubles, self._store.device_failures)
        side.counts.note_slab(self._store.slab_stats() or {})
        return StoreStats(data=side.counts.take())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats:
        """Create stats from serialised data."""
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StoreMetrics:  # fmt: skip
        """The connector's Prometheus series."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """True for layer-wise loads, which wait between layers."""
        return read_options(extra_config).load is LoadOrder.LAYERWISE

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """See :func:`layout_for`."""
        options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        return layout_for(options, vllm_config, on_cuda=current_platform.is_cuda())

    # ---- scheduler --------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Set the engine's block pool."""
        self._deciding.bind(_Holder(gpu_block_pool), gpu_block_pool.num_gpu_blocks)

    def on_new_request(self, request: Any) -> None:
        """A new request has arrived; vLLM reads its parameters after this."""
        drop_wrong_parameters(request)
        self._doubtful.note(request)
        self._deciding.see(request, self._names_of(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See the base class."""
        if not may_load(request):
            return 0, False
        return self._deciding.match(request, self._names_of(request), num_computed_tokens)

    def _names_of(self, request: Any) -> PromptScope:
        names = names_of(request, strong_hashes=self._strong_hashes, secret=self._secret)
        return names._replace(usable=False) if self._doubtful.has(request) else names

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Where the tokens of a hit come from."""
        disk, remote = self._deciding.hit_sources(request.request_id, num_external_tokens)
        found = {
            CacheHitSource.HOST: num_external_tokens - disk - remote,
            CacheHitSource.DISK: disk, CacheHitSource.P2P: remote,
        }  # fmt: skip
        return {source: tokens for source, tokens in found.items() if tokens}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        if num_external_tokens:
            self._deciding.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """See the base class."""
        total, decoded = scheduler_output.total_num_scheduled_tokens, _decoded(scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        drafted = self._draft_steps.drafted(
            [before + counts.get(name, 0) for name, before in _computed(scheduler_output)]
        )
        scheduled = list(_progress(scheduler_output))
        # With layer-wise loads of ours it is unknown whether others load, too.
        maybe_others = self._options.in_multi_connector or self._options.load is LoadOrder.ASYNC
        step = self._deciding.build(
            scheduled, total, decoded, drafted=drafted,
            others_load=maybe_others and getattr(scheduler_output, "has_sync_kv_loads", False),
        )  # fmt: skip
        return StepMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers have finished a step."""
        report = connector_output.kv_connector_worker_meta
        self._deciding.reported(
            report.report if report is not None else None, connector_output.invalid_block_ids
        )

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; stores in flight have their own references to blocks."""
        del block_ids
        return False, self._parameters(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Like :meth:`request_finished`."""
        del block_ids
        return False, self._parameters(request)

    def _parameters(self, request: Any) -> dict[str, Any] | None:
        found = self._deciding.finished(request.request_id)
        return own_parameters(found) if found and self._options.in_multi_connector else found

    def has_pending_block_frees(self) -> bool:
        """Whether to wait for a job instead of preempting a request."""
        return self._deciding.frees_soon()

    def has_pending_push_work(self) -> bool:
        """Whether the engine should continue stepping, to learn of the end of jobs."""
        return self._deciding.busy

    def reset_cache(self) -> bool:
        """The weights have changed: switch to new page names."""
        self._deciding.forget_all()
        return True

    # ---- worker -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the engine's KV memory.

        Raises:
            ConfigError: its layout is not as the scheduler assumes.
        """
        rank, kv = get_tensor_model_parallel_rank(), self._kv_cache_config
        stage = get_pp_group().rank_in_group
        memories: list[GroupMemory] = []
        self._layers: dict[str, tuple[int, int]] = {}
        for place, group in enumerate(self._facts.groups):
            layers = kv.kv_cache_groups[group.index].layer_names
            check_stage(self._facts, stage, layers)
            pool = pool_of(group, layers, kv_caches, kv.num_blocks, heads_apart(self._facts, group))
            memories.append(memory_of(self._facts, self._page_tokens, pool, place, rank, stage))
            self._layers |= {name: (place, index) for index, name in enumerate(layers)}
        self._worker = WorkerSide(
            self._opening, memories, monotonic, self._steps_ahead,
            early_stage=not get_pp_group().is_last_rank,
        )  # fmt: skip
        first = memories[0].shards[0]
        page_bytes = self._shards[first.shard].page_bytes(self._identity)
        failed = try_device(self._store, first.pool, page_bytes, log)
        # If the node refuses these pages, a warning was logged already.
        wrong = (
            self._opening.get() is not None and not failed
            and round_trip(self._store, self._identity, self._shards[first.shard], first.pool, log)
        )  # fmt: skip
        if failed:
            log.error("kvstore: %s cannot be used, expect misses: %s", first.pool.device, failed)
        elif wrong:
            log.warning("kvstore: the self-test failed, expect misses: %s", wrong)
        prefault([memory.shards[0].pool for memory in memories], log)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        self._moving.begin_step(self._metadata().step.stores)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        del forward_context, kwargs
        self._moving.start_loads(self._metadata().step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer of the layer-wise loads."""
        if self._options.load is not LoadOrder.LAYERWISE:  # vLLM asks for every layer of every step
            return
        place = self._layers.get(layer_name)
        if place is not None:
            self._moving.wait_layer(*place)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole pages are stored when the step is done."""

    def wait_for_save(self) -> None:
        """The forward pass is done: start this step's stores; does not block."""
        self._moving.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads have ended; stores delay no request."""
        results = self.get_transfer_results(finished_req_ids)
        return None, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """The results of ended loads."""
        del finished_req_ids
        step = self._metadata().step
        outcome = self._moving.poll(idle=step.idle, others=step.others, number=step.number)
        self._report = WorkerReport(outcome.report) if outcome.report else None
        self._invalid = outcome.invalid_blocks
        return KVConnectorTransferResults(set(), outcome.received, outcome.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of this step's failed loads."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """The report for the scheduler side."""
        report, self._report = self._report, None
        return report

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


def _worker_number() -> int:
    """Number of this worker among those of all pipeline stages."""
    stage = get_pp_group()
    return int(get_tensor_model_parallel_rank() * stage.world_size + stage.rank_in_group)


def _decoded(output: Any) -> int:
    """Number of decoded tokens of a step, including speculative ones."""
    guessed = output.scheduled_spec_decode_tokens
    counts = output.num_scheduled_tokens.items()
    return sum(count for name, count in counts if count <= 1 + len(guessed.get(name, ())))


def _computed(output: Any) -> list[tuple[str, int]]:
    """The requests of a step, with the tokens that vLLM takes for computed before it."""
    cached = output.scheduled_cached_reqs
    found = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
    return found + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _progress(output: Any) -> Iterable[ScheduledRequest]:
    """The requests of a step, with the number of tokens whose KV exists after it.

    Speculative tokens do not count.
    """
    guessed = output.scheduled_spec_decode_tokens
    blocks = output.kv_connector_block_state
    starting = {new.req_id for new in output.scheduled_new_reqs}
    starting |= output.scheduled_cached_reqs.resumed_req_ids
    for request_id, before in _computed(output):
        count = output.num_scheduled_tokens.get(request_id, 0)
        table = blocks.get_block_ids(request_id)
        if count and table is not None:
            after = before + count - len(guessed.get(request_id, ()))
            yield ScheduledRequest(
                request_id, after, table, before, before + count, request_id in starting
            )
