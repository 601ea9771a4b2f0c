"""What the log relies on of a real disk: files of its user alone, durable names, no surprises."""

import errno
import os
import stat
from pathlib import Path
from random import Random

import pytest

from kvstore.protocol.errors import ConfigError, TierUnavailable
from kvstore.testing.disk import SimulatedDisk
from kvstore.testing.tiers import PageInMemory, TierDriver, laid_out
from kvstore.tier import kernel
from kvstore.tier.directories import Directory
from kvstore.tier.disk import SMALL_FILE_BYTES_MAX, FileSystem, OSDisk
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, open_log, recovered


@pytest.fixture
def synced(monkeypatch) -> list[Path]:
    """Every directory and file that is synced from now on, in order."""
    paths: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return paths


# Who may read


@pytest.mark.parametrize("umask", [0, 0o077])
def test_a_segment_is_its_users_alone_whatever_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        with_page(tmp_path / "log")
    finally:
        os.umask(before)

    (segment,) = (tmp_path / "log").glob("segment-*")
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600


def with_page(folder: Path, disk: OSDisk | None = None) -> PageInMemory:
    """A log with one page, closed again."""
    log = SSDLog("node", [Directory(folder, 8 << 20)], SEGMENT_BYTES, threads=0, disk=disk)
    log.recover()
    page = PageInMemory.random(Random(1), 5000)
    (ended,) = TierDriver(log).write(*laid_out(0, [page]))
    assert ended.error is None
    log.close()
    return page


# Names that last


def test_a_directory_that_is_made_and_those_above_it_have_their_names_synced(tmp_path, synced):
    with_page(tmp_path / "new" / "deep" / "log")

    deep = tmp_path / "new" / "deep"
    assert {tmp_path, tmp_path / "new", deep, deep / "log"} <= set(synced)


def test_names_that_an_earlier_start_made_and_did_not_sync_are_synced(tmp_path, synced):
    (tmp_path / "new" / "deep").mkdir(parents=True)

    with_page(tmp_path / "new" / "deep")

    assert {tmp_path, tmp_path / "new"} <= set(synced)


def test_a_directory_above_that_may_not_be_read_stops_no_start(tmp_path, monkeypatch):
    there, flushed, opened = tmp_path / "there", list[bool](), os.open

    def refuse(path: object, *arguments: object) -> int:
        if Path(str(path)) in (tmp_path, there):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(path, *arguments)

    there.mkdir()
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "sync", lambda: flushed.append(True))

    OSDisk().make_directory(there)
    assert flushed == [], "its name was there"
    OSDisk().make_directory(there / "log")
    assert flushed == [True], "a new name is made to last in another way"


@pytest.mark.parametrize("seed", range(20))
def test_a_segment_that_was_dropped_does_not_come_back_after_a_power_cut(seed):
    disk = SimulatedDisk()
    log = recovered(disk)
    driver = TierDriver(log)
    driver.write(*laid_out(0, [PageInMemory.random(Random(seed), 5000)]))
    assert driver.seal(0).error is None
    assert driver.drop(0).error is None

    disk.cut_power(Random(seed))

    log = open_log(disk)
    assert log.recover().segments == []


# Room


def test_where_no_room_can_be_set_aside_nothing_is_written_instead(tmp_path, monkeypatch, caplog):
    def cannot(descriptor: int, size_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(kernel, "allocate", cannot)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it would write zeros"))
    disk = OSDisk()
    for name in ("a", "b"):
        descriptor = disk.create(tmp_path / name, 1 << 20, direct=disk.takes_direct_io(tmp_path))
        assert os.fstat(descriptor).st_size == 1 << 20
        assert os.fstat(descriptor).st_blocks == 0
        os.close(descriptor)
    (said,) = caplog.records
    assert "cannot allocate files" in said.getMessage()
    with_page(tmp_path / "log", disk)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG])
def test_a_file_that_gets_no_room_is_not_left_behind(tmp_path, monkeypatch, number):
    def full(descriptor: int, size_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(kernel, "allocate", full)
    with pytest.raises(OSError, match=os.strerror(number)):
        OSDisk().create(tmp_path / "a", 1 << 20, direct=False)
    assert list(tmp_path.iterdir()) == []


def test_room_that_is_set_aside_is_there(tmp_path):
    descriptor = OSDisk().create(tmp_path / "a", 1 << 20, direct=False)
    assert os.fstat(descriptor).st_blocks * 512 >= 1 << 20
    os.close(descriptor)


def test_a_capacity_that_the_file_system_can_never_hold_is_refused_by_its_key(disk, tmp_path):
    small = SimulatedDisk(capacity_bytes=100 * SEGMENT_BYTES)
    with pytest.raises(ConfigError, match=r"ssd\.capacity_bytes.*/log/0.*lower it"):
        open_log(small, capacity_bytes=101 * SEGMENT_BYTES)
    assert small.open_files() == 0
    assert small.names(HOME / "0") == [], "nothing was written there"
    open_log(small, capacity_bytes=100 * SEGMENT_BYTES).close()
    with pytest.raises(ConfigError, match=r"ssd\.capacity_bytes"):
        SSDLog("n", [Directory(tmp_path, 1 << 60)], SEGMENT_BYTES)


def test_directories_on_one_file_system_share_its_room():
    small = SimulatedDisk(capacity_bytes=100 * SEGMENT_BYTES)
    with pytest.raises(ConfigError, match="/log/0, /log/1"):
        SSDLog(
            "n", [Directory(HOME / str(at), 51 * SEGMENT_BYTES) for at in range(2)],
            SEGMENT_BYTES, threads=0, disk=small,
        )  # fmt: skip


def test_a_file_system_that_does_not_say_its_size_is_not_compared(monkeypatch, disk):
    monkeypatch.setattr(disk, "file_system", lambda _: FileSystem(0, 0, 0))
    recovered(disk, capacity_bytes=1 << 60).close()


def test_room_that_others_have_taken_is_said_at_the_start_and_the_logs_own_is_not(caplog):
    small = SimulatedDisk(capacity_bytes=10 * SEGMENT_BYTES)
    log = recovered(small, capacity_bytes=9 * SEGMENT_BYTES)
    for number in range(3):
        TierDriver(log).write(*laid_out(number, [PageInMemory.random(Random(number), 5000)]))
    log.close()
    recovered(small, capacity_bytes=9 * SEGMENT_BYTES).close()
    assert "ssd.capacity_bytes" not in caplog.text

    small.write_file(HOME / "0" / "of somebody else", bytes(2 * SEGMENT_BYTES))
    recovered(small, capacity_bytes=9 * SEGMENT_BYTES).close()

    (said,) = [one.getMessage() for one in caplog.records if "capacity" in one.getMessage()]
    assert said.startswith("ssd.capacity_bytes")
    assert "/log/0" in said


@pytest.mark.parametrize("kind", ["tmpfs", ""])
def test_a_disk_that_is_memory_is_said_at_the_start(monkeypatch, disk, caplog, kind):
    there = FileSystem(0, 1 << 60, 1 << 60, kind)
    monkeypatch.setattr(disk, "file_system", lambda _: there)

    recovered(disk).close()

    assert ("ssd.directories: /log/0 is tmpfs" in caplog.text) is bool(kind)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_a_file_system_in_memory_is_known():
    if kernel.file_system_type("/dev/shm") != 0x01021994:
        pytest.skip("/dev/shm is no tmpfs here")
    assert OSDisk().file_system(Path("/dev/shm")).in_memory == "tmpfs"


def test_a_disk_is_no_memory_and_has_room(tmp_path):
    found = OSDisk().file_system(tmp_path)
    assert found.total_bytes >= found.free_bytes > 0
    assert found.name == OSDisk().file_system(tmp_path).name


# What is no file


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_what_is_no_file_is_not_opened_as_one(tmp_path, kind):
    target, path = tmp_path / "target", tmp_path / "segment"
    target.write_bytes(b"x" * 4096)
    match kind:
        case "link":
            path.symlink_to(target)
        case "fifo":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(OSError, match=r"symbolic links|not a regular file|directory"):
        OSDisk().open(path, direct=False)
    if kind != "link":
        with pytest.raises(OSError, match=r"not a regular file|directory"):
            OSDisk().read_file(path)


def test_a_file_that_is_put_in_place_goes_through_no_link(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"of somebody else")
    (tmp_path / "a.new").symlink_to(outside)
    (tmp_path / ".direct-io-probe").symlink_to(outside)

    OSDisk().write_file(tmp_path / "a", b"ours")
    OSDisk().takes_direct_io(tmp_path)

    assert (tmp_path / "a").read_bytes() == b"ours"
    assert outside.read_bytes() == b"of somebody else"


def test_a_small_file_that_is_large_is_not_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(SMALL_FILE_BYTES_MAX + 1)
    with pytest.raises(OSError, match="large"):
        OSDisk().read_file(tmp_path / "a")


def test_an_identity_that_is_no_file_makes_the_directory_unavailable(tmp_path):
    os.mkfifo(tmp_path / "kvstore-log.json")
    with pytest.raises(TierUnavailable, match="not a regular file"):
        SSDLog("n", [Directory(tmp_path, 8 << 20)], SEGMENT_BYTES)
