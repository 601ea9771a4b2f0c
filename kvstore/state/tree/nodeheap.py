"""Queues of tree nodes; nodes that are no longer in their tree are skipped. Pure.

A node that leaves its tree is not removed from the queues it is in. So that these entries do not
accumulate, a queue that has doubled since the last time is scanned, and dead entries are dropped: a
few with each new entry, so that no call takes long.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Final

from kvstore.state.tree.node import is_live

Entry = tuple[Any, ...]
"""Ends with its node, or a lease of one; the items before that are unique."""

MOVES_MAX: Final = 8
"""Entries that are examined again with each new one."""
SPARE: Final = 64
"""A shorter queue is not scanned."""
_NONE: Final[list[Entry]] = []
"""Returned by nearly every call; never changed."""


def _is_live(entry: Entry) -> bool:
    return is_live(entry[-1])


class NodeHeap:
    """A heap of entries.

    Args:
        stays: whether an entry is still needed; called once per scan.
    """

    __slots__ = ("_former", "_heap", "_kept", "_stays")

    def __init__(self, stays: Callable[[Entry], bool] = _is_live) -> None:
        self._heap: list[Entry] = []
        #: A former ``_heap``, a heap too, from which what stays moves over.
        self._former: list[Entry] = []
        self._kept = 0
        self._stays = stays

    def __len__(self) -> int:
        return len(self._heap) + len(self._former)

    def __bool__(self) -> bool:  # mypyc does not ask __len__ when it may be None
        return bool(self._heap or self._former)

    def push(self, entry: Entry) -> list[Entry]:
        """Add an entry; returns entries that are no longer needed, which it removed."""
        heappush(self._heap, entry)
        if not self._former:
            if len(self._heap) <= 2 * self._kept + SPARE:
                return _NONE
            self._former, self._heap = self._heap, []
        removed: list[Entry] = []
        # The last entry of a heap may go without harm to the others' order.
        for _ in range(min(MOVES_MAX, len(self._former))):
            moved = self._former.pop()
            if self._stays(moved):
                heappush(self._heap, moved)
            else:
                removed.append(moved)
        if not self._former:
            self._kept = len(self._heap)
        return removed

    def first(self) -> Entry:
        """The smallest entry; the heap is not empty."""
        return self._smaller()[0]

    def pop(self) -> Entry:
        """Remove and return the smallest entry; the heap is not empty."""
        return heappop(self._smaller())

    def discard(self, most: int) -> None:
        """Remove up to twice ``most`` entries, any of them: nobody needs the heap any more."""
        del self._heap[-most:]
        del self._former[-most:]

    def _smaller(self) -> list[Entry]:
        heap, former = self._heap, self._former
        return former if former and (not heap or former[0] < heap[0]) else heap


class NodeLine:
    """A FIFO queue of entries, to whose front entries can be returned."""

    __slots__ = ("_former", "_kept", "_line", "_newer")

    def __init__(self) -> None:
        self._line: deque[Entry] = deque()
        #: While the line is gone through: what of it was not looked at yet, and what came since.
        self._former: deque[Entry] = deque()
        self._newer: deque[Entry] = deque()
        self._kept = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._former) + len(self._newer)

    def append(self, entry: Entry) -> None:
        """Add an entry at the end."""
        if self._former or self._newer:
            self._newer.append(entry)
        else:
            self._line.append(entry)
            if len(self._line) <= 2 * self._kept + SPARE:
                return
            self._former, self._line = self._line, deque()
        for _ in range(MOVES_MAX):
            if not self._former:
                self._former, self._newer = self._newer, self._former
            if not self._former:
                self._kept = len(self._line)
                return
            moved = self._former.popleft()
            if _is_live(moved):
                self._line.append(moved)

    def appendleft(self, entry: Entry) -> None:
        """Add an entry at the front."""
        self._line.appendleft(entry)

    def first(self) -> Entry:
        """The first entry; the queue is not empty."""
        return (self._line or self._former or self._newer)[0]

    def popleft(self) -> Entry:
        """Remove and return the first entry; the queue is not empty."""
        return (self._line or self._former or self._newer).popleft()
