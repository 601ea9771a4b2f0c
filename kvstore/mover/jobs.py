"""What a job of the mover is: pages, the pieces they are made of, and what is to be done.

Both implementations take it, :class:`~kvstore.mover.native.Native` and
:class:`~kvstore.mover.fallback.Fallback`. Memory is passed as addresses.
"""

import threading
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidArgument

Addresses = npt.NDArray[np.uint64]
Digests = npt.NDArray[np.uint8]
Buffer = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""What holds the bytes of one page; any dtype."""

STEP_BYTES: Final = 256 * 1024
"""What is moved between two looks at the cancel word, as in ``_mover.c``."""
_ADDRESSES: Final = 1 << 64


class Mode(IntEnum):
    """What a job does, as in ``_mover.c``."""

    DIGEST = 0
    """Digest pages; nothing is copied."""
    GATHER = 1
    """Copy pieces into pages, and digest these in the same pass."""
    SCATTER = 2
    """Copy pages into pieces, and verify them in the same pass."""
    SCATTER_SEGMENTS = 3
    """Verify all pages, then copy segment after segment of those that are good."""


class Word(IntEnum):
    """The words of a progress block, as in ``_mover.c``."""

    DONE = 0
    """Segments of every verified page that are in place."""
    FINISHED = 1
    """Not 0: the job's owner said that it has ended."""
    EVENT = 2
    """Rises at every change of another word that waiters are woken for; they sleep on it."""
    GOOD = 3
    """Pages before the first that did not verify."""
    CANCEL = 4
    """Not 0: the job is to end at its next step."""


class Pieces(NamedTuple):
    """The scattered side of a job, in page order.

    Attributes:
        address: shape (pieces,), uint64: where each piece lies.
        length: shape (pieces,), uint64: bytes of each, at least 1. Multiples of 64 are fastest.
        end: shape (pages * segments,), int64: how many pieces precede the end of each segment:
            those of page p, segment s are ``end[p*segments+s-1]`` to ``end[p*segments+s]``.
        segments: parts of a page that are handed over one by one: 1, or the number of layers.
    """

    address: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    end: npt.NDArray[np.int64]
    segments: int

    @classmethod
    def contiguous(cls, addresses: Addresses, page_bytes: int) -> "Pieces":
        """Pages that are one piece each.

        Args:
            addresses: shape (pages,), uint64: where each page begins.
            page_bytes: bytes of each page.
        """
        count = len(addresses)
        length = np.full(count, page_bytes, dtype=np.uint64)
        return cls(addresses, length, np.arange(1, count + 1, dtype=np.int64), 1)

    @classmethod
    def of_buffers(
        cls, buffers: Sequence[Buffer], page_bytes: int, *, writable: bool = False
    ) -> "Pieces":
        """Pages that are one buffer each, of ``page_bytes``; the caller keeps them alive.

        Raises:
            InvalidArgument: one has another size, is not contiguous, or may not be written.
        """
        found = np.empty(len(buffers), dtype=np.uint64)
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
            found[index] = array.__array_interface__["data"][0]  # twice as fast as array.ctypes
        return cls.contiguous(found, page_bytes)

    def pages(self, start: int, stop: int) -> "Pieces":
        """The pieces of pages ``start`` to ``stop``, without copying them."""
        first, last = start * self.segments, stop * self.segments
        begin = int(self.end[first - 1]) if first else 0
        end = int(self.end[last - 1]) if last else 0
        ends = self.end[first:last] - begin if begin else self.end[first:last]
        return Pieces(self.address[begin:end], self.length[begin:end], ends, self.segments)

    def choose(self, wanted: npt.NDArray[np.intp]) -> "Pieces":
        """The pieces of the pages numbered in ``wanted``, rising."""
        counts = np.diff(self.end, prepend=0).reshape(-1, self.segments)
        chosen = np.zeros(len(counts), dtype=bool)
        chosen[wanted] = True
        kept = np.repeat(chosen, counts.sum(axis=1))
        ends = np.cumsum(counts[chosen].reshape(-1), dtype=np.int64)
        return Pieces(self.address[kept], self.length[kept], ends, self.segments)


class Words:
    """The words that a job and those who wait for it share.

    Attributes:
        words: shape (16,), uint32: one word for each :class:`Word`.
        address: of ``words``.
        changed: what waiters of the fallback wait on.
        before: verified pages that precede those the mover was given.
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
        """Segments that are in place; wait before you read what they hold."""
        return int(self.words[Word.DONE])

    @property
    def good_pages(self) -> int:
        """Pages before the first that did not verify; known once a segment is done.

        Look again after every wait: a page whose bytes change before its last segment was copied is
        good no longer, and not of the segment that changed either.
        """
        return self.before + int(self.words[Word.GOOD])

    @property
    def cancelled(self) -> bool:
        """Somebody called :meth:`cancel`."""
        return bool(self.words[Word.CANCEL])

    @property
    def finished(self) -> bool:
        """The job's owner said that it has ended."""
        return bool(self.words[Word.FINISHED])


class MoverJob(NamedTuple):
    """One job as both implementations take it: shapes are checked, what pieces say is not.

    Shapes and dtypes are those of the public functions, with n at least 1. ``digests`` is written,
    or compared with by a scatter, which writes ``ok``; what is written is C-contiguous.
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
        """Whoever waits for it asked it to end."""
        return self.progress is not None and self.progress.cancelled


def first_wrong(job: MoverJob) -> int | None:
    """Index of the first page that is nowhere, or that its pieces do not fill exactly."""
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
