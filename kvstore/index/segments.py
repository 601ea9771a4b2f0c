"""The segments of the index's table, as their writer sees them. Pure.

A segment lives in one of two regions. It is rebuilt into the other one, without its dead slots and
with as many pages as it needs, and switched; the pages of the first one are given back.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvstore.index.layout import (
    LINE_SLOTS,
    LOAD_MAX,
    LOAD_REBUILT,
    OVERRUN_LINES,
    PAGE_BYTES,
    PAGE_SLOTS,
    SET_BITS,
    SET_MASK,
    Flags,
    Located,
    Numbers,
    Switch,
    TableView,
    Words,
    first_lines,
    slots_in_use,
)

_LOAD_SPREAD = 0.1
"""Segments are rebuilt at different loads, so that not all of them grow at the same time."""
_LOAD_LARGEST = 0.9
"""Of a segment that cannot grow."""


class WritableMemory(Protocol):
    """Zeroed memory that readers can see; see :class:`kvstore.index.memory.TableMemory`.

    The table is pure: it must not import what makes shared memory.
    """

    @property
    def buffer(self) -> memoryview:
        """All of it."""
        ...

    def release(self, start: int, size: int) -> None:
        """Give whole pages back; they are zero afterwards."""
        ...


class TableSegments:
    """The slots of a table."""

    def __init__(
        self, table: TableView, memory: WritableMemory, at_step: Callable[[str], None]
    ) -> None:
        """Take over an empty table.

        Args:
            table: its arrays.
            memory: its memory.
            at_step: called between steps.
        """
        self._table = table
        self._memory = memory
        self._at_step = at_step
        segments = table.layout.segments
        self._load_max = LOAD_MAX - _LOAD_SPREAD * (np.arange(segments) * 0.618034 % 1)
        self._used: Numbers = np.zeros(segments, dtype=np.int64)  # slots with a tag, live or dead
        first = first_lines(1) * LINE_SLOTS
        self._limits: Numbers = (self._load_max * first).astype(np.int64)  # of used slots
        self.rebuilds = 0

    def locate(self, segments: Numbers, tags: Words) -> Located:
        """Find the slots of entries."""
        return self._table.locate(segments, tags, self._table.geometry())

    def slots(self, segment: int) -> Words:
        """All slots of one segment, in the table itself."""
        start, slots = self._region(segment, Switch.read(self._table.states[segment]))
        return self._table.slots[start : start + slots]

    def _region(self, segment: int, state: Switch) -> tuple[int, int]:
        """First slot, and number of slots."""
        region = (2 * segment + state.half) * self._table.region_lines
        return region * LINE_SLOTS, state.size * PAGE_SLOTS

    def place(self, segments: Numbers, tags: Words, found: Located) -> tuple[Numbers, Numbers]:
        """Give slots to distinct entries that are absent or dead; they are dead afterwards.

        Args:
            segments: their segments.
            tags: their tags.
            found: what :meth:`locate` has found.

        Returns:
            The slot of each, -1 if its segment is full; and the rebuilt segments, where the slots
            of other entries have moved, and those of dead ones are gone.
        """
        absent = found.words == 0
        entering = self._counted(segments[absent])
        crowded = np.flatnonzero(self._used + entering > self._limits)
        overrun = segments[found.lines < 0]
        if len(overrun):
            crowded = np.union1d(crowded, overrun)
        lines = found.lines
        full = np.zeros(len(lines), dtype=np.bool_)
        if len(crowded):
            entering = self._counted(segments)
            for segment in crowded.tolist():
                self._rebuild(segment, int(entering[segment]))
            moved = np.flatnonzero(self.among(crowded, segments))
            again = self.locate(segments[moved], tags[moved])
            full[moved] = (self._used + entering > self._limits)[segments[moved]]
            lines[moved], found.lanes[moved] = again.lines, again.lanes
            absent[moved] = again.words == 0
        at = found.positions()
        words = tags << SET_BITS
        going = np.flatnonzero(absent & ~full)
        at[absent] = -1
        while len(going):
            going = going[lines[going] >= 0]
            there = lines[going]
            places = there * LINE_SLOTS + slots_in_use(self._table.lines.take(there, axis=0))
            # Of several for one slot the last one written wins: the first of the batch.
            self._table.slots[places[::-1]] = words[going[::-1]]
            at[going] = places
            lost = self._table.slots[places] != words[going]
            at[going[lost]] = -1
            going = going[lost]
            lines[going] = self.locate(segments[going], tags[going]).lines
        self._used += self._counted(segments[absent & (at >= 0)])
        self._at_step("slots placed")
        return at, crowded

    def among(self, some: Numbers, segments: Numbers) -> Flags:
        """Which segments are among some."""
        flags = np.zeros(len(self._used), dtype=np.bool_)
        flags[some] = True
        return flags[segments]

    def _counted(self, segments: Numbers) -> Numbers:
        """How often each segment occurs."""
        return np.bincount(segments, minlength=len(self._used))

    def _rebuild(self, segment: int, entering: int) -> None:
        """Copy the live entries of a segment to its other half, with room for some more."""
        state = Switch.read(self._table.states[segment])
        start, slots = self._region(segment, state)
        every = self._table.slots[start : start + slots]
        live = every[(every & SET_MASK) != 0]
        live.sort()  # by tag, and so by the first slot to probe
        largest = self._table.layout.region_pages
        lines = int((len(live) + entering) / LOAD_REBUILT) // LINE_SLOTS + 1 + OVERRUN_LINES
        pages = min(-(-lines * LINE_SLOTS // PAGE_SLOTS), largest)
        steps = np.arange(len(live))
        while True:
            first = first_lines(pages)
            home = ((live >> SET_BITS) * np.uint64(first) >> np.uint64(40)).view(np.int64)
            offsets = np.maximum.accumulate(home * LINE_SLOTS - steps) + steps
            if not len(live) or offsets[-1] < pages * PAGE_SLOTS:
                break
            if pages == largest:
                return  # as it is: what has no place here is left out
            pages += 1
        after = state.switched(pages)
        new_start, _ = self._region(segment, after)
        self._table.slots[new_start + offsets] = live
        self._at_step("segment copied")
        self._table.states[segment] = after.word()
        self._at_step("segment switched")
        self._memory.release(self._table.layout.slots_at + 8 * start, state.size * PAGE_BYTES)
        self._used[segment] = len(live)
        load = _LOAD_LARGEST if pages == largest else self._load_max[segment]
        self._limits[segment] = int(load * first * LINE_SLOTS)
        self.rebuilds += 1

    def live(self) -> Words:
        """The content of all live slots."""
        every = [self.slots(segment) for segment in range(len(self._used))]
        return np.concatenate([slots[(slots & SET_MASK) != 0] for slots in every])

    def check(self) -> None:
        """Assert every invariant; slow."""
        region = self._table.region_lines * LINE_SLOTS
        for segment in range(len(self._used)):
            state = Switch.read(self._table.states[segment])
            start, count = self._region(segment, state)
            slots = self._table.slots[start : start + count]
            used = np.flatnonzero(slots)
            assert len(used) == self._used[segment] <= self._limits[segment]
            tags = slots[used] >> SET_BITS
            assert len(np.unique(tags)) == len(tags)
            found = self.locate(np.full(len(tags), segment), tags)
            assert np.array_equal(found.positions(), start + used)
            lines = slots.reshape(-1, LINE_SLOTS) != 0
            assert (lines[:, :-1] >= lines[:, 1:]).all(), "filled from the first slot on"
            assert 1 <= state.size <= self._table.layout.region_pages
            other, _ = self._region(segment, state.switched(0))
            assert not self._table.slots[other : other + region].any()
            beyond = slice(start + count, start + region)
            assert not self._table.slots[beyond].any()
