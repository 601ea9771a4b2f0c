"""Goal: what a long prompt asks of the disk begins in turns, and nobody waits for all of it."""

from typing import Any

import pytest

from kvstore.protocol.counts import NO_RECORDS
from kvstore.state.disk.jobs import DiskJob, DiskRead, DiskSync, DiskWrite
from kvstore.state.disk.loads import LOADS_TURN
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import BACKLOG_TURN, EVICTED_TURN
from kvstore.state.disk.syncs import DURABLES_PAGES, DURABLES_STEP
from kvstore.state.disk.writes import Writes
from kvstore.state.table.choosing import SPILL_WRITES
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import RUN_PAGES_MAX, PrefixNode
from tests.state.disk.disk_world import DiskWorld
from tests.state.disk.test_disk_limits import RECORD
from tests.state.world import chain


def long_prompt_on_disk() -> tuple[DiskWorld, list[PrefixNode]]:
    """A prompt whose loads take three turns, on disk only."""
    path = "a" * (2 * LOADS_TURN + 10)
    world = DiskWorld(write="through", extents=40)
    world.store(world.me, world.mine, path)
    while world.disk.unfinished or world.jobs(DiskJob):
        world.end_all()
        world.disk.go_on()
    run = world.table.residents.ready_run(world.mine, 0, b"".join(chain(path)))
    assert len(run) == len(path)
    for node in reversed(run):
        assert world.table.residents.release_memory(node)
    return world, run


def test_the_writes_of_a_long_prompt_begin_in_turns():
    world = DiskWorld(write="through", extents=40)

    world.store(world.me, world.mine, "a" * (BACKLOG_TURN + 10))

    assert len(world.jobs(DiskWrite)) == BACKLOG_TURN
    assert world.table.residents.unfinished
    world.disk.go_on()
    assert len(world.jobs(DiskWrite)) == BACKLOG_TURN + 10
    assert not world.table.residents.unfinished


@pytest.mark.parametrize("in_flight_max", [1 << 30, 10 * RECORD])
def test_the_writes_before_a_used_page_begin_in_turns(in_flight_max):
    world = DiskWorld("selective", extents=140, segments=40, in_flight_max=in_flight_max)
    path = "a" * (4 * RUN_PAGES_MAX + 10)
    for end in range(RUN_PAGES_MAX, len(path) + RUN_PAGES_MAX, RUN_PAGES_MAX):
        start = end - RUN_PAGES_MAX
        world.store(world.me, world.mine, path[:end], start=start)
    assert not world.jobs(DiskWrite)
    at_once = min(BACKLOG_TURN, in_flight_max // RECORD) + RUN_PAGES_MAX

    world.acquire(world.me, world.mine, path)

    assert 0 < len(world.jobs(DiskWrite)) <= at_once
    turns = 0
    while not all(world.on_disk(path)):
        assert world.jobs(DiskJob) or world.disk.unfinished, "nothing would write the rest"
        for job in world.jobs(DiskWrite) if turns % 2 else ():
            del world.open[job.job]
            world.table.residents.disk.completed(job.job, None)
        before = len(world.jobs(DiskWrite))
        world.table.tiers.go_on()
        assert len(world.jobs(DiskWrite)) - before <= at_once
        check(world.table)
        turns += 1
        assert turns < 100
    assert world.table.residents.disk.stats(NO_RECORDS).backlog_pages == 0


def store_page_by_page(world: DiskWorld, path: str) -> None:
    """Store a prompt that grows, so that each page is a node."""
    for end in range(1, len(path) + 1):
        world.store(world.me, world.mine, path[:end], start=end - 1)
        assert world.node(path[:end]).count == 1


def looks(monkeypatch: pytest.MonkeyPatch) -> list[PrefixNode]:
    """Gets each node of which it is asked whether it may be written."""
    looked, is_dirty = list[PrefixNode](), Writes.is_dirty

    def counted(writes: Writes, node: PrefixNode, shard: int) -> bool:
        looked.append(node)
        return is_dirty(writes, node, shard)

    monkeypatch.setattr(Writes, "is_dirty", counted)
    return looked


def test_a_used_prompt_of_many_nodes_is_walked_a_few_times(monkeypatch):
    world = DiskWorld("selective", extents=200, segments=40)
    path = "a" * 700
    store_page_by_page(world, path)
    looked = looks(monkeypatch)
    world.acquire(world.me, world.mine, path)
    while world.disk.unfinished:
        world.disk.go_on()

    assert len(world.jobs(DiskWrite)) == len(path)
    assert len(looked) < 5 * len(path)


def test_a_used_prompt_that_the_disk_has_no_room_for_is_given_up_as_a_whole(monkeypatch):
    world = DiskWorld("selective", extents=200, segments=2)
    path = "a" * 700
    store_page_by_page(world, path)
    looked = looks(monkeypatch)
    world.acquire(world.me, world.mine, path)
    for _ in range(20):
        world.disk.go_on()
        world.end_all()

    assert 0 < sum(world.on_disk(path)) < len(path)
    assert world.disk.stats(NO_RECORDS).backlog_pages == 0
    assert len(looked) < 6 * len(path)


def test_the_loads_of_a_long_prompt_begin_in_turns_and_end_as_one():
    world, run = long_prompt_on_disk()

    fetch = world.fetch(run, 0)
    assert len(world.jobs(DiskRead)) == LOADS_TURN
    assert world.table.residents.unfinished
    world.end_all()
    assert world.table.fetches.ended == [], "some of its loads have not begun"
    world.table.room.load_more()
    assert len(world.jobs(DiskRead)) == LOADS_TURN
    world.table.room.load_more()
    assert not world.table.residents.unfinished
    world.end_all()

    assert world.table.fetches.ended == [fetch]
    assert all(0 in node.slots for node in run)


def test_a_fetch_that_is_given_up_begins_no_more_loads():
    world, run = long_prompt_on_disk()
    fetch = world.fetch(run, 0)

    world.table.end_fetch(world.me, fetch)
    world.table.room.load_more()

    assert len(world.jobs(DiskRead)) == LOADS_TURN
    assert not world.table.residents.unfinished
    world.end_all()
    assert world.table.fetches.ended == []


def test_room_for_one_page_of_a_long_prompt_begins_few_writes():
    path = "a" * (4 * SPILL_WRITES)
    world = DiskWorld(write="back", extents=SPILL_WRITES)
    assert world.store(world.me, world.mine, path) == [PageStatus.GRANTED] * len(path)

    assert world.store(world.me, world.mine, path + "b")[-1] == PageStatus.NO_ROOM
    assert 0 < len(world.jobs(DiskWrite)) <= SPILL_WRITES

    world.end_all()
    assert world.store(world.me, world.mine, path + "b")[-1] == PageStatus.GRANTED


@pytest.mark.parametrize("in_memory", [True, False])
def test_of_a_prompt_as_many_pages_are_chosen_at_once_as_must_go(*, in_memory):
    """None has left when the next is chosen: the page before it counts as a leaf then."""
    world = DiskWorld()
    world.store(world.me, world.mine, "abcd")
    world.end_all()
    nodes = list(world.mine.nodes.values())
    for node in () if in_memory else nodes[::-1]:
        assert world.table.residents.release_memory(node)
    world.disk.limit(world.mine, world.mine.shards[0].record_bytes, 0)
    for node in nodes:
        world.table.residents.add_candidate(node)

    assert world.table.tiers.shrink(world.mine, 64)
    check(world.table)

    assert [0 in node.disk for node in nodes] == [True, False, False, False]
    assert world.table.counts["disk_quota_pages"] == 3
    assert world.lookup(world.mine, "abcd")[0] == (4 if in_memory else 1)


def test_a_full_node_begins_few_writes_for_one_put_and_more_in_the_next_turn():
    world = DiskWorld(write="back", extents=EVICTED_TURN // 2)
    for at in range(EVICTED_TURN // 2):
        world.store(world.me, world.mine, chr(0x1000 + at) * 4)
    new = "b" * (EVICTED_TURN + 100)

    statuses = world.store(world.me, world.mine, new)

    assert statuses[0] == PageStatus.NO_ROOM
    assert len(world.jobs(DiskWrite)) == EVICTED_TURN
    world.store(world.me, world.mine, new)
    assert len(world.jobs(DiskWrite)) == EVICTED_TURN, "that is the same turn"
    world.disk.go_on()
    world.store(world.me, world.mine, new)
    assert len(world.jobs(DiskWrite)) == 2 * EVICTED_TURN


def full_of_a_long_prompt(in_flight_max: int = 1 << 30) -> tuple[DiskWorld, str]:
    """Memory is full of a prompt of which nothing is on disk, and of one other page."""
    world = DiskWorld("back", extents=EVICTED_TURN, segments=40, in_flight_max=in_flight_max)
    path = "a" * (4 * EVICTED_TURN - 1)
    assert world.store(world.me, world.mine, path)[-1] == PageStatus.GRANTED
    assert world.store(world.me, world.mine, "z") == [PageStatus.GRANTED]
    return world, path


def test_a_victim_behind_many_unwritten_pages_begins_few_writes_in_a_turn():
    world, path = full_of_a_long_prompt()

    statuses = world.store(world.me, world.mine, "b" * 200)

    assert statuses[0] == PageStatus.NO_ROOM
    assert 0 < len(world.jobs(DiskWrite)) <= EVICTED_TURN + RUN_PAGES_MAX
    check(world.table)
    turns = 0
    while world.store(world.me, world.mine, "b") != [PageStatus.GRANTED]:
        assert world.table.residents.unfinished or world.disk.busy, "nothing would end the wait"
        before = len(world.jobs(DiskWrite))
        world.disk.go_on()
        world.table.residents.offer_more(64)
        assert len(world.jobs(DiskWrite)) - before <= EVICTED_TURN + RUN_PAGES_MAX
        for job in world.jobs(DiskJob) if turns % 2 else ():
            del world.open[job.job]
            world.table.tiers.completed(job.job, None)
        check(world.table)
        turns += 1
        assert turns < 100
    assert world.on_disk(path) == [True] * len(path)


def test_a_victim_behind_many_unwritten_pages_stays_within_the_bytes_in_flight():
    world, _ = full_of_a_long_prompt(in_flight_max=10 * RECORD)

    world.store(world.me, world.mine, "b")

    assert 0 < len(world.jobs(DiskWrite)) <= 10 + RUN_PAGES_MAX


def test_while_pages_before_a_victim_are_written_another_one_goes():
    world, path = full_of_a_long_prompt()
    world.persist("z")
    world.end_all()

    assert world.store(world.me, world.mine, "b") == [PageStatus.GRANTED]

    assert not world.node("z").memory
    assert world.lookup(world.mine, path) == (len(path), 0)
    assert world.table.residents.offer_more(64) == 1
    check(world.table)


def test_a_put_to_a_full_disk_looks_once_for_a_place(monkeypatch):
    """To look for one is to walk what is not on disk of a prompt, which may be all of it."""
    world, last = DiskWorld(write="back", extents=8, segments=4), ""
    statuses = [PageStatus.GRANTED]
    while statuses == [PageStatus.GRANTED] or world.jobs(DiskWrite):
        for job in world.jobs(DiskWrite):
            world.end_job(job)
        path = chr(next(world.letters))
        statuses = world.store(world.me, world.mine, path)
        last = path if statuses == [PageStatus.GRANTED] else last
    world.disk.go_on()
    placed: list[Any] = []
    place = SegmentLog.place

    def counted(log: SegmentLog, *arguments: Any, **more: Any) -> Any:
        placed.append(place(log, *arguments, **more))
        return placed[-1]

    monkeypatch.setattr(SegmentLog, "place", counted)
    for messages in (1, 2):  # each for a victim, and for the page that the new ones continue
        assert world.store(world.me, world.mine, last + "xy", start=1)[0] == PageStatus.NO_ROOM
        assert world.disk.busy, "it waits rather than be refused"
        assert placed == [None] * messages
    for now_ns in range(1, 12):  # a segment of single pages is looked at in several turns
        world.end_all()
        world.disk.advance(now_ns)
    world.end_all()

    assert world.store(world.me, world.mine, last + "xy", start=1)[0] == PageStatus.NO_ROOM
    assert placed[-1] is not None
    assert world.jobs(DiskWrite)


def test_durable_puts_that_one_sync_ends_are_acknowledged_in_turns():
    world = DiskWorld(extents=20)
    paths = [chr(0x1000 + at) for at in range(5 * DURABLES_STEP)]
    for path in paths:
        world.store(world.me, world.mine, path)
    durables = [world.persist(path) for path in paths]
    for job in world.jobs(DiskWrite):
        world.end_job(job)
    (first,) = world.jobs(DiskSync)
    world.end_job(first)
    assert [one.ended for one in durables] == [True] + [False] * (len(paths) - 1)
    (second,) = world.jobs(DiskSync)

    world.end_job(second)

    assert sum(one.ended for one in durables) <= 1 + 3 * DURABLES_STEP < len(paths)
    assert world.disk.unfinished
    assert not world.disk.settled
    for _ in range(5):
        world.disk.go_on()
    assert world.disk.acknowledged == durables
    assert not world.disk.unfinished


def test_durable_puts_of_many_pages_are_acknowledged_in_turns_by_their_pages():
    world = DiskWorld(extents=400, segments=40)
    paths = [chr(0x1000 + at) * 150 for at in range(10)]
    for path in paths:
        world.store(world.me, world.mine, path)
    durables = [world.persist(path) for path in paths]
    ended = most = 0
    while ended < len(paths):
        assert world.jobs(DiskJob) or world.disk.unfinished
        for job in world.jobs(DiskJob) or [None]:
            if job is None:
                world.disk.go_on()
            else:
                del world.open[job.job]
                world.table.tiers.completed(job.job, None)
            before, ended = ended, sum(one.ended for one in durables)
            most = max(most, 150 * (ended - before))
    assert most <= 2 * (DURABLES_PAGES + 150), "two steps"

    assert world.disk.acknowledged == durables
