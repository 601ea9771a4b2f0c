"""Pushes between engines of unequal ranks, from pools to pools, beside those of one rank each.

``reshard/2to1``: two ranks of prefill have two of the four KV heads each, one rank of decode has
all; ``reshard/1to2``: the other way. The KV are those of ``push/block16/contiguous``, all ranks are
in this process, and the bound is the same from one rank to one, measured in turns. ``.../ranges``
is how many ranges that takes, beside twice those of one rank.
"""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    send_all,
    wait_ended,
)
from bench.measure import Result, interleave, prefaulted
from bench.measure import throughput as in_gbps
from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.memory import HandoffPool
from kvstore.handoff.prefill import PrefillManager
from kvstore.handoff.ranks import INSTANCE_BYTES, RankGroup, RankPart
from kvstore.handoff.registry import HandoffRegistry
from kvstore.handoff.rooms import RoomNumbers
from kvstore.handoff.states import State
from kvstore.mover.kvpool import KVPool

HEADS: Final = 4


class RankedPools:
    """A prefill and a decode engine of so many ranks, each rank with its heads of the demo model.

    Args:
        prefill: ranks.
        decode: ranks.
    """

    def __init__(self, prefill: int, decode: int) -> None:
        self._generations = np.zeros(POOL_BLOCKS, dtype=np.uint64)
        self._memory: list[npt.NDArray[np.uint8]] = []
        self._rooms = RoomNumbers(secrets.randbits(31))
        secret, space = secrets.token_bytes(32), b"demo"
        self.registry = HandoffRegistry("127.0.0.1", 0, secret)
        here, there = self._pools(prefill), self._pools(decode)
        self.prefill = [
            PrefillManager(pool, space, secret, registry=self.registry.url) for pool in here
        ]
        self.decode = [DecodeManager(pool, space, secret, name="bench") for pool in there]

    def __call__(self) -> float:
        """Push the KV of a prompt; seconds."""
        room, order = self._rooms.draw(), list(range(PROMPT_BLOCKS))
        receivers = [one.receiver(room, self.registry.url, TOKENS) for one in self.decode]
        senders = [one.sender(room, TOKENS) for one in self.prefill]
        for receiver in receivers:
            receiver.announce(0, order)
        start = time.perf_counter()
        for sender in senders:
            send_all(sender, order)
        wait_ended(receivers)
        spent = time.perf_counter() - start
        assert {one.state for one in receivers} == {State.SUCCESS}, receivers[0].failure
        for sender in senders:
            sender.close()
        for receiver in receivers:
            receiver.close()
        return spent

    @property
    def ranges(self) -> int:
        """Ranges that have arrived so far."""
        return sum(one.stats()["ranges"] for one in self.decode)

    def close(self) -> None:
        """End everything."""
        for here in self.prefill:
            here.close()
        for there in self.decode:
            there.close()
        self.registry.close()

    def _pools(self, ranks: int) -> list[HandoffPool]:
        found, heads = [], HEADS // ranks
        size, instance = BLOCK_BYTES // ranks, secrets.token_bytes(INSTANCE_BYTES)
        parts = tuple(
            RankPart((0, LAYERS), (rank * heads, (rank + 1) * heads)) for rank in range(ranks)
        )
        for rank in range(ranks):
            memory = prefaulted(2 * LAYERS * POOL_BLOCKS * size)
            self._memory.append(memory)
            step = POOL_BLOCKS * size
            planes = tuple(int(memory.ctypes.data) + step * plane for plane in range(2 * LAYERS))
            pool = KVPool(planes, size, size, POOL_BLOCKS)
            group = RankGroup(rank, parts, instance)
            found.append(HandoffPool(pool, BLOCK_TOKENS, self._generations, group))
        return found


@contextmanager
def _ranked(prefill: int, decode: int) -> Iterator[RankedPools]:
    made = RankedPools(prefill, decode)
    try:
        yield made
    finally:
        made.close()


def reshards(name: str, seconds: float) -> Iterator[Result]:
    """``reshard/NtoM``: see the module."""
    prefill, decode = map(int, name.rpartition("/")[2].split("to"))
    with _ranked(prefill, decode) as case, _ranked(1, 1) as bound:
        case(), bound()  # connect
        before = (case.ranges, bound.ranges)
        case(), bound()
        ranges, most = case.ranges - before[0], 2 * (bound.ranges - before[1])
        measured = interleave(case, bound, pairs=TURNS_MIN, min_seconds=seconds)
    yield in_gbps(name, PROMPT_BYTES, measured, "1to1, same bytes")
    yield Result(f"{name}/ranges", ranges, "ranges", "twice 1to1", most, most / ranges)
