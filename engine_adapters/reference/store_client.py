"""The part of the kvstore client that an engine needs, as a seam.

``kvstore.client.store.KVStore`` is what stands behind it; a test puts a small fake there.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.mover.kvpool import KVPool
from kvstore.page import PrefixKeys, ShardSpec, SpaceIdentity


class Hit(Protocol):
    """What ``lookup`` says."""

    @property
    def pages(self) -> int:
        """Longest prefix that is ready."""

    @property
    def pending(self) -> int:
        """Pages after it that somebody is writing."""

    @property
    def load_seconds(self) -> float:
        """Estimated time to restore them."""


class Restored(Protocol):
    """What a restore did."""

    @property
    def pages(self) -> int:
        """Verified prefix."""

    @property
    def size_bytes(self) -> int:
        """Bytes of those pages."""


class Stored(Protocol):
    """What a put did."""

    @property
    def stored(self) -> int:
        """Pages that are new in the store."""

    @property
    def existing(self) -> int:
        """Pages it had."""

    @property
    def pending(self) -> int:
        """Pages that somebody else is writing."""


class RestoreJob(Protocol):
    """A restore in the background."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""

    def cancel(self) -> None:
        """Ask it to end early."""

    def result(self, timeout_s: float) -> Restored:
        """Its outcome."""


class StoreJob(Protocol):
    """A put in the background."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""

    def result(self, timeout_s: float) -> Stored:
        """Its outcome; raises KVStoreError when nothing was stored."""


class Space(Protocol):
    """One space of the client."""

    def lookup(self, keys: PrefixKeys) -> Hit:
        """Longest ready prefix."""

    def restore_to_kvpool(
        self, keys: PrefixKeys, pool: KVPool, blocks: npt.NDArray[np.int64]
    ) -> RestoreJob:
        """Store to pool."""

    def extract_from_kvpool(
        self,
        pool: KVPool,
        blocks: npt.NDArray[np.int64],
        keys: PrefixKeys,
        *,
        ttl_s: float = 0.0,
        read_once: bool = False,
    ) -> StoreJob:
        """Pool to store."""


class Store(Protocol):
    """The part of the client that an engine needs."""

    @property
    def troubles(self) -> Mapping[str, int]:
        """Error code → how often a read became a miss because of it."""

    def space(self, identity: SpaceIdentity, shards: Sequence[ShardSpec]) -> Space:
        """Open a space."""

    def report_prefill(self, seconds_per_token: float) -> None:
        """Tell what recomputing a token costs here."""

    def close(self) -> None:
        """End the connection."""
