"""Limits for messages about requests that prefill does not have yet, or never gets. Pure.

All peers share the bounds. A peer may fill them, and gives way to one that has less: its oldest
request is given up. A peer is an address: what else it says of itself, it can say a hundred times.
"""

from collections import Counter
from collections.abc import Collection
from typing import Final

from kvstore.errors import ProtocolError
from kvstore.handoff.messages import Announce
from kvstore.handoff.places import NUMBER_BYTES
from kvstore.handoff.tables import SendingRoom

ROOMS_MAX = 512
"""Handoffs of a table that may be known from decode only."""
BLOCKS_MAX = 4 << 20
"""And how many blocks these have announced together: a peer must not use up our memory."""
WHY_GAVE_WAY: Final = "it has not come here, and other peers have fewer such requests"


def make_place(rooms: Collection[SendingRoom], origin: str) -> list[SendingRoom] | None:
    """Let a peer speak of one more room that the engine has not opened.

    Args:
        rooms: the table, the oldest first.
        origin: address of the peer.

    Returns:
        the rooms to give up for it; None = it may not, as no peer has more.
    """
    mine = [one for one in rooms if not one.opened]
    if len(mine) < ROOMS_MAX:
        return []
    has = Counter(one.origin for one in mine)
    most = max(has, key=lambda one: has[one])
    if has[most] <= has[origin] + 1:
        return None
    return [next(one for one in mine if one.origin == most)]


def make_room(
    rooms: Collection[SendingRoom], room: SendingRoom, message: Announce
) -> list[SendingRoom]:
    """Let a peer announce blocks for a room; only one that the engine has not opened has a bound.

    Args:
        rooms: the table, the oldest first.
        room: of the announcement.
        message: not read yet.

    Returns:
        the rooms to give up for it.

    Raises:
        ProtocolError: they are too many, and no peer has announced more.
    """
    if room.opened:
        return []
    mine = [one for one in rooms if not one.opened]
    blocks = Counter[str]()
    for one in mine:
        blocks[one.origin] += _announced(one)
    count = (len(message.blocks) + sum(map(len, message.states))) // NUMBER_BYTES
    over = blocks.total() + count - BLOCKS_MAX
    if over <= 0:
        return []
    most, found = max(blocks, key=lambda one: blocks[one]), []
    for one in mine:
        if over <= 0 or blocks[most] <= blocks[room.origin] + count:
            break
        if one.origin == most:
            found.append(one)
            blocks[most] -= _announced(one)
            over -= _announced(one)
    if over > 0:
        raise ProtocolError(f"{over} blocks too many, for requests that have not come here")
    return found


def _announced(room: SendingRoom) -> int:
    """How many blocks have been announced for a room."""
    return sum(
        len(leg.there or ()) + sum(len(part.blocks) for part in leg.states)
        for leg in room.legs.values()
    )
