"""Writes in progress, found by the slots that they pin. Pure."""

from collections.abc import Iterator

from kvstore.state.disk.jobs import Write
from kvstore.state.tree.columns import last_slot
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot


class WritesUnderWay:
    """All writes that have not settled.

    A slot is pinned as long as its page is being written, so it identifies that page, and not one
    that is stored again under the same key. A node belongs to at most one write.
    """

    def __init__(self) -> None:
        self._by_slot: dict[Slot, Write] = {}
        self._writes: dict[Write, None] = {}

    def __len__(self) -> int:
        return len(self._writes)

    def __iter__(self) -> Iterator[Write]:
        return iter(self._writes)

    @property
    def pages(self) -> int:
        """The number of their pages."""
        return len(self._by_slot)

    def add(self, write: Write) -> None:
        """Add a write that has started."""
        assert self._by_slot.keys().isdisjoint(write.slots), "a page is written twice at a time"
        self._by_slot.update(dict.fromkeys(write.slots, write))
        self._writes[write] = None

    def remove(self, write: Write) -> None:
        """Remove a write that has settled."""
        assert not write.left, "a record of it is still being written"
        for slot in write.slots:
            mine = self._by_slot.pop(slot)
            assert mine is write
        del self._writes[write]

    def of_slot(self, slot: Slot) -> Write:
        """The write of the page in a slot, which is being written."""
        return self._by_slot[slot]

    def of(self, node: PrefixNode, shard: int) -> Write | None:
        """The write that contains a node's pages; None if they are not being written."""
        if not self._by_slot or not node.memory >> shard & 1:
            return None
        return self._by_slot.get(last_slot(node.slot_columns[shard]))

    def bytes_of(self, space: PrefixTree) -> int:
        """Bytes of a space that are being written."""
        return sum(write.size for write in self._writes if write.space is space)
