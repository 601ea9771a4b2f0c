"""The nodes of a space in the order they were made, so that they can be listed a stretch at a time.

Nobody may hold the state for as long as a walk over a million nodes takes, and a walk with pauses
must neither miss a node nor show one twice while others come and go. So each node gets a serial
number when it is made, and nodes with neighbouring numbers share a **shelf**: a walk goes shelf by
shelf, and the number of the next node is all it has to remember. A node that was there from the
beginning of a walk to its end is shown exactly once.
"""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

SHELF_NODES: Final = 256
"""Serial numbers that share a shelf: the most nodes that one turn of a walk looks at."""
_SHIFT: Final = SHELF_NODES.bit_length() - 1


class Listed(Protocol):
    """A node, as far as it is listed."""

    serial: int


N = TypeVar("N", bound=Listed)


class CreationOrder(Generic[N]):
    """All nodes of one space by serial number."""

    def __init__(self) -> None:
        #: shelf number → serial number → node; both in ascending order, and no shelf is empty.
        self._shelves: dict[int, dict[int, N]] = {}
        self._next = 0

    def add(self, node: N) -> None:
        """Give a new node its serial number."""
        serial = node.serial = self._next
        self._next = serial + 1
        shelf = self._shelves.get(serial >> _SHIFT)
        if shelf is None:
            shelf = self._shelves[serial >> _SHIFT] = {}
        shelf[serial] = node

    def remove(self, node: N) -> None:
        """The node leaves the tree."""
        number = node.serial >> _SHIFT
        shelf = self._shelves[number]
        del shelf[node.serial]
        if not shelf:
            del self._shelves[number]

    def numbers(self, cursor: int) -> list[int]:
        """Numbers of the shelves that hold nodes with serial numbers from ``cursor`` on."""
        every = list(self._shelves)
        return every[bisect_left(every, cursor >> _SHIFT) :]

    def nodes(self, number: int, cursor: int = 0) -> list[N]:
        """The nodes of one shelf from serial number ``cursor`` on; none when the shelf is gone."""
        shelf = self._shelves.get(number, {})
        return [node for serial, node in shelf.items() if serial >= cursor]

    @staticmethod
    def after(number: int) -> int:
        """The first serial number behind a shelf."""
        return number + 1 << _SHIFT

    def __iter__(self) -> Iterator[N]:
        for shelf in self._shelves.values():
            yield from shelf.values()
