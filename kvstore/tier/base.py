"""The interface of a tier below host memory: jobs in, completions out.

The node decides what is written where (:mod:`kvstore.state.disk.log`); the tier moves the bytes and
checks them. No call blocks. The memory of a job must stay valid until its completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import KVStoreError
from kvstore.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.disk.jobs import DiskDrop, DiskSeal, DiskSync, DiskTombstone
from kvstore.state.tree.places import Place


@dataclass(frozen=True, slots=True)
class PageRecord:
    """The data of a page in its record.

    Attributes:
        digest: 16 bytes, see :func:`kvstore.page.page_seeds`; checked before a write, after a read.
        tokens: uint32 little-endian tokens of the page, or empty.
    """

    key: PrefixKey
    parent: PrefixKey
    space: SpaceIdentity
    shard: ShardSpec
    page_bytes: int
    digest: bytes
    tokens: bytes = b""


@dataclass(frozen=True, slots=True)
class WritePage:
    """Write a record; ``address`` is the address of the page in memory, 4096-aligned."""

    job: int
    place: Place
    record: PageRecord
    address: int


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read a record's page to ``address``; 4096-aligned memory, a multiple of 4096 bytes."""

    job: int
    place: Place
    record: PageRecord
    address: int


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """Read the tokens in a record, without its page."""

    job: int
    place: Place
    record: PageRecord


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy the record at ``source`` to ``place``."""

    job: int
    source: Place
    place: Place
    record: PageRecord


Job = WritePage | ReadPage | ReadTokens | CopyPage | DiskTombstone | DiskSync | DiskSeal | DiskDrop
"""Jobs of pages name addresses and identities; the others are those of the state."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one job; ``error`` None = success.

    Attributes:
        tokens: of a read: the tokens in the record; empty if it has none.
    """

    job: int
    error: KVStoreError | None = None
    tokens: bytes = b""


class Tier(Protocol):
    """A tier; all calls come from the node's thread.

    A new tier implements this, and must pass :class:`kvstore.testing.contract.TierContract`.
    """

    def submit(self, jobs: Sequence[Job]) -> None:
        """Submit jobs. Writes and reads may end in any order; a ``DiskSync`` covers ended ones."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is in progress; returns False on timeout."""
        ...

    def close(self) -> None:
        """End jobs in progress within a limited time, and release all resources."""
        ...
