"""Limits for messages about requests that the engine does not have yet, and answers. Pure.

All peers share the limits. A peer may use them up, and gives way to one that has less: its oldest
request is dropped. The limits are shared first among addresses, then among the decode engines at an
address: an engine that claims to be a hundred takes only from those at its own address.
"""

from collections import Counter, deque
from collections.abc import Collection
from typing import Final

from kvstore.handoff.effects import Effect, SendTo
from kvstore.handoff.messages import (
    Abort,
    Announce,
    Done,
    Drained,
    Failed,
    FromDecode,
    HandoffPing,
)
from kvstore.handoff.places import NUMBER_BYTES
from kvstore.handoff.states import FailureCode, HandoffFailure, HandoffSide, Layer
from kvstore.handoff.tables import SendingRoom, Speaker
from kvstore.protocol.errors import ProtocolError

ROOMS_MAX = 512
"""Handoffs of a table that may be known from decode only."""
BLOCKS_MAX = 4 << 20
"""And how many blocks these have announced together: a peer must not use up our memory."""
MISSED_KEPT = 4_096
"""Maximum remembered rooms that ended or were refused before they were opened; the last ones of
each peer."""
WHY_GAVE_WAY: Final = "it has not come here, and other peers have fewer such requests"
WHY_FULL: Final = "too many handoffs are waiting"
WHY_USED: Final = "the room was used before"
WHY_FOREIGN: Final = "another decode engine has the room"


def refusal(rank: int, why: str) -> HandoffFailure:
    """What a rank of prefill answers to a handoff that it does not begin."""
    return HandoffFailure(FailureCode.REFUSED, HandoffSide.PREFILL, rank, Layer.PROTOCOL, why)


def answer(
    link: bytes, message: FromDecode, failure: HandoffFailure, *, doubtful: bool
) -> list[Effect]:
    """Answer a message about a room of which nothing is submitted over its link.

    Without an answer decode keeps its blocks, asks again, and closes the link at last.

    Args:
        link: over which the message came.
        message: of decode.
        failure: why nothing is sent.
        doubtful: bytes of the room may still arrive, although nothing is sent any more.
    """
    if isinstance(message, HandoffPing | Done):
        return []
    drained = SendTo(link, Drained(message.room, doubtful))
    if isinstance(message, Abort):
        return [drained]
    return [SendTo(link, Failed(message.room, failure)), drained]


class MissedRooms:
    """Rooms that ended or were refused before the engine opened them, and why.

    Their requests may still arrive: each is then a failed handoff, and not an error of the caller.
    Whoever makes up rooms takes no place from others: of too many, the peer with most forgets one.
    """

    def __init__(self) -> None:
        self._why: dict[int, HandoffFailure] = {}
        self._origins: dict[int, Speaker] = {}
        self._of: dict[Speaker, dict[int, None]] = {}  # peer → its rooms, the oldest first

    def __contains__(self, room: int) -> bool:
        return room in self._why

    def add(self, room: int, why: HandoffFailure | None, rank: int, origin: Speaker) -> None:
        """Note a room.

        Args:
            room: one that is not noted.
            why: None = decode wanted nothing of this rank, and had everything at once.
            rank: of this side.
            origin: the peer that has spoken of it first.
        """
        assert room not in self._why
        if why is None:
            late = "the request came when it had long ended"
            code, layer = FailureCode.DEADLINE, Layer.PROTOCOL
            why = HandoffFailure(code, HandoffSide.PREFILL, rank, layer, late)
        self._why[room], self._origins[room] = why, origin
        self._of.setdefault(origin, {})[room] = None
        if len(self._why) > MISSED_KEPT:
            has = Counter({peer: len(rooms) for peer, rooms in self._of.items()})
            most = _most_at(_most_of(has), has)
            assert most is not None
            self.take(next(iter(self._of[most])))

    def refuse(self, room: int, rank: int, origin: Speaker) -> None:
        """Note a room for which there is no place; what decode sends of it later stays refused."""
        self.add(room, refusal(rank, WHY_FULL), rank, origin)

    def why(self, room: int) -> HandoffFailure | None:
        """Why it ended; None = it is not known."""
        return self._why.get(room)

    def take(self, room: int) -> HandoffFailure | None:
        """The same for the engine that opens it; forgets it."""
        if (origin := self._origins.pop(room, None)) is not None:
            del self._of[origin][room]
            if not self._of[origin]:
                del self._of[origin]
        return self._why.pop(room, None)


def make_place(rooms: Collection[SendingRoom], origin: Speaker) -> list[SendingRoom] | None:
    """Allow a peer one more room that the engine has not opened.

    Args:
        rooms: the table, the oldest first.
        origin: the peer.

    Returns:
        the rooms to drop for it; None = not allowed, because no peer has more.
    """
    mine = [one for one in rooms if not one.opened]
    if len(mine) < ROOMS_MAX:
        return []
    most = _gives_way(Counter(one.origin for one in mine), origin, 1)
    return None if most is None else [next(one for one in mine if one.origin == most)]


def make_room(
    rooms: Collection[SendingRoom], room: SendingRoom, message: Announce
) -> list[SendingRoom]:
    """Allow a peer to announce blocks for a room; limited only for rooms that are not opened.

    Args:
        rooms: the table, the oldest first.
        room: of the announcement.
        message: not decoded yet.

    Returns:
        the rooms to drop for it.

    Raises:
        ProtocolError: they are too many, and no peer has announced more.
    """
    if room.opened:
        return []
    queues: dict[Speaker, deque[tuple[int, SendingRoom]]] = {}
    blocks = Counter[Speaker]()
    for one in rooms:
        announced = 0 if one.opened else _announced(one)
        if announced:
            queues.setdefault(one.origin, deque()).append((announced, one))
            blocks[one.origin] += announced
    count = (len(message.blocks) + sum(map(len, message.states))) // NUMBER_BYTES
    over = blocks.total() + count - BLOCKS_MAX
    found: list[SendingRoom] = []
    while over > 0:
        most = _gives_way(blocks, room.origin, count)
        if most is None:
            raise ProtocolError(f"{over} blocks too many, for requests that have not come here")
        announced, one = queues[most].popleft()
        blocks[most] -= announced
        over -= announced
        found.append(one)
    return found


def _gives_way(has: Counter[Speaker], origin: Speaker, more: int) -> Speaker | None:
    """The peer with more than ``origin`` would have with ``more``; None = none.

    It is at the address that has most; if that is not more than its own would have, at its own.
    """
    address = _most_of(has)
    at_home = _count_at(address, has) <= _count_at(origin.address, has) + more
    if at_home:
        address = origin.address
    most = _most_at(address, has)
    if most is None or (at_home and has[most] <= has[origin] + more):
        return None
    return most


def _count_at(address: str, has: Counter[Speaker]) -> int:
    """What the engines at an address have together."""
    return sum(count for peer, count in has.items() if peer.address == address)


def _most_of(has: Counter[Speaker]) -> str:
    """The address that has most; empty = there is none."""
    addresses = Counter[str]()
    for peer, count in has.items():
        addresses[peer.address] += count
    return max(addresses, key=lambda one: addresses[one], default="")


def _most_at(address: str, has: Counter[Speaker]) -> Speaker | None:
    """The engine at an address that has most; None = there is none."""
    engines = [peer for peer in has if peer.address == address]
    return max(engines, key=lambda peer: has[peer], default=None)


def _announced(room: SendingRoom) -> int:
    """How many blocks have been announced for a room."""
    return sum(
        len(leg.there or ()) + sum(len(part.blocks) for part in leg.states)
        for leg in room.legs.values()
    )
