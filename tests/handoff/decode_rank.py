"""One rank of a decode engine in a process of its own; gloo reduces the states.

``python -m tests.handoff.decode_rank RANK REGISTRY STORE``: takes rooms 1 to 3, asks in each step
for the lowest states among all ranks, which meet in the file STORE, and prints of each room how it
ended, in which step, and whether the right KV came. Rank 1 announces room 2 late, rank 0 gives
room 3 up.
"""

import sys
from datetime import timedelta

import torch
from torch import distributed

from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.ranks import RankGroup
from kvstore.handoff.states import TERMINAL, State
from tests.conftest import wait_for
from tests.handoff.pair import PATIENCE, SECRET, SPACE
from tests.handoff.ranked import BLOCK_TOKENS, RankMemory, whole_of
from tests.handoff.test_reduce import LATE_STEP, PARTS, PROMPT_BLOCKS, ROOMS


def blocks_of(room: int) -> list[int]:
    return list(range(room * PROMPT_BLOCKS, (room + 1) * PROMPT_BLOCKS))


def main() -> None:
    rank, registry, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    print("imported", flush=True)  # noqa: T201
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=len(PARTS),
        timeout=timedelta(seconds=30),
    )  # fmt: skip
    memory = RankMemory(RankGroup(rank, PARTS, b"decode's ranks.."))
    manager = DecodeManager(memory.pool, SPACE, SECRET, patience=PATIENCE)
    reduced = 0

    def reduce(states: list[int]) -> list[int]:
        nonlocal reduced
        reduced += 1
        told = torch.tensor(states, dtype=torch.int32)
        distributed.all_reduce(told, distributed.ReduceOp.MIN)
        return told.tolist()

    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    receivers = [manager.receiver(room, registry, tokens) for room in ROOMS]
    ended: dict[int, tuple[str, int]] = {}
    step = 0
    while len(ended) < len(ROOMS):
        for one in receivers:
            if step == (LATE_STEP if (rank, one.room) == (1, 2) else 0):
                one.announce(0, blocks_of(one.room))
        if (rank, step) == (0, LATE_STEP):
            receivers[2].abort()
        for one, state in zip(receivers, manager.poll(receivers, reduce), strict=True):
            if state in TERMINAL:
                ended.setdefault(one.room, (state.name, step))
            if state is State.FAILED:
                one.abort()
        step += 1
    distributed.destroy_process_group()
    wait_for(lambda: not any(one.holds_blocks for one in receivers), 10)
    for room, (state, at) in sorted(ended.items()):
        mine = memory.of(whole_of(room, PROMPT_BLOCKS))
        is_right = bool((memory.planes[:, blocks_of(room)] == mine).all())
        print("room", room, state, at, is_right, flush=True)  # noqa: T201
    print("steps", step, "reduced", reduced, flush=True)  # noqa: T201
    print("held", [one.holds_blocks for one in receivers], flush=True)  # noqa: T201
    manager.close()


if __name__ == "__main__":
    main()
