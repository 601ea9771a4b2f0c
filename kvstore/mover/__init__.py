"""The mover: copies and digests a job's pages in one call, without the GIL.

A job has two sides: **pages**, each contiguous (in shared memory), and **pieces**, scattered
over an engine's pool. ``gather`` copies pieces to pages, ``scatter`` verifies pages and copies them
to pieces, ``digest`` only reads. A digest is the xxh3_128 of the page's bytes with the page's own
seed, as returned by ``xxhash.xxh3_128_digest``.

Source bytes are read once: the copied bytes are those that were digested, even if other processes
write to the memory meanwhile.

There are two implementations: :class:`~kvstore.mover.native.Native` (``_mover.c`` through ctypes)
and, if that was not built, :class:`~kvstore.mover.fallback.Fallback`. Memory is passed as
addresses: the caller keeps it alive and mapped until the call returns; nothing is written after
that.
"""

import time
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvstore.mover.binary import LIBRARY, load
from kvstore.mover.fallback import Fallback
from kvstore.mover.jobs import Addresses, Buffer, Digests, Mode, MoverJob, Pieces, Word, Words
from kvstore.mover.native import Native
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import DIGEST_BYTES

__all__ = [
    "DIGEST_BYTES",
    "Addresses",
    "Buffer",
    "Digests",
    "Fallback",
    "Mode",
    "Native",
    "Order",
    "Pieces",
    "Progress",
    "Word",
    "chains",
    "digest",
    "gather",
    "kvpool",
    "lookup",
    "memory",
    "populate",
    "push_way",
    "ranges",
    "scatter",
]  # fmt: skip

Order = Literal["page", "segment"]
"""The order of a scatter: page after page, or segment after segment."""

WAIT_MAX_S: Final = 3600.0


class Progress(Words):
    """The state of a job that its waiters share; created for one job, thread-safe.

    The mover counts finished segments. The owner of the job calls :meth:`finish` when it has ended,
    so that no thread waits forever.
    """

    __slots__ = ()

    def finish(self) -> None:
        """Mark the job as ended, whatever its result; wakes all waiters."""
        _chosen.publish(self, Word.FINISHED, 1)

    def wait(self, segment_count: int, timeout_s: float) -> bool:
        """Wait until this many segments of every verified page are copied.

        Args:
            segment_count: i + 1 for layer i. Only a scatter in segment order counts them.
            timeout_s: seconds; at most an hour.

        Returns:
            Whether they are; False on timeout, or if the job finished without them.
        """
        deadline = time.monotonic() + min(timeout_s, WAIT_MAX_S)
        while True:
            remaining_s = deadline - time.monotonic()
            answer = _chosen.wait(self, segment_count, max(remaining_s, 0.0))
            if answer is not None:
                return answer
            if remaining_s <= 0:
                return False


def gather(
    target_pages: Addresses,
    page_bytes: int,
    source: Pieces,
    seeds: npt.NDArray[np.uint64],
    progress: Progress | None = None,
) -> Digests:
    """Copy pieces into pages and digest the pages.

    Args:
        target_pages: start address of each page, shape (n,), uint64.
        page_bytes: bytes of each page.
        source: pieces that fill the pages exactly.
        seeds: seed of each page's digest, shape (n,), uint64.
        progress: for cancellation.

    Returns:
        The digests, shape (n, 16), uint8. A cancelled call leaves zeros for unfinished pages.

    Raises:
        InvalidArgument: the arrays do not match each other; nothing was written.
    """
    count = len(target_pages)
    digests = np.zeros((count, DIGEST_BYTES), dtype=np.uint8)
    _run(MoverJob(Mode.GATHER, page_bytes, target_pages, seeds, digests, source, None, progress))
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

    In page order this is one pass, so the pieces of a page that is not ok contain garbage. In
    segment order all pages are verified first, and pages that fail are not copied; then each
    segment of all pages is copied, verified again, and counted in ``progress``.

    Args:
        source_pages: start address of each page, shape (n,), uint64.
        page_bytes: bytes of each page.
        digests: expected digests of the pages, shape (n, 16), uint8.
        seeds: as for :func:`gather`.
        target: pieces that the pages fill exactly.
        progress: for cancellation, and for waits for segments.
        order: page after page, or segment after segment.

    Returns:
        Shape (n,), bool: the page was verified and completely copied.

    Raises:
        InvalidArgument: the arrays do not match each other; nothing was written.
    """
    digests = np.asarray(digests, dtype=np.uint8)
    count = len(source_pages)
    if digests.shape != (count, DIGEST_BYTES):
        raise InvalidArgument("digests", f"{digests.shape} is not ({count}, {DIGEST_BYTES})")
    ok = np.zeros(count, dtype=np.bool_)
    mode = Mode.SCATTER if order == "page" else Mode.SCATTER_SEGMENTS
    _run(MoverJob(mode, page_bytes, source_pages, seeds, digests, target, ok, progress))
    return ok


def digest(pages: Addresses, page_bytes: int, seeds: npt.NDArray[np.uint64]) -> Digests:
    """Digest pages; shapes as for :func:`gather`."""
    digests = np.zeros((len(pages), DIGEST_BYTES), dtype=np.uint8)
    _run(MoverJob(Mode.DIGEST, page_bytes, pages, seeds, digests, None, None, None))
    return digests


def populate(address: int, length: int, write: bool) -> None:  # noqa: FBT001
    """Pre-fault mapped memory, so that the first copy is not slower; its bytes do not change.

    Args:
        address: any address in the first memory page.
        length: bytes.
        write: make the pages writable, else only readable.

    Raises:
        TierUnavailable: the memory is not mapped with these rights, or memory is exhausted. The
            fallback, and Linux before 5.14, cannot tell: there a missing right ends the process.
    """
    if length > 0:
        _chosen.populate(address, length, write=write)


def _run(asked: MoverJob) -> None:
    """Check its shapes, then run it; its addresses and seeds may be sequences of numbers."""
    count = len(asked.digests)
    if not 0 < asked.page_bytes < 1 << 62:
        raise InvalidArgument("page_bytes", f"{asked.page_bytes} is outside 1..2**62-1")
    pages = np.asarray(asked.pages, dtype=np.uint64)
    seeds = np.asarray(asked.seeds, dtype=np.uint64)
    if pages.shape != (count,) or seeds.shape != (count,):
        raise InvalidArgument("seeds", f"pages {pages.shape}, seeds {seeds.shape}, not ({count},)")
    if asked.pieces is not None:
        _check_shapes(asked.pieces, count)
    if not count:
        return
    finished = _chosen.move(asked._replace(pages=pages, seeds=seeds))
    if finished < 0:
        why = "has an invalid address, or its pieces do not fill it exactly"
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


_library = load(LIBRARY)
_chosen: Native | Fallback = Fallback() if _library is None else Native(_library)

is_native: Final = _library is not None
"""Whether ``_mover.c`` is used."""
description: Final = _chosen.description
"""The implementation in use, for statistics and diagnosis."""
