"""Reads and writes of several buffers at once, all of them or an error."""

import ctypes
import errno
import mmap
from collections.abc import Sequence

from kvstore.state.tree.places import BLOCK_BYTES
from kvstore.tier.disk import Disk


def aligned(count_bytes: int) -> memoryview:
    """Zeroed memory of its own that direct I/O takes; freed with its last view."""
    return memoryview(mmap.mmap(-1, count_bytes))


def memory_at(address: int, count_bytes: int) -> memoryview:
    """A view of memory that the caller keeps mapped while the view is used."""
    return memoryview((ctypes.c_char * count_bytes).from_address(address)).cast("B")


def write_fully(disk: Disk, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of ``buffers``, going on after a short write from the last whole block.

    Raises:
        OSError: the system's, or EIO when a write gets nowhere.
    """
    left = list(buffers)
    while left:
        done = disk.write(descriptor, left, offset)
        if done < sum(map(len, left)):
            done -= done % BLOCK_BYTES
            if not done:
                raise OSError(errno.EIO, "a write got nowhere")
        offset += done
        left = _behind(left, done)


def read_fully(disk: Disk, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill ``buffers``, or as much of them as the file has.

    Returns:
        bytes read.

    Raises:
        OSError: the system's.
    """
    left, total = list(buffers), 0
    while left:
        done = disk.read(descriptor, left, offset + total)
        if done < sum(map(len, left)):
            whole = done - done % BLOCK_BYTES
            if not whole:
                return total + done
            done = whole
        total += done
        left = _behind(left, done)
    return total


def _behind(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the buffers after their first ``done`` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
