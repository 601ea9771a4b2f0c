"""Tells of the pages that a start found on disk, a few at a time. Pure.

Nobody waits for it: an index that does not know of a page yet only misses it.
"""

from collections import deque
from typing import Final

from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import TierStored

SHELVES: Final = 2
"""Shelves of one step: about 500 pages, two or three milliseconds."""


class Announcement:
    """The pages on disk in one page table, in the order they were found: heads mostly first.

    Args:
        table: whose pages; nothing of it has been told yet.
    """

    def __init__(self, table: PageTable) -> None:
        self._waiting = deque(
            (space, number) for space in table.spaces for number in space.by_creation.numbers(0)
        )

    @property
    def done(self) -> bool:
        """Whether all has been told."""
        return not self._waiting

    def step(self, table: PageTable) -> None:
        """Tell of some pages that are on disk now; one that left meanwhile is not told of."""
        for _ in range(min(SHELVES, len(self._waiting))):
            space, number = self._waiting.popleft()
            nodes = space.by_creation.nodes(number)
            for shard in range(len(space.shards)):
                for node in nodes:
                    if shard in node.disk:
                        table.emit(TierStored, node, shard, "ssd")
