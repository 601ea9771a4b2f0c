"""A stand-in for the pool of an engine with state data of three kinds, and its managers."""

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np

from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import Sender
from kvstore.handoff.state_data import StateBuffer, StateKind
from kvstore.mover.kvpool import KVPool
from tests.handoff.pair import BLOCK_TOKENS, Pair, content

KV = (4, 24, 512)
"""Planes, blocks and bytes of a block: two layers."""
STATES: Mapping[str, tuple[StateKind, tuple[int, int, int], int]] = {
    "mamba": (StateKind.SLOT, (2, 6, 4_096), 0),
    "window": (StateKind.LAST, (2, 12, 256), 3),
    "index": (StateKind.EVERY, (1, 30, 64), 0),
}


class StatefulMemory:
    """A pool with state buffers, and what belongs in them.

    Args:
        change: other arguments of some buffers, by name; None = the buffer is not there.
        fake: of the pool.
    """

    def __init__(self, change: Mapping[str, dict | None] | None = None, *, fake: bool = False):
        self.memory = {"kv": np.zeros(KV, dtype=np.uint8)}
        self.generations = {}
        buffers = []
        for name, (kind, shape, last) in STATES.items():
            self.memory[name] = np.zeros(shape, dtype=np.uint8)
            self.generations[name] = np.zeros(shape[1], dtype=np.uint64)
            starts = self.starts(name)
            one = StateBuffer(name, kind, starts, shape[2], shape[1], last, self.generations[name])
            changed = (change or {}).get(name, {})
            if changed is not None:
                buffers.append(one._replace(**changed))
        kv = KVPool(self.starts("kv"), KV[2], KV[2], KV[1])
        self.pool = HandoffPool(kv, BLOCK_TOKENS, states=buffers, fake=fake)

    def starts(self, name: str) -> tuple[int, ...]:
        return tuple(int(plane.ctypes.data) for plane in self.memory[name])

    def write(self, room: int, name: str, positions: range, blocks: list[int]) -> None:
        for plane, memory in enumerate(self.memory[name]):
            for position, block in zip(positions, blocks, strict=True):
                memory[block] = mark(room, name, plane, position, memory.shape[1])

    def has(self, room: int, name: str, positions: range, blocks: list[int]) -> bool:
        return all(
            (memory[block] == mark(room, name, plane, position, memory.shape[1])).all()
            for plane, memory in enumerate(self.memory[name])
            for position, block in zip(positions, blocks, strict=True)
        )

    def others_are_zero(self, name: str, blocks: list[int]) -> bool:
        return not np.delete(self.memory[name], blocks, axis=1).any()


def mark(room: int, name: str, plane: int, position: int, size: int) -> np.ndarray:
    return content(room * 31 + len(name), plane, position)[:size]


def positions_of(name: str, blocks: int, first: int = 0) -> range:
    """What a request with so many blocks has in a buffer."""
    return {
        "mamba": range(1),
        "window": range(max(blocks - 3, 0), blocks),
        "index": range(first, blocks),
    }[name]


def send_kv(sender: Sender, memory: StatefulMemory, blocks: list[int]) -> None:
    positions = range(len(blocks))
    memory.write(sender.room, "kv", positions, blocks)
    sender.send(range(2), positions, blocks)


def send_state(sender: Sender, memory: StatefulMemory, name: str, count: int, first: int) -> None:
    """Write and send all of a state buffer, in blocks from ``first`` on."""
    positions = positions_of(name, count)
    blocks = list(range(first, first + len(positions)))
    memory.write(sender.room, name, positions, blocks)
    sender.send_state(name, positions, blocks)


@contextlib.contextmanager
def stateful_pair(here: StatefulMemory, there: StatefulMemory) -> Iterator[Pair]:
    pair = Pair(here=here, there=there)
    try:
        yield pair
    finally:
        pair.close()
