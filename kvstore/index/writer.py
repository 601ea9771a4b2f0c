"""The only writer of the index's table. Pure.

Every step leaves a table that readers can use, even if it is the last one: a slot is written
atomically; a segment, and the holder directory, is written to the unused half, and then switched.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.directory import PageHolder, pack_holders, packable, unpack_holders
from kvstore.index.layout import (
    HOLDER_BITS_MAX,
    ROW_WORDS,
    SET_MASK,
    Field,
    Flags,
    Numbers,
    Switch,
    TableLayout,
    Words,
    start_table,
)
from kvstore.index.operations import Operations, Repetitions, first_ranks
from kvstore.index.segments import TableSegments, WritableMemory
from kvstore.index.sets import HolderSets

SETS_MAX: Final = 1 << 20
"""Distinct holder sets: 128 bytes each, where used."""
HOLDERS_PER_WORKER_MAX: Final = 256
"""Maximum (medium, shard, group) of one worker; further ones are refused."""
_BIT_MASK: Final = HOLDER_BITS_MAX - 1
_GENERATIONS: Final = 1 << 20
_NONE: Final = -2


class TableStats(NamedTuple):
    """Counts of a table, for metrics; all but the first two since its start.

    Attributes:
        entries: chains with a holder.
        sets: distinct holder sets, the empty one included.
        left_out: stores for which there was no room.
        late: operations of dropped holders.
        refused_holders: how often a holder could not get a number.
        lost: entries that were lost because no number was left for a set.
        rebuilds: of segments.
    """

    entries: int
    sets: int
    left_out: int
    late: int
    refused_holders: int
    lost: int
    rebuilds: int


class IndexWriter:
    """A table of (chain, holder) pairs, up to a limit of chains."""

    def __init__(
        self, memory: WritableMemory, entries_max: int, secret: int, sets_max: int = SETS_MAX
    ) -> None:
        """Make an empty table.

        Args:
            memory: zeroed, of ``TableLayout(entries_max, sets_max).total_bytes``.
            entries_max: maximum chains, at least 1; further ones are left out and counted.
            secret: 64 bits that are unknown to those who choose chains.
            sets_max: maximum distinct holder sets.
        """
        self.layout = TableLayout(entries_max, sets_max)
        self._table = start_table(memory.buffer, self.layout, secret)
        self._segments = TableSegments(self._table, memory, self._at_step)
        self._sets = HolderSets(self._table.rows, self._recycled)
        self._repetitions = Repetitions()
        self._live = 0
        self._numbers: dict[PageHolder, int] = {}  # generation * 1024 + bit
        self._by_bit: npt.NDArray[np.int32] = np.full(HOLDER_BITS_MAX, _NONE, dtype=np.int32)
        self._generations = 0
        self._per_worker: Counter[str] = Counter()
        self._free_bits = list(range(HOLDER_BITS_MAX - 1, -1, -1))
        self._not_live: set[str] = set()
        self._counts: Numbers = np.zeros(HOLDER_BITS_MAX, dtype=np.int64)
        self._directory_moved = False
        self._sweeping: list[int] = []  # dropped holders' bits that this sweep clears
        self._dropped_since: list[int] = []
        self._swept = 0  # segments
        self._left_out = 0
        self._late = 0
        self._refused_holders = 0
        self._lost = 0
        self._lacks: Counter[str] = Counter()  # by worker

    def __len__(self) -> int:
        """Number of chains with a holder; dropped holders count until they are swept."""
        return self._live

    # Holders

    def holder(self, holder: PageHolder) -> int | None:
        """The number of a holder, a new one if necessary; None if that is refused, and counted.

        A number is never used for another holder. The directory shows a new holder from the next
        :meth:`apply` or :meth:`beat` on.
        """
        number = self._numbers.get(holder)
        if number is not None:
            return number
        many = self._per_worker[holder.worker] >= HOLDERS_PER_WORKER_MAX
        if many or not self._free_bits or not packable(holder):
            self._refused_holders += 1
            self._lacks[holder.worker] += 1
            return None
        bit = self._free_bits.pop()
        self._generations = (self._generations + 1) % _GENERATIONS
        number = self._generations * HOLDER_BITS_MAX + bit
        self._numbers[holder] = number
        self._by_bit[bit] = number
        self._per_worker[holder.worker] += 1
        self._directory_moved = True
        return number

    def set_live(self, worker: str, *, live: bool) -> None:
        """Whether a worker's pages count, from now on; they do unless it is said.

        Dropping a worker forgets this.
        """
        if live == (worker in self._not_live):
            (self._not_live.discard if live else self._not_live.add)(worker)
            self._directory_moved = True
            self._publish()

    def drop(self, worker: str) -> None:
        """Remove a worker: readers do not see it from now on; :meth:`sweep` clears its entries."""
        self._not_live.discard(worker)
        self._lacks.pop(worker, None)
        if not self._per_worker.pop(worker, 0):
            return
        for holder in [each for each in self._numbers if each.worker == worker]:
            bit = self._numbers.pop(holder) & _BIT_MASK
            self._by_bit[bit] = _NONE
            if self._counts[bit]:
                self._dropped_since.append(bit)
            else:
                self._free_bits.append(bit)
        self._directory_moved = True
        self._publish()
        self._begin_sweep()

    def _begin_sweep(self) -> None:
        if not self._sweeping:
            self._sweeping, self._dropped_since = self._dropped_since, []
            self._swept = 0
        self._sets.leave(_mask([*self._sweeping, *self._dropped_since]))

    def sweep(self, slots_max: int) -> bool:
        """Clear the bits of dropped holders in a part of the table.

        Args:
            slots_max: slots to look at, rounded up to a segment: about 5 ns each.

        Returns:
            Whether there is more to do.
        """
        while slots_max > 0 and self._sweeping:
            slots_max -= self._sweep_segment(self._swept)
            self._swept += 1
            if self._swept == self.layout.segments:
                self._counts[self._sweeping] = 0
                self._free_bits += self._sweeping
                self._sweeping = []
                self._begin_sweep()
        return bool(self._sweeping)

    def _sweep_segment(self, segment: int) -> int:
        """Clear dropped holders in one segment; returns its number of slots."""
        slots = self._segments.slots(segment)
        sets = (slots & SET_MASK).view(np.int64)
        after, lossy = self._sets.stripped(sets)
        moved = np.flatnonzero(after != sets)
        if len(moved):
            before, after = sets[moved], after[moved]
            slots[moved] = (slots[moved] & ~SET_MASK) | after.view(np.uint64)
            self._at_step("segment swept")
            self._sets.count(before, after)
            gone = after == 0
            self._live -= int(np.count_nonzero(gone))
            if lossy:
                self._counts -= self._sets.holders(before[gone])
        return len(slots)

    def _publish(self) -> None:
        """Show readers the holders that count now."""
        if not self._directory_moved:
            return
        packed = pack_holders(
            {
                holder: number & _BIT_MASK
                for holder, number in self._numbers.items()
                if holder.worker not in self._not_live
            }
        )
        switch = Switch.read(self._table.header[Field.DIRECTORY]).switched(len(packed))
        self._table.directories[switch.half, : len(packed)] = np.frombuffer(packed, dtype=np.uint8)
        self._at_step("directory written")
        self._table.header[Field.DIRECTORY] = switch.word()
        self._directory_moved = False

    def beat(self, now_ns: int) -> None:
        """Say that the writer is alive, and show new holders.

        Args:
            now_ns: a monotonic clock that readers have, too.
        """
        self._publish()
        self._table.header[Field.HEARTBEAT_NS] = now_ns

    def stats(self) -> TableStats:
        """Counts for metrics."""
        return TableStats(
            self._live,
            len(self._sets),
            self._left_out,
            self._late,
            self._refused_holders,
            self._lost,
            self._segments.rebuilds,
        )

    def lacks(self, worker: str) -> int:
        """How many entries of a worker had no room, or were lost, since it was dropped last.

        A refused holder counts as one.
        """
        return self._lacks[worker]

    def pages(self) -> dict[PageHolder, int]:
        """Number of chains of each holder."""
        return {
            holder: int(self._counts[number & _BIT_MASK])
            for holder, number in self._numbers.items()
        }

    # Entries

    def apply(self, chains: Words, holders: npt.NDArray[np.int32], stored: Flags) -> int:
        """Store and remove entries, those of several workers together.

        Of several operations for one (chain, holder) the last one counts. If the table gets full,
        the first chains of the batch win. A removal makes room for later batches only.

        Args:
            chains: uint64 [n].
            holders: int32 [n], numbers from :meth:`holder`. What is for a dropped one is ignored,
                and counted.
            stored: bool [n]; False removes.

        Returns:
            Number of stores that were left out.
        """
        self._publish()
        self._sets.make_room(len(chains))
        left_out = self._left_out
        bits = holders & _BIT_MASK
        known = self._by_bit[bits] == holders
        segments, tags = self._table.hashed(chains)
        todo = Operations(segments, tags, bits.astype(np.int64), stored)
        if not known.all():
            self._late += len(known) - int(np.count_nonzero(known))
            todo = todo.only(known)
        keys = todo.keys()
        if not self._repetitions.found(keys):
            at = self._make_places(todo, distinct=True)
            self._change(at, todo)
        else:
            todo, rounds = todo.in_rounds(keys)
            at = self._make_places(todo, distinct=False)
            for each in rounds:
                self._change(at[each], todo.only(each))
        return self._left_out - left_out

    def _change(self, at: Numbers, todo: Operations) -> None:
        """Change the sets of slots, each named once; -1 for those without one."""
        if (at < 0).any():
            there = at >= 0
            at, todo = at[there], todo.only(there)
        words = self._table.slots[at]
        before = (words & SET_MASK).view(np.int64)
        after, moved = self._sets.changed(before, todo.bits, todo.stored)
        short = after < 0
        if short.any():
            self._without_set(short, before, after, todo)
            moved &= ~short
        self._at_step("sets interned")
        self._table.slots[at] = (words & ~SET_MASK) | after.view(np.uint64)
        self._at_step("slots changed")
        self._sets.count(before, after)
        self._live += int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        np.add.at(self._counts, todo.bits, moved * (2 * todo.stored.astype(np.int64) - 1))

    def _without_set(self, short: Flags, before: Numbers, after: Numbers, todo: Operations) -> None:
        """No number is left for some sets: leave out stored entries, delete removed ones."""
        stores = short & todo.stored
        after[stores] = before[stores]
        self._leave_out(todo.bits[stores])
        removals = short & ~todo.stored
        after[removals] = 0  # its other holders are lost
        self._lost += int(np.count_nonzero(removals))
        gone = self._sets.holders(before[removals])
        self._counts -= gone
        self._lack(gone - np.bincount(todo.bits[removals], minlength=HOLDER_BITS_MAX))

    def _leave_out(self, bits: Numbers) -> None:
        """There is no room for an entry of each of these holders."""
        self._left_out += len(bits)
        if len(bits):
            self._lack(np.bincount(bits, minlength=HOLDER_BITS_MAX))

    def _lack(self, counts: Numbers) -> None:
        """So many entries of each holder are missing; int64 [1024]."""
        for holder, number in self._numbers.items():
            self._lacks[holder.worker] += int(counts[number & _BIT_MASK])

    def _make_places(self, todo: Operations, *, distinct: bool) -> Numbers:
        """The slot of each entry, a new one for stored entries; -1 for those without one."""
        found = self._segments.locate(todo.segments, todo.tags)
        at = found.positions()
        new = todo.stored & ((found.words & SET_MASK) == 0)
        room = self.layout.entries_max - self._live
        entering = np.flatnonzero(new)
        if len(entering) > room:
            over = first_ranks(todo.keys()[entering]) >= room
            self._leave_out(todo.bits[entering[over]])
            at[entering[over]] = -1
            entering = entering[~over]
        if not len(entering):
            return at
        one = entering
        if not distinct:
            one = entering[np.unique(todo.keys()[entering], return_index=True)[1]]
        place = self._segments.place
        at[one], moved = place(todo.segments[one], todo.tags[one], found.only(one))
        if not distinct:
            self._locate_again(todo, at, entering)
        self._leave_out(todo.bits[entering[at[entering] < 0]])
        if len(moved):
            others = self._segments.among(moved, todo.segments) & (at >= 0) & ~new
            self._locate_again(todo, at, np.flatnonzero(others))
        return at

    def _locate_again(self, todo: Operations, at: Numbers, which: Numbers) -> None:
        """Some slots have moved."""
        found = self._segments.locate(todo.segments[which], todo.tags[which])
        at[which] = found.positions()

    def _recycled(self) -> None:
        """Numbers of sets will be used again: readers that have read one look again."""
        self._table.header[Field.RECYCLED] += np.uint64(1)
        self._at_step("sets recycled")

    def _at_step(self, step: str) -> None:
        """Called between steps; tests stop the writer here."""

    def check(self) -> None:
        """Assert every invariant; slow."""
        self._segments.check()
        sets = (self._segments.live() & SET_MASK).view(np.int64)
        self._sets.check(sets)
        assert len(sets) == self._live <= self.layout.entries_max
        in_use = [number & _BIT_MASK for number in self._numbers.values()]
        leaving = [*self._sweeping, *self._dropped_since]
        assert sorted([*in_use, *leaving, *self._free_bits]) == list(range(HOLDER_BITS_MAX))
        held = self._sets.holders(sets)
        assert np.array_equal(held[in_use], self._counts[in_use])
        assert not held[self._free_bits].any()
        assert not self._counts[self._free_bits].any()
        switch = Switch.read(self._table.header[Field.DIRECTORY])
        packed = self._table.directories[switch.half, : switch.size].tobytes()
        shown = unpack_holders(packed) if packed else {}
        if not self._directory_moved:
            assert shown == {
                holder: number & _BIT_MASK
                for holder, number in self._numbers.items()
                if holder.worker not in self._not_live
            }


def _mask(bits: Iterable[int]) -> Words:
    """The row of a set with these bits."""
    result = np.zeros(ROW_WORDS, dtype=np.uint64)
    for bit in bits:
        result[bit // 64] |= np.uint64(1 << bit % 64)
    return result
