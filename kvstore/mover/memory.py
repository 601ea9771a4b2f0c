"""Memory by its address: map shared files, look at bytes.

These system calls are not in Python's library, or would need one more descriptor there.
"""

import ctypes
import mmap
import os
import re
from typing import Final

_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def memory_at(address: int, count_bytes: int) -> memoryview:
    """A view of memory at an address; the caller must keep it mapped while the view is used."""
    return memoryview((ctypes.c_char * count_bytes).from_address(address)).cast("B")


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
    """Free the memory of the shared file that is mapped at this address; it reads as zeros.

    Raises:
        OSError: of the system call.
    """
    if _libc.madvise(address, size_bytes, mmap.MADV_REMOVE):
        raise _error()


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Request huge pages for this memory where it is not populated yet, if supported."""
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


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
