"""Bounds of what decode may say of requests that prefill has not got, and may never get. Pure."""

from collections.abc import Collection
from typing import Final

from kvstore.errors import ProtocolError
from kvstore.handoff.messages import Announce
from kvstore.handoff.places import NUMBER_BYTES
from kvstore.handoff.tables import SendingRoom

ROOMS_MAX: Final = 512
"""Handoffs of a table that may be known from decode only."""
BLOCKS_MAX = 4 << 20
"""And how many blocks these have announced together: a peer must not use up our memory."""


def may_be_more(rooms: Collection[SendingRoom]) -> bool:
    """Whether decode may speak of one more room that the engine has not opened."""
    return sum(not one.opened for one in rooms) < ROOMS_MAX


def refuse_blocks(rooms: Collection[SendingRoom], message: Announce) -> None:
    """Refuse an announcement for a room that the engine has not opened, if it names too many.

    Args:
        rooms: the table.
        message: not read yet.

    Raises:
        ProtocolError: so it is.
    """
    legs = [leg for one in rooms if not one.opened for leg in one.legs.values()]
    count = (len(message.blocks) + sum(map(len, message.states))) // NUMBER_BYTES
    for leg in legs:
        count += len(leg.there or ()) + sum([len(part.blocks) for part in leg.states])
    if count > BLOCKS_MAX:
        raise ProtocolError(f"{count} blocks were announced for requests that have not come here")
