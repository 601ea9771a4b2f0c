"""Ranges of which only some heads are moved: gathered before they are sent, scattered after.

All ranges pass through here; those with all heads are moved directly from pool to pool.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.handoff.effects import Landing, PushJob
from kvstore.handoff.memory import (
    AuxSlots,
    HandoffPool,
    digests_of,
    landing_places,
    seeds_of,
)
from kvstore.mover.ranges import Places, digest_ranges
from kvstore.protocol.page import DIGEST_BYTES

Receive = Callable[[Places, bytes], bytes]
"""Fills ranges with the next data; with their seeds it returns their digests."""


class Staging:
    """Memory of one thread, as large as the largest list of ranges that was moved so far.

    Args:
        memory: to be used as long as it is large enough; None = none.
    """

    def __init__(self, memory: npt.NDArray[np.uint8] | None = None) -> None:
        self._memory = np.zeros(0, dtype=np.uint8) if memory is None else memory
        self._base = int(self._memory.ctypes.data)

    def read(self, pool: HandoffPool, job: PushJob) -> tuple[Places, bytes]:
        """Where each range of a job is, until the next call, and 16 bytes of digest of each."""
        seed = job.share.seed_of(job.room)
        if job.aux:
            held = np.frombuffer(job.aux, dtype=np.uint8)
            places: Places = [(int(held.ctypes.data), len(held))]
            return places, digests_of(seed, job.ranges, places)
        if job.share.is_staged:
            return self.gather(pool, job)
        places = pool.places(job.ranges, job.sources)
        return places, digests_of(seed, job.ranges, places)

    def gather(self, pool: HandoffPool, job: PushJob) -> tuple[Places, bytes]:
        """Copy the heads of a job from prefill's pool.

        Returns:
            Where each range is, until the next call; and 16 bytes of digest of each.
        """
        lengths = [job.share.range_bytes(place) for place in job.ranges]
        places, rows = self.places(lengths), job.rows
        digests = np.zeros((len(lengths), DIGEST_BYTES), dtype=np.uint8)
        seeds = _numbers(seeds_of(job.share.seed_of(job.room), job.ranges))
        for these in _by_length(lengths):
            pieces = pool.head_pieces(
                [job.ranges[at].plane for at in these], [rows[at] for at in these], job.share.heads
            )
            addresses = np.array([places[at][0] for at in these], dtype=np.uint64)
            digests[these] = mover.gather(addresses, lengths[these[0]], pieces, seeds[these])
        return places, digests.tobytes()

    def land(
        self,
        pool: HandoffPool,
        aux: AuxSlots,
        landing: Landing,
        receive: Receive | None,
        staged: int = 0,
    ) -> bool:
        """Receive the data of a landing into decode's pool.

        Args:
            pool: pool of decode.
            aux: slots of decode's aux data.
            landing: the landing.
            receive: fills memory; its errors are raised. None = another transport has written the
                data into the pool, or into the staging memory.
            staged: start address of the staging memory.

        Returns:
            Whether all data matches its digests; if not, the blocks may contain garbage.
        """
        packed = seeds_of(landing.share.seed_of(landing.room), landing.ranges)
        if not landing.is_staged:
            places = landing_places(pool, aux, landing)
            found = receive(places, packed) if receive else digest_ranges(places, packed)
            return found == landing.digests
        lengths = [landing.share.range_bytes(place) for place in landing.ranges]
        if landing.staged_at:
            starts = [staged + at for at in landing.staged_at]
            places = list(zip(starts, lengths, strict=True))
        else:
            assert receive is not None
            places = self.places(lengths)
            receive(places, b"")
        digests = np.frombuffer(landing.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        seeds = _numbers(packed)
        right = True
        for these in _by_length(lengths):
            pieces = pool.head_pieces(
                [landing.ranges[at].plane for at in these],
                [landing.rows[at] for at in these],
                landing.share.heads,
            )
            addresses = np.array([places[at][0] for at in these], dtype=np.uint64)
            ok = mover.scatter(addresses, lengths[these[0]], digests[these], seeds[these], pieces)
            right = right and bool(ok.all())
        return right

    def places(self, lengths: Sequence[int]) -> Places:
        """Memory for ranges of these lengths; it is reused until more is needed."""
        total = sum(lengths)
        if total > len(self._memory):
            self._memory = np.empty(total, dtype=np.uint8)
            self._base = int(self._memory.ctypes.data)
        starts = accumulate(lengths[:-1], initial=self._base)
        return list(zip(starts, lengths, strict=True))


def _by_length(lengths: Sequence[int]) -> list[npt.NDArray[np.intp]]:
    """Indices of equal lengths: the mover handles pages of one length."""
    if len(set(lengths)) == 1:
        return [np.arange(len(lengths))]
    numbers = np.array(lengths, dtype=np.int64)
    return [np.flatnonzero(numbers == length) for length in np.unique(numbers)]


def _numbers(seeds: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(seeds, dtype=np.uint64)
