"""Goal: giving segments back never holds the state for long, and nothing stops it for good."""

import pytest

from kvstore.protocol.page import PrefixKey
from kvstore.state.disk import choices, limits, plans
from kvstore.state.disk import segments as keeper
from kvstore.state.disk.choices import SegmentLook
from kvstore.state.disk.jobs import DiskCopy, DiskDrop, DiskJob, DiskSeal, DiskSync
from kvstore.state.disk.log import Segment, SegmentState
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.disk.disk_world import IO_ERROR, DiskWorld
from tests.state.disk.test_disk_limits import RECORD, LimitedWorld
from tests.state.world import chain, key


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


def begin_reclaim(world: LimitedWorld) -> Segment:
    """Store pages until a segment is chosen to be given back; it."""
    while True:
        world.put(chr(next(world.letters)))
        for segment in world.disk.log.segments.values():
            if segment.state is SegmentState.DRAINING:
                return segment


def test_a_segment_of_many_pages_is_given_up_a_few_at_a_time(monkeypatch):
    """All at once they would keep the state from its engines for a tenth of a second and more."""
    monkeypatch.setattr(keeper, "DROPS_MAX", 2)
    monkeypatch.setattr(keeper, "DROPS_A_JOB", 0)
    world = LimitedWorld(segments=6)
    oldest = begin_reclaim(world)
    assert world.table.counts["reclaimed_pages"] == 0, "to choose it is enough for one turn"
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


class Looks:
    """Segments are looked at one run at a time; counts the runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(plans, "STEP_PAGES", 1)
        monkeypatch.setattr(choices, "STEP_PAGES", 1)
        monkeypatch.setattr(choices, "is_pinned", self.is_pinned)

    def is_pinned(self, node: PrefixNode, shard: int) -> bool:
        self.count += 1
        return limits.is_pinned(node, shard)

    def begin(self, world: LimitedWorld) -> SegmentLook:
        """Store pages until a segment of many is being looked at; the look at it."""
        reclaimer = world.disk._reclaimer
        for path in "abcdefg":
            world.put(path)
        while reclaimer._choice is None:
            world.store(world.me, world.other, chr(next(world.letters)))
            while world.jobs(DiskJob) and reclaimer._choice is None:
                world.end_job(world.jobs(DiskJob)[0])
        assert reclaimer._choice[0].pages > 4
        return reclaimer._choice[0]


def pages_of(segment: Segment) -> list[tuple[PrefixTree, PrefixKey]]:
    """The pages of a segment, in order."""
    stretches = segment.pages.stretches
    return [(one.space, one.key(at)) for one in stretches for at in range(one.pages)]


def test_a_segment_is_looked_at_a_few_pages_in_a_turn(monkeypatch):
    """All at once they would keep the state from its engines for some tens of milliseconds."""
    looks = Looks(monkeypatch)
    world = LimitedWorld(segments=6)
    choice = looks.begin(world)
    turns = 0
    while choice.victim.state is SegmentState.SEALED:
        assert world.disk.busy
        before = looks.count
        for _ in range(3):
            world.disk._reclaimer.advance_reclaim(0)  # as ends of jobs do
        world.table.tiers.go_on()
        assert looks.count <= before + 2
        turns += 1

    assert turns > choice.pages / 2
    world.end_all()
    assert choice.victim.number not in world.disk.log.segments


def test_pages_may_leave_and_be_pinned_while_their_segment_is_looked_at(monkeypatch):
    looks = Looks(monkeypatch)
    world = LimitedWorld(segments=6)
    choice = looks.begin(world)
    pages = pages_of(choice.victim)
    assert 0 < looks.count < 4
    for space, left in pages[:2]:
        world.lose(space.nodes[left], 0)
    pinned = pages[2], pages[-1]
    for space, page in pinned:
        world.table.keeping.pin(space, page, 0, "ssd")

    for now_ns in range(1, 20):
        world.disk.advance(now_ns)
        world.end_all()

    assert choice.victim.number not in world.disk.log.segments
    assert all(0 in space.nodes[page].disk for space, page in pinned)


def test_used_pages_may_leave_while_it_is_planned_what_to_copy(monkeypatch):
    looks = Looks(monkeypatch)
    world = LimitedWorld(segments=6)
    choice = looks.begin(world)
    pages = pages_of(choice.victim)
    for space, page in pages:
        world.table.moment.tick += 1
        space.nodes[page].access = world.table.moment.tick
    while looks.count < choice.pages:
        world.table.tiers.go_on()
    for space, page in pages[::2]:
        world.lose(space.nodes[page], 0)

    for now_ns in range(1, 20):
        world.disk.advance(now_ns)
        world.end_all()

    assert choice.victim.number not in world.disk.log.segments
    assert any(page in space.nodes and space.nodes[page].disk for space, page in pages[1::2])


def test_a_look_goes_on_if_pins_end_and_begins_anew_if_limits_change(monkeypatch):
    """Pins may end in each turn; what was not worth it is looked at again after all others."""
    looks = Looks(monkeypatch)
    world = LimitedWorld(segments=6)
    choice = looks.begin(world)

    world.disk.unpinned()
    world.table.tiers.go_on()
    now = world.disk._reclaimer._choice
    assert now is not None
    assert now[0] is choice

    world.disk.limit(world.other, 0, 0)
    world.table.tiers.go_on()
    now = world.disk._reclaimer._choice
    assert now is not None
    assert now[0] is not choice


def begin_copies(world: LimitedWorld, paths: tuple[str, ...]) -> list[DiskCopy]:
    """Store pinned pages, and others until the first copies of the pinned ones begin; these."""
    for path in paths:
        world.put(path)
        world.table.keeping.pin(world.mine, key(path), 0, "ssd")
    while not world.jobs(DiskCopy):
        world.store(world.me, world.other, chr(next(world.letters)))
        while world.jobs(DiskJob) and not world.jobs(DiskCopy):
            world.end_job(world.jobs(DiskJob)[0])
    return copies(world)


def copies(world: DiskWorld) -> list[DiskCopy]:
    """The copies in progress."""
    return [job for job in world.jobs(DiskCopy) if isinstance(job, DiskCopy)]


def syncs(world: DiskWorld) -> bool:
    """Whether the sync of the copies is in progress."""
    return any(world.disk._reclaimer.is_mine(job.job) for job in world.jobs(DiskSync))


def test_pages_are_copied_a_few_at_a_time_and_parents_first(monkeypatch):
    """All at once they would keep the state from its engines, and stand before their loads."""
    monkeypatch.setattr(keeper, "COPIES_MAX", 2)
    world = LimitedWorld(segments=6)
    paths = ("a", "ab", "abc", "abcd", "abcde")
    begin_copies(world, paths)

    copied = []
    while under_way := copies(world):
        assert len(under_way) <= 2
        assert not syncs(world), "it would not cover the copies that have not begun"
        copied.append(under_way[0].page.key)
        world.end_job(under_way[0])

    assert copied == [key(path) for path in paths]
    assert syncs(world)
    world.end_all()
    assert world.there(*paths) == [True] * 5


def test_pages_are_copied_a_few_bytes_at_a_time(monkeypatch):
    """Of pages of some MiB few are enough to keep a load waiting."""
    monkeypatch.setattr(keeper, "COPY_BYTES_MAX", RECORD)
    world = LimitedWorld(segments=6)
    assert len(begin_copies(world, ("a", "b", "c"))) == 1

    world.end_job(copies(world)[0])

    assert len(copies(world)) == 1


def test_a_turn_looks_at_a_few_of_the_pages_to_copy(monkeypatch):
    monkeypatch.setattr(keeper, "COPIES_A_JOB", 2)
    monkeypatch.setattr(keeper, "COPIES_LOOKS", 0)
    world = LimitedWorld(segments=6)
    assert len(begin_copies(world, ("a", "b", "c", "d", "e"))) == 2


def test_a_page_that_leaves_before_its_copy_begins_is_not_copied(monkeypatch):
    monkeypatch.setattr(keeper, "COPIES_MAX", 1)
    world = LimitedWorld(segments=6)
    (first,) = begin_copies(world, ("a", "b", "c"))
    left, last = [path for path in ("a", "b", "c") if key(path) != first.page.key]
    world.lose(world.node(left), 0)

    world.end_job(first)
    (second,) = copies(world)
    assert second.page.key == key(last)
    world.end_all()

    assert world.there(left, last) == [False, True]
    assert first.source.segment not in world.disk.log.segments


def test_copies_that_all_fail_do_not_end_the_reclaim(monkeypatch):
    """No job ends any more, so the others begin with the next tick."""
    monkeypatch.setattr(keeper, "COPIES_MAX", 2)
    world = LimitedWorld(segments=6)
    paths = ("a", "b", "c", "d")
    failing = begin_copies(world, paths)
    for job in failing:
        world.end_job(job, IO_ERROR)
    assert not copies(world)

    world.disk.advance(1)
    assert {job.page.key for job in copies(world)} == {
        key(path) for path in paths if key(path) not in [job.page.key for job in failing]
    }
    world.end_all()

    assert sum(world.there(*paths)) == 2
    assert failing[0].source.segment not in world.disk.log.segments


def test_a_page_after_one_that_could_not_be_copied_is_not_copied(monkeypatch):
    monkeypatch.setattr(keeper, "COPIES_MAX", 1)
    world = LimitedWorld(segments=6)
    (first,) = begin_copies(world, ("a", "ab", "z"))
    while first.page.key != key("a"):
        world.end_job(first)
        (first,) = copies(world)

    world.end_job(first, IO_ERROR)
    world.disk.advance(1)

    assert key("ab") not in [job.page.key for job in copies(world)]
    world.end_all()
    assert world.there("a", "ab", "z") == [False, False, True]
    assert first.source.segment not in world.disk.log.segments


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


def test_one_message_that_keeps_many_pages_is_one_write_and_gives_up_few(monkeypatch):
    """Each page would begin a write of its own, and give up as many pages as a job does."""
    monkeypatch.setattr(keeper, "DROPS_A_JOB", 0)
    world = LimitedWorld(write="back", extents=20, segments=8)
    world.table.keeping.conversations.disk_budget_bytes = 100 * RECORD
    while not any(one.state is SegmentState.DRAINING for one in world.disk.log.segments.values()):
        path = chr(next(world.letters)) * 6
        world.store(world.me, world.mine, path)
        world.persist(path)
        world.end_all()
    path = "kept!"
    world.store(world.me, world.mine, path)
    counts, before = world.table.counts, world.table.counts["reclaimed_pages"]
    monkeypatch.setattr(keeper, "DROPS_A_JOB", 2)

    assert world.table.keeping.keep(world.mine, "chat", chain(path), 1 << 50, 0) == (5, "")

    assert len(world.disk.writes) == 1
    assert counts["reclaimed_pages"] - before == 2
    world.end_all()
    assert all(world.on_disk(path))


def end_all(world: DiskWorld, unsyncable: int, needed: int = 0) -> None:
    """End all jobs; one file cannot be synced, and another one is needed as long as it is there."""
    segments = world.disk.log.segments
    while jobs := world.jobs(DiskJob):
        for job in jobs:
            there = unsyncable in segments
            seals = isinstance(job, DiskSeal) and job.segment == unsyncable
            if there and (seals or isinstance(job, DiskSync)):
                world.end_job(job, IO_ERROR, (unsyncable,))
            else:
                world.end_job(job)
            assert not needed or unsyncable not in segments or needed in segments


def test_a_segment_that_cannot_be_synced_is_given_up_and_then_puts_are_durable_again():
    """It fails every sync for as long as it is there, so its own deletion cannot wait for one."""
    world = DiskWorld()
    world.store(world.me, world.mine, "a")
    durable = world.persist("a")
    end_all(world, 1)
    assert durable.error is IO_ERROR
    assert world.disk.troubled

    for now_ns in (1000, 2000):
        world.disk.advance(now_ns)
        end_all(world, 1)

    assert 1 not in world.disk.log.segments
    assert not world.disk.troubled
    world.store(world.me, world.mine, "b")
    durable = world.persist("b")
    end_all(world, 1)
    assert durable.ended
    assert durable.error is None


def test_the_segment_whose_seal_could_not_sync_it_is_given_up_and_not_the_one_that_is_open():
    world = LimitedWorld()
    while not world.jobs(DiskSeal):
        world.store(world.me, world.other, chr(next(world.letters)))
        for job in [job for job in world.jobs(DiskJob) if not isinstance(job, DiskSeal)]:
            world.end_job(job)
    (seal,) = world.jobs(DiskSeal)
    assert isinstance(seal, DiskSeal)

    world.end_job(seal, IO_ERROR, (seal.segment,))
    for now_ns in (1000, 2000):
        world.disk.advance(now_ns)
        end_all(world, seal.segment)

    assert seal.segment not in world.disk.log.segments
    assert not any(one.failed for one in world.disk.log.segments.values())
    assert any(one.state is SegmentState.OPEN for one in world.disk.log.segments.values())


def test_a_segment_stays_whose_pages_were_copied_to_one_that_cannot_be_synced():
    """The copies may be lost in a power cut, so they are copied again before the originals go."""
    world = LimitedWorld()
    world.put("a")
    world.flood(3)
    world.table.keeping.pin(world.mine, key("a"), 0, "ssd")
    while not world.jobs(DiskCopy):
        world.store(world.me, world.other, chr(next(world.letters)))
        while world.jobs(DiskJob) and not world.jobs(DiskCopy):
            world.end_job(world.jobs(DiskJob)[0])
    (copy,) = world.jobs(DiskCopy)
    assert isinstance(copy, DiskCopy)
    source, target = copy.source.segment, copy.place.segment
    world.end_job(copy)
    assert world.node("a").place(0).segment == target

    for now_ns in range(1000, 5000, 1000):
        end_all(world, target, source)
        world.disk.advance(now_ns)

    assert source not in world.disk.log.segments
    assert target not in world.disk.log.segments
    assert world.node("a").place(0).segment not in (source, target), "it was copied twice"
