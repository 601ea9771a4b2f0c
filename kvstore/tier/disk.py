"""What the SSD log asks of the operating system, so that a simulated disk can stand in for it."""

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
    """What a directory is on.

    Attributes:
        name: equal for directories that share their room.
        total_bytes: of all files together; 0 = it does not say.
        free_bytes: of those, what is left.
        in_memory: its kind, when its files are memory; else empty.
    """

    name: int
    total_bytes: int
    free_bytes: int
    in_memory: str = ""


class Disk(Protocol):
    """Files by path and descriptor; every call raises OSError as the system call would.

    Descriptors are small integers of the implementation's own.
    """

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it, durably; one that is there is fine."""
        ...

    def file_system(self, path: Path) -> FileSystem:
        """What a directory is on."""
        ...

    def names(self, path: Path) -> list[str]:
        """Names in a directory, in any order."""
        ...

    def lock(self, path: Path) -> int:
        """Take a directory for this process; BlockingIOError when another has it.

        Returns:
            what :meth:`close` gives it back with.
        """
        ...

    def takes_direct_io(self, path: Path) -> bool:
        """Whether files in this directory can be read and written past the page cache."""
        ...

    def create(self, path: Path, size_bytes: int, *, direct: bool) -> int:
        """Make a file with all of its room, its user's alone; FileExistsError when it is there.

        Its name is durable after :meth:`sync_directory`. Nothing is left when it fails. Where the
        file system cannot set room aside the file has its size, and the disk may be full later.
        """
        ...

    def open(self, path: Path, *, direct: bool) -> int:
        """Open a file that exists, to read and write it; EINVAL or ELOOP when it is no file."""
        ...

    def size(self, descriptor: int) -> int:
        """Bytes of a file."""
        ...

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As ``pwritev``: bytes written, perhaps fewer than given."""
        ...

    def read(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        """As ``preadv``: bytes read, fewer than asked for at the end of the file."""
        ...

    def sync(self, descriptor: int) -> None:
        """As ``fdatasync``."""
        ...

    def close(self, descriptor: int) -> None:
        """Close a file or give back a lock."""
        ...

    def remove(self, path: Path) -> None:
        """Delete a file; durable after :meth:`sync_directory`."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make names made and deleted in a directory durable."""
        ...

    def read_file(self, path: Path) -> bytes:
        """All of a small file; FileNotFoundError when it is not there, EFBIG when it is large."""
        ...

    def write_file(self, path: Path, content: bytes) -> None:
        """Make a small file, durably and all or nothing."""
        ...

    def random_id(self) -> bytes:
        """16 random bytes."""
        ...


class OSDisk:
    """The disk of this machine."""

    def __init__(self) -> None:
        self._says_sparse = True

    def make_directory(self, path: Path) -> None:
        """See :class:`Disk`. Also names that an earlier process made, and had no time to sync."""
        path = path.absolute()
        missing = [one for one in (path, *path.parents) if not one.exists()]
        if not missing and not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        known = missing[-1].parent if missing else path
        device = known.stat().st_dev
        for above in known.parents:
            if above.stat().st_dev != device:
                break  # its names are on another file system
            with suppress(PermissionError):  # what may not be read was not written by us
                _sync(above)
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            try:
                self.sync_directory(one.parent)
            except PermissionError:  # it may be written and not read
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
        """See :class:`Disk`. An ``flock`` on the directory itself, gone with its process."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def takes_direct_io(self, path: Path) -> bool:
        """See :class:`Disk`. Asks with a file that is deleted at once."""
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
        """Set room aside, not by writing zeros as ``posix_fallocate`` may, unaligned at that."""
        try:
            kernel.allocate(descriptor, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.ftruncate(descriptor, size_bytes)
            if self._says_sparse:
                self._says_sparse = False
                log.warning(
                    "%s: this file system sets no room aside (%s): that it is full shows when a"
                    " page is written", path.parent, error.strerror,
                )  # fmt: skip

    def open(self, path: Path, *, direct: bool) -> int:
        """See :class:`Disk`. A link is not followed, and nothing but a file is waited for."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_DIRECT if direct else 0)
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "this is no regular file", str(path))
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
                raise OSError(errno.EINVAL, "this is no regular file", str(path))
            if found.st_size > SMALL_FILE_BYTES_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            return os.read(descriptor, SMALL_FILE_BYTES_MAX)
        finally:
            os.close(descriptor)

    def write_file(self, path: Path, content: bytes) -> None:
        """See :class:`Disk`: written beside its place, synced, renamed."""
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
