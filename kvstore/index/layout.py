"""The layout of the index's table in memory, and how a slot is found. Pure.

The table is one block of memory: a header, the state of each segment, the rows of the holder sets,
the holder directory (twice), and the slots (two regions for each segment). One process writes it,
any number read it. ``docs/internals/index.md`` describes what a reader may assume.

A *chain* (64 bits) names a prefix. Multiplied by a secret odd number it gives the segment (its
first bits) and a tag of 40 bits (the following ones). A **slot** is one word: the tag, and 24 bits
with the number of a holder set. 0 is an empty slot; a slot with a tag and set 0 is dead. Eight
slots are a cache **line**, filled from its first slot on: an entry is in its first line, or, as
long as lines are full, in one of those after it. The first line grows with the tag, so a segment is
rebuilt in the order of its tags, and read without wrapping.
"""

from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.mover.lookup import TableAddresses

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
AnyNumber = TypeVar("AnyNumber", int, Numbers)

HOLDER_BITS_MAX: Final = 1024
"""Bits of a holder set, one for each distinct (worker, medium, shard, group)."""
ROW_WORDS: Final = HOLDER_BITS_MAX // 64
DIRECTORY_BYTES: Final = 1 << 20
"""Maximum size of the holder directory."""

PAGE_BYTES: Final = 4096
PAGE_SLOTS: Final = PAGE_BYTES // 8
SEGMENT_ENTRIES: Final = 6144
"""Maximum mean number of entries in a segment: a rebuild takes about 0.1 ms."""
LINE_SLOTS: Final = 8
PAGE_LINES: Final = PAGE_SLOTS // LINE_SLOTS
OVERRUN_LINES: Final = 8
"""Lines at the end of a segment that are no entry's first."""
LOAD_MAX: Final = 0.78
"""Fraction of slots with a tag, live or dead, above which a segment is rebuilt."""
LOAD_REBUILT: Final = 0.55
"""Fraction of slots in use after a rebuild: growth is by about 1.3."""

SET_BITS: Final = np.uint64(24)
SET_MASK: Final = np.uint64((1 << 24) - 1)
NO_LANE: Final = LINE_SLOTS
_NEXT_LINES: Final = np.arange(4)
"""Lines read at once after the first, for few entries; most are in the first one."""
_FEW: Final = 200
_ONE: Final = np.uint64(1)
_EACH_BYTE: Final = np.uint64(0x0101_0101_0101_0101)
_LAST_BYTE: Final = np.uint64(56)
_TAG_BITS: Final = np.uint64(40)
_TAG_MASK: Final = np.uint64((1 << 40) - 1)
_SIZE_MASK: Final = np.uint64((1 << 31) - 1)
_HALF_SHIFT: Final = np.uint64(31)
_MAGIC: Final = 0x3130_5849_5653_564B
"""``KVSVIX01``: changes with the layout."""


class Field:
    """Positions of the words of the header."""

    MAGIC: Final = 0
    ENTRIES_MAX: Final = 1
    SETS_MAX: Final = 2
    SECRET: Final = 3
    HEARTBEAT_NS: Final = 4
    RECYCLED: Final = 5
    DIRECTORY: Final = 6


class TableLayout:
    """Where everything is, for a maximum number of entries and of holder sets.

    Args:
        entries_max: maximum entries, at least 1.
        sets_max: maximum distinct holder sets, the empty one included: 2 to 2**24.
    """

    def __init__(self, entries_max: int, sets_max: int) -> None:
        self.entries_max = entries_max
        self.sets_max = sets_max
        self.segment_bits = (max(1, -(-entries_max // SEGMENT_ENTRIES)) - 1).bit_length()
        self.segments = 1 << self.segment_bits
        mean = entries_max / self.segments
        most = min(entries_max, mean + 8 * mean**0.5 + 64)  # of a random distribution
        self.region_pages = int(most / LOAD_REBUILT // PAGE_SLOTS) + 2
        self.states_at = PAGE_BYTES
        self.rows_at = self.states_at + _whole_pages(8 * self.segments)
        self.directories_at = self.rows_at + _whole_pages(8 * ROW_WORDS * sets_max)
        self.slots_at = self.directories_at + 2 * DIRECTORY_BYTES
        self.total_bytes = self.slots_at + 2 * self.segments * self.region_pages * PAGE_BYTES


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class Located(NamedTuple):
    """Where some chains are, or where their probing ended.

    Attributes:
        lines: the line; -1 if there was neither the chain nor an empty slot in its segment.
        lanes: the slot in the line; NO_LANE if the chain is absent.
        words: content of that slot when it was read; 0 if the chain is absent.
    """

    lines: Numbers
    lanes: Numbers
    words: Words

    def positions(self) -> Numbers:
        """Index of the slot; -1 if the chain is absent."""
        return np.where(self.lanes < NO_LANE, self.lines * LINE_SLOTS + self.lanes, -1)

    def only(self, which: Numbers) -> "Located":
        """Some of them."""
        return Located(self.lines[which], self.lanes[which], self.words[which])


class Geometry:
    """Where all segments are, as long as their states are these.

    Args:
        states: uint64 [segments], a copy.
        region_lines: lines in a region.
    """

    def __init__(self, states: Words, region_lines: int) -> None:
        self.states = states
        pages = (states & _SIZE_MASK).view(np.int64)
        halves = ((states >> _HALF_SHIFT) & _ONE).view(np.int64)
        self.starts = (2 * np.arange(len(states)) + halves) * region_lines
        self.lasts = self.starts + pages * PAGE_LINES - 1
        self.firsts = first_lines(pages).view(np.uint64)


class TableView:
    """The parts of a table as arrays.

    Args:
        buffer: memory of ``layout.total_bytes``; the arrays refer to it.
        layout: its layout.
    """

    def __init__(self, buffer: memoryview, layout: TableLayout) -> None:
        def words(start: int, count: int) -> Words:
            return np.frombuffer(buffer, dtype=np.uint64, count=count, offset=start)

        self.layout = layout
        self.header = words(0, PAGE_SLOTS)
        self.states = words(layout.states_at, layout.segments)
        self.rows = words(layout.rows_at, layout.sets_max * ROW_WORDS).reshape(-1, ROW_WORDS)
        self.directories: Bytes = np.frombuffer(
            buffer, dtype=np.uint8, count=2 * DIRECTORY_BYTES, offset=layout.directories_at
        ).reshape(2, -1)
        self.region_lines = layout.region_pages * PAGE_LINES
        self.slots = words(layout.slots_at, 2 * layout.segments * layout.region_pages * PAGE_SLOTS)
        self.lines = self.slots.reshape(-1, LINE_SLOTS)
        self._factor = np.uint64((2 * int(self.header[Field.SECRET]) + 1) % (1 << 64))
        self._tag_shift = np.uint64(24 - layout.segment_bits)
        self._segment_shift = np.uint64(63 - layout.segment_bits)
        self.addresses = TableAddresses(
            (self.states, self.rows, self.slots), self.region_lines, int(self._factor),
            (int(self._segment_shift), int(self._tag_shift)),
        )  # fmt: skip
        self._geometry = Geometry(np.zeros_like(self.states), self.region_lines)

    def geometry(self) -> Geometry:
        """Where the segments are now; the same object as long as nothing changes."""
        if not np.array_equal(self.states, self._geometry.states):
            self._geometry = Geometry(self.states.copy(), self.region_lines)
        return self._geometry

    def hashed(self, chains: Words) -> tuple[Numbers, Words]:
        """The segment and the tag of each chain."""
        mixed = chains * self._factor
        segments = ((mixed >> _ONE) >> self._segment_shift).view(np.int64)
        tags = (mixed >> self._tag_shift) & _TAG_MASK
        return segments, np.maximum(tags, _ONE)  # no word with a tag is 0

    def locate(self, segments: Numbers, tags: Words, geometry: Geometry) -> Located:
        """Find the slots of tags in segments."""
        first = (tags * geometry.firsts.take(segments)) >> _TAG_BITS
        lines = first.view(np.int64) + geometry.starts.take(segments)
        read = self.lines.take(lines, axis=0)
        lanes = _lanes(((read >> SET_BITS) == tags[:, None]).view(np.uint64).ravel())
        # Of an absent chain, the line's last slot: 0 unless the line is full.
        slots = np.arange(0, read.size, LINE_SLOTS) + np.minimum(lanes, LINE_SLOTS - 1)
        words = read.ravel().take(slots)
        left = np.flatnonzero((lanes == NO_LANE) & (words != 0))
        found = Located(lines, lanes, words)
        if len(left):
            self._probe_on(found, left, tags[left], geometry.lasts[segments[left]])
        return found

    def _probe_on(self, found: Located, left: Numbers, tags: Words, lasts: Numbers) -> None:
        """Probe the lines after the first, up to the last of the segment."""
        line = found.lines[left] + 1
        while len(left):
            some = _NEXT_LINES if len(left) < _FEW else _NEXT_LINES[:2]
            every = line[:, None] + some
            # Not beyond the segment: reading would allocate its next page.
            read = self.lines.take(np.minimum(every, lasts[:, None]).ravel(), axis=0)
            same = (read >> SET_BITS) == tags.repeat(len(some))[:, None]
            hits = same.view(np.uint64).reshape(every.shape)
            over = every > lasts[:, None]
            stop = (hits != 0) | (read[:, -1] == 0).reshape(every.shape) | over
            rows, first = np.arange(len(left)), stop.argmax(axis=1)
            ended, over = every[rows, first], over[rows, first]
            lanes = np.where(over, NO_LANE, _lanes(hits[rows, first]))
            words = read.reshape(*every.shape, -1)[rows, first, np.minimum(lanes, LINE_SLOTS - 1)]
            found.lines[left] = np.where(over, -1, ended)
            found.lanes[left] = lanes
            found.words[left] = np.where(over, 0, words)
            on = np.flatnonzero(~stop[rows, first])
            left, tags, lasts = left[on], tags[on], lasts[on]
            line = line[on] + len(some)


def _lanes(hits: Words) -> Numbers:
    """The byte that is 1 in each word; NO_LANE if it is 0."""
    return (((hits - _ONE) & _EACH_BYTE) * _EACH_BYTE >> _LAST_BYTE).view(np.int64)


def slots_in_use(lines: Words) -> Numbers:
    """Number of slots in use of each line."""
    used: Words = (lines != 0).view(np.uint64).ravel()  # a byte of 1 for each
    return (used * _EACH_BYTE >> _LAST_BYTE).view(np.int64)


def first_lines(pages: AnyNumber) -> AnyNumber:
    """Number of lines of a segment that are first ones, for its number of pages."""
    return pages * PAGE_LINES - OVERRUN_LINES


class Switch(NamedTuple):
    """A word that says which of two places is in use: read and written atomically.

    Attributes:
        version: incremented with each change.
        half: the place in use, 0 or 1.
        size: of its contents: pages of a segment, bytes of a directory.
    """

    version: int
    half: int
    size: int

    @classmethod
    def read(cls, word: np.uint64) -> "Switch":
        """Decode a word."""
        value = int(word)
        return cls(value >> 32, value >> 31 & 1, value & (1 << 31) - 1)

    def switched(self, size: int) -> "Switch":
        """The other half, with something new in it."""
        return Switch((self.version + 1) % (1 << 32), 1 - self.half, size)

    def word(self) -> np.uint64:
        """The word to write."""
        return np.uint64(self.version << 32 | self.half << 31 | self.size)


def start_table(buffer: memoryview, layout: TableLayout, secret: int) -> TableView:
    """Make an empty table in zeroed memory; readers see it when this is done."""
    header = np.frombuffer(buffer, dtype=np.uint64, count=PAGE_SLOTS)
    header[Field.ENTRIES_MAX] = layout.entries_max
    header[Field.SETS_MAX] = layout.sets_max
    header[Field.SECRET] = secret
    view = TableView(buffer, layout)
    view.states[:] = Switch(0, 0, 1).word()
    header[Field.MAGIC] = _MAGIC
    return view


def open_table(buffer: memoryview) -> TableView | None:
    """Map a table that another process made; None if it is not there yet, or is not ours."""
    if len(buffer) < PAGE_BYTES:
        return None
    header = np.frombuffer(buffer, dtype=np.uint64, count=PAGE_SLOTS)
    if int(header[Field.MAGIC]) != _MAGIC:
        return None
    entries_max, sets_max = int(header[Field.ENTRIES_MAX]), int(header[Field.SETS_MAX])
    if not (0 < entries_max <= len(buffer) and 2 <= sets_max <= int(SET_MASK) + 1):
        return None
    layout = TableLayout(entries_max, sets_max)
    return TableView(buffer, layout) if len(buffer) >= layout.total_bytes else None
