"""Goal: a log takes what is its own, and refuses and leaves alone what is not."""

import pytest

from kvstore.protocol.errors import ConfigError, TierUnavailable
from kvstore.testing.disk import DiskFault, FaultyDisk
from kvstore.tier.directories import Directory
from kvstore.tier.record import IDENTITY_NAME, segment_name
from kvstore.tier.ssd import SSDLog
from tests.tier.ssd.conftest import HOME, SEGMENT_BYTES, open_log, recovered


def test_a_directory_of_another_node_is_refused_and_unchanged(disk):
    recovered(disk).close()
    before = disk.read_file(HOME / "0" / IDENTITY_NAME)

    with pytest.raises(ConfigError, match=r"/log/0.*belongs to node 'node', this is 'else'"):
        open_log(disk, node="else")

    assert disk.read_file(HOME / "0" / IDENTITY_NAME) == before
    recovered(disk).close()


def test_a_log_of_a_newer_version_is_refused_and_unchanged(disk):
    recovered(disk).close()
    path = HOME / "0" / IDENTITY_NAME
    newer = disk.read_file(path).replace(b'"format": 1', b'"format": 2')
    disk.write_file(path, newer)

    with pytest.raises(ConfigError, match=r"/log/0.*format 2"):
        open_log(disk)

    assert disk.read_file(path) == newer


def test_directories_of_two_logs_are_refused(disk):
    recovered(disk).close()
    one = disk.read_file(HOME / "0" / IDENTITY_NAME)
    disk.make_directory(HOME / "1")
    disk.write_file(HOME / "1" / IDENTITY_NAME, one.replace(b'"log": "', b'"log": "00')[:-1])

    with pytest.raises(ConfigError, match="damaged"):
        open_log(disk, paths=2)
    changed = bytearray(one)
    at = one.index(b'"log": "') + 8
    changed[at : at + 2] = b"00" if one[at : at + 2] != b"00" else b"11"
    disk.write_file(HOME / "1" / IDENTITY_NAME, bytes(changed))
    with pytest.raises(ConfigError, match="different logs"):
        open_log(disk, paths=2)
    assert disk.open_files() == 0


def test_segments_without_an_identity_are_refused(disk):
    disk.make_directory(HOME / "0")
    disk.write_file(HOME / "0" / segment_name(1), b"")

    with pytest.raises(ConfigError, match=r"no kvstore-log\.json"):
        open_log(disk)


@pytest.mark.parametrize("closing_fails", [False, True])
def test_a_directory_whose_names_cannot_be_read_is_unavailable_and_named(disk, closing_fails):
    faulty = FaultyDisk(disk)
    faulty.arm("names", DiskFault.IO_ERROR)
    if closing_fails:
        faulty.arm("close", DiskFault.IO_ERROR)

    with pytest.raises(TierUnavailable, match="/log/0: Input/output error"):
        open_log(faulty)
    assert disk.open_files() == 0
    recovered(faulty).close()


def test_a_directory_is_one_process_s_at_a_time(disk):
    log = recovered(disk)

    with pytest.raises(TierUnavailable, match="another process"):
        open_log(disk)
    log.close()
    recovered(disk).close()


def test_a_capacity_below_one_segment_is_refused(disk):
    with pytest.raises(ConfigError, match=r"/log/0.*too small for one segment"):
        open_log(disk, capacity_bytes=SEGMENT_BYTES - 1)


@pytest.mark.parametrize("call", ["write_file", "lock"])
def test_a_read_only_directory_is_unavailable_and_named(disk, call):
    faulty = FaultyDisk(disk)
    faulty.arm(call, DiskFault.READ_ONLY)

    with pytest.raises(TierUnavailable, match="/log/0: Read-only file system"):
        open_log(faulty)
    assert disk.open_files() == 0


def test_a_file_where_the_directory_should_be_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")

    with pytest.raises(ConfigError, match="not a directory"):
        SSDLog("node", [Directory(path, 1 << 30)], SEGMENT_BYTES)
