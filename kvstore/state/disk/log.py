"""The SSD log as the node's state sees it: where each record is. Pure.

Segments are files of equal size, written front to back and freed as a whole. A record is a
header and one page; ``docs/internals/ssd-format.md`` describes its bytes.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Final

from kvstore.protocol.page import KEY_BYTES
from kvstore.state.disk.order import NEVER_AWAITED, Order, awaited_by, eldest_of
from kvstore.state.disk.plans import NodePart, Reclaim, parts_of, plan
from kvstore.state.disk.records import PageRecords, Stretch
from kvstore.state.tree.columns import PLACE_COLUMN, pack_places, unpack_place, unpack_places
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import Place, footer_bytes, record_bytes
from kvstore.state.tree.prefix_tree import PrefixTree

SEGMENT_PAIRS_MAX: Final = 64
SEGMENTS_MIN: Final = 4
"""Two open ones, one to reclaim, and one to carry records to."""
FREE_SEGMENTS_MIN: Final = 3
"""Reclaiming starts when fewer can be created: one for carried pages, two ahead for new ones."""
STRETCH_PAGES: Final = 256
"""Records that one stretch of :meth:`SegmentLog.checks` examines: some 100 microseconds."""
CARRY_SHARE: Final = 0.5
"""Maximum part of a reclaimed segment that is written again: a reclaim frees at least half of
it."""


class Placed:
    """A place for consecutive records.

    Args:
        place: of the first record.
        pages: how many of the records fit.
    """

    __slots__ = ("pages", "place")

    def __init__(self, place: Place, pages: int) -> None:
        self.place = place
        self.pages = pages


class SegmentState(Enum):
    """The state of a segment."""

    OPEN = 0
    FULL = 1
    """Accepts no more records; its footer is to be written."""
    SEALED = 2
    DRAINING = 3
    """Its records are being carried over or dropped; then its file is deleted."""


@dataclass(slots=True, eq=False)
class Segment:
    """One file of the log.

    Attributes:
        number: names it.
        size_bytes: of its file.
        end: offset behind its last record.
        records: number of its records, including dead ones.
        pairs: (space, shard) pairs of its records.
        pages: the pages that have their record here, and those whose record is being written.
        writing: records being written.
        readers: reads and copies in progress.
        sealing: its footer is being written.
        failed: something could not be written or synced here; it is reclaimed first.
        order: which segments its tombstones wait for: records in them would return without the
            tombstones.
        copied_to: numbers of the segments to which its pages were copied in vain: it is not
            reclaimed before them.
    """

    number: int
    size_bytes: int
    order: Order
    state: SegmentState = SegmentState.OPEN
    end: int = 0
    records: int = 0
    pairs: set[tuple[int, int]] = field(default_factory=set)
    pages: PageRecords = field(default_factory=PageRecords)
    writing: int = 0
    readers: int = 0
    sealing: bool = False
    failed: bool = False
    copied_to: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class LogStats:
    """A snapshot of a :class:`SegmentLog`."""

    capacity_bytes: int
    used_bytes: int
    live_bytes: int
    dead_bytes: int
    segments: int
    written_bytes: int
    carried_bytes: int
    reclaimed_segments: int

    @property
    def write_amplification(self) -> float:
        """Bytes written per byte stored."""
        return 1.0 + self.carried_bytes / self.written_bytes if self.written_bytes else 1.0


class SegmentLog:
    """All segments of one node.

    Records of new pages and of carried ones go to separate open segments, so that pages that were
    used again are together. The last free segment is reserved for carried records, so that
    reclaiming can always continue.

    Args:
        segment_count: maximum segments, :data:`SEGMENTS_MIN` or more.
        segment_bytes: of each new one.
    """

    def __init__(self, segment_count: int, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        #: A larger record fits no segment.
        self.record_bytes_max = segment_bytes - footer_bytes(1)
        self.capacity_bytes = segment_count * segment_bytes
        self.segments: dict[int, Segment] = {}
        self.next_segment = 1
        self._next_rank = 0
        #: How often pages have left the disk.
        self.removals = 0
        #: Segments that failed and have no pages any more. They are no longer synced, and are
        #: deleted when room is needed and their tombstones wait for no other segment.
        self.given_up: set[int] = set()
        #: All and only the segments in state FULL.
        self.full: list[Segment] = []
        self._open: dict[bool, Segment] = {}
        self._used_bytes = 0
        self._written_bytes = 0
        self._carried_bytes = 0
        self._reclaimed = 0
        self._failed = 0

    # ---- records ----------------------------------------------------------------------------

    def place(
        self, space: PrefixTree, shard: int, keys: bytes, tick: int, *, carried: bool = False
    ) -> Placed | None:
        """Reserve places for records of pages, as many as fit together; None if no segment is free.

        The caller writes them there, and calls :meth:`wrote` or :meth:`abandon` for each.
        """
        size, pages = space.shards[shard].record_bytes, len(keys) // KEY_BYTES
        taken = self._take(size, (space.number, shard), pages, carried=carried)
        if taken is None:
            return None
        assert 0 < taken[1] <= pages
        segment, pages = taken
        place = Place(segment.number, segment.end - pages * size)
        if pages * KEY_BYTES < len(keys):  # compiled code copies a slice of all bytes, too
            keys = keys[: pages * KEY_BYTES]
        segment.pages.add(space, shard, keys, place.offset, size, tick)
        if carried:
            self._carried_bytes += pages * size
        else:
            self._written_bytes += pages * size
        return Placed(place, pages)

    def has_room(self, space: PrefixTree, shard: int) -> bool:
        """Whether :meth:`place` would find a place for a new page now."""
        size, segment = space.shards[shard].record_bytes, self._open.get(False)
        fits = segment is not None and _fitting(segment, size, (space.number, shard), 1) > 0
        return fits or self._may_begin(size, carried=False)

    def place_tombstone(self, space: PrefixTree, shard: int, keys: int) -> Place | None:
        """Reserve a place for a tombstone of ``keys`` keys; None if no segment is free.

        Never among carried pages: then all segments for which a segment waits can be reclaimed
        before it. The caller writes it there, and calls :meth:`wrote` even if that failed.
        """
        size = record_bytes(keys * KEY_BYTES)
        taken = self._take(size, (space.number, shard), 1, carried=False)
        if taken is None:
            return None
        segment = taken[0]
        segment.order.until = self._next_rank
        return Place(segment.number, segment.end - size)

    def wrote(self, place: Place, records: int = 1) -> None:
        """Records of this segment are written."""
        segment = self.segments[place.segment]
        assert segment.writing >= records
        segment.writing -= records

    def abandon(self, place: Place) -> None:
        """The record of a page was not written, or is no longer needed."""
        self.wrote(place)
        self._bury(place)

    def remove(self, node: PrefixNode, shard: int) -> None:
        """The pages of a node are no longer on disk."""
        self.removals += 1
        for place in unpack_places(node.place_columns[shard]):
            self._bury(place)

    def moved(self, source: Place, place: Place) -> None:
        """The record of a page was carried from ``source`` to ``place``."""
        self._bury(source)
        self.wrote(place)

    def pin_segment(self, number: int) -> None:
        """Keep the file of a segment while it is read."""
        segment = self.segments[number]
        assert segment.pages, "its file may be deleted meanwhile"
        segment.readers += 1

    def unpin_segment(self, number: int) -> None:
        """One reader has finished."""
        segment = self.segments[number]
        assert segment.readers > 0
        segment.readers -= 1

    def adopt(
        self, number: int, size_bytes: int, end: int, records: int, *, sealed: bool,
        order: Order | None = None,
    ) -> None:  # fmt: skip
        """Add a segment that was found at the start; it accepts no more records.

        Without an ``order`` it is younger than all others, and has no tombstones.

        A power cut can leave a file shorter than it was created, without room for its footer: it
        then has no footer, and is scanned at every start until it is reclaimed.
        """
        assert number not in self.segments
        done = sealed or end + footer_bytes(records) > size_bytes
        state = SegmentState.SEALED if done else SegmentState.FULL
        order = order or Order(self._next_rank)
        if order.rank < NEVER_AWAITED:
            self._next_rank = max(self._next_rank, order.rank + 1)
        segment = self.segments[number] = Segment(number, size_bytes, order, state, end, records)
        if not done:
            self.full.append(segment)
        self._used_bytes += size_bytes

    def adopt_pages(self, spaces: Iterable[PrefixTree]) -> None:
        """Add all pages of these spaces, which were found in such segments."""
        found: dict[int, list[tuple[int, PrefixTree, int, bytes]]] = {}
        for space in spaces:
            space.disk_bytes = 0
            for number in space.by_creation.numbers(0):
                for node in space.by_creation.nodes(number):
                    for shard, column in node.place_columns.items():
                        space.disk_bytes += node.count * space.shards[shard].record_bytes
                        at = 0
                        for place, pages in adjacent(column, space.shards[shard].record_bytes):
                            keys = node.keys[at * KEY_BYTES : (at + pages) * KEY_BYTES]
                            record = place.offset, space, shard, keys
                            found.setdefault(place.segment, []).append(record)
                            at += pages
        for number, records in found.items():
            known = self.segments[number].pages
            for offset, space, shard, keys in sorted(records, key=lambda record: record[0]):
                known.add(space, shard, keys, offset, space.shards[shard].record_bytes, 0)

    # ---- segments ---------------------------------------------------------------------------

    @property
    def free_segments(self) -> int:
        """Number of segments that can still be created."""
        return max(0, self.capacity_bytes - self._used_bytes) // self.segment_bytes

    @property
    def reservable_bytes(self) -> int:
        """Maximum sum of reservations: reclaiming must find other pages to drop."""
        return max(0, self.capacity_bytes - SEGMENTS_MIN * self.segment_bytes) // 2

    def victim(self, barren: Container[int] = ()) -> Segment | None:
        """The segment to reclaim next: a failed one, one without live records, or the oldest one.

        Intact ones only if room is needed, and none before those that its tombstones wait for. If
        all wait for an open one, that is closed, to be sealed and reclaimed first. No segment of
        ``barren``, unless tombstones wait for it: then it is copied, so that they can be removed.
        A failed one need not wait: when its pages have left it is given up, not deleted.
        """
        short = self.free_segments < FREE_SEGMENTS_MIN
        sealed = [one for one in self.segments.values() if one.state is SegmentState.SEALED]
        wanted = [one for one in sealed if short or one.failed]
        if not wanted:
            return None
        eldest = eldest_of(one.order for one in self.segments.values())
        candidates = [
            one
            for one in wanted
            if (one.failed or not one.order.until or not eldest.holds_up(one.order))
            and not (one.copied_to and self._waits_for_copies(one))
        ]
        awaited = awaited_by(one.order for one in wanted)
        targets = {number for one in wanted for number in one.copied_to}
        if not candidates:
            for carried, segment in list(self._open.items()):
                if awaited.has(segment.order) or segment.number in targets:
                    self._close(carried)
        candidates = [
            one
            for one in candidates
            if one.number not in barren or one.number in targets or awaited.has(one.order)
        ]
        return min(candidates, key=lambda one: (not one.failed, bool(one.pages)), default=None)

    def _waits_for_copies(self, segment: Segment) -> bool:
        """Whether pages of a segment that were copied in vain are still where they were copied."""
        return any(at in self.segments and at not in self.given_up for at in segment.copied_to)

    def holds_up(self, segment: Segment) -> bool:
        """Whether a segment's tombstones wait for other segments."""
        if not segment.order.until:
            return False
        return eldest_of(one.order for one in self.segments.values()).holds_up(segment.order)

    def give_up(self, segment: Segment) -> None:
        """Keep a failed segment without pages; it is deleted when room is needed and it may go."""
        assert segment.failed
        assert not segment.pages
        segment.failed, segment.state = False, SegmentState.SEALED
        self.given_up.add(segment.number)
        self._failed -= 1
        assert self._failed >= 0

    @property
    def is_failing(self) -> bool:
        """Whether there is a failed segment."""
        return self._failed > 0

    @property
    def wants_reclaim(self) -> bool:
        """Whether room is needed, or there is a failed segment to reclaim."""
        return self.free_segments < FREE_SEGMENTS_MIN or self.is_failing

    def fail(self, number: int) -> None:
        """Something could not be written or synced in a segment: it gets no more records."""
        segment = self.segments.get(number)
        if segment is None or segment.failed or number in self.given_up:
            return
        segment.failed = True
        self._failed += 1
        assert self._failed <= len(self.segments)
        for carried, open_segment in list(self._open.items()):
            if open_segment is segment:
                self._close(carried)

    def _close(self, carried: bool) -> None:  # noqa: FBT001
        segment = self._open.pop(carried, None)
        if segment is not None:
            assert segment.state is SegmentState.OPEN
            segment.state = SegmentState.FULL
            self.full.append(segment)

    def plan(
        self, victim: Segment, tick: int, carry_from: float,
        kept: Mapping[int, int] = MappingProxyType({}), parts: Sequence[NodePart] | None = None,
    ) -> Iterator[Reclaim | None]:  # fmt: skip
        """Which pages of a segment to carry over, found in steps.

        Pages that were used since they were written are carried over, the last used ones first, up
        to :data:`CARRY_SHARE` of the segment including all of ``kept``; with them the pages before
        them in the same segment.

        Args:
            victim: the segment.
            tick: the current tick.
            carry_from: from which part of its time on disk on a page must be used, 0 to 1.
            kept: offset → size of the records that must not be dropped, closed towards parents.
            parts: the pages of the segment; None = find them.

        Yields:
            None after each step, and the plan after the last one.
        """
        budget = int(victim.size_bytes * CARRY_SHARE)
        if parts is None:
            parts = list(parts_of(victim.pages))
        return plan(victim.number, parts, budget, tick, carry_from, kept)

    def sealed(self, number: int) -> None:
        """The footer of a full segment was written, or cannot be."""
        segment = self.segments[number]
        assert segment.state is SegmentState.FULL
        assert not segment.writing, "its footer does not tell of that record"
        segment.state = SegmentState.SEALED
        self.full.remove(segment)

    def free(self, number: int) -> None:
        """The file of a drained segment was deleted."""
        segment = self.segments.pop(number)
        assert not segment.pages
        assert not segment.writing
        assert not segment.readers
        assert segment not in self._open.values()
        self.given_up.discard(number)
        self._used_bytes -= segment.size_bytes
        self._failed -= segment.failed
        assert self._used_bytes >= 0 <= self._failed
        self._reclaimed += 1

    def stats(self) -> LogStats:
        """A consistent snapshot of the sizes."""
        live = sum(one.pages.live_bytes for one in self.segments.values())
        ends = sum(one.end for one in self.segments.values())
        return LogStats(
            self.capacity_bytes, self._used_bytes, live, ends - live, len(self.segments),
            self._written_bytes, self._carried_bytes, self._reclaimed,
        )  # fmt: skip

    def checks(self) -> Iterator[None]:
        """Assert every invariant, a stretch at a time; see :mod:`kvstore.state.table.invariants`.

        A record that its page does not point to is one that is still being written.
        """
        assert self._used_bytes == sum(one.size_bytes for one in self.segments.values())
        assert self._used_bytes <= self.capacity_bytes or not self._written_bytes
        assert self._failed == sum(one.failed for one in self.segments.values())
        for segment in list(self.segments.values()):
            live_bytes = strays = looked = 0
            records, pages, writing = segment.records, len(segment.pages), segment.writing
            for stretch in list(segment.pages.stretches):
                live_bytes += stretch.live.bit_count() * stretch.each
                strays += _strays(segment.number, stretch)
                looked += stretch.pages
                if looked >= STRETCH_PAGES:
                    looked = 0
                    yield
            yield
            if self.segments.get(segment.number) is not segment:
                continue
            if (records, pages) == (segment.records, len(segment.pages)):
                assert segment.pages.live_bytes == live_bytes <= segment.end
                assert strays <= writing
            assert segment.writing >= 0 <= segment.readers
            assert segment.order.until <= self._next_rank
            if segment.number in self.given_up:
                assert not segment.failed
                assert not segment.pages
            if segment.state in (SegmentState.OPEN, SegmentState.FULL):
                assert segment.end + footer_bytes(segment.records) <= segment.size_bytes
            assert (segment.state is SegmentState.OPEN) == (segment in self._open.values())

    # ---- inside -----------------------------------------------------------------------------

    def _take(
        self, size: int, pair: tuple[int, int], records: int, *, carried: bool
    ) -> tuple[Segment, int] | None:
        """Reserve room for records of ``pair`` at the end of an open segment; count their writes.

        Returns:
            the segment, and how many of the records fit; None if none does.
        """
        segment = self._open.get(carried)
        fitting = _fitting(segment, size, pair, records) if segment is not None else 0
        if segment is None or not fitting:
            segment = self._next(size, carried=carried)
            if segment is None:
                return None
            fitting = _fitting(segment, size, pair, records)
        segment.end += fitting * size
        segment.records += fitting
        segment.pairs.add(pair)
        segment.writing += fitting
        assert segment.end + footer_bytes(segment.records) <= segment.size_bytes
        return segment, fitting

    def _next(self, size: int, *, carried: bool) -> Segment | None:
        """Close the open segment of a kind and open another one."""
        if not self._may_begin(size, carried=carried):
            return None
        self._close(carried)
        segment = Segment(self.next_segment, self.segment_bytes, Order(self._next_rank))
        assert segment.number not in self.segments, "its file would be overwritten"
        self.next_segment += 1
        self._next_rank += 1
        self._used_bytes += segment.size_bytes
        assert self._used_bytes <= self.capacity_bytes
        self.segments[segment.number] = self._open[carried] = segment
        return segment

    def _may_begin(self, size: int, *, carried: bool) -> bool:
        """Whether another segment can be created, and has room for a record of this size."""
        enough = self.free_segments >= (1 if carried else 2)
        return enough and size <= self.record_bytes_max

    def _bury(self, place: Place) -> None:
        self.segments[place.segment].pages.remove(place.offset)


def adjacent(column: bytes, each: int) -> Iterator[tuple[Place, int]]:
    """The places of a column, grouped into adjacent records of ``each`` bytes.

    Yields:
        the place of the first record of a group, and their number.
    """
    first, pages = unpack_place(column), len(column) // PLACE_COLUMN
    if column == pack_places(first, each, pages):
        yield first, pages
        return
    first, pages = Place(0, 0), 0
    for place in unpack_places(column):
        if pages and place == Place(first.segment, first.offset + pages * each):
            pages += 1
            continue
        if pages:
            yield first, pages
        first, pages = place, 1
    if pages:
        yield first, pages


def _fitting(segment: Segment, size: int, pair: tuple[int, int], records: int) -> int:
    """How many of ``records`` records of one size fit into the rest of a segment."""
    if pair not in segment.pairs and len(segment.pairs) >= SEGMENT_PAIRS_MAX:
        return 0
    room = segment.size_bytes - segment.end
    fitting = max(0, min(records, (room - footer_bytes(segment.records + records)) // size))
    while fitting < records:  # the footer of fewer records is shorter
        if (fitting + 1) * size + footer_bytes(segment.records + fitting + 1) > room:
            break
        fitting += 1
    return fitting


def _strays(number: int, stretch: Stretch) -> int:
    """Live records of a stretch of a segment that their pages do not point to."""
    strays, at, index = 0, 0, stretch.space.index
    while at < stretch.pages:
        if not stretch.live >> at & 1:
            at += 1
            continue
        place = Place(number, stretch.offset + at * stretch.each)
        node = index.get(stretch.key(at))
        there = node is not None and node.on_disk >> stretch.shard & 1
        if node is None or not there:
            strays += 1
        else:
            strays += node.place_at(stretch.shard, node.position(stretch.key(at))) != place
        at += 1
    return strays
