"""Random lookups in tables of nonsense: ``python -m tests.mover.lookups LIBRARY SEED SECONDS``.

The library is built from ``_table.c`` alone, with sanitizers. Each array of a table is an
allocation of its own, so that a sanitizer sees the first byte outside. What is found is compared
with a model; half of the time another thread writes to the table meanwhile, as the index process
does, and only what is touched matters.
"""

import ctypes
import sys
import threading
from time import monotonic

import numpy as np

from kvstore.mover.lookup import NativeLookup, NativeNeeds, TableAddresses

WORD = 1 << 64
LINES = 64  # of a page
OVERRUN = 8
MASKS = (1, 6, 1 << 63, WORD - 1)
EDGES = np.array([0, 1, 1 << 23, (1 << 24) - 1, 1 << 31, 1 << 63, WORD - 1], dtype=np.uint64)


class Table:
    """A table: some segments are as a writer makes them, others nonsense."""

    def __init__(self, dice: np.random.Generator) -> None:
        self.bits = int(dice.integers(0, 4))
        pages, self.sets = int(dice.integers(1, 4)), int(dice.integers(1, 40))
        self.region_lines = pages * LINES
        segments = 1 << self.bits
        self.factor = int(dice.integers(0, 1 << 63)) * 2 + 1
        sizes = dice.integers(1, pages + 1, segments).astype(np.uint64)
        halves = dice.integers(0, 2, segments).astype(np.uint64) << np.uint64(31)
        versions = dice.integers(0, 1 << 20, segments).astype(np.uint64) << np.uint64(32)
        self.states = sizes | halves | versions
        odd = dice.random(segments) < 0.3
        self.states[odd] = dice.choice(EDGES, int(odd.sum()))
        self.slots = dice.integers(0, WORD, 2 * segments * self.region_lines * 8, dtype=np.uint64)
        self.slots[dice.random(len(self.slots)) < dice.choice([0.0, 0.1, 0.9])] = 0
        self.rows = dice.integers(0, WORD, (self.sets, 16), dtype=np.uint64)
        self.tag_shift = 24 - self.bits
        self.addresses = TableAddresses(
            (self.states, self.rows, self.slots), self.region_lines, self.factor,
            (63 - self.bits, self.tag_shift),
        )  # fmt: skip

    def set_of(self, chain: int) -> int:
        """The number of the set of a chain; 0 if it is absent."""
        mixed = chain * self.factor % WORD
        tag = max(1, mixed >> self.tag_shift & (1 << 40) - 1)
        segment = mixed >> 64 - self.bits if self.bits else 0
        state = int(self.states[segment])
        lines = (state & 0x7FFFFFFF) * LINES
        if not LINES <= lines <= self.region_lines:
            return -1
        start = (2 * segment + (state >> 31 & 1)) * self.region_lines
        first = start + (tag * (lines - OVERRUN) >> 40)
        for word in self.slots[first * 8 : (start + lines) * 8].tolist():
            if word >> 24 == tag:
                return word & (1 << 24) - 1
            if not word:
                return 0
        return 0


def chains_for(table: Table, dice: np.random.Generator, count: int) -> np.ndarray:
    """Chain values, of which some are in the table: the tags of slots, where they would be."""
    chains = dice.integers(0, WORD, count, dtype=np.uint64)
    inverse = pow(table.factor, -1, WORD)
    for at in np.flatnonzero(dice.random(count) < 0.7):
        segment = int(dice.integers(0, len(table.states)))
        tag = int(dice.integers(1, 1 << 40))
        mixed = segment << 64 - table.bits if table.bits else 0
        mixed |= tag << table.tag_shift
        chains[at] = mixed * inverse % WORD
        state = int(table.states[segment])
        lines = (state & 0x7FFFFFFF) * LINES
        if LINES <= lines <= table.region_lines:
            start = (2 * segment + (state >> 31 & 1)) * table.region_lines
            slot = (start + (tag * (lines - OVERRUN) >> 40)) * 8
            table.slots[slot] = tag << 24 | int(dice.integers(0, 2 * table.sets))
    return chains.repeat(dice.integers(1, 4, count))


def check(table: Table, chains: np.ndarray, found: tuple[np.ndarray, np.ndarray, int]) -> None:
    """Compare with the model."""
    sets = [table.set_of(int(chain)) for chain in chains]
    ends, rows, undecided = found
    assert undecided == sets.count(-1)
    sets = [max(0, one) for one in sets]
    runs = [at for at in range(len(sets)) if at + 1 == len(sets) or sets[at] != sets[at + 1]]
    assert ends.tolist() == [at + 1 for at in runs]
    clipped = [min(sets[at], table.sets - 1) for at in runs]
    assert rows.tolist() == table.rows[clipped].tolist()


def usable(library: ctypes.CDLL, dice: np.random.Generator, ends: np.ndarray, rows: np.ndarray):
    """Ask how far prefixes are usable, and compare with a model."""
    candidates = [
        [
            (
                int(dice.choice([0, 1, 3, 1 << 40])),
                {int(w): MASKS[dice.integers(0, len(MASKS))]
                 for w in dice.choice(16, int(dice.integers(0, 3)), replace=False)},
            )
            for _ in range(dice.integers(0, 4))
        ]
        for _ in range(dice.integers(0, 6))
    ]  # fmt: skip
    prefixes, leading, there, _ = NativeNeeds(library, candidates).usable(rows, ends)
    for number, parts in enumerate(candidates):
        has = [
            [any(int(row[w]) & m for w, m in masks.items()) for row in rows] for _, masks in parts
        ]
        every = [bool(parts) and all(part[run] for part in has) for run in range(len(ends))]
        assert there[number].tolist() == [int(one) for one in every]
        head = every.index(False) if False in every else len(every)
        assert leading[number] == ([0, *ends.tolist()])[head]
        longest = 0
        for run in range(len(ends) if parts else 0):
            good = True
            for (window, _), part in zip(parts, has, strict=True):
                gap = max((at for at in range(run + 1) if not part[at]), default=-1)
                since = int(ends[gap]) if gap >= 0 else 0
                met = part[run] and (not since or (window and ends[run] - since >= window))
                good = good and bool(met)
            longest = int(ends[run]) if good else longest
        assert prefixes[number] == longest


def scribble(table: Table, stop: threading.Event, seed: int) -> None:
    """Write what must never be believed, until told to stop."""
    dice = np.random.default_rng(seed)
    while not stop.is_set():
        table.states[dice.integers(0, len(table.states))] = dice.choice(EDGES)
        table.states[dice.integers(0, len(table.states))] = dice.integers(0, WORD, dtype=np.uint64)
        table.slots[dice.integers(0, len(table.slots), 64)] = dice.choice(EDGES, 64)


def main() -> int:
    path, *arguments = sys.argv[1:]
    library = ctypes.CDLL(path)
    lookup = NativeLookup(library)
    if arguments == ["overread"]:
        slots = np.ones(LINES * 8, dtype=np.uint64)  # of one page, and two are told
        states, rows = np.array([2], dtype=np.uint64), np.zeros((1, 16), dtype=np.uint64)
        told = TableAddresses((states, rows, slots), 2 * LINES, 1, (63, 24))
        lookup.find(told, np.array([2], dtype=np.uint64), 1)
        return 0
    seed, stop_at, count = int(arguments[0]), monotonic() + float(arguments[1]), 0
    while monotonic() < stop_at:
        dice = np.random.default_rng([seed, count])
        table = Table(dice)
        chains = chains_for(table, dice, int(dice.choice([0, 1, 31, 32, 33, 200])))
        if count % 2:
            stop = threading.Event()
            writer = threading.Thread(target=scribble, args=(table, stop, count))
            writer.start()
            many = np.tile(chains, 200)
            ends, rows, _ = lookup.find(table.addresses, many, 2)
            stop.set()
            writer.join()
            assert len(ends) == len(rows) <= len(many)
        else:
            found = lookup.find(table.addresses, chains, 2)
            check(table, chains, found)
            usable(library, dice, *found[:2])
        count += 1
    sys.stdout.write(f"{count} lookups\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
