"""Goal: giving segments back never holds the state for long, and nothing stops it for good."""

from kvstore.state.disk import segments as keeper
from kvstore.state.disk.jobs import DiskDrop, DiskJob
from kvstore.state.disk.log import SegmentState
from tests.state.disk.disk_world import IO_ERROR
from tests.state.disk.test_disk_limits import LimitedWorld


def test_a_file_that_cannot_be_deleted_keeps_no_other_segment_from_being_given_back():
    """One directory has become read-only, and the others would still take what is written."""
    world = LimitedWorld(segments=6)
    log = world.disk.log
    stuck, now_ns, reclaimed = -1, 0, set[int]()
    while len(reclaimed) < 3 and now_ns < 100_000:
        now_ns += 200  # it is tried again after 1000
        world.disk.advance(now_ns)
        world.store(world.me, world.other, chr(next(world.letters)))
        before = set(log.segments)
        while jobs := world.jobs(DiskJob):
            for job in jobs:
                if isinstance(job, DiskDrop) and stuck in (-1, job.segment):
                    stuck = job.segment
                    world.end_job(job, IO_ERROR)
                else:
                    world.end_job(job)
        reclaimed |= before - set(log.segments)

    assert len(reclaimed) == 3
    assert stuck in log.segments
    for _ in range(3):
        now_ns += 1000
        world.disk.advance(now_ns)
        world.end_all()
    assert stuck not in log.segments, "it is tried again"


def test_a_segment_of_many_pages_is_given_up_a_few_at_a_time(monkeypatch):
    """All at once they would keep the state from its engines for a tenth of a second and more."""
    monkeypatch.setattr(keeper, "DROPS_MAX", 2)
    monkeypatch.setattr(keeper, "DROPS_A_JOB", 0)
    world = LimitedWorld(segments=6)
    while not world.table.counts["reclaimed_pages"]:
        world.put(chr(next(world.letters)))
    assert world.table.counts["reclaimed_pages"] == 2
    oldest = next(iter(world.disk.log.segments.values()))
    assert oldest.state is SegmentState.DRAINING
    last = oldest.pages.stretches[-1]
    pinned = last.key(last.pages - 1)
    world.table.keeping.pin(world.mine, pinned, 0, "ssd")

    for at in range(1, 20):
        before = world.table.counts["reclaimed_pages"]
        world.disk.advance(at)
        assert world.table.counts["reclaimed_pages"] - before <= 2
        world.end_all()

    assert oldest.number not in world.disk.log.segments
    assert 0 in world.mine.nodes[pinned].disk, "it was pinned before its turn came"


def test_a_segment_is_given_up_as_fast_as_pages_are_written(monkeypatch):
    monkeypatch.setattr(keeper, "DROPS_MAX", 2)
    monkeypatch.setattr(keeper, "DROPS_A_JOB", 1)
    world = LimitedWorld(segments=6)
    counts, before = world.table.counts, 0
    while not before:
        world.put(chr(next(world.letters)))
        before = counts["reclaimed_pages"]

    world.store(world.me, world.mine, chr(next(world.letters)))

    assert counts["reclaimed_pages"] == before + 1, "no time has passed, but a write began"
