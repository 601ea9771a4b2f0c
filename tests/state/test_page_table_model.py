"""Goal: whatever engines do, in whatever order, the page table agrees with a plain model of it.

The model knows pages as (space, path of letters, shard) and learns which are READY only from the
Stored and Removed actions, as any index that follows the events does.
"""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.errors import CapacityError
from kvstore.page import PrefixKey, ShardSpec
from kvstore.state.outcomes import PageStatus, Removed, Stored
from kvstore.state.sessions import Process
from kvstore.state.slots import Slot, SlotState
from kvstore.state.tree import Space
from tests.state.world import FULL, FULL_2, PAGE, ROOT, WINDOW, World, key

SHARDS: tuple[ShardSpec, ...] = (FULL, FULL_2, WINDOW)
WINDOW_SHARD, WINDOW_PAGES = 2, WINDOW.window_pages
PATHS = st.text("ab", min_size=1, max_size=4)
PATH_OF: dict[PrefixKey, str] = {ROOT: ""}
for _length in range(1, 5):
    for _number in range(2**_length):
        _path = format(_number, f"0{_length}b").translate({48: "a", 49: "b"})
        PATH_OF[key(_path)] = _path

Page = tuple[int, str, int]
"""Space number, path, shard."""


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


class PagesMachine(RuleBasedStateMachine):
    """Two tenants, three spaces of three shards, up to five processes, a pool of 16 pages."""

    @initialize(quota=st.sampled_from([6 * PAGE, 12 * PAGE, 1 << 40]), extents=st.integers(1, 3))
    def start(self, quota: int, extents: int) -> None:
        self.world = World(extents=extents, quota=quota)
        self.table = self.world.table
        self.capacity = extents * 4 * PAGE
        self.now_ns = 0
        self.ready: set[Page] = set()
        self.pins: Counter[Page] = Counter()
        self.readers: dict[int, Reader] = {}
        self.writers: dict[int, Writer] = {}
        self.processes: list[tuple[Process, list[Space]]] = []
        self.spaces: list[Space] = []
        for name, tenant in (("p", "red"), ("p", "red"), ("q", "blue")):
            self._join(name, tenant)

    def _join(self, name: str, tenant: str) -> None:
        process = self.world.process(name, pid=len(self.processes))
        space = self.world.space(process, SHARDS, tenant)
        if space not in self.spaces:
            self.spaces.append(space)
        self.processes.append((process, [space]))

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
                    assert action.cause != "evicted" or not self.pins[page], "evicted under a pin"
            else:
                gone = {(action.space.number, PATH_OF[one]) for one in action.keys}
                for writer in self.writers.values():
                    writer.alive -= {page for page in writer.alive if page[:2] in gone}
        self.table.actions.clear()

    def _writing(self) -> set[Page]:
        return {page for writer in self.writers.values() for page in writer.alive}

    def _touched(self) -> set[Slot]:
        """Slots whose bytes somebody may still read or write."""
        held = {slot for reader in self.readers.values() for _, slot in reader.pages}
        return held | {slot for writer in self.writers.values() for _, slot in writer.pages}

    # ---- reading ----------------------------------------------------------------------------

    @rule(
        path=PATHS, at=st.integers(0, 9), shards=st.sets(st.integers(0, 2), min_size=1).map(sorted)
    )
    def lookup(self, path: str, at: int, shards: list[int]) -> None:
        space = self.spaces[at % len(self.spaces)]
        pages, pending = self.world.lookup(space, path, shards)
        assert pages == self._longest(space, path, shards, self.ready)
        present = self._longest(space, path, shards, self.ready | self._writing())
        assert pages + pending == present

    def _longest(self, space: Space, path: str, shards: list[int], have: set[Page]) -> int:
        for count in range(len(path), 0, -1):
            needed = [
                (space.number, path[:end], shard)
                for shard in shards
                for end in range(1, count + 1)
                if shard != WINDOW_SHARD or end > count - WINDOW_PAGES
            ]
            if have.issuperset(needed):
                return count
        return 0

    @rule(data=st.data(), life_ns=st.integers(1, 6))
    def acquire(self, data: st.DataObject, life_ns: int) -> None:
        if not self.ready:
            return
        number, path, shard = data.draw(st.sampled_from(sorted(self.ready)))
        able = [
            (process, space)
            for process, (space,) in self.processes
            if space.number == number and not process.lost
        ]
        if not able:
            return
        process, space = data.draw(st.sampled_from(able))
        path += data.draw(st.sampled_from(["", "a"]))
        expected = []
        for end in range(1, len(path) + 1):
            page = (space.number, path[:end], shard)
            if page not in self.ready:
                break
            expected.append(page)
        used = process.session.used_bytes
        until_ns = self.now_ns + life_ns
        try:
            number, lease = self.world.acquire(process, space, path, shard=shard, until_ns=until_ns)
        except CapacityError:
            size = len(expected) * space.shards[shard].slot_bytes
            assert used + size > self.world.quota
            assert process.session.used_bytes == used
            return
        assert [PATH_OF[node.key] for node, _, _ in lease.pages] == [page[1] for page in expected]
        if expected:
            pairs = list(zip(expected, lease.slots, strict=True))
            self.readers[number] = Reader(process, space.number, pairs, until_ns)
            self.pins.update(expected)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.readers:
            number = data.draw(st.sampled_from(sorted(self.readers)))
            self._reader_gone(number)
            self.table.release(self.gone_reader.process, number)
            self._apply()

    def _reader_gone(self, number: int) -> None:
        reader = self.gone_reader = self.readers.pop(number)
        if not reader.expired:
            self.pins.subtract(page for page, _ in reader.pages)

    # ---- writing ----------------------------------------------------------------------------

    @rule(
        path=PATHS, start=st.integers(0, 3), shard=st.integers(0, 2), who=st.integers(0, 9),
        whole=st.booleans(),
    )  # fmt: skip
    def begin_put(self, path: str, start: int, shard: int, who: int, whole: bool) -> None:
        process, (space,) = self.processes[who % len(self.processes)]
        start = 0 if whole else min(start, len(path) - 1)
        if process.lost:
            return
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
                    assert page not in ready | writing, "granted twice"
                    slot = next(granted)
                    assert slot not in touched, "someone may still touch that slot"
                    assert slot not in [taken for _, taken in mine]
                    mine.append((page, slot))
                case PageStatus.NO_PARENT:
                    assert shard != WINDOW_SHARD
                    assert end > start + 1 or head not in ready | writing
                    break
                case PageStatus.NO_ROOM:
                    self._assert_no_room(process, space, shard)
                    break
        assert len(statuses) == len(path) - start
        if mine:
            pages = {page for page, _ in mine}
            self.writers[number] = Writer(process, space.number, shard, mine, pages)

    def _assert_no_room(self, process: Process, space: Space, shard: int) -> None:
        """Nothing of this class could have been evicted, or the quota is used up."""
        size = space.shards[shard].slot_bytes
        if not process.session.admits(size):
            return
        for other in self.spaces:
            if other.identity.tenant != space.identity.tenant:
                continue
            for path in {page[1] for page in self.ready if page[0] == other.number}:
                node = other.nodes[key(path)]
                pages = [(other.number, path, number) for number in node.slots]
                sizes = {other.shards[number].slot_bytes for number in node.slots}
                leaf = not node.children and self.ready.issuperset(pages)
                assert not (
                    leaf and size in sizes and not any(self.pins[page] for page in pages)
                ), f"{path} could have been evicted"

    @rule(data=st.data(), ttl_ns=st.sampled_from([0, 0, 3]), read_once=st.booleans())
    def commit(self, data: st.DataObject, ttl_ns: int, read_once: bool) -> None:
        open_puts = [n for n, writer in self.writers.items() if not writer.process.lost]
        if not open_puts:
            return
        number = data.draw(st.sampled_from(open_puts))
        writer = self.writers.pop(number)
        expires_ns = self.now_ns + ttl_ns if ttl_ns else 0
        statuses = self.world.commit(writer.process, number, expires_ns, read_once=read_once)
        expected = [
            PageStatus.STORED if page in writer.alive else PageStatus.DROPPED
            for page, _ in writer.pages
        ]
        assert statuses == expected
        self._apply()
        assert self.ready >= writer.alive

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_puts = [n for n, writer in self.writers.items() if not writer.process.lost]
        if open_puts:
            number = data.draw(st.sampled_from(open_puts))
            writer = self.writers.pop(number)
            self.table.abort_put(writer.process, number)
            self._apply()

    # ---- ends -------------------------------------------------------------------------------

    @rule(who=st.integers(0, 9))
    def lose(self, who: int) -> None:
        """The connection breaks; a new process of the same engine takes its place in the test."""
        process, (space,) = self.processes[who % len(self.processes)]
        if process.lost or len(self.processes) > 8:
            return
        self.table.lose(process)
        self._apply()
        for writer in self.writers.values():
            assert writer.process is not process or not writer.alive
        self._join(process.session.name, space.identity.tenant)

    @rule(who=st.integers(0, 9))
    def end(self, who: int) -> None:
        process, (space,) = self.processes.pop(who % len(self.processes))
        self._end(process)
        if not any(other.session is process.session for other, _ in self.processes):
            self._join(process.session.name, space.identity.tenant)

    def _end(self, process: Process) -> None:
        for number in [n for n, reader in self.readers.items() if reader.process is process]:
            self._reader_gone(number)
        self.writers = {n: w for n, w in self.writers.items() if w.process is not process}
        self.world.end(process)
        self._apply()

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A reader found the page corrupt."""
        if self.ready:
            number, path, shard = data.draw(st.sampled_from(sorted(self.ready)))
            self.table.drop(self.spaces[number].nodes[key(path)], shard, "corrupt")
            self._apply()
            assert (number, path, shard) not in self.ready

    @rule(ns=st.integers(1, 4))
    def time_passes(self, ns: int) -> None:
        self.now_ns += ns
        for reader in self.readers.values():
            if not reader.expired and reader.deadline_ns <= self.now_ns:
                reader.expired = True
                self.pins.subtract(page for page, _ in reader.pages)
        self.table.expire(self.now_ns)
        self._apply()
        assert not 0 < self.table.next_deadline_ns() <= self.now_ns

    # ---- always -----------------------------------------------------------------------------

    @invariant()
    def the_actions_tell_the_whole_truth(self) -> None:
        there = {
            (space.number, PATH_OF[node.key], shard)
            for space in self.spaces
            for node in space.nodes.values()
            for shard in node.digests
        }
        assert there == self.ready

    @invariant()
    def no_page_is_out_of_reach(self) -> None:
        present = self.ready | self._writing()
        for number, path, shard in present:
            if shard != WINDOW_SHARD and len(path) > 1:
                assert (number, path[:-1], shard) in present, f"{path} lost its head"

    @invariant()
    def checks_and_quotas_hold(self) -> None:
        self.table.check()
        for session in self.world.sessions.values():
            session.check()
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
            for node in list(space.nodes.values()):
                for shard in list(node.digests):
                    self.table.drop(node, shard, "test")
            assert not space.nodes
            assert not space.writing
        stats = self.world.slots.stats()
        assert stats.writing_bytes == stats.ready_bytes == stats.limbo_bytes == 0
        assert stats.pinned_bytes == 0
        assert all(not session.used_bytes for session in self.world.sessions.values())
        self.table.check()


TestPagesMachine = PagesMachine.TestCase
TestPagesMachine.settings = settings(max_examples=4 * settings().max_examples)
