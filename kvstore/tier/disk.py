"""What the SSD log asks of the operating system, so that a simulated disk can stand in for it."""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

Buffer = memoryview
"""Contiguous bytes, 4096-aligned and a multiple of 4096 long wherever files are read or written."""


class Disk(Protocol):
    """Files by path and descriptor; every call raises OSError as the system call would.

    Descriptors are small integers of the implementation's own.
    """

    def make_directory(self, path: Path) -> None:
        """Make a directory and those above it; one that is there is fine."""
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
        """Make a file with all of its room; FileExistsError when it is there.

        Its name is durable after :meth:`sync_directory`. Nothing is left when it fails.
        """
        ...

    def open(self, path: Path, *, direct: bool) -> int:
        """Open a file that exists, to read and write it."""
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
        """All of a small file; FileNotFoundError when it is not there."""
        ...

    def write_file(self, path: Path, content: bytes) -> None:
        """Make a small file, durably and all or nothing."""
        ...

    def random_id(self) -> bytes:
        """16 random bytes."""
        ...


class OSDisk:
    """The disk of this machine."""

    def make_directory(self, path: Path) -> None:
        """See :class:`Disk`."""
        path.mkdir(parents=True, exist_ok=True)

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
        try:
            descriptor = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            os.close(os.open(probe, os.O_RDWR | os.O_CREAT, 0o600))
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
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError:
            os.close(descriptor)
            path.unlink()
            raise
        return descriptor

    def open(self, path: Path, *, direct: bool) -> int:
        """See :class:`Disk`."""
        return os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))

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
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_file(self, path: Path) -> bytes:
        """See :class:`Disk`."""
        return path.read_bytes()

    def write_file(self, path: Path, content: bytes) -> None:
        """See :class:`Disk`: written beside its place, synced, renamed."""
        beside = path.with_name(f"{path.name}.new")
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        self.sync_directory(path.parent)

    def random_id(self) -> bytes:
        """See :class:`Disk`."""
        return os.urandom(16)
