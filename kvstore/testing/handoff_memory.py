"""The pools of a simulated engine, one for each rank: real memory, one allocator, generations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.ranks import RankGroup, RankPart
from kvstore.handoff.state_data import StateBuffer, StateKind, StateShape
from kvstore.mover.kvpool import KVPool

LAYERS: Final = 2
HEADS: Final = 4
HEAD_BYTES: Final = 4
BLOCK_TOKENS: Final = 4
BLOCKS: Final = 40
POSITIONS: Final = 10
"""Of the longest request."""
STATES: Final = (
    StateShape("mamba", StateKind.SLOT, 2, 48, 6),
    StateShape("window", StateKind.LAST, 2, 20, 10, last=2),
    StateShape("index", StateKind.EVERY, 1, 8, 26),
)
"""State data of engines that have some, of each rank."""
Bytes = npt.NDArray[np.uint8]


@lru_cache(1_024)
def content_of(room: int) -> Bytes:
    """The only right KV of a request: plane, position, token, head, byte."""
    random = np.random.Generator(np.random.PCG64(room))
    shape = (2 * LAYERS, POSITIONS, BLOCK_TOKENS, HEADS, HEAD_BYTES)
    return random.integers(0, 256, shape, dtype=np.uint8)


@lru_cache(4_096)
def state_of(room: int, index: int, part: RankPart) -> Bytes:
    """The only right state data of a request at a rank: plane, position, byte."""
    seed = (room, index, *part.layers, *part.heads)
    random = np.random.Generator(np.random.PCG64(seed))
    shape = (STATES[index].plane_count, POSITIONS, STATES[index].block_bytes)
    return random.integers(0, 256, shape, dtype=np.uint8)


@dataclass
class HeldBlocks:
    """The blocks of a request at an engine: the same numbers at each rank.

    Attributes:
        first: position of the first block of the pool.
        count: positions of the request.
        blocks: of the pool, of each position from there on.
        states: of each state buffer, by its name.
    """

    first: int
    count: int
    blocks: list[int]
    states: dict[str, list[int]]

    def state_positions(self, state: StateShape) -> range:
        """Of which positions there are blocks in a state buffer."""
        return state.positions(self.count, self.first)


class PoolMemory:
    """The pool of one rank, and its state buffers, if there are some."""

    def __init__(self, group: RankGroup, *, stateful: bool) -> None:
        self._part = part = group.part
        self._planes = slice(2 * part.layers[0], 2 * part.layers[1])
        self._heads = slice(*part.heads)
        heads, count = part.heads[1] - part.heads[0], self._planes.stop - self._planes.start
        self._memory = np.zeros((count, BLOCKS, BLOCK_TOKENS, heads, HEAD_BYTES), dtype=np.uint8)
        self.generations = np.zeros(BLOCKS, dtype=np.uint64)
        block_bytes = BLOCK_TOKENS * heads * HEAD_BYTES
        pool = KVPool(_starts(self._memory), block_bytes, block_bytes, BLOCKS)
        self._states: list[Bytes] = []
        buffers: list[StateBuffer] = []
        for one in STATES if stateful else ():
            shape = (one.plane_count, one.block_count, one.block_bytes)
            self._states.append(np.zeros(shape, dtype=np.uint8))
            generations = np.zeros(one.block_count, dtype=np.uint64)
            buffers.append(
                StateBuffer(
                    one.name, one.kind, _starts(self._states[-1]), one.block_bytes,
                    one.block_count, one.last, generations,
                )
            )  # fmt: skip
        self._buffers = buffers
        self.pool = HandoffPool(pool, BLOCK_TOKENS, self.generations, group, states=buffers)

    def write(self, layers: range, blocks: Sequence[int], content: int, first: int) -> None:
        """The KV of adjacent positions of layers, counted from the first of this pool."""
        planes = slice(2 * layers.start, 2 * layers.stop)
        self._memory[planes, blocks] = self._kv(content)[planes, first : first + len(blocks)]

    def write_state(self, index: int, blocks: Sequence[int], content: int, first: int) -> None:
        """The state data of adjacent positions."""
        right = state_of(content, index, self._part)[:, first : first + len(blocks)]
        self._states[index][:, blocks] = right

    def write_all(self, held: HeldBlocks, content: int) -> None:
        """All that a request has at this rank."""
        self.write(range(len(self._memory) // 2), held.blocks, content, held.first)
        for index in range(len(self._states)):
            positions = held.state_positions(STATES[index])
            self.write_state(index, held.states[STATES[index].name], content, positions.start)

    def wrong(self, held: HeldBlocks, content: int) -> list[str]:
        """What of a request has not the only right bytes: positions, and state data."""
        right = self._kv(content)[:, held.first : held.first + len(held.blocks)]
        differs = (self._memory[:, held.blocks] != right).any(axis=(0, 2, 3, 4))
        found = [f"position {held.first + int(at)}" for at in np.flatnonzero(differs)]
        for index, memory in enumerate(self._states):
            name, positions = STATES[index].name, held.state_positions(STATES[index])
            right = state_of(content, index, self._part)[:, positions.start : positions.stop]
            if (memory[:, held.states[name]] != right).any():
                found.append(name)
        return found

    def given_back(self, held: HeldBlocks) -> None:
        """These blocks are another's from now on."""
        self.generations[held.blocks] += np.uint64(1)
        for one in self._buffers:
            assert one.generations is not None
            one.generations[held.states[one.name]] += np.uint64(1)

    def _kv(self, content: int) -> Bytes:
        return content_of(content)[self._planes, :, :, self._heads]


class EnginePools:
    """The pools of all ranks of an engine: a block is the same number in each.

    Args:
        parts: what each rank holds.
        instance: of the engine.
        stateful: whether it has state data.

    Attributes:
        free: blocks of the pool that nobody has.
        states: the shapes of its state buffers.
        ranks: the pool of each.
    """

    def __init__(self, parts: Sequence[RankPart], instance: bytes, *, stateful: bool) -> None:
        groups = [RankGroup(rank, tuple(parts), instance) for rank in range(len(parts))]
        self.ranks = [PoolMemory(group, stateful=stateful) for group in groups]
        self.free = list(range(BLOCKS))
        self.states = STATES if stateful else ()
        self._free_states = {one.name: list(range(one.block_count)) for one in self.states}

    @property
    def is_free(self) -> bool:
        """Whether nobody has any block."""
        left = [len(self._free_states[one.name]) == one.block_count for one in self.states]
        return len(self.free) == BLOCKS and all(left)

    def take(
        self, count: int, first: int, shuffle: Callable[[list[int]], None] | None
    ) -> HeldBlocks | None:
        """Blocks of a request of so many positions, from a position on; None if there are too few.

        They are in order or shuffled.
        """
        held = HeldBlocks(first, count, [], {})
        wanted = [(self.free, count - first)]
        wanted += [
            (self._free_states[one.name], len(held.state_positions(one))) for one in self.states
        ]
        if any(number > len(free) for free, number in wanted):
            return None
        taken: list[list[int]] = []
        for free, number in wanted:
            free.sort()
            if shuffle is not None:
                shuffle(free)
            taken.append(free[:number])
            del free[:number]
        held.blocks = taken[0]
        held.states = {one.name: blocks for one, blocks in zip(self.states, taken[1:], strict=True)}
        return held

    def give_back(self, held: HeldBlocks) -> None:
        """Blocks are free; a later owner writes other bytes."""
        self.free += held.blocks
        for name, blocks in held.states.items():
            self._free_states[name] += blocks
        for rank in self.ranks:
            rank.given_back(held)

    def wrong(self, held: HeldBlocks, content: int) -> list[tuple[int, list[str]]]:
        """Ranks, each with what has not the bytes of the request."""
        found = [(at, rank.wrong(held, content)) for at, rank in enumerate(self.ranks)]
        return [(at, wrong) for at, wrong in found if wrong]


def _starts(memory: Bytes) -> tuple[int, ...]:
    return tuple(int(plane.ctypes.data) for plane in memory)
