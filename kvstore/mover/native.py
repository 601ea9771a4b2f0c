"""The mover in C: ``_mover.c``, called through ctypes."""

import ctypes
import os
import sysconfig
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import CapacityError, InvalidArgument, TierUnavailable
from kvstore.mover.jobs import MoverJob, Word, Words

# As in ``_mover.c``: the version of its calls (no other is used), its instruction sets in order,
# and what it returns when it cannot begin.
VERSION: Final = 2
ISAS: Final = ("scalar", "sse2", "avx2", "avx512")
NO_MEMORY: Final = -(1 << 63)
NO_JOB: Final = NO_MEMORY + 1
LIBRARY: Final = Path(__file__).with_name(f"_mover{sysconfig.get_config_var('EXT_SUFFIX')}")
"""Where ``pip install`` puts it, when there is a compiler."""


class Native:
    """``_mover.c``, called through ctypes.

    Attributes:
        description: names it, with the instruction set that is used.
    """

    def __init__(self, library: ctypes.CDLL, isa: int | None = None) -> None:
        """Bind the calls.

        Args:
            library: ``_mover.c``, built.
            isa: index into ``ISAS``, of one that this machine has; None = the best.
        """
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

    def publish(self, progress: Words, word: Word, value: int) -> None:
        """Set a word and wake every waiter."""
        self._publish(progress.address, word, value)

    def wait(self, progress: Words, count: int, timeout_s: float) -> bool | None:
        """Whether ``count`` segments are done; None: not yet, the job is still running."""
        answer = self._wait(progress.address, count, int(timeout_s * 1e9))
        return None if answer < 0 else bool(answer)

    def populate(self, address: int, length: int, *, write: bool) -> None:
        """See :func:`kvstore.mover.populate`."""
        error = self._populate(address, length, write)
        if error:
            raise TierUnavailable(f"{length} bytes of memory: {os.strerror(error)}")


def load(path: Path) -> ctypes.CDLL | None:
    """The built library, or None when there is none of our version."""
    try:
        library = ctypes.CDLL(str(path))
        return library if library.kv_version() == VERSION else None
    except (OSError, AttributeError):
        return None


def _first_byte(array: npt.NDArray[np.uint8] | npt.NDArray[np.bool_]) -> object:
    """What ctypes passes as the array's address."""
    return ctypes.byref(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
