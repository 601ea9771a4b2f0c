"""Goal: a directory that one start does not see is missed, and loses nothing when it returns."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvstore.state.tree.places import Place
from kvstore.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from kvstore.testing.tiers import PageInMemory, TierDriver, laid_out
from kvstore.tier.directories import Directory
from kvstore.tier.record import IDENTITY_NAME, SEQUENCE_MAX, segment_name
from kvstore.tier.recovery import GAP_SEGMENTS, RecoveredLog
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, pages


@contextmanager
def started(disk: SimulatedDisk | FaultyDisk, names: str) -> Iterator["Started"]:
    places = [Directory(HOME / name, 64 * SEGMENT_BYTES) for name in names]
    log = SSDLog("node", places, SEGMENT_BYTES, threads=0, disk=disk)
    yield Started(log, log.recover())
    log.close()


class Started:
    """A log after its start."""

    def __init__(self, log: SSDLog, found: RecoveredLog) -> None:
        self.driver, self.found = TierDriver(log), found
        self.next = found.next_segment

    def put(self, *some: PageInMemory) -> list[int]:
        """Write durable pages, each to a new segment; returns the segments' numbers."""
        first = self.next
        for page in some:
            assert self.driver.write((Place(self.next, 0), page))[0].error is None
            self.next += 1
        assert self.driver.sync().error is None
        return list(range(first, self.next))

    def evict(self, page: PageInMemory) -> None:
        assert self.driver.tombstone(Place(self.next, 0), page.record.key).error is None
        assert self.driver.sync().error is None
        self.next += 1

    def holds(self, some: Sequence[PageInMemory]) -> list[bool]:
        keys = {key for one in self.found.segments for key in one.entries["key"].tolist()}
        return [page.record.key in keys for page in some]


def errors(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]


def identity(disk: SimulatedDisk, name: str) -> dict[str, object]:
    return json.loads(disk.read_file(HOME / name / IDENTITY_NAME))


def test_what_is_durable_and_what_is_removed_stays_so_when_a_directory_returns(disk, caplog):
    before, meanwhile = pages(5), pages(3, 8192)
    with started(disk, "ab") as both:
        both.put(before[0])
        assert not any(one.error for one in both.driver.write(*laid_out(1, before[1:])))
        assert [both.driver.seal(number).error for number in (0, 1)] == [None, None]
    assert not errors(caplog)

    with started(disk, "a") as alone:
        assert alone.holds(before) == [True, False, False, False, False]
        for page in reversed(before):  # else each number is high enough by chance
            alone.evict(page)
        alone.put(*meanwhile)

    (said,) = errors(caplog)
    assert "ssd.directories: /log/b belongs to this log and is missing" in said
    with started(disk, "ab") as both:
        assert not both.found.untouched
        assert both.holds(meanwhile) == [True] * 3
        assert both.holds(before) == [False] * 5, "they were removed"
    assert len(errors(caplog)) == 1


def test_numbers_are_left_out_once_and_not_at_every_start(disk):
    with started(disk, "ab") as both:
        both.put(*pages(2))
    with started(disk, "a") as alone:
        first = alone.next
        assert first >= GAP_SEGMENTS
    with started(disk, "a") as alone:
        assert alone.next == first, "also if nothing was written"
    with started(disk, "ab") as both:
        assert both.next == first
    with started(disk, "b") as alone:
        assert first + GAP_SEGMENTS <= alone.next < first + 4 * GAP_SEGMENTS


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_each_part_of_a_log_may_be_started_without_the_other(disk, order):
    some = pages(10)
    with started(disk, "ab") as both:
        numbers = both.put(*some[:2])
    for name, few in zip(order, (some[2:5], some[5:8]), strict=True):
        with started(disk, name) as alone:
            numbers += alone.put(*few)
    with started(disk, "ba") as both:
        numbers += both.put(*some[8:])
    with started(disk, "ab") as both:
        assert both.holds(some) == [True] * 10
        assert not both.found.untouched
        assert len(set(numbers)) == len(numbers)


def test_of_three_directories_one_tells_another_what_the_third_has_missed(disk):
    some = pages(2)
    with started(disk, "bac"):
        pass
    with started(disk, "cb") as two:
        (taken,) = two.put(some[0])
    assert segment_name(taken) in disk.names(HOME / "c")
    with started(disk, "ab") as two:
        (other,) = two.put(some[1])
    assert other > taken, "no segment in b says so, but its identity"
    with started(disk, "abc") as every:
        assert every.holds(some) == [True, True]


def test_an_empty_mount_point_is_a_new_directory_and_the_old_one_is_missed(disk, caplog):
    some = pages(6)
    with started(disk, "ab") as both:
        both.put(*some[:4])
    mounted = disk._directories.pop(HOME / "b")

    with started(disk, "ab") as both:
        both.put(*some[4:])

    assert [one for one in errors(caplog) if "/log/b belongs to this log and is missing" in one]
    below = disk._directories[HOME / "b"]
    disk._directories[HOME / "b"] = mounted
    with started(disk, "ab") as both:
        assert both.holds(some[:4]) == [True] * 4
    disk._directories[HOME / "c"] = below
    with started(disk, "abc") as every:
        assert every.holds(some) == [True] * 6
        assert not every.found.untouched


def test_identities_of_an_earlier_version_are_read_and_miss_nothing(disk, caplog):
    def outdated(name: str) -> None:
        fields = identity(disk, name)
        for added in ("id", "directories", "next_segment"):
            del fields[added]
        disk.write_file(HOME / name / IDENTITY_NAME, json.dumps(fields).encode())

    with started(disk, "ab") as both:
        both.put(*pages(2))
    outdated("a")
    outdated("b")

    with started(disk, "a") as alone:
        assert alone.next < GAP_SEGMENTS, "as before"
    assert list(identity(disk, "a")["directories"].values()) == ["/log/a"]
    with started(disk, "ab") as both:
        assert both.holds(pages(2)) == [True, True]
    assert not errors(caplog)
    assert identity(disk, "a")["directories"] == identity(disk, "b")["directories"]
    with started(disk, "b") as alone:
        assert alone.next >= GAP_SEGMENTS
    assert "/log/a" in errors(caplog)[0]


def test_an_identity_that_cannot_be_updated_ends_no_start_and_is_tried_again(disk, caplog):
    with started(disk, "ab") as both:
        both.put(*pages(2))
    faulty = FaultyDisk(disk)
    for _ in range(2):
        caplog.clear()
        faulty.arm("write_file", DiskFault.FULL)
        with started(faulty, "a") as alone:
            assert alone.next >= GAP_SEGMENTS
        assert "/log/a: kvstore-log.json cannot be updated: No space left" in caplog.text
        assert "/log/b" in errors(caplog)[0], "the next start misses it too"


def test_directories_with_copies_of_one_identity_are_told_apart(disk, caplog):
    with started(disk, "ab") as both:
        both.put(*pages(2))
    disk.write_file(HOME / "b" / IDENTITY_NAME, disk.read_file(HOME / "a" / IDENTITY_NAME))
    with started(disk, "ab"):
        pass
    caplog.clear()
    assert identity(disk, "a")["id"] != identity(disk, "b")["id"]
    with started(disk, "a"):
        assert "/log/b" in errors(caplog)[0]


def test_no_gap_is_left_where_sequence_numbers_could_not_follow(disk, caplog):
    last = SEQUENCE_MAX // 2 >> 32
    with started(disk, "ab"):
        pass
    for name in "ab":
        fields = identity(disk, name) | {"next_segment": last - GAP_SEGMENTS}
        disk.write_file(HOME / name / IDENTITY_NAME, json.dumps(fields).encode())
    for expected in (last, last):
        with started(disk, "a") as alone:
            assert alone.next == expected
            assert alone.found.next_sequence == SEQUENCE_MAX // 2
        with started(disk, "ab"):
            pass
    assert len(errors(caplog)) == 2
