"""Reads a segment from front to back in windows; the next window is read ahead."""

from concurrent.futures import Executor, Future, wait
from typing import Final, NamedTuple

import numpy as np

from kvstore.state.tree.places import BLOCK_BYTES
from kvstore.tier.disk import Disk
from kvstore.tier.vectored import aligned, read_fully

WINDOW_BYTES: Final = 16 << 20
PIECE_BYTES: Final = 4 << 20
"""Bytes read by one call: several calls at a time keep a disk busy."""
CARRY_BYTES: Final = (8 << 20) + (1 << 16)
"""Maximum bytes of a record at the end of a window that are copied to the next window; more are
read again."""


class SegmentFile(NamedTuple):
    """An open segment; ``readers``: threads that read its pieces, or None to read in the caller."""

    disk: Disk
    descriptor: int
    size: int
    readers: Executor | None

    def read(self, target: memoryview, offset: int) -> list["Future[int]"]:
        """Start to fill ``target``; each future returns the bytes read of one piece, in order."""
        pieces = [target[at : at + PIECE_BYTES] for at in range(0, len(target), PIECE_BYTES)]
        futures: list[Future[int]] = []
        for index, piece in enumerate(pieces):
            job = (self.disk, self.descriptor, [piece], offset + index * PIECE_BYTES)
            if self.readers is not None:
                futures.append(self.readers.submit(read_fully, *job))
            else:
                futures.append(Future())
                futures[-1].set_result(read_fully(*job))
        return futures


class Window:
    """The window of a scan on a segment.

    Args:
        file: the segment; must stay open until :meth:`close`.
    """

    def __init__(self, file: SegmentFile) -> None:
        self.size = file.size - file.size % BLOCK_BYTES
        self._file = file
        self._window_bytes = min(WINDOW_BYTES, max(self.size, BLOCK_BYTES))
        self._buffers = [self._new_buffer(), self._new_buffer()]
        """The first one is visible, the second is read ahead."""
        self._seen = self._buffers[0][:0]
        self._start = self._stop = 0
        self._ahead: list[Future[int]] = []

    def load(self, at: int, length: int) -> bool:
        """Make these bytes available; returns False if the file is too short.

        Raises:
            OSError: a read failed.
        """
        if self._start <= at and at + length <= self._stop:
            return True
        if at + length > self.size:
            return False
        if not self._step(at, length):
            self._jump(at, length)
        if self._file.readers is not None and self._stop < self.size:
            target = self._buffers[1][CARRY_BYTES:][: self.size - self._stop]
            self._ahead = self._file.read(target, self._stop)
        return at + length <= self._stop

    def bytes(self, at: int, length: int) -> memoryview:
        """Loaded bytes, valid until the next :meth:`load`; blocks are 4096-aligned."""
        assert self._start <= at <= at + length <= self._stop
        return self._seen[at - self._start : at - self._start + length]

    def find(self, at: int, word: int) -> int:
        """The first block from ``at`` on that starts with this uint64, or the end of the window."""
        if not self._start <= at < self._stop:
            return at
        blocks = np.frombuffer(self._seen, dtype="<u8")[:: BLOCK_BYTES // 8]
        ahead = blocks[(at - self._start) // BLOCK_BYTES :]
        found = np.flatnonzero(ahead == word)
        return at + int(found[0] if len(found) else len(ahead)) * BLOCK_BYTES

    def close(self) -> None:
        """Wait for reads in progress."""
        wait(self._ahead)
        self._ahead = []

    def _new_buffer(self) -> memoryview:
        return aligned(CARRY_BYTES + self._window_bytes)

    def _step(self, at: int, length: int) -> bool:
        """Move to the data that was read ahead, and carry the last bytes of the old window over."""
        carry, done = self._stop - at, self._collect(self._ahead)
        if not done or not 0 <= carry <= CARRY_BYTES or at + length > self._stop + done:
            return False
        self._buffers.reverse()
        seen = self._buffers[0][CARRY_BYTES - carry : CARRY_BYTES + done]
        seen[:carry] = self._seen[len(self._seen) - carry :]
        self._seen, self._start, self._stop = seen, at, self._stop + done
        assert len(seen) == self._stop - at
        return True

    def _jump(self, at: int, length: int) -> None:
        """Read again from ``at`` on, into a larger buffer if necessary."""
        if length > self._window_bytes:
            self._window_bytes = length
            self._buffers = [self._new_buffer(), self._new_buffer()]
        target = self._buffers[0][CARRY_BYTES:][: self.size - at]
        done = self._collect(self._file.read(target, at))
        self._seen, self._start, self._stop = target[: done - done % BLOCK_BYTES], at, at + done
        self._stop -= done % BLOCK_BYTES
        assert len(self._seen) == self._stop - at

    def _collect(self, futures: list["Future[int]"]) -> int:
        """Total bytes read, up to the first short piece."""
        self._ahead = []
        wait(futures)
        total = 0
        for index, future in enumerate(futures):
            if total == index * PIECE_BYTES:
                total += future.result()
        return total
