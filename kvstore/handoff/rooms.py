"""Rooms: numbers of handoffs, none of which is used twice. Pure.

A room has 63 bits: 31 of the boot of whoever draws it (the Conductor) and a counter of 32.
"""

from collections import OrderedDict
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument

ROOM_MAX: Final = (1 << 63) - 1
BOOT_MAX: Final = (1 << 31) - 1
_COUNTER_BITS: Final = 32
BOOTS_KEPT: Final = 64
"""Boots whose rooms are remembered; the one that was not used for longest is forgotten."""
ROOMS_KEPT: Final = 16_384
"""Rooms of a boot that are remembered one by one; what is older counts as seen."""
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
    """Refuse what is no room.

    Raises:
        InvalidArgument: it has not 63 bits.
    """
    if not 0 <= room <= ROOM_MAX:
        raise InvalidArgument("room", f"{room} is not within 63 bits")


class _Boot:
    """The rooms of one boot that were seen: all below ``floor``, and some above."""

    __slots__ = ("floor", "seen")

    def __init__(self) -> None:
        self.floor = 0
        self.seen: set[int] = set()


class SeenRooms:
    """Remembers rooms, so that each is used once; within a bound, older ones count as seen."""

    def __init__(self) -> None:
        self._boots: OrderedDict[int, _Boot] = OrderedDict()

    def __contains__(self, room: int) -> bool:
        boot = self._boots.get(room >> _COUNTER_BITS)
        number = room & ((1 << _COUNTER_BITS) - 1)
        return boot is not None and (number < boot.floor or number in boot.seen)

    def add(self, room: int) -> None:
        """Remember a room."""
        key, number = room >> _COUNTER_BITS, room & ((1 << _COUNTER_BITS) - 1)
        boot = self._boots.setdefault(key, _Boot())
        self._boots.move_to_end(key)
        if len(self._boots) > BOOTS_KEPT:
            self._boots.popitem(last=False)
        if number >= boot.floor:
            boot.seen.add(number)
        while boot.floor in boot.seen:  # an engine that gets every room remembers one number
            boot.seen.remove(boot.floor)
            boot.floor += 1
        if len(boot.seen) > ROOMS_KEPT:
            kept = sorted(boot.seen)[ROOMS_KEPT // 2 :]
            boot.floor, boot.seen = kept[0], set(kept)


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
