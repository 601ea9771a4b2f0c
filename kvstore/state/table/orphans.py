"""Descendants of dropped pages: they are dropped too, the last page of each prompt first.

A page can have a hundred thousand descendants, too many for one turn. The page itself is a miss at
once: its node stays as a **hole** (:attr:`PrefixTree.holes`), which no hit crosses and no put
fills, until all its descendants have been dropped, some in each turn. Of a run that is dropped, the
first page is the hole.

A page whose record is given up can have as many descendants on disk. Its record leaves last: until
then the page is **departing** (:attr:`PrefixTree.departing`), and what is on disk can be reached.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from kvstore.state.tree.children import first_page
from kvstore.state.tree.node import PrefixNode


class Orphans(NamedTuple):
    """The pages of one shard below one hole, or the records of a departing page and of those below.

    Attributes:
        top: the hole, or the departing page.
        shard: the shard whose pages are dropped.
        cause: the cause, for events and counters.
        walk: see :func:`tails_first`, or :func:`records_tails_first`.
        records: only records are given up; pages in memory stay there.
    """

    top: PrefixNode
    shard: int
    cause: str
    walk: Iterator[PrefixNode | None]
    records: bool = False


def leave_hole(node: PrefixNode, shard: int, cause: str) -> Orphans:
    """Make the first page of a node a hole; the caller drops the pages of the node.

    A hole is one page, so that a lookup finds it by its depth, and no split leaves a part of it
    behind. The node's other pages cannot be put before the hole is filled: they have no parent.
    """
    assert not node.space.shards[shard].window_pages, ("what follows it can be reached", node)
    top = first_page(node)
    holes = top.space.holes
    assert top.count == 1, top
    holes[top] = holes.get(top, 0) | 1 << shard
    return Orphans(top, shard, cause, tails_first(node, shard))


def depart(top: PrefixNode, shard: int, cause: str) -> Orphans:
    """Make a page departing."""
    assert top.count == 1, ("part of it could be split off, and stay", top)
    departing = top.space.departing
    departing[top] = departing.get(top, 0) | 1 << shard
    return Orphans(top, shard, cause, records_tails_first(top, shard), records=True)


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


def records_tails_first(top: PrefixNode, shard: int) -> Iterator[PrefixNode | None]:
    """``top`` and all nodes below it that are on disk, each after all its descendants there.

    The caller gives up the records of a node before the next step; records that are added below
    meanwhile are found too.

    Yields:
        a node, or None for a step that found none.
    """
    bit = 1 << shard
    stack = [(top, _records_below(top, bit))]
    while stack:
        node, children = stack[-1]
        child = next(children, None)
        if child is not None:
            stack.append((child, _records_below(child, bit)))
            yield None
            continue
        if any(child.on_disk & bit for child in node.below.values()):
            stack[-1] = node, _records_below(node, bit)  # written or split off since
            continue
        stack.pop()
        yield node if node.on_disk & bit else None


def _records_below(node: PrefixNode, bit: int) -> Iterator[PrefixNode]:
    """The child nodes that are on disk, as of now."""
    return iter([child for child in node.below.values() if child.on_disk & bit])


def few_records(top: PrefixNode, shard: int, most: int) -> list[PrefixNode] | None:
    """A node and its descendants that are on disk, parents before children.

    None if they may be more than ``most`` pages below it, or one of them is departing.
    """
    bit, looked, found = 1 << shard, 0, [top]
    departing = top.space.departing
    for node in found:
        for child in node.below.values():
            on_disk = bool(child.on_disk & bit)
            looked += child.count if on_disk else 1
            if looked > most or departing.get(child, 0) & bit:
                return None
            if on_disk:
                found.append(child)
    return found


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
