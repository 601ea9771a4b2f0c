"""The file operations of the SSD log, as an interface, so that tests can simulate the disk."""

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from kvstore.tier import kernel

log = logging.getLogger(__name__)

Buffer = memoryview
"""Contiguous bytes, 4096-aligned and a multiple of 4096 long wherever files are read or written."""
SMALL_FILE_BYTES_MAX: Final = 1 << 20
_IN_MEMORY: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""Types of file systems whose files are memory, by their magic numbers."""


class FileSystem(NamedTuple):
    """The file system of a directory.

    Attributes:
        name: its id; equal for directories that share their space.
        total_bytes: its size; 0 = unknown.
        free_bytes: free bytes for this user.
        in_memory: its type if its files are in memory, else empty.
    """

    name: int
    total_bytes: int
    free_bytes: int
    in_memory: str = ""


class Disk(Protocol):
    """File operations by path and descriptor; every call raises the OSError of the system call.

    Descriptors are small integers that only this implementation understands.
    """

    def make_directory(self, path: Path) -> None:
        """Create a directory and its parents, durably; no error if it exists."""
        ...

    def file_system(self, path: Path) -> FileSystem:
        """The file system of a directory."""
        ...

    def names(self, path: Path) -> list[str]:
        """Names in a directory, in any order."""
        ...

    def lock(self, path: Path) -> int:
        """Lock a directory for this process; BlockingIOError if another process has the lock.

        Returns:
            A descriptor; :meth:`close` releases the lock.
        """
        ...

    def takes_direct_io(self, path: Path) -> bool:
        """Whether files in this directory support direct I/O, without the page cache."""
        ...

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        """Create a file and allocate its blocks, for this user only; FileExistsError if it exists.

        Its name is durable after :meth:`sync_directory`. On an error the file is removed. Where the
        file system cannot allocate, the file is sparse, and a later write may find the disk full.
        """
        ...

    def open(self, path: Path, *, direct: bool) -> int:
        """Open a file for reading and writing; EINVAL or ELOOP if it is not a regular file."""
        ...

    def size(self, descriptor: int) -> int:
        """Size of a file in bytes."""
        ...

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As ``pwritev``: returns the bytes written, perhaps fewer than given."""
        ...

    def read(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As ``preadv``: returns the bytes read, fewer at the end of the file."""
        ...

    def sync(self, descriptor: int) -> None:
        """As ``fdatasync``."""
        ...

    def close(self, descriptor: int) -> None:
        """Close a file, or release a lock."""
        ...

    def remove(self, path: Path) -> None:
        """Delete a file; durable after :meth:`sync_directory`."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make created and deleted names in a directory durable."""
        ...

    def read_file(self, path: Path) -> bytes:
        """Content of a small file; FileNotFoundError if it does not exist, EFBIG if it is large."""
        ...

    def write_file(self, path: Path, content: bytes) -> None:
        """Create or replace a small file, durably and atomically."""
        ...

    def random_id(self) -> bytes:
        """16 random bytes."""
        ...


class OSDisk:
    """The disk of this machine."""

    def __init__(self) -> None:
        self._says_sparse = True

    def make_directory(self, path: Path) -> None:
        """See :class:`Disk`. Also syncs names that an earlier process created and did not sync."""
        path = path.absolute()
        missing = [one for one in (path, *path.parents) if not one.exists()]
        if not missing and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        known = missing[-1].parent if missing else path
        device = known.stat().st_dev
        for above in known.parents:
            if above.stat().st_dev != device:
                break  # its names are on another file system
            with suppress(PermissionError):  # a directory that cannot be read was not written by us
                _sync(above)
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            try:
                self.sync_directory(one.parent)
            except PermissionError:  # a directory may be writable but not readable
                os.sync()

    def file_system(self, path: Path) -> FileSystem:
        """See :class:`Disk`."""
        found = os.statvfs(path)
        kind = _IN_MEMORY.get(kernel.file_system_type(str(path)), "")
        total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return FileSystem(path.stat().st_dev, total, free, kind)

    def names(self, path: Path) -> list[str]:
        """See :class:`Disk`."""
        return [entry.name for entry in path.iterdir()]

    def lock(self, path: Path) -> int:
        """See :class:`Disk`. An ``flock`` on the directory, released when the process ends."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def takes_direct_io(self, path: Path) -> bool:
        """See :class:`Disk`. Tries it with a temporary file."""
        probe = path / ".direct-io-probe"
        probe.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        try:
            descriptor = os.open(probe, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            os.close(os.open(probe, flags, 0o600))
            return False
        else:
            os.close(descriptor)
            return True
        finally:
            probe.unlink(missing_ok=True)

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        """See :class:`Disk`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            self._allocate(descriptor, size_bytes, path)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor

    def _allocate(self, descriptor: int, size_bytes: int, path: Path) -> None:
        """Allocate blocks; unlike ``posix_fallocate`` it never writes (unaligned) zeros."""
        try:
            kernel.allocate(descriptor, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.ftruncate(descriptor, size_bytes)
            if self._says_sparse:
                self._says_sparse = False
                log.warning(
                    "%s: this file system cannot allocate files (%s): if it is full, writing a page"
                    " fails", path.parent, error.strerror,
                )  # fmt: skip

    def open(self, path: Path, *, direct: bool) -> int:
        """See :class:`Disk`. Does not follow a link, and does not block on a pipe or device."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return descriptor

    def size(self, descriptor: int) -> int:
        """See :class:`Disk`."""
        return os.fstat(descriptor).st_size

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See :class:`Disk`."""
        return os.pwritev(descriptor, buffers, offset)

    def read(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """See :class:`Disk`."""
        return os.preadv(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        os.fdatasync(descriptor)

    def close(self, descriptor: int) -> None:
        """See :class:`Disk`."""
        os.close(descriptor)

    def remove(self, path: Path) -> None:
        """See :class:`Disk`."""
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """See :class:`Disk`."""
        _sync(path)

    def read_file(self, path: Path) -> bytes:
        """See :class:`Disk`."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if found.st_size > SMALL_FILE_BYTES_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            return os.read(descriptor, SMALL_FILE_BYTES_MAX)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, content: bytes) -> None:
        """See :class:`Disk`. Writes a temporary file, syncs it and renames it."""
        beside = path.with_name(f"{path.name}.new")
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        self.sync_directory(path.parent)

    def random_id(self) -> bytes:
        """See :class:`Disk`."""
        return os.urandom(16)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
