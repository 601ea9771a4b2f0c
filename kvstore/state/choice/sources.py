"""Which nodes supplied pages, and which of them probably still have them. Pure."""

from itertools import count
from typing import Final

SOURCES_MAX: Final = 64
"""Maximum remembered nodes; beyond that, those without a session are forgotten first."""


class Sources:
    """The boots of other nodes, by the numbers that pages read from them carry.

    Attributes:
        reachable: numbers of the boots with which this node has a session.
    """

    def __init__(self) -> None:
        self.reachable: set[int] = set()
        #: Node → its last boot, and the number of that.
        self._known: dict[str, tuple[bytes, int]] = {}
        self._numbers = count(1)

    def of(self, node: str) -> int:
        """The number for pages that are read from a node now; 0 = it has no session."""
        number = self._known.get(node, (b"", 0))[1]
        return number if number in self.reachable else 0

    def changed(self, node: str, boot: bytes) -> None:
        """The session with a node is up; ``boot`` empty: it is down."""
        known, number = self._known.get(node, (b"", 0))
        if boot and boot == known:  # only the session was lost: it has its pages still
            self.reachable.add(number)
            return
        self.reachable.discard(number)
        if boot:
            self._make_room(node)
            number = next(self._numbers)
            self._known[node] = boot, number
            self.reachable.add(number)

    def _make_room(self, node: str) -> None:
        for other, (_, number) in list(self._known.items()):
            if len(self._known) < SOURCES_MAX:
                return
            if number not in self.reachable and other != node:
                del self._known[other]
