"""Goal: that pages are written, carried and evicted as runs is seen by nobody.

Two page tables with a disk get the same requests. One keeps runs; of the other every node has one
page. What they answer and tell, and what they have in which tier, must be equal.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.protocol.errors import KVStoreError, PageCorrupt
from kvstore.state.disk.jobs import DiskJob, DiskRead, DiskSync, DiskWrite, Verdict
from kvstore.state.table.invariants import check
from kvstore.state.table.runs import leading_ready
from kvstore.state.tree import node as nodes
from kvstore.state.tree.actions import PageStatus, Removed, TierRemoved, TierStored
from kvstore.state.tree.node import PrefixNode
from tests.state.disk.disk_world import IO_ERROR, DiskWorld, flood
from tests.state.world import FULL, FULL_2, WINDOW, chain, key

T = TypeVar("T")

PATHS = st.one_of(
    st.text("ab", min_size=1, max_size=7),
    st.sampled_from(["aaaaaaaa", "aaaabbbb", "bbbbbbbb", "abababab"]),
)
RUN_PAGES_MAX = nodes.RUN_PAGES_MAX
Told = tuple[str, int, str, bytes]


def runs_of(world: DiskWorld) -> list[int]:
    """Pages of each node, in the order of their depths."""
    every = sorted(set(world.mine.index.values()), key=lambda node: node.depth)
    return [node.count for node in every]


def whole(world: DiskWorld, path: str) -> PrefixNode:
    """The run that ends with a page; no node is split for that."""
    return world.mine.index[key(path)]


def test_a_run_is_written_with_one_event_and_stays_one_node():
    world = DiskWorld()
    world.store(world.me, world.mine, "abcdef")
    world.table.actions.clear()
    assert world.disk.limits.writing.pages == 6, "pages, as ever"

    world.end_all()

    (told,) = world.table.actions
    assert isinstance(told, TierStored)
    assert told.keys == chain("abcdef")
    assert runs_of(world) == [6]
    places = [whole(world, "abcdef").place_at(0, at) for at in range(6)]
    assert sorted({at.offset for at in places}) == [at.offset for at in places], "one by one"
    assert world.disk.log.segments[1].pages.stretches[0].keys is whole(world, "abcdef").keys


def test_no_more_of_a_run_leaves_memory_than_is_needed_and_all_of_it_is_a_hit():
    world = DiskWorld(write="through", extents=2)
    world.store(world.me, world.mine, "abcdef")
    world.end_all()
    world.table.actions.clear()

    world.store(world.me, world.mine, "xyzu")

    (left,) = [one for one in world.table.actions if isinstance(one, TierRemoved)]
    assert left.keys == chain("abcdef")[4:]
    assert [whole(world, path).memory for path in ("abcd", "abcdef")] == [1, 0]
    assert world.lookup(world.mine, "abcdef") == (6, 0)


def test_a_run_that_is_written_in_part_makes_no_room_yet():
    """Whoever waits for some would else be tried again after each of its records."""
    world = DiskWorld()
    world.store(world.me, world.mine, "abc")

    assert [world.disk.completed(job.job, None) for job in world.jobs(DiskWrite)] == [
        False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("failed", range(4))
@pytest.mark.parametrize("split", range(4))
def test_of_a_run_that_could_not_be_written_whole_the_pages_before_the_failure_count(failed, split):
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abcd")
    durable = world.disk.make_durable([whole(world, "abcd")], 0)
    for number, job in enumerate(world.jobs(DiskWrite)):
        if number == split:  # the run is split while it is written
            world.lookup(world.mine, "abcd"[: split + 1])
        world.end_job(job, IO_ERROR if number == failed else None)

    assert world.on_disk("abcd") == [at < failed for at in range(4)]
    assert durable.error is IO_ERROR
    assert world.slots.stats().pinned_bytes == 0


def test_window_pages_behind_one_that_could_not_be_written_are_on_disk():
    world = DiskWorld(write="through")
    world.mine = world.space(world.me, [FULL, WINDOW])
    world.store(world.me, world.mine, "abcd", shard=1)
    for number, job in enumerate(world.jobs(DiskWrite)):
        world.end_job(job, IO_ERROR if number == 1 else None)

    on_disk = [bool(world.node(path).on_disk >> 1 & 1) for path in ("a", "ab", "abc", "abcd")]
    assert on_disk == [True, False, True, True]


def test_a_durable_run_is_acknowledged_only_after_a_sync_that_began_when_all_was_written():
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abc")
    durable = world.disk.make_durable([whole(world, "abc")], 0)
    first, *others = world.jobs(DiskWrite)

    world.end_job(first)
    assert world.jobs(DiskSync) == [], "a sync now would not cover it"
    for job in others:
        world.end_job(job)
    assert not durable.ended, "written is not synced"
    (sync,) = world.jobs(DiskSync)
    world.end_job(sync)

    assert durable.ended
    assert durable.error is None


def test_a_durable_run_of_which_a_page_left_before_the_sync_is_not_acknowledged_as_there():
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abc")
    durable = world.disk.make_durable([whole(world, "abc")], 0)
    for job in world.jobs(DiskWrite):
        world.end_job(job)

    world.table.residents.drop(world.node("abc"), 0, "operator")
    world.end_all()

    assert durable.ended
    assert durable.error is not None


def test_a_page_stored_again_while_its_first_record_is_written_gets_a_record_of_its_own():
    """The first one may be written from memory that is not this page's any more."""
    world = DiskWorld(write="through")
    world.store(world.me, world.mine, "abc")
    old = {job.slot for job in world.jobs(DiskWrite)}
    world.table.residents.drop(world.node("ab"), 0, "reclaimed")
    world.store(world.me, world.mine, "abc")
    new = [job for job in world.jobs(DiskWrite) if job.slot not in old]
    assert [job.page.key for job in new] == chain("abc")[1:]

    for job in [one for one in world.jobs(DiskWrite) if one.slot in old]:
        world.end_job(job)
    assert world.on_disk("abc") == [True, False, False], "those of the first time are nobody's"
    world.end_all()

    assert world.on_disk("abc") == [True, True, True]
    assert world.disk.log.stats().live_bytes == world.mine.disk_bytes


def test_what_a_run_is_written_from_that_is_not_its_page_takes_only_that_page_and_what_follows():
    world = DiskWorld(write="through")
    world.store(world.me, world.mine, "abcd")
    for number, job in enumerate(world.jobs(DiskWrite)):
        world.end_job(job, PageCorrupt("flipped") if number == 2 else None)

    assert world.lookup(world.mine, "abcd") == (2, 0)
    world.end_all()
    assert world.on_disk("ab") == [True, True]


def test_a_run_that_does_not_fit_the_rest_of_a_segment_is_written_in_two():
    world = DiskWorld(write="through", segment_bytes=120 << 10)
    path = "abcdefghij"
    world.store(world.me, world.mine, path)
    world.end_all()

    segments = {whole(world, path[: at + 1]).place_columns[0][:8] for at in range(len(path))}
    assert len(segments) == len(runs_of(world)) > 1
    assert world.on_disk(path) == [True] * len(path)
    assert world.disk.log.stats().live_bytes == world.mine.disk_bytes
    assert not any(segment.writing for segment in world.disk.log.segments.values())


def test_of_a_run_only_the_pages_that_are_admitted_are_written(monkeypatch):
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abcd")
    monkeypatch.setattr(world.disk.admission, "admit", lambda *_: 2)
    node = whole(world, "abcd")

    assert world.disk.before_eviction(node) is Verdict.EVICT, "of what is left of it"

    assert node.count == 2
    assert [job.page.key for job in world.jobs(DiskWrite)] == chain("ab")
    world.end_all()
    assert world.on_disk("abcd") == [True, True, False, False]


def test_a_run_that_is_carried_over_stays_one_node():
    world = DiskWorld(write="through", segments=6, segment_bytes=120 << 10)
    world.store(world.me, world.mine, "abc")
    world.end_all()
    assert world.table.residents.release_memory(whole(world, "abc"))
    before = whole(world, "abc").place_columns[0]
    while whole(world, "abc").place_columns[0] == before:
        world.lookup(world.mine, "abc")
        flood(world, 1)

    assert whole(world, "abc").count == 3
    assert world.table.counts["carried_pages"] == 3
    check(world.table)


def test_of_a_run_that_is_too_long_to_be_carried_over_the_first_pages_are():
    world = DiskWorld(write="through", extents=8, segments=6, segment_bytes=320 << 10)
    path = "".join(chr(0x3000 + at) for at in range(28))
    world.store(world.me, world.mine, path)
    world.end_all()
    assert world.table.residents.release_memory(whole(world, path))
    while not world.table.counts["carried_pages"]:
        world.lookup(world.mine, path)
        flood(world, 1)

    carried = world.table.counts["carried_pages"]
    assert 0 < carried < len(path)
    assert world.lookup(world.mine, path) == (carried, 0)
    assert whole(world, path[:carried]).count == carried
    assert whole(world, path[:carried]).on_disk


class Side(DiskWorld):
    """One of the two tables, with an engine."""

    def __init__(self, run_pages: int, write: str, in_flight_max: int) -> None:
        super().__init__(write, extents=4, segments=64, in_flight_max=in_flight_max)
        self.run_pages = run_pages
        self.mine = self.space(self.me, [FULL, FULL_2])
        self.disk.advance(1)

    def settle(self, fails: str, kind: type[DiskWrite | DiskRead] = DiskWrite) -> None:
        """End all jobs, one after the other; those of pages whose paths end so fail."""
        failing = {key(path + fails) for path in _paths(5)} if fails else set()
        while self.disk.unfinished or self.jobs(DiskJob):
            for job in self.jobs(DiskJob):
                bad = isinstance(job, kind) and job.page.key in failing
                del self.open[job.job]
                self.disk.completed(job.job, IO_ERROR if bad else None)
            self.disk.go_on()


def _paths(most: int) -> Iterator[str]:
    """All paths of up to so many letters."""
    found = [""]
    for path in found:
        yield path
        if len(path) < most:
            found += [path + "a", path + "b"]


def told(side: Side) -> list[Told]:
    """What came to a tier and what left it, page by page."""
    actions, side.table.actions[:] = list(side.table.actions), []
    found: list[Told] = []
    for one in actions:
        if isinstance(one, TierStored | TierRemoved):
            found += [(type(one).__name__, one.shard, one.tier, name) for name in one.keys]
        elif isinstance(one, Removed):
            found += [("Removed", one.shard, one.cause, name) for name in one.keys]
    return sorted(found)


def known(side: Side) -> dict[bytes, tuple[int, ...]]:
    """Every page and where it is; no node is split for that."""
    return {
        name: (node.present, node.ready, node.memory, node.on_disk, node.first_depth + at)
        for node in set(side.mine.index.values())
        for at, name in enumerate(node.key_list())
    }


class BothDisks(RuleBasedStateMachine):
    """Requests to both, and all that the disk does then."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.now_ns = 1
        self.leases: list[int] = []

    @initialize(write=st.sampled_from(("through", "back", "selective")))
    def start(self, write: str) -> None:
        self.sides = [Side(RUN_PAGES_MAX, write, 1 << 30), Side(1, write, 1 << 30)]

    def both(self, do: Callable[[Side], T]) -> T:
        """Do it to both; what came of it, which is the same."""
        found: list[T | str] = []
        for side in self.sides:
            nodes.RUN_PAGES_MAX = side.run_pages
            try:
                found.append(do(side))
            except KVStoreError as error:
                found.append(type(error).__name__)
            finally:
                nodes.RUN_PAGES_MAX = RUN_PAGES_MAX
        assert found[0] == found[1]
        return found[0]

    @rule(path=PATHS, shard=st.integers(0, 1), fails=st.sampled_from(("", "", "", "a", "b")))
    def store(self, path: str, shard: int, fails: str) -> None:
        def store(side: Side) -> list[PageStatus]:
            for _ in range(len(path) + 2):
                statuses = side.store(side.me, side.mine, path, shard=shard)
                side.settle(fails)
                if PageStatus.NO_ROOM not in statuses:
                    break
            return statuses

        self.both(store)

    @rule(path=PATHS)
    def lookup(self, path: str) -> None:
        self.both(lambda side: side.lookup(side.mine, path, [0, 1]))

    @rule(path=PATHS, shard=st.integers(0, 1))
    def acquire(self, path: str, shard: int) -> None:
        self.number += 1
        number, packed = self.number, b"".join(chain(path))

        def lease(side: Side) -> int:
            until_ns = 1 << 60
            leased = side.table.acquire(side.me, number, side.mine, shard, packed, until_ns)
            pages = len(leased.lease.slots)
            side.settle("")
            return pages

        if self.both(lease):
            self.leases.append(number)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            number = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.both(lambda side: side.table.release(side.me, number))

    @rule(path=PATHS, shard=st.integers(0, 1), fails=st.sampled_from(("", "", "b", "ab", "ba")))
    def load(self, path: str, shard: int, fails: str) -> None:
        def load(side: Side) -> int:
            run = leading_ready(side.mine, b"".join(chain(path)), shard)
            if not run:
                return 0
            keys = b"".join([node.keys for node in run])
            size = len(keys) // 32 * side.mine.shards[shard].slot_bytes
            fetch = side.table.begin_fetch(side.me, size)
            side.table.room.fetch(fetch, side.mine, shard, keys)
            side.settle(fails, DiskRead)
            assert fetch in side.table.fetches.ended
            side.table.end_fetch(side.me, fetch)
            return len(keys)

        self.both(load)

    @rule(path=PATHS, shard=st.integers(0, 1))
    def persist(self, path: str, shard: int) -> None:
        def persist(side: Side) -> bool | None:
            run = side.table.residents.ready_run(side.mine, shard, b"".join(chain(path)))
            if not run:
                return None
            durable = side.disk.make_durable(run, shard)
            side.settle("")
            return durable.ended and durable.error is None

        self.both(persist)

    @rule(path=PATHS, shard=st.integers(0, 1), cause=st.sampled_from(("operator", "reclaimed")))
    def drop(self, path: str, shard: int, cause: str) -> None:
        def drop(side: Side) -> None:
            node = side.mine.nodes.get(key(path))
            if node is not None:
                side.table.residents.drop(node, shard, cause)
            side.settle("")

        self.both(drop)

    @rule(path=PATHS, shard=st.integers(0, 1))
    def forget(self, path: str, shard: int) -> None:
        """A page leaves the disk with what follows it, as when its segment is reclaimed."""

        def lose(side: Side) -> None:
            node = side.mine.nodes.get(key(path))
            if node is not None and node.on_disk >> shard & 1:
                side.lose(node, shard)

        self.both(lose)

    @rule(ns=st.sampled_from([1, 10_000]))
    def pass_time(self, ns: int) -> None:
        self.now_ns += ns

        def advance(side: Side) -> None:
            side.disk.advance(self.now_ns)
            side.settle("")

        self.both(advance)

    @invariant()
    def are_equal(self) -> None:
        if not hasattr(self, "sides"):
            return
        runs, single = self.sides
        assert known(runs) == known(single)
        assert told(runs) == told(single)
        assert runs.slots.stats() == single.slots.stats()
        ours, theirs = runs.disk.log.stats(), single.disk.log.stats()
        assert ours.live_bytes == theirs.live_bytes
        assert all(node.count == 1 for node in single.mine.index.values())
        for side in self.sides:
            check(side.table)


BothDisks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBothDisks = BothDisks.TestCase


def test_a_prompt_that_must_give_room_itself_is_split_only_behind_the_pages_that_go():
    world = DiskWorld(write="back", in_flight_max=1)
    path = "a" * 12
    world.store(world.me, world.mine, path)
    world.store(world.me, world.mine, "z")

    assert PageStatus.NO_ROOM in world.store(world.me, world.mine, path + "b" * 8, start=12)
    assert [job.page.key for job in world.jobs(DiskWrite)] == chain("z"), "no more may be written"
    assert whole(world, path).count == 12
    world.store(world.me, world.mine, path + "c" * 8, start=12)
    assert len(world.jobs(DiskWrite)) == 1
    assert whole(world, path).count == 12
    while world.jobs(DiskWrite):
        world.end_all()
        world.store(world.me, world.mine, path + "d" * 8, start=12)

    runs = [whole(world, path[: at + 1]) for at in range(12)]
    gone = runs[0].count
    assert 0 < gone < 12
    assert [run.memory for run in runs] == [0] * gone + [1] * (12 - gone), "its first pages went"
    assert len({id(run) for run in runs}) == 2
    check(world.table)


@pytest.mark.parametrize("memory", [0, 1, 3, 7, 8])
def test_a_hit_says_how_many_of_its_pages_are_not_in_memory(memory):
    """Of each part of a prompt, of which the first pages are in memory."""
    world, path = DiskWorld(), "abcdefgh"
    world.store(world.me, world.mine, path)
    world.end_all()
    if memory < len(path):
        world.table.residents.evict(whole(world, path), len(path) - memory)

    assert world.table.residents.on_disk(world.mine, [0], chain("x")[0], 0) == 0
    for first in range(len(path)):
        for pages in range(1, len(path) - first + 1):
            keys = b"".join(chain(path[: first + pages], first))
            found = world.table.residents.on_disk(world.mine, [0], keys, pages)
            assert found == max(0, first + pages - max(first, memory)), (first, pages)
