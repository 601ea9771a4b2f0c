"""The mover in C: ``_mover.c``, called through ctypes."""

import ctypes
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.mover.jobs import MoverJob, Word, Words
from kvstore.protocol.errors import CapacityError, InvalidArgument, TierUnavailable

# As in ``_mover.c``: its instruction sets in order, and its return values for jobs that it cannot
# start.
ISAS: Final = ("scalar", "sse2", "avx2", "avx512")
NO_MEMORY: Final = -(1 << 63)
NO_JOB: Final = NO_MEMORY + 1


class Native:
    """``_mover.c``, called through ctypes.

    Args:
        library: the built ``_mover.c``.
        isa: index into ``ISAS``; the machine must support it. None = the best.

    Attributes:
        description: implementation and instruction set.
    """

    def __init__(self, library: ctypes.CDLL, isa: int | None = None) -> None:
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

    def move(self, job: MoverJob) -> int:
        """Run a job; returns the finished pages, or -1 - p if page p or its pieces are invalid.

        Raises:
            InvalidArgument: its numbers are invalid.
            CapacityError: no memory for the job's own state.
        """
        # bytes are passed fastest through ctypes: taking an array's address takes 1.5 us.
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
            raise InvalidArgument("pieces", f"{numbers} are not valid numbers of a job")
        if finished == NO_MEMORY:
            raise CapacityError(
                f"no memory for the state of {len(job.pages)} pages of {segments} segments"
            )
        return finished

    def publish(self, progress: Words, word: Word, value: int) -> None:
        """Set a word and wake all waiters."""
        self._publish(progress.address, word, value)

    def wait(self, progress: Words, count: int, timeout_s: float) -> bool | None:
        """Whether ``count`` segments are done; None = not yet, and the job is still running."""
        answer = self._wait(progress.address, count, int(timeout_s * 1e9))
        return None if answer < 0 else bool(answer)

    def populate(self, address: int, length: int, *, write: bool) -> None:
        """See :func:`kvstore.mover.populate`."""
        error = self._populate(address, length, write)
        if error:
            raise TierUnavailable(f"{length} bytes of memory: {os.strerror(error)}")


def _first_byte(array: npt.NDArray[np.uint8] | npt.NDArray[np.bool_]) -> object:
    """The array's address in the form that ctypes accepts."""
    return ctypes.byref(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
