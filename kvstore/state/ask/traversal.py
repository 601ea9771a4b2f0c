"""Walks over pages in steps: each looks at a bounded number of nodes and says how to go on.

They are what listings and an operator's bulk changes are made of: nobody else waits for longer
than a step.
"""

from collections.abc import Generator, Iterator
from itertools import islice
from typing import Final, TypeVar

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.quotas import PINS_MAX
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.children import first_page
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Work in short steps; between two of them anything may happen to the pages."""

STEP_NODES: Final = 64
"""Nodes that one step of a listing looks at."""
DROP_NODES: Final = 16
"""Nodes that one step takes out: each costs some 20 microseconds."""
PASS_NODES: Final = 20
"""Nodes passed on the way down take as long as one that is taken out."""
SIBLINGS_MAX: Final = 50_000
"""Finding one's way back among more children than this would hold the state for too long."""
_CHILDREN: Final = 100
"""Children of one node that a pass takes at least."""


def subtree(
    space: PrefixTree, top: PrefixKey, after: PrefixKey, depth: int, limit: int
) -> Steps[tuple[list[PrefixNode], bool]]:
    """Nodes below a key, every parent before its children.

    Args:
        space: where.
        top: the first node of the walk; empty = the space's root, which itself is not listed.
        after: the last node of the stretch before; empty = begin.
        depth: levels below ``top`` to list.
        limit: nodes to return, 1 or more.

    Returns:
        the nodes, and whether there are more.

    Raises:
        InvalidArgument: a key is not (or no longer) in the tree, or it has too many siblings.
    """
    start = space.nodes.get(top) if top else space.root
    if start is None:
        raise InvalidArgument("key", f"{top.hex()} is not in this space")
    found: list[PrefixNode] = []
    above: PrefixNode | None = None
    if after:
        above = yield from _cursor(space, start, after)
    elif start is not space.root:
        found.append(start)
    first = above or start
    stack = [_children(first, limit)] if first.depth - start.depth < depth else []
    looked = 0
    while len(found) <= limit:
        if not stack:
            if above is None or above is start:
                break
            stack.append(_younger(above, limit))
            above = above.parent
        child = next(stack[-1], None)
        looked += 1
        if looked % STEP_NODES == 0:
            yield
        if child is None:
            stack.pop()
        elif is_live(child):
            found.append(child)
            if child.depth - start.depth < depth:
                stack.append(_children(child, limit))
    return found[:limit], len(found) > limit


def _children(node: PrefixNode, limit: int) -> Iterator[PrefixNode]:
    """As many children as a stretch can need; nobody minds when some leave meanwhile."""
    return iter(node.children.values(limit + 1))


def _younger(node: PrefixNode, limit: int) -> Iterator[PrefixNode]:
    """The siblings that come after a node."""
    parent = node.parent
    if parent is None:
        raise _cursor_left()
    if len(parent.below) > SIBLINGS_MAX:
        raise InvalidArgument("cursor", "too many siblings to go on; list /v1/pages instead")
    siblings = list(parent.below.values())
    after = siblings.index(node) + 1
    return iter([first_page(one) for one in siblings[after : after + limit + 1]])


def _cursor(space: PrefixTree, start: PrefixNode, after: PrefixKey) -> Steps[PrefixNode]:
    """The node that a walk has shown last, if it stands below ``start``."""
    last = space.nodes.get(after)
    if last is None:
        raise _cursor_left()
    at, looked = last, 0
    while at is not start:
        if at.parent is None:
            if at is space.root:
                raise InvalidArgument("cursor", "it points to a page outside this listing")
            raise _cursor_left()
        at = at.parent
        looked += 1
        if looked % (STEP_NODES * 10) == 0:
            yield
    return last


def _cursor_left() -> InvalidArgument:
    return InvalidArgument("cursor", "the page it stands at has left; begin the listing again")


class Removal:
    """Takes what lies at and below a node out of the index, leaves first, step by step.

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

    def __init__(self, top: PrefixNode, cause: str) -> None:
        self.dropped = self.kept = 0
        self._top = top
        self._cause = cause
        self._before = 0
        self._stack = [(top, iter(_some_children(top)))]

    def turn(self, table: PageTable, limit: int = DROP_NODES) -> bool:
        """Take some pages out; False when nothing is left that may go."""
        looked = passed = 0
        while self._stack and looked < limit and passed < limit * PASS_NODES:
            node, children = self._stack[-1]
            child = next(children, None)
            passed += 1
            if child is not None:
                if is_live(child):
                    child = first_page(child)
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
        if top is top.space.root and not top.below:
            table.disk.graves.bury_all(top.space)
        return False

    def _take(self, table: PageTable, node: PrefixNode) -> int:
        """Take a node's pages out if they may go; how many pages or nodes that was."""
        if node.pins or node.below or not node.digests:
            self.kept += 1
            return 1
        shards = list(node.digests)[:DROP_NODES]
        for shard in shards:
            table.residents.drop(node, shard, self._cause)
        self.dropped += len(shards)
        if is_live(node) and node.digests:
            self._stack.append((node, iter(())))  # the rest of them in their turn
        return len(shards)


def _some_children(node: PrefixNode) -> list[PrefixNode]:
    """As many nodes below as a pass looks at: more than may stay, pinned or being written."""
    stay_max = 2 * PINS_MAX + min(len(node.space.writing), SIBLINGS_MAX)
    return list(islice(node.below.values(), _CHILDREN + stay_max))
