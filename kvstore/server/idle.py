"""The node checks its own state while it is idle."""

from time import perf_counter
from typing import Final

from kvstore.node.desk import Desk

PIECE_S: Final = 0.0005
"""A piece ends after the first stretch that ends later. A stretch takes some 100 microseconds, or
as long as one run of pages: of 128 pages in 8 shards some milliseconds with the pure core."""
PAUSE_S: Final = 300.0
"""Time between two rounds, so that an idle node does not work all the time."""


class IdleChecks:
    """Rounds of checks in pieces, at most one piece in each tick of the daemon.

    Args:
        desk: the desk of the node that is checked.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tick = -1
        self._next_s = 0.0

    def turn(self, now_s: float) -> None:
        """Check a piece of the state, unless a request came since the last turn, or waits.

        Raises:
            AssertionError: the state is broken.
        """
        node, before = self._desk.node, self._tick
        self._tick = node.pages.moment.tick
        busy = self._tick != before or node.waiting.count or node.unfinished
        if busy or now_s < self._next_s:
            return
        began = perf_counter()
        while perf_counter() < began + PIECE_S:
            if self._desk.self_check.step():
                self._next_s = now_s + PAUSE_S
                break
        node.pages.meter.note_turn(int((perf_counter() - began) * 1e9), "the self-check")
