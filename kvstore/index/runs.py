"""How far prefixes are usable, for many workers at once. Pure.

:class:`HolderRuns` has the holders of the blocks of one prompt. :class:`PrefixNeeds` has the
requirements: for each candidate some **parts** (shards, KV groups), each with the holders that can
provide it. A prefix of n blocks is usable if these holders have all that each part needs: all n
blocks, or, for a KV group with a window of w blocks, the last min(w, n) of them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvstore.index.directory import HolderDirectory, PageHolder
from kvstore.index.layout import ROW_WORDS, Bytes, Flags, Numbers, Words
from kvstore.mover.lookup import LOOKUP, NativeNeeds

_RUNS_AT_ONCE: Final = 512
_Parts = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""Of each part its window, 0 = none, and bytes of a row with the bits that can provide it."""


class PartNeed(NamedTuple):
    """One part of the blocks that a candidate needs.

    Attributes:
        holders: who can provide it, each block any of these holders; one that does not count now
            does not.
        window: how many of the last blocks suffice, at least 1; None: all are needed.
    """

    holders: Sequence[PageHolder]
    window: int | None = None


class HolderRuns:
    """The holders of one prompt's blocks: runs of blocks that have the same holders.

    Args:
        ends: int64 [k], number of blocks up to the end of each run.
        rows: uint64 [k, 16], a bit for each holder of the run's blocks.
        version: of the holder directory that these bits belong to.
        undecided: blocks that count as absent because the table changed again and again.
    """

    def __init__(self, ends: Numbers, rows: Words, version: int, undecided: int = 0) -> None:
        self.ends = ends
        self.rows = rows
        self.version = version
        self.undecided = undecided


class UsableRuns(NamedTuple):
    """How far some candidates can use a prompt.

    Attributes:
        prefixes: blocks of the longest usable prefix of each; int64 [candidates].
        leading: leading blocks of which each has every part, whatever their windows; likewise.
        torn: whether some candidate has every part in a run after one in which it has not.
        distinct: for each distinct need, whether every part is there in each run, whatever the
            windows: bool [distinct, runs].
        which: for each candidate, the index of its need in ``distinct``; None = all differ.
    """

    prefixes: Numbers
    leading: Numbers
    torn: bool
    distinct: Flags
    which: Numbers | None

    @property
    def there(self) -> Flags:
        """Whether each candidate has every part in each run; bool [candidates, runs]."""
        return self.distinct if self.which is None else self.distinct.take(self.which, axis=0)


class PrefixNeeds:
    """The requirements of some candidates; prepared once per version of the holder directory.

    Args:
        candidates: the parts of each; a candidate without parts has no prefix.
    """

    def __init__(self, candidates: Sequence[Sequence[PartNeed]]) -> None:
        self._needs = [tuple(parts) for parts in candidates]
        self._version: int | None = None
        self._native: NativeNeeds | None = None

    def __len__(self) -> int:
        """Number of candidates."""
        return len(self._needs)

    def prepare(self, directory: HolderDirectory) -> None:
        """Use the bits of this directory."""
        if self._version == directory.version:
            return
        self._version = directory.version
        candidates = [
            tuple(
                (need.window or 0, tuple(sorted(_byte_masks(need.holders, directory).items())))
                for need in needs
            )
            for needs in self._needs
        ]
        self._known = any(masks for parts in candidates for _, masks in parts)
        # Engines that share a node need the same there: each need is looked at once.
        distinct = {parts: at for at, parts in enumerate(dict.fromkeys(candidates))}
        self._which = np.array([distinct[parts] for parts in candidates], dtype=np.int64)
        self._all_differ = len(distinct) == len(candidates)
        if LOOKUP is not None:
            self._native = NativeNeeds(LOOKUP, [_of_words(parts) for parts in distinct])
        else:
            self._prepare(list(distinct))

    def _prepare(self, distinct: Sequence[_Parts]) -> None:
        """Lay distinct candidates out for numpy."""
        parts = [
            (number, window, masks)
            for number, needs in enumerate(distinct)
            for window, masks in needs
        ]
        # The parts with the most bytes first: the layers are slices then.
        parts.sort(key=lambda part: -len(part[2]))
        owners = np.array([number for number, _, _ in parts], dtype=np.int64)
        self._layers: list[int] = []
        pairs: list[tuple[int, int]] = []
        for layer in range(len(parts[0][2]) if parts else 0):
            there = [those[layer] for _, _, those in parts if len(those) > layer]
            pairs += there
            self._layers.append(len(there))
        columns = np.array([byte for byte, _ in pairs], dtype=np.int64)
        self._bytes, self._columns = np.unique(columns, return_inverse=True)
        masks = np.array([mask for _, mask in pairs], dtype=np.uint8)
        self._masks: Bytes = masks[:, None]
        # Parts in the order of their candidates, for one reduction over each.
        self._order = np.argsort(owners, kind="stable")
        self._owners, self._starts = np.unique(owners[self._order], return_index=True)
        self._count = len(distinct)
        windows = np.array([window for _, window, _ in parts], dtype=np.int64)
        self._windows: Numbers | None = windows if windows.any() else None

    @property
    def known(self) -> bool:
        """Whether the prepared directory has any of the holders; without, all prefixes are 0."""
        return self._known

    def prefixes(self, found: HolderRuns) -> Numbers:
        """Number of leading blocks that are usable by each candidate: int64 [candidates].

        All are 0 if ``found`` belongs to another version of the directory than the prepared one.
        """
        if found.version != self._version or not self._known or not len(found.ends):
            return np.zeros(len(self._needs), dtype=np.int64)
        if self._native is not None:
            prefixes = self._native.usable(found.rows, found.ends)[0]
        elif self._windows is None:
            runs = self._leading_runs(found.rows)
            prefixes = np.zeros(self._count, dtype=np.int64)
            usable = np.minimum.reduceat(runs[self._order], self._starts)
            prefixes[self._owners] = np.concatenate(([0], found.ends))[usable]
        else:
            prefixes = self._counted(found)[0]
        return prefixes if self._all_differ else prefixes.take(self._which)

    def prefixes_and_runs(self, found: HolderRuns) -> UsableRuns:
        """The same as :meth:`prefixes`, and which runs each candidate has.

        Zeros for another version of the directory.
        """
        if found.version != self._version or not self._known or not len(found.ends):
            none = np.zeros(len(self._needs), dtype=np.int64)
            nowhere = np.zeros((len(self._needs), len(found.ends)), dtype=np.bool_)
            return UsableRuns(none, none, torn=False, distinct=nowhere, which=None)
        if self._native is not None:
            prefixes, leading, bytes_there, torn_runs = self._native.usable(found.rows, found.ends)
            there, torn = bytes_there.view(np.bool_), torn_runs > 0
        else:
            prefixes, there = self._counted(found)
            head = np.where(there.all(axis=1), there.shape[1], there.argmin(axis=1))
            leading = np.concatenate(([0], found.ends))[head]
            torn = bool((np.count_nonzero(there, axis=1) != head).any())
        if self._all_differ:
            return UsableRuns(prefixes, leading, torn, there, None)
        which = self._which
        return UsableRuns(prefixes.take(which), leading.take(which), torn, there, which)

    def _counted(self, found: HolderRuns) -> tuple[Numbers, Flags]:
        """Blocks that distinct candidates can use, and the runs that they have."""
        prefixes = np.zeros(self._count, dtype=np.int64)
        result = np.zeros((self._count, len(found.ends)), dtype=np.bool_)
        parts = self._present(found.rows)[:, :-1] != 0
        every = np.logical_and.reduceat(parts[self._order], self._starts, axis=0)
        result[self._owners] = every
        ends = np.concatenate(([0], found.ends))
        if self._windows is None:
            runs = np.where(every.all(axis=1), every.shape[1], every.argmin(axis=1))
        else:
            runs = self._windowed(self._windows, parts, ends)
        prefixes[self._owners] = ends[runs]
        return prefixes, result

    def _present(self, rows: Words) -> Bytes:
        """Whether each part is present in each run: uint8 [parts, runs + 1]; the last is 0."""
        packed = rows.view(np.uint8).reshape(-1, 8 * ROW_WORDS)
        by_byte = packed.take(self._bytes, axis=1).T
        columns = np.zeros((len(self._bytes), len(rows) + 1), dtype=np.uint8)
        columns[:, :-1] = by_byte
        bits = columns.take(self._columns, axis=0)
        bits &= self._masks
        result = np.zeros((len(self._order), len(rows) + 1), dtype=np.uint8)
        start = 0
        for count in self._layers:
            result[:count] |= bits[start : start + count]
            start += count
        return result

    def _leading_runs(self, rows: Words) -> Numbers:
        """Number of leading runs in which each part is present: int64 [parts]."""
        result: Numbers = self._present(rows[:_RUNS_AT_ONCE]).argmin(axis=1)
        for start in range(_RUNS_AT_ONCE, len(rows), _RUNS_AT_ONCE):
            if (result < start).all():
                break
            some = self._present(rows[start : start + _RUNS_AT_ONCE])
            leading = some.argmin(axis=1)
            result = np.where(result == start, start + leading, result)
        return result

    def _windowed(self, windows: Numbers, present: Flags, ends: Numbers) -> Numbers:
        """The last run of each candidate at whose end every part is satisfied."""
        # Where the blocks begin that are there without a gap up to the end of each run.
        since = np.maximum.accumulate(np.where(present, 0, ends[1:]), axis=1)
        enough = (windows[:, None] > 0) & (ends[1:] - since >= windows[:, None])
        met: Flags = present & ((since == 0) | enough)
        every = np.logical_and.reduceat(met[self._order], self._starts, axis=0)
        last = every.shape[1] - every[:, ::-1].argmax(axis=1)
        usable: Numbers = np.where(every.any(axis=1), last, 0)
        return usable


def _byte_masks(holders: Sequence[PageHolder], directory: HolderDirectory) -> dict[int, int]:
    """Byte of a row → the bits of these holders in it."""
    masks: dict[int, int] = {}
    for holder in holders:
        bit = directory.holders.get(holder)
        if bit is not None:
            masks[bit // 8] = masks.get(bit // 8, 0) | 1 << bit % 8
    return masks


def _of_words(parts: _Parts) -> list[tuple[int, dict[int, int]]]:
    """The same by words of a row."""
    result = []
    for window, masks in parts:
        words: dict[int, int] = {}
        for byte, bits in masks:
            words[byte // 8] = words.get(byte // 8, 0) | bits << 8 * (byte % 8)
        result.append((window, words))
    return result
