"""Whose page a slot holds: a list for each extent, which never grows while somebody waits."""

from kvstore.state.tree.prefix_tree import PrefixNode
from kvstore.state.tree.slots import Slot, SlotTable


class Owners:
    """All and only the slots of pages in the trees, and the nodes of those pages.

    Args:
        slots: where they are.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        #: For each extent that ever held a page, a node or None for each of its slots.
        self._extents: dict[int, list[PrefixNode | None]] = {}

    def get(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None when it holds none."""
        nodes = self._extents.get(self._slots.position(slot), ())
        index = self._slots.index(slot)
        return nodes[index] if index < len(nodes) else None

    def add(self, slot: Slot, node: PrefixNode) -> None:
        """A page of ``node`` has this slot."""
        position, index = self._slots.position(slot), self._slots.index(slot)
        nodes = self._extents.get(position, [])
        if index >= len(nodes):  # its extent is new, or was cut into more slots than before
            count = self._slots.extents[position].count
            nodes = self._extents[position] = nodes + [None] * (count - len(nodes))
        assert nodes[index] is None
        nodes[index] = node

    def remove(self, slot: Slot) -> None:
        """The slot's page is gone."""
        nodes, index = self._extents[self._slots.position(slot)], self._slots.index(slot)
        assert nodes[index] is not None
        nodes[index] = None
