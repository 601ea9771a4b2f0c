"""Goal: whatever engines do, in whatever order, the page table agrees with a plain model of it.

The model knows pages as (space, path of letters, shard) and learns which are READY only from the
Stored and Removed actions, as any index that follows the events does. It compares whole runs with
single pages: nothing here asks for a page in a way that makes the table split its run
(``PrefixTree.nodes`` does that), except where engines and operators do.
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.protocol.errors import CapacityError
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import Abandoned, PageStatus, Removed, Stored
from kvstore.state.tree.node import Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from kvstore.state.tree.slots import Slot, SlotState
from tests.state.single_pages import PATH_OF, SHARDS, WINDOW_SHARD, Page, longest, pages_in, slot_of
from tests.state.world import PAGE, World, hold, key

CHANCES = st.integers(0, 2**32 - 1).map(Random)
"""Uniform choices: Hypothesis's own are so often the simplest that a pool rarely gets full."""


@dataclass
class Reader:
    process: Process
    space: int
    pages: list[tuple[Page, Slot]]
    deadline_ns: int
    expired: bool = False


@dataclass
class Writer:
    process: Process
    space: int
    shard: int
    pages: list[tuple[Page, Slot]]
    alive: set[Page] = field(default_factory=set)
    """All and only the pages that it still has in the index."""


def _path(chance: Random) -> str:
    return "".join(chance.choices("ab", k=chance.randint(1, 4)))


class PagesMachine(RuleBasedStateMachine):
    """Two tenants, three spaces of three shards, up to five processes, a pool of 16 pages."""

    @initialize(quota=st.sampled_from([6 * PAGE, 12 * PAGE, 1 << 40]), extents=st.integers(1, 3))
    def start(self, quota: int, extents: int) -> None:
        self.world = World(extents=extents, quota=quota)
        self.table = self.world.table
        self.capacity = extents * 4 * PAGE
        self.now_ns = 0
        self.ready: set[Page] = set()
        self.keep: dict[Page, Retention] = {}
        self.pins: Counter[Slot] = Counter()
        self.slot_of: dict[Page, Slot] = {}
        self.readers: dict[int, Reader] = {}
        self.writers: dict[int, Writer] = {}
        self.processes: list[tuple[Process, list[PrefixTree]]] = []
        self.spaces: list[PrefixTree] = []
        for name, tenant in (("p", "red"), ("p", "red"), ("q", "blue")):
            self._join(name, tenant)

    def _join(self, name: str, tenant: str) -> None:
        process = self.world.process(name, pid=len(self.processes))
        space = self.world.space(process, SHARDS, tenant)
        if space not in self.spaces:
            self.spaces.append(space)
        self.processes.append((process, [space]))

    def _someone(self, chance: Random) -> tuple[Process, PrefixTree]:
        process, (space,) = chance.choice([p for p in self.processes if not p[0].lost])
        return process, space

    # ---- what the table did -----------------------------------------------------------------

    def _apply(self) -> None:
        """Follow the actions, and check each against what must never happen."""
        for action in self.table.actions:
            if isinstance(action, Stored):
                parent = PATH_OF[action.parent]
                for at, one in enumerate(action.keys):
                    page = (action.space.number, PATH_OF[one], action.shard)
                    assert page[1][:-1] == parent, "told as following another page"
                    parent = page[1]
                    assert page not in self.ready, "stored twice"
                    letter = action.tokens[4 * at : 4 * at + 4].decode("utf-32-le")
                    assert letter == page[1][-1]
                    self.ready.add(page)
            elif isinstance(action, Removed):
                for one in action.keys:
                    page = (action.space.number, PATH_OF[one], action.shard)
                    self.ready.remove(page)
                    pinned = self.pins[self.slot_of.pop(page)] > 0
                    assert action.cause != "evicted" or not pinned, "evicted under a pin"
                    self._justify(page, action.cause)
                    del self.keep[page]
            else:
                self._abandoned(action)
        self.table.actions.clear()

    def _justify(self, page: Page, cause: str) -> None:
        """Only the page's own retention, or that of a page before it, takes it out by itself."""
        number, path, shard = page
        chain = [self.keep.get((number, path[:end], shard)) for end in range(1, len(path) + 1)]
        if cause == "expired":
            assert any(one and 0 < one.expires_ns <= self.now_ns for one in chain)
        if cause == "read_once":
            assert any(one and one.read_once for one in chain)

    def _abandoned(self, action: Abandoned) -> None:
        """The action does not say of which shard; the tree does."""
        gone = {(action.space.number, PATH_OF[one]) for one in action.keys}
        for writer in self.writers.values():
            for page, slot in writer.pages:
                if page[:2] in gone and slot_of(action.space, *page[1:]) != slot:
                    writer.alive.discard(page)

    def _writing(self) -> set[Page]:
        return {page for writer in self.writers.values() for page in writer.alive}

    def _touched(self) -> set[Slot]:
        """Slots whose bytes somebody may still read or write."""
        held = {slot for reader in self.readers.values() for _, slot in reader.pages}
        return held | {slot for writer in self.writers.values() for _, slot in writer.pages}

    # ---- reading ----------------------------------------------------------------------------

    @rule(chance=CHANCES)
    def lookup(self, chance: Random) -> None:
        path, space = _path(chance), chance.choice(self.spaces)
        shards = sorted(chance.sample(range(3), chance.randint(1, 3)))
        pages, pending = self.world.lookup(space, path, shards)
        assert pages == longest(self.ready, space.number, path, shards)
        present = self.ready | self._writing()
        assert pages + pending == longest(present, space.number, path, shards)

    @rule(chance=CHANCES)
    def acquire(self, chance: Random) -> None:
        process, space = self._someone(chance)
        there = sorted(page for page in self.ready if page[0] == space.number)
        if not there:
            return
        _, path, shard = chance.choice(there)
        path += chance.choice(["", "a"])
        expected = []
        for end in range(1, len(path) + 1):
            page = (space.number, path[:end], shard)
            if page not in self.ready:
                break
            expected.append(page)
        used = process.session.used_bytes
        until_ns = self.now_ns + chance.randint(1, 6)
        try:
            number, lease = self.world.acquire(process, space, path, shard=shard, until_ns=until_ns)
        except CapacityError:
            size = len(expected) * space.shards[shard].slot_bytes
            assert used + size > self.world.quota
            assert process.session.used_bytes == used
            return
        held = self.world.leased_keys(lease.slots)
        assert [PATH_OF[key] for key in held] == [page[1] for page in expected]
        if expected:
            pairs = list(zip(expected, lease.slots, strict=True))
            self.readers[number] = Reader(process, space.number, pairs, until_ns)
            self.pins.update(lease.slots)

    @rule(chance=CHANCES)
    def release(self, chance: Random) -> None:
        if self.readers:
            number = chance.choice(sorted(self.readers))
            self._reader_gone(number)
            self.table.release(self.gone_reader.process, number)
            self._apply()

    def _reader_gone(self, number: int) -> None:
        reader = self.gone_reader = self.readers.pop(number)
        if not reader.expired:
            self.pins.subtract(slot for _, slot in reader.pages)

    # ---- writing ----------------------------------------------------------------------------

    @rule(chance=CHANCES)
    def store(self, chance: Random) -> None:
        """Begin and commit with nothing between: most puts are like that."""
        number = self._begin(chance)
        if number is not None:
            self._commit(number, chance)

    @rule(chance=CHANCES)
    def begin_put(self, chance: Random) -> None:
        self._begin(chance)

    def _begin(self, chance: Random) -> int | None:
        process, space = self._someone(chance)
        path, shard = _path(chance), chance.choice([0, 0, 1, 2])
        start = chance.choice([0, 0, chance.randrange(len(path))])
        touched, ready, writing = self._touched(), set(self.ready), self._writing()
        number, statuses, put = self.world.begin(process, space, path, start=start, shard=shard)
        self._apply()
        granted = iter(put.slots)
        mine: list[tuple[Page, Slot]] = []
        for end, status in enumerate(statuses, start + 1):
            page = (space.number, path[:end], shard)
            head = (space.number, path[: end - 1], shard)
            match status:
                case PageStatus.EXISTS:
                    assert page in self.ready, "told to exist, and it does not"
                case PageStatus.PENDING:
                    assert page in writing
                case PageStatus.GRANTED:
                    # One that was READY may have gone to make room for an earlier page.
                    assert page not in self.ready | writing, "granted twice"
                    slot = next(granted)
                    assert slot not in touched, "someone may still touch that slot"
                    assert slot not in [taken for _, taken in mine]
                    mine.append((page, slot))
                case PageStatus.NO_PARENT:
                    assert shard != WINDOW_SHARD
                    assert end > start + 1 or head not in ready | writing
                    break
                case PageStatus.NO_ROOM:
                    self._assert_no_room(process, space, page)
                    break
        assert len(statuses) == len(path) - start
        if mine:
            pages = {page for page, _ in mine}
            self.writers[number] = Writer(process, space.number, shard, mine, pages)
            return number
        return None

    def _assert_no_room(self, process: Process, space: PrefixTree, refused: Page) -> None:
        """Nothing of this class could have been evicted, or the quota is used up."""
        size = space.shards[refused[2]].slot_bytes
        if not process.session.admits(size):
            return
        writing = self._writing()
        for other in self.spaces:
            if other.identity.tenant != space.identity.tenant:
                continue
            for path in {page[1] for page in self.ready if page[0] == other.number}:
                if other is space and refused[1].startswith(path):
                    continue  # its own head: evicting that would make it unreachable
                pages = [(other.number, path, number) for number in range(len(SHARDS))]
                present = [page for page in pages if page in self.ready or page in writing]
                sizes = {other.shards[number].slot_bytes for *_, number in present}
                slots = [slot_of(other, *page[1:]) for page in present]
                assert None not in slots
                followed = any(
                    number == other.number and longer.startswith(path) and longer != path
                    for number, longer, _ in self.ready | writing
                )
                assert not (
                    not followed
                    and self.ready.issuperset(present)
                    and size in sizes
                    and not any(self.pins[slot] for slot in slots if slot is not None)
                    and not any(self._is_drained(slot) for slot in slots if slot is not None)
                ), f"{path} could have been evicted"

    def _is_drained(self, slot: Slot) -> bool:
        """Whether another class gets the extent of a slot: who evicts its page gets no room."""
        now = self.table.draining.now
        return now is not None and self.table.slots.position(slot) == now.position

    @rule(chance=CHANCES)
    def commit(self, chance: Random) -> None:
        if open_puts := self._open_puts():
            self._commit(chance.choice(open_puts), chance)

    def _open_puts(self) -> list[int]:
        return [number for number, writer in self.writers.items() if not writer.process.lost]

    def _commit(self, number: int, chance: Random) -> None:
        ttl_ns, read_once = chance.choice([0, 0, 0, 9]), chance.random() < 0.1
        writer = self.writers.pop(number)
        self.slot_of |= {page: slot for page, slot in writer.pages if page in writer.alive}
        keep = Retention(self.now_ns + ttl_ns if ttl_ns else 0, read_once)
        self.keep |= {page: keep for page, _ in writer.pages if page in writer.alive}
        statuses = self.world.commit(writer.process, number, keep)
        expected = [
            PageStatus.STORED if page in writer.alive else PageStatus.DROPPED
            for page, _ in writer.pages
        ]
        assert statuses == expected
        self._apply()
        assert self.ready >= writer.alive

    @rule(chance=CHANCES)
    def abort(self, chance: Random) -> None:
        if open_puts := self._open_puts():
            number = chance.choice(open_puts)
            writer = self.writers.pop(number)
            self.table.abort_put(writer.process, number)
            self._apply()

    # ---- ends -------------------------------------------------------------------------------

    @rule(chance=CHANCES)
    def lose(self, chance: Random) -> None:
        """The connection breaks; a new process of the same engine takes its place in the test."""
        process, space = self._someone(chance)
        if len(self.processes) > 6 or chance.random() < 0.7:
            return
        self.table.lose(process)
        self._apply()
        for writer in self.writers.values():
            assert writer.process is not process or not writer.alive
        self._join(process.session.name, space.identity.tenant)

    @rule(chance=CHANCES)
    def end(self, chance: Random) -> None:
        if chance.random() < 0.5:
            return
        process, (space,) = self.processes.pop(chance.randrange(len(self.processes)))
        self._end(process)
        if not any(
            other.session is process.session and not other.lost for other, _ in self.processes
        ):
            self._join(process.session.name, space.identity.tenant)

    def _end(self, process: Process) -> None:
        for number in [n for n, reader in self.readers.items() if reader.process is process]:
            self._reader_gone(number)
        self.writers = {n: w for n, w in self.writers.items() if w.process is not process}
        self.world.end(process)
        self._apply()

    @rule(chance=CHANCES)
    def drop(self, chance: Random) -> None:
        """A reader found the page corrupt."""
        if self.ready and chance.random() < 0.3:
            number, path, shard = chance.choice(sorted(self.ready))
            self.table.residents.drop(self.spaces[number].nodes[key(path)], shard, "corrupt")
            self._apply()
            assert (number, path, shard) not in self.ready

    @rule(ns=st.integers(1, 4))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns
        for reader in self.readers.values():
            if not reader.expired and reader.deadline_ns <= self.now_ns:
                reader.expired = True
                self.pins.subtract(slot for _, slot in reader.pages)
        self.table.expire(self.now_ns)
        self._apply()
        assert not any(0 < keep.expires_ns <= self.now_ns for keep in self.keep.values())
        assert not 0 < self.table.next_deadline_ns() <= self.now_ns

    # ---- always -----------------------------------------------------------------------------

    @invariant()
    def the_actions_tell_the_whole_truth(self) -> None:
        assert pages_in(self.spaces, lambda node: node.ready) == self.ready
        assert pages_in(self.spaces, lambda node: node.present) == self.ready | self._writing()
        for page, slot in self.slot_of.items():
            assert slot_of(self.spaces[page[0]], *page[1:]) == slot

    @invariant()
    def no_page_is_out_of_reach(self) -> None:
        present = self.ready | self._writing()
        for number, path, shard in present:
            if shard != WINDOW_SHARD and len(path) > 1:
                assert (number, path[:-1], shard) in present, f"{path} lost its head"

    @invariant()
    def checks_and_quotas_hold(self) -> None:
        check(self.table)
        for session in self.world.sessions.values():
            hold(session.checks())
            assert session.used_bytes <= session.quota_bytes
        stats = self.world.slots.stats()
        used = stats.writing_bytes + stats.ready_bytes + stats.limbo_bytes
        assert used + stats.free_bytes <= stats.capacity_bytes == self.capacity
        for slot in self._touched():
            assert self.world.slots.state(slot) != SlotState.FREE

    def teardown(self) -> None:
        """When every process has ended and every page was dropped, every byte is FREE."""
        if not hasattr(self, "world"):
            return
        for process, _ in self.processes:
            self._end(process)
        for space in self.spaces:
            # As single pages: a drop splits the runs below it.
            for node in [space.nodes[one] for one in list(space.index)]:
                for shard in list(node.digest_columns):
                    self.table.residents.drop(node, shard, "test")
            assert not space.index
            assert not space.writing
        stats = self.world.slots.stats()
        assert (
            stats.writing_bytes == stats.ready_bytes == stats.limbo_bytes == stats.pinned_bytes == 0
        )
        assert all(not session.used_bytes for session in self.world.sessions.values())
        check(self.table)


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(stateful_step_count=60)


def test_the_model_compares_whole_runs_and_splits_none():
    machine = PagesMachine()
    machine.start(quota=1 << 40, extents=3)
    process, (space,) = machine.processes[0]
    machine.world.store(process, space, "abba")
    machine._apply()

    machine.the_actions_tell_the_whole_truth()
    machine.checks_and_quotas_hold()

    assert space.index[key("a")].count == 4
    space.index[key("a")].split(2)
    assert pages_in(machine.spaces, lambda node: node.ready) == machine.ready
    machine.teardown()
