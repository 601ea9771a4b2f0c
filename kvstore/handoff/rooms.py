"""Rooms: numbers of handoffs, which are never reused. Pure.

A room has 63 bits: 31 for the boot of the Conductor that draws it, and a counter of 32.
"""

from typing import Final

from kvstore.protocol.errors import CapacityError, InvalidArgument

ROOM_MAX: Final = (1 << 63) - 1
BOOT_MAX: Final = (1 << 31) - 1
_COUNTER_BITS: Final = 32
_COUNTER_MAX: Final = (1 << _COUNTER_BITS) - 1
ROOMS_KEPT = 32_768
"""Rooms that are remembered as used, one by one: the last ones."""
BOOTS_KEPT = 64
"""Boots of which all rooms up to one are remembered: those that were used last."""
DOUBTS_KEPT = 4_096
"""Rooms that are remembered because a write of theirs has ended badly."""


class RoomNumbers:
    """Draws rooms.

    Args:
        boot: 31 random bits, drawn at the start of the process that draws rooms.
    """

    def __init__(self, boot: int) -> None:
        if not 0 <= boot <= BOOT_MAX:
            raise InvalidArgument("boot", f"{boot} is not within 31 bits")
        self._boot = boot
        self._count = 0

    def draw(self) -> int:
        """A room that was never drawn before.

        Raises:
            CapacityError: the counter is used up; draw another boot.
        """
        if self._count >> _COUNTER_BITS:
            raise CapacityError("all rooms of this boot are used up")
        room = self._boot << _COUNTER_BITS | self._count
        self._count += 1
        return room


def check_room(room: int) -> None:
    """Refuse an invalid room.

    Raises:
        InvalidArgument: it does not have 63 bits.
    """
    if not 0 <= room <= ROOM_MAX:
        raise InvalidArgument("room", f"{room} is not within 63 bits")


class SeenRooms:
    """Remembers the last rooms, so that each is used once.

    Forgotten rooms ended long ago, and nothing of them is in progress: active ones are in a table.
    Invented rooms do not make any other room count as seen.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, None] = {}  # in the order in which they came
        self._below: dict[int, int] = {}  # boot → it has been seen up to here without a gap

    def __contains__(self, room: int) -> bool:
        below = self._below.get(room >> _COUNTER_BITS, 0)
        return room in self._rooms or room & _COUNTER_MAX < below

    def add(self, room: int) -> None:
        """Remember a room; of too many, the first is forgotten."""
        if room in self:
            return
        self._rooms[room] = None
        boot = room >> _COUNTER_BITS
        below = self._below.pop(boot, 0)
        while below | boot << _COUNTER_BITS in self._rooms:
            del self._rooms[below | boot << _COUNTER_BITS]  # who gets every room keeps one number
            below += 1
        if below:
            self._below[boot] = below
        if len(self._below) > BOOTS_KEPT:
            del self._below[next(iter(self._below))]
        if len(self._rooms) > ROOMS_KEPT:
            del self._rooms[next(iter(self._rooms))]


class DoubtedRooms:
    """Rooms of which a write has ended badly, so that its bytes may still arrive at decode."""

    def __init__(self) -> None:
        self._rooms: dict[int, None] = {}
        self._forgotten = False

    def add(self, room: int) -> None:
        """Note a room. When there are more than are kept, every room counts as doubted."""
        self._rooms[room] = None
        if len(self._rooms) > DOUBTS_KEPT:
            self._rooms.pop(next(iter(self._rooms)))
            self._forgotten = True

    def __contains__(self, room: int) -> bool:
        """Whether bytes of a room that has ended may still arrive; in doubt they may."""
        return self._forgotten or room in self._rooms
