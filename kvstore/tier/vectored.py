"""Vectored reads and writes that transfer all bytes or raise an error."""

import errno
import mmap
from collections.abc import Sequence

from kvstore.protocol.errors import TierUnavailable
from kvstore.state.tree.places import BLOCK_BYTES
from kvstore.tier.disk import Disk


def aligned(count_bytes: int) -> memoryview:
    """New zeroed memory, aligned for direct I/O; freed with its last view.

    Raises:
        TierUnavailable: there is no memory now. It ends one job, not the thread that does the jobs.
    """
    try:
        return memoryview(mmap.mmap(-1, count_bytes))
    except OSError as error:
        why = f"no memory for {count_bytes} bytes of disk I/O: {error.strerror or error}"
        raise TierUnavailable(why) from error


def write_fully(disk: Disk, descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of ``buffers``; after a short write, continue from the last whole block.

    Raises:
        OSError: of the system call, or EIO if a write makes no progress.
    """
    left = list(buffers)
    while left:
        done = disk.write(descriptor, left, offset)
        if done < sum(map(len, left)):
            done -= done % BLOCK_BYTES
            if not done:
                raise OSError(errno.EIO, "a write made no progress")
        offset += done
        left = _behind(left, done)


def read_fully(disk: Disk, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill ``buffers``, or as much of them as the file contains.

    Returns:
        Bytes read.

    Raises:
        OSError: of the system call.
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
    """The buffers without their first ``done`` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
