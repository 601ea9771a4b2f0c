"""Goal: a conversation is kept on disk, as far as the disk takes it."""

import pytest

from kvstore.protocol.errors import CapacityError
from kvstore.state.disk.jobs import DiskJob, DiskWrite
from kvstore.state.table.invariants import check
from kvstore.state.tree.node import RUN_PAGES_MAX, Retention
from tests.state.disk.disk_world import IO_ERROR, DiskWorld
from tests.state.disk.test_disk_limits import RECORD, LimitedWorld
from tests.state.world import chain, key


@pytest.fixture
def world() -> LimitedWorld:
    return LimitedWorld()


def test_a_conversation_is_kept_on_disk_until_it_ends(world):
    world.table.keeping.conversations.disk_budget_bytes = 10 * RECORD
    world.put("a")
    world.put("ab")
    keys = [key("a"), key("ab")]

    assert world.table.keeping.keep(world.mine, "chat", keys, 1 << 50, 0) == (2, "")
    assert world.table.keeping.conversations.disk_used_bytes == 2 * RECORD
    world.flood(200)
    assert world.there("a", "ab") == [True, True]

    world.table.keeping.end(world.mine, "chat")
    world.table.moment.now_ns = max(1, world.table.now_ns)
    world.table.expire(world.table.now_ns)
    assert [one.disk_pins for one in world.mine.nodes.values()] == [0, 0]
    assert world.table.keeping.conversations.disk_used_bytes == 0


def test_what_the_disk_does_not_take_is_not_kept(world):
    world.table.keeping.conversations.disk_budget_bytes = 10 * RECORD
    world.put("a")
    world.store(world.me, world.mine, "at", start=1, keep=Retention(expires_ns=1 << 50))
    keys = [key("a"), key("at")]

    assert world.table.keeping.keep(world.mine, "chat", keys, 1 << 50, 0) == (1, "disk")

    assert world.table.keeping.conversations.disk_used_bytes == RECORD
    assert [one.disk_pins for one in world.mine.nodes.values()] == [1, 0]


# Single pages that are written together


def kept(path: str, **world: int) -> DiskWorld:
    """A world with a conversation, each page of which is a node and is being written."""
    found = DiskWorld(write="back", extents=60, **world)
    found.table.keeping.conversations.disk_budget_bytes = 1000 * RECORD
    found.store(found.me, found.mine, path)
    keys = chain(path)
    assert found.table.keeping.keep(found.mine, "chat", keys, 1 << 50, 0) == (len(keys), "")
    return found


def test_pages_that_do_not_fit_one_segment_are_written_to_two():
    path = "a" * 100
    world = kept(path, segment_bytes=1 << 19)

    assert len({job.place.segment for job in world.jobs(DiskWrite)}) == 2
    assert len(world.disk.writes) == 2
    world.end_all()
    assert all(world.on_disk(path))


def test_if_a_record_fails_the_pages_before_it_are_on_disk_and_none_behind():
    path = "abcdefgh"
    world = kept(path)
    assert len(world.disk.writes) == 1

    for job in world.jobs(DiskJob):
        failed = isinstance(job, DiskWrite) and job.page.key == key("abcde")
        world.end_job(job, IO_ERROR if failed else None)

    assert world.on_disk(path) == [True] * 4 + [False] * 4
    assert all(world.mine.nodes[one].disk_pins for one in chain(path)), "they wait in memory"
    world.disk.advance(1000)
    world.end_all()
    assert all(world.on_disk(path))


def test_many_single_pages_are_several_writes():
    """Slots are pinned until the last page of a write is there."""
    path = "a" * (2 * RUN_PAGES_MAX + 1)
    world = DiskWorld(write="back", extents=80, segment_bytes=1 << 24)
    world.store(world.me, world.mine, path)
    last = [world.mine.nodes[one] for one in chain(path)][-1]

    assert world.table.tiers.ensure_all_written([last]) == 1

    assert len(world.disk.writes) == 3
    world.end_all()
    assert all(world.on_disk(path))


@pytest.mark.parametrize(("quota", "writes"), [(6, 1), (5, 5)])
def test_pages_within_a_quota_are_written_together_and_others_make_room_one_by_one(quota, writes):
    world = LimitedWorld(write="back")
    world.table.keeping.conversations.disk_budget_bytes = 100 * RECORD
    world.store(world.me, world.mine, "x")
    world.persist("x")
    world.end_all()
    world.limit(world.mine, quota=quota)
    world.store(world.me, world.mine, "abcde")

    assert world.table.keeping.keep(world.mine, "chat", chain("abcde"), 1 << 50, 0) == (5, "")

    assert len(world.disk.writes) == writes
    world.end_all()
    assert all(world.on_disk("abcde"))
    assert world.there("x") == [quota == 6]
    assert world.mine.disk_bytes == quota * RECORD


def test_a_pin_of_pages_that_the_disk_does_not_take_is_not_made(world):
    world.put("a")
    world.store(world.me, world.mine, "at", start=1, keep=Retention(expires_ns=1 << 50))

    with pytest.raises(CapacityError, match="does not take all"):
        world.table.keeping.pin(world.mine, key("at"), 0, "ssd")

    assert not world.table.keeping.pins.making
    world.table.expire(1)
    assert [one.disk_pins for one in world.mine.nodes.values()] == [0, 0]
    check(world.table)
