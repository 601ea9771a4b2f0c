"""Engines of several ranks in this process, with pools of heads, and what belongs in them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.mooncake import MooncakeLanding, MooncakeWriter
from kvstore.handoff.prefill import PrefillManager, Sender
from kvstore.handoff.ranks import RankGroup, RankPart
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.handoff.state_data import StateBuffer
from kvstore.handoff.states import Patience
from kvstore.mover.kvpool import KVPool
from tests.handoff.pair import PATIENCE, SECRET, SPACE

LAYERS, HEADS = 4, 4
BLOCKS, BLOCK_TOKENS, HEAD_BYTES = 64, 8, 96


def whole_of(room: int, blocks: int, layers: int = LAYERS, heads: int = HEADS) -> np.ndarray:
    """K and V of a prompt: (planes, blocks, tokens, heads, bytes)."""
    shape = (2 * layers, blocks, BLOCK_TOKENS, heads, HEAD_BYTES)
    return np.random.default_rng(room).integers(0, 256, shape, dtype=np.uint8)


StatesOf = Callable[[RankGroup], Sequence[StateBuffer]]
"""The state buffers of a rank."""


class RankMemory:
    """The pool of one rank; ``shared`` = in memory that a child process can map."""

    def __init__(
        self, group: RankGroup, states: Sequence[StateBuffer] = (), *, shared: bool = False
    ) -> None:
        self.part = part = group.part
        layers, heads = (stop - first for first, stop in (part.layers, part.heads))
        shape = (2 * layers, BLOCKS, BLOCK_TOKENS, heads, HEAD_BYTES)
        self.shared = SharedMemory(math.prod(shape)) if shared else None
        self.planes = np.zeros(shape, dtype=np.uint8)
        if self.shared is not None:
            self.planes = np.frombuffer(self.shared.buffer, dtype=np.uint8).reshape(shape)
        self.generations = np.zeros(BLOCKS, dtype=np.uint64)
        size = BLOCK_TOKENS * heads * HEAD_BYTES
        base = int(self.planes.ctypes.data)
        self.starts = planes = tuple(base + plane * BLOCKS * size for plane in range(2 * layers))
        self.pool = HandoffPool(
            KVPool(planes, size, size, BLOCKS), BLOCK_TOKENS, self.generations, group,
            states=states,
        )  # fmt: skip

    def of(self, whole: np.ndarray) -> np.ndarray:
        """What belongs to this rank."""
        (first, stop), (low, high) = self.part.layers, self.part.heads
        return whole[2 * first : 2 * stop, :, :, low:high]


@dataclass
class Ranked:
    """One prefill and one decode engine; lists have one entry for each rank."""

    registry: HandoffRegistry
    here: list[RankMemory]
    there: list[RankMemory]
    prefill: list[PrefillManager]
    decode: list[DecodeManager]

    def begin(self, room: int, blocks: int) -> tuple[list[Sender], list[Receiver]]:
        tokens = blocks * BLOCK_TOKENS
        receivers = [one.receiver(room, self.registry.url, tokens) for one in self.decode]
        return [one.sender(room, tokens) for one in self.prefill], receivers

    def push(self, senders: Sequence[Sender], whole: np.ndarray, blocks: list[int]) -> None:
        """All ranks compute and push, layer after layer, chunk after chunk; and finish."""
        self.send(senders, whole, blocks)
        for sender in senders:
            sender.finish(AuxData(first_token=7, position=len(blocks) * BLOCK_TOKENS))

    def send(self, senders: Sequence[Sender], whole: np.ndarray, blocks: list[int]) -> None:
        """As :meth:`push`, without the end."""
        for sender, memory in zip(senders, self.here, strict=True):
            mine = memory.of(whole)
            for first in range(0, len(blocks), 3):
                at = blocks[first : first + 3]
                for layer in range(len(mine) // 2):
                    for plane in (2 * layer, 2 * layer + 1):
                        memory.planes[plane, at] = mine[plane, first : first + 3]
                    positions = range(first, first + len(at))
                    sender.send(range(layer, layer + 1), positions, at)

    def wrong(self, whole: np.ndarray, blocks: list[int], first: int = 0) -> list[int]:
        """Ranks of decode that do not have what belongs in these blocks."""
        return [
            rank
            for rank, memory in enumerate(self.there)
            if (memory.planes[:, blocks] != memory.of(whole)[:, first:]).any()
        ]

    def close(self) -> None:
        for manager in (*self.prefill, *self.decode):
            manager.close()
        self.registry.close()
        for memory in (*self.here, *self.there):
            if memory.shared is not None:
                memory.shared.close()


@contextlib.contextmanager
def ranked(
    prefill: Sequence[RankPart], decode: Sequence[RankPart], patience: Patience = PATIENCE,
    staged_bytes: int = 0, states: tuple[StatesOf, StatesOf] | None = None,
) -> Iterator[Ranked]:  # fmt: skip
    """Both engines; with ``staged_bytes`` they have Mooncake, and so much memory for heads.

    ``states`` gives the state buffers of each rank of prefill, and of decode.
    """
    registry = HandoffRegistry("127.0.0.1", 0, SECRET)
    here, there = (
        [
            RankMemory(one, states[side](one) if states else (), shared=staged_bytes > 0)
            for one in (RankGroup(rank, tuple(parts), instance) for rank in range(len(parts)))
        ]
        for side, (parts, instance) in enumerate(((prefill, bytes(16)), (decode, bytes([1] * 16))))
    )
    made = Ranked(registry, here, there, [], [])
    try:
        for memory in here:
            made.prefill.append(
                PrefillManager(
                    memory.pool,
                    SPACE,
                    SECRET,
                    registry=registry.url,
                    patience=patience,
                    writer=memory.shared and MooncakeWriter(memory.shared, protocol="tcp"),
                )
            )
        for memory in there:
            made.decode.append(
                DecodeManager(
                    memory.pool,
                    SPACE,
                    SECRET,
                    name="d",
                    patience=patience,
                    engine=memory.shared
                    and MooncakeLanding(
                        memory.shared, memory.starts, protocol="tcp", staged_bytes=staged_bytes
                    ),
                )
            )
        yield made
    finally:
        made.close()
