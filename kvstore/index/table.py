"""Reads the index's table, while its writer changes it. Pure.

No lock is taken. Data that may have changed while it was read is read again, a limited number of
times; then it counts as absent.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.index.directory import HolderDirectory, unpack_holders
from kvstore.index.layout import (
    ROW_WORDS,
    SET_MASK,
    Field,
    Geometry,
    Numbers,
    Switch,
    TableView,
    Words,
    open_table,
)
from kvstore.index.reading import UnreadableError
from kvstore.index.runs import HolderRuns, PrefixNeeds
from kvstore.mover.lookup import LOOKUP, NativeLookup

_TRIES: Final = 8
"""Maximum attempts to read data that is being changed."""
_UNREADABLE: Final = -1
_NO_CHAINS: Final = np.zeros(0, dtype=np.uint64)
_FIRST: Final = np.zeros(1, dtype=np.int64)
_NONE: Final = np.zeros(0, dtype=np.int64)
_NOTHING: Final = HolderDirectory(_UNREADABLE, {})


class IndexReader:
    """The table of an index, which another process, or this one, writes.

    Args:
        buffer: the table's memory; read-only will do.
    """

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._mapped: TableView | None = None
        self._native = NativeLookup(LOOKUP) if LOOKUP is not None else None
        self._directory = _NOTHING
        self.undecided = 0

    def _table(self) -> TableView | None:
        """The table; None while its writer has not made it."""
        if self._mapped is None:
            self._mapped = open_table(self._buffer)
        return self._mapped

    @property
    def secret(self) -> int:
        """Seeds all chain values; 0 while the writer has not made the table."""
        table = self._table()
        return int(table.header[Field.SECRET]) if table else 0

    def age_ns(self, now_ns: int) -> int:
        """Time since the writer's last heartbeat; ``now_ns`` itself before the first.

        Args:
            now_ns: the writer's monotonic clock.
        """
        table = self._table()
        return now_ns - (int(table.header[Field.HEARTBEAT_NS]) if table else 0)

    def holders(self) -> HolderDirectory:
        """The current holders. The same object as long as nothing has changed."""
        table = self._table()
        for _ in range(_TRIES if table else 0):
            assert table is not None
            word = table.header[Field.DIRECTORY]
            state = Switch.read(word)
            if state.version == self._directory.version:
                return self._directory
            packed = table.directories[state.half, : state.size].tobytes()
            if table.header[Field.DIRECTORY] == word:
                try:
                    holders = unpack_holders(packed) if packed else {}
                except UnreadableError:
                    holders = {}  # nobody counts, until another one is written
                self._directory = HolderDirectory(state.version, holders)
                return self._directory
        return _NOTHING

    def find(self, chains: Words) -> HolderRuns:
        """Find the holders of one prompt's blocks.

        Args:
            chains: uint64 [n], in the order of the prompt.
        """
        return self.find_many([chains])[0]

    def find_many(self, prompts: Sequence[Words]) -> list[HolderRuns]:
        """Find the holders of the blocks of several prompts."""
        table = self._table()
        if table is not None and self._native is not None:
            native = self._find_natively(table, self._native, prompts)
            if native is not None:
                return native
        lengths = [len(chains) for chains in prompts]
        ends = np.cumsum([0, *lengths])
        total = int(ends[-1])
        if table is None:
            return [_absent(length, _UNREADABLE) for length in lengths]
        if self._native is not None:
            self.undecided += total
            return [_absent(length, _UNREADABLE) for length in lengths]
        chains = prompts[0] if len(prompts) == 1 else np.concatenate([_NO_CHAINS, *prompts])
        cuts = ends[(ends > 0) & (ends < total)] if len(prompts) > 1 else _NONE
        for _ in range(_TRIES):
            recycled = table.header[Field.RECYCLED]
            directory = table.header[Field.DIRECTORY]
            sets, undecided = _sets(table, chains)
            changes = sets[1:] != sets[:-1]
            if len(cuts):
                changes[cuts - 1] = True
            starts = np.concatenate((_FIRST[:total], np.flatnonzero(changes) + 1))
            rows = table.rows.take(sets[starts], axis=0, mode="clip")
            same = table.header[Field.RECYCLED] == recycled
            if same and table.header[Field.DIRECTORY] == directory:
                self.undecided += len(undecided)
                return _by_prompt(starts, rows, ends, Switch.read(directory).version, undecided)
        self.undecided += total
        return [_absent(length, _UNREADABLE) for length in lengths]

    def _find_natively(
        self, table: TableView, native: NativeLookup, prompts: Sequence[Words]
    ) -> list[HolderRuns] | None:
        """The same in C; None if the table has changed at each look."""
        addresses, header = table.addresses, table.header
        for _ in range(_TRIES):
            recycled, directory = header[Field.RECYCLED], header[Field.DIRECTORY]
            found = [native.find(addresses, chains, _TRIES) for chains in prompts]
            if header[Field.RECYCLED] == recycled and header[Field.DIRECTORY] == directory:
                version = Switch.read(directory).version
                self.undecided += sum(undecided for _, _, undecided in found)
                return [HolderRuns(ends, rows, version, left) for ends, rows, left in found]
        return None

    def match(self, prompts: Sequence[Words], needs: PrefixNeeds) -> Numbers:
        """Number of leading blocks of each prompt that are usable by each candidate.

        Args:
            prompts: uint64 [n] each: chains in the order of the prompt.
            needs: the candidates and what they need; prepared again when holders have changed.

        Returns:
            int64 [prompts, candidates].
        """
        for _ in range(_TRIES):
            directory = self.holders()
            needs.prepare(directory)
            found = self.find_many(prompts)
            if not found or found[0].version == directory.version:
                break
        else:
            self.undecided += sum(map(len, prompts))
        result = np.zeros((len(prompts), len(needs)), dtype=np.int64)
        for number, runs in enumerate(found):
            result[number] = needs.prefixes(runs)
        return result


def _sets(table: TableView, chains: Words) -> tuple[Numbers, Numbers]:
    """The numbers of the sets of chains, 0 for absent ones; and which of them are undecided."""
    segments, tags = table.hashed(chains)
    geometry = table.geometry()
    sets = (table.locate(segments, tags, geometry).words & SET_MASK).view(np.int64)
    moved = _moved(table, geometry, segments)
    for _ in range(_TRIES):
        if not len(moved):
            break
        geometry = table.geometry()
        found = table.locate(segments[moved], tags[moved], geometry).words & SET_MASK
        sets[moved] = found.view(np.int64)
        moved = moved[_moved(table, geometry, segments[moved])]
    sets[moved] = 0
    return sets, moved


def _moved(table: TableView, geometry: Geometry, segments: Numbers) -> Numbers:
    """Which of these segments are not where they were."""
    changed = table.states != geometry.states
    return np.flatnonzero(changed[segments]) if changed.any() else _NONE


def _by_prompt(
    starts: Numbers, rows: Words, ends: Numbers, version: int, undecided: Numbers
) -> list[HolderRuns]:
    """The runs of each prompt, given those of all in one row."""
    if len(ends) == 2:
        ends_of_runs = np.append(starts[1:], ends[1:])[: len(starts)]
        return [HolderRuns(ends_of_runs, rows, version, len(undecided))]
    result = []
    places = np.searchsorted(starts, ends)
    for number in range(len(ends) - 1):
        begin, end = ends[number], ends[number + 1]
        first, last = places[number], places[number + 1]
        runs = np.append(starts[first + 1 : last], end)[: last - first] - begin
        unknown = np.count_nonzero((undecided >= begin) & (undecided < end))
        result.append(HolderRuns(runs, rows[first:last], version, int(unknown)))
    return result


def _absent(blocks: int, version: int) -> HolderRuns:
    """None of these blocks is held, as far as is known."""
    runs = 1 if blocks else 0
    ends = np.full(runs, blocks, dtype=np.int64)
    return HolderRuns(ends, np.zeros((runs, ROW_WORDS), dtype=np.uint64), version, blocks)
