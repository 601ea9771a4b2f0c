"""The disk contents of a simulated node, which stay when the node is killed."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.protocol.page import ALL_KEYS, KEY_BYTES, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.disk.jobs import DiskTombstone, PageRecord
from kvstore.state.disk.log import SegmentLog
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.places import Place

_NO_PARENT: Final = PrefixKey(bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Record:
    """A page on disk.

    Attributes:
        sequence: sequence number, higher than of all that was submitted before.
        content: its bytes.
    """

    sequence: int
    identity: SpaceIdentity
    spec: ShardSpec
    key: PrefixKey
    parent: PrefixKey
    digest: bytes
    tokens: bytes
    content: bytes


@dataclass(frozen=True, slots=True)
class _Tombstone:
    sequence: int
    identity: SpaceIdentity
    spec: ShardSpec
    keys: frozenset[bytes]

    def removes(self, record: Record) -> bool:
        same = (record.identity, record.spec) == (self.identity, self.spec)
        named = record.key in self.keys or ALL_KEYS in self.keys
        return same and named and record.sequence < self.sequence


@dataclass(frozen=True, slots=True)
class _Segment:
    size_bytes: int
    end: int
    records: int


class RecordsOnDisk:
    """The records on a disk, and what a start finds there.

    Attributes:
        pages: place → its record.
    """

    def __init__(self) -> None:
        self.pages: dict[Place, Record] = {}
        self._tombstones: dict[Place, _Tombstone] = {}
        self._sealed: set[int] = set()
        self._segments: dict[int, _Segment] = {}
        self._next_segment = 1
        self._sequence = 0

    def submitted(self) -> int:
        """The sequence number of a job that is submitted now."""
        self._sequence += 1
        return self._sequence

    def write(self, place: Place, page: PageRecord, sequence: int, tokens: bytes, content: bytes
              ) -> None:  # fmt: skip
        """Put a page's record there."""
        self.pages[place] = Record(
            sequence, page.space, page.shard, page.key, page.parent, page.digest, tokens, content
        )

    def bury(self, job: DiskTombstone, sequence: int) -> None:
        """Put a tombstone there."""
        keys = [job.keys[at : at + KEY_BYTES] for at in range(0, len(job.keys), KEY_BYTES)]
        self._tombstones[job.place] = _Tombstone(sequence, job.space, job.shard, frozenset(keys))

    def seal(self, segment: int) -> None:
        """Write its footer."""
        self._sealed.add(segment)

    def drop(self, segment: int) -> None:
        """Delete its file."""
        for records in (self.pages, self._tombstones):
            for place in [at for at in records if at.segment == segment]:
                del records[place]
        self._sealed.discard(segment)

    def left_by(self, log: SegmentLog) -> None:
        """The node that wrote it has ended; ``log`` is what it knew of its files."""
        written = {at.segment for at in (*self.pages, *self._tombstones)}
        self._segments = {
            number: _Segment(one.size_bytes, one.end, one.records)
            for number, one in log.segments.items()
            if number in written
        }
        assert written == self._segments.keys(), "records in files that the node did not know"
        self._next_segment = log.next_segment

    def adopted_by(self, table: PageTable) -> int:
        """Give an empty page table with a disk side what a start would find; returns the pages."""
        pairs: list[tuple[SpaceIdentity, ShardSpec]] = []
        found = [self._found(number, pairs) for number in sorted(self._segments)]
        return adopt(table, found, pairs, self._next_segment)

    def _found(self, number: int, pairs: list[tuple[SpaceIdentity, ShardSpec]]) -> FoundSegment:
        there = sorted((at.offset, one) for at, one in self.pages.items() if at.segment == number)
        standing = [(offset, one) for offset, one in there if self._stands(one)]
        for _, one in standing:
            if (one.identity, one.spec) not in pairs:
                pairs.append((one.identity, one.spec))
        buried = [one.sequence for at, one in self._tombstones.items() if at.segment == number]
        segment = self._segments[number]
        assert segment.end <= segment.size_bytes
        return FoundSegment(
            number, segment.size_bytes, number in self._sealed, segment.end, segment.records,
            b"".join(one.key for _, one in standing),
            b"".join(one.parent or _NO_PARENT for _, one in standing),
            b"".join(one.digest for _, one in standing),
            np.array([offset for offset, _ in standing], np.uint64),
            np.array([pairs.index((one.identity, one.spec)) for _, one in standing], np.uint16),
            min((one.sequence for _, one in there), default=0),
            max(buried, default=0),
        )  # fmt: skip

    def _stands(self, record: Record) -> bool:
        """It is the latest record of its page, and was not removed after it was written."""
        if any(one.removes(record) for one in self._tombstones.values()):
            return False
        name = record.identity, record.spec, record.key
        return all(
            one.sequence <= record.sequence
            for one in self.pages.values()
            if (one.identity, one.spec, one.key) == name
        )
