"""A segment that fails while its tombstones are needed is given up; the others go on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import TierUnavailable
from kvstore.state.disk.jobs import (
    DiskDrop,
    DiskJob,
    DiskSeal,
    DiskSync,
    DiskTombstone,
    DiskWrite,
)
from kvstore.state.disk.log import Segment, SegmentLog, SegmentState
from kvstore.state.disk.order import NEVER_AWAITED, Order, awaited_by, eldest_of
from tests.state.disk.disk_world import IO_ERROR, DiskWorld
from tests.state.world import drop_below, key

SEGMENT_BYTES = 1 << 17


def end_all(world: DiskWorld, bad: int, *, held: DiskJob | None = None) -> None:
    """All jobs end, but the one that is held; this segment cannot be synced, unless given up."""
    while jobs := [job for job in world.jobs(DiskJob) if job is not held]:
        for job in jobs:
            there = bad in world.disk.log.segments
            syncs = isinstance(job, DiskSync) and bad not in job.given_up
            if there and (syncs or (isinstance(job, DiskSeal) and job.segment == bad)):
                world.end_job(job, IO_ERROR, (bad,))
            else:
                world.end_job(job)


def put(world: DiskWorld) -> str:
    path = chr(next(world.letters))
    world.store(world.me, world.mine, path)
    return path


def failing(segments: int = 3) -> tuple[DiskWorld, int]:
    """A log with segments of which the last one has a tombstone for a page of its own."""
    world = DiskWorld(segments=12, segment_bytes=SEGMENT_BYTES, extents=8)
    while len(world.disk.log.segments) < segments:
        put(world)
        end_all(world, -1)
    path = put(world)
    end_all(world, -1)
    drop_below(world.table, world.node(path), "operator")
    world.disk.go_on()
    return world, max(world.disk.log.segments)


def test_durable_puts_go_on_after_a_sync_of_a_segment_with_tombstones_failed():
    world, bad = failing()
    older = world.disk.log.segments.keys() - {bad}
    world.end_job(*world.jobs(DiskTombstone))
    end_all(world, bad)
    assert world.disk.troubled

    for tick in range(1, 8):
        world.disk.advance(tick * 1_000)
        end_all(world, bad)
        world.disk.go_on()
    durable = world.persist(put(world))
    end_all(world, bad)

    assert durable.ended
    assert durable.error is None
    assert not world.disk.troubled
    assert not world.disk.log.segments[bad].pages
    assert older | {bad} <= world.disk.log.segments.keys(), "its tombstones are still needed"


def test_a_segment_that_was_given_up_is_deleted_when_its_tombstones_are_no_longer_needed():
    world, bad = failing()
    older = world.disk.log.segments.keys() - {bad}
    world.end_job(*world.jobs(DiskTombstone))
    end_all(world, bad)
    for tick in range(1, 1_000):
        world.disk.advance(tick * 1_000)
        put(world)
        end_all(world, bad)
        world.disk.go_on()
        if bad not in world.disk.log.segments:
            break
    assert not world.disk.log.segments.keys() & older, "it goes after these"
    assert bad not in world.disk.log.segments
    assert not world.disk.log.given_up


def test_who_waits_for_a_removal_is_told_when_its_tombstone_may_be_lost():
    world, bad = failing()
    put(world)
    (tombstone,) = world.jobs(DiskTombstone)
    world.disk.advance(1)
    while not world.jobs(DiskSync):
        write, *_ = [job for job in world.jobs(DiskJob) if job is not tombstone]
        world.end_job(write)
    (under_way,) = world.jobs(DiskSync)
    durable = world.disk.graves.await_written(0)
    world.end_job(tombstone)
    assert not durable.ended, "it waits for the next sync"

    world.table.residents.disk.log.fail(bad)
    for tick in range(1, 8):
        world.disk.advance(tick * 1_000)
        end_all(world, bad, held=under_way)
        world.disk.go_on()
    assert bad in world.disk.log.given_up
    world.end_job(under_way)
    end_all(world, bad)

    assert durable.ended
    assert isinstance(durable.error, TierUnavailable)


@pytest.mark.parametrize("again", [False, True], ids=["it is gone", "it is on disk again"])
def test_a_tombstone_that_may_be_lost_is_written_once_more_unless_its_page_is_there(again):
    """Whoever removes a page once more finds nothing to remove, and is told that it is durable."""
    world, bad = failing()
    (tombstone,) = world.jobs(DiskTombstone)
    path = next(name for name in map(chr, range(0x4E00, 0x5000)) if key(name) in tombstone.keys)
    world.end_job(tombstone)
    if again:
        world.table.residents.disk.log.fail(bad)  # what comes goes to another one
        world.store(world.me, world.mine, path)
        for job in world.jobs(DiskWrite):
            world.end_job(job)
    written = world.table.counts["tombstone_keys"]
    for tick in range(1, 8):
        world.disk.advance(tick * 1_000)
        end_all(world, bad)
        world.disk.go_on()
    assert bad in world.disk.log.given_up
    assert world.table.counts["tombstone_keys"] == written + (not again)


def test_an_older_copy_of_its_pages_holds_up_no_segment_after_that_was_given_up():
    log = SegmentLog(12, SEGMENT_BYTES)
    first, target = Segment(1, SEGMENT_BYTES, Order(0)), Segment(2, SEGMENT_BYTES, Order(1))
    for segment in (first, target):
        segment.state = SegmentState.SEALED
        log.segments[segment.number] = segment
        log.fail(segment.number)
    first.copied_to.add(2)
    assert log.victim({2}) is target, "it is copied once more before"

    log.give_up(target)
    assert log.victim() is first


@pytest.mark.parametrize("fails", [1, 3])
def test_a_failed_segment_whose_file_cannot_be_deleted_fails_no_further_sync(fails):
    world = DiskWorld(segments=64, segment_bytes=SEGMENT_BYTES, extents=8)
    put(world)
    end_all(world, -1)
    bad = max(world.disk.log.segments)
    world.table.residents.disk.log.fail(bad)
    failed = refused = 0
    for tick in range(1, 30):
        world.disk.advance(tick * 1_000)
        while jobs := world.jobs(DiskJob):
            for job in jobs:
                if isinstance(job, DiskDrop) and failed < fails:
                    failed += 1
                    world.end_job(job, IO_ERROR)
                elif isinstance(job, DiskSync) and bad not in job.given_up and failed:
                    refused += 1
                    world.end_job(job, IO_ERROR, (bad,))
                else:
                    world.end_job(job)
        world.disk.go_on()
    assert failed
    durable = world.persist(put(world))
    end_all(world, bad)
    assert durable.error is None
    assert refused == 0
    assert not world.disk.troubled


ORDERS = st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=8).map(
    lambda drawn: [
        Order(rank if has_pages else NEVER_AWAITED, min(until, len(drawn)))
        for rank, (has_pages, until) in enumerate(drawn)
    ]
)


@given(orders=ORDERS)
def test_what_the_numbers_say_is_what_a_comparison_of_each_with_each_says(orders: list[Order]):
    eldest = eldest_of(orders)
    for one in orders:
        others = [other for other in orders if other is not one]
        assert eldest.holds_up(one) == any(one.waits_for(other) for other in others)
        assert awaited_by(others).has(one) == any(other.waits_for(one) for other in others)


@given(orders=ORDERS)
def test_one_segment_can_always_go(orders: list[Order]):
    while orders:
        eldest = eldest_of(orders)
        free = [one for one in orders if not eldest.holds_up(one)]
        assert free
        orders = [one for one in orders if one is not free[0]]


def test_what_a_sync_has_covered_is_not_kept():
    world, bad = failing()
    world.end_job(*world.jobs(DiskTombstone))
    graves = world.disk.graves
    assert graves._unsynced_keys == 1
    assert graves.waits_for(world.mine)
    end_all(world, -1)
    assert not graves._unsynced
    assert not graves.waits_for(world.mine)
    assert bad in world.disk.log.segments
