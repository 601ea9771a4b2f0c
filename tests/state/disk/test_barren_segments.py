"""Goal: segments that are not worth reclaiming are looked at one at a time, and not in vain."""

from collections import Counter
from typing import Any

import pytest

from kvstore.state.disk import choices, plans
from kvstore.state.disk.jobs import DiskJob
from kvstore.state.disk.limits import DiskLimits
from kvstore.state.disk.log import Segment
from tests.state.disk.disk_world import DiskWorld
from tests.state.disk.test_disk_limits import LimitedWorld


class Looks:
    """Counts the segments of which is asked what must be kept, in the present call and of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.of: Counter[int] = Counter()
        kept = DiskLimits.kept

        def counted(limits: DiskLimits, segment: Segment) -> Any:
            self.now += 1
            self.of[segment.number] += 1
            return kept(limits, segment)

        monkeypatch.setattr(DiskLimits, "kept", counted)


def reserved_world() -> LimitedWorld:
    """Half of the log is reserved for pages that are there, and the rest is nearly full."""
    world = LimitedWorld(segments=14)
    for _ in range(30):
        world.put(chr(next(world.letters)), world.mine)
    world.disk.limit(world.mine, 0, world.mine.disk_bytes)
    return world


def test_one_call_looks_at_one_segment(monkeypatch: pytest.MonkeyPatch):
    world = reserved_world()
    looks = Looks(monkeypatch)
    choose = type(world.disk._reclaimer)._choose

    def alone(*arguments: object) -> bool:
        looks.now = 0
        more = choose(*arguments)
        assert looks.now <= 1
        return more

    monkeypatch.setattr(type(world.disk._reclaimer), "_choose", alone)
    world.flood(60)

    assert len(looks.of) > 3, "several were not worth it"
    assert world.table.counts["reclaimed_pages"] > 0, "another one was found"
    assert world.mine.disk_bytes == 30 * world.mine.shards[0].record_bytes


def test_a_seal_looks_again_only_at_segments_of_spaces_that_have_grown(
    monkeypatch: pytest.MonkeyPatch,
):
    world = reserved_world()
    world.flood(60)
    reserved = {node.place(0).segment for node in world.mine.nodes.values()}
    barren = reserved & world.disk._reclaimer._barren.keys()
    assert len(barren) > 2
    looks = Looks(monkeypatch)

    world.flood(40)
    assert not barren & looks.of.keys(), "their space has not grown"

    for _ in range(20):
        world.put(chr(next(world.letters)), world.mine)
    world.flood(40)
    assert barren & looks.of.keys()


def test_the_choice_goes_on_without_a_job_or_a_tick():
    world = reserved_world()
    while not world.disk._reclaimer.choosing:
        world.store(world.me, world.other, chr(next(world.letters)))
        for job in world.jobs(DiskJob):
            del world.open[job.job]
            world.table.residents.disk.completed(job.job, None)

    assert world.disk.busy, "a page waits for its place rather than be dropped"
    turns = 0
    world.disk.go_on()
    while world.table.residents.unfinished:
        world.disk.go_on()
        turns += 1
        assert turns < 20

    assert not world.disk._reclaimer.choosing


def test_a_segment_is_chosen_although_pins_end_in_each_turn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plans, "STEP_PAGES", 1)
    monkeypatch.setattr(choices, "STEP_PAGES", 1)
    world = DiskWorld(segments=8, segment_bytes=1 << 18, extents=8)
    reclaimed = world.disk.log.stats().reclaimed_segments
    for _ in range(600):
        world.store(world.me, world.mine, chr(next(world.letters)))
        for job in world.jobs(DiskJob):
            world.end_job(job)
        world.disk.unpinned()
        world.disk.go_on()
    assert world.disk.log.stats().reclaimed_segments > reclaimed
    assert world.table.counts["disk_full_pages"] == 0
