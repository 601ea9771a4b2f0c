"""Goal: a durable put at the end of a long prompt is written in steps, and ends with the truth."""

import pytest

from kvstore.protocol.errors import CapacityError, PageCorrupt, TransferTimeout
from kvstore.state.disk import persists
from kvstore.state.disk.jobs import DiskSync, DiskWrite, Durable
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import RUN_PAGES_MAX
from tests.state.disk.disk_world import IO_ERROR, DiskWorld, flood
from tests.state.world import PAGE, chain, drop_below

RECORD = 2 * PAGE
LONG = "".join(chr(0x61 + at) for at in range(20))


def long_world(in_flight: int = 8, write: str = "back", segments: int = 8) -> DiskWorld:
    """A long prompt that is in memory only."""
    size = 1 << 20 if segments == 8 else 1 << 17
    world = DiskWorld(
        write, in_flight_max=in_flight * RECORD, extents=12, segments=segments, segment_bytes=size
    )
    assert set(world.store(world.me, world.mine, LONG)) == {PageStatus.GRANTED}
    return world


def persist_last(world: DiskWorld, path: str = LONG, deadline_ns: int = 0) -> Durable:
    """A durable put names only the last page."""
    return world.table.tiers.make_durable([world.node(path)], 0, deadline_ns)


def pass_time(world: DiskWorld, now_ns: int) -> None:
    world.table.moment.now_ns = now_ns
    world.table.tiers.advance(now_ns)


def writes(world: DiskWorld) -> int:
    return len(world.jobs(DiskWrite))


def test_all_pages_before_it_are_written_within_the_limit_of_bytes_in_flight():
    world, most = long_world(), 0
    durable = persist_last(world)

    while jobs := world.jobs(DiskWrite):
        most = max(most, world.disk.writes.in_flight_bytes)
        assert not durable.ended
        world.end_job(jobs[0])
    world.end_all()

    assert most == 4 * RECORD, "half of the limit is left to ordinary writes"
    assert durable.ended
    assert durable.error is None
    assert all(world.on_disk(LONG))
    assert world.slots.stats().pinned_bytes == 0


def test_one_step_begins_a_few_pages_and_the_next_ones_go_on(monkeypatch):
    monkeypatch.setattr(persists, "PAGES_STEP", 6)
    world = long_world(in_flight=1000)
    durable = persist_last(world)

    for begun in (6, 12, 18):
        assert writes(world) == begun
        assert world.disk.unfinished, "nothing else would wake it"
        world.table.tiers.go_on()
    assert writes(world) == 20
    assert not world.disk.unfinished
    world.end_all()
    assert durable.ended
    assert durable.error is None


def test_it_waits_while_writes_of_others_take_the_whole_limit():
    world = DiskWorld(in_flight_max=2 * RECORD, extents=12)
    world.store(world.me, world.mine, "xyz")
    assert writes(world) == 2
    world.store(world.me, world.mine, "abc")
    durable = persist_last(world, "abc")
    assert writes(world) == 2
    assert not world.disk.unfinished, "it would go on in vain"

    world.end_all()

    assert durable.ended
    assert durable.error is None


def test_a_failed_write_ends_it_with_an_error_and_no_further_page_is_written():
    world = long_world()
    durable = persist_last(world)
    jobs = world.jobs(DiskWrite)
    world.end_job(jobs[1], IO_ERROR)
    for job in world.jobs(DiskWrite):
        world.end_job(job)

    assert durable.ended
    assert durable.error is not None
    assert writes(world) == 0
    assert world.disk.acknowledged == [durable]
    assert world.slots.stats().pinned_bytes == 0


def test_an_error_of_one_record_is_not_forgotten_when_the_others_are_written():
    world = long_world()
    durable = persist_last(world)
    world.end_job(world.jobs(DiskWrite)[2], PageCorrupt("other bytes"))
    assert not world.disk.degraded

    world.end_all()

    assert durable.ended
    assert durable.error is not None


def test_writes_that_fail_end_the_others_that_are_not_begun_yet_too():
    """Writing is off for a while: they are told now, as one that comes later is."""
    world = long_world()
    world.store(world.me, world.mine, "z")
    first, second = persist_last(world), persist_last(world, "z")
    world.end_job(world.jobs(DiskWrite)[0], IO_ERROR)
    world.end_all()

    assert first.ended
    assert second.ended
    assert isinstance(second.error, CapacityError)


@pytest.mark.parametrize("cause", ["operator", "corrupt"])
def test_a_page_before_it_that_leaves_meanwhile_ends_it(cause):
    world = long_world()
    durable = persist_last(world)
    world.table.residents.drop(world.node(LONG[:10]), 0, cause)
    world.end_all()

    assert durable.ended
    assert isinstance(durable.error, CapacityError)
    assert all(world.on_disk(LONG[:4])), "what had begun is there"


def test_a_clear_ends_it():
    world = long_world()
    durable = persist_last(world)
    drop_below(world.table, world.mine.root, "cleared")
    world.end_all()

    assert durable.ended
    assert isinstance(durable.error, CapacityError)
    assert world.slots.stats().pinned_bytes == 0


def test_while_writes_hang_one_that_is_given_up_keeps_no_page_in_memory():
    world = long_world(in_flight=4)
    nodes = [world.node(LONG[:end]) for end in range(1, len(LONG) + 1)]
    given_up = [world.table.tiers.make_durable(nodes, 0, 100) for _ in range(2)]
    hanging = writes(world)
    assert world.slots.stats().pinned_bytes == len(LONG) * PAGE

    pass_time(world, 100)

    assert world.slots.stats().pinned_bytes == hanging * PAGE
    assert writes(world) == hanging > 0
    assert [one.ended for one in given_up] == [False, True], "only the second one waits for none"
    world.end_all()
    assert all(isinstance(one.error, TransferTimeout) for one in given_up)
    assert world.slots.stats().pinned_bytes == 0


def test_many_pages_whose_deadline_has_come_are_unpinned_in_several_ticks():
    """The tick takes as long as there are pages, and all wait for it."""
    pages, puts = persists.UNPINNED_TICK // 2 + 1, 6
    world = DiskWorld("back", in_flight_max=2 * RECORD, extents=puts * pages // 3, segments=40)
    for at in range(puts):
        path = chr(0x1000 + at) * pages
        for end in range(RUN_PAGES_MAX, pages + RUN_PAGES_MAX, RUN_PAGES_MAX):
            world.store(world.me, world.mine, path[:end], start=end - RUN_PAGES_MAX)
        run = world.table.residents.ready_run(world.mine, 0, b"".join(chain(path)))
        world.table.tiers.make_durable(run, 0, 100)
    hanging = writes(world) * PAGE
    pinned = world.slots.stats().pinned_bytes
    assert pinned == puts * pages * PAGE

    for tick in range(puts // 2):
        pass_time(world, 100 + tick)
        before, pinned = pinned, world.slots.stats().pinned_bytes
        assert 0 < before - pinned <= 2 * pages * PAGE

    assert pinned == hanging > 0, "and nothing is left for the next tick"


def test_its_deadline_ends_it_and_no_further_page_is_written():
    world = long_world()
    pass_time(world, 10)
    durable = persist_last(world, deadline_ns=100)
    begun = world.jobs(DiskWrite)
    world.end_job(begun[0])
    pass_time(world, 100)
    for job in world.jobs(DiskWrite):
        world.end_job(job)

    assert durable.ended
    assert isinstance(durable.error, TransferTimeout)
    assert writes(world) == 0
    assert world.slots.stats().pinned_bytes == 0
    assert sum(world.on_disk(LONG)) == len(begun) + 1, "one had begun when the first had ended"

    again = persist_last(world)
    world.end_all()
    assert again.error is None, "it goes on where that one was left"


def test_a_short_one_need_not_wait_for_all_of_a_long_one(monkeypatch):
    monkeypatch.setattr(persists, "PAGES_STEP", 2)
    world = long_world()
    world.store(world.me, world.mine, "z")
    long = persist_last(world)
    short = persist_last(world, "z")

    while not short.ended:
        for job in [*world.jobs(DiskWrite)[:1], *world.jobs(DiskSync)]:
            world.end_job(job)

    assert short.error is None
    assert not long.ended
    world.end_all()
    assert long.error is None


def test_a_page_that_others_write_meanwhile_is_waited_for():
    world = long_world()
    durable = persist_last(world)
    half = persist_last(world, LONG[:12])
    world.end_all()

    assert durable.error is half.error is None
    assert durable.ended
    assert half.ended


def test_records_that_are_lost_while_it_goes_on_are_written_again():
    """The first segment is reclaimed before the last page has begun: memory has its pages still."""
    world = long_world()
    durable = persist_last(world)
    for job in world.jobs(DiskWrite):
        world.end_job(job)
    assert all(world.on_disk(LONG[:4]))
    world.lose(world.node(LONG[:2]), 0)
    world.end_all()

    assert durable.ended
    assert (durable.error is None) == all(world.on_disk(LONG))


@pytest.mark.parametrize("quota", [0, 6])
def test_one_for_which_there_is_no_more_room_waits_for_it_or_is_told(quota):
    world = long_world(segments=5)
    assert world.disk.exists
    flood(world, 12)
    if quota:
        world.disk.limit(world.mine, quota * RECORD, 0)
    if world.lookup(world.mine, LONG)[0] < len(LONG):
        world.store(world.me, world.mine, LONG)
        world.end_all()
    durable = persist_last(world)
    assert durable.rest, "it cannot begin them all"
    world.end_all()

    assert durable.ended
    assert (durable.error is None) == all(world.on_disk(LONG))
    assert not quota or sum(world.on_disk(LONG)) == quota


def test_a_page_that_is_still_being_stored_again_is_not_awaited_for_ever():
    """Nothing that this node does would make it READY."""
    world = long_world(in_flight=4)
    durable = persist_last(world)
    world.table.residents.drop(world.node(LONG[:10]), 0, "reclaimed")
    world.begin(world.me, world.mine, LONG, start=9)
    world.end_all()

    assert durable.ended
    assert isinstance(durable.error, CapacityError)


def test_a_node_that_stops_waits_for_it():
    world = long_world()
    durable = persist_last(world)
    while not world.disk.settled:
        assert not durable.ended
        world.end_job((world.jobs(DiskWrite) or world.jobs(DiskSync))[0])

    assert durable.ended
    assert durable.error is None


def test_the_self_check_bears_a_put_that_failed_while_it_was_beginning():
    """It ends when its turn comes, which may be later."""
    world = DiskWorld("back", extents=60, segments=40, in_flight_max=20 * RECORD)
    for name in "ab":
        world.store(world.me, world.mine, name * 30)
    puts = [world.persist(name * 30) for name in "ab"]
    under_way = world.table.residents.disk.writes._under_way
    failed = None
    while failed is None:
        jobs = world.jobs(DiskWrite)
        mine = [job for job in jobs if puts[1] in under_way.of_slot(job.slot).waiters]
        alone = [job for job in mine if under_way.of_slot(job.slot).left == 1]
        if alone:
            failed = alone[0]
            world.table.residents.drop(world.mine.nodes[failed.page.key], 0, "operator")
        world.end_job(failed or next(job for job in jobs if job not in mine))

    world.end_all()
    assert [put.error is None for put in puts] == [True, False]
    assert world.slots.stats().pinned_bytes == 0


def test_the_pages_before_a_moved_one_begin_some_at_a_time():
    world = DiskWorld("selective", extents=140, segments=40, in_flight_max=20 * RECORD)
    path = "a" * 300
    for end in range(1, 301):
        world.store(world.me, world.mine, path[:end], start=end - 1)
    begun = ends = 0

    while not world.table.tiers.ensure_written(world.node(path), 0):
        assert len(world.jobs(DiskWrite)) <= begun + 20
        for job in world.jobs(DiskWrite):
            world.end_job(job)
        ends += 1
        assert ends < 40
    assert ends >= 300 // 20
    assert all(world.on_disk(path))
