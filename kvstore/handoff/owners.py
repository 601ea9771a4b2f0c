"""Which handoff may write to which blocks of decode, and how many of them are in LIMBO. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kvstore.handoff.shape import PoolShape
from kvstore.handoff.tables import BlockName, ReceivingRoom
from kvstore.protocol.errors import CapacityError, InvalidArgument

LIMBO_SHARE: Final = 10
"""At most this part (1/10) of the blocks of the pool, and of each state buffer, may be in LIMBO
because of one peer; of a small one, one block."""


class BlockOwners:
    """The blocks of one rank of decode; each belongs to at most one handoff."""

    def __init__(self) -> None:
        self._owned: dict[BlockName, int] = {}  # → room

    def take(self, room: int, names: Iterable[BlockName]) -> None:
        """A handoff owns these blocks from now on.

        Raises:
            InvalidArgument: one is of another handoff; nothing was taken.
        """
        taken = dict.fromkeys(names, room)
        if not self._owned.keys().isdisjoint(taken):
            raise InvalidArgument("blocks", "one belongs to another handoff")
        self._owned.update(taken)

    def give_back(self, names: Iterable[BlockName]) -> None:
        """These blocks are the engine's again."""
        for name in names:
            del self._owned[name]

    def check(self, rooms: Iterable[ReceivingRoom]) -> None:
        """Assert that each block has the one owner to whose handoff bytes may arrive."""
        owned = Counter[BlockName]()
        for one in rooms:
            if one.is_holding:
                assert all(self._owned[name] == one.room for name in one.held)
                owned.update(one.held)
        assert len(owned) == len(self._owned)
        assert all(number == 1 for number in owned.values()), "a block has two owners"


def limbo_of(rooms: Iterable[ReceivingRoom], peer: str | None) -> Counter[int]:
    """Blocks in LIMBO because of a peer, None = all: of the pool (-1), and of each state buffer."""
    return sum((one.limbo for one in rooms if peer in (None, one.peer)), Counter())


def refuse_for_limbo(limbo: Counter[int], shape: PoolShape, peer: str) -> None:
    """Refuse another handoff with a peer because of which too many blocks are in LIMBO.

    Raises:
        CapacityError: so it is.
    """
    for index, count in limbo.items():
        of = shape.block_count if index < 0 else shape.states[index].block_count
        if count > max(of // LIMBO_SHARE, index >= 0):
            raise CapacityError(f"{count} blocks wait until {peer} has drained them", "limbo")
