"""The mover without ``_mover.c``: the same with ``memmove`` and the xxhash package, slower."""

import ctypes
import os
from collections.abc import Iterator
from typing import Final

import numpy as np
import xxhash

from kvstore.mover.jobs import STEP_BYTES, Mode, MoverJob, Word, Words, first_wrong


class Fallback:
    """See :class:`~kvstore.mover.native.Native`."""

    description: Final = "fallback numpy+xxhash"

    def move(self, job: MoverJob) -> int:
        """As :meth:`kvstore.mover.native.Native.move`."""
        wrong = first_wrong(job)
        if wrong is not None:
            return -1 - wrong
        if job.mode is Mode.SCATTER_SEGMENTS:
            self._by_segment(job)
            return len(job.pages)
        copy = job.mode is not Mode.DIGEST
        reading = _Reading(job)
        for page in range(len(job.pages)):
            hasher = reading.hasher(page)
            if not all(reading.run(hasher, page, s, copy=copy) for s in reading.segments):
                return page
            found = np.frombuffer(hasher.digest(), dtype=np.uint8)
            if job.ok is None:
                job.digests[page] = found
            else:
                job.ok[page] = bool((found == job.digests[page]).all())
        return len(job.pages)

    def _by_segment(self, job: MoverJob) -> None:
        """Verify all pages, then copy segment after segment; ``ok`` is set at the end."""
        assert job.ok is not None
        reading, pages = _Reading(job), range(len(job.pages))
        marks: list[list[bytes]] = []
        for page in pages:
            hasher = reading.hasher(page)
            marks.append([])
            for segment in reading.segments:
                if not reading.run(hasher, page, segment, copy=False):
                    return
                marks[page].append(hasher.digest())
        good = [marks[page][-1] == job.digests[page].tobytes() for page in pages]
        hashers = [reading.hasher(page) for page in pages]
        for segment in reading.segments:
            for page in np.flatnonzero(good).tolist():
                if not reading.run(hashers[page], page, segment, copy=True):
                    return
                # The copied bytes must be the verified ones, or the page is not good any more.
                good[page] = hashers[page].digest() == marks[page][segment]
            if job.progress is not None:
                job.progress.words[Word.GOOD] = len(good) if all(good) else good.index(False)
                self.publish(job.progress, Word.DONE, segment + 1)
        job.ok[:] = good

    def publish(self, progress: Words, word: Word, value: int) -> None:
        """As :meth:`kvstore.mover.Native.publish`."""
        with progress.changed:
            progress.words[word] = value
            progress.changed.notify_all()

    def wait(self, progress: Words, count: int, timeout_s: float) -> bool | None:
        """As :meth:`kvstore.mover.Native.wait`."""
        with progress.changed:
            progress.changed.wait_for(
                lambda: progress.done >= count or progress.finished, timeout_s
            )
            return True if progress.done >= count else False if progress.finished else None

    def populate(self, address: int, length: int, *, write: bool) -> None:
        """See :func:`kvstore.mover.populate`; nothing else may write to the memory meanwhile."""
        step = os.sysconf("SC_PAGE_SIZE")
        for at in range(address - address % step, address + length, step):
            byte = ctypes.c_ubyte.from_address(at)
            value = byte.value
            if write:
                byte.value = value


class _Reading:
    """Reads a job's source once into a private buffer, which is digested and copied."""

    def __init__(self, job: MoverJob) -> None:
        self._job = job
        self._buffer = np.empty(min(STEP_BYTES, job.page_bytes), dtype=np.uint8)
        self.segments = range(job.pieces.segments if job.pieces is not None else 1)
        if job.pieces is not None:
            # Every page is filled, so piece i begins where the lengths before it say.
            before = np.cumsum(job.pieces.length) - job.pieces.length
            page = before // np.uint64(job.page_bytes)
            self._places = job.pages[page.astype(np.intp)] + before % np.uint64(job.page_bytes)

    def hasher(self, page: int) -> xxhash.xxh3_128:
        """A new hasher for a page."""
        return xxhash.xxh3_128(seed=int(self._job.seeds[page]))

    def run(self, hasher: xxhash.xxh3_128, page: int, segment: int, *, copy: bool) -> bool:
        """Read a segment of a page once, digest and copy it; returns False if cancelled."""
        gathers, buffer = self._job.mode is Mode.GATHER, self._buffer.ctypes.data
        for place, piece, length in self._steps(page, segment):
            if self._job.is_cancelled:
                return False
            source, target = (piece, place) if gathers else (place, piece)
            ctypes.memmove(buffer, source, length)
            hasher.update(self._buffer[:length].data)
            if copy:
                ctypes.memmove(target, buffer, length)
        return True

    def _steps(self, page: int, segment: int) -> Iterator[tuple[int, int, int]]:
        """(address in the page, address in its piece, number of bytes) of each step."""
        pieces = self._job.pieces
        if pieces is None:
            parts = [(int(self._job.pages[page]), 0, self._job.page_bytes)]
        else:
            slot = page * pieces.segments + segment
            part = slice(int(pieces.end[slot - 1]) if slot else 0, int(pieces.end[slot]))
            lists = (self._places[part], pieces.address[part], pieces.length[part])
            parts = list(zip(*(each.tolist() for each in lists), strict=True))
        for place, piece, length in parts:
            for step in range(0, length, STEP_BYTES):
                yield place + step, piece + step, min(STEP_BYTES, length - step)
