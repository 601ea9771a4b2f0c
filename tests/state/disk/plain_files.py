"""Files of an SSD log in the plainest way: a list of records, and what a start finds in them.

It follows the words of ``docs/internals/ssd-format.md`` and knows nothing of the product's own
recovery.
"""

from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np

from kvstore.state.table.adopt import FoundSegment
from kvstore.state.tree.places import Place, footer_bytes
from tests.state.single_pages import Page
from tests.state.world import key

Content = tuple[Page, bytes]
"""Whose bytes these are, and their digest: digests are given to one put only."""


@dataclass(eq=False)
class PlainRecord:
    """What was handed to the disk.

    Attributes:
        place: where it lies.
        size: bytes of it.
        sequence: its place in the order of all that was submitted.
        pages: whose record it is; of a tombstone, what it removes.
        tombstone: it is one.
        content: of a page, once it is written.
        written: its bytes are in the file.
        synced: no power cut takes it.
        rotten: its bytes are not any more what was written.
    """

    place: Place
    size: int
    sequence: int
    pages: frozenset[Page]
    tombstone: bool = False
    content: Content | None = None
    written: bool = False
    synced: bool = False
    rotten: bool = False

    @property
    def page(self) -> Page:
        """Whose it is."""
        (page,) = self.pages
        return page


@dataclass
class PlainFile:
    """One segment."""

    records: list[PlainRecord] = field(default_factory=list)
    sealed: bool = False


class PlainFiles:
    """All segments of one log.

    Args:
        segment_bytes: of each file.
        windows: shards of which a page is of use without its head.
    """

    def __init__(self, segment_bytes: int, windows: frozenset[int]) -> None:
        self.segment_bytes = segment_bytes
        self.windows = windows
        self.by_number: dict[int, PlainFile] = {}
        #: Segments that cannot be synced any more.
        self.unsyncable: set[int] = set()
        self.last_number = 0
        self._sequences = count(1)

    def records(self) -> list[PlainRecord]:
        """All that there are."""
        return [one for file in self.by_number.values() for one in file.records]

    def at(self, place: Place) -> PlainRecord:
        """The record that begins there."""
        (found,) = [one for one in self.by_number[place.segment].records if one.place == place]
        return found

    def submit(
        self, place: Place, size: int, pages: frozenset[Page], *, tombstone: bool = False
    ) -> PlainRecord:
        """A job to write it was given to the disk; nothing else may ever have been there."""
        if place.segment not in self.by_number:
            assert place.segment > self.last_number, "a number is used once"
            self.last_number = place.segment
            self.by_number[place.segment] = PlainFile()
        file = self.by_number[place.segment]
        assert not file.sealed, "a record after the footer"
        end = max((one.place.offset + one.size for one in file.records), default=0)
        assert place.offset >= end, "a place is given away once"
        assert place.offset + size + footer_bytes(len(file.records) + 1) <= self.segment_bytes
        made = PlainRecord(place, size, next(self._sequences), pages, tombstone)
        file.records.append(made)
        return made

    def sync(self, records: list[PlainRecord], *, fails: bool) -> tuple[int, ...]:
        """Sync what was written; which segments could not be: those before, and one more."""
        there = [one for one in records if one.place.segment in self.by_number and not one.synced]
        if fails and there:
            self.unsyncable.add(there[-1].place.segment)
        for one in there:
            one.synced = one.place.segment not in self.unsyncable
        return tuple(sorted({one.place.segment for one in there} & self.unsyncable))

    def seal(self, number: int, *, fails: bool) -> tuple[int, ...]:
        """Sync a segment and write its footer; the segment, if it could not be synced."""
        file = self.by_number[number]
        failed = self.sync([one for one in file.records if one.written], fails=fails)
        file.sealed = not failed
        return failed

    def stop(self, chance: Random, *, power: bool) -> None:
        """The process is killed, or the power fails; what is left is synced by the next start."""
        for file in self.by_number.values():
            file.records = [
                one
                for one in file.records
                if one.synced or ((one.written and not power) or chance.random() < 0.5)
            ]
            file.records = [one for one in file.records if one.written]
            for one in file.records:
                one.synced = True
        self.unsyncable.clear()

    # ---- what a start finds -----------------------------------------------------------------

    def _standing(self) -> list[PlainRecord]:
        """The newest record of each page, unless a tombstone is newer."""
        newest: dict[Page, PlainRecord] = {}
        for one in sorted(self.records(), key=lambda record: record.sequence):
            for page in one.pages:
                newest[page] = one
        return [one for one in self.records() if not one.tombstone and newest[one.page] is one]

    def reachable(self) -> dict[Page, PlainRecord]:
        """What is found, without pages whose head is not."""
        found = {one.page: one for one in self._standing()}
        for page in sorted(found, key=lambda page: len(page[1])):
            number, path, shard = page
            head = (number, path[:-1], shard)
            if shard not in self.windows and len(path) > 1 and head not in found:
                del found[page]
        return found

    def found(self, shards: int) -> list[FoundSegment]:
        """What is found, as a start tells it; pair number = space times ``shards``, plus shard."""
        standing = set(self._standing())
        segments = []
        for number, file in sorted(self.by_number.items()):
            mine = [one for one in file.records if one in standing]
            segments.append(
                FoundSegment(
                    number, self.segment_bytes, file.sealed,
                    max((one.place.offset + one.size for one in file.records), default=0),
                    len(file.records),
                    b"".join(key(one.page[1]) for one in mine),
                    b"".join(key(one.page[1][:-1]) or bytes(32) for one in mine),
                    b"".join(one.content[1] for one in mine if one.content is not None),
                    np.array([one.place.offset for one in mine], np.uint64),
                    np.array([one.page[0] * shards + one.page[2] for one in mine], np.uint16),
                    min((one.sequence for one in file.records if not one.tombstone), default=0),
                    max((one.sequence for one in file.records if one.tombstone), default=0),
                )
            )  # fmt: skip
        return segments
