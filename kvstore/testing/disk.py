"""Disks for tests: one in memory with power cuts, and one that fails on demand.

Both implement :class:`kvstore.tier.disk.Disk`, so the SSD log uses them unchanged.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Final, Literal

from kvstore.tier.disk import Disk, FileSystem
from kvstore.tier.vectored import aligned

SECTOR_BYTES: Final = 512
"""Unit of atomic writes of the disk."""
SLOW_S_MAX: Final = 30.0


@dataclass(slots=True)
class _File:
    """One file; ``unsynced`` are writes that so far only the cache has."""

    cached: bytearray
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class _Directory:
    """Names as they are seen, and as they would be after a power cut."""

    seen: dict[str, _File] = field(default_factory=dict)
    durable: dict[str, _File] = field(default_factory=dict)
    unsynced: list[tuple[str, _File | None]] = field(default_factory=list)
    locked: bool = False


def _error(number: int, path: object = "") -> OSError:
    return OSError(number, os.strerror(number), str(path))


class SimulatedDisk:
    """Files in memory, with a cache that a power cut loses.

    Of the writes since a file's last sync, any subset survives a cut, in any order, torn at sectors
    of 512 bytes. A name created or deleted since its directory's last sync may survive or not.

    Args:
        capacity_bytes: total size of all files.
        direct_io: result of :meth:`takes_direct_io`.
        seed: seed of the random ids.
    """

    def __init__(
        self, capacity_bytes: int = 1 << 40, *, direct_io: bool = True, seed: int = 0
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._direct_io = direct_io
        self._random = Random(seed)
        self._directories: dict[Path, _Directory] = {}
        self._open: dict[int, _File | _Directory] = {}
        self._next = 1000
        self._lock = threading.Lock()

    # ---- for tests --------------------------------------------------------------------------

    def cut_power(self, random: Random) -> None:
        """Lose writes that were not synced, or parts of them; close all locks and files."""
        self.kill()
        for directory in self._directories.values():
            for name in sorted({name for name, _ in directory.unsynced}):
                steps = [file for other, file in directory.unsynced if other == name]
                for file in steps[: random.randint(0, len(steps))]:
                    _put(directory.durable, name, file)
            directory.unsynced.clear()
            directory.seen = dict(directory.durable)
            for _, file in sorted(directory.seen.items()):
                _cut(file, random)

    def kill(self) -> None:
        """Kill the process that uses the disk: close all locks and files, keep the cache."""
        self._open.clear()
        for directory in self._directories.values():
            directory.locked = False

    def change(self, path: Path, edit: Callable[[bytearray], None]) -> None:
        """Damage a file: ``edit`` changes its bytes, or shortens it; durable at once."""
        file = self._file(path)
        edit(file.cached)
        file.durable = bytearray(file.cached)
        file.unsynced.clear()

    # ---- the interface ----------------------------------------------------------------------

    def make_directory(self, path: Path) -> None:
        """See :class:`Disk`; names of directories are durable at once."""
        self._directories.setdefault(path, _Directory())

    def file_system(self, path: Path) -> FileSystem:
        """See :class:`Disk`; all directories are on one file system."""
        self._directory(path)
        return FileSystem(0, self._capacity_bytes, self._capacity_bytes - self._used_bytes())

    def names(self, path: Path) -> list[str]:
        """See :class:`Disk`."""
        return list(self._directory(path).seen)

    def lock(self, path: Path) -> int:
        """See :class:`Disk`."""
        directory = self._directory(path)
        if directory.locked:
            raise BlockingIOError(errno.EAGAIN, "locked", str(path))
        directory.locked = True
        return self._opened(directory)

    def takes_direct_io(self, path: Path) -> bool:
        """See :class:`Disk`."""
        self._directory(path)
        return self._direct_io

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        """See :class:`Disk`."""
        self._check_direct(direct=direct)
        directory = self._directory(path.parent)
        if path.name in directory.seen:
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        if self._used_bytes() + size_bytes > self._capacity_bytes:
            raise _error(errno.ENOSPC, path)
        file = _File(bytearray(size_bytes))
        directory.seen[path.name] = file
        directory.unsynced.append((path.name, file))
        return self._opened(file)

    def open(self, path: Path, *, direct: bool) -> int:
        """See :class:`Disk`."""
        self._check_direct(direct=direct)
        return self._opened(self._file(path))

    def size(self, descriptor: int) -> int:
        """See :class:`Disk`."""
        return len(self._of(descriptor).cached)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See :class:`Disk`; a file does not grow."""
        file, data = self._of(descriptor), b"".join(buffers)
        if offset + len(data) > len(file.cached):
            raise _error(errno.EFBIG)
        file.cached[offset : offset + len(data)] = data
        file.unsynced.append((offset, data))
        return len(data)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See :class:`Disk`."""
        file, total = self._of(descriptor), 0
        for buffer in buffers:
            part = file.cached[offset + total : offset + total + len(buffer)]
            buffer[: len(part)] = part
            total += len(part)
        return total

    def sync(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        file = self._of(descriptor)
        _grow(file)
        for offset, data in file.unsynced:
            file.durable[offset : offset + len(data)] = data
        file.unsynced.clear()

    def close(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        closed = self._open.pop(descriptor, None)
        if closed is None:
            raise _error(errno.EBADF)
        if isinstance(closed, _Directory):
            closed.locked = False

    def remove(self, path: Path) -> None:
        """See :class:`Disk`."""
        directory = self._directory(path.parent)
        if directory.seen.pop(path.name, None) is None:
            raise FileNotFoundError(errno.ENOENT, "not there", str(path))
        directory.unsynced.append((path.name, None))

    def sync_directory(self, path: Path) -> None:
        """See :class:`Disk`."""
        directory = self._directory(path)
        directory.durable = dict(directory.seen)
        directory.unsynced.clear()

    def read_file(self, path: Path) -> bytes:
        """See :class:`Disk`."""
        return bytes(self._file(path).cached)

    def write_file(self, path: Path, content: bytes) -> None:
        """See :class:`Disk`."""
        directory = self._directory(path.parent)
        file = _File(bytearray(content), bytearray(content))
        directory.seen[path.name] = directory.durable[path.name] = file

    def random_id(self) -> bytes:
        """See :class:`Disk`."""
        return self._random.randbytes(16)

    # ---- internal ---------------------------------------------------------------------------

    def open_files(self) -> int:
        """Number of open descriptors, including locks."""
        return len(self._open)

    def _used_bytes(self) -> int:
        files = (file for one in self._directories.values() for file in one.seen.values())
        return sum(len(file.cached) for file in files)

    def _check_direct(self, *, direct: bool) -> None:
        if direct and not self._direct_io:
            raise _error(errno.EINVAL)

    def _directory(self, path: Path) -> _Directory:
        directory = self._directories.get(path)
        if directory is None:
            raise FileNotFoundError(errno.ENOENT, "not there", str(path))
        return directory

    def _file(self, path: Path) -> _File:
        file = self._directory(path.parent).seen.get(path.name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "not there", str(path))
        return file

    def _opened(self, what: _File | _Directory) -> int:
        with self._lock:
            self._next += 1
            self._open[self._next] = what
            return self._next

    def _of(self, descriptor: int) -> _File:
        file = self._open.get(descriptor)
        if not isinstance(file, _File):
            raise _error(errno.EBADF)
        return file


def _put(names: dict[str, _File], name: str, file: _File | None) -> None:
    if file is None:
        names.pop(name, None)
    else:
        names[name] = file


def _grow(file: _File) -> None:
    file.durable += bytes(len(file.cached) - len(file.durable))


def _cut(file: _File, random: Random) -> None:
    """Set a file to what the disk has after a power cut."""
    if file.durable or random.random() < 0.5:
        _grow(file)  # otherwise not even its size was written
        writes = file.unsynced[:]
        random.shuffle(writes)
        for offset, data in writes:
            for start, stop in _survivors(len(data), random):
                file.durable[offset + start : offset + stop] = data[start:stop]
    file.unsynced.clear()
    file.cached = bytearray(file.durable)


def _survivors(length: int, random: Random) -> list[tuple[int, int]]:
    """Parts of a write that reach the disk: all, none, the front, the back, or any sectors."""
    sectors = -(-length // SECTOR_BYTES)
    cut = random.randint(0, sectors) * SECTOR_BYTES
    match random.randrange(5):
        case 0:
            return [(0, length)]
        case 1:
            return []
        case 2:
            return [(0, min(cut, length))]
        case 3:
            return [(min(cut, length), length)]
    kept = random.getrandbits(sectors)
    return [
        (sector * SECTOR_BYTES, min((sector + 1) * SECTOR_BYTES, length))
        for sector in range(sectors)
        if kept >> sector & 1
    ]


# A disk that fails


class DiskFault(StrEnum):
    """The faults of :class:`FaultyDisk`."""

    IO_ERROR = "io_error"
    SLOW = "slow"
    SHORT = "short"
    TORN = "torn"
    BIT_FLIP = "bit_flip"
    FULL = "full"
    READ_ONLY = "read_only"


Call = Literal[
    "names", "lock", "create", "open", "write", "read", "sync", "close", "remove", "write_file"
]
_ERRORS: Final = {
    DiskFault.IO_ERROR: errno.EIO,
    DiskFault.FULL: errno.ENOSPC,
    DiskFault.READ_ONLY: errno.EROFS,
}


class FaultyDisk:
    """A wrapper around another disk; armed calls fail, all others are passed on.

    Args:
        disk: the other disk.
        seed: decides where a write is torn and which bit is flipped.

    Attributes:
        hits: number of faults so far.
        slow_ends: event that slow calls wait for, at most SLOW_S_MAX.
    """

    def __init__(self, disk: Disk, seed: int = 0) -> None:
        self.hits = 0
        self.slow_ends = threading.Event()
        self._disk = disk
        self._random = Random(seed)
        self._armed: dict[Call, tuple[DiskFault, int, int]] = {}

    def arm(self, call: Call, fault: DiskFault, *, after: int = 0, times: int = 1) -> None:
        """Let ``times`` calls fail, after ``after`` more successful ones."""
        self._armed[call] = (fault, after, times)

    def _struck(self, call: Call) -> DiskFault | None:
        fault, after, times = self._armed.get(call, (None, 0, 0))
        if fault is None:
            return None
        if after:
            self._armed[call] = (fault, after - 1, times)
            return None
        self._armed[call] = (fault, 0, times - 1)
        if times <= 1:
            del self._armed[call]
        self.hits += 1
        if fault in _ERRORS:
            raise _error(_ERRORS[fault])
        if fault is DiskFault.SLOW:
            self.slow_ends.wait(SLOW_S_MAX)
        return fault

    def make_directory(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._disk.make_directory(path)

    def file_system(self, path: Path) -> FileSystem:
        """See :class:`Disk`."""
        return self._disk.file_system(path)

    def names(self, path: Path) -> list[str]:
        """See :class:`Disk`."""
        self._struck("names")
        return self._disk.names(path)

    def lock(self, path: Path) -> int:
        """See :class:`Disk`."""
        self._struck("lock")
        return self._disk.lock(path)

    def takes_direct_io(self, path: Path) -> bool:
        """See :class:`Disk`."""
        return self._disk.takes_direct_io(path)

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        """See :class:`Disk`."""
        self._struck("create")
        return self._disk.create(path, size_bytes, direct=direct)

    def open(self, path: Path, *, direct: bool) -> int:
        """See :class:`Disk`."""
        self._struck("open")
        return self._disk.open(path, direct=direct)

    def size(self, descriptor: int) -> int:
        """See :class:`Disk`."""
        return self._disk.size(descriptor)

    def write(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See :class:`Disk`; short, torn or with a flipped bit if armed."""
        fault = self._struck("write")
        if fault not in (DiskFault.SHORT, DiskFault.TORN, DiskFault.BIT_FLIP):
            return self._disk.write(descriptor, buffers, offset)
        data = aligned(sum(map(len, buffers)))
        data[:] = b"".join(buffers)
        kept = self._random.randrange(1, max(len(data) // SECTOR_BYTES, 2)) * SECTOR_BYTES
        if fault is DiskFault.BIT_FLIP:
            self._flip(data)
            kept = len(data)
        self._disk.write(descriptor, [data[:kept]], offset)
        return kept if fault is DiskFault.SHORT else len(data)

    def read(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See :class:`Disk`; short or with a flipped bit if armed."""
        fault = self._struck("read")
        if fault is DiskFault.SHORT:
            return self._disk.read(descriptor, [buffers[0][: len(buffers[0]) // 2]], offset)
        done = self._disk.read(descriptor, buffers, offset)
        if fault is DiskFault.BIT_FLIP:
            self._flip(max(buffers, key=len))
        return done

    def sync(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        self._struck("sync")
        self._disk.sync(descriptor)

    def close(self, descriptor: int) -> None:
        """See :class:`Disk`; a close that fails closes the file too, as the system's does."""
        try:
            self._struck("close")
        finally:
            self._disk.close(descriptor)

    def remove(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._struck("remove")
        self._disk.remove(path)

    def sync_directory(self, path: Path) -> None:
        """See :class:`Disk`."""
        self._disk.sync_directory(path)

    def read_file(self, path: Path) -> bytes:
        """See :class:`Disk`."""
        return self._disk.read_file(path)

    def write_file(self, path: Path, content: bytes) -> None:
        """See :class:`Disk`."""
        self._struck("write_file")
        self._disk.write_file(path, content)

    def random_id(self) -> bytes:
        """See :class:`Disk`."""
        return self._disk.random_id()

    def _flip(self, data: memoryview) -> None:
        bit = self._random.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
