"""What a start finds, and what it leaves alone."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.page import KEY_BYTES
from kvstore.state.tree.places import Place, record_bytes
from kvstore.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from kvstore.testing.tiers import SHARD, SPACE, TierDriver, laid_out
from kvstore.tier.directories import Directory
from kvstore.tier.record import SEGMENT_MAX, segment_name
from kvstore.tier.segments import DESCRIPTORS_MAX
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, open_log, pages, recovered


def test_an_empty_log_is_recovered_empty(disk):
    found = open_log(disk).recover()

    assert (found.segments, found.pairs, found.untouched) == ([], [], [])
    assert (found.next_segment, found.next_sequence) == (0, 1)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_start_finds_keys_parents_digests_and_places(disk, sealed):
    log = recovered(disk)
    driver = TierDriver(log)
    placed = laid_out(7, pages(5, 5000))
    driver.write(*placed)
    assert driver.seal(7).error is None if sealed else driver.sync().error is None
    log.close()

    found = open_log(disk).recover()

    (segment,) = found.segments
    assert (segment.number, segment.sealed, segment.records) == (7, sealed, 5)
    assert segment.size_bytes == SEGMENT_BYTES
    assert segment.end == 5 * record_bytes(5000)
    records = [page.record for _, page in placed]
    assert segment.entries["key"].tolist() == [record.key for record in records]
    assert segment.entries["digest"].tolist() == [record.digest for record in records]
    parents = [record.parent or bytes(KEY_BYTES) for record in records]
    assert segment.entries["parent"].tolist() == parents
    assert segment.entries["offset"].tolist() == [place.offset for place, _ in placed]
    assert set(segment.entries["payload_bytes"].tolist()) == {5000}
    assert found.pairs == [(SPACE, SHARD)]
    assert (found.next_segment, found.next_sequence) == (8, 6)


@pytest.mark.parametrize("seed", range(10))
def test_a_footer_whose_seal_completed_survives_a_power_cut(seed):
    disk = SimulatedDisk()
    driver = TierDriver(recovered(disk))
    driver.write(*laid_out(0, pages(3)))
    assert driver.seal(0).error is None
    disk.cut_power(Random(seed))

    (segment,) = open_log(disk).recover().segments

    assert segment.sealed
    assert len(segment.entries) == 3


def test_an_unsealed_segment_is_written_on_and_sealed_after_a_start(disk):
    first, second = pages(2)
    log = recovered(disk)
    TierDriver(log).write((Place(0, 0), first))
    log.close()
    log = open_log(disk)
    end = log.recover().segments[0].end
    driver = TierDriver(log)
    driver.write((Place(0, end), second))
    assert driver.seal(0).error is None
    log.close()

    (segment,) = open_log(disk).recover().segments

    assert segment.sealed
    assert segment.entries["key"].tolist() == [first.record.key, second.record.key]
    assert segment.entries["sequence"].tolist() == [1, 2]


def test_a_torn_record_between_whole_ones_is_stepped_over(disk):
    log = recovered(disk)
    placed = laid_out(0, pages(3, 12_288))
    TierDriver(log).write(*placed)
    log.close()
    at = placed[1][0].offset + 4096 + 5000
    disk.change(HOME / "0" / segment_name(0), lambda c: c.__setitem__(at, c[at] ^ 1))

    (segment,) = open_log(disk).recover().segments

    assert segment.entries["offset"].tolist() == [placed[0][0].offset, placed[2][0].offset]


def test_a_segment_of_another_log_is_left_as_it_is(disk):
    log = recovered(disk, paths=1)
    TierDriver(log).write((Place(3, 0), pages(1)[0]))
    TierDriver(log).seal(3)
    log.close()
    stranger = SimulatedDisk(seed=5)
    log = recovered(stranger)
    TierDriver(log).write((Place(1, 0), pages(1)[0]))
    log.close()
    path = HOME / "0" / segment_name(9)
    for name in (3, 1):
        source = disk if name == 3 else stranger
        content = source.read_file(HOME / "0" / segment_name(name))
        victim = SimulatedDisk(seed=9)
        recovered(victim).close()
        victim.write_file(path, content)

        log = open_log(victim)
        found = log.recover()

        assert found.segments == []
        assert str(path) in found.untouched[0]
        assert "belongs to log" in found.untouched[0]
        assert found.next_segment == 10
        assert log.stats().directories[0].used_bytes == SEGMENT_BYTES
        assert TierDriver(log).drop(9).error is None
        assert victim.read_file(path) == content
        log.close()


@pytest.mark.parametrize("number", [2**64 - 1, 2**60])
def test_a_name_with_a_number_that_no_log_reaches_is_no_segment(disk, number):
    """The next number behind it would fit neither a name nor a header."""
    recovered(disk).close()
    disk.write_file(HOME / "0" / segment_name(number), b"")

    log = open_log(disk)
    found = log.recover()

    assert found.next_segment == 0
    ((_, page),) = laid_out(0, pages(1))
    (ended,) = TierDriver(log).write((Place(found.next_segment, 0), page))
    assert ended.error is None


def test_a_number_that_no_log_comes_to_ends_the_start_and_is_named(disk):
    """The next one would be the last that has a name, and the start after it would not see it."""
    recovered(disk).close()
    disk.write_file(HOME / "0" / segment_name(2**60 - 1), b"")

    log = open_log(disk)
    with pytest.raises(ConfigError, match=r"/log/0/segment-0fffffffffffffff.*move this file away"):
        log.recover()
    log.close()


@pytest.mark.parametrize("other", ["foreign", "shorter", "unsealed"])
def test_a_file_with_a_segments_number_does_not_hide_the_segment(disk, other):
    log = recovered(disk, paths=2)
    driver = TierDriver(log)
    driver.write(*laid_out(7, pages(3)))
    unsealed = disk.read_file(of(disk, 7))
    assert driver.seal(7).error is None
    log.close()
    ours = of(disk, 7)
    elsewhere = next(HOME / at / ours.name for at in "01" if HOME / at != ours.parent)
    stranger = SimulatedDisk(seed=5)
    log = recovered(stranger, paths=1)
    TierDriver(log).write(*laid_out(7, pages(1)))
    log.close()
    content = {
        "foreign": stranger.read_file(HOME / "0" / ours.name),
        "shorter": disk.read_file(ours)[:8192],
        "unsealed": unsealed,
    }[other]
    disk.write_file(elsewhere, content)

    found = open_log(disk, paths=2).recover()

    (segment,) = found.segments
    assert (segment.number, segment.sealed, segment.records) == (7, True, 3)
    (left,) = found.untouched
    assert left.startswith(str(elsewhere))
    assert disk.read_file(elsewhere) == content


def of(disk: SimulatedDisk, number: int) -> Path:
    """Where a segment is."""
    name = segment_name(number)
    return next(HOME / at / name for at in "01" if name in disk.names(HOME / at))


def test_a_file_that_is_larger_than_any_segment_is_left_as_it_is(tmp_path):
    """To look for records in it could take years."""
    directory = Directory(tmp_path, 64 * SEGMENT_BYTES)
    log = SSDLog("node", [directory], SEGMENT_BYTES, threads=0)
    log.recover()
    log.close()
    with (tmp_path / segment_name(3)).open("wb") as file:
        file.truncate(1 << 43)

    log = SSDLog("node", [directory], SEGMENT_BYTES)
    found = log.recover()
    log.close()

    assert "more than any segment" in found.untouched[0]
    assert found.next_segment == 4


def test_a_segment_that_cannot_be_read_is_reported_and_the_rest_is_found(disk):
    log = recovered(disk)
    driver = TierDriver(log)
    for number, page in enumerate(pages(2)):
        driver.write((Place(number, 0), page))
        driver.seal(number)
    log.close()
    faulty = FaultyDisk(disk)
    faulty.arm("read", DiskFault.IO_ERROR)

    found = open_log(faulty).recover()

    assert [segment.number for segment in found.segments] == [0], "the newest is read first"
    assert segment_name(1) in found.untouched[0]


def test_what_a_start_cannot_read_is_older_than_what_is_written_after_it(disk):
    """Else what was taken out meanwhile came back once the file could be read again."""
    stays, goes = pages(2)
    log = recovered(disk)
    driver = TierDriver(log)
    for number, page in enumerate([stays, goes]):
        driver.write((Place(number, 0), page))
        driver.seal(number)
    log.close()
    log = open_log(_unreadable(disk))
    assert segment_name(1) in log.recover().untouched[0]
    driver = TierDriver(log)
    assert driver.tombstone(Place(2, 0), goes.record.key).error is None
    driver.seal(2)
    log.close()

    found = open_log(disk).recover()

    assert not found.untouched
    left = [key for one in found.segments for key in one.entries["key"].tolist()]
    assert left == [stays.record.key]


def test_a_page_written_after_a_start_that_could_not_read_its_tombstone_stands(disk):
    (page,) = pages(1)
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write((Place(0, 0), page))
    driver.seal(0)
    assert driver.tombstone(Place(1, 0), page.record.key).error is None
    driver.seal(1)
    log.close()
    log = open_log(_unreadable(disk))
    log.recover()
    driver = TierDriver(log)
    driver.write((Place(2, 0), page))
    driver.seal(2)
    log.close()

    found = open_log(disk).recover()

    assert [one.number for one in found.segments if len(one.entries)] == [2]


def test_what_is_written_beside_the_highest_number_that_cannot_be_read_is_found(disk):
    recovered(disk).close()
    disk.write_file(HOME / "0" / segment_name(SEGMENT_MAX - 1), bytes(4096))
    (page,) = pages(1)
    log = open_log(_unreadable(disk))
    found = log.recover()
    assert segment_name(SEGMENT_MAX - 1) in found.untouched[0]
    driver = TierDriver(log)
    assert driver.write((Place(found.next_segment, 0), page))[0].error is None
    log.close()

    segments = {one.number: one for one in open_log(disk).recover().segments}

    assert segments[found.next_segment].entries["key"].tolist() == [page.record.key]


def _unreadable(disk: SimulatedDisk) -> FaultyDisk:
    """The disk, but what is read of it first cannot be read."""
    faulty = FaultyDisk(disk)
    faulty.arm("read", DiskFault.IO_ERROR)
    return faulty


def test_without_direct_io_the_log_says_so(caplog):
    disk = SimulatedDisk(direct_io=False)

    log = recovered(disk)

    assert "not support direct I/O" in caplog.text
    assert log.stats().directories[0].direct_io is False
    assert TierDriver(log).write((Place(0, 0), pages(1)[0]))[0].error is None
    log.close()


def test_more_segments_than_descriptors_can_be_read(disk):
    log = recovered(disk, segment_bytes=128 << 10, capacity_bytes=1 << 30)
    driver = TierDriver(log)
    (page,) = pages(1)
    count = DESCRIPTORS_MAX + 20
    for number in range(count):
        driver.write((Place(number, 0), page))
        driver.sync()

    assert disk.open_files() == DESCRIPTORS_MAX + 1, "and the lock of the directory"
    for number in range(count):
        assert driver.read(Place(number, 0), page)[0].error is None
    log.close()


def test_a_real_disk_gives_back_what_an_earlier_process_had_written(tmp_path: Path, real_log):
    log = real_log(threads=3)
    driver = TierDriver(log)
    placed = laid_out(0, pages(6, 20_000))
    assert [one.error for one in driver.write(*placed)] == [None] * 6
    assert driver.sync().error is None
    driver.write(*laid_out(1, pages(3)))
    driver.seal(1)
    log.close()

    log = real_log(threads=2)
    with pytest.raises(AssertionError, match="once"):
        log.recover()
    log.close()
    log = SSDLog("node", [Directory(tmp_path / "log", 1 << 30)], SEGMENT_BYTES, threads=2)
    found = log.recover()

    assert [(one.sealed, len(one.entries)) for one in found.segments] == [(False, 6), (True, 3)]
    driver = TierDriver(log)
    for place, page in placed:
        ended, target = driver.read(place, page)
        assert ended.error is None
        assert target.content == page.content
        assert ended.tokens == page.record.tokens
    assert np.all(found.segments[0].entries["sequence"] == np.arange(1, 7))
    log.close()
