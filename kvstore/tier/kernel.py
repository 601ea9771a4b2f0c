"""System calls that Python's library lacks, or that would need one more descriptor there."""

import ctypes
import errno
import mmap
import os
import re
from typing import Final

_PUNCH_HOLE: Final = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def allocate(descriptor: int, size_bytes: int) -> None:
    """Allocate a file up to this size. Unlike ``posix_fallocate`` it never writes zeros instead.

    Raises:
        OSError: of the system call; EOPNOTSUPP if the file system does not support it.
    """
    _fallocate(descriptor, 0, size_bytes)


def punch(descriptor: int, size_bytes: int) -> None:
    """Free the memory or blocks of a file's first bytes; they read as zeros, its size stays.

    Raises:
        OSError: of the system call.
    """
    _fallocate(descriptor, _PUNCH_HOLE, size_bytes)


def map_shared(descriptor: int, size_bytes: int, *, write: bool = True) -> int:
    """Map a file to read, or to read and write; returns the address and keeps no descriptor.

    Raises:
        OSError: of the system call.
    """
    rights = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
    address = _libc.mmap(None, size_bytes, rights, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise _error()
    return int(address)


def unmap(address: int, size_bytes: int) -> None:
    """Undo :func:`map_shared`."""
    if _libc.munmap(address, size_bytes):
        raise _error()


def keep_from_children(address: int, size_bytes: int) -> None:
    """Do not map this memory in child processes that are forked from now on.

    Raises:
        OSError: of the system call.
    """
    if _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK):
        raise _error()


def give_back(address: int, size_bytes: int) -> None:
    """:func:`punch` the file that is mapped at this address.

    Raises:
        OSError: of the system call.
    """
    if _libc.madvise(address, size_bytes, mmap.MADV_REMOVE):
        raise _error()


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Ask for huge pages where this memory is not there yet; nothing where there are none."""
    _libc.madvise(address, size_bytes, mmap.MADV_HUGEPAGE)


def huge_bytes(address: int) -> int:
    """Bytes of huge pages in the shared mapping that begins at an address; 0 if it is unknown."""
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as maps:  # noqa: PTH123
        found = False
        for line in maps:
            if re.match("[0-9a-f]+-", line):
                found = line.startswith(f"{address:x}-")
            elif found and line.startswith("ShmemPmdMapped:"):
                return int(line.split()[1]) << 10
    return 0


def file_system_type(path: str) -> int:
    """The magic number of a path's file system, as in ``linux/magic.h``.

    Raises:
        OSError: of the system call.
    """
    found = (ctypes.c_long * 32)()  # larger than a struct statfs; its first word is the type
    if _libc.statfs(os.fsencode(path), found):
        raise _error()
    return int(found[0])


def _fallocate(descriptor: int, mode: int, size_bytes: int) -> None:
    while _libc.fallocate(descriptor, mode, 0, size_bytes):
        if ctypes.get_errno() != errno.EINTR:
            raise _error()


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
