"""Pushes between engines of unequal ranks, beside those of one rank each.

``reshard/2to1``: two ranks of prefill have two of the four KV heads each, one rank of decode has
all; ``reshard/1to2``: the other way. The KV are those of ``push/block16/contiguous``. All ranks of
prefill are in this process, all of decode in another; the bound is the same from one rank to one,
measured in turns. ``.../ranges`` is how many ranges that takes, beside twice those of one rank.
"""

import multiprocessing
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Final

import numpy as np
import numpy.typing as npt

from bench.handoff_pools import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LAYERS,
    POOL_BLOCKS,
    PROMPT_BLOCKS,
    PROMPT_BYTES,
    TOKENS,
    TURNS_MIN,
    WAIT_S,
    send_all,
    wait_ended,
)
from bench.measure import Result, interleave, prefaulted, throughput
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.ranks import INSTANCE_BYTES, RankGroup, RankPart
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.rooms import RoomNumbers
from kvstore.handoff.states import State
from kvstore.mover.kvpool import KVPool

HEADS: Final = 4
_SPACE: Final = b"demo"
_ORDER: Final = list(range(PROMPT_BLOCKS))


class RankedPush:
    """Calling it pushes a prompt's KV; seconds from the first layer until decode has everything.

    Args:
        ranks: of prefill.
        pipe: to decode's process.
        registry: for the ranks.
        secret: of the handoffs.

    Attributes:
        ranges: how many the last push took.
    """

    def __init__(
        self, ranks: int, pipe: Connection, registry: HandoffRegistry, secret: bytes
    ) -> None:
        pools, self._memory = _ranked_pools(ranks)
        self._managers = [
            PrefillManager(pool, _SPACE, secret, registry=registry.url) for pool in pools
        ]
        self._pipe = pipe
        self._rooms = RoomNumbers(secrets.randbits(31))
        self.ranges = 0

    def __call__(self) -> float:
        """Push once."""
        room = self._rooms.draw()
        senders = [one.sender(room, TOKENS) for one in self._managers]
        self._pipe.send(room)
        self._answer()
        start = time.perf_counter()
        for sender in senders:
            send_all(sender, _ORDER)
        self.ranges = self._answer()
        spent = time.perf_counter() - start
        deadline = time.monotonic() + WAIT_S
        while any(sender.holds_blocks for sender in senders):
            assert time.monotonic() < deadline, "prefill does not hear that it is done"
            time.sleep(0.0002)
        assert {sender.state for sender in senders} == {State.SUCCESS}, senders[0].failure
        for sender in senders:
            sender.close()
        return spent

    def close(self) -> None:
        """End prefill."""
        for manager in self._managers:
            manager.close()

    def _answer(self) -> int:
        if not self._pipe.poll(WAIT_S):
            raise TimeoutError("decode's process does not answer")
        return int(self._pipe.recv())


def reshards(name: str, seconds: float) -> Iterator[Result]:
    """``reshard/NtoM``: see the module."""
    prefill, decode = map(int, name.rpartition("/")[2].split("to"))
    with _pushing(prefill, decode) as case, _pushing(1, 1) as bound:
        measured = interleave(case, bound, pairs=TURNS_MIN, min_seconds=seconds)
        ranges, most = case.ranges, 2 * bound.ranges
    yield throughput(name, PROMPT_BYTES, measured, "1to1, same bytes")
    yield Result(f"{name}/ranges", ranges, "ranges", "twice 1to1", most, most / ranges)


@contextmanager
def _pushing(prefill: int, decode: int) -> Iterator[RankedPush]:
    """What pushes from so many ranks to so many; the processes end with the block."""
    secret = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    registry = HandoffRegistry("127.0.0.1", 0, secret)
    here, there = context.Pipe()
    process = context.Process(target=_decode, args=(there, registry.url, secret, decode))
    process.start()
    push = RankedPush(prefill, here, registry, secret)
    try:
        yield push
    finally:
        here.send(None)
        process.join(WAIT_S)
        if process.is_alive():
            process.kill()
            process.join()
        push.close()
        registry.close()


def _decode(pipe: Connection, registry: str, secret: bytes, ranks: int) -> None:
    """Decode's process: take pushes until there is no room; tells how many ranges each took."""
    pools, _memory = _ranked_pools(ranks)
    managers = [DecodeManager(pool, _SPACE, secret, name="bench") for pool in pools]
    while (room := pipe.recv()) is not None:
        before = sum(one.stats()["ranges"] for one in managers if "ranges" in one.stats())
        receivers = [one.receiver(room, registry, TOKENS) for one in managers]
        for receiver in receivers:
            receiver.announce(0, _ORDER)
        pipe.send(0)
        wait_ended(receivers)
        assert {one.state for one in receivers} == {State.SUCCESS}, receivers[0].failure
        pipe.send(sum(one.stats()["ranges"] for one in managers) - before)
        for receiver in receivers:
            receiver.close()
    for manager in managers:
        manager.close()


def _ranked_pools(ranks: int) -> tuple[list[HandoffPool], list[npt.NDArray[np.uint8]]]:
    """A pool of the demo model's shape a rank; keep the arrays as long as the pools are used."""
    heads, size = HEADS // ranks, BLOCK_BYTES // ranks
    parts = tuple(RankPart((0, LAYERS), (at * heads, (at + 1) * heads)) for at in range(ranks))
    instance, step = secrets.token_bytes(INSTANCE_BYTES), POOL_BLOCKS * size
    pools, memories = [], []
    for rank in range(ranks):
        memory = prefaulted(2 * LAYERS * step)
        planes = tuple(int(memory.ctypes.data) + step * plane for plane in range(2 * LAYERS))
        pool = KVPool(planes, size, size, POOL_BLOCKS)
        generations = np.zeros(POOL_BLOCKS, dtype=np.uint64)
        group = RankGroup(rank, parts, instance)
        pools.append(HandoffPool(pool, BLOCK_TOKENS, generations, group))
        memories.append(memory)
    return pools, memories
