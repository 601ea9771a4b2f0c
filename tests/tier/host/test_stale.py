"""Memory of earlier boots is known by what nobody can forge, and counted as far as it is there."""

import mmap
import os
import resource
import sys
from pathlib import Path

import pytest

from kvstore.state.tree.slots import Replacement
from kvstore.tier import stale
from kvstore.tier.host import HostMemory
from kvstore.tier.stale import MemoryRecord, inode_of

EXTENT_BYTES = 1 << 20
HOLDER = """
import mmap, os, signal, sys
what, size, touched, offset = sys.argv[1], *map(int, sys.argv[2:])
if what.startswith("/"):
    descriptor = os.open(what, os.O_RDWR)
else:
    descriptor = os.memfd_create(what)
    os.ftruncate(descriptor, size)
memory = mmap.mmap(descriptor, size - offset, offset=offset)
os.close(descriptor)
for at in range(0, touched, 4096):
    memory[at] = 1
print("mapped", flush=True)
signal.pause()
"""


class Boot:
    """One life of a node, as far as its memory goes."""

    def __init__(self, socket: Path, name: str = "n") -> None:
        self.record = MemoryRecord(socket.with_name("s.memory"))
        self.memory = HostMemory(
            name, os.urandom(16), EXTENT_BYTES, prefault=False, record=self.record
        )

    def stale_bytes(self) -> int:
        return self.record.stale_bytes()

    def kill(self) -> None:
        """Its descriptors go; what it wrote stays."""
        self.memory.close()


@pytest.fixture
def boot(tmp_path):
    """``boot()``: the next life of the node."""
    lives: list[Boot] = []

    def begin() -> Boot:
        if lives:
            lives[-1].kill()
        lives.append(Boot(tmp_path / "s"))
        return lives[-1]

    yield begin
    for life in lives:
        life.kill()


@pytest.fixture
def client(spawn):
    """``client(memory, number, touched)``: a process that maps an extent and touches so much."""

    def begin(memory: HostMemory, number: int, touched: int, offset: int = 0):
        where = f"/proc/{os.getpid()}/fd/{memory.descriptor(number)}"
        return hold(spawn, where, EXTENT_BYTES, touched, offset)

    return begin


def hold(spawn, *arguments: object):
    return spawn([sys.executable, "-c", HOLDER, *map(str, arguments)], ready="mapped")


def test_only_memory_that_is_there_counts_and_only_as_long_as_it_is_mapped(boot, client):
    first = boot()
    first.memory.create(range(4))
    one = client(first.memory, 0, 256 << 10)
    two = client(first.memory, 1, 0)
    assert first.stale_bytes() == 0, "memory of the present boot is not stale"

    second = boot()

    assert second.stale_bytes() == 256 << 10
    one.kill()
    assert second.stale_bytes() == 0
    assert two.returncode is None


def test_what_two_processes_map_counts_once(boot, client):
    first = boot()
    first.memory.create(range(2))
    client(first.memory, 1, 128 << 10)
    client(first.memory, 1, 192 << 10)
    client(first.memory, 1, 4 << 10, offset=512 << 10)

    assert boot().stale_bytes() == (192 + 4) << 10


def test_memory_of_several_boots_is_known_until_it_is_gone(boot, client):
    held = []
    for touched in (64 << 10, 32 << 10):
        life = boot()
        life.memory.create(range(2))
        held.append(client(life.memory, 1, touched))

    life = boot()
    life.memory.create(range(2))
    assert life.stale_bytes() == 96 << 10
    held[0].kill()
    assert life.stale_bytes() == 32 << 10


def test_memory_that_only_has_the_name_of_a_nodes_counts_for_nothing(boot, client, spawn):
    """The name of a node's memory is no secret: whoever maps it reads it in ``/proc``."""
    first = boot()
    first.memory.create(range(2))
    client(first.memory, 0, 64 << 10)
    name = str(Path(f"/proc/self/fd/{first.memory.descriptor(0)}").readlink())
    hold(spawn, name.removeprefix("/memfd:").removesuffix(" (deleted)"), 64 << 20, 8 << 20, 0)

    assert boot().stale_bytes() == 64 << 10


def test_memory_that_was_exchanged_is_known_and_what_was_given_back_does_not_count(boot, client):
    first = boot()
    first.memory.create(range(2))
    client(first.memory, 0, 64 << 10)
    client(first.memory, 1, 32 << 10)
    first.memory.replace([Replacement(0, 2, in_use=False), Replacement(1, 3, in_use=True)])
    assert all(first.memory.wait(number, 20.0) for number in (2, 3))
    client(first.memory, 3, 16 << 10)

    assert boot().stale_bytes() == (32 + 16) << 10


def test_the_record_stays_short_however_often_memory_is_exchanged(boot, monkeypatch):
    monkeypatch.setattr(stale, "_UNUSED_MAX", 10)
    life = boot()
    life.memory.create([0])
    path = life.record._path
    for number in range(200):
        life.memory.replace([Replacement(number, number + 1, in_use=False)])
        assert life.memory.wait(number + 1, 20.0)
        lines = path.read_text().splitlines()
        assert len(lines) <= 1 + 1 + 10 + 1
    present = inode_of(life.memory.descriptor(200))
    assert f"{present[0]} {present[1]}" in lines


def test_memory_is_noted_where_no_descriptor_is_left(boot, client):
    first = boot()
    first.memory.create(range(2))
    lowest = os.dup(0)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        first.memory.replace([Replacement(0, 2, in_use=False)])
        assert first.memory.wait(2, 20.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client(first.memory, 2, 64 << 10)

    assert boot().stale_bytes() == 64 << 10


# The file


def test_the_record_is_its_users_alone_whatever_the_umask(boot):
    before = os.umask(0)
    try:
        life = boot()
        life.memory.create([0])
    finally:
        os.umask(before)

    assert life.record._path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("way", ["writable", "link", "fifo", "folder", "another user's"])
def test_a_record_that_somebody_else_can_write_is_not_believed(
    tmp_path, boot, client, caplog, monkeypatch, way
):
    first = boot()
    first.memory.create(range(2))
    client(first.memory, 0, 64 << 10)
    path = first.record._path
    match way:
        case "writable":
            path.chmod(0o620)
        case "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        case "fifo":
            path.unlink()
            os.mkfifo(path)
        case "folder":
            path.unlink()
            path.mkdir()
        case _:
            monkeypatch.setattr(os, "geteuid", lambda: 12345)

    second = boot()

    assert second.stale_bytes() == 0
    assert str(path) in caplog.text
    second.memory.create(range(2))
    assert second.memory.descriptor(1) is not None, "a node starts all the same"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"kvstore memory another-boot-of-the-machine\n00:01 1\n",
        b"\xff\xfe\n00:01 5\n",
        b"\0" * 4096,
    ],
)
def test_what_is_no_record_of_this_machine_says_nothing(tmp_path, content):
    path = tmp_path / "s.memory"
    path.write_bytes(content)
    path.chmod(0o600)

    assert MemoryRecord(path).stale_bytes() == 0


def test_a_damaged_line_costs_no_other(boot, client):
    first = boot()
    first.memory.create(range(2))
    client(first.memory, 1, 64 << 10)
    path = first.record._path
    title, *lines = path.read_text().splitlines()
    path.write_text("\n".join([title, "00:01 x", "zz:01 3", "", *lines, "00:01 " + "9" * 30]))

    assert boot().stale_bytes() == 64 << 10


def test_a_record_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path, caplog):
    (tmp_path / "folder").write_text("a file")
    record = MemoryRecord(tmp_path / "folder" / "s.memory")
    for number in range(3):
        record.add([("00:01", number)])

    (said,) = [one for one in caplog.records if "cannot be written" in one.getMessage()]
    assert "a restart will not know" in said.getMessage()
    (tmp_path / "folder").unlink()
    record.add([("00:01", 9)])
    record.close()
    lines = (tmp_path / "folder" / "s.memory").read_text().splitlines()[1:]
    assert sorted(lines) == ["00:01 0", "00:01 1", "00:01 2", "00:01 9"]


def test_processes_that_cannot_be_seen_hold_nothing_back(boot, client, tmp_path, monkeypatch):
    first = boot()
    first.memory.create(range(2))
    client(first.memory, 1, 64 << 10)
    second = boot()
    monkeypatch.setattr(stale, "_PROC", tmp_path / "nothing")

    assert second.stale_bytes() == 0


def test_memory_is_counted_by_memory_pages(boot, client):
    first = boot()
    first.memory.create(range(1))
    client(first.memory, 0, 1)

    assert boot().stale_bytes() == mmap.PAGESIZE
