"""System calls for files that Python's library lacks."""

import ctypes
import errno
import os
from typing import Final

_PUNCH_HOLE: Final = 0x01 | 0x02
"""``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]


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
