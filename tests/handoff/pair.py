"""Pools with known bytes, and managers that push between them; also a process with one side.

``python -m tests.handoff.pair prefill SECRET REGISTRY`` and ``... decode SECRET REGISTRY`` read
commands from no one: prefill begins each room that is asked for by its number, decode asks for it.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager, Sender
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.shared_memory import SharedMemory
from kvstore.handoff.states import Patience
from kvstore.mover.kvpool import KVPool
from kvstore.process.tls import CertificateFiles

SECRET = b"a secret for tests, of 32 bytes."
SPACE = b"model, dtype, revision"
LAYERS = 4
BLOCK_BYTES = 16 * 1024
BLOCK_TOKENS = 16
BLOCKS = 128
PATIENCE = Patience(bootstrapping_s=10, waiting_s=10, transferring_s=5, total_s=30, silence_s=5)


class Memory:
    """A pool of blocks, and what belongs in them."""

    def __init__(self, blocks: int = BLOCKS, shared: SharedMemory | None = None) -> None:
        shape = (2 * LAYERS, blocks, BLOCK_BYTES)
        self.planes = np.zeros(shape, dtype=np.uint8)
        if shared is not None:
            self.planes = np.frombuffer(shared.buffer, dtype=np.uint8).reshape(shape)
        self.generations = np.zeros(blocks, dtype=np.uint64)
        base, step = self.planes.ctypes.data, blocks * BLOCK_BYTES
        self.starts = tuple(int(base) + plane * step for plane in range(2 * LAYERS))
        pool = KVPool(self.starts, BLOCK_BYTES, BLOCK_BYTES, blocks)
        self.pool = HandoffPool(pool, BLOCK_TOKENS, self.generations)

    def write(self, room: int, layers: range, positions: range, blocks: list[int]) -> None:
        for plane in range(2 * layers.start, 2 * layers.stop):
            for position, block in zip(positions, blocks, strict=True):
                self.planes[plane, block] = content(room, plane, position)

    def has(self, room: int, positions: range, blocks: list[int]) -> bool:
        return all(
            (self.planes[plane, block] == content(room, plane, position)).all()
            for plane in range(2 * LAYERS)
            for position, block in zip(positions, blocks, strict=True)
        )


def content(room: int, plane: int, position: int) -> np.ndarray:
    words = np.arange(BLOCK_BYTES // 8, dtype=np.uint64)
    mark = (room * 1_000_003 + plane) * 65_537 + position
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mark % (1 << 63))).view(np.uint8)


def push_all(sender: Sender, memory: Memory, blocks: list[int], chunk: int = 8) -> None:
    """Compute and push chunk by chunk, layer by layer."""
    for first in range(0, len(blocks), chunk):
        positions = range(first, min(first + chunk, len(blocks)))
        here = blocks[positions.start : positions.stop]
        for layer in range(LAYERS):
            layers = range(layer, layer + 1)
            memory.write(sender.room, layers, positions, here)
            sender.send(layers, positions, here)
    sender.finish(AuxData(first_token=7, position=len(blocks) * BLOCK_TOKENS))


class Pair:
    """A registry, a prefill and a decode manager in this process."""

    def __init__(
        self,
        patience: Patience = PATIENCE,
        here: Memory | None = None,
        there: Memory | None = None,
        certificates: tuple[CertificateFiles | None, CertificateFiles | None] = (None, None),
    ) -> None:
        near, far = certificates
        self.registry = HandoffRegistry("127.0.0.1", 0, SECRET, near)
        self.here, self.there = here or Memory(), there or Memory()
        self.prefill = PrefillManager(
            self.here.pool, SPACE, SECRET, registry=self.registry.url, patience=patience,
            certificates=near,
        )  # fmt: skip
        self.decode = DecodeManager(
            self.there.pool, SPACE, SECRET, name="d0", patience=patience, certificates=far
        )

    def begin(self, room: int, blocks: int) -> tuple[Sender, Receiver]:
        tokens = blocks * BLOCK_TOKENS
        receiver = self.decode.receiver(room, self.registry.url, tokens)
        return self.prefill.sender(room, tokens), receiver

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.registry.close()


@contextlib.contextmanager
def managers(
    patience: Patience = PATIENCE, here: CertificateFiles | None = None,
    there: CertificateFiles | None = None,
) -> Iterator[Pair]:  # fmt: skip
    """A pair; ``here`` are prefill's certificates and the registry's, ``there`` decode's."""
    pair = Pair(patience, certificates=(here, there))
    try:
        yield pair
    finally:
        pair.close()


def main() -> None:
    """One side in a process of its own, for signals; it ends with its standard input's parent."""
    side, secret, url, blocks = sys.argv[1], Path(sys.argv[2]).read_bytes(), sys.argv[3], 48
    memory = Memory()
    rooms = range(1, 4)
    if side == "prefill":
        registry = HandoffRegistry("127.0.0.1", 0, secret)
        manager = PrefillManager(
            memory.pool, SPACE, secret, registry=registry.url, patience=PATIENCE
        )
        senders = [manager.sender(room, blocks * BLOCK_TOKENS) for room in rooms]
        half = range(blocks // 2)
        for sender in senders:  # half of one layer, so that it stays in TRANSFERRING
            memory.write(sender.room, range(1), half, list(half))
            sender.send(range(1), half, list(half))
        print("ready", registry.url, flush=True)  # noqa: T201
    else:
        decode = DecodeManager(memory.pool, SPACE, secret, patience=PATIENCE)
        for room in rooms:
            receiver = decode.receiver(room, url, blocks * BLOCK_TOKENS)
            first = (room - 1) * 40
            receiver.announce((blocks - 40) * BLOCK_TOKENS, list(range(first, first + 40)))
        print("ready", flush=True)  # noqa: T201
    threading.Event().wait()


if __name__ == "__main__":
    main()
