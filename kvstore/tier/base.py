"""What a tier below host memory does for its node: jobs in, completions out.

The node decides what is written where (:mod:`kvstore.state.disk.log`); the tier moves the bytes and
checks them. No call here blocks; a job whose memory is named stays valid until its completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.errors import KVStoreError
from kvstore.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.tree.places import Place


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What a record says of its page.

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
    """Write a record; ``address`` is where the page lies in memory, 4096-aligned."""

    job: int
    place: Place
    record: PageRecord
    address: int


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Read a record's page to ``address``, 4096-aligned, with room up to the next 4096 bytes."""

    job: int
    place: Place
    record: PageRecord
    address: int


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """Read what a record has of its page's tokens, and nothing of the page."""

    job: int
    place: Place
    record: PageRecord


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Write the record at ``source`` again at ``place``."""

    job: int
    source: Place
    place: Place
    record: PageRecord


@dataclass(frozen=True, slots=True)
class WriteTombstone:
    """Write that these pages were taken out on purpose: they must not come back at a start.

    It counts against every record of its space, shard and keys that was submitted before it.
    :data:`kvstore.page.ALL_KEYS` among them means every key.
    """

    job: int
    place: Place
    space: SpaceIdentity
    shard: ShardSpec
    keys: bytes


@dataclass(frozen=True, slots=True)
class SyncAll:
    """Make durable every write that was completed when this job was submitted.

    Once a sync of a segment has failed, every SyncAll fails until that segment is dropped: nobody
    knows what of it the disk has.
    """

    job: int


@dataclass(frozen=True, slots=True)
class SealSegment:
    """Write the footer of a segment that is full, durably; its writes have completed.

    Syncs its records first. No record is written there afterwards, also when it failed: then it can
    be tried again, or left to the next start, which scans the segment.
    """

    job: int
    segment: int


@dataclass(frozen=True, slots=True)
class DropSegment:
    """Delete a segment's file, durably; nobody reads it any more.

    Copies of its pages elsewhere have been synced before, and no other segment has a record older
    than its tombstones: else pages that were taken out would be back at the next start.
    """

    job: int
    segment: int


Job = (
    WritePage | ReadPage | ReadTokens | CopyPage | WriteTombstone | SyncAll | SealSegment
    | DropSegment
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one job; ``error`` None = all of it was done.

    Attributes:
        tokens: of a read: those that its record has; empty when it has none.
    """

    job: int
    error: KVStoreError | None = None
    tokens: bytes = b""


class Tier(Protocol):
    """A tier as its node drives it; all calls come from the node's thread.

    Whoever adds a tier implements this, and shows by
    :class:`kvstore.testing.contract.TierContract` that it keeps what is asked of it.
    """

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs. Writes and reads may end in any order; a SyncAll covers what it says."""
        ...

    def poll(self) -> list[Completion]:
        """What has ended since the last call."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False when the time was not enough."""
        ...

    def close(self) -> None:
        """End the work under way, within a bounded time, and release every resource."""
        ...
