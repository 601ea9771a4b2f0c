"""Pushes between two pools of this process, without an engine: the library of handoffs alone."""

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.measure import Result, interleave, percentile, prefaulted
from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager, Sender
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.rooms import RoomNumbers
from kvstore.handoff.states import State
from kvstore.mover.kvpool import KVPool

LAYERS: Final = 8
BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = 16 * 1024
"""Of the demo model: 4 KV heads x 64 in float32, 16 tokens, K or V of one layer."""
PROMPT_BLOCKS: Final = 125
TOKENS: Final = PROMPT_BLOCKS * BLOCK_TOKENS
CHUNK_BLOCKS: Final = 32
SMALL_BLOCKS: Final = 16
POOL_BLOCKS: Final = 512
WAIT_S: Final = 30.0
TURNS_MIN: Final = 5
_PAUSE_S: Final = 0.0002
_SEND_US: Final = 100.0
_POLL_US: Final = 50.0
POOL_BYTES: Final = 2 * LAYERS * POOL_BLOCKS * BLOCK_BYTES
PROMPT_BYTES: Final = 2 * LAYERS * PROMPT_BLOCKS * BLOCK_BYTES


def new_pool() -> tuple[HandoffPool, npt.NDArray[np.uint8]]:
    """A pool of the demo model's shape; keep the array as long as the pool is used."""
    memory = prefaulted(POOL_BYTES)
    return pool_at(int(memory.ctypes.data)), memory


def planes_at(address: int) -> tuple[int, ...]:
    """Address of block 0 of each plane of a pool that begins there."""
    return tuple(address + POOL_BLOCKS * BLOCK_BYTES * plane for plane in range(2 * LAYERS))


def pool_at(address: int) -> HandoffPool:
    """A pool of the demo model's shape in memory of :data:`POOL_BYTES`."""
    pool = KVPool(planes_at(address), BLOCK_BYTES, BLOCK_BYTES, POOL_BLOCKS)
    return HandoffPool(pool, BLOCK_TOKENS, np.zeros(POOL_BLOCKS, dtype=np.uint64))


class PushedPools:
    """A prefill and a decode manager, each with a pool of the demo model's shape."""

    def __init__(self) -> None:
        secret, space = secrets.token_bytes(32), b"demo"
        self.registry = HandoffRegistry("127.0.0.1", 0, secret)
        (here, _), (there, _) = self._pools = [new_pool() for _ in range(2)]
        self.prefill = PrefillManager(here, space, secret, registry=self.registry.url)
        self.decode = DecodeManager(there, space, secret, name="bench")
        self._rooms = RoomNumbers(secrets.randbits(31))

    def begin(self, blocks: int) -> tuple[Sender, Receiver]:
        """Both sides of a new handoff of so many blocks."""
        room, tokens = self._rooms.draw(), blocks * BLOCK_TOKENS
        receiver = self.decode.receiver(room, self.registry.url, tokens)
        return self.prefill.sender(room, tokens), receiver

    def close(self) -> None:
        """End everything."""
        self.prefill.close()
        self.decode.close()
        self.registry.close()


@contextmanager
def _pools() -> Iterator[PushedPools]:
    made = PushedPools()
    try:
        yield made
    finally:
        made.close()


def send_all(sender: Sender, blocks: list[int]) -> list[float]:
    """Send chunk after chunk, layer after layer, as an engine does; seconds of each call."""
    spent = []
    for first in range(0, len(blocks), CHUNK_BLOCKS):
        positions = range(first, min(first + CHUNK_BLOCKS, len(blocks)))
        for layer in range(LAYERS):
            start = time.perf_counter()
            sender.send(range(layer, layer + 1), positions, blocks[first : positions.stop])
            spent.append(time.perf_counter() - start)
    sender.finish(AuxData(first_token=1, position=len(blocks) * BLOCK_TOKENS))
    return spent


def wait_ended(receivers: list[Receiver]) -> None:
    """Wait until all have ended and hold no blocks."""
    deadline = time.monotonic() + WAIT_S
    while not all(one.progress.ended and not one.holds_blocks for one in receivers):
        assert time.monotonic() < deadline, "a push did not end"
        time.sleep(_PAUSE_S)


def sends(name: str, seconds: float) -> Iterator[Result]:
    """``send/p50``: what the step thread pays for one layer of one chunk."""
    found: list[float] = []
    began = time.monotonic()
    with _pools() as pools:
        while len(found) < 100 or time.monotonic() - began < seconds:
            sender, receiver = pools.begin(PROMPT_BLOCKS)
            receiver.announce(0, list(range(PROMPT_BLOCKS)))
            found += send_all(sender, list(range(PROMPT_BLOCKS)))
            wait_ended([receiver])
            sender.close()
            receiver.close()
    yield _at_most(name, percentile(found, 50) * 1e6, _SEND_US)


def polls(name: str, seconds: float) -> Iterator[Result]:
    """``poll/64``: the states of 64 handoffs."""
    found: list[float] = []
    began = time.monotonic()
    with _pools() as pools:
        made = [pools.begin(1)[1] for _ in range(64)]
        while len(found) < 100 or time.monotonic() - began < seconds:
            start = time.perf_counter()
            pools.decode.poll(made)
            found.append(time.perf_counter() - start)
    yield _at_most(name, percentile(found, 50) * 1e6, _POLL_US)


def aborts(name: str, seconds: float) -> Iterator[Result]:
    """``abort/others``: nine of ten pushes, while decode aborts the tenth."""
    with _pools() as pools:

        def ten(*, aborted: bool) -> float:
            both = [pools.begin(SMALL_BLOCKS) for _ in range(10)]
            for number, (_, receiver) in enumerate(both):
                first = number * SMALL_BLOCKS
                receiver.announce(0, list(range(first, first + SMALL_BLOCKS)))
            start = time.perf_counter()
            for number, (sender, receiver) in enumerate(both):
                first = number * SMALL_BLOCKS
                send_all(sender, list(range(first, first + SMALL_BLOCKS)))
                if aborted and number == 4:
                    receiver.abort()
            others = [receiver for number, (_, receiver) in enumerate(both) if number != 4]
            wait_ended(others)
            spent = time.perf_counter() - start
            assert {one.state for one in others} == {State.SUCCESS}
            wait_ended([both[4][1]])
            for sender, receiver in both:
                sender.close()
                receiver.close()
            return spent

        measured = interleave(
            lambda: ten(aborted=True), lambda: ten(aborted=False),
            pairs=TURNS_MIN, min_seconds=seconds,
        )  # fmt: skip
    case, bound = measured.case.median * 1e3, measured.bound.median * 1e3
    yield Result(name, case, "ms", "none is aborted", bound, bound / case)


def _at_most(name: str, value: float, most: float) -> Result:
    return Result(name, value, "us", "at most, as required", most, most / value)


@contextmanager
def bare_sockets() -> Iterator["_BareSockets"]:
    """What moves a prompt's bytes through two plain sockets; closed at the end of the block."""
    made = _BareSockets()
    try:
        yield made
    finally:
        made.close()


class _BareSockets:
    """Calling it moves the bytes of a prompt through a TCP connection; seconds."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._here = socket.create_connection(listener.getsockname())
            self._there, _ = listener.accept()
        self._from, self._to = (prefaulted(PROMPT_BYTES).data for _ in range(2))

    def __call__(self) -> float:
        """Send from one thread, receive in this one."""
        start = time.perf_counter()
        sender = threading.Thread(target=self._here.sendall, args=(self._from,))
        sender.start()
        received = 0
        while received < PROMPT_BYTES:
            count = self._there.recv_into(self._to[received:])
            assert count, "the connection broke"
            received += count
        sender.join()
        return time.perf_counter() - start

    def close(self) -> None:
        """Close both."""
        self._here.close()
        self._there.close()
