"""A process that writes an index's table, without end or up to a step.

``python -m tests.index.table_writer [STEP NUMBER]`` prints ``table PID FD`` when the table is
there. At the NUMBERth STEP it prints ``held N`` during change N, and stays there.

Chain number c is only ever held by workers of class c % CLASSES; chains below STABLE are always
held by their class's stable worker, chains from NEVER on by nobody. Workers come and go, so that
bits and numbers of sets are used again.
"""

import os
import signal
import sys
from collections.abc import Iterator

import numpy as np

from kvstore.index import layout, sets
from kvstore.index.directory import PageHolder
from kvstore.index.memory import TableMemory
from kvstore.index.writer import IndexWriter

CLASSES = 4
STABLE = 800
NEVER = 6000
CHAINS = np.random.default_rng(8).integers(1, 1 << 63, 7000, dtype=np.uint64)
SETS_MAX = 1 << 12

Change = tuple[str, int, list[int]]
"""What happens to a worker (``store``, ``remove``, ``drop``, ``live``, ``not live``): which, and
the chains."""


def holder(worker: int) -> PageHolder:
    """Worker number w is of class w % CLASSES; the first CLASSES ones are stable."""
    return PageHolder(f"w{worker}", "GPU", "", 0)


def changes() -> Iterator[Change]:
    """The same ones in each process, without end."""
    rng = np.random.default_rng(9)
    for worker in range(CLASSES):
        yield "store", worker, list(range(worker, STABLE, CLASSES))
    workers = list(range(CLASSES, 4 * CLASSES))
    born = len(workers) + CLASSES
    while True:
        at = int(rng.integers(len(workers)))
        worker = workers[at]
        what = ["store", "store", "store", "remove", "drop", "not live", "live"]
        kind = what[int(rng.integers(len(what)))]
        first, count = int(rng.integers(0, NEVER)), int(rng.integers(1, 1500))
        own = range(first, min(first + count, NEVER))
        yield kind, worker, [chain for chain in own if chain % CLASSES == worker % CLASSES]
        if kind == "drop":
            workers[at] = born
            born += 1


class Model:
    """Who holds what, and who counts."""

    def __init__(self) -> None:
        self.held: dict[int, set[int]] = {chain: set() for chain in range(len(CHAINS))}
        self.not_live: set[int] = set()

    def change(self, change: Change) -> None:
        kind, worker, chains = change
        if kind == "store":
            for chain in chains:
                self.held[chain].add(worker)
        elif kind == "remove":
            for chain in chains:
                self.held[chain].discard(worker)
        elif kind == "drop":
            self.not_live.discard(worker)
            for workers in self.held.values():
                workers.discard(worker)
        else:
            (self.not_live.discard if kind == "live" else self.not_live.add)(worker)

    def counting(self) -> list[set[PageHolder]]:
        """The holders of each chain that readers should see."""
        return [{holder(w) for w in workers - self.not_live} for workers in self.held.values()]


def change(writer: IndexWriter, what: Change) -> None:
    """Do it."""
    kind, worker, chains = what
    if kind in {"live", "not live"}:
        writer.set_live(f"w{worker}", live=kind == "live")
    elif kind == "drop":
        writer.drop(f"w{worker}")
    else:
        number = writer.holder(holder(worker))
        assert number is not None
        numbers = np.full(len(chains), number, dtype=np.int32)
        stored = np.full(len(chains), kind == "store", dtype=np.bool_)
        writer.apply(CHAINS[np.array(chains, dtype=np.int64)], numbers, stored)
    writer.sweep(700)


class HeldWriter(IndexWriter):
    """Stops at one step."""

    steps_left = 0
    held_at = ""
    changes = 0

    def _at_step(self, step: str) -> None:
        if step == self.held_at:
            self.steps_left -= 1
            if self.steps_left == 0:
                sys.stdout.write(f"held {self.changes}\n")
                sys.stdout.flush()
                signal.pause()


def main() -> None:
    layout.SEGMENT_ENTRIES = 1500
    sets._RECYCLED_AT_LEAST = 4
    memory = TableMemory.create(layout.TableLayout(NEVER, SETS_MAX).total_bytes)
    writer = HeldWriter(memory, NEVER, secret=123, sets_max=SETS_MAX)
    every = changes()
    for _ in range(CLASSES):
        change(writer, next(every))
        writer.changes += 1
    if len(sys.argv) > 1:
        HeldWriter.held_at, HeldWriter.steps_left = sys.argv[1], int(sys.argv[2])
    sys.stdout.write(f"table {os.getpid()} {memory.fd}\n")
    sys.stdout.flush()
    for what in every:
        change(writer, what)
        writer.changes += 1
        writer.beat(writer.changes)


if __name__ == "__main__":
    main()
