"""Pages that are to be written to the SSD log when their turn comes. Pure."""

from collections import deque
from typing import Final

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.disk.graves import Graves
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

BACKLOG_MAX: Final = 65_536
"""Nodes whose pages may wait; the one that waits longest is given up for another."""


class Backlog:
    """Pages by their keys: what was one node when it came may be several nodes later, or gone.

    Attributes:
        pages: that wait.
    """

    def __init__(self) -> None:
        self.pages = 0
        #: Space, shard, and keys of pages that follow each other.
        self._waiting: deque[tuple[PrefixTree, int, bytes]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, node: PrefixNode, shard: int) -> None:
        """The pages of a node are to be written."""
        if len(self._waiting) == BACKLOG_MAX:
            self.pages -= len(self._waiting.popleft()[2]) // KEY_BYTES
        self._waiting.append((node.space, shard, node.keys))
        self.pages += node.count

    def is_held(self, graves: Graves) -> bool:
        """Whether the next pages must wait for the tombstone of one of their keys."""
        return graves.holds_any(*self._waiting[0])

    def take(self, most: int, room_bytes: int) -> tuple[int, PrefixNode | None, int]:
        """Take out the next pages that are one node now.

        Args:
            most: pages.
            room_bytes: what their records should not exceed, if they are more than one.

        Returns:
            how many pages; their node, which they are all of, None when they are gone; the shard.
        """
        space, shard, keys = self._waiting.popleft()
        key = PrefixKey(keys[:KEY_BYTES])
        node, pages = space.index.get(key), 1
        if node is not None:
            position = node.position(key)
            room = max(1, room_bytes // space.shards[shard].record_bytes)
            pages = min(node.matching(position, keys, 0), most, room)
            node = space.exact(node, position, pages)
        self.pages -= pages
        if pages * KEY_BYTES < len(keys):
            self._waiting.appendleft((space, shard, keys[pages * KEY_BYTES :]))
        return pages, node, shard
