"""Pools on a device, with known bytes: in host memory, late and out of order, or on CUDA."""

import numpy as np
import torch

from kvstore.handoff.memory import HandoffPool
from kvstore.mover.kvpool import KVPool
from kvstore.tier.push_memory import PushMemory
from tests.handoff.pair import BLOCK_BYTES, BLOCK_TOKENS, BLOCKS, LAYERS, content

GAP = 64
"""Bytes between two blocks: on a device there may be some."""


class DeviceBlocks:
    """As :class:`tests.handoff.pair.Memory`, on a device; the engine's writes are queued there."""

    def __init__(self, device) -> None:
        self.device = device
        stride = BLOCK_BYTES + GAP
        memory = device.memory(2 * LAYERS * BLOCKS * stride, device.stream())
        self.planes = memory.zero_().view(2 * LAYERS, BLOCKS, stride)[:, :, :BLOCK_BYTES]
        self.generations = np.zeros(BLOCKS, dtype=np.uint64)
        self.starts = tuple(int(plane.data_ptr()) for plane in self.planes)
        pool = KVPool(self.starts, BLOCK_BYTES, stride, BLOCKS, device=device.name)
        there = PushMemory([pool], device)
        self.pool = HandoffPool(pool, BLOCK_TOKENS, self.generations, device=there)

    def write(self, room: int, layers: range, positions: range, blocks: list[int]) -> None:
        fresh = [
            (plane, block, torch.from_numpy(content(room, plane, position)))
            for plane in range(2 * layers.start, 2 * layers.stop)
            for position, block in zip(positions, blocks, strict=True)
        ]

        def work() -> None:
            for plane, block, data in fresh:
                self.planes[plane, block].copy_(data)

        self.device.current().run(work)

    def has(self, room: int, positions: range, blocks: list[int]) -> bool:
        found = self.planes.cpu().numpy()
        return all(
            (found[plane, block] == content(room, plane, position)).all()
            for plane in range(2 * LAYERS)
            for position, block in zip(positions, blocks, strict=True)
        )

    def others_are_zero(self, blocks: list[int]) -> bool:
        return not np.delete(self.planes.cpu().numpy(), blocks, axis=1).any()
