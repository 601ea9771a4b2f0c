"""A job of the mover: pages, their pieces, and the operation.

Both implementations accept it, :class:`~kvstore.mover.native.Native` and
:class:`~kvstore.mover.fallback.Fallback`. Memory is passed as addresses.
"""

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import InvalidArgument

Addresses = npt.NDArray[np.uint64]
Digests = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""The bytes of one page; any dtype."""

STEP_BYTES: Final = 256 * 1024
"""Bytes moved between two checks of the cancel word, as in ``_mover.c``."""
_ADDRESSES: Final = 1 << 64


class Mode(IntEnum):
    """The operation of a job, as in ``_mover.c``."""

    DIGEST = 0
    """Digest pages; nothing is copied."""
    GATHER = 1
    """Copy pieces into pages, and digest the pages in the same pass."""
    SCATTER = 2
    """Copy pages into pieces, and verify them in the same pass."""
    SCATTER_SEGMENTS = 3
    """Verify all pages, then copy segment after segment of the good ones."""


class Word(IntEnum):
    """The words of a progress block, as in ``_mover.c``."""

    DONE = 0
    """Number of segments that are copied, for every verified page."""
    FINISHED = 1
    """Not 0: the job's owner has marked it as ended."""
    EVENT = 2
    """Incremented with every change of a word that wakes waiters; they sleep on it (futex)."""
    GOOD = 3
    """Number of pages before the first that failed verification."""
    CANCEL = 4
    """Not 0: the job must end at its next step."""


class Pieces(NamedTuple):
    """The scattered side of a job, in page order.

    Attributes:
        address: start address of each piece, shape (pieces,), uint64.
        length: bytes of each piece, at least 1, shape (pieces,), uint64. Multiples of 64 are
            fastest.
        end: number of pieces up to the end of each segment, shape (pages * segments,), int64: the
            pieces of page p, segment s are ``end[p*segments+s-1]`` to ``end[p*segments+s]``.
        segments: parts of a page that waiters can wait for: 1, or the number of layers.
    """

    address: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    end: npt.NDArray[np.int64]
    segments: int

    @classmethod
    def contiguous(cls, addresses: Addresses, page_bytes: int) -> "Pieces":
        """Pages of one piece each.

        Args:
            addresses: start address of each page, shape (pages,), uint64.
            page_bytes: bytes of each page.
        """
        count = len(addresses)
        length = np.empty(count, dtype=np.uint64)
        length.fill(page_bytes)  # in a third of the time of np.full
        return cls(addresses, length, np.arange(1, count + 1, dtype=np.int64), 1)

    @classmethod
    def of_buffers(
        cls, buffers: Sequence[Buffer], page_bytes: int, *, writable: bool = False
    ) -> "Pieces":
        """Pages in one buffer each, of ``page_bytes``; the caller keeps them alive.

        Raises:
            InvalidArgument: a buffer has another size, is not contiguous, or is not writable.
        """
        found = []
        field, need = "pages", "C-contiguous"
        if writable:
            field, need = "out", "writable and C-contiguous"
        for index, buffer in enumerate(buffers):
            if isinstance(buffer, np.ndarray):
                array, contiguous = buffer, buffer.flags.c_contiguous
            else:
                view = memoryview(buffer)
                contiguous = view.c_contiguous
                array = np.frombuffer(view if contiguous else b"", dtype=np.uint8)
            if not contiguous or (writable and not array.flags.writeable):
                raise InvalidArgument(field, f"page {index} is not {need}")
            if array.nbytes != page_bytes:
                raise InvalidArgument(
                    field, f"page {index} has {array.nbytes} bytes, not {page_bytes}"
                )
            found.append(array.__array_interface__["data"][0])  # twice as fast as array.ctypes
        return cls.contiguous(np.array(found, dtype=np.uint64), page_bytes)

    @classmethod
    def joined(cls, parts: Sequence["Pieces"]) -> "Pieces":
        """The pages of several parts in order; all have the same number of segments."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(len(part.address) for part in parts[:-1])])
        return cls(
            np.concatenate([part.address for part in parts]),
            np.concatenate([part.length for part in parts]),
            np.concatenate([part.end + at for part, at in zip(parts, before, strict=True)]),
            parts[0].segments,
        )

    def moved(self, offset: int) -> "Pieces":
        """The same pieces, each ``offset`` bytes behind; negative = before."""
        return self._replace(address=self.address + np.int64(offset).view(np.uint64))

    def pages(self, start: int, stop: int) -> "Pieces":
        """The pieces of pages ``start`` to ``stop``, not copied."""
        first, last = start * self.segments, stop * self.segments
        if not first and last == len(self.end):
            return self
        begin = int(self.end[first - 1]) if first else 0
        end = int(self.end[last - 1]) if last else 0
        ends = self.end[first:last] - begin if begin else self.end[first:last]
        return Pieces(self.address[begin:end], self.length[begin:end], ends, self.segments)

    def choose(self, wanted: npt.NDArray[np.intp]) -> "Pieces":
        """The pieces of the pages with the numbers ``wanted``, in ascending order."""
        counts = np.diff(self.end, prepend=0).reshape(-1, self.segments)
        chosen = np.zeros(len(counts), dtype=bool)
        chosen[wanted] = True
        kept = np.repeat(chosen, counts.sum(axis=1))
        ends = np.cumsum(counts[chosen].reshape(-1), dtype=np.int64)
        return Pieces(self.address[kept], self.length[kept], ends, self.segments)


class Words:
    """The words that a job and its waiters share.

    Attributes:
        words: one word for each :class:`Word`, shape (16,), uint32.
        address: address of ``words``.
        changed: condition for waiters of the fallback.
        before: number of verified pages before the pages of the mover's job.
    """

    __slots__ = ("address", "before", "changed", "words")

    def __init__(self) -> None:
        self.words: npt.NDArray[np.uint32] = np.zeros(16, dtype=np.uint32)
        self.address: int = self.words.ctypes.data
        self.changed = threading.Condition()
        self.before = 0

    def cancel(self) -> None:
        """Ask the job to end at its next step; it has ended when its call returns."""
        self.words[Word.CANCEL] = 1

    @property
    def done(self) -> int:
        """Number of copied segments; wait for a segment before you read its bytes."""
        return int(self.words[Word.DONE])

    @property
    def good_pages(self) -> int:
        """Number of pages before the first that failed; known when a segment is done.

        Read it again after every wait: a page whose bytes change before its last segment was copied
        is not good any more, even if the change was in another segment.
        """
        return self.before + int(self.words[Word.GOOD])

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return bool(self.words[Word.CANCEL])

    @property
    def finished(self) -> bool:
        """Whether the job's owner has marked it as ended."""
        return bool(self.words[Word.FINISHED])


class MoverJob(NamedTuple):
    """One job of an implementation: its shapes are checked, the values of its pieces are not.

    Shapes and dtypes are those of the public functions, with n at least 1. ``digests`` is written;
    a scatter only compares it, and writes ``ok``. Written arrays are C-contiguous.
    """

    mode: Mode
    page_bytes: int
    pages: Addresses
    seeds: npt.NDArray[np.uint64]
    digests: Digests
    pieces: Pieces | None
    ok: npt.NDArray[np.bool_] | None
    progress: Words | None

    @property
    def is_cancelled(self) -> bool:
        """Whether the job was cancelled."""
        return self.progress is not None and self.progress.cancelled


def first_wrong(job: MoverJob) -> int | None:
    """Index of the first page with an invalid address, or that its pieces do not fill exactly."""
    pieces, begin = job.pieces, 0
    for page, address in enumerate(job.pages.tolist()):
        if not address or address + job.page_bytes > _ADDRESSES:
            return page
        if pieces is None:
            continue
        ends = pieces.end[page * pieces.segments : (page + 1) * pieces.segments]
        if begin > ends[0] or (np.diff(ends) < 0).any() or ends[-1] > len(pieces.length):
            return page
        part = slice(begin, int(ends[-1]))
        lengths, addresses = pieces.length[part].tolist(), pieces.address[part].tolist()
        if sum(lengths) != job.page_bytes or not all(lengths) or not all(addresses):
            return page
        if any(map(lambda at, size: at + size > _ADDRESSES, addresses, lengths)):
            return page
        begin = part.stop
    return None
