"""Goal: a turn that looks at a segment, or gives up much of one, begins no waiting put besides."""

import pytest

from bench.node_alone import Clock, Engine, LoneNode, TakesAll
from kvstore.protocol import wire
from kvstore.state.disk.jobs import DiskDrop
from kvstore.state.tree.actions import PageStatus

PAGES = 512
PROMPT_PAGES = 32


class Holding(TakesAll):
    """An SSD tier that ends every job but the deletion of a segment, which it holds."""

    held: DiskDrop | None = None

    def flush(self) -> None:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        for job in self.pages.jobs:
            if isinstance(job, DiskDrop):
                self.held = job
        self.pages.jobs[:] = [job for job in self.pages.jobs if job is not self.held]
        super().flush()


class Full:
    """A node with a put that waits, because its disk is full until a segment is deleted."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.lone = LoneNode(PAGES, "lru", self.clock, at_once=False, ssd_pages=8 * PAGES)
        self.node, disk = self.lone.desk.node, self.lone.desk.disk
        assert isinstance(disk, TakesAll)
        disk.__class__ = Holding
        assert isinstance(disk, Holding)
        self.disk = disk
        self.engine = Engine(self.lone, 1)
        self.begun = self.begin()
        while self.disk.held is None or not self.node.waiting.count:
            if not self.node.waiting.count:
                self.end(self.begun)
                self.begun = self.begin()
            for _ in range(50):
                self.lone.tick()

    def begin(self) -> wire.BeginPut:
        """Begin to put a prompt."""
        self.clock.skip(1)
        begun, _ = self.engine.put_messages(self.lone.keys(PROMPT_PAGES))
        self.engine.say(begun)
        return begun

    def end(self, begun: wire.BeginPut) -> None:
        """Commit what was granted."""
        granted = self.engine.answers.popleft()
        assert isinstance(granted, wire.PutGranted)
        pages = granted.statuses.count(PageStatus.GRANTED)
        self.engine.ask(wire.CommitPut(1, begun.put, bytes(16 * pages), 0))

    def count(self, name: str) -> int:
        """What was counted."""
        return self.lone.counts().get(name, 0)


@pytest.fixture
def full() -> Full:
    return Full()


def delete(full: Full) -> None:
    """The held segment is deleted, and the next one is looked at."""
    assert full.disk.held is not None
    before = full.count("reclaimed_pages")
    full.node.disk_completed(full.disk.held.job, None, full.clock())
    assert full.count("reclaimed_pages") > before


def test_a_put_goes_on_in_the_turn_after_the_one_that_looks_at_a_segment(full: Full):
    delete(full)
    assert full.disk.stats().writes == 0, "it has room now"
    assert full.node.unfinished

    full.node.go_on(full.clock())

    assert full.disk.stats().writes > 0


def test_a_put_goes_on_in_the_turn_after_the_one_that_gives_up_much_of_a_segment(full: Full):
    delete(full)
    full.node.go_on(full.clock())
    before, tried = full.count("reclaimed_pages"), full.count("disk_full_pages")
    full.node.advance(full.clock())
    assert full.count("reclaimed_pages") > before
    assert full.count("disk_full_pages") == tried
    assert full.node.unfinished

    full.node.go_on(full.clock())

    assert full.count("disk_full_pages") > tried


def test_no_request_waits_for_two_turns_that_look_at_segments(full: Full):
    delete(full)
    reclaimer = full.disk.pages._reclaimer
    reclaimer._took_long = True  # as if this turn looked at a segment that must be kept

    full.node.go_on(full.clock())

    assert full.disk.stats().writes > 0


def test_a_turn_that_took_long_is_told_once(full: Full):
    full.disk.pages._reclaimer._took_long = True

    assert full.disk.pages.took_long()
    assert not full.disk.pages.took_long()


def test_a_put_is_refused_at_its_deadline_though_that_turn_gives_up_much_of_a_segment(full: Full):
    delete(full)
    full.node.go_on(full.clock())
    full.clock.skip(full.begun.wait_ms / 1000)

    full.node.advance(full.clock())
    full.lone.desk.flush()
    full.lone.go_on()

    (answer,) = full.engine.answers
    assert isinstance(answer, wire.PutGranted)
    assert set(answer.statuses) == {PageStatus.NO_ROOM}
