"""Leaves that a choice meets and does not take: young, continued, or dropped ones. Pure."""

from collections.abc import Iterable, Mapping
from typing import Final

from kvstore.state.choice.policy import EvictionPolicy
from kvstore.state.tree.node import PrefixNode

BELOW_LOOKS: Final = 64
"""Maximum leaves that were continued behind which a choice looks for others, pages between each of
them and its leaf, and children of these that are not in memory."""
PATIENCE = 64
"""Sweeps of a queue for which a choice finds nothing rather than a leaf of another queue, which may
be hotter: some 0.1 s."""


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

    def add(self, leaf: PrefixNode, grace_ns: int) -> None:
        """Set a leaf aside, until so long after it was stored."""
        ends_ns = leaf.stored_ns + grace_ns
        self.until_ns = min(self.until_ns, ends_ns) if self.leaves else ends_ns
        self.leaves[leaf] = None

    def take(self, leaves: Iterable[PrefixNode], grace_ns: int) -> list[PrefixNode]:
        """Take those of some leaves that were set aside, out of them."""
        taken = [leaf for leaf in leaves if leaf in self.leaves]
        for leaf in taken:
            self.leaves.pop(leaf, None)
        if self.leaves:
            self.until_ns = min([leaf.stored_ns for leaf in self.leaves]) + grace_ns
        return taken


class QueuesBehind:
    """Queues where a choice has stopped at entries of dropped or pinned leaves, until a sweep."""

    def __init__(self) -> None:
        #: How often each was swept.
        self._sweeps: dict[tuple[str, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._sweeps)

    def add(self, queue: tuple[str, int]) -> None:
        """A choice has stopped there."""
        self._sweeps.setdefault(queue, 0)

    def has_any(self, queues: Iterable[tuple[str, int]]) -> bool:
        """Whether one of these queues is behind."""
        return any(queue in self._sweeps for queue in queues)

    def hold_up(self, queues: Iterable[tuple[str, int]]) -> bool:
        """Whether a choice among these queues waits, because one of them is behind."""
        return any(self._sweeps.get(queue, PATIENCE) < PATIENCE for queue in queues)

    def sweep(
        self, most: int, tables: Iterable[Mapping[tuple[str, int], EvictionPolicy]]
    ) -> int:  # fmt: skip
        """Remove up to ``most`` entries, of one queue after another.

        Args:
            most: maximum entries.
            tables: the policies by their queues.

        Returns:
            how many of the queues are behind no more.
        """
        swept, self._sweeps = 0, {queue: count + 1 for queue, count in self._sweeps.items()}
        for queue in list(self._sweeps):
            found = [table[queue] for table in tables if queue in table]
            for policy in found:
                policy.behind = True  # until its first entry is that of a leaf
                most -= policy.sweep(most)
                assert most >= 0
            if any(policy.behind for policy in found):
                break
            del self._sweeps[queue]
            swept += 1
        return swept


def leaves_behind(continued: Iterable[PrefixNode]) -> list[PrefixNode]:
    """For each node a page in memory behind it that none in memory continues, if one is near."""
    found = [_leaf_behind(node) for node in continued]
    return [leaf for leaf in found if leaf is not None]


def _leaf_behind(node: PrefixNode) -> PrefixNode | None:
    misses_left = BELOW_LOOKS
    for _ in range(BELOW_LOOKS):
        if not node.children_in_memory:
            return node
        for child in node.below.values():
            if child.in_memory:
                node = child
                break
            misses_left -= 1
            if not misses_left:
                return None
    return None
