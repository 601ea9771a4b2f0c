"""One rank of a decode engine in a process of its own; it reduces states through a socket.

``python -m tests.handoff.decode_rank RANK REGISTRY PORT``: takes rooms 1 to 3, asks the server at
PORT in each step for the lowest states among all ranks, and prints of each room how it ended, in
which step, and whether the right KV came. Rank 1 announces room 2 late, rank 0 gives room 3 up.
"""

import sys
from multiprocessing.connection import Client

from kvstore.handoff.decode import DecodeManager
from kvstore.handoff.ranks import RankGroup, RankPart
from kvstore.handoff.states import TERMINAL, State
from tests.conftest import wait_for
from tests.handoff.pair import PATIENCE, SECRET, SPACE
from tests.handoff.ranked import BLOCK_TOKENS, HEADS, LAYERS, RankMemory, whole_of

ROOMS = (1, 2, 3)
PROMPT_BLOCKS = 4
LATE_STEP = 20
PARTS = tuple(RankPart((0, LAYERS), (half, half + HEADS // 2)) for half in (0, HEADS // 2))


def blocks_of(room: int) -> list[int]:
    return list(range(room * PROMPT_BLOCKS, (room + 1) * PROMPT_BLOCKS))


def main() -> None:
    rank, registry, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    memory = RankMemory(RankGroup(rank, PARTS, b"decode's ranks.."))
    manager = DecodeManager(memory.pool, SPACE, SECRET, patience=PATIENCE)
    server = Client(("127.0.0.1", port), authkey=SECRET)

    def reduce(states: list[int]) -> list[int]:
        server.send((rank, states))
        return server.recv()

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
    server.close()
    wait_for(lambda: not any(one.holds_blocks for one in receivers), 10)
    for room, (state, at) in sorted(ended.items()):
        mine = memory.of(whole_of(room, PROMPT_BLOCKS))
        is_right = bool((memory.planes[:, blocks_of(room)] == mine).all())
        print("room", room, state, at, is_right, flush=True)  # noqa: T201
    print("held", [one.holds_blocks for one in receivers], flush=True)  # noqa: T201
    manager.close()


if __name__ == "__main__":
    main()
