"""``KVStoreTier``: kvstore as a secondary tier of vLLM's own offloading; docs/engines/vllm.md."""

import hashlib
import logging
import os
from collections.abc import Iterable
from time import monotonic
from typing import Any, Final

import msgspec
import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from engine_adapters.vllm.names import page_key
from engine_adapters.vllm.options import read_tier_options
from kvstore.client.store import KVStore
from kvstore.engine.opening import Opening
from kvstore.engine.options import TieringOptions
from kvstore.engine.tiering import SERIES, Tiering
from kvstore.protocol.page import OpaqueLayout, ShardSpec, SpaceIdentity

log = logging.getLogger("vllm.kvstore")

NODE_TIMEOUT_S: Final = 0.5
END_TIMEOUT_S: Final = 30.0
_PREFIX: Final = "kvstore:tier_"


class KVStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """Stores chunks in the node of this machine and loads them.

    vLLM creates one in its scheduler.
    """

    medium = Medium.CPU
    cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
        backpressure_detector: Any = None, **values: Any,
    ) -> None:  # fmt: skip
        """Connect; the node need not run.

        Raises:
            ConfigError: an option is wrong or missing; names it.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = read_tier_options(values)
        self._options = options
        self._store = KVStore.connect(options.address, name="vllm-tier", timeout_s=NODE_TIMEOUT_S)
        wait_s = options.lookup_timeout_ms / 1000
        rows = np.asarray(primary_kv_view).view(np.uint8)
        self._tiering = Tiering(self._openings(), rows, monotonic, wait_s, page_key)

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """See the base class."""
        del req_context
        found = self._tiering.lookup(key)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """See the base class."""
        job = job_metadata
        self._tiering.store(job.job_id, job.keys, job.chunk_ids)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """See the base class."""
        job = job_metadata
        self._tiering.load(job.job_id, job.keys, job.chunk_ids)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See the base class."""
        return [
            JobResult(m.number, m.whole, m.good, m.seconds, m.size_bytes)
            for m in self._tiering.finished()
        ]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """See the base class."""
        del req_context
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send this step's lookups."""
        del context
        self._tiering.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs, and switch to new page names.

        vLLM calls this when it resets its caches, for example after an in-place update of the
        weights; it does not pass the reason.

        Raises:
            TransferTimeout: a job has not ended, so vLLM must not reuse the chunks.
        """
        try:
            self._tiering.drain(END_TIMEOUT_S)
        finally:
            self._tiering.rename(self._openings(os.urandom(16)))

    def shutdown(self) -> None:
        """Wait for jobs, release the primary tier's memory and disconnect.

        Raises:
            TransferTimeout: a job has not ended; vLLM then keeps the memory.
        """
        self._tiering.close(END_TIMEOUT_S)
        self._store.close()

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """The tier's Prometheus counters."""
        del extra_config
        return {_PREFIX + name: OffloadingCounterMetadata(text) for name, text in SERIES.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call."""
        counts = self._tiering.counts
        counts.note_troubles(self._store.troubles, self._store.device_failures)
        stats = OffloadingConnectorStats()
        for name, value in counts.take().items():
            stats.increase_counter(_PREFIX + name, value)
        return None if stats.is_empty() else stats

    def _openings(self, since: bytes = b"") -> tuple[Opening, Opening, Opening]:
        """Openings for lookups, loads and stores; only the first logs warnings."""
        config = self._offloading_spec.config
        identity, shard = names(config, self.block_size_bytes, self._options, since)
        level, quiet = logging.WARNING, logging.DEBUG
        return (
            Opening(self._store, identity, [shard], monotonic, level, log),
            Opening(self._store, identity, [shard], monotonic, quiet, log),
            Opening(self._store, identity, [shard], monotonic, quiet, log),
        )


def names(
    config: Any, row_bytes: int, options: TieringOptions, since: bytes
) -> tuple[SpaceIdentity, ShardSpec]:
    """Space and shard of an ``OffloadingConfig``; they contain everything that may change bytes.

    ``since`` identifies the last reset of vLLM's caches.
    """
    cache, parallel = config.cache, config.parallel
    parts = [
        vllm.__version__, config.model.dtype, config.groups, config.worker_kv_bytes_per_block,
        cache.tokens_per_hash, cache.blocks_per_chunk, config.kv_cache_layout,
        config.replicated_layout, config.canonical_layout, parallel.world_size,
        parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, row_bytes, since,
    ]  # fmt: skip
    if current_platform.is_cuda():  # which backend vLLM takes, and so how blocks are packed
        parts.append(current_platform.get_device_capability())
    settings = hashlib.sha256(msgspec.msgpack.encode([repr(part) for part in parts])).hexdigest()
    tokens = cache.tokens_per_hash * cache.blocks_per_chunk
    identity = SpaceIdentity(
        tenant=options.tenant, model=config.model.name, kv_dtype="uint8", page_tokens=tokens,
        revision=f"{options.revision}+tier+{settings[:32]}",
    )  # fmt: skip
    layout = OpaqueLayout("vllm-tier", vllm.__version__, "", tokens, row_bytes)
    return identity, ShardSpec(layout=layout, layers=(0, 1), heads=(0, 1), window_pages=1)
