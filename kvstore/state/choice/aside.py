"""Leaves that a choice meets and does not take: young ones, and those continued since. Pure."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from kvstore.state.tree.node import PrefixNode

BELOW_LOOKS: Final = 64
"""Maximum leaves that were continued behind which a choice looks for others, pages between each of
them and its leaf, and children of each of these."""


class Passed:
    """Leaves of one queue within their grace, set aside until one of them is no longer young.

    Attributes:
        leaves: some may have left their tree.
        until_ns: when the first of them is no longer young.
    """

    __slots__ = ("leaves", "until_ns")

    def __init__(self) -> None:
        self.leaves: dict[PrefixNode, None] = {}
        self.until_ns = 0


def leaves_behind(continued: Iterable[PrefixNode]) -> list[PrefixNode]:
    """For each node a page in memory behind it that none in memory continues, if one is near."""
    found = [_leaf_behind(node) for node in continued]
    return [leaf for leaf in found if leaf is not None]


def _leaf_behind(node: PrefixNode) -> PrefixNode | None:
    for _ in range(BELOW_LOOKS):
        if not node.children_in_memory:
            return node
        for child in islice(node.below.values(), BELOW_LOOKS):
            if child.in_memory:
                node = child
                break
    return None
