"""Every failure of a disk ends in an error with a code, and never in wrong bytes."""

import errno
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvstore.protocol.errors import CapacityError, PageCorrupt, TierUnavailable
from kvstore.state.disk.jobs import DiskCopy, DiskSeal, DiskSync, DiskWrite
from kvstore.state.tree.places import HEADER_BYTES, Place, record_bytes
from kvstore.testing.disk import DiskFault, FaultyDisk, SimulatedDisk
from kvstore.testing.tiers import SLOT, PageInMemory, TierDriver, laid_out
from kvstore.tier import vectored
from kvstore.tier.directories import Directory
from kvstore.tier.record import segment_name
from kvstore.tier.ssd import JOBS_MAX, SSDLog
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, recovered


@pytest.fixture
def faulty() -> FaultyDisk:
    return FaultyDisk(SimulatedDisk(), seed=7)


def pages(count: int, size: int = 4096, seed: int = 0) -> list[PageInMemory]:
    random = Random(f"faults {seed}")
    return [PageInMemory.random(random, size) for _ in range(count)]


def assert_reads_back(driver: TierDriver, place: Place, page: PageInMemory) -> None:
    ended, target = driver.read(place, page)
    assert ended.error is None, ended.error
    assert target.content == page.content


@pytest.mark.parametrize(
    ("call", "fault", "kind"),
    [
        ("create", DiskFault.FULL, CapacityError),
        ("create", DiskFault.READ_ONLY, TierUnavailable),
        ("create", DiskFault.IO_ERROR, TierUnavailable),
        ("write", DiskFault.IO_ERROR, TierUnavailable),
        ("write", DiskFault.FULL, CapacityError),
        ("write", DiskFault.READ_ONLY, TierUnavailable),
    ],
)
def test_a_write_that_the_disk_refuses_is_an_error_and_can_be_tried_again(
    faulty, call, fault, kind
):
    log = recovered(faulty)
    driver = TierDriver(log)
    ((place, page),) = laid_out(0, pages(1))
    faulty.arm(call, fault)

    (ended,) = driver.write((place, page))

    assert isinstance(ended.error, kind)
    assert str(HOME) in str(ended.error), "the message names the directory"
    assert log.stats().errors == {kind.code: 1}
    assert driver.write((place, page))[0].error is None
    assert_reads_back(driver, place, page)


def test_of_records_written_together_only_those_fail_that_the_disk_refuses(faulty):
    driver = TierDriver(recovered(faulty))
    placed = laid_out(0, pages(3))
    faulty.arm("write", DiskFault.IO_ERROR, times=2)  # the three together, then the first alone

    ended = driver.write(*placed)

    assert [type(one.error) for one in ended] == [TierUnavailable, type(None), type(None)]
    for place, page in placed[1:]:
        assert_reads_back(driver, place, page)


def test_a_hole_that_a_failed_write_left_hides_no_record_behind_it(faulty, disk):
    faulty = FaultyDisk(disk)
    driver = TierDriver(recovered(faulty))
    placed = laid_out(0, pages(3))
    faulty.arm("write", DiskFault.IO_ERROR, after=1)
    ended = [driver.write(one)[0] for one in placed]
    assert [one.error is None for one in ended] == [True, False, True]
    assert driver.sync().error is None
    disk.cut_power(Random(1))

    log = recovered_with(disk)

    assert log.keys == {placed[0][1].record.key, placed[2][1].record.key}


class recovered_with:  # noqa: N801
    """What a start finds: the keys, and the log."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.log = SSDLog("node", [Directory(HOME / "0", 1 << 30)], SEGMENT_BYTES,
                          threads=0, disk=disk)  # fmt: skip
        self.found = self.log.recover()
        self.keys = {
            key for segment in self.found.segments for key in segment.entries["key"].tolist()
        }


@pytest.mark.parametrize("fault", [DiskFault.SHORT, DiskFault.TORN, DiskFault.BIT_FLIP])
@pytest.mark.parametrize("seed", range(20))
def test_a_write_that_went_wrong_unsaid_is_found_by_the_read(fault, seed):
    disk = SimulatedDisk()
    faulty = FaultyDisk(disk, seed)
    driver = TierDriver(recovered(faulty))
    placed = laid_out(0, pages(3, 12_288, seed))
    faulty.arm("write", fault)

    driver.write(*placed)

    assert faulty.hits == 1
    good = 0
    for place, page in placed:
        ended, target = driver.read(place, page)
        assert isinstance(ended.error, PageCorrupt | type(None))
        good += ended.error is None
        assert ended.error is not None or target.content == page.content
    assert fault is not DiskFault.SHORT or good == 3, "a short write is gone on with"
    disk.kill()
    keys = {page.record.key for _, page in placed}
    assert recovered_with(disk).keys <= keys


@pytest.mark.parametrize("seed", range(20))
def test_a_read_that_went_wrong_is_an_error_and_the_next_one_may_be_right(faulty, seed):
    driver = TierDriver(recovered(faulty))
    ((place, page),) = laid_out(0, pages(1, 8192, seed))
    driver.write((place, page))
    for fault in (DiskFault.IO_ERROR, DiskFault.BIT_FLIP, DiskFault.SHORT):
        faulty.arm("read", fault)
        ended, target = driver.read(place, page)
        expected = {DiskFault.IO_ERROR: TierUnavailable, DiskFault.BIT_FLIP: PageCorrupt}.get(fault)
        assert expected is None or isinstance(ended.error, expected)
        assert ended.error is not None or target.content == page.content
        assert_reads_back(driver, place, page)


def test_after_a_failed_sync_a_segment_is_never_called_durable_again(faulty):
    log = recovered(faulty)
    driver = TierDriver(log)
    first, second = laid_out(0, pages(2))
    driver.write(first)
    faulty.arm("sync", DiskFault.IO_ERROR)

    assert driver.sync().failed == (0,)
    again = driver.sync()
    assert isinstance(again.error, TierUnavailable), "a second sync proves nothing"
    assert again.failed == (0,)
    assert driver.write((Place(1, 0), second[1]))[0].error is None, "others take records"
    assert driver.sync().failed == (0,)
    assert isinstance(driver.write(second)[0].error, TierUnavailable)
    sealed = driver.seal(0)
    assert isinstance(sealed.error, TierUnavailable)
    assert sealed.failed == (0,)
    assert driver.seal(1).failed == ()
    assert list(log.stats().failed_segments) == ["0"]
    assert_reads_back(driver, *first)
    given_up = driver.run(lambda job: DiskSync(job, frozenset({0})))[0]
    assert given_up.error is None, "nothing in it needs to be durable any more"
    assert driver.drop(0).error is None
    assert driver.sync().error is None


def test_after_a_footer_that_failed_no_record_is_taken_and_the_seal_can_be_tried_again(faulty):
    driver = TierDriver(recovered(faulty))
    first, second = laid_out(0, pages(2))
    driver.write(first)
    faulty.arm("write", DiskFault.IO_ERROR)

    assert isinstance(driver.seal(0).error, TierUnavailable)
    refused = driver.write(second)[0].error
    assert refused is not None
    assert refused.code == "invalid_argument"
    assert driver.seal(0).error is None
    assert_reads_back(driver, *first)


def test_a_drop_that_failed_can_be_tried_again(faulty):
    log = recovered(faulty)
    driver = TierDriver(log)
    driver.write(*laid_out(0, pages(1)))
    faulty.arm("remove", DiskFault.IO_ERROR)

    assert isinstance(driver.drop(0).error, TierUnavailable)
    assert log.stats().directories[0].used_bytes == SEGMENT_BYTES
    assert driver.drop(0).error is None
    assert log.stats().directories[0].used_bytes == 0


def test_the_capacity_of_a_directory_is_never_exceeded(disk):
    log = recovered(disk, capacity_bytes=2 * SEGMENT_BYTES + 4096)
    driver = TierDriver(log)
    (page,) = pages(1)

    ended = [driver.write((Place(number, 0), page))[0] for number in range(3)]

    assert [type(one.error) for one in ended] == [type(None), type(None), CapacityError]
    assert log.stats().directories[0].used_bytes == 2 * SEGMENT_BYTES
    driver.drop(0)
    assert driver.write((Place(2, 0), page))[0].error is None


def test_new_segments_go_to_the_directory_with_most_room(disk):
    log = recovered(disk, paths=2)
    driver = TierDriver(log)
    (page,) = pages(1)

    driver.write(*[(Place(number, 0), page) for number in range(6)])

    assert [one.segments for one in log.stats().directories] == [3, 3]


def test_a_segment_whose_file_somebody_deleted_is_dropped_like_any_other(disk):
    """Else it would be tried for ever, and no other segment given back meanwhile."""
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write((Place(0, 0), pages(1)[0]))
    disk.remove(HOME / "0" / segment_name(0))

    assert driver.drop(0).error is None
    assert log.stats().directories[0].used_bytes == 0


class OneBadDirectory(SimulatedDisk):
    """Nothing can be made, or written, in the first directory."""

    def __init__(self, call: str) -> None:
        super().__init__()
        self.call: str | None = call
        self._bad: set[int] = set()

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        if self.call == "create" and path.parent == HOME / "0":
            raise OSError(errno.EROFS, "read-only file system")
        descriptor = super().create(path, size_bytes, direct=direct)
        if path.parent == HOME / "0":
            self._bad.add(descriptor)
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.call == "write" and descriptor in self._bad:
            raise OSError(errno.EIO, "no such sector")
        return super().write(descriptor, buffers, offset)


@pytest.mark.parametrize("call", ["create", "write"])
def test_a_directory_that_fails_leaves_new_segments_to_the_others_while_they_have_room(call):
    disk = OneBadDirectory(call)
    places = [Directory(HOME / str(index), 3 * SEGMENT_BYTES) for index in range(2)]
    log = SSDLog("node", places, SEGMENT_BYTES, threads=0, disk=disk)
    log.recover()
    driver = TierDriver(log)
    (page,) = pages(1)

    ended = [driver.write((Place(number, 0), page))[0] for number in range(5)]

    assert [one.error is None for one in ended] == [False, True, True, True, False]
    disk.call = None
    assert driver.write((Place(5, 0), page))[0].error is None, "it is tried when it must be"


@pytest.mark.parametrize("place", [Place(0, 1), Place(0, SEGMENT_BYTES - 4096)])
def test_a_place_outside_its_segment_is_refused(disk, place):
    log = recovered(disk)

    (ended,) = TierDriver(log).write((place, pages(1)[0]))

    assert ended.error is not None
    assert ended.error.code == "invalid_argument"


def test_bytes_of_an_earlier_record_in_the_wrong_place_are_no_record(disk):
    driver = TierDriver(recovered(disk))
    ((place, page),) = laid_out(0, pages(1))
    driver.write((place, page), (Place(1, 0), pages(1, seed=1)[0]))
    driver.sync()
    size = record_bytes(page.record.page_bytes)
    record = disk.read_file(HOME / "0" / segment_name(0))[:size]
    for segment, offset in ((0, 5 * size), (1, 0), (1, 2 * size)):

        def paste(content: bytearray, at: int = offset) -> None:
            content[at : at + size] = record

        disk.change(HOME / "0" / segment_name(segment), paste)
        ended, _ = driver.read(Place(segment, offset), page)
        assert isinstance(ended.error, PageCorrupt)
    disk.kill()

    found = recovered_with(disk).found

    assert [segment.entries["offset"].tolist() for segment in found.segments] == [[0], []]


def test_a_job_that_cannot_be_right_fails_alone(real_log):
    log = real_log(threads=1)
    driver = TierDriver(log)
    good, bad = pages(2)
    record = replace(bad.record, page_bytes=0)

    ended = driver.run(
        lambda job: DiskWrite(job, Place(0, 0), record, SLOT, bad.address),
        lambda job: DiskSeal(job, 5),
        lambda job: DiskWrite(job, Place(1, 0), good.record, SLOT, good.address),
    )

    codes = [one.error.code if one.error else "" for one in ended]
    assert codes == ["invalid_argument", "tier_unavailable", ""]
    assert log.stats().directories[0].segments == 1
    assert_reads_back(driver, Place(1, 0), good)


def test_a_batch_beyond_the_bound_is_refused_whole(disk):
    log = recovered(disk)

    with pytest.raises(CapacityError):
        log.submit([DiskSync(job) for job in range(JOBS_MAX + 1)])
    assert log.poll() == []
    log.close()
    with pytest.raises(TierUnavailable):
        log.submit([DiskSync(1)])


def test_a_slow_disk_lets_submit_and_poll_return_and_drain_says_no(tmp_path):
    faulty = FaultyDisk(SimulatedDisk())
    woken = threading.Event()
    log = SSDLog("node", [Directory(HOME, 1 << 30)], SEGMENT_BYTES,
                 threads=1, wake=woken.set, disk=faulty)  # fmt: skip
    log.recover()
    page = pages(1)[0]
    faulty.arm("write", DiskFault.SLOW)

    log.submit([DiskWrite(1, Place(0, 0), page.record, SLOT, page.address)])

    assert log.poll() == []
    assert log.drain(0.01) is False
    faulty.slow_ends.set()
    assert woken.wait(10)
    assert log.drain(10)
    assert [one.job for one in log.poll()] == [1]
    log.close()


def test_what_is_not_a_whole_block_is_padded_with_zeros_not_with_what_lies_behind(disk):
    long, short = pages(1, 4000)[0], pages(1, 100, seed=1)[0]
    driver = TierDriver(recovered(disk))
    for segment, page in enumerate((long, short)):
        used = page.record.page_bytes
        page.memory[used:] = b"s" * (len(page.memory) - used)

        driver.write((Place(segment, 0), page))

        stored = disk.read_file(HOME / "0" / segment_name(segment))[HEADER_BYTES:][:4096]
        assert stored == page.content + bytes(4096 - used)


def test_a_job_that_finds_no_memory_fails_alone(disk, monkeypatch):
    class NoMemory:
        calls = 0

        def mmap(self, *_arguments: int) -> None:
            self.calls += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    driver = TierDriver(recovered(disk))
    placed = laid_out(0, pages(1))
    assert driver.write(*placed)[0].error is None
    ((source, page),) = placed
    later = Place(0, source.offset + page.record.length)
    missing = NoMemory()
    with monkeypatch.context() as patched:
        patched.setattr(vectored, "mmap", missing)
        (copied,) = driver.run(lambda job: DiskCopy(job, source, later, page.record))
        buried = driver.tombstone(later, bytes(32))
    assert missing.calls >= 2

    assert [type(one.error) for one in (copied, buried)] == [TierUnavailable] * 2
    assert driver.run(lambda job: DiskCopy(job, source, later, page.record))[0].error is None
    assert_reads_back(driver, later, page)
