"""Whose page a slot holds: two columns for each extent, which never grow while somebody waits.

They name a page by its key, so that nothing changes here when a node is split. The keys are in
numpy's arrays of objects, because Python's collector does not look into those: it would touch every
key of an extent while that is young.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.page import PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import INDEX_BITS, INDEX_MASK, Slot, SlotTable

_Keys = npt.NDArray[Any]
"""A key or None, for each slot of an extent."""
_NO_KEYS: Final[_Keys] = np.empty(0, dtype=np.object_)


class Owners:
    """All and only the slots of pages in the trees, and those pages.

    Args:
        slots: where they are.
    """

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        #: For each extent that ever held a page, the key and the space of each slot's page, or
        #: None.
        self._keys: dict[int, _Keys] = {}
        self._spaces: dict[int, list[PrefixTree | None]] = {}

    def run(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None when it holds none."""
        position, index = self._slots.position(slot), self._slots.index(slot)
        keys = self._keys.get(position)
        if keys is None or index >= len(keys):
            return None
        key: PrefixKey | None = keys[index]
        space = self._spaces[position][index]
        return None if key is None or space is None else space.index[key]

    def get(self, slot: Slot) -> PrefixNode | None:
        """The page in a slot, made a node of its own; None when it holds none."""
        found = self.run(slot)
        if found is None or found.count == 1:
            return found
        key: PrefixKey | None = self._keys[self._slots.position(slot)][self._slots.index(slot)]
        return found.space.nodes.get(key) if key is not None else None

    def add(self, slots: Sequence[Slot], keys: Sequence[PrefixKey], space: PrefixTree) -> None:
        """The pages of these keys have these slots."""
        last, known, spaces = -1, _NO_KEYS, list[PrefixTree | None]()
        for slot, key in zip(slots, keys, strict=True):
            position, index = slot >> INDEX_BITS, slot & INDEX_MASK
            if position != last:
                last, known = position, self._grown(position)
                spaces = self._spaces[position]
            assert spaces[index] is None
            known[index], spaces[index] = key, space

    def remove(self, slots: Sequence[Slot]) -> None:
        """The pages in these slots are gone."""
        last, known, spaces = -1, _NO_KEYS, list[PrefixTree | None]()
        for slot in slots:
            position, index = slot >> INDEX_BITS, slot & INDEX_MASK
            if position != last:
                last, known, spaces = position, self._keys[position], self._spaces[position]
            assert spaces[index] is not None
            known[index] = spaces[index] = None

    def _grown(self, position: int) -> "_Keys":
        """The keys of an extent that is new, or may have been cut into more slots than before."""
        keys = self._keys.get(position, _NO_KEYS)
        more = self._slots.extents[position].count - len(keys)
        if more > 0:
            keys = self._keys[position] = np.append(keys, np.full(more, None))
            self._spaces.setdefault(position, []).extend([None] * more)
        return keys
