"""The mover: copies and digests whole jobs of pages in one call, without the GIL.

A job has two sides: **pages**, each contiguous (in shared memory), and **pieces**, scattered
through an engine's pool. ``gather`` makes pages of pieces, ``scatter`` verifies pages and copies
them into pieces, ``digest`` only looks. A digest is xxh3_128 of the page's bytes under the page's
own seed, as ``xxhash.xxh3_128_digest`` writes it.

Two implementations do the same: :class:`Native` (``_mover.c`` through ctypes) and, where it was not
built, :class:`Fallback`. Memory is passed as addresses: the caller keeps it alive and mapped until
the call returns, and nothing is written after that.
"""

import ctypes
import os
import sysconfig
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidArgument, TierUnavailable
from kvstore.page import DIGEST_BYTES

Addresses = npt.NDArray[np.uint64]
Digests = npt.NDArray[np.uint8]

Order = Literal["page", "segment"]
"""What a scatter makes ready first."""

# As in ``_mover.c``: the version of its calls (no other is used), its instruction sets in order,
# and what is copied between two looks at the cancel flag.
VERSION: Final = 1
ISAS: Final = ("scalar", "sse2", "avx2", "avx512")
STEP_BYTES: Final = 256 * 1024
WAIT_MAX_S: Final = 3600.0


# In the order of ``_mover.c``: what a job does, and the words of a progress block.
Mode = IntEnum("Mode", ["DIGEST", "GATHER", "SCATTER", "SCATTER_SEGMENTS"], start=0)
Word = IntEnum("Word", ["DONE", "FINISHED", "EVENT", "GOOD", "CANCEL"], start=0)


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
        """Pages of ``page_bytes`` that are one piece each, at ``addresses`` of shape (pages,)."""
        count = len(addresses)
        length = np.full(count, page_bytes, dtype=np.uint64)
        return cls(addresses, length, np.arange(1, count + 1, dtype=np.int64), 1)

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


class Progress:
    """What a job and those who wait for it share; made for one job, usable from any thread.

    The mover counts segments up; whoever owns the job calls :meth:`finish` when it has ended, so
    that nobody waits for what will not come.

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

    def finish(self) -> None:
        """Say that the job has ended, however it went: every waiter wakes up."""
        _chosen.publish(self, Word.FINISHED, 1)

    def wait(self, segment_count: int, timeout_s: float) -> bool:
        """Wait until so many segments of every verified page are in place.

        Args:
            segment_count: i + 1 for layer i. Only a scatter in segment order counts them.
            timeout_s: seconds; at most an hour.

        Returns:
            whether they are; False when time was up or the job finished without them.
        """
        deadline = time.monotonic() + min(timeout_s, WAIT_MAX_S)
        while True:
            remaining_s = deadline - time.monotonic()
            answer = _chosen.wait(self, segment_count, max(remaining_s, 0.0))
            if answer is not None:
                return answer
            if remaining_s <= 0:
                return False

    @property
    def done(self) -> int:
        """Segments that are in place; :meth:`wait` before you read what they hold."""
        return int(self.words[Word.DONE])

    @property
    def good_pages(self) -> int:
        """Pages before the first that did not verify; known once a segment is done."""
        return self.before + int(self.words[Word.GOOD])

    @property
    def cancelled(self) -> bool:
        """Somebody called :meth:`cancel`."""
        return bool(self.words[Word.CANCEL])

    @property
    def finished(self) -> bool:
        """The job's owner called :meth:`finish`."""
        return bool(self.words[Word.FINISHED])


class Job(NamedTuple):
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
    progress: Progress | None

    @property
    def is_cancelled(self) -> bool:
        """Whoever waits for it asked it to end."""
        return self.progress is not None and self.progress.cancelled


class Native:
    """``_mover.c``, called through ctypes."""

    def __init__(self, library: ctypes.CDLL, isa: int | None = None) -> None:
        """Bind the calls; ``isa``: index into ``ISAS``, one that this machine has, or the best."""
        number, size, memory = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        self._move = library.kv_move
        self._move.restype = size
        self._move.argtypes = [number, number, size, ctypes.c_uint64, size, *[memory] * 8]
        self._publish = library.kv_publish
        self._publish.restype = None
        self._publish.argtypes = [memory, number, ctypes.c_uint32]
        self._wait = library.kv_wait
        self._wait.restype = number
        self._wait.argtypes = [memory, ctypes.c_uint32, size]
        self._populate = library.kv_populate
        self._populate.restype = number
        self._populate.argtypes = [ctypes.c_uint64, ctypes.c_uint64, number]
        self._isa = library.kv_best_isa() if isa is None else isa
        self.description = f"native {ISAS[self._isa]}"

    def move(self, job: Job) -> int:
        """Do it. Returns pages finished, or -1 - p: the pieces of page p do not fill it."""
        # bytes are the cheapest thing to pass through ctypes: an array's address takes 1.5 us.
        pieces = job.pieces
        lists: tuple[bytes | None, ...] = (None, None, None)
        if pieces is not None:
            lists = (
                np.asarray(pieces.address, np.uint64).tobytes(),
                np.asarray(pieces.length, np.uint64).tobytes(),
                np.asarray(pieces.end, np.int64).tobytes(),
            )
        segments = pieces.segments if pieces is not None else 1
        if job.ok is None:
            digests, ok = _first_byte(job.digests), None
        else:
            digests, ok = job.digests.tobytes(), _first_byte(job.ok)
        words = job.progress.address if job.progress is not None else None
        numbers = (job.mode, self._isa, len(job.pages), job.page_bytes, segments)
        arrays = (job.pages.tobytes(), job.seeds.tobytes(), digests, *lists, ok)
        finished: int = self._move(*numbers, *arrays, words)
        if finished < -len(job.pages):
            raise MemoryError("no memory for a list of pages")
        return finished

    def publish(self, progress: Progress, word: Word, value: int) -> None:
        """Set a word and wake every waiter."""
        self._publish(progress.address, word, value)

    def wait(self, progress: Progress, count: int, timeout_s: float) -> bool | None:
        """Whether ``count`` segments are done; None: not yet, the job is still running."""
        answer = self._wait(progress.address, count, int(timeout_s * 1e9))
        return None if answer < 0 else bool(answer)

    def populate(self, address: int, length: int, *, write: bool) -> None:
        """See :func:`populate`."""
        error = self._populate(address, length, write)
        if error:
            raise TierUnavailable(f"{length} bytes of memory: {os.strerror(error)}")


class Fallback:
    """The same in Python, slower: ``memmove`` and the xxhash package."""

    description: Final = "fallback numpy+xxhash"

    def move(self, job: Job) -> int:
        """As :meth:`Native.move`."""
        pages, pieces = len(job.pages), job.pieces
        segments = range(pieces.segments if pieces is not None else 1)
        if pieces is not None:
            unfilled = _first_unfilled(pieces, pages, job.page_bytes)
            if unfilled is not None:
                return -1 - unfilled
        found = job.digests if job.ok is None else np.zeros_like(job.digests)
        for page in range(pages):
            if job.mode is Mode.GATHER and not self._copy(job, page, segments):
                return page
            if not self._digest(job, page, found):
                return page
        if job.ok is not None:
            self._scatter(job, found, job.ok)
        return pages

    def _digest(self, job: Job, page: int, found: Digests) -> bool:
        """Digest one page; False: cancelled before its end."""
        hasher = xxhash.xxh3_128(seed=int(job.seeds[page]))
        start, stop = int(job.pages[page]), int(job.pages[page]) + job.page_bytes
        for at in range(start, stop, STEP_BYTES):
            if job.is_cancelled:
                return False
            hasher.update((ctypes.c_ubyte * min(STEP_BYTES, stop - at)).from_address(at))
        found[page] = np.frombuffer(hasher.digest(), dtype=np.uint8)
        return True

    def _scatter(self, job: Job, found: Digests, ok: npt.NDArray[np.bool_]) -> None:
        """Copy the pages that verified, in the order that is asked for, until cancelled."""
        assert job.pieces is not None
        good = (found == job.digests).all(axis=1)
        if job.mode is Mode.SCATTER:
            for page in np.flatnonzero(good).tolist():
                ok[page] = self._copy(job, page, range(job.pieces.segments))
            return
        if job.progress is not None:
            job.progress.words[Word.GOOD] = len(good) if good.all() else good.argmin()
        for segment in range(job.pieces.segments):
            for page in np.flatnonzero(good).tolist():
                if not self._copy(job, page, range(segment, segment + 1)):
                    return
            if job.progress is not None:
                self.publish(job.progress, Word.DONE, segment + 1)
        ok[:] = good

    def _copy(self, job: Job, page: int, segments: range) -> bool:
        """Copy these segments of one page, by the job's mode; False: cancelled before their end."""
        pieces = job.pieces
        assert pieces is not None
        ends = np.concatenate(([0], pieces.end))[page * pieces.segments :]
        begin, first, last = (int(ends[s]) for s in (0, segments.start, segments.stop))
        at = int(job.pages[page]) + int(pieces.length[begin:first].sum())
        for index in range(first, last):
            piece, length = int(pieces.address[index]), int(pieces.length[index])
            for offset in range(0, length, STEP_BYTES):
                if job.is_cancelled:
                    return False
                target, source = piece + offset, at + offset
                if job.mode is Mode.GATHER:
                    target, source = source, target
                ctypes.memmove(target, source, min(STEP_BYTES, length - offset))
            at += length
        return True

    def publish(self, progress: Progress, word: Word, value: int) -> None:
        """As :meth:`Native.publish`."""
        with progress.changed:
            progress.words[word] = value
            progress.changed.notify_all()

    def wait(self, progress: Progress, count: int, timeout_s: float) -> bool | None:
        """As :meth:`Native.wait`."""
        with progress.changed:
            progress.changed.wait_for(
                lambda: progress.done >= count or progress.finished, timeout_s
            )
            return True if progress.done >= count else False if progress.finished else None

    def populate(self, address: int, length: int, *, write: bool) -> None:
        """See :func:`populate`; to write, the memory must not be written by others meanwhile."""
        step = os.sysconf("SC_PAGE_SIZE")
        for at in range(address - address % step, address + length, step):
            byte = ctypes.c_ubyte.from_address(at)
            value = byte.value
            if write:
                byte.value = value


def gather(
    target_pages: Addresses,
    page_bytes: int,
    source: Pieces,
    seeds: npt.NDArray[np.uint64],
    progress: Progress | None = None,
) -> Digests:
    """Copy pieces into pages and digest these.

    Args:
        target_pages: shape (n,), uint64: where each page begins.
        page_bytes: bytes of each page.
        source: pieces that fill the pages exactly.
        seeds: shape (n,), uint64: seed of each page's digest.
        progress: to cancel it.

    Returns:
        shape (n, 16), uint8. A cancelled call leaves zeros for the pages it did not finish.

    Raises:
        InvalidArgument: the arrays do not fit each other; nothing was written.
    """
    count = len(target_pages)
    digests = np.zeros((count, DIGEST_BYTES), dtype=np.uint8)
    _run(Mode.GATHER, target_pages, page_bytes, seeds, digests, source, None, progress)
    return digests


def scatter(
    source_pages: Addresses,
    page_bytes: int,
    digests: Digests,
    seeds: npt.NDArray[np.uint64],
    target: Pieces,
    progress: Progress | None = None,
    order: Order = "page",
) -> npt.NDArray[np.bool_]:
    """Verify pages and copy them into pieces.

    In page order this is one pass: the pieces of a page that is not ok then hold garbage. In
    segment order all pages are verified first and the others are not copied at all; then segment
    after segment of all pages is copied and counted in ``progress``.

    Args:
        source_pages: shape (n,), uint64: where each page begins.
        page_bytes: bytes of each page.
        digests: shape (n, 16), uint8: what the pages must digest to.
        seeds: as for :func:`gather`.
        target: pieces that the pages fill exactly.
        progress: to cancel it and to wait for segments.
        order: what is ready first.

    Returns:
        shape (n,), bool: this page verified and all of it was copied.

    Raises:
        InvalidArgument: the arrays do not fit each other; nothing was written.
    """
    digests = np.asarray(digests, dtype=np.uint8)
    count = len(source_pages)
    if digests.shape != (count, DIGEST_BYTES):
        raise InvalidArgument("digests", f"{digests.shape} is not ({count}, {DIGEST_BYTES})")
    ok = np.zeros(count, dtype=np.bool_)
    mode = Mode.SCATTER if order == "page" else Mode.SCATTER_SEGMENTS
    _run(mode, source_pages, page_bytes, seeds, digests, target, ok, progress)
    return ok


def digest(pages: Addresses, page_bytes: int, seeds: npt.NDArray[np.uint64]) -> Digests:
    """Digest pages; shapes as for :func:`gather`."""
    digests = np.zeros((len(pages), DIGEST_BYTES), dtype=np.uint8)
    _run(Mode.DIGEST, pages, page_bytes, seeds, digests, None, None, None)
    return digests


def populate(address: int, length: int, write: bool) -> None:  # noqa: FBT001
    """Fault in mapped memory, so that the first copy does not pay for it; its bytes stay.

    Args:
        address: anywhere in the first memory page.
        length: bytes.
        write: make the pages writable now, else only readable.

    Raises:
        TierUnavailable: the memory is not mapped so, or there is none left.
    """
    if length > 0:
        _chosen.populate(address, length, write=write)


def _run(
    mode: Mode,
    pages: Addresses,
    page_bytes: int,
    seeds: npt.NDArray[np.uint64],
    digests: Digests,
    pieces: Pieces | None,
    ok: npt.NDArray[np.bool_] | None,
    progress: Progress | None,
) -> None:
    """Check what is cheap to check and do the job."""
    count = len(digests)
    if not 0 < page_bytes < 1 << 62:
        raise InvalidArgument("page_bytes", f"{page_bytes} is outside 1..2**62-1")
    pages = np.asarray(pages, dtype=np.uint64)
    seeds = np.asarray(seeds, dtype=np.uint64)
    if pages.shape != (count,) or seeds.shape != (count,):
        raise InvalidArgument("seeds", f"pages {pages.shape}, seeds {seeds.shape}, not ({count},)")
    if pieces is not None:
        _check_shapes(pieces, count)
    if not count:
        return
    finished = _chosen.move(Job(mode, page_bytes, pages, seeds, digests, pieces, ok, progress))
    if finished < 0:
        raise InvalidArgument("pieces", f"page {-1 - finished} is not filled exactly by its own")


def _check_shapes(pieces: Pieces, pages: int) -> None:
    addresses, lengths, ends = len(pieces.address), len(pieces.length), len(pieces.end)
    if pieces.segments < 1 or ends != pages * pieces.segments:
        raise InvalidArgument("end", f"{ends} for {pages} pages of {pieces.segments} segments")
    count = int(pieces.end[-1]) if pages else 0
    if not addresses == lengths == count:
        raise InvalidArgument(
            "pieces", f"{addresses} addresses, {lengths} lengths, the last end {count}"
        )


def _first_unfilled(pieces: Pieces, pages: int, page_bytes: int) -> int | None:
    """Index of the first page that its pieces do not fill exactly."""
    begin = 0
    for page in range(pages):
        ends = pieces.end[page * pieces.segments : (page + 1) * pieces.segments]
        if begin > ends[0] or (np.diff(ends) < 0).any() or ends[-1] > len(pieces.length):
            return page
        part = slice(begin, int(ends[-1]))
        lengths, addresses = pieces.length[part].tolist(), pieces.address[part].tolist()
        if sum(lengths) != page_bytes or not all(lengths) or not all(addresses):
            return page
        begin = part.stop
    return None


def _first_byte(array: npt.NDArray[np.uint8] | npt.NDArray[np.bool_]) -> object:
    """What ctypes passes as the array's address."""
    return ctypes.byref(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]


def load(path: Path) -> ctypes.CDLL | None:
    """The built library, or None when there is none of our version."""
    try:
        library = ctypes.CDLL(str(path))
        return library if library.kv_version() == VERSION else None
    except (OSError, AttributeError):
        return None


LIBRARY: Final = Path(__file__).with_name(f"_mover{sysconfig.get_config_var('EXT_SUFFIX')}")
_library = load(LIBRARY)
_chosen: Native | Fallback = Fallback() if _library is None else Native(_library)

native: Final = _library is not None
"""Whether ``_mover.c`` runs."""
description: Final = _chosen.description
"""Which implementation runs, for statistics and diagnosis."""
