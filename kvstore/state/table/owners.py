"""Whose page a slot holds: two lists for each extent, which never grow while somebody waits.

They name a page by its key, so that nothing changes here when a node is split.
"""

from collections.abc import Sequence

from kvstore.page import PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import INDEX_BITS, INDEX_MASK, Slot, SlotTable


class Owners:
    """All and only the slots of pages in the trees, and those pages.

    Args:
        slots: where they are.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        #: For each extent that ever held a page, the key and the space of each slot's page, or
        #: None.
        self._keys: dict[int, list[PrefixKey | None]] = {}
        self._spaces: dict[int, list[PrefixTree | None]] = {}

    def run(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None when it holds none."""
        position, index = self._slots.position(slot), self._slots.index(slot)
        keys = self._keys.get(position)
        if keys is None or index >= len(keys):
            return None
        key, space = keys[index], self._spaces[position][index]
        return None if key is None or space is None else space.index[key]

    def get(self, slot: Slot) -> PrefixNode | None:
        """The page in a slot, made a node of its own; None when it holds none."""
        found = self.run(slot)
        if found is None or found.count == 1:
            return found
        key = self._keys[self._slots.position(slot)][self._slots.index(slot)]
        return found.space.nodes.get(key) if key is not None else None

    def add(self, slots: Sequence[Slot], keys: Sequence[PrefixKey], space: PrefixTree) -> None:
        """The pages of these keys have these slots."""
        last, known, spaces = -1, list[PrefixKey | None](), list[PrefixTree | None]()
        for slot, key in zip(slots, keys, strict=True):
            position, index = slot >> INDEX_BITS, slot & INDEX_MASK
            if position != last:
                last, known = position, self._grown(position)
                spaces = self._spaces[position]
            assert known[index] is None
            known[index], spaces[index] = key, space

    def remove(self, slots: Sequence[Slot]) -> None:
        """The pages in these slots are gone."""
        last, known, spaces = -1, list[PrefixKey | None](), list[PrefixTree | None]()
        for slot in slots:
            position, index = slot >> INDEX_BITS, slot & INDEX_MASK
            if position != last:
                last, known, spaces = position, self._keys[position], self._spaces[position]
            assert known[index] is not None
            known[index] = spaces[index] = None

    def _grown(self, position: int) -> list[PrefixKey | None]:
        """The keys of an extent that is new, or may have been cut into more slots than before."""
        keys = self._keys.setdefault(position, [])
        more = self._slots.extents[position].count - len(keys)
        if more > 0:
            keys.extend([None] * more)
            self._spaces.setdefault(position, []).extend([None] * more)
        return keys
