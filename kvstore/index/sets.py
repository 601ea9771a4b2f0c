"""Holder sets: interned, counted, and changed by one holder at a time. Pure.

A slot names the set of its holders by a number; the set's row has a bit for each holder. Equal sets
have the same number. A row does not change while any slot could name it: numbers that no slot
names are used again only after :meth:`HolderSets.recycle`, which readers notice.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.index.layout import HOLDER_BITS_MAX, ROW_WORDS, Flags, Numbers, Words

ROW_BYTES: Final = 8 * ROW_WORDS
_CACHE_BITS: Final = 16
_CACHE_FACTOR: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_CACHE_SHIFT: Final = np.uint64(64 - _CACHE_BITS)
_NEVER: Final = -1
_ONE: Final = np.int32(1)  # of the type that is counted in: others are 40 times slower
_RECYCLED_AT_LEAST: Final = 4096
"""Numbers given out between two searches for unused ones, at least."""
_POSTPONED: Final = 64
"""Calls until the next search after one that found too few."""


class HolderSets:
    """The sets that slots name, by number; set 0 is empty."""

    def __init__(self, rows: Words, recycled: Callable[[], None]) -> None:
        """Begin with the empty set.

        Args:
            rows: uint64 [sets_max, 16], zeroed; row n has the bits of set n.
            recycled: called before numbers are used again.
        """
        self._rows = rows
        self._recycled = recycled
        self._numbers: dict[bytes, int] = {b"": 0}  # row without trailing zero bytes → number
        self._references: npt.NDArray[np.int32] = np.zeros(len(rows), dtype=np.int32)
        self._top = 1  # numbers from here on have not been used yet
        self._free: list[int] = []
        self._recycle_at = _RECYCLED_AT_LEAST
        self._postponed = 0
        self._leaving: Words = np.zeros(ROW_WORDS, dtype=np.uint64)
        self._stripped: Numbers | None = None  # number → that without dropped holders
        self._stripped_lossy = False
        self._cache_keys: Numbers = np.full(1 << _CACHE_BITS, _NEVER, dtype=np.int64)
        self._cache_values: Numbers = np.zeros(1 << _CACHE_BITS, dtype=np.int64)

    def __len__(self) -> int:
        """Number of sets in the table of numbers, the empty one included."""
        return len(self._numbers)

    def changed(self, sets: Numbers, bits: Numbers, stored: Flags) -> tuple[Numbers, Flags]:
        """The sets after each has got or lost one holder.

        Args:
            sets: numbers of sets that slots name.
            bits: a holder's bit for each.
            stored: whether the holder comes or goes.

        Returns:
            The new numbers, -1 where all are in use; and whether the holder's bit was changed.
        """
        codes = (sets << 11) | (bits << 1) | stored
        at = ((codes.view(np.uint64) * _CACHE_FACTOR) >> _CACHE_SHIFT).view(np.int64)
        values = self._cache_values[at]
        missed = np.flatnonzero(self._cache_keys[at] != codes)
        if len(missed):
            values[missed] = found = self._work_out(codes[missed])
            known = missed[found >= 0]
            # of several for one place, both arrays keep the last
            self._cache_keys[at[known]] = codes[known]
            self._cache_values[at[known]] = values[known]
        return values >> 1, (values & 1).astype(np.bool_)

    def _work_out(self, codes: Numbers) -> Numbers:
        """Values for the cache: the new number, and one bit that says whether it changed."""
        distinct, which = np.unique(codes, return_inverse=True)
        bits = (distinct >> 1) % HOLDER_BITS_MAX
        stored = (distinct & 1).astype(np.bool_)
        rows = self._rows[distinct >> 11]
        each, word = np.arange(len(rows)), bits >> 6
        masks = np.uint64(1) << (bits & 63).view(np.uint64)
        before = rows[each, word]
        moved = ((before & masks) != 0) != stored
        rows[each, word] = np.where(stored, before | masks, before & ~masks)
        rows &= ~self._leaving
        values: Numbers = (self._intern(rows) << 1 | moved)[which]
        return values

    def _intern(self, rows: Words) -> Numbers:
        """The numbers of sets, new ones if necessary; -1 where none is left."""
        packed = rows.tobytes()
        result = np.empty(len(rows), dtype=np.int64)
        for each in range(len(rows)):
            key = packed[each * ROW_BYTES : (each + 1) * ROW_BYTES].rstrip(b"\0")
            number = self._numbers.get(key)
            if number is None:
                number = self._take()
                if number >= 0:
                    self._rows[number] = rows[each]  # before any slot names it
                    self._numbers[key] = number
            result[each] = number
        return result

    def _take(self) -> int:
        if self._free:
            number = self._free.pop()
            self._references[number] = 0
            return number
        if self._top == len(self._rows):
            return -1
        self._top += 1
        return self._top - 1

    def count(self, before: Numbers, after: Numbers) -> None:
        """Slots name other sets than before."""
        np.subtract.at(self._references, before, _ONE)
        np.add.at(self._references, after, _ONE)

    def make_room(self, changes: int) -> None:
        """Prepare for this many changes; may use numbers again that no slot names.

        To be called before the sets of slots are read, as numbers without a slot get lost.
        """
        if len(self._free) >= changes:
            return
        if self._top < self._recycle_at and self._top + changes <= len(self._rows):
            return
        if self._postponed:  # nothing was found a short time ago
            self._postponed -= 1
            return
        few = self.recycle() < max(1, len(self._rows) // 64)
        self._postponed = _POSTPONED if few else 0
        self._recycle_at = self._top + max(_RECYCLED_AT_LEAST, self._top // 4)

    def recycle(self) -> int:
        """Free all numbers that no slot names; returns how many."""
        unused = np.flatnonzero(self._references[1 : self._top] == 0) + 1
        if not len(unused):
            return 0
        self._recycled()
        packed = self._rows[unused].tobytes()
        for each, number in enumerate(unused.tolist()):
            del self._numbers[packed[each * ROW_BYTES : (each + 1) * ROW_BYTES].rstrip(b"\0")]
            self._free.append(number)
        self._references[unused] = _NEVER
        self._forget()
        return len(unused)

    def leave(self, leaving: Words) -> None:
        """From now on no change keeps these bits.

        Args:
            leaving: uint64 [16], the bits of all holders that are being dropped.
        """
        self._leaving = leaving
        self._forget()

    def _forget(self) -> None:
        self._cache_keys.fill(_NEVER)
        self._stripped = None

    def stripped(self, sets: Numbers) -> tuple[Numbers, bool]:
        """The sets without the bits of dropped holders.

        Where no number is left for the result it is 0, so the other holders are lost, too; the
        second value says whether this may have happened.
        """
        if self._stripped is None:
            self._stripped = np.full(self._top, _NEVER, dtype=np.int64)
            self._stripped_lossy = False
        known = self._stripped  # higher numbers are newer than the drop: they have no such bit
        after = np.where(sets < len(known), known[np.minimum(sets, len(known) - 1)], sets)
        missing = np.flatnonzero(after < 0)
        if len(missing):
            distinct, which = np.unique(sets[missing], return_inverse=True)
            numbers = distinct.copy()
            rows = self._rows[distinct]
            leaving = np.flatnonzero((rows & self._leaving).any(axis=1))
            numbers[leaving] = self._intern(rows[leaving] & ~self._leaving)
            self._stripped_lossy |= bool((numbers < 0).any())
            known[distinct] = np.maximum(numbers, 0)
            after[missing] = known[distinct][which]
        return after, self._stripped_lossy

    def holders(self, sets: Numbers) -> Numbers:
        """How many of these sets have each bit: int64 [1024]."""
        result = np.zeros(HOLDER_BITS_MAX, dtype=np.int64)
        for start in range(0, len(sets), 4096):
            rows = self._rows[sets[start : start + 4096]].view(np.uint8)
            result += np.unpackbits(rows, axis=1, bitorder="little").sum(axis=0, dtype=np.int64)
        return result

    def check(self, named: Numbers) -> None:
        """Assert every invariant, given the sets that all slots name; slow."""
        counted = np.bincount(named, minlength=len(self._rows))
        known = np.array(sorted(self._numbers.values()))
        assert len(known) == len(self._numbers) == len(set(known.tolist()))
        assert sorted([*known.tolist(), *self._free]) == list(range(self._top))
        assert np.array_equal(counted[known[1:]], self._references[known[1:]])
        assert counted[1:].sum() == counted[known[1:]].sum()
        assert (self._references[self._free] == _NEVER).all()
        for key, number in self._numbers.items():
            assert self._rows[number].tobytes().rstrip(b"\0") == key
        used = np.flatnonzero(self._cache_keys != _NEVER)
        codes, values = self._cache_keys[used], self._cache_values[used]
        assert np.array_equal(self._work_out(codes), values)
