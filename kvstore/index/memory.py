"""Shared memory of the index's table. It has no name: nothing stays when its users end."""

import fcntl
import mmap
import os


class TableMemory:
    """One memfd; its writer maps it with :meth:`create`, readers with :meth:`attach`, read-only."""

    def __init__(self, fd: int, mapped: mmap.mmap) -> None:
        self.fd = fd
        self._mapped = mapped
        self.buffer = memoryview(mapped)

    @classmethod
    def create(cls, size: int) -> "TableMemory":
        """Make zeroed memory; the kernel allocates pages when they are written.

        Args:
            size: in bytes, a multiple of a page.

        Raises:
            OSError: the kernel refuses it.
        """
        fd = os.memfd_create("kvstore:index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            # Nobody can make it smaller under a reader.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, mmap.mmap(fd, size))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, *, write: bool = False) -> "TableMemory":
        """Map memory that another process has made.

        Args:
            fd: its descriptor, which this object owns from now on.
            write: this process writes it; else it is mapped read-only.

        Raises:
            OSError: it cannot be mapped, or its maker could still shrink it.
        """
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError("this is not the memory of an index: it can shrink")
            return cls(fd, mmap.mmap(fd, os.fstat(fd).st_size, prot=prot))
        except BaseException:
            os.close(fd)
            raise

    def release(self, start: int, size: int) -> None:
        """Give whole pages back to the kernel; they read as zero afterwards.

        Args:
            start: in bytes, a multiple of a page.
            size: in bytes, a multiple of a page.
        """
        self._mapped.madvise(mmap.MADV_REMOVE, start, size)

    def close(self) -> None:
        """Close the descriptor. The memory goes when nothing refers to it any more."""
        if self.fd >= 0:
            os.close(self.fd)
