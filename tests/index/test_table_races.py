"""A reader of the index's table, while its writer writes, stops, or dies at any step."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.index import layout, table
from kvstore.index.directory import PageHolder
from kvstore.index.layout import TableView
from kvstore.index.memory import TableMemory
from kvstore.index.runs import HolderRuns, PartNeed, PrefixNeeds
from kvstore.index.table import IndexReader
from kvstore.mover.lookup import LOOKUP, NativeLookup
from tests.conftest import Process, Spawn
from tests.index import table_writer
from tests.index.table_writer import CHAINS, CLASSES, NEVER, STABLE, Model, changes, holder

WRITER = [sys.executable, "-m", "tests.index.table_writer"]
STEPS = {
    "slots placed": 1, "sets interned": 15, "slots changed": 2, "segment copied": 3,
    "segment switched": 5, "segment swept": 4, "sets recycled": 2, "directory written": 6,
}  # fmt: skip
"""Step → which time the writer is killed there."""


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SEGMENT_ENTRIES", 1500)


@pytest.fixture(params=["native", "plain"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers in C, and those without the library."""
    if request.param == "plain":
        monkeypatch.setattr(table, "LOOKUP", None)
    elif LOOKUP is None:
        pytest.skip("built without a compiler")


def attached(process: Process) -> TableMemory:
    pid, fd = process.ready.groups()
    return TableMemory.attach(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))


def seen(reader: IndexReader, chains: np.ndarray) -> tuple[list[set[PageHolder]], HolderRuns]:
    """What the reader finds, with the directory that belongs to it."""
    for _ in range(1000):
        directory, found = reader.holders(), reader.find(chains)
        if found.version == directory.version:
            break
    bits = np.unpackbits(found.rows.view(np.uint8), axis=1, bitorder="little")
    of_runs = [{h for h, bit in directory.holders.items() if row[bit]} for row in bits]
    lengths = np.diff(found.ends, prepend=0)
    each = [h for h, n in zip(of_runs, lengths, strict=True) for _ in range(n)]
    return each, found


@pytest.mark.usefixtures("either")
def test_what_a_reader_sees_was_true_while_a_writer_changes_everything(spawn: Spawn) -> None:
    process = spawn(WRITER, ready=r"^table (\d+) (\d+)$")
    memory = attached(process)
    reader = IndexReader(memory.buffer)
    stable = PrefixNeeds([[PartNeed([holder(w) for w in range(CLASSES)])], [PartNeed([holder(0)])]])
    # A writer on an idle machine comes to 4,400.
    classes = {c: {holder(w).worker for w in range(c, 100_000, CLASSES)} for c in range(CLASSES)}
    turn = decided = busy = 0
    # A writer that is kept from running in the middle of a change leaves many turns undecided.
    while turn < 70 or (min(decided, busy) <= 50 and turn < 2_000):
        found, runs = seen(reader, CHAINS)
        busy += len(runs.ends) > CLASSES * 10
        for chain, holders in enumerate(found):
            assert {each.worker for each in holders} <= classes[chain % CLASSES]
            assert chain < NEVER or not holders
        if runs.undecided == 0:
            decided += 1
            assert all(holder(chain % CLASSES) in found[chain] for chain in range(STABLE))
        undecided = reader.undecided
        matched = reader.match(
            [CHAINS[: STABLE + turn % 70], CHAINS[:3], CHAINS[::4][:200]], stable
        )
        if reader.undecided == undecided:
            assert matched[0, 0] >= STABLE
            assert matched[:2, 1].tolist() == [1, 1]
            assert matched[1, 0] == 3
            assert matched[2].tolist() == [200, 200]
        turn += 1
    assert process.returncode is None
    assert decided > 50
    assert busy > 50
    process.kill()
    memory.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_writer_killed_at_any_step_leaves_the_reader_right(spawn: Spawn, step: str) -> None:
    process = spawn([*WRITER, step, str(STEPS[step])], ready=r"^table (\d+) (\d+)$")
    memory = attached(process)
    process.wait_ready(r"^held (\d+)$", 20.0)
    process.kill()
    done = int(process.ready[1])
    model, every = Model(), changes()
    for change in islice(every, done):
        model.change(change)
    before = model.counting()
    model.change(next(every))
    after = model.counting()

    reader = IndexReader(memory.buffer)
    found, runs = seen(reader, CHAINS)

    assert runs.undecided == 0
    for old, new, now in zip(before, after, found, strict=True):
        assert old & new <= now <= old | new
    assert reader.age_ns(10**9) >= 10**9 - done, "its heartbeat has stopped"
    memory.close()


def between(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Act when a reader has read slots, and has not looked whether they have changed meanwhile."""
    times = [0]
    locate, find = TableView.locate, NativeLookup.find

    def acting_natively(self: NativeLookup, *arguments: Any) -> Any:
        found = find(self, *arguments)
        times[0] += 1
        act(times[0])
        return found

    def acting(self: TableView, *arguments: np.ndarray) -> layout.Located:
        found = locate(self, *arguments)
        if not self.slots.flags.writeable:
            times[0] += 1
            act(times[0])
        return found

    monkeypatch.setattr(TableView, "locate", acting)
    monkeypatch.setattr(NativeLookup, "find", acting_natively)


class Raced:
    """A writer in this process, and a reader."""

    def __init__(self) -> None:
        self.memory = TableMemory.create(layout.TableLayout(5000, 64).total_bytes)
        self.writer = table_writer.IndexWriter(self.memory, 5000, secret=5, sets_max=64)
        self.reader = IndexReader(memoryview(self.memory.buffer).toreadonly())
        self.store(0, range(1000))
        self.writer.beat(1)
        self.needs = PrefixNeeds([[PartNeed([holder(0)])], [PartNeed([holder(1)])]])

    def store(self, worker: int, chains: range, *, stored: bool = True) -> None:
        numbers = np.full(len(chains), self.writer.holder(holder(worker)), dtype=np.int32)
        flags = np.full(len(chains), stored)
        self.writer.apply(CHAINS[np.array(chains)], numbers, flags)

    def match(self, count: int = 1000) -> list[int]:
        return self.reader.match([CHAINS[:count]], self.needs)[0].tolist()


@pytest.fixture
def raced(either: None) -> Iterator[Raced]:
    made = Raced()
    yield made
    made.memory.close()
    vars(made).clear()  # pytest keeps the object, and with it the memory


def test_segments_rebuilt_during_a_match_are_read_again(raced, monkeypatch) -> None:
    def rebuild(time: int) -> None:
        if time == 1:
            for segment in range(raced.writer.layout.segments):
                raced.writer._segments._rebuild(segment, 0)

    between(monkeypatch, rebuild)
    assert raced.match() == [1000, 0]
    assert raced.reader.undecided == 0


def test_segments_rebuilt_again_and_again_are_absent_and_counted(monkeypatch) -> None:
    monkeypatch.setattr(table, "LOOKUP", None)  # nothing can be done between two looks of C
    raced = Raced()
    segment = int(raced.writer._table.hashed(CHAINS[7:8])[0][0])
    between(monkeypatch, lambda _: raced.writer._segments._rebuild(segment, 0))

    first = raced.match()[0]

    assert first <= 7
    assert raced.reader.undecided == np.count_nonzero(
        raced.writer._table.hashed(CHAINS[:1000])[0] == segment
    )
    raced.memory.close()
    vars(raced).clear()


@pytest.mark.skipif(LOOKUP is None, reason="built without a compiler")
@pytest.mark.parametrize("pages", [0, 1 << 20, (1 << 31) - 1])
def test_segments_of_impossible_sizes_are_absent_and_counted(raced, pages: int) -> None:
    if raced.reader._native is None:
        return  # numpy says that a position is out of bounds
    states = raced.writer._table.states
    before = states.copy()
    states[:] = (before & ~np.uint64((1 << 31) - 1)) | np.uint64(pages)
    found = raced.reader.find(CHAINS[:1000])
    assert (found.undecided, found.ends.tolist()) == (1000, [1000])
    states[:] = before
    assert raced.match() == [1000, 0]


def test_a_holder_that_takes_a_dropped_ones_bit_during_a_match_does_not_get_its_pages(
    raced, monkeypatch
) -> None:
    def swap(time: int) -> None:
        if time == 1:
            bits = raced.reader.holders().holders
            raced.writer.drop("w0")
            while raced.writer.sweep(1000):
                pass
            raced.store(1, range(1000, 1010))
            assert raced.reader.holders().holders[holder(1)] == bits[holder(0)]

    between(monkeypatch, swap)
    assert raced.match() == [0, 0]


def test_numbers_of_sets_used_again_during_a_match_are_noticed(raced, monkeypatch) -> None:
    def recycle(time: int) -> None:
        if time == 1:
            raced.store(0, range(1000), stored=False)
            raced.writer._sets.recycle()
            raced.store(1, range(2000, 2010))  # its set has the number that {0} had
            assert raced.reader.find(CHAINS[2000:2001]).rows.any()

    raced.writer.holder(holder(1))
    raced.writer.beat(2)
    between(monkeypatch, recycle)
    assert raced.match() == [0, 0]
    raced.writer.check()


def test_a_directory_that_changes_again_and_again_is_no_directory(raced, monkeypatch) -> None:
    live = [True]

    def change(_: int) -> None:
        live[0] = not live[0]
        raced.writer.set_live("w0", live=live[0])

    between(monkeypatch, change)
    found = raced.reader.find(CHAINS[:1000])
    assert found.undecided == 1000
    assert raced.match() == [0, 0]
    assert raced.reader.undecided >= 2000


def test_a_directory_that_changes_before_each_search_gives_no_prefix(raced, monkeypatch) -> None:
    find_many, times = IndexReader.find_many, []

    def changed_before(self: IndexReader, prompts: list[np.ndarray]) -> list[HolderRuns]:
        times.append(len(prompts))
        raced.writer.set_live("w0", live=len(times) % 2 == 0)
        return find_many(self, prompts)

    monkeypatch.setattr(IndexReader, "find_many", changed_before)
    assert raced.match() == [0, 0]
    assert raced.reader.undecided == 1000
    assert len(times) > 1


def test_no_shared_memory_is_left_when_a_writer_is_killed(spawn: Spawn) -> None:
    before = ours()
    process = spawn(WRITER, ready=r"^table (\d+) (\d+)$")
    mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert "/memfd:kvstore:index (deleted)" in mapped
    assert len(re.findall("kvstore:index", mapped)) == mapped.count("/memfd:kvstore:index")
    process.kill()
    assert ours() <= before


def ours() -> set[Path]:
    """Named shared memory of this project; others come and go."""
    return {path for path in Path("/dev/shm").iterdir() if "kvstore" in path.name}
