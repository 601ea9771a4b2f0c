"""vLLM's own manager of tiers with :class:`KVStoreTier` in it, run by the engine's environment.

Everything of vLLM is real (manager, primary tier, shared region, factory) but the engine: this vLLM
copies between an engine and its primary tier on accelerators only. Rows are filled and read here.
"""

from collections.abc import Sequence
from itertools import count
from time import monotonic
from typing import Any

import numpy as np
from vllm.v1.kv_offload import config as offload
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from tests.vllm.engine_process import Answer, serve

CHUNKS = 16
ROW = 1 << 16
WAIT_S = 20.0
_requests = count()


class Tiers:
    """What the commands work on."""

    def __init__(self) -> None:
        """Make nothing yet."""
        self.manager: Any = None
        self.rows: Any = None
        self.config: dict[str, Any] = {}

    def new(self, name: str, **options: Any) -> Answer:
        """A manager, as ``TieringOffloadingSpec`` makes it; the one before must have ended."""
        assert self.manager is None
        self.config = {
            "type": "KVStoreTier", "module_path": "engine_adapters.vllm.tier", **options,
        }  # fmt: skip
        region = SharedOffloadRegion(
            engine_id=name, num_chunks=CHUNKS, rank=None, kv_bytes_per_chunk=ROW, cpu_page_size=ROW
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=region)
        view = primary.get_kv_memoryview()
        try:
            tier = SecondaryTierFactory.create_secondary_tier(self.config, view, Spec())
        except Exception:
            primary.shutdown()
            raise
        self.rows = np.asarray(view).view(np.uint8)
        self.manager = TieringOffloadingManager(primary, [tier])
        return {}

    def store(self, numbers: Sequence[int]) -> Answer:
        """Let the engine have computed these chunks, and wait until the tier has ended with them.

        What each holds follows from its number; see :func:`content`.
        """
        context, keys = self._request(), [key(number) for number in numbers]
        output = self.manager.prepare_store(keys, context)
        for number, chunk in zip(numbers, output.store_spec.chunk_ids, strict=True):
            self.rows[chunk] = content(number)
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self._settle()
        return self._stats()

    def find(self, numbers: Sequence[int]) -> Answer:
        """Look chunks up until all are found, in a step that does not end: no load has begun."""
        context, keys = self._request(), [key(number) for number in numbers]
        (tier,) = self.manager.secondary_tiers
        deadline = monotonic() + WAIT_S
        while not all(tier.lookup(one, context) is LookupResult.HIT for one in keys):
            if monotonic() > deadline:
                raise TimeoutError("not found")
            self._step()
        found = {self.manager.lookup(one, context) for one in keys}
        assert found == {LookupResult.HIT_PENDING}, found
        self.manager.on_request_finished(context)
        return {}

    def load(self, numbers: Sequence[int]) -> Answer:
        """What a request finds and loads: for each chunk HIT or MISS, and whether it is right."""
        context, began = self._request(), monotonic()
        keys = [key(number) for number in numbers]
        while True:
            results = [self.manager.lookup(one, context) for one in keys]
            if set(results) <= {LookupResult.HIT, LookupResult.MISS}:
                break
            if monotonic() > began + WAIT_S:
                raise TimeoutError(f"undecided: {results}")
            self._step()
        hits = [n for n, result in zip(numbers, results, strict=True) if result is LookupResult.HIT]
        there = [key(number) for number in hits]
        chunks = self.manager.prepare_load(there, context).chunk_ids
        right = [
            bool((self.rows[chunk] == content(number)).all())
            for number, chunk in zip(hits, chunks, strict=True)
        ]
        self.manager.complete_load(there, context)
        self.manager.on_request_finished(context)
        self._settle()
        return {"hits": hits, "right": all(right), "seconds": monotonic() - began, **self._stats()}

    def reset(self) -> Answer:
        """Reset the caches, as vLLM does after an update of the weights."""
        self.manager.reset_cache()
        return {}

    def end(self) -> Answer:
        """Shut down as vLLM does; fails when anything still holds the primary tier's memory."""
        manager, self.manager, self.rows = self.manager, None, None
        if manager is not None:
            manager.shutdown()
        return {}

    def _request(self) -> ReqContext:
        context = ReqContext(f"request-{next(_requests)}")
        self.manager.on_new_request(context)
        return context

    def _step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext([], []))

    def _settle(self) -> None:
        deadline = monotonic() + WAIT_S
        while self.manager.has_pending_work():
            if monotonic() > deadline:
                raise TimeoutError("a job has not ended")
            self._step()

    def _stats(self) -> Answer:
        """What vLLM and the tier have counted since the last call; all of it is declared."""
        stats = self.manager.get_stats()
        extra = {"cpu_bytes_to_use": CHUNKS * ROW, "secondary_tiers": [self.config]}
        declared = TieringOffloadingSpec.build_metric_definitions(extra)
        counted = {} if stats is None else stats.reduce()
        unknown = [n for n in counted if n.startswith("kvstore:") and n not in declared]
        assert not unknown, unknown
        return {"counted": counted}


class Spec:
    """As much of vLLM's ``TieringOffloadingSpec`` as a tier reads."""

    config = offload.OffloadingConfig(
        groups=(offload.OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="engine",
        model=offload.OffloadingModelConfig("model", "bfloat16"),
        cache=offload.OffloadingCacheConfig(16, 1),
        parallel=offload.OffloadingParallelConfig(
            rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1,
            data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
        ),
    )  # fmt: skip


def key(number: int) -> OffloadKey:
    """The key of a chunk, with a hash as long as sha256's."""
    return make_offload_key(number.to_bytes(32, "big"), 0)


def content(number: int) -> Any:
    """What the chunk holds."""
    return np.random.default_rng(number).integers(0, 256, ROW, dtype=np.uint8)


def main() -> int:
    """See the module."""
    return serve(Tiers())
