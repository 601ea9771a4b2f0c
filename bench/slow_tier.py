"""A store whose pages come from a tier of a given speed: one after the other, after real waits."""

import time
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any, Final

from kvstore.client.jobs import RestoreJob, StoreJob, Worker
from kvstore.client.results import Hit, PutResult, RestoreResult
from kvstore.client.space import Space
from kvstore.client.store import KVStore
from kvstore.mover import Progress
from kvstore.mover.kvpool import KVPool
from kvstore.protocol.page import PrefixKeys, ShardSpec, SpaceIdentity

WAIT_S: Final = 60.0


class SlowTier:
    """What an engine sees of a :class:`KVStore`: hits are said to be on disk, and take time.

    Attributes:
        page_s: seconds a page; changed at any time.
    """

    def __init__(self, store: KVStore) -> None:
        self.page_s = 0.0
        self._store = store
        self._lane = Worker("bench-slow-tier")

    @property
    def connected(self) -> bool:
        """As of the store."""
        return self._store.connected

    @property
    def node_name(self) -> str:
        """As of the store."""
        return self._store.node_name

    @property
    def troubles(self) -> Counter[str]:
        """As of the store."""
        return self._store.troubles

    def space(self, identity: SpaceIdentity, shards: Sequence[ShardSpec]) -> "SlowSpace":
        """A space of the store, behind this tier."""
        return SlowSpace(self, self._lane, self._store.space(identity, shards))

    def report_prefill(self, seconds_per_token: float) -> None:
        """As of the store."""
        self._store.report_prefill(seconds_per_token)

    def close(self) -> None:
        """Wait for what is being loaded, and close the store."""
        self._lane.close()
        self._store.close()


class SlowSpace:
    """One space; puts are as fast as ever."""

    def __init__(self, tier: SlowTier, lane: Worker, space: Space) -> None:
        self._tier = tier
        self._lane = lane
        self._space = space

    def lookup(self, keys: PrefixKeys, *, holder: str = "", held: int = 0) -> Hit:
        """As of the space, all of it on disk."""
        hit = self._space.lookup(keys, holder=holder, held=held)
        return hit._replace(tiers={"host": 0, "ssd": hit.pages})

    def restore_to_kvpool(
        self, keys: PrefixKeys, pool: KVPool, blocks: Sequence[int], shard: int
    ) -> RestoreJob:
        """As of the space, but each page is waited for before they are copied."""
        progress, submitted = Progress(), perf_counter()

        def run() -> RestoreResult:
            for _ in range(len(keys)):
                if progress.cancelled:
                    return RestoreResult(0)
                time.sleep(self._tier.page_s)
            found = self._space.restore_to_kvpool(keys, pool, blocks, shard).result(WAIT_S)
            return found._replace(seconds=perf_counter() - submitted)

        return RestoreJob(self._lane, run, progress, layered=False)

    def extract_from_kvpool(self, *arguments: Any, **options: Any) -> StoreJob[PutResult]:
        """As of the space."""
        return self._space.extract_from_kvpool(*arguments, **options)
