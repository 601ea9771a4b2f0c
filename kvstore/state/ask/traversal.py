"""Walks over pages in steps: each looks at a bounded number of nodes and says how to go on.

Listings and an operator's bulk changes consist of such steps, so that no request waits for longer
than one step.
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
"""Nodes that one step of a listing examines."""
DROP_NODES: Final = 16
"""Nodes that one step drops: each costs some 20 microseconds."""
PASS_NODES: Final = 4
"""Passing this many nodes on the way down takes as long as dropping two: pages are split off."""
SIBLINGS_MAX: Final = 50_000
"""With more siblings than this, finding the way back among them would take too long."""
_CHILDREN: Final = 100
"""Minimum children of one node that a pass examines."""


def subtree(
    space: PrefixTree, top: PrefixKey, after: PrefixKey, depth: int, limit: int
) -> Steps[tuple[list[PrefixNode], bool]]:
    """Descendants of a key, every parent before its children.

    Args:
        space: the space.
        top: the first node of the walk; empty = the space's root, which is not listed itself.
        after: the last node of the previous part; empty = start.
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
    """As many children as a part can need."""
    return _single_pages(node, list(islice(node.below, limit + 1)))


def _single_pages(parent: PrefixNode, firsts: list[PrefixKey]) -> Iterator[PrefixNode]:
    """Children as single pages; each is split off, or has left, by the time it is asked for."""
    for key in firsts:
        child = parent.below.get(key)
        if child is not None and is_live(child):
            yield first_page(child)


def _younger(node: PrefixNode, limit: int) -> Iterator[PrefixNode]:
    """The siblings after a node."""
    parent = node.parent
    if parent is None:
        raise _cursor_left()
    if len(parent.below) > SIBLINGS_MAX:
        raise InvalidArgument("cursor", "too many siblings to go on; list /v1/pages instead")
    siblings = list(parent.below.values())
    after = siblings.index(node) + 1
    return _single_pages(parent, [one.first for one in siblings[after : after + limit + 1]])


def _cursor(space: PrefixTree, start: PrefixNode, after: PrefixKey) -> Steps[PrefixNode]:
    """The node that a walk has shown last, if it is a descendant of ``start``."""
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
    """Drops a node and its descendants, leaves first, step by step.

    Pages that an operator pinned stay, with all pages before them, and so do pages that are being
    written. A pass continues where the previous turn ended; passes are repeated until one finds
    nothing to drop. Once a space is empty, records on an SSD of pages that were dropped earlier are
    removed too.

    Args:
        top: the top node; a space's root for all of it.
        cause: the cause, for events and counters.

    Attributes:
        dropped: pages dropped.
        kept: nodes that stay, as far as the current pass has come.
        pinned: those of them that an operator's pin keeps.
    """

    def __init__(self, top: PrefixNode, cause: str) -> None:
        self.dropped = self.kept = self.pinned = 0
        self._top = top
        self._cause = cause
        self._before = 0
        self._stack = [(top, iter(_some_children(top)))]

    def turn(self, table: PageTable, limit: int = DROP_NODES) -> bool:
        """Drop some pages; False if none is left to drop."""
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
            self._before, self.kept, self.pinned = self.dropped, 0, 0
            self._stack = [(self._top, iter(_some_children(self._top)))]
            return True
        top = self._top
        if top is top.space.root and not top.below:
            table.disk.graves.bury_all(top.space)
        return False

    def _take(self, table: PageTable, node: PrefixNode) -> int:
        """Drop a node's pages if allowed; returns how many pages or nodes that was."""
        assert node.count == 1, node
        if node.pins or node.below or not node.digests:
            self.kept += 1
            self.pinned += node.pins > 0
            return 1
        shards = list(node.digests)[:DROP_NODES]
        for shard in shards:
            table.residents.drop(node, shard, self._cause)
        self.dropped += len(shards)
        if is_live(node) and node.digests:
            self._stack.append((node, iter(())))  # the rest of them in their turn
        return len(shards)


def _some_children(node: PrefixNode) -> list[PrefixNode]:
    """As many children as a pass examines: more than may stay, pinned or being written."""
    stay_max = 2 * PINS_MAX + min(len(node.space.writing), SIBLINGS_MAX)
    return list(islice(node.below.values(), _CHILDREN + stay_max))
