"""The layout of the index's table in memory, and how a slot is found. Pure.

The table is one block of memory: a header, the state of each segment, the rows of the holder sets,
the holder directory (twice), and the slots (two regions for each segment). One process writes it,
any number read it. ``docs/internals/index.md`` describes what a reader may assume.

A *chain* (64 bits) names a prefix. Multiplied by a secret odd number it gives the segment (its
first bits) and a tag of 40 bits (the following ones). A **slot** is one word: the tag, and 24 bits
with the number of a holder set. 0 is an empty slot; a slot with a tag and set 0 is dead. The first
slot to probe grows with the tag, and probing goes up, so a segment is read without wrapping.
"""

from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]
AnyWords = TypeVar("AnyWords", np.uint64, Words)

HOLDER_BITS_MAX: Final = 1024
"""Bits of a holder set: (worker, medium, shard, group) that can be told apart."""
ROW_WORDS: Final = HOLDER_BITS_MAX // 64
DIRECTORY_BYTES: Final = 1 << 20
"""Maximum size of the holder directory."""

PAGE_BYTES: Final = 4096
PAGE_SLOTS: Final = PAGE_BYTES // 8
SEGMENT_ENTRIES: Final = 6144
"""Maximum mean number of entries in a segment: a rebuild takes about 0.1 ms."""
OVERRUN_SLOTS: Final = 64
"""Slots at the end of a segment that are no entry's first."""
LOAD_MAX: Final = 0.76
"""Fraction of slots with a tag, live or dead, above which a segment is rebuilt."""
LOAD_REBUILT: Final = 0.6
"""Fraction of slots in use after a rebuild: growth is by about 1.25."""

SET_BITS: Final = np.uint64(24)
SET_MASK: Final = np.uint64((1 << 24) - 1)
LINE_SLOTS: Final = 8
"""Slots in a cache line."""
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
    """Where everything is, for a maximum number of entries and of holder sets."""

    def __init__(self, entries_max: int, sets_max: int) -> None:
        """Compute the layout.

        Args:
            entries_max: maximum entries, at least 1.
            sets_max: maximum distinct holder sets, the empty one included: 2 to 2**24.
        """
        self.entries_max = entries_max
        self.sets_max = sets_max
        self.segment_bits = (max(1, -(-entries_max // SEGMENT_ENTRIES)) - 1).bit_length()
        self.segments = 1 << self.segment_bits
        mean = entries_max / self.segments
        most = min(entries_max, mean + 8 * mean**0.5 + 64)  # of a random distribution
        self.region_pages = int((most / LOAD_REBUILT + OVERRUN_SLOTS) // PAGE_SLOTS) + 2
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
        positions: index of a slot; if the chain is absent, of the first empty slot, or -1 if there
            is none up to the end of the segment.
        words: content of that slot when it was read; 0 if the chain is absent.
    """

    positions: Numbers
    words: Words


class TableView:
    """The parts of a table as arrays."""

    def __init__(self, buffer: memoryview, layout: TableLayout) -> None:
        """Map a table.

        Args:
            buffer: memory of ``layout.total_bytes``; the arrays refer to it.
            layout: its layout.
        """

        def words(start: int, count: int) -> Words:
            return np.frombuffer(buffer, dtype=np.uint64, count=count, offset=start)

        self.layout = layout
        self.header = words(0, PAGE_SLOTS)
        self.states = words(layout.states_at, layout.segments)
        self.rows = words(layout.rows_at, layout.sets_max * ROW_WORDS).reshape(-1, ROW_WORDS)
        self.directories: Bytes = np.frombuffer(
            buffer, dtype=np.uint8, count=2 * DIRECTORY_BYTES, offset=layout.directories_at
        ).reshape(2, -1)
        self.region = layout.region_pages * PAGE_SLOTS
        self.slots = words(layout.slots_at, 2 * layout.segments * self.region)
        self._lines = self.slots.reshape(-1, LINE_SLOTS)
        self._factor = np.uint64((2 * int(self.header[Field.SECRET]) + 1) % (1 << 64))
        self._tag_shift = np.uint64(24 - layout.segment_bits)
        self._tag_mask = np.uint64((1 << 40) - 1)
        self._segment_shift = np.uint64(63 - layout.segment_bits)
        self._one = np.uint64(1)

    def hashed(self, chains: Words) -> tuple[Numbers, Words]:
        """The segment and the tag of each chain."""
        mixed = chains * self._factor
        segments = ((mixed >> self._one) >> self._segment_shift).view(np.int64)
        tags = (mixed >> self._tag_shift) & self._tag_mask
        return segments, np.maximum(tags, self._one)  # no word with a tag is 0

    def locate(self, segments: Numbers, tags: Words, states: Words) -> Located:
        """Find the slots of tags in segments, with the states of these as they were read."""
        pages = states & _PAGES_MASK
        region = 2 * segments + ((states >> _HALF_SHIFT) & self._one).view(np.int64)
        start = region * self.region
        first = (tags * first_slots(pages)) >> _TAG_BITS
        positions = start + first.view(np.int64)
        found = self.slots.take(positions)
        left = np.flatnonzero(((found >> SET_BITS) != tags) & (found != 0))
        if len(left):
            ends = (start + (pages * _PAGE_SLOTS).view(np.int64)).take(left)
            self._probe(tags.take(left), positions.take(left) + 1, ends, left, positions, found)
        return Located(positions, found)

    def _probe(
        self,
        tags: Words,
        at: Numbers,
        ends: Numbers,
        which: Numbers,
        positions: Numbers,
        found: Words,
    ) -> None:
        """Probe from ``at`` up to the slot with the tag, an empty one, or the end, line by line.

        The results of ``which`` are written to ``positions`` and ``found``.
        """
        line, last = at >> 3, (ends >> 3) - 1
        lanes = _FROM_LANE.take(at & 7)
        count = 1  # lines to read at once; few probe further than the first
        while True:
            every = line if count == 1 else (line[:, None] + np.arange(count)).ravel()
            words = self._lines.take(every, axis=0, mode="clip")  # what is beyond does not count
            seen = words >> SET_BITS
            wanted = tags if count == 1 else tags.repeat(count)
            stop = (seen == wanted[:, None]) | (seen == 0)
            # A byte of 1 for each slot to stop at.
            stops = stop.view(np.uint64).ravel()
            if count == 1:
                stops &= lanes
            else:
                first = (stops.reshape(-1, count) != 0).argmax(axis=1)
                chosen = np.arange(0, len(stops), count) + first
                stops, words, line = stops[chosen], words[chosen], line + first
            inside = line <= last
            # The number of slots before the first to stop at.
            before = stops - _ONE & ~stops & _EACH_BYTE
            step = np.minimum((before * _EACH_BYTE >> _LAST_BYTE).view(np.int64), 7)
            stopped = (stops != 0) & inside
            word = words.ravel().take(np.arange(0, 8 * len(line), 8) + step)
            positions[which] = np.where(stopped, (line << 3) + step, -1)
            found[which] = np.where(stopped, word, 0)
            # Where nothing stopped, the first of the lines that were read was chosen.
            line += count
            on = np.flatnonzero((stops == 0) & (line <= last))
            if not len(on):
                return
            which, tags, last, line = which[on], tags[on], last[on], line[on]
            lanes, count = _FROM_LANE[:1], min(2 * count, _LINES_MAX)


_ONE: Final = np.uint64(1)
_EACH_BYTE: Final = np.uint64(0x0101_0101_0101_0101)
_LINES_MAX: Final = 16
_LAST_BYTE: Final = np.uint64(56)
_FROM_LANE: Final[Words] = ~np.uint64(0) << np.arange(0, 64, 8, dtype=np.uint64)
"""For each slot of a line, all bytes from it on."""
_TAG_BITS: Final = np.uint64(40)
_PAGE_SLOTS: Final = np.uint64(PAGE_SLOTS)
_PAGES_MASK: Final = np.uint64((1 << 31) - 1)
_HALF_SHIFT: Final = np.uint64(31)


def first_slots(pages: AnyWords) -> AnyWords:
    """Number of slots of a segment that are first ones, for its number of pages."""
    return pages * np.uint64(PAGE_SLOTS) - np.uint64(OVERRUN_SLOTS)


class Switch(NamedTuple):
    """A word that says which of two places is in use: read at once, written at once.

    Attributes:
        version: grows by one with each change.
        half: the place in use, 0 or 1.
        size: of what is there: pages of a segment, bytes of a directory.
    """

    version: int
    half: int
    size: int

    @classmethod
    def read(cls, word: np.uint64) -> "Switch":
        """Take a word apart."""
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
    layout = TableLayout(int(header[Field.ENTRIES_MAX]), int(header[Field.SETS_MAX]))
    return TableView(buffer, layout) if len(buffer) >= layout.total_bytes else None
