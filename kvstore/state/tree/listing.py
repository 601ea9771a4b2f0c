"""The pages of a space in the order they were made, so that they can be listed a stretch at a time.

Nobody may hold the state for as long as a walk over a million nodes takes, and a walk with pauses
must neither miss a page nor show one twice while others come and go. So each page gets a serial
number when it is made, and pages with neighbouring numbers share a **chunk**: a walk goes chunk by
chunk, and the number of the next page is all it has to remember. A page that was there from the
beginning of a walk to its end is shown exactly once. A node of several pages has consecutive
numbers of one chunk, and its pages keep theirs when it is split.
"""

from bisect import bisect_left
from typing import Final, Generic, Protocol, TypeVar

SHELF_NODES: Final = 256
"""Serial numbers that share a chunk: the most pages that one turn of a walk looks at."""
_SHIFT: Final = SHELF_NODES.bit_length() - 1


class Listed(Protocol):
    """A node, as far as it is listed."""

    serial: int
    count: int


N = TypeVar("N", bound=Listed)


class CreationOrder(Generic[N]):
    """All nodes of one space by serial number."""

    def __init__(self) -> None:
        #: chunk number → serial number of its first page → node; chunks are in ascending order,
        #: and none is empty.
        self._chunks: dict[int, dict[int, N]] = {}
        self._next = 0

    def add(self, node: N) -> None:
        """Give the pages of a new node their serial numbers."""
        serial, count = self._next, node.count
        if count > 1 and serial % SHELF_NODES + count > SHELF_NODES:
            serial = self.after(serial >> _SHIFT)
        node.serial = serial
        self._next = serial + count
        chunk = self._chunks.get(serial >> _SHIFT)
        if chunk is None:
            chunk = self._chunks[serial >> _SHIFT] = {}
        chunk[serial] = node

    def divide(self, node: N, head: N) -> None:
        """The first pages of a node are ``head`` now."""
        chunk = self._chunks[node.serial >> _SHIFT]
        head.serial = node.serial
        node.serial += head.count
        chunk[head.serial] = head
        chunk[node.serial] = node

    def remove(self, node: N) -> None:
        """The node leaves the tree."""
        number = node.serial >> _SHIFT
        chunk = self._chunks[number]
        del chunk[node.serial]
        if not chunk:
            del self._chunks[number]

    def numbers(self, cursor: int) -> list[int]:
        """Numbers of the chunks that hold pages with serial numbers from ``cursor`` on."""
        every = list(self._chunks)
        return every[bisect_left(every, cursor >> _SHIFT) :]

    def nodes(self, number: int, cursor: int = 0) -> list[N]:
        """The nodes of one chunk with pages from serial number ``cursor`` on, in order."""
        chunk = self._chunks.get(number, {})
        found = [node for node in chunk.values() if node.serial + node.count > cursor]
        found.sort(key=_serial)
        return found

    @staticmethod
    def after(number: int) -> int:
        """The first serial number behind a chunk."""
        return number + 1 << _SHIFT


def _serial(node: Listed) -> int:
    return node.serial
