"""Pages whose head has left the index: they leave too, the last of each prompt first.

A head can have a hundred thousand pages below it, and nobody waits that long. The head itself is a
miss at once: its node stays as a **hole** (:attr:`PrefixTree.holes`), across which no hit reaches
and which no put fills, until all below it has left, some pages in each turn.
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvstore.state.tree.prefix_tree import PrefixNode


class Orphans(NamedTuple):
    """The pages of one shard below one hole.

    Attributes:
        top: the hole.
        shard: whose pages leave.
        cause: why, as events and counters say it.
        walk: see :func:`tails_first`.
    """

    top: PrefixNode
    shard: int
    cause: str
    walk: Iterator[PrefixNode | None]


def tails_first(top: PrefixNode, shard: int) -> Iterator[PrefixNode | None]:
    """Nodes below ``top`` with a page of ``shard``, every one after all that follow it.

    The page of a node is taken out before the next step; what comes below meanwhile is found too.

    Yields:
        a node, or None for a step that found none.
    """
    bit = 1 << shard
    stack = [(top, _children(top, bit))]
    while stack:
        node, children = stack[-1]
        child = next(children, None)
        if child is not None:
            stack.append((child, _children(child, bit)))
            yield None
            continue
        if any(child.present & bit for child in node.children.values()):
            stack[-1] = node, _children(node, bit)  # what came since
            continue
        stack.pop()
        yield node if node is not top and node.present & bit else None


def _children(node: PrefixNode, bit: int) -> Iterator[PrefixNode]:
    """Those that have the page, as they are now."""
    return iter([child for child in node.children.values() if child.present & bit])
