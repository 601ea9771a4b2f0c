"""Goal: a page that is read again on disk is whole, or is a miss; loads do not wait for that."""

import pytest

from kvstore.protocol.errors import PageCorrupt
from kvstore.state.ask.explain import Explainer
from kvstore.state.disk.checks import CHECKS_MAX, CheckRun
from kvstore.state.disk.jobs import DiskCheck, DiskDrop, DiskJob, DiskRead
from tests.state.disk.disk_world import IO_ERROR, DiskWorld, flood
from tests.state.world import chain, ended, key

FLIPPED = PageCorrupt("flipped")


@pytest.fixture
def world() -> DiskWorld:
    """The pages a, ab, abc are on disk only."""
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abc")
    flood(world)
    world.removed()
    return world


def check(world: DiskWorld, *paths: str) -> CheckRun:
    return world.disk.check([(world.node(path), 0) for path in paths])


def check_of(world: DiskWorld, path: str) -> DiskCheck:
    return next(job for job in world.jobs(DiskCheck) if job.page.key == key(path))


def test_a_whole_page_stays_and_is_counted(world):
    run = check(world, "a", "ab", "abc")
    world.end_all()

    assert run.finished
    assert (run.checked, run.corrupt, run.unreadable, run.skipped) == (3, 0, 0, 0)
    assert world.lookup(world.mine, "abc") == (3, 0)


def test_a_page_that_is_not_what_was_written_leaves_with_what_follows_it(world):
    world.table.moment.now_ns = 1
    run = check(world, "a", "ab", "abc")
    world.end_job(check_of(world, "ab"), FLIPPED)
    world.end_all()

    assert (run.checked, run.corrupt, run.skipped) == (2, 1, 1)
    assert world.removed("corrupt") == [key("abc"), key("ab")]
    assert world.lookup(world.mine, "abc") == (1, 0)
    explainer = Explainer(world.table, 1)
    assert ended(explainer.steps(key("ab"), world.mine)).verdict == "quarantined"
    assert world.table.counts["disk_corrupt_records"] == 1


def test_a_bad_record_of_a_page_that_is_in_memory_costs_no_hit(world):
    world = DiskWorld()
    world.store(world.me, world.mine, "abc")
    world.end_all()
    run = check(world, "ab")
    world.end_job(check_of(world, "ab"), FLIPPED)

    assert run.corrupt == 1
    assert world.on_disk("abc") == [True, False, False], "what follows it is not reached from disk"
    assert world.lookup(world.mine, "abc") == (3, 0)
    world.disk.make_durable([world.node("ab")], 0)
    world.end_all()
    assert world.on_disk("ab") == [True, True], "and it can be written again"


def test_what_cannot_be_read_now_is_counted_and_left_to_the_next_load(world):
    run = check(world, "ab")
    world.end_job(check_of(world, "ab"), IO_ERROR)

    assert (run.checked, run.unreadable) == (0, 1)
    assert world.lookup(world.mine, "abc") == (3, 0)


def test_a_page_that_left_before_its_turn_or_while_it_was_read_is_skipped(world):
    nodes = [world.node("abc"), world.node("ab")]
    run = world.disk.check([(nodes[1], 0)])
    world.table.residents.drop(nodes[1], 0, "operator")
    late = world.disk.check([(nodes[0], 0)])
    world.end_job(world.jobs(DiskCheck)[0], FLIPPED)

    assert (run.skipped, late.skipped) == (1, 1)
    assert run.finished
    assert late.finished
    assert world.table.counts["disk_corrupt_records"] == 0


def test_a_segment_is_not_deleted_while_a_page_of_it_is_read():
    world = DiskWorld(write="through", segments=4)
    world.store(world.me, world.mine, "ab")
    world.end_all()
    place = world.node("ab").disk[0]
    run = check(world, "ab")
    (reading,) = world.jobs(DiskCheck)

    def turn() -> None:
        world.store(world.me, world.mine, chr(next(world.letters)))
        for job in world.jobs(DiskJob):
            if job is not reading:
                world.end_job(job)

    while key("ab") in world.mine.nodes and world.node("ab").disk.get(0) == place:
        turn()
    for _ in range(300):
        turn()
    assert place.segment in world.disk.log.segments, "its file is still being read"

    world.end_job(reading, FLIPPED)
    assert (run.skipped, run.corrupt, run.finished) == (1, 0, True)
    drops = [job.segment for job in world.jobs(DiskDrop)]
    assert drops == [place.segment]


def test_little_is_read_at_a_time_and_next_to_nothing_while_somebody_waits():
    world = DiskWorld(write="through")
    world.store(world.me, world.mine, "a")
    path = "defghijklmnopqrs"
    for end in range(1, len(path) + 1):
        while world.store(world.me, world.mine, path[:end], start=end - 1) != [0]:
            world.end_all()
    world.end_all()
    flood(world)
    every = [path[:end] for end in range(1, len(path) + 1)]
    run = check(world, *every)
    assert len(world.jobs(DiskCheck)) == CHECKS_MAX

    fetch = world.fetch([world.node("a")], 0)
    for _ in range(CHECKS_MAX - 1):
        world.end_job(world.jobs(DiskCheck)[0])
    world.end_job(world.jobs(DiskCheck)[0])
    assert len(world.jobs(DiskCheck)) == 1, "one goes on, so that it ends some day"

    (read,) = world.jobs(DiskRead)
    world.end_job(read)
    assert len(world.jobs(DiskCheck)) == len(every) - CHECKS_MAX
    run.cancel()
    world.end_all()
    assert run.finished
    world.table.end_fetch(world.me, fetch)


def test_two_runs_take_turns(world):
    first = check(world, *["a"] * (2 * CHECKS_MAX))
    second = check(world, *["ab"] * (2 * CHECKS_MAX))
    for _ in range(2 * CHECKS_MAX):
        world.end_job(world.jobs(DiskCheck)[0])

    assert abs(first.under_way - second.under_way) <= 1
    world.end_all()
    assert first.checked == second.checked == 2 * CHECKS_MAX
    assert chain("ab")[1] in world.mine.nodes


def test_a_run_is_read_again_without_being_taken_apart():
    world = DiskWorld(write="through")
    world.store(world.me, world.mine, "abc")
    world.end_all()
    node = world.mine.index[key("a")]
    assert world.table.residents.release_memory(node)

    run = world.disk.check([(node, 0)])
    assert [job.page.key for job in world.jobs(DiskCheck)] == chain("abc")
    world.end_all()

    assert (run.checked, run.skipped) == (3, 0)
    assert node.count == 3


def test_of_a_run_only_what_was_written_wrong_leaves_with_what_follows_it():
    world = DiskWorld(write="through")
    world.store(world.me, world.mine, "abcd")
    world.end_all()
    node = world.mine.index[key("a")]
    assert world.table.residents.release_memory(node)

    run = world.disk.check([(node, 0)])
    world.end_job(check_of(world, "abc"), FLIPPED)
    world.end_all()

    assert (run.checked, run.corrupt, run.skipped) == (3, 1, 1)
    assert world.lookup(world.mine, "abcd") == (2, 0)
