"""Walks over pages in turns: every call looks at a bounded number of nodes, and says how to go on.

They are what listings and an operator's bulk changes are made of: nobody else waits for longer
than one turn.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Final

from kvstore.errors import InvalidArgument
from kvstore.page import PrefixKey
from kvstore.state.pages import PageTable
from kvstore.state.pins import PINS_MAX
from kvstore.state.tree import Node, Space, is_live

TURN_NODES: Final = 250
"""Nodes that one turn of a listing shows: about a millisecond."""
DROP_NODES: Final = 100
"""Nodes that one turn takes out: about two milliseconds."""
SIBLINGS_MAX: Final = 50_000
"""Finding one's way back among more children than this would hold the state for too long."""


def subtree(
    space: Space, top: PrefixKey, after: PrefixKey, depth: int, limit: int
) -> tuple[list[Node], bool]:
    """Nodes below a key, every parent before its children.

    Args:
        space: where.
        top: the first node of the walk; empty = the space's root, which itself is not listed.
        after: the last node of the stretch before; empty = begin.
        depth: levels below ``top`` to list.
        limit: nodes to return, 1..:data:`TURN_NODES`.

    Returns:
        the nodes, and whether there are more.

    Raises:
        InvalidArgument: a key is not (or no longer) in the tree, or it has too many siblings.
    """
    start = space.nodes.get(top) if top else space.root
    if start is None:
        raise InvalidArgument("key", f"{top.hex()} is not in this space")
    found: list[Node] = []
    if after:
        stack = _resume(space, start, after, depth)
    else:
        found = [start] if start is not space.root else []
        stack = [iter(start.children.values())] if depth else []
    limit = min(limit, TURN_NODES)
    while stack and len(found) <= limit:
        child = next(stack[-1], None)
        if child is None:
            stack.pop()
            continue
        found.append(child)
        if len(stack) < depth:
            stack.append(iter(child.children.values()))
    return found[:limit], len(found) > limit


def _resume(space: Space, start: Node, after: PrefixKey, depth: int) -> list[Iterator[Node]]:
    """Where a walk that has shown ``after`` goes on: what is left of each level above it."""
    last = space.nodes.get(after)
    if last is None:
        raise InvalidArgument("cursor", "the page it stands at has left; begin the listing again")
    path = [last]
    while path[-1] is not start:
        parent = path[-1].parent
        if parent is None:
            raise InvalidArgument("cursor", "it stands at a page outside of this listing")
        path.append(parent)
    path.reverse()
    stack: list[Iterator[Node]] = []
    for parent, child in pairwise(path):
        if len(parent.children) > SIBLINGS_MAX:
            raise InvalidArgument("cursor", "too many siblings to go on; list /v1/pages instead")
        rest = iter(parent.children.values())
        for sibling in rest:
            if sibling is child:
                break
        stack.append(rest)
    if len(stack) < depth:
        stack.append(iter(last.children.values()))
    return stack


class Removal:
    """Takes what lies at and below a node out of the index, leaves first, turn by turn.

    Pages that an operator pinned stay, with all before them, and so do pages that are being
    written. A pass goes on where the turn before it ended, however much stays; passes follow each
    other until one finds nothing to take. Once a space is empty all of it is gone for good, also
    what an SSD may hold of pages that had left the index before.

    Args:
        top: where to begin; a space's root for all of it.
        cause: why, as events and counters say it.

    Attributes:
        dropped: pages taken out.
        kept: nodes that stay, as far as the present pass has come.
    """

    def __init__(self, top: Node, cause: str) -> None:
        """Take nothing out yet."""
        self.dropped = self.kept = 0
        self._top = top
        self._cause = cause
        self._before = 0
        self._stack = [(top, iter(_some_children(top)))]

    def turn(self, table: PageTable, limit: int = DROP_NODES) -> bool:
        """Take some pages out; False when nothing is left that may go."""
        looked = 0
        while self._stack and looked < limit:
            node, children = self._stack[-1]
            child = next(children, None)
            if child is not None:
                if is_live(child):
                    self._stack.append((child, iter(_some_children(child))))
                continue
            self._stack.pop()
            if node is not node.space.root and is_live(node):
                looked += self._take(table, node)
        if self._stack:
            return True
        if self.dropped > self._before:
            self._before, self.kept = self.dropped, 0
            self._stack = [(self._top, iter(_some_children(self._top)))]
            return True
        top = self._top
        if top is top.space.root and not top.children and table.disk is not None:
            table.disk.graves.bury_all(top.space)
        return False

    def _take(self, table: PageTable, node: Node) -> int:
        """Take a node's pages out if they may go; how many pages or nodes that was."""
        if node.pins or node.children or not node.digests:
            self.kept += 1
            return 1
        shards = list(node.digests)
        for shard in shards:
            table.drop(node, shard, self._cause)
        self.dropped += len(shards)
        return len(shards)


def _some_children(node: Node) -> list[Node]:
    """As many children as a pass looks at: more than may stay, pinned or being written."""
    stay_max = 2 * PINS_MAX + min(len(node.space.writing), SIBLINGS_MAX)
    return list(islice(node.children.values(), DROP_NODES + stay_max))
