"""Pages as models see them, one by one: (space, path of letters, shard).

Nothing here asks for a page in a way that makes the table split its run, as ``PrefixTree.nodes``
does.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import product

from kvstore.protocol.page import PrefixKey, ShardSpec
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot
from tests.state.world import FULL, FULL_2, WINDOW, key

Page = tuple[int, str, int]
"""Space, path, shard."""
SHARDS: tuple[ShardSpec, ...] = (FULL, FULL_2, WINDOW)
WINDOW_SHARD, WINDOW_PAGES = 2, WINDOW.window_pages
DEPTH = 9
PATH_OF: dict[PrefixKey, str] = {
    key(path): path
    for length in range(DEPTH + 1)
    for path in map("".join, product("ab", repeat=length))
}
"""The path of each key, of all paths of the letters a and b up to that length."""


def slot_of(space: PrefixTree, path: str, shard: int) -> Slot | None:
    """Where a page is in memory; None when it is not."""
    node = space.index.get(key(path))
    if node is None or not node.memory >> shard & 1:
        return None
    return node.slots_of(shard)[node.position(key(path))]


def pages_in(spaces: Iterable[PrefixTree], shards_of: Callable[[PrefixNode], int]) -> set[Page]:
    """The pages of all runs whose shard's bit is set in a mask of the run."""
    return {
        (space.number, PATH_OF[name], shard)
        for space in spaces
        for node in set(space.index.values())
        for name in node.key_list()
        for shard in range(len(space.shards))
        if shards_of(node) >> shard & 1
    }


def longest(have: Collection[Page], space: int, path: str, shards: Sequence[int]) -> int:
    """Pages of the longest prefix of which ``have`` has all that these shards need."""
    for count in range(len(path), 0, -1):
        if all(
            (space, path[:end], shard) in have
            for shard in shards
            for end in range(1, count + 1)
            if shard != WINDOW_SHARD or end > count - WINDOW_PAGES
        ):
            return count
    return 0
