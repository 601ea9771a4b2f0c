"""Goal: a record that is given up takes along what is on disk below it, in turns, its own last."""

from random import Random

import pytest

from kvstore.protocol.errors import CapacityError, PageCorrupt
from kvstore.state.disk.jobs import DiskCheck, DiskDrop, DiskJob, DiskSync, DiskWrite
from kvstore.state.table import residents
from kvstore.state.table.invariants import check
from kvstore.state.table.residents import DROP_AT_ONCE
from kvstore.state.table.runs import leading_ready
from kvstore.state.tree.actions import PageStatus, Removed, TierRemoved
from kvstore.state.tree.node import PrefixNode, is_live
from tests.state.disk.disk_world import DiskWorld
from tests.state.disk.test_disk_limits import LimitedWorld
from tests.state.world import FULL, FULL_2, chain, key

HEAD = "head"
BRANCHES = [HEAD + one + "xyz" for one in "0123456789"]


def write_all(world: DiskWorld) -> None:
    """Let everything that waits be written."""
    while world.disk.unfinished or world.jobs(DiskJob):
        world.end_all()
        world.disk.go_on()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> DiskWorld:
    """A head with ten branches, all in memory and on disk, of which two pages leave at once."""
    monkeypatch.setattr(residents, "DROP_AT_ONCE", 2)
    made = DiskWorld(extents=16)
    made.store(made.me, made.mine, HEAD)
    for path in BRANCHES:
        made.store(made.me, made.mine, path, start=len(HEAD))
    write_all(made)
    return made


def records(world: DiskWorld) -> int:
    """How many pages of the space are on disk."""
    return sum(0 in node.disk for node in world.mine.nodes.values())


def evict(world: DiskWorld, path: str) -> None:
    """Leave the pages of a branch on disk only."""
    for end in range(len(path), len(HEAD), -1):
        assert world.table.residents.release_memory(world.node(path[:end]))


def sweep(world: DiskWorld, steps: int) -> None:
    world.table.residents.drop_orphans(steps)
    check(world.table)


def test_records_below_one_that_is_given_up_leave_in_turns_and_its_own_leaves_last():
    world = DiskWorld(extents=80)
    world.store(world.me, world.mine, HEAD)
    for at in range(2 * DROP_AT_ONCE):
        world.store(world.me, world.mine, HEAD + chr(0x4E00 + at), start=len(HEAD))
    write_all(world)
    before = records(world)

    world.lose(world.node(HEAD), 0)

    assert before - records(world) <= DROP_AT_ONCE
    left = [records(world)]
    while world.table.residents.unfinished:
        assert world.on_disk(HEAD) == [True] * 4, "what is below it could not be reached"
        sweep(world, 64)
        left.append(records(world))
        assert left[-2] - left[-1] <= 64
    assert world.on_disk(HEAD) == [True] * 3 + [False]
    assert left[-1] == 3
    assert world.in_memory(HEAD) == [True] * 4
    assert not world.mine.departing


def test_what_is_only_on_disk_is_dropped_tails_first_and_what_is_in_memory_too_stays(
    world: DiskWorld,
):
    evict(world, BRANCHES[3])
    world.table.actions.clear()

    world.lose(world.node(HEAD), 0)
    check(world.table)
    while world.table.residents.orphans:
        sweep(world, 3)

    gone = [one for one in world.table.actions if isinstance(one, Removed)]
    assert [name for one in gone for name in one.keys] == chain(BRANCHES[3], len(HEAD))[::-1]
    assert {one.cause for one in gone} == {"reclaimed"}
    kept = [one for one in world.table.actions if isinstance(one, TierRemoved)]
    assert sum(len(one.keys) for one in kept) == 9 * 4 + 1
    assert kept[-1].keys == [key(HEAD)]
    assert world.lookup(world.mine, BRANCHES[0]) == (8, 0)
    assert world.lookup(world.mine, BRANCHES[3]) == (4, 0)


def test_nothing_is_written_below_a_record_that_is_about_to_leave(world: DiskWorld):
    world.lose(world.node(HEAD), 0)
    sweep(world, 5)

    with pytest.raises(CapacityError):
        world.persist(BRANCHES[0])
    with pytest.raises(CapacityError):
        world.disk.ensure_written(world.node(HEAD), 0)
    assert world.disk.ensure_all_written([world.node(HEAD)]) == 0
    world.store(world.me, world.mine, HEAD + "new", start=len(HEAD))
    assert not world.jobs(DiskWrite)

    sweep(world, 1000)
    durable = world.persist(HEAD + "new")
    write_all(world)
    assert durable.ended
    assert durable.error is None
    assert world.on_disk(HEAD + "new") == [True] * 7


def test_a_durable_put_whose_record_is_found_corrupt_before_its_sync_is_not_acknowledged(
    world: DiskWorld,
):
    durable = world.persist(HEAD)
    (sync,) = world.jobs(DiskSync)
    world.lose(world.node(HEAD), 0)

    world.end_job(sync)

    assert durable.ended
    assert isinstance(durable.error, CapacityError)


def test_a_write_that_was_under_way_below_it_leaves_too(world: DiskWorld):
    world.store(world.me, world.mine, BRANCHES[0] + "new", start=len(BRANCHES[0]))
    assert len(world.jobs(DiskWrite)) == 3

    world.lose(world.node(HEAD), 0)
    sweep(world, 7)
    world.end_all()
    sweep(world, 1000)

    assert records(world) == 3
    assert world.lookup(world.mine, BRANCHES[0] + "new") == (11, 0)


def test_a_corrupt_record_with_much_below_it_leaves_in_turns_and_its_page_stays_in_memory(
    world: DiskWorld,
):
    world.disk.check([(world.node(HEAD), 0)])
    (job,) = world.jobs(DiskCheck)

    world.end_job(job, PageCorrupt("its digest differs"))

    assert records(world) == 4 + 40
    sweep(world, 1000)
    assert records(world) == 3
    assert world.in_memory(HEAD) == [True] * 4


def test_a_page_that_is_evicted_before_its_record_leaves_is_dropped(world: DiskWorld):
    for path in BRANCHES:
        evict(world, path)
    world.lose(world.node(HEAD), 0)
    assert world.table.residents.release_memory(world.node(HEAD))

    sweep(world, 1000)

    assert key(HEAD) not in world.mine.nodes
    assert records(world) == 3


def test_a_page_that_is_dropped_before_its_record_leaves_is_forgotten(world: DiskWorld):
    head = world.node(HEAD)
    world.lose(head, 0)

    world.table.residents.drop(head, 0, "operator")
    sweep(world, 1000)

    assert not is_live(head)
    assert not world.mine.departing
    assert not world.table.residents.unfinished
    assert world.store(world.me, world.mine, HEAD) == [PageStatus.EXISTS] * 3 + [PageStatus.GRANTED]


def test_a_segment_is_deleted_only_after_records_in_it_that_leave_in_turns(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(residents, "DROP_AT_ONCE", 0)
    world = LimitedWorld(segments=6)
    world.put("a")
    first = world.node("a").place(0).segment
    while world.node("a").place(0).segment == (last := max(world.disk.log.segments)):
        world.put(chr(next(world.letters)))
    world.store(world.me, world.mine, "ab", start=1)
    world.end_all()
    assert world.node("ab").place(0).segment == last != first
    while not world.mine.departing:
        world.put(chr(next(world.letters)))
    for now_ns in range(1000, 5000, 1000):
        world.disk.advance(now_ns)
        world.end_all()
    assert not world.jobs(DiskDrop)
    assert first in world.disk.log.segments

    sweep(world, 1000)
    world.end_all()

    assert first not in world.disk.log.segments


@pytest.mark.parametrize("seed", range(12))
def test_what_is_on_disk_can_be_reached_at_every_moment(seed: int, monkeypatch: pytest.MonkeyPatch):
    chance = Random(seed)
    monkeypatch.setattr(residents, "DROP_AT_ONCE", chance.choice([0, 1]))
    world = DiskWorld(extents=8, segments=30)
    departed = 0
    for _ in range(160):
        path = "".join(chance.choice("ab") for _ in range(chance.randrange(1, 10)))
        nodes = [node for node in world.mine.nodes.values() if node.ready & 1]
        match chance.choice(
            ["put", "put", "end", "end", "evict", "lose", "drop", "sweep", "go on"]
        ):
            case "put":
                world.store(world.me, world.mine, path)
            case "end":
                for job in chance.sample(jobs := world.jobs(DiskJob), len(jobs) * 3 // 4):
                    world.end_job(job)
            case "evict" if nodes:
                world.table.residents.release_memory(chance.choice(nodes))
            case "lose" if heads := [
                node
                for node in nodes
                if node.on_disk and any(one.on_disk for one in node.below.values())
            ]:
                world.lose(chance.choice(heads), 0)
                departed += bool(world.mine.departing)
            case "drop" if nodes:
                deep = max(chance.choices(nodes, k=4), key=lambda node: node.depth)
                world.table.residents.drop(deep, 0, "corrupt")
            case "sweep":
                world.table.residents.drop_orphans(chance.randrange(1, 6))
            case _:
                world.disk.go_on()
        check(world.table)
    world.table.residents.drop_orphans(10_000)
    write_all(world)
    check(world.table)
    assert departed > 0
    assert not world.mine.departing
    assert not world.mine.holes


TAIL = "0123456789"


def a_run_with_a_tail(world: DiskWorld) -> PrefixNode:
    """Two pages in memory; behind them a run of four, only on disk; behind it ten in memory."""
    world.store(world.me, world.mine, "ab")
    world.store(world.me, world.mine, "ab" + HEAD, start=2)
    run = leading_ready(world.mine, b"".join(chain("ab" + HEAD)), 0)
    world.table.tiers.make_durable(run, 0)
    world.end_all()
    assert world.table.residents.release_memory(run[-1])
    world.store(world.me, world.mine, "ab" + HEAD + TAIL, start=6)
    check(world.table)
    assert run[-1].count == 4
    return run[-1]


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> DiskWorld:
    """A node that writes to disk what leaves memory, and drops two pages at once."""
    monkeypatch.setattr(residents, "DROP_AT_ONCE", 2)
    return DiskWorld(write="back", extents=8)


def test_a_run_that_leaves_before_its_tail_is_missed_from_its_first_page_on(back: DiskWorld):
    run = a_run_with_a_tail(back)
    assert back.lookup(back.mine, "ab" + HEAD + TAIL) == (16, 0)

    back.lose(run, 0)

    while back.table.residents.orphans:
        check(back.table)
        assert back.lookup(back.mine, "ab" + HEAD + TAIL) == (2, 0)
        back.table.residents.drop_orphans(3)
    assert back.lookup(back.mine, "ab" + HEAD + TAIL) == (2, 0)
    assert not back.mine.holes
    assert (
        back.removed("reclaimed")
        == chain("ab" + HEAD, 2)[::-1] + chain("ab" + HEAD + TAIL, 6)[::-1]
    )


def test_no_page_of_a_run_that_left_is_put_until_its_tail_has_left(back: DiskWorld):
    run = a_run_with_a_tail(back)
    back.lose(run, 0)

    for start in range(2, 6):
        refusal = PageStatus.NO_ROOM if start == 2 else PageStatus.NO_PARENT
        put = back.store(back.me, back.mine, "ab" + HEAD, start=start)
        assert put == [refusal] * (6 - start)
    back.mine.listed(0)  # this splits what is left of the run
    check(back.table)
    assert back.lookup(back.mine, "ab" + HEAD + TAIL) == (2, 0)
    back.table.residents.drop_orphans(1000)
    check(back.table)

    assert back.store(back.me, back.mine, "ab" + HEAD, start=2) == [PageStatus.GRANTED] * 4
    assert back.lookup(back.mine, "ab" + HEAD + TAIL) == (6, 0)


def test_a_run_that_left_keeps_the_pages_of_another_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(residents, "DROP_AT_ONCE", 2)
    world = DiskWorld(write="back", extents=16)
    space = world.mine = world.space(world.me, [FULL, FULL_2])
    a_run_with_a_tail(world)
    world.store(world.me, space, "ab" + HEAD + TAIL, shard=1)
    run = space.index[key("ab" + HEAD)]

    world.lose(run, 0)
    world.table.residents.drop_orphans(1000)
    check(world.table)

    assert world.lookup(space, "ab" + HEAD + TAIL, [1]) == (16, 0)
    assert world.lookup(space, "ab" + HEAD + TAIL, [0]) == (2, 0)
    assert world.store(world.me, space, "ab" + HEAD, start=2) == [PageStatus.GRANTED] * 4
