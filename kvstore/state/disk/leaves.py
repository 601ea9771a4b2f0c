"""Which leaves of a space on disk are the coldest, and which were chosen to leave. Pure."""

from collections import Counter
from itertools import count

from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.nodeheap import NodeHeap


class Leaves:
    """The leaves of one space, in LRU order; some may no longer be leaves.

    Attributes:
        queued: the nodes that are in it.
        all_offered: every node of the space has been offered since there is a quota.
    """

    def __init__(self) -> None:
        #: (access, serial, number, node); may be out of date, which is found when it comes out. A
        #: head that was split off has the serial number that its tail had.
        self._heap = NodeHeap()
        self._number = count(1)
        self.queued: set[PrefixNode] = set()
        self.all_offered = False

    def add(self, node: PrefixNode) -> None:
        """Add a node, if it is not there."""
        if node not in self.queued:
            self.queued.add(node)
            for gone in self._heap.push((node.access, node.serial, next(self._number), node)):
                self.queued.remove(gone[-1])

    def pop(self) -> tuple[PrefixNode, bool] | None:
        """Remove the first node; returns it, and whether it was used since it was added."""
        if not self._heap:
            return None
        access, _, _, node = self._heap.pop()
        self.queued.remove(node)
        return node, node.access != access

    def free(self, most: int) -> bool:
        """Let go of up to ``most`` nodes: the quota has ended; whether there are more."""
        assert most > 0
        self._heap.discard(most)
        for _ in range(min(most, len(self.queued))):
            self.queued.pop()
        return bool(self._heap or self.queued)


class ChosenLeaves:
    """Nodes that were chosen to leave the disk, and that count as gone for whoever chooses next."""

    def __init__(self) -> None:
        #: Node → the node above it, and whether it counts in ``bare``.
        self._nodes: dict[PrefixNode, tuple[PrefixNode, bool]] = {}
        #: Node → how many of its children leave the disk; and how many of these leave the tree,
        #: because they are not in memory.
        self.below: Counter[PrefixNode] = Counter()
        self.bare: Counter[PrefixNode] = Counter()

    def __contains__(self, node: PrefixNode) -> bool:
        return node in self._nodes

    def add(self, node: PrefixNode) -> None:
        """A node on disk was chosen."""
        above, bare = node.above, not node.memory
        assert node not in self._nodes, ("it would be counted twice", node)
        assert above is not None, node
        self._nodes[node] = above, bare
        self.below[above] += 1
        self.bare[above] += bare

    def discard(self, node: PrefixNode) -> None:
        """A node has left, if it was chosen."""
        above, bare = self._nodes.pop(node, (None, False))
        if above is not None:
            self.below[above] -= 1
            self.bare[above] -= bare
            assert self.below[above] >= self.bare[above] >= 0, node

    def clear(self) -> None:
        """All of them have left."""
        self._nodes.clear()
        self.below.clear()
        self.bare.clear()
