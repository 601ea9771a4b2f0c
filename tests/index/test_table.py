"""The index's table, its writer and its reader, against dictionaries."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.index import layout, sets, writer
from kvstore.index import table as reading
from kvstore.index.directory import PageHolder
from kvstore.index.layout import HOLDER_BITS_MAX, TableLayout
from kvstore.index.memory import TableMemory
from kvstore.index.table import IndexReader
from kvstore.index.writer import IndexWriter

HOLDERS = [
    PageHolder("engine/a", "GPU", "", 0),
    PageHolder("engine/a", "CPU", "", 0),
    PageHolder("engine/b", "GPU", "", 1),
    PageHolder("node/n", "STORAGE", "00ff", 0),
]
WORKERS = ["engine/a", "engine/b", "node/n"]
CHAINS = np.random.default_rng(5).integers(1, 1 << 63, 4000, dtype=np.uint64)


def table(entries_max: int, sets_max: int = 256) -> tuple[TableMemory, IndexWriter, IndexReader]:
    memory = TableMemory.create(TableLayout(entries_max, sets_max).total_bytes)
    made = IndexWriter(memory, entries_max, secret=99, sets_max=sets_max)
    return memory, made, IndexReader(memory.buffer)


def held(reader: IndexReader, chains: np.ndarray) -> list[set[PageHolder]]:
    """The holders that the reader sees, for each chain."""
    directory = reader.holders()
    found = reader.find(chains)
    assert found.undecided == 0
    bits = np.unpackbits(found.rows.view(np.uint8), axis=1, bitorder="little")
    sets_of_runs = [{h for h, bit in directory.holders.items() if row[bit]} for row in bits]
    lengths = np.diff(found.ends, prepend=0)
    return [
        holders
        for holders, length in zip(sets_of_runs, lengths, strict=True)
        for _ in range(length)
    ]


Ops = list[tuple[int, int, bool]]


def arrays(made: IndexWriter, ops: Ops) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers = [made.holder(HOLDERS[holder]) for _, holder, _ in ops]
    return (
        CHAINS[np.array([chain for chain, _, _ in ops], dtype=np.int64)],
        np.array(numbers, dtype=np.int32),
        np.array([stored for _, _, stored in ops], dtype=np.bool_),
    )


operations = st.lists(
    st.tuples(st.integers(0, 59), st.integers(0, len(HOLDERS) - 1), st.booleans()), max_size=40
)


class TableMachine(RuleBasedStateMachine):
    """A dictionary says who holds what; writer and reader must say the same."""

    entries_max = 40

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.writer, self.reader = table(self.entries_max)
        self.model: dict[int, set[int]] = {}  # chain → numbers of holders, dropped ones too
        self.numbers: dict[int, int] = {}  # holder → its number
        self.gone: set[int] = set()  # numbers that were dropped and not swept
        self.stale: list[int] = []
        self.not_live: set[str] = set()
        self.left_out = 0

    def teardown(self) -> None:
        self.memory.close()

    @rule(ops=operations)
    def apply(self, ops: Ops) -> None:
        arguments = arrays(self.writer, ops)
        for (_, holder, _), number in zip(ops, arguments[1].tolist(), strict=True):
            assert self.numbers.setdefault(holder, number) == number
        last = {(chain, holder): stored for chain, holder, stored in ops}
        seen = {(chain, holder): at for at, (chain, holder, _) in enumerate(ops)}
        room, new, left_out = self.entries_max - len(self.model), set[int](), 0
        before = set(self.model)
        for chain, holder in sorted(last, key=lambda pair: seen[pair]):
            if last[chain, holder] and chain not in before and chain not in new:
                if len(new) >= room:
                    left_out += 1
                    continue
                new.add(chain)
            if chain in self.model or last[chain, holder]:
                held_by = self.model.setdefault(chain, set())
                (held_by.add if last[chain, holder] else held_by.discard)(self.numbers[holder])
                held_by -= self.gone
                if not held_by:
                    del self.model[chain]
        self.left_out += left_out
        assert self.writer.apply(*arguments) == left_out

    @rule(start=st.integers(0, 3900), count=st.integers(1, 100), stored=st.booleans())
    def apply_run(self, start: int, count: int, stored: bool) -> None:
        self.apply([(chain, 0, stored) for chain in range(start, start + count)])

    @rule(worker=st.sampled_from(WORKERS))
    def drop(self, worker: str) -> None:
        self.writer.drop(worker)
        self.not_live.discard(worker)
        for holder in [h for h in self.numbers if HOLDERS[h].worker == worker]:
            number = self.numbers.pop(holder)
            self.gone.add(number)
            self.stale.append(number)

    @precondition(lambda self: self.stale)
    @rule(data=st.data(), chains=st.lists(st.integers(0, 59), max_size=5))
    def apply_late(self, data: st.DataObject, chains: list[int]) -> None:
        number, late = data.draw(st.sampled_from(self.stale)), self.writer.stats().late
        numbers = np.full(len(chains), number, dtype=np.int32)
        ones = np.ones(len(chains), dtype=np.bool_)
        assert self.writer.apply(CHAINS[np.array(chains, dtype=np.int64)], numbers, ones) == 0
        assert self.writer.stats().late == late + len(chains)

    @rule()
    def sweep(self) -> None:
        while self.writer.sweep(1):
            pass
        for chain in list(self.model):
            self.model[chain] -= self.gone
            if not self.model[chain]:
                del self.model[chain]
        self.gone.clear()

    @rule(worker=st.sampled_from(WORKERS), live=st.booleans())
    def set_live(self, worker: str, live: bool) -> None:
        self.writer.set_live(worker, live=live)
        (self.not_live.discard if live else self.not_live.add)(worker)

    @rule()
    def rebuild(self) -> None:
        for segment in range(self.writer.layout.segments):
            self.writer._segments._rebuild(segment, 0)

    @rule()
    def recycle(self) -> None:
        self.writer._sets.recycle()

    @rule()
    def beat(self) -> None:
        self.writer.beat(17)
        assert self.reader.age_ns(20) == 3

    @invariant()
    def agrees(self) -> None:
        self.writer.check()
        assert len(self.writer) == len(self.model)
        assert self.writer.stats().left_out == self.left_out
        owners = {number: HOLDERS[holder] for holder, number in self.numbers.items()}
        pages = {HOLDERS[holder]: 0 for holder in self.numbers}
        for numbers in self.model.values():
            for number in numbers - self.gone:
                pages[owners[number]] += 1
        assert self.writer.pages() == pages
        every = np.arange(len(CHAINS))
        seen = {chain: h for chain, h in enumerate(held(self.reader, CHAINS[every])) if h}
        counting = {n: h for n, h in owners.items() if h.worker not in self.not_live}
        expected = {c: {counting[n] for n in ns if n in counting} for c, ns in self.model.items()}
        assert seen == {chain: holders for chain, holders in expected.items() if holders}


class GrowingTableMachine(TableMachine):
    """Room for all, so that the segment grows and shrinks."""

    entries_max = 4100

    @rule(start=st.integers(0, 3000), stored=st.booleans())
    def apply_many(self, start: int, stored: bool) -> None:
        self.apply([(chain, 3, stored) for chain in range(start, start + 1000)])


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestGrowingTable = GrowingTableMachine.TestCase
TestGrowingTable.settings = settings(max_examples=8, stateful_step_count=10, deadline=None)


@pytest.fixture
def opened() -> Iterator[list[TableMemory]]:
    """Memories that the test has made; closed at its end."""
    made: list[TableMemory] = []
    yield made
    while made:
        made.pop().close()


def open_table(
    opened: list[TableMemory], entries_max: int, sets_max: int = 256
) -> tuple[IndexWriter, IndexReader]:
    memory, made, reader = table(entries_max, sets_max)
    opened.append(memory)
    return made, reader


def random_ops(rng: np.random.Generator, made: IndexWriter, count: int) -> Ops:
    chains = rng.integers(0, len(CHAINS), count).tolist()
    holders = rng.integers(0, len(HOLDERS), count).tolist()
    stored = (rng.random(count) < 0.6).tolist()
    return list(zip(chains, holders, stored, strict=True))


def test_a_table_of_many_segments_agrees_with_a_dictionary_while_it_is_swept(
    opened: list[TableMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SEGMENT_ENTRIES", 1100)
    made, reader = open_table(opened, 4000)
    assert made.layout.segments == 4
    rng = np.random.default_rng(3)
    model: dict[int, set[int]] = {}
    for step in range(60):
        ops = random_ops(rng, made, 800)
        made.apply(*arrays(made, ops))
        for chain, holder, stored in ops:
            held_by = model.setdefault(chain, set())
            (held_by.add if stored else held_by.discard)(holder)
        if step % 10 == 5:
            made.drop("engine/a")
            for held_by in model.values():
                held_by -= {0, 1}
        made.sweep(1)
        made.check()
        expected = [{HOLDERS[h] for h in model.get(chain, ())} for chain in range(len(CHAINS))]
        assert held(reader, CHAINS) == expected
    assert made.stats().rebuilds > 4


def test_without_numbers_for_sets_stores_are_left_out_and_removals_lose(
    opened: list[TableMemory],
) -> None:
    made, reader = open_table(opened, 4000, sets_max=5)
    ops: Ops = [(0, 0, True), (1, 0, True), (1, 1, True), (2, 2, True), (2, 3, True)]
    assert made.apply(*arrays(made, ops)) == 0  # {0}, {0, 1}, {2}, {2, 3}: with {}, all five
    assert made.apply(*arrays(made, [(0, 3, True)])) == 1
    assert made.stats().left_out == 1
    assert [made.lacks(one) for one in WORKERS] == [0, 0, 1]
    assert held(reader, CHAINS[:1]) == [{HOLDERS[0]}]
    made.apply(*arrays(made, [(1, 0, False)]))  # {1} has no number
    assert made.stats().lost == 1
    assert [made.lacks(one) for one in WORKERS] == [1, 0, 1], "what was removed is not lacking"
    assert held(reader, CHAINS[:3]) == [{HOLDERS[0]}, set(), {HOLDERS[2], HOLDERS[3]}]
    made.check()
    made.drop("engine/b")
    while made.sweep(1):
        made.check()
    made.check()
    made.drop("node/n")
    assert [made.lacks(one) for one in WORKERS] == [1, 0, 0]


def test_numbers_of_sets_are_used_again(
    opened: list[TableMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "_RECYCLED_AT_LEAST", 4)
    made, reader = open_table(opened, 4000, sets_max=64)
    rng = np.random.default_rng(4)
    numbers = np.array(
        [made.holder(PageHolder(f"w{w}", "GPU", "", 0)) for w in range(300)], dtype=np.int32
    )
    for _ in range(100):
        some = rng.choice(numbers, 8, replace=False)
        pair = np.ones(8, dtype=np.bool_)
        assert made.apply(np.repeat(CHAINS[:2], 4), some, pair) == 0
        bits = [bit % HOLDER_BITS_MAX for bit in some[:4].tolist()]
        row = reader.find(CHAINS[:1]).rows.view(np.uint8)
        assert np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist() == sorted(bits)
        assert made.apply(np.repeat(CHAINS[:2], 4), some, ~pair) == 0
        made.check()
    assert made.stats().left_out == made.stats().lost == 0


def test_holders_beyond_the_limits_are_refused_and_counted(opened: list[TableMemory]) -> None:
    made, reader = open_table(opened, 100)
    of_one = [made.holder(PageHolder("w", "GPU", "", group)) for group in range(300)]
    assert of_one.count(None) == 300 - writer.HOLDERS_PER_WORKER_MAX
    every = [made.holder(PageHolder(f"v{number}", "GPU", "", 0)) for number in range(1000)]
    assert every.count(None) == 1000 - (HOLDER_BITS_MAX - writer.HOLDERS_PER_WORKER_MAX)
    assert made.holder(PageHolder("x" * 2000, "GPU", "", 0)) is None
    made.drop("v0")
    assert made.holder(PageHolder("\ud800", "GPU", "", 0)) is None
    assert made.stats().refused_holders == of_one.count(None) + every.count(None) + 2
    assert (made.lacks("w"), made.lacks("v999"), made.lacks("v0")) == (of_one.count(None), 1, 0)
    assert made.holder(PageHolder("new", "GPU", "", 0)) is not None
    made.beat(1)
    assert len(reader.holders().holders) == HOLDER_BITS_MAX
    assert len(reader.holders().by_worker["w"]) == writer.HOLDERS_PER_WORKER_MAX
    made.check()


def test_a_reader_of_what_is_no_table_yet_finds_nothing() -> None:
    memory = TableMemory.create(TableLayout(100, 16).total_bytes)
    reader = IndexReader(memory.buffer)
    found = reader.find(CHAINS[:5])
    assert found.ends.tolist() == [5]
    assert not found.rows.any()
    assert found.undecided == 5
    assert reader.holders().holders == {}
    IndexWriter(memory, 100, secret=1, sets_max=16)
    assert reader.find(CHAINS[:5]).undecided == 0
    memory.close()


def test_c_and_numpy_find_the_same(
    opened: list[TableMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, native = open_table(opened, 4000)
    monkeypatch.setattr(reading, "LOOKUP", None)
    plain = IndexReader(opened[-1].buffer)
    random = np.random.default_rng(7)
    for _ in range(6):  # segments grow and are rebuilt, entries die
        made.apply(*arrays(made, random_ops(random, made, 3000)))
        for prompt in (CHAINS, CHAINS[::-3], np.repeat(CHAINS[:40], 3), CHAINS[:0]):
            ours, theirs = native.find(prompt), plain.find(prompt)
            assert ours.ends.tolist() == theirs.ends.tolist()
            assert ours.rows.tolist() == theirs.rows.tolist()
            assert (ours.version, ours.undecided) == (theirs.version, theirs.undecided)
    assert made.stats().rebuilds > 0


def test_several_prompts_are_found_as_one_by_one(opened: list[TableMemory]) -> None:
    made, reader = open_table(opened, 4000)
    made.apply(*arrays(made, random_ops(np.random.default_rng(6), made, 3000)))
    prompts = [CHAINS[a:b] for a, b in [(0, 0), (0, 300), (300, 300), (100, 120), (7, 8), (9, 9)]]
    for chains, found in zip(prompts, reader.find_many(prompts), strict=True):
        alone = reader.find(chains)
        assert found.ends.tolist() == alone.ends.tolist()
        assert found.rows.tolist() == alone.rows.tolist()
    assert reader.find_many([]) == []


def test_only_memory_that_cannot_shrink_is_read_and_it_is_read_only(
    opened: list[TableMemory],
) -> None:
    memory, made, _ = table(100)
    opened.append(memory)
    again = TableMemory.attach(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY))
    opened.append(again)
    made.apply(*arrays(made, [(0, 0, True)]))
    assert held(IndexReader(again.buffer), CHAINS[:2]) == [{HOLDERS[0]}, set()]
    with pytest.raises(TypeError, match="read-only"):
        again.buffer[0] = 1
    with pytest.raises(OSError, match="shrink"):
        TableMemory.attach(os.memfd_create("test"))


def used_bytes(memory: TableMemory) -> int:
    """Memory that the kernel has allocated."""
    return os.fstat(memory.fd).st_blocks * 512


def test_a_rebuilt_segment_gives_its_memory_back(opened: list[TableMemory]) -> None:
    memory, made, reader = table(4000)
    opened.append(memory)
    made.apply(*arrays(made, [(chain, 0, True) for chain in range(3000)]))
    before = used_bytes(memory)
    for _ in range(5):
        made._segments._rebuild(0, 0)
        assert len(held(reader, CHAINS)) == len(CHAINS)
    assert used_bytes(memory) <= before


def test_what_comes_late_does_not_count_for_the_holder_that_has_the_bit_now(
    opened: list[TableMemory],
) -> None:
    made, reader = open_table(opened, 100)
    ops = arrays(made, [(0, 0, True)])
    made.apply(*ops)
    bit = made.holder(HOLDERS[0]) % HOLDER_BITS_MAX
    made.drop(HOLDERS[0].worker)
    assert not made.sweep(1 << 20)
    assert made.holder(HOLDERS[3]) % HOLDER_BITS_MAX == bit
    assert made.apply(*ops) == 0
    assert made.stats().late == 1
    assert held(reader, CHAINS[:1]) == [set()]


def test_entries_that_have_no_place_at_the_end_of_a_segment_are_left_out(
    opened: list[TableMemory],
) -> None:
    made, reader = open_table(opened, 4000)
    back = pow(2 * 99 + 1, -1, 1 << 64)  # from a tag to a chain
    highest = [((1 << 64) - 1 - (at << 24)) * back % (1 << 64) for at in range(100)]
    chains = np.array(highest, dtype=np.uint64)
    numbers = np.full(100, made.holder(HOLDERS[0]), dtype=np.int32)
    room = (layout.OVERRUN_LINES + 1) * layout.LINE_SLOTS
    assert made.apply(chains, numbers, np.ones(100, dtype=np.bool_)) == 100 - room
    made.check()
    assert held(reader, chains) == [{HOLDERS[0]}] * room + [set()] * (100 - room)
    assert made.apply(*arrays(made, [(chain, 1, True) for chain in range(2500)])) < 30
    made.check()
    assert sum(map(bool, held(reader, chains))) == room


def test_looking_up_what_is_absent_allocates_no_memory(opened: list[TableMemory]) -> None:
    memory, made, reader = table(4000)
    opened.append(memory)
    made.apply(*arrays(made, [(chain, 0, True) for chain in range(150)]))
    back = pow(2 * 99 + 1, -1, 1 << 64)
    last = [((1 << 64) - 1 - (at << 24)) * back % (1 << 64) for at in range(100)]
    before = used_bytes(memory)
    made.apply(np.array(last, dtype=np.uint64), *arrays(made, [(0, 0, True)] * 100)[1:])
    absent = [((1 << 64) - 1 - (at << 24)) * back % (1 << 64) for at in range(100, 5000)]
    assert not any(held(reader, np.array(absent, dtype=np.uint64)))
    assert used_bytes(memory) == before
