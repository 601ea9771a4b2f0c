"""Jobs that the disk side of the page table gives to its tier. Pure values.

The tier uses the same jobs: only the address of a page in this process is added before.
"""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, NamedTuple, Protocol

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import KEY_BYTES, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.metering import Meter
from kvstore.state.tree.actions import TierStored
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import Place, adjacent_places, record_bytes
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Fetch, Fetches
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.state.tree.story import Moment, Story


class WritePolicy(StrEnum):
    """When ordinary pages are written to disk."""

    THROUGH = "through"
    """As soon as it is stored."""
    SELECTIVE = "selective"
    """When it is used for the first time after it was stored."""
    BACK = "back"
    """When its memory is needed."""


class SyncPolicy(StrEnum):
    """When written pages are made to survive a power cut."""

    NONE = "none"
    INTERVAL = "interval"
    ALWAYS = "always"


class Verdict(Enum):
    """The fate of a page whose memory is needed."""

    EVICT = 0
    WRITING = 1
    """It is being written first; its slot is pinned until then. Or only pages before it are."""
    FULL = 2
    """It should be written, but too many writes are in progress."""


EVICT: Final = Verdict.EVICT
WRITING: Final = Verdict.WRITING
FULL: Final = Verdict.FULL
NO_SYNC: Final = SyncPolicy.NONE
INTERVAL: Final = SyncPolicy.INTERVAL
THROUGH: Final = WritePolicy.THROUGH
SELECTIVE: Final = WritePolicy.SELECTIVE
"""Members of a class are looked up by Python code each time, these are not."""


@dataclass(frozen=True, slots=True)
class DiskRules:
    """When pages are written, and when written records are synced.

    Attributes:
        write: the policy for ordinary pages.
        sync: the policy for syncs; with ``none`` no put can be durable.
        sync_interval_ns: time between two syncs of the policy ``interval``.
        in_flight_bytes_max: maximum bytes being written at a time.
        retry_ns: time without writes after a failed write.
    """

    write: WritePolicy
    sync: SyncPolicy
    sync_interval_ns: int
    in_flight_bytes_max: int
    retry_ns: int = 5_000_000_000


NO_RULES: Final = DiskRules(WritePolicy.BACK, NO_SYNC, 0, 0)
"""Of a node without a disk."""


@dataclass(slots=True, init=False)
class PageRecord:
    """The content of a page's record; the page may be dropped before its job runs. Immutable.

    Nobody changes it.

    Attributes:
        key: of the page.
        parent: key of the page before it; empty at a chain's start.
        space: whose.
        shard: of it.
        page_bytes: of the page.
        digest: 16 bytes, see :func:`kvstore.protocol.page.page_seeds`; checked before a write,
            after a read.
        tokens: uint32 little-endian tokens of the page, for one that is to be written, if they are
            known.
    """

    key: PrefixKey
    parent: PrefixKey
    space: SpaceIdentity
    shard: ShardSpec
    page_bytes: int
    digest: bytes
    tokens: bytes = b""

    # Written out for the compiler, as in some classes below: what `dataclass` makes stays
    # interpreted, and each page that is written makes one.
    def __init__(
        self, key: PrefixKey, parent: PrefixKey, space: SpaceIdentity, shard: ShardSpec,
        page_bytes: int, digest: bytes, tokens: bytes = b"",
    ) -> None:  # fmt: skip
        self.key = key
        self.parent = parent
        self.space = space
        self.shard = shard
        self.page_bytes = page_bytes
        self.digest = digest
        self.tokens = tokens

    @property
    def length(self) -> int:
        """Bytes of the record on disk."""
        return record_bytes(self.page_bytes)


class RecordOf:
    """The page of a record, for the part that submitted the job."""

    __slots__ = ("shard", "space")

    def __init__(self, space: PrefixTree, shard: int) -> None:
        self.space = space
        self.shard = shard


def page_record(node: PrefixNode, shard: int, position: int = 0) -> PageRecord:
    """The record of a READY page of a node, without its tokens."""
    of, key, parent = node.space.shards[shard], node.key_at(position), node.key_before(position)
    assert parent is not None, node
    digest = node.digest_at(shard, position)
    return PageRecord(key, parent, node.space.identity, of.spec, of.page_bytes, digest)


@dataclass(slots=True, init=False, eq=False)
class DiskWrite:
    """Write the page in ``slot`` as a record at ``place``.

    Attributes:
        address: of the slot's bytes in this process, 4096-aligned. Set before the job is given to
            the tier; the bytes stay valid until the job has ended.
    """

    job: int
    place: Place
    page: PageRecord
    slot: Slot
    address: int = 0

    def __init__(
        self, job: int, place: Place, page: PageRecord, slot: Slot, address: int = 0
    ) -> None:
        self.job = job
        self.place = place
        self.page = page
        self.slot = slot
        self.address = address


@dataclass(slots=True, eq=False)
class DiskRead:
    """Read the record at ``place`` into ``slot``.

    Attributes:
        address: see :class:`DiskWrite`; whole blocks are written there.
    """

    job: int
    place: Place
    page: PageRecord
    slot: Slot
    address: int = 0


@dataclass(slots=True, eq=False)
class DiskCheck:
    """Read the record at ``place`` and compare it with its page; the bytes are not kept.

    Attributes:
        address: see :class:`DiskRead`; a temporary buffer.
    """

    job: int
    place: Place
    page: PageRecord
    address: int = 0


@dataclass(frozen=True, slots=True)
class DiskTokens:
    """Read the tokens in the record at ``place``, not its page."""

    job: int
    place: Place
    page: PageRecord


@dataclass(slots=True, eq=False)
class DiskCopy:
    """Copy the record at ``source`` to ``place``.

    Attributes:
        address: of the copied bytes; memory of the tier.
    """

    job: int
    source: Place
    place: Place
    page: PageRecord
    address: int = 0


@dataclass(frozen=True, slots=True)
class DiskTombstone:
    """Write at ``place`` that pages were removed on purpose, so that a start does not find them.

    It removes every record of its space, shard and packed keys that was submitted before it;
    :data:`kvstore.protocol.page.ALL_KEYS` stands for all keys.
    """

    job: int
    place: Place
    space: SpaceIdentity
    shard: ShardSpec
    keys: bytes

    @property
    def length(self) -> int:
        """Bytes of the record on disk."""
        return record_bytes(len(self.keys))


@dataclass(frozen=True, slots=True)
class DiskSync:
    """Make durable every write that had completed when this job was submitted.

    After a sync of a segment has failed, every sync fails until that segment is deleted or given
    up, because the contents of the disk are unknown.

    Attributes:
        given_up: segments in which nothing needs to be durable any more.
    """

    job: int
    given_up: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class DiskSeal:
    """Write the footer of a full segment, durably; its writes must have completed.

    Its records are synced first. No record is written to it afterwards, even if sealing failed:
    then it can be retried, or the next start scans the segment.
    """

    job: int
    segment: int


@dataclass(frozen=True, slots=True)
class DiskDrop:
    """Delete a segment's file, durably; no read of it may be in progress.

    Copies of its pages must be synced before, and no other segment may have a record older than its
    tombstones: otherwise the next start would find removed pages.
    """

    job: int
    segment: int


DiskJob = (
    DiskWrite | DiskRead | DiskCheck | DiskTokens | DiskCopy | DiskTombstone | DiskSync | DiskSeal
    | DiskDrop
)  # fmt: skip


DURABLES_MAX: Final = 1024
"""Maximum durable puts that wait for the disk, so that they do not pile up if it hangs."""


NOBODY_WAITS_NS: Final = 1
"""Deadline of a durable put that nobody waits for any more: no further write of it begins."""


@dataclass(slots=True, eq=False)
class Durable:
    """A durable put, or removal, that has not been acknowledged.

    Attributes:
        pages: of a put: space, shard, keys and digests.
        deadline_ns: no write of it begins from then on; 0 = never.
        pinned: slots of its pages in memory, pinned while there is a ``rest``.
        rest: keys of pages of which no write has begun for it, the last ones first.
        outstanding: writes, or tombstones, that have not ended; one more while there is a ``rest``.
        error: why it failed; None = it did not.
        ended: it was acknowledged, or failed.
        removals: how often pages had left the disk when ``places`` was noted, or when it began.
        places: where its pages were on disk before the sync that it waits for began; empty = not
            noted, no page had left the disk since it began.
        syncs: how many syncs did not cover all its pages.
    """

    pages: list[tuple[PrefixTree, int, bytes, bytes]] = field(default_factory=list)
    deadline_ns: int = 0
    rest: list[bytes] = field(default_factory=list)
    pinned: list[Slot] = field(default_factory=list)
    outstanding: int = 0
    error: KVStoreError | None = None
    ended: bool = False
    removals: int = 0
    places: bytes = b""
    syncs: int = 0


@dataclass(slots=True, init=False, eq=False)
class Write:
    """Consecutive pages that are being written to disk.

    Its pages settle together, once all their records are written or have failed.

    Attributes:
        space: their space.
        shard: their shard.
        keys: of the pages, 32 bytes each.
        slots: of the pages, pinned until the end.
        place: of the first record; the others follow it.
        each: bytes of a record.
        left: records that have not ended.
        hurried: it began for a durable put.
        waiters: durable puts of its pages.
        followers: writes that have ended and count only once this one does.
        errors: why records failed, by index.
    """

    space: PrefixTree
    shard: int
    keys: bytes
    slots: list[Slot]
    place: Place
    each: int
    left: int
    hurried: bool
    waiters: list[Durable]
    followers: "list[Write]"
    errors: dict[int, KVStoreError]

    def __init__(
        self, space: PrefixTree, shard: int, keys: bytes, slots: list[Slot], place: Place, each: int
    ) -> None:
        self.space = space
        self.shard = shard
        self.keys = keys
        self.slots = slots
        self.place = place
        self.each = each
        self.left = len(slots)
        self.hurried = False
        self.waiters, self.followers, self.errors = [], [], {}

    @property
    def size(self) -> int:
        """Bytes of all its records."""
        return len(self.slots) * self.each

    def places(self) -> list[Place]:
        """The places of its records."""
        return adjacent_places(self.place, self.each, len(self.slots))

    def place_of(self, number: int) -> Place:
        """The place of record ``number``."""
        return Place(self.place.segment, self.place.offset + number * self.each)

    def alike(self, first: int, most: int) -> int:
        """How many records from ``first`` on had the same result, success or failure."""
        if not self.errors:
            return most
        failed, end = first in self.errors, first + 1
        while end < first + most and (end in self.errors) == failed:
            end += 1
        return end - first


class PageLoad:
    """Consecutive pages that are being loaded from disk, and the fetches that wait for them.

    Attributes:
        space: their space.
        shard: their shard.
        keys: of the pages, 32 bytes each.
        digests: of the pages.
        slots: of the pages, WRITING until the end.
        since_ns: when it started.
        left: records that are not read yet.
        waiters: fetches that want some of the pages.
        tokens: tokens in each record that was read.
        errors: why records cannot be read, by index.
    """

    def __init__(
        self, space: PrefixTree, shard: int, keys: bytes, digests: bytes, slots: list[Slot],
        since_ns: int, waiter: Fetch,
    ) -> None:  # fmt: skip
        self.space = space
        self.shard = shard
        self.keys = keys
        self.digests = digests
        self.slots = slots
        self.since_ns = since_ns
        self.left = len(slots)
        self.waiters: list[Fetch] = [waiter]
        self.tokens: list[bytes] = [b""] * len(slots)
        self.errors: dict[int, KVStoreError] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of its slots."""
        return len(self.slots) * self.space.shards[self.shard].slot_bytes

    def matching(self, key: PrefixKey, packed: bytes) -> int:
        """How many of the packed keys match its page with this key and the following ones."""
        first = self.keys.find(key)
        while first % KEY_BYTES:
            first = self.keys.find(key, first + 1)
        at = 0
        while at < len(packed) and self.keys.startswith(
            packed[at : at + KEY_BYTES], first + at
        ):  # fmt: skip
            at += KEY_BYTES
        return at // KEY_BYTES

    def alike(self, first: int) -> int:
        """How many pages from ``first`` on had the same result; a failed one is alone."""
        if not self.errors:
            return len(self.slots) - first
        end = first + 1
        while first not in self.errors and end < len(self.slots) and end not in self.errors:
            end += 1
        return end - first


class PageMemory(Protocol):
    """The part of the page table that the disk side uses: it reads and counts, no decisions.

    :class:`kvstore.state.table.residents.Residents` implements it. That imports the disk side, so
    the disk side cannot import it.
    """

    slots: SlotTable
    fetches: Fetches
    counts: dict[str, int]
    meter: Meter
    moment: Moment
    story: Story


class LeftDisk(NamedTuple):
    """Effect: pages and their descendants leave the disk; those not in memory are dropped.

    If they are many, they leave in later turns, the last pages first.

    Attributes:
        keys: of consecutive pages, 32 bytes each.
    """

    space: PrefixTree
    shard: int
    keys: bytes
    cause: str


class CorruptRecord(NamedTuple):
    """Effect: a page is corrupt: drop it from every tier."""

    space: PrefixTree
    shard: int
    key: PrefixKey


class UnpinSlots:
    """Effect: the disk side no longer needs these slots: unpin them."""

    __slots__ = ("slots",)

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots


DiskEffect = PageLoad | TierStored | LeftDisk | CorruptRecord | UnpinSlots
"""What happened to pages; :mod:`kvstore.state.table.tiers` applies it. The pages of a
:class:`PageLoad` were read, or cannot be."""
