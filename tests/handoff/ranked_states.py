"""State buffers of engines of several ranks: alike on ranks of the same layers, or of each rank."""

import random
from collections.abc import Mapping, Sequence

import numpy as np

from kvstore.handoff.prefill import Sender
from kvstore.handoff.ranks import RankGroup
from kvstore.handoff.state_data import StateBuffer, StateKind
from tests.handoff.pair import content

LAST = 3
BUFFERS: Mapping[str, tuple[StateKind, int, int, int]] = {
    "mamba": (StateKind.SLOT, 2, 6, 4_096),
    "window": (StateKind.LAST, 2, 14, 256),
    "index": (StateKind.EVERY, 1, 70, 64),
}
"""Kind, planes of a layer, blocks, and bytes of a block."""


class RankStates:
    """The state buffers of all ranks of one engine, and what belongs in them.

    Args:
        alike: ranks of the same layers hold the same; else each its own.
        change: other arguments of some buffers, by name.
    """

    def __init__(
        self, *, alike: bool = True, change: Mapping[str, Mapping[str, object]] | None = None
    ) -> None:
        self.alike = alike
        self._change = change or {}
        self.memory: list[dict[str, np.ndarray]] = []
        self._groups: list[RankGroup] = []

    def of(self, group: RankGroup) -> list[StateBuffer]:
        """The buffers of the next rank."""
        (first, stop), made = group.part.layers, {}
        buffers = []
        for name, (kind, planes, blocks, size) in BUFFERS.items():
            made[name] = np.zeros(((stop - first) * planes, blocks, size), dtype=np.uint8)
            buffer = StateBuffer(
                name, kind, tuple(int(plane.ctypes.data) for plane in made[name]), size, blocks,
                LAST if kind is StateKind.LAST else 0, np.zeros(blocks, dtype=np.uint64),
                first * planes if self.alike else 0, self.alike,
            )  # fmt: skip
            buffers.append(buffer._replace(**self._change.get(name, {})))
        self.memory.append(made)
        self._groups.append(group)
        return buffers

    def bytes_of(self, rank: int, name: str, room: int, positions: range) -> np.ndarray:
        """What belongs in a rank's planes: (planes, positions, bytes)."""
        planes, size = BUFFERS[name][1], BUFFERS[name][3]
        (first, stop), own = self._groups[rank].part.layers, 0 if self.alike else 1_000 * rank
        seed = room * 31 + len(name) + own
        return np.array([
            [content(seed, plane, position)[:size] for position in positions]
            for plane in range(first * planes, stop * planes)
        ])  # fmt: skip

    def send(self, senders: Sequence[Sender], room: int, count: int, chance: random.Random) -> None:
        """Write and send all, in any order, ``last`` and ``every`` in two calls."""
        for rank, sender in enumerate(senders):
            for name in chance.sample(sorted(BUFFERS), len(BUFFERS)):
                positions = positions_of(name, count)
                blocks = chance.sample(range(BUFFERS[name][2]), len(positions))
                self.memory[rank][name][:, blocks] = self.bytes_of(rank, name, room, positions)
                half = positions.start + len(positions) // 2
                for part in (range(positions.start, half), range(half, positions.stop)):
                    if part:
                        at = part.start - positions.start
                        sender.send_state(name, part, blocks[at : at + len(part)])

    def clear(self) -> None:
        """Zero all blocks."""
        for memory in self.memory:
            for planes in memory.values():
                planes[:] = 0

    def wrong(self, room: int, count: int, blocks: Mapping[str, Sequence[int]]) -> list[str]:
        """The buffers that have not exactly what belongs in these blocks, and nothing elsewhere."""
        return [
            f"{name} of rank {rank}"
            for rank, memory in enumerate(self.memory)
            for name, planes in memory.items()
            if np.delete(planes, list(blocks[name]), axis=1).any()
            or (
                planes[:, list(blocks[name])]
                != self.bytes_of(rank, name, room, positions_of(name, count))
            ).any()
        ]


def positions_of(name: str, count: int) -> range:
    """What a request with so many blocks has in a buffer."""
    starts = {"mamba": range(1), "window": range(max(count - LAST, 0), count)}
    return starts.get(name, range(count))


def some_blocks(count: int, chance: random.Random) -> dict[str, list[int]]:
    """Blocks that decode announces."""
    return {
        name: chance.sample(range(buffer[2]), len(positions_of(name, count)))
        for name, buffer in BUFFERS.items()
    }
