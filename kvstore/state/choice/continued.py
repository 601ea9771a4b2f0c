"""Leaves behind nodes that were continued since they were offered as leaves. Pure."""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from kvstore.state.tree.node import PrefixNode

BELOW_LOOKS: Final = 64
"""Maximum leaves that were continued behind which a choice looks for others, pages between each of
them and its leaf, and children of each of these."""


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
