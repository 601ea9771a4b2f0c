"""The children of a page, as single pages; and the depths of all below. Pure."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvstore.protocol.page import PrefixKey

if TYPE_CHECKING:
    from kvstore.state.tree.node import PrefixNode


class Children:
    """The pages that continue a page; each becomes a node of its own when it is accessed.

    Args:
        node: its last page is the parent.
    """

    __slots__ = ("_node",)

    def __init__(self, node: "PrefixNode") -> None:
        self._node = node

    def __len__(self) -> int:
        return len(self._node.below)

    def __iter__(self) -> Iterator[PrefixKey]:
        return iter(self._node.below)

    def __contains__(self, key: object) -> bool:
        return key in self._node.below

    def values(self, most: int = sys.maxsize) -> "list[PrefixNode]":
        """The first ``most`` children."""
        found: list[PrefixNode] = []
        for node in self._node.below.values():
            if len(found) >= most:
                break
            found.append(node)
        return [first_page(node) for node in found]


def first_page(node: "PrefixNode") -> "PrefixNode":
    """The first page of a node, split off as a node of its own."""
    return node.split(1) if node.count > 1 else node


def deepen_some(moved: "dict[PrefixNode, Iterator[PrefixKey]]", most: int) -> None:
    """Correct the depths of up to ``most`` nodes below those that were moved.

    Until then those below are not as deep as they should be, each at least by as much as the node
    above it.

    Args:
        moved: node → the first keys of those of its children that have not been looked at, whose
            depth may not follow from its own. Of all other nodes it does, for all their children.
        most: nodes to look at.
    """
    while moved and most > 0:
        node, keys = moved.popitem()
        for key in keys:
            child, most = node.below.get(key), most - 1
            assert child is None or child.above is node, node
            if child is not None and child.depth != node.depth + child.count:
                child.depth = node.depth + child.count
                if child.below:
                    moved[child] = iter(list(child.below))
            if most <= 0:
                moved[node] = keys
                break


def deepen(node: "PrefixNode") -> None:
    """Correct the depths below a node that was moved."""
    moved = [node]
    for at in moved:
        assert at.above is not None, node
        at.depth = at.above.depth + at.count
        moved.extend(at.below.values())


def is_above(node: "PrefixNode", other: "PrefixNode") -> bool:
    """Whether ``node`` is ``other`` or its ancestor (forged parents could form a cycle).

    This walks up from ``other`` and, at the same time, through all below ``node``: one of them
    is nearly always short.
    """
    at: PrefixNode | None = other
    below: list[Iterator[PrefixNode]] = [iter([node])]
    while at is not None and below:
        if at is node:
            return True
        at = at.above
        child = next(below[-1], None)
        if child is None:
            below.pop()
        elif child is other:
            return True
        else:
            below.append(iter(child.below.values()))
    return False
