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


def drop_below(table: PageTable, top: Node, cause: str, limit: int = DROP_NODES) -> tuple[int, int]:
    """Take a part of what lies at and below ``top`` out of the index, leaves first.

    Pages that an operator pinned stay, with all before them, and so do pages that are being
    written. Call it until nothing was dropped: once a space is empty all of it is gone for good,
    also what an SSD may hold of pages that had left the index before.

    Returns:
        (dropped, kept): pages taken out, and nodes met that stay.
    """
    dropped = kept = 0
    stack = [(top, iter(_some_children(top, limit)))]
    while stack and dropped + kept < limit:
        node, children = stack[-1]
        child = next(children, None)
        if child is not None:
            stack.append((child, iter(_some_children(child, limit))))
            continue
        stack.pop()
        if node is node.space.root or not is_live(node):
            continue
        if node.pins or node.children or not node.digests:
            kept += 1
            continue
        for shard in list(node.digests):
            table.drop(node, shard, cause)
            dropped += 1
    if top is top.space.root and not top.children and not dropped and table.disk is not None:
        table.disk.graves.bury_all(top.space)
    return dropped, kept


def _some_children(node: Node, limit: int) -> list[Node]:
    """As many children as a turn may drop, and as may be pinned or written."""
    return list(islice(node.children.values(), limit + 2 * PINS_MAX))
