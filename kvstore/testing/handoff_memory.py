"""The pool of a simulated engine: real memory, an allocator, generations."""

from collections.abc import Callable
from typing import Final

import numpy as np

from kvstore.handoff.memory import HandoffPool
from kvstore.mover.kvpool import KVPool
from kvstore.testing.handoff_links import content_of

LAYERS: Final = 2
PLANES: Final = 2 * LAYERS
BLOCK_BYTES: Final = 64
BLOCK_TOKENS: Final = 4
BLOCKS: Final = 24


class PoolMemory:
    """The pool of a simulated engine: real memory, an allocator, generations."""

    def __init__(self) -> None:
        self.planes = np.zeros((PLANES, BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.generations = np.zeros(BLOCKS, dtype=np.uint64)
        self.free = list(range(BLOCKS))
        base = int(self.planes.ctypes.data)
        planes = tuple(base + plane * BLOCKS * BLOCK_BYTES for plane in range(PLANES))
        pool = KVPool(planes, BLOCK_BYTES, BLOCK_BYTES, BLOCKS)
        self.pool = HandoffPool(pool, BLOCK_TOKENS, self.generations)

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
        self.generations[blocks] += np.uint64(1)

    def write(self, plane: int, block: int, room: int, position: int) -> None:
        """The KV of one position of one plane."""
        self.planes[plane, block] = content_of(room, plane, position)

    def wrong(self, blocks: list[int], room: int, first: int) -> list[int]:
        """Positions whose bytes are not those of the request."""
        return [
            first + at
            for at, block in enumerate(blocks)
            if any(
                (self.planes[plane, block] != content_of(room, plane, first + at)).any()
                for plane in range(PLANES)
            )
        ]
