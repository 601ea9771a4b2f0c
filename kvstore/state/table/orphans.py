"""Descendants of dropped pages: they are dropped too, the last page of each prompt first.

A page can have a hundred thousand descendants, too many for one turn. The page itself is a miss at
once: its node stays as a **hole** (:attr:`PrefixTree.holes`), which no hit crosses and no put
fills, until all its descendants have been dropped, some in each turn.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.state.tree.children import first_page
from kvstore.state.tree.node import PrefixNode


class Orphans(NamedTuple):
    """The pages of one shard below one hole.

    Attributes:
        top: the hole.
        shard: the shard whose pages are dropped.
        cause: the cause, for events and counters.
        walk: see :func:`tails_first`.
    """

    top: PrefixNode
    shard: int
    cause: str
    walk: Iterator[PrefixNode | None]


def tails_first(top: PrefixNode, shard: int) -> Iterator[PrefixNode | None]:
    """Nodes below ``top`` with a page of ``shard``, each after all its descendants.

    The caller drops the page of a node before the next step; pages that are added below meanwhile
    are found too.

    Yields:
        a node, or None for a step that found none.
    """
    bit = 1 << shard
    stack = [(top, _children(top, bit))]
    while stack:
        node, children = stack[-1]
        child = next(children, None)
        if child is not None:
            child = first_page(child)
            stack.append((child, _children(child, bit)))
            yield None
            continue
        if any(child.present & bit for child in node.below.values()):
            stack[-1] = node, _children(node, bit)  # what came since
            continue
        stack.pop()
        yield node if node is not top and node.present & bit else None


def _children(node: PrefixNode, bit: int) -> Iterator[PrefixNode]:
    """The child nodes that have the page, of those that are there now: the copy is fast."""
    return (child for child in list(node.below.values()) if child.present & bit)


def subtree(*tops: PrefixNode, most: int = sys.maxsize) -> list[PrefixNode]:
    """The nodes and all their descendants, each once; below each of them, parents before children.

    For one node, the walk stops when there are more than ``most``.

    If some of the nodes are descendants of others, each node is visited only once: walking below
    each page of a long prompt would take time that grows with the square of its length.
    """
    if len(tops) == 1:
        found = list(tops)
        for at in found:
            found.extend(at.children.values(most))
            if len(found) > most:
                break
        return found
    seen: dict[PrefixNode, None] = {}
    for top in tops:
        left = [top]
        while left:
            at = left.pop()
            if at not in seen:
                seen[at] = None
                left.extend(at.children.values())
    return list(seen)
