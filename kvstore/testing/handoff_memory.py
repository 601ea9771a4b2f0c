"""The pools of a simulated engine, one for each rank: real memory, one allocator, generations."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.ranks import RankGroup, RankPart
from kvstore.mover.kvpool import KVPool

LAYERS: Final = 2
HEADS: Final = 4
HEAD_BYTES: Final = 4
BLOCK_TOKENS: Final = 4
BLOCKS: Final = 24


@lru_cache(8_192)
def content_of(room: int, plane: int, position: int) -> npt.NDArray[np.uint8]:
    """The only right bytes of one position of one plane of a request, of all its heads."""
    seed = (room * 1_000_003 + plane) * 1_000_003 + position
    random = np.random.Generator(np.random.PCG64(seed))
    return random.integers(0, 256, (BLOCK_TOKENS, HEADS, HEAD_BYTES), dtype=np.uint8)


class PoolMemory:
    """The pool of one rank."""

    def __init__(self, group: RankGroup) -> None:
        part = group.part
        self._planes = range(2 * part.layers[0], 2 * part.layers[1])
        self._heads = slice(*part.heads)
        heads = part.heads[1] - part.heads[0]
        shape = (len(self._planes), BLOCKS, BLOCK_TOKENS, heads, HEAD_BYTES)
        self._memory = np.zeros(shape, dtype=np.uint8)
        self.generations = np.zeros(BLOCKS, dtype=np.uint64)
        block_bytes = BLOCK_TOKENS * heads * HEAD_BYTES
        planes = tuple(int(plane.ctypes.data) for plane in self._memory)
        pool = KVPool(planes, block_bytes, block_bytes, BLOCKS)
        self.pool = HandoffPool(pool, BLOCK_TOKENS, self.generations, group)

    def write(self, layers: range, block: int, content: int, position: int) -> None:
        """The KV of one position of layers, counted from the first of this pool."""
        for plane in range(2 * layers.start, 2 * layers.stop):
            whole = content_of(content, self._planes[plane], position)
            self._memory[plane, block] = whole[:, self._heads]

    def write_all(self, block: int, content: int, position: int) -> None:
        """The KV of one position of all layers of this rank."""
        self.write(range(len(self._planes) // 2), block, content, position)

    def wrong(self, blocks: Sequence[int], content: int, first: int) -> list[int]:
        """Positions whose bytes are not those of the request."""
        return [
            first + at
            for at, block in enumerate(blocks)
            if any(
                (mine[block] != content_of(content, plane, first + at)[:, self._heads]).any()
                for plane, mine in zip(self._planes, self._memory, strict=True)
            )
        ]


class EnginePools:
    """The pools of all ranks of an engine: a block is the same number in each.

    Args:
        parts: what each rank holds.
        instance: of the engine.

    Attributes:
        free: blocks that nobody has.
        ranks: the pool of each.
    """

    def __init__(self, parts: Sequence[RankPart], instance: bytes) -> None:
        groups = [RankGroup(rank, tuple(parts), instance) for rank in range(len(parts))]
        self.ranks = [PoolMemory(group) for group in groups]
        self.free = list(range(BLOCKS))

    def take(self, count: int, shuffle: Callable[[list[int]], None] | None) -> list[int] | None:
        """Blocks, in order or shuffled; None if there are too few."""
        if count > len(self.free):
            return None
        self.free.sort()
        if shuffle is not None:
            shuffle(self.free)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Blocks are free; a later owner writes other bytes."""
        self.free += blocks
        for rank in self.ranks:
            rank.generations[blocks] += np.uint64(1)

    def wrong(self, blocks: Sequence[int], content: int, first: int) -> list[tuple[int, list[int]]]:
        """Ranks, each with positions whose bytes are not those of the request."""
        found = [(at, rank.wrong(blocks, content, first)) for at, rank in enumerate(self.ranks)]
        return [(at, wrong) for at, wrong in found if wrong]
