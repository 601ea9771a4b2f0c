"""Goal: whoever put a page durably is told when it is safe, or that it is not."""

import pytest

from kvstore.protocol.errors import CapacityError, DurabilityUnavailable
from kvstore.state.disk import persists as disk
from kvstore.state.disk.jobs import DiskJob, DiskSeal, DiskSync, DiskWrite, Durable
from kvstore.state.table.runs import leading_ready
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import Retention
from tests.state.disk.disk_world import IO_ERROR, DiskWorld
from tests.state.world import chain, key


def test_a_durable_put_is_told_by_a_sync_that_began_after_its_last_write():
    world = DiskWorld()
    world.store(world.me, world.mine, "x")
    world.end_job(world.write_of("x"))
    (early,) = world.jobs(DiskSync)
    world.store(world.me, world.mine, "ab")
    durable = world.persist("ab")

    world.end_job(world.write_of("ab"))
    world.end_job(world.write_of("a"))
    world.end_job(early)
    assert not durable.ended, "that sync began before the bytes were there"

    (late,) = world.jobs(DiskSync)
    world.end_job(late)
    assert world.disk.acknowledged == [durable]
    assert durable.error is None


def test_a_durable_put_fails_when_its_sync_does():
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    durable = world.persist("a")
    world.end_job(world.write_of("a"))

    (sync,) = world.jobs(DiskSync)
    world.end_job(sync, IO_ERROR)

    assert durable.ended
    assert durable.error is IO_ERROR


def test_syncs_that_fail_again_and_again_cost_one_segment():
    world = DiskWorld()
    for at, path in enumerate("abcde"):
        world.disk.advance(10_000 * at)
        world.store(world.me, world.mine, path)
        assert not world.disk.degraded
        durable = world.persist(path)
        world.end_job(world.write_of(path))
        for kind in (DiskSync, DiskSeal, DiskSync):
            for job in world.jobs(kind):
                world.end_job(job, IO_ERROR)
        assert durable.error is IO_ERROR
    assert world.disk.troubled
    assert world.disk.log.stats().segments <= 2


def test_a_durable_put_fails_when_a_page_before_it_cannot_be_written():
    world = DiskWorld()
    world.store(world.me, world.mine, "ab")
    durable = world.disk.make_durable([world.node("ab")], 0)

    world.end_job(world.write_of("ab"))
    world.end_job(world.write_of("a"), IO_ERROR)

    assert durable.ended
    assert durable.error is not None


def one_put_written() -> tuple[DiskWorld, Durable]:
    """Memory is full of a durable put that awaits its sync."""
    world = DiskWorld(sync="interval", extents=1)
    world.disk.advance(1)
    world.store(world.me, world.mine, "abcd")
    durable = world.persist("abcd")
    for path in ("a", "ab", "abc", "abcd"):
        world.end_job(world.write_of(path))
    return world, durable


def test_a_page_awaiting_its_sync_may_leave_memory_and_the_put_is_told_by_that_sync():
    world, durable = one_put_written()
    assert world.slots.stats().pinned_bytes == 0

    assert world.store(world.me, world.mine, "x") == [PageStatus.GRANTED]
    assert not all(world.in_memory("abcd"))
    assert not durable.ended, "nothing is synced yet"
    world.disk.advance(1000)
    world.end_all()
    assert durable.ended
    assert durable.error is None
    assert all(world.on_disk("abcd"))


def test_a_page_that_left_memory_and_then_the_disk_before_its_sync_is_not_acknowledged():
    world, durable = one_put_written()
    world.store(world.me, world.mine, "x")
    assert world.in_memory("abcd")[3] is False
    world.lose(world.node("abcd"), 0)

    world.disk.advance(1000)
    world.end_all()

    assert durable.ended
    assert isinstance(durable.error, CapacityError)


def test_a_page_that_left_memory_before_its_sync_failed_is_not_acknowledged():
    world, durable = one_put_written()
    world.store(world.me, world.mine, "x")
    world.disk.advance(1000)
    (sync,) = world.jobs(DiskSync)

    world.end_job(sync, IO_ERROR)

    assert durable.ended
    assert durable.error is IO_ERROR


def test_a_page_that_is_being_written_for_a_put_stays_in_memory():
    world = DiskWorld(write="back", extents=1)
    world.store(world.me, world.mine, "abcd")
    durable = world.persist("abcd")
    for path in ("a", "ab", "abc"):
        world.end_job(world.write_of(path))

    assert world.store(world.me, world.mine, "x") == [PageStatus.NO_ROOM]
    world.end_all()

    assert durable.error is None
    assert world.store(world.me, world.mine, "x") == [PageStatus.GRANTED]


def test_a_sync_that_hangs_does_not_fill_memory_with_durable_puts():
    world = DiskWorld(segments=64, extents=4)
    for _ in range(40):
        path = chr(next(world.letters))
        assert world.store(world.me, world.mine, path) == [PageStatus.GRANTED]
        durable = world.persist(path)
        for job in world.jobs(DiskWrite):
            world.end_job(job)
        assert not durable.ended
    assert len(world.jobs(DiskSync)) == 1

    world.end_all()

    assert world.slots.stats().pinned_bytes == 0


@pytest.mark.parametrize("cause", ["corrupt", "operator", "quota"])
def test_a_durable_put_fails_when_a_page_leaves_before_its_sync(cause):
    """It is on disk, but not safe there yet, when it is taken out; then nothing of it is left."""
    world = DiskWorld(sync="interval")
    world.disk.advance(1)
    world.store(world.me, world.mine, "ab")
    durable = world.persist("ab")
    world.end_job(world.write_of("a"))
    world.end_job(world.write_of("ab"))
    world.table.residents.drop(world.node("ab"), 0, cause)

    world.disk.advance(1000)
    world.end_all()

    assert durable.ended
    assert isinstance(durable.error, CapacityError)
    assert world.on_disk("a") == [True]


def test_a_durable_put_without_room_on_disk_is_refused_and_holds_nothing():
    world = DiskWorld(write="back", segments=0)
    world.store(world.me, world.mine, "ab")

    with pytest.raises(CapacityError):
        world.persist("ab")

    assert world.slots.stats().pinned_bytes == 0
    assert not world.disk.acknowledged


def test_a_durable_put_for_which_there_is_no_room_at_all_touches_no_page(monkeypatch):
    """It is tried again for every job that ends, and may be of thousands of pages."""
    world = DiskWorld(write="back", segments=0)
    world.store(world.me, world.mine, "abcd")

    def pin(*_arguments: object) -> None:
        pytest.fail("it begins all over again")

    monkeypatch.setattr(world.slots, "pin", pin)
    with pytest.raises(CapacityError):
        world.persist("abcd")


def test_durable_puts_do_not_pile_up_on_a_disk_that_hangs(monkeypatch):
    monkeypatch.setattr(disk, "DURABLES_MAX", 2)
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    world.persist("a")
    world.persist("a")
    with pytest.raises(CapacityError, match="too many durable pages"):
        world.persist("a")
    world.end_all()
    assert len(world.disk.acknowledged) == 2
    world.persist("a")


@pytest.mark.parametrize("path", ["abc", "abcd"])
def test_a_durable_put_of_or_after_a_page_that_never_goes_to_disk_is_refused_for_good(path):
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    world.end_all()
    world.store(world.me, world.mine, "abc", start=1, keep=Retention(expires_ns=1 << 60))
    world.store(world.me, world.mine, path)
    before = world.table.slots.stats()

    with pytest.raises(DurabilityUnavailable, match="no_store"):
        world.disk.make_durable([world.node(path)], 0)

    assert not world.jobs(DiskJob)
    assert world.table.slots.stats() == before, "nothing is pinned"


def test_a_durable_run_stays_one_node():
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "abcd")

    run = leading_ready(world.mine, b"".join(chain("abcd")), 0)
    durable = world.disk.make_durable(run, 0)
    world.end_all()

    assert durable.ended
    assert durable.error is None
    assert world.mine.index[key("a")].count == 4
    assert world.slots.stats().pinned_bytes == 0


def test_a_page_that_is_another_one_now_is_not_acknowledged():
    """It was written after the sync began, which covers the page that it took the place of."""
    world = DiskWorld(write="back")
    world.store(world.me, world.mine, "ab")
    durable = world.persist("ab")
    for job in world.jobs(DiskWrite):
        world.end_job(job)
    (sync,) = world.jobs(DiskSync)
    world.table.residents.drop(world.node("ab"), 0, "reclaimed")
    number, _, _ = world.begin(world.me, world.mine, "ab", start=1)
    world.table.commit_put(world.me, number, bytes(16))
    world.disk.ensure_written(world.node("ab"), 0)
    for job in world.jobs(DiskWrite):
        world.end_job(job)
    assert world.on_disk("ab") == [True, True]

    world.end_job(sync)

    assert durable.ended
    assert isinstance(durable.error, CapacityError)


def test_a_page_that_came_back_during_the_sync_is_acknowledged_after_one_of_its_new_record():
    world = DiskWorld(write="back", sync="interval")
    world.disk.advance(1)
    world.store(world.me, world.mine, "ab")
    durable = world.persist("ab")
    world.end_job(world.write_of("a"))
    world.end_job(world.write_of("ab"))
    world.disk.advance(1000)
    (sync,) = world.jobs(DiskSync)
    world.lose(world.node("ab"), 0)
    world.persist("ab")
    world.end_job(world.write_of("ab"))

    world.end_job(sync)
    assert not durable.ended, "it was not yet written when that began"

    world.disk.advance(2000)
    world.end_job(*world.jobs(DiskSync))
    assert durable.ended
    assert durable.error is None


def test_a_page_that_leaves_before_its_put_is_written_is_acknowledged_only_where_it_is_synced():
    """It comes back for another put: of its new record, too, a sync must begin and end."""
    world = DiskWorld(write="back", sync="interval")
    world.disk.advance(1)
    world.store(world.me, world.mine, "a")
    world.persist("a")
    world.end_all()
    world.disk.advance(1000)
    world.end_all()
    world.store(world.me, world.mine, "ab")
    durable = world.persist("ab")
    world.lose(world.node("a"), 0)
    world.persist("a")
    first, second = world.jobs(DiskWrite)
    world.end_job(first)
    world.disk.advance(2000)
    syncs = world.jobs(DiskSync)
    world.end_job(second)
    for sync in syncs:
        world.end_job(sync)

    assert not durable.ended or durable.error is not None
    world.end_all()
    world.disk.advance(3000)
    world.end_all()
    assert durable.ended
