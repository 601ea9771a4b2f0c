"""Goal: a tombstone comes before whatever is stored again, and goes after whatever it hides."""

import numpy as np
import pytest

from kvstore.protocol.errors import CapacityError, TierUnavailable
from kvstore.protocol.page import ALL_KEYS
from kvstore.state.ask.traversal import Removal
from kvstore.state.disk import graves
from kvstore.state.disk.graves import ATTEMPTS_MAX, RECORD_KEYS_MAX
from kvstore.state.disk.jobs import DiskSync, DiskTombstone, DiskWrite
from kvstore.state.disk.log import SegmentLog, SegmentState
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.table.invariants import check
from kvstore.state.tree.node import PrefixNode
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import DIGEST, FULL, World, drop_below, identity, key

SEGMENT_BYTES = 112 << 10
IO_ERROR = TierUnavailable("no such disk")


def filled(world: DiskWorld, path: str = "abc") -> DiskWorld:
    """With a path on disk."""
    world.store(world.me, world.mine, path)
    world.end_all()
    return world


def keys_of(job: DiskTombstone) -> set[bytes]:
    return {job.keys[at : at + 32] for at in range(0, len(job.keys), 32)}


def evict(world: DiskWorld, path: str, cause: str = "operator") -> None:
    drop_below(world.table, world.node(path) if path else world.mine.root, cause)
    world.disk.go_on()


def test_what_is_taken_out_meanwhile_shares_the_next_tombstone():
    world = filled(DiskWorld(), "abcde")
    world.table.residents.drop(world.node("abcde"), 0, "corrupt")
    world.disk.go_on()
    (first,) = world.jobs(DiskTombstone)
    evict(world, "ab")
    assert keys_of(first) == {key("abcde")}
    assert world.jobs(DiskTombstone) == [first], "one at a time"

    world.end_job(first)

    (second,) = world.jobs(DiskTombstone)
    assert keys_of(second) == {key("ab"), key("abc"), key("abcd")}


def test_a_removal_that_policies_make_writes_nothing():
    world = filled(DiskWorld())
    for cause in ("evicted", "reclaimed", "expired", "unreadable"):
        world.table.residents.drop(world.node("abc"), 0, cause)
        world.disk.go_on()
        assert not world.jobs(DiskTombstone), cause
        filled(world)


def test_an_emptied_space_is_one_key_for_all():
    world = filled(DiskWorld())
    removal = Removal(world.mine.root, "cleared")
    for more in (True, False):
        assert removal.turn(world.table) == more
        world.disk.go_on()
    (first,) = world.jobs(DiskTombstone)
    world.end_job(first)
    (last,) = world.jobs(DiskTombstone)
    assert keys_of(first) | keys_of(last) == {key("a"), key("ab"), key("abc"), ALL_KEYS}


def test_a_removal_is_acknowledged_after_the_sync_that_follows_its_tombstone():
    world = filled(DiskWorld())
    evict(world, "ab")
    durable = world.disk.graves.await_written(0)
    (tombstone,) = world.jobs(DiskTombstone)
    assert not world.jobs(DiskSync)

    world.end_job(tombstone)
    assert not durable.ended
    world.end_job(*world.jobs(DiskSync))

    assert durable.ended
    assert durable.error is None


def test_nobody_waits_for_the_interval_of_the_syncs():
    world = filled(DiskWorld(sync="interval"))
    world.disk.advance(1_000)
    world.end_all()
    evict(world, "ab")
    durable = world.disk.graves.await_written(0)
    world.end_all()
    assert durable.ended, "no time has passed"


def test_where_nothing_is_synced_a_removal_is_acknowledged_when_it_is_written():
    world = filled(DiskWorld(sync="none"))
    evict(world, "ab")
    durable = world.disk.graves.await_written(0)
    assert not durable.ended
    world.end_job(*world.jobs(DiskTombstone))
    assert durable.ended


def test_a_page_stored_again_is_written_after_its_tombstone():
    world = filled(DiskWorld())
    evict(world, "abc")
    world.store(world.me, world.mine, "abc")
    (tombstone,) = world.jobs(DiskTombstone)
    assert not world.jobs(DiskWrite)
    with pytest.raises(CapacityError):
        world.persist("abc")
    assert world.disk.busy, "so whoever asked waits for it"

    world.end_job(tombstone)

    (write,) = world.jobs(DiskWrite)
    assert write.page.key == key("abc")


def test_a_tombstone_that_cannot_be_written_is_tried_again_and_given_up_at_last():
    world = filled(DiskWorld())
    evict(world, "ab")
    durable = world.disk.graves.await_written(0)
    for attempt in range(ATTEMPTS_MAX):
        assert not durable.ended, attempt
        (tombstone,) = world.jobs(DiskTombstone)
        world.end_job(tombstone, IO_ERROR)
        assert not world.jobs(DiskTombstone), "not before time has passed"
        world.disk.advance(world.disk._now_ns + 1_000)
        for job in world.jobs(object):
            if not isinstance(job, DiskTombstone):
                world.end_job(job)
    assert durable.error is IO_ERROR
    assert world.table.counts["tombstone_keys_lost"] == 2
    assert not world.disk.graves.waiting_keys


def test_in_a_full_log_a_tombstone_waits_for_room_and_the_page_is_a_miss_meanwhile(monkeypatch):
    world = filled(DiskWorld())
    place = SegmentLog.place_tombstone
    monkeypatch.setattr(SegmentLog, "place_tombstone", lambda *_: None)
    evict(world, "ab")
    durable = world.disk.graves.await_written(0)
    world.end_all()
    assert world.lookup(world.mine, "abc") == (1, 0)
    assert not durable.ended

    monkeypatch.setattr(SegmentLog, "place_tombstone", place)
    world.disk.advance(1)
    world.end_all()

    assert durable.ended
    assert durable.error is None


def test_removals_that_cannot_wait_are_said_not_to_be_durable(monkeypatch):
    monkeypatch.setattr(graves, "KEYS_MAX", 1)
    world = filled(DiskWorld())
    evict(world, "ab")
    durable = world.disk.graves.await_written(0)
    world.end_all()

    assert isinstance(durable.error, CapacityError)
    assert world.table.counts["tombstone_keys_lost"] == 1
    told = world.disk.graves.await_written(0)
    assert isinstance(told.error, CapacityError), "another removal of the same time is told too"
    later = world.disk.graves.await_written(world.disk.graves.lost_keys)
    assert later.error is None, "what began later lost nothing"


def test_more_keys_than_a_record_takes_are_written_as_several(monkeypatch):
    monkeypatch.setattr(graves, "RECORD_KEYS_MAX", 2)
    assert RECORD_KEYS_MAX > 2
    world = filled(DiskWorld(), "abcde")
    evict(world, "a")
    durable = world.disk.graves.await_written(0)
    written = set()
    for _ in range(3):
        assert not durable.ended
        (tombstone,) = world.jobs(DiskTombstone)
        assert len(keys_of(tombstone)) <= 2
        written |= keys_of(tombstone)
        world.end_job(tombstone)
        for sync in world.jobs(DiskSync):
            world.end_job(sync)
    assert durable.ended
    assert written == {key("abcde"[:end]) for end in range(1, 6)}


class Iterated(dict[bytes, None]):
    """Keys that wait, which count how often one of them is looked at in order."""

    looks = 0

    def __iter__(self):
        for one in super().__iter__():
            self.looks += 1
            yield one


def test_a_tombstone_leaves_the_keys_alone_that_wait_for_the_next_one(monkeypatch):
    """When a space is emptied they are 65,536: to copy all of them for each took 25 ms."""
    monkeypatch.setattr(graves, "RECORD_KEYS_MAX", 2)
    world = DiskWorld(extents=20)
    waiting = world.disk.graves
    filled(world, "a" * 60)
    evict(world, "a")
    (pair,) = waiting._gathering
    waiting._gathering[pair].keys = keys = Iterated(waiting._gathering[pair].keys)
    durable = waiting.await_written(0)

    while len(keys) > 2:
        (tombstone,) = world.jobs(DiskTombstone)
        world.open.clear()
        world.table.residents.disk.completed(tombstone.job, None)
        looks, left = keys.looks, len(keys)
        waiting.write()
        assert len(keys) == left - 2
        assert keys.looks - looks <= 3
    world.end_all()

    assert durable.ended
    assert durable.error is None


# Which segments may go


def page(world: World, name: str) -> PrefixNode:
    space = world.space(world.process(), [FULL])
    return space.node(key(name), key(""))


def waits(world: DiskWorld) -> dict[int, set[int]]:
    """Each segment's number → those of the segments that its tombstones wait for."""
    segments = world.disk.log.segments
    return {
        one.number: {
            other.number
            for other in segments.values()
            if other is not one and one.order.waits_for(other.order)
        }
        for one in segments.values()
    }


def found(number: int, first_page: int, last_tombstone: int) -> FoundSegment:
    return FoundSegment(
        number, 1 << 20, True, 8192, 1, b"", b"", b"", np.empty(0, np.uint64),
        np.empty(0, np.uint16), first_page, last_tombstone,
    )  # fmt: skip


def test_a_start_finds_out_which_segments_a_tombstone_waits_for():
    world = DiskWorld()
    segments = [
        found(1, 10, 0),
        found(2, 20, 25),
        found(3, 22, 0),
        found(4, 30, 40),
        found(5, 0, 7),
    ]

    adopt(world.table, segments, [], 6)

    assert waits(world) == {1: set(), 2: {1, 3}, 3: set(), 4: {1, 2, 3}, 5: set()}


def test_pages_that_a_start_finds_without_their_head_are_left_out_and_counted():
    world = DiskWorld()
    names = ["a", "ab", "abcd", "abcde"]
    parents = bytes(32) + key("a") + key("abc") + key("abcd")
    segment = FoundSegment(
        1, 1 << 20, True, 1 << 16, 4, b"".join(map(key, names)), parents, DIGEST * 4,
        np.array([1, 3, 5, 7], np.uint64) * 4096, np.zeros(4, np.uint16),
    )  # fmt: skip

    assert adopt(world.table, [segment], [(identity("blue"), FULL)], 2) == 2
    (space,) = [one for one in world.table.spaces if one.identity.tenant == "blue"]
    assert set(space.nodes) == {key("a"), key("ab")}
    assert world.table.counts["orphaned_bytes"] == 2 * space.shards[0].record_bytes
    check(world.table)


def test_no_two_found_segments_wait_for_each_other():
    world = DiskWorld()

    adopt(world.table, [found(1, 10, 30), found(2, 20, 40)], [], 3)

    assert waits(world) == {1: set(), 2: {1}}


def test_a_segment_goes_only_after_those_that_its_tombstones_were_written_after():
    world, log = World(), SegmentLog(4, SEGMENT_BYTES)
    space = page(world, "a").space
    new, copied = log.place(space, 0, key("a"), 1), log.place(space, 0, key("b"), 1, carried=True)
    tombstone = log.place_tombstone(space, 0, 1)
    assert new is not None
    assert copied is not None
    first, carried = new.place, copied.place
    assert tombstone is not None
    assert tombstone.segment == first.segment != carried.segment
    for place in (first, carried, tombstone):
        log.wrote(place)
    log.segments[first.segment].state = SegmentState.SEALED
    del log._open[False]

    assert log.victim() is None, "it waits for one that is still open"
    assert log.segments[carried.segment].state is SegmentState.FULL, "which is closed for that"
    log.sealed(carried.segment)
    victim = log.victim()
    assert victim is log.segments[carried.segment]

    log.segments[carried.segment].pages.remove(carried.offset)
    log.free(victim.number)
    assert not log.holds_up(log.segments[first.segment]), "it may go now"
