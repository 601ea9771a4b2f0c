"""One rank of an engine in a process of its own, which does what it is told.

``python -m tests.handoff.rank_process SIDE RANK REGISTRY PORT SILENCE``: takes commands from the
server at PORT, each the name of a method and its arguments. In a step it sends the states of its
requests there, and gets the lowest of all ranks: an all-reduce over pipes. SILENCE is in seconds.
"""

import sys
from multiprocessing.connection import Client, Connection

from kvstore.handoff.aux_data import AuxData
from kvstore.handoff.decode import DecodeManager, Receiver
from kvstore.handoff.prefill import PrefillManager, Sender
from kvstore.handoff.ranks import RankGroup, RankPart
from kvstore.handoff.states import Patience, State
from tests.handoff.pair import SECRET, SPACE
from tests.handoff.ranked import BLOCK_TOKENS, HEADS, LAYERS, RankMemory, whole_of

PROMPT_BLOCKS = 4
PARTS = {
    "prefill": tuple(RankPart((at, at + LAYERS // 2), (0, HEADS)) for at in (0, LAYERS // 2)),
    "decode": tuple(RankPart((0, LAYERS), (at, at + HEADS // 2)) for at in (0, HEADS // 2)),
}
"""So each rank of one side has a link to each of the other."""
INSTANCES = {"prefill": b"prefill's ranks.", "decode": b"decode's ranks.."}


def patience_of(silence_s: float) -> Patience:
    return Patience(
        bootstrapping_s=6, waiting_s=20, transferring_s=20, total_s=60, silence_s=silence_s
    )


def blocks_of(room: int) -> list[int]:
    first = room % 16 * PROMPT_BLOCKS
    return list(range(first, first + PROMPT_BLOCKS))


class Rank:
    """What is told to one rank."""

    def __init__(
        self, side: str, rank: int, registry: str, server: Connection, patience: Patience
    ) -> None:
        self._server = server
        self._registry = registry
        self._memory = RankMemory(RankGroup(rank, PARTS[side], INSTANCES[side]))
        self._handoffs: dict[int, Sender | Receiver] = {}
        self._manager: PrefillManager | DecodeManager
        if side == "prefill":
            self._manager = PrefillManager(
                self._memory.pool, SPACE, SECRET, registry=registry, patience=patience
            )
        else:
            self._manager = DecodeManager(self._memory.pool, SPACE, SECRET, patience=patience)

    def open(self, room: int, registry: str = "") -> None:
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        if isinstance(self._manager, PrefillManager):
            self._handoffs[room] = self._manager.sender(room, tokens)
        else:
            self._handoffs[room] = self._manager.receiver(room, registry or self._registry, tokens)

    def announce(self, room: int) -> None:
        self._handoffs[room].announce(0, blocks_of(room))

    def push(self, room: int, first: int, stop: int) -> None:
        """Compute and push some layers of this rank."""
        mine, blocks = self._memory.of(whole_of(room, PROMPT_BLOCKS)), blocks_of(room)
        for layer in range(first, stop):
            for plane in (2 * layer, 2 * layer + 1):
                self._memory.planes[plane, blocks] = mine[plane]
            self._handoffs[room].send(range(layer, layer + 1), range(PROMPT_BLOCKS), blocks)

    def finish(self, room: int) -> None:
        tokens = PROMPT_BLOCKS * BLOCK_TOKENS
        self._handoffs[room].finish(AuxData(first_token=7, position=tokens))

    def abort(self, room: int) -> None:
        self._handoffs[room].abort()

    def close(self, room: int) -> None:
        self._handoffs.pop(room).close()

    def is_right(self, room: int) -> bool:
        """Whether the KV of a request have arrived."""
        mine = self._memory.of(whole_of(room, PROMPT_BLOCKS))
        return bool((self._memory.planes[:, blocks_of(room)] == mine).all())

    def missing(self) -> dict[int, list[int]]:
        return {one.room: one.missing for one in self._manager.describe()}

    def stats(self) -> dict[str, int]:
        return self._manager.stats()

    def step(self) -> dict[int, tuple[str, str | None, bool]]:
        """One step: what this rank knows of each request: state, code, whether it holds blocks."""
        handoffs = self._handoffs
        agreed = self._manager.poll(list(handoffs.values()), self._reduce)  # type: ignore[arg-type]
        for one, state in zip(handoffs.values(), agreed, strict=True):
            if state is State.FAILED and one.state is not State.FAILED:
                one.abort()
        return {
            room: (one.state.name, one.failure and one.failure.code, one.holds_blocks)
            for room, one in handoffs.items()
        }

    def _reduce(self, states: list[int]) -> list[int]:
        self._server.send(states)
        return list(self._server.recv())


def main() -> None:
    side, rank, registry, port, silence_s = sys.argv[1:]
    with Client(("127.0.0.1", int(port)), authkey=SECRET) as server:
        told = Rank(side, int(rank), registry, server, patience_of(float(silence_s)))
        server.send((side, int(rank)))
        while True:
            try:
                name, arguments = server.recv()
            except EOFError:
                break
            server.send(getattr(told, name)(*arguments))
        told._manager.close()


if __name__ == "__main__":
    main()
