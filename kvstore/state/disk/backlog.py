"""Pages that wait to be written to the SSD log. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.disk.graves import Graves
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

BACKLOG_MAX: Final = 65_536
"""Maximum nodes whose pages may wait; beyond that, the oldest one is removed for a new one."""
PART_PAGES: Final = 128
"""When a long prompt is put back, each entry has about so many of its pages: whole runs."""


class Backlog:
    """Waiting pages by their keys: a node may have been split or dropped since it was added.

    Attributes:
        pages: number of waiting pages.
    """

    def __init__(self) -> None:
        self.pages = 0
        #: Space, shard, keys of pages that follow each other; and the number of the prompt that was
        #: put back with them, 0 = none was.
        self._waiting: deque[tuple[PrefixTree, int, bytes, int]] = deque()
        self._prompts = 0
        #: That of the pages that were taken last.
        self._prompt = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, node: PrefixNode, shard: int) -> None:
        """Add the pages of a node."""
        if len(self._waiting) == BACKLOG_MAX:
            self.pages -= len(self._waiting.popleft()[2]) // KEY_BYTES
        self._waiting.append((node.space, shard, node.keys, 0))
        self.pages += node.count
        assert len(self._waiting) <= BACKLOG_MAX, node

    def put_back(self, nodes: Iterable[PrefixNode], shard: int) -> None:
        """Add pages as the next ones: a node that was just taken, and those before it.

        Args:
            nodes: each of which continues the one behind it.
            shard: of them.
        """
        if not self._prompt:
            self._prompts += 1
            self._prompt = self._prompts
        parts: list[bytes] = []
        size = 0
        for node in nodes:
            parts.append(node.keys)
            size += node.count
            if size >= PART_PAGES:
                self._add_first(node.space, shard, parts)
                parts, size = [], 0
        if parts:
            self._add_first(node.space, shard, parts)

    def _add_first(self, space: PrefixTree, shard: int, parts: list[bytes]) -> None:
        """Add pages, the last ones first; if there is no place, the newest ones do not wait."""
        if len(self._waiting) == BACKLOG_MAX:
            self.pages -= len(self._waiting.pop()[2]) // KEY_BYTES
        keys = b"".join(reversed(parts))
        assert keys, "nobody would take an empty entry out"
        assert self._prompt > 0, "it would not be given up as a whole"
        self._waiting.appendleft((space, shard, keys, self._prompt))
        self.pages += len(keys) // KEY_BYTES
        assert len(self._waiting) <= BACKLOG_MAX

    def give_up_rest(self) -> None:
        """Of a prompt that was put back, pages that were just taken cannot be written now.

        So what follows them cannot, either, and to find that out is to walk all of it.
        """
        while self._prompt and self._waiting and self._waiting[0][3] == self._prompt:
            self.pages -= len(self._waiting.popleft()[2]) // KEY_BYTES
        assert (self.pages > 0) == bool(self._waiting)

    def add_stored(self, node: PrefixNode, keys: Sequence[PrefixKey], shard: int) -> None:
        """Add pages that were stored as one node, which keeps the last of them.

        What precedes a page is written with it, except in a KV group with a window.
        """
        found, left = [node], len(keys) - node.count
        while left > 0 and node.space.shards[shard].window_pages:
            above = found[-1].above
            assert above is not None, node
            found.append(above)
            left -= above.count
        for one in reversed(found):
            assert one.ready >> shard & 1, one
            self.add(one, shard)

    def is_held(self, graves: Graves) -> bool:
        """Whether the next pages must wait for the tombstone of one of their keys."""
        return graves.holds_any(*self._waiting[0][:3])

    def take(self, most: int, room_bytes: int) -> tuple[int, PrefixNode | None, int]:
        """Remove the next pages that are one node now.

        Args:
            most: maximum pages.
            room_bytes: maximum size of their records, if they are more than one.

        Returns:
            how many pages; their node, which has exactly these, or None if they were dropped; the
            shard.
        """
        space, shard, keys, self._prompt = self._waiting.popleft()
        key = PrefixKey(keys[:KEY_BYTES])
        node, pages = space.index.get(key), 1
        if node is not None:
            position = node.position(key)
            room = max(1, room_bytes // space.shards[shard].record_bytes)
            pages = min(node.matching(position, keys, 0), most, room)
            node = space.exact(node, position, pages)
        self.pages -= pages
        if pages * KEY_BYTES < len(keys):
            self._waiting.appendleft((space, shard, keys[pages * KEY_BYTES :], self._prompt))
        assert (self.pages > 0) == bool(self._waiting)
        return pages, node, shard
