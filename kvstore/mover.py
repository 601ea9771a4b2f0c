"""The mover: copies and digests whole jobs of pages in one call, without the GIL.

A job has two sides: **pages**, each contiguous (in shared memory), and **pieces**, scattered
through an engine's pool. ``gather`` makes pages of pieces, ``scatter`` verifies pages and copies
them into pieces, ``digest`` only looks. A digest is xxh3_128 of the page's bytes under the page's
own seed, as ``xxhash.xxh3_128_digest`` writes it.

What is read is read once: the bytes that are handed on are those that were digested, whoever else
writes to the memory meanwhile.

Two implementations do the same: :class:`Native` (``_mover.c`` through ctypes) and, where it was not
built, :class:`~kvstore.fallback.Fallback`. Memory is passed as addresses: the caller keeps it alive
and mapped until the call returns, and nothing is written after that.
"""

import ctypes
import os
import sysconfig
import threading
import time
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvstore.errors import CapacityError, InvalidArgument, TierUnavailable
from kvstore.fallback import Fallback
from kvstore.page import DIGEST_BYTES
from kvstore.pieces import Addresses, Digests, Job, Mode, Pieces, Word

__all__ = [
    "Addresses", "Digests", "Fallback", "Job", "Mode", "Native", "Order", "Pieces", "Progress",
    "Word", "digest", "gather", "populate", "scatter",
]  # fmt: skip

Order = Literal["page", "segment"]
"""What a scatter makes ready first."""

# As in ``_mover.c``: the version of its calls (no other is used), its instruction sets in order,
# and what it returns when it cannot begin.
VERSION: Final = 2
ISAS: Final = ("scalar", "sse2", "avx2", "avx512")
NO_MEMORY: Final = -(1 << 63)
NO_JOB: Final = NO_MEMORY + 1
WAIT_MAX_S: Final = 3600.0


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
        """Pages before the first that did not verify; known once a segment is done.

        Look again after every :meth:`wait`: a page whose bytes change before its last segment was
        copied is good no longer, and not of the segment that changed either.
        """
        return self.before + int(self.words[Word.GOOD])

    @property
    def cancelled(self) -> bool:
        """Somebody called :meth:`cancel`."""
        return bool(self.words[Word.CANCEL])

    @property
    def finished(self) -> bool:
        """The job's owner called :meth:`finish`."""
        return bool(self.words[Word.FINISHED])


class Native:
    """``_mover.c``, called through ctypes."""

    def __init__(self, library: ctypes.CDLL, isa: int | None = None) -> None:
        """Bind the calls; ``isa``: index into ``ISAS``, one that this machine has, or the best."""
        number, size, memory = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
        self._move = library.kv_move
        self._move.restype = size
        self._move.argtypes = [number, number, size, ctypes.c_uint64, size, size, *[memory] * 8]
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
        """Do it. Returns pages finished, or -1 - p: page p is nowhere, or not filled exactly.

        Raises:
            InvalidArgument: its numbers make no job.
            CapacityError: there is no memory for what it has to note.
        """
        # bytes are the cheapest thing to pass through ctypes: an array's address takes 1.5 us.
        pieces = job.pieces
        lists: tuple[bytes | None, ...] = (None, None, None)
        if pieces is not None:
            lists = (
                np.asarray(pieces.address, np.uint64).tobytes(),
                np.asarray(pieces.length, np.uint64).tobytes(),
                np.asarray(pieces.end, np.int64).tobytes(),
            )
        segments, count = (1, 0) if pieces is None else (pieces.segments, len(pieces.address))
        if job.ok is None:
            digests, ok = _first_byte(job.digests), None
        else:
            digests, ok = job.digests.tobytes(), _first_byte(job.ok)
        words = job.progress.address if job.progress is not None else None
        numbers = (job.mode, self._isa, len(job.pages), job.page_bytes, segments, count)
        arrays = (job.pages.tobytes(), job.seeds.tobytes(), digests, *lists, ok)
        finished: int = self._move(*numbers, *arrays, words)
        if finished == NO_JOB:
            raise InvalidArgument("pieces", f"{numbers} are no numbers of a job")
        if finished == NO_MEMORY:
            raise CapacityError(f"no memory to note {len(job.pages)} pages of {segments} segments")
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
    after segment of all pages is copied, verified once more, and counted in ``progress``.

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
        why = "is nowhere, or not filled exactly by its own"
        raise InvalidArgument("pieces", f"page {-1 - finished} {why}")


def _check_shapes(pieces: Pieces, pages: int) -> None:
    addresses, lengths, ends = len(pieces.address), len(pieces.length), len(pieces.end)
    if pieces.segments < 1 or ends != pages * pieces.segments:
        raise InvalidArgument("end", f"{ends} for {pages} pages of {pieces.segments} segments")
    count = int(pieces.end[-1]) if pages else 0
    if not addresses == lengths == count:
        raise InvalidArgument(
            "pieces", f"{addresses} addresses, {lengths} lengths, the last end {count}"
        )


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
