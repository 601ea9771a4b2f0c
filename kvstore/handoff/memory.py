"""Memory of a handoff: an engine's pool by ranges, and decode's slots for aux data."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.errors import InvalidArgument
from kvstore.handoff.effects import Landing, PushJob
from kvstore.handoff.places import AUX_PLANE, PushRange, range_seed
from kvstore.handoff.ranks import Span
from kvstore.handoff.shape import PoolShape
from kvstore.mover import Pieces
from kvstore.mover.kvpool import HeadRows, KVPool
from kvstore.page import DIGEST_BYTES

Places = list[tuple[int, int]]
"""Address and bytes of each range."""


class HandoffPool:
    """An engine's pool, as handoffs use it.

    Args:
        pool: in host memory, its blocks adjacent; the engine owns the memory and keeps it until the
            manager that uses it was closed.
        block_tokens: tokens of one block.
        generations: one number for each block, shape (block_count,); the engine adds 1 to it
            before it gives the block to another request. None = it has none: then a block that is
            given away too early is found only if its bytes change while they are sent.
        first_layer: layer of the model that the first planes have, if there are several ranks.
        heads: KV heads that the pool has: the first, and the one after the last. A block then has
            one row a token, and in a row head after head. (0, 1) also for latents, and for an
            engine of one rank to which only such engines push.

    Attributes:
        shape: its numbers.

    Raises:
        InvalidArgument: the pool is on a device, has gaps between blocks, or a number is wrong.
    """

    def __init__(
        self,
        pool: KVPool,
        block_tokens: int,
        generations: npt.NDArray[np.uint64] | None = None,
        *,
        first_layer: int = 0,
        heads: Span = (0, 1),
    ) -> None:
        if pool.device != "cpu":
            raise InvalidArgument("device", f"handoffs need host memory, not {pool.device}")
        if pool.block_stride_bytes != pool.block_bytes:
            raise InvalidArgument("block_stride_bytes", "handoffs need blocks without gaps")
        self.shape = PoolShape(
            len(pool.planes),
            pool.planes_per_layer,
            pool.block_bytes,
            block_tokens,
            pool.block_count,
            first_layer,
            heads,
        )
        if generations is not None and generations.shape != (pool.block_count,):
            raise InvalidArgument("generations", f"{generations.shape}, not ({pool.block_count},)")
        self._pool = pool
        self._planes = pool.planes
        self._block_bytes = pool.block_bytes
        self._generations = generations

    def generations(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """The generations of blocks now; empty if the pool has none.

        Raises:
            InvalidArgument: a block is not in the pool.
        """
        numbers = np.asarray(blocks, dtype=np.int64)
        if not self.shape.has(numbers):
            raise InvalidArgument("blocks", "a block is not in the pool")
        if self._generations is None:
            return np.zeros(0, dtype=np.uint64)
        return self._generations[numbers]

    def is_unchanged(self, job: PushJob) -> bool:
        """Whether the blocks of a job are still those that its KV was written to."""
        if self._generations is None or not len(job.generations):
            return True
        return bool((self._generations[job.blocks] == job.generations).all())

    def places(self, ranges: Sequence[PushRange], firsts: Sequence[int]) -> Places:
        """Where ranges are in this pool, given the first block of each."""
        size = self._block_bytes
        return [
            (self._planes[one.plane - self.shape.first_plane] + first * size, one.size * size)
            for one, first in zip(ranges, firsts, strict=True)
        ]

    def head_pieces(
        self, planes: Sequence[int], rows: Sequence[npt.NDArray[np.int64]], heads: Span
    ) -> Pieces:
        """The pieces of some heads of ranges of one length.

        Args:
            planes: of each range, among the planes of all ranks.
            rows: blocks of each range.
            heads: first head, and the one after the last; of those of this pool.
        """
        shape = self.shape
        first, stop = (head - shape.heads[0] for head in heads)
        wanted = HeadRows(shape.block_tokens, shape.head_count, first, stop)
        return self._pool.head_pieces(
            np.array(planes) - shape.first_plane, np.stack(list(rows)), wanted
        )


class AuxSlots:
    """Memory for aux data at decode, of our own.

    Args:
        count: slots.
        slot_bytes: bytes of one.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self._memory = np.zeros((count, slot_bytes), dtype=np.uint8)

    def place(self, slot: int, size: int) -> tuple[int, int]:
        """Address and bytes of the data in a slot."""
        assert 0 <= slot < self.count
        assert size <= self.slot_bytes
        return int(self._memory.ctypes.data) + slot * self.slot_bytes, size

    def read(self, slot: int, size: int) -> bytes:
        """A copy of the data in a slot."""
        return self._memory[slot, :size].tobytes()


def landing_places(pool: HandoffPool, aux: AuxSlots, landing: Landing) -> Places:
    """Where the bytes of a landing belong, in order."""
    return [
        aux.place(target, one.size) if one.plane == AUX_PLANE else pool.places([one], [target])[0]
        for one, target in zip(landing.ranges, landing.targets, strict=True)
    ]


def seeds_of(seed: int, ranges: Sequence[PushRange]) -> npt.NDArray[np.uint64]:
    """The seed of the digest of each range."""
    return np.array([range_seed(seed, one) for one in ranges], dtype=np.uint64)


def digests_of(seed: int, ranges: Sequence[PushRange], places: Places) -> bytes:
    """16 bytes for each range, of the bytes that are at its place now.

    Args:
        seed: :meth:`kvstore.handoff.shape.LinkShare.seed_of` the room.
        ranges: at least one.
        places: where each is.
    """
    found = np.zeros((len(ranges), DIGEST_BYTES), dtype=np.uint8)
    seeds = seeds_of(seed, ranges)
    addresses = np.array([address for address, _ in places], dtype=np.uint64)
    lengths = np.array([length for _, length in places], dtype=np.int64)
    for length in set(lengths.tolist()):  # one call for all ranges of one length
        these = np.flatnonzero(lengths == length)
        found[these] = mover.digest(addresses[these], length, seeds[these])
    return found.tobytes()
