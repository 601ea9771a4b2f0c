"""The nodes of a space in the order they were made, so that they can be listed a stretch at a time.

Nobody may hold the state for as long as a walk over a million nodes takes, and a walk with pauses
must neither miss a node nor show one twice while others come and go. So each node gets a serial
number when it is made, and nodes with neighbouring numbers share a **chunk**: a walk goes chunk by
chunk, and the number of the next node is all it has to remember. A node that was there from the
beginning of a walk to its end is shown exactly once.
"""

from bisect import bisect_left
from typing import Final, Generic, Protocol, TypeVar

SHELF_NODES: Final = 256
"""Serial numbers that share a chunk: the most nodes that one turn of a walk looks at."""
_SHIFT: Final = SHELF_NODES.bit_length() - 1


class Listed(Protocol):
    """A node, as far as it is listed."""

    serial: int


N = TypeVar("N", bound=Listed)


class CreationOrder(Generic[N]):
    """All nodes of one space by serial number."""

    def __init__(self) -> None:
        #: chunk number → serial number → node; both in ascending order, and no chunk is empty.
        self._chunks: dict[int, dict[int, N]] = {}
        self._next = 0

    def add(self, node: N) -> None:
        """Give a new node its serial number."""
        serial = node.serial = self._next
        self._next = serial + 1
        chunk = self._chunks.get(serial >> _SHIFT)
        if chunk is None:
            chunk = self._chunks[serial >> _SHIFT] = {}
        chunk[serial] = node

    def remove(self, node: N) -> None:
        """The node leaves the tree."""
        number = node.serial >> _SHIFT
        chunk = self._chunks[number]
        del chunk[node.serial]
        if not chunk:
            del self._chunks[number]

    def numbers(self, cursor: int) -> list[int]:
        """Numbers of the chunks that hold nodes with serial numbers from ``cursor`` on."""
        every = list(self._chunks)
        return every[bisect_left(every, cursor >> _SHIFT) :]

    def nodes(self, number: int, cursor: int = 0) -> list[N]:
        """The nodes of one chunk from serial number ``cursor`` on; none when the chunk is gone."""
        chunk = self._chunks.get(number, {})
        return [node for serial, node in chunk.items() if serial >= cursor]

    @staticmethod
    def after(number: int) -> int:
        """The first serial number behind a chunk."""
        return number + 1 << _SHIFT
