"""An extent that changes its class: which pages leave it, and in which order. Pure.

Room for pages of another size or another tenant is a whole extent, and it may hold thousands of
pages. They leave some in each turn of the loop, after all of them were looked at: an extent with a
page that somebody needs is left as it is. One extent at a time is drained.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.state.choice.eviction import is_held
from kvstore.state.choice.quotas import Quotas
from kvstore.state.table.orphans import tails_first
from kvstore.state.tree.prefix_tree import PrefixNode, PrefixTree, is_live
from kvstore.state.tree.slots import Slot, SlotTable

LOOKS: Final = 8
"""Pages that are looked at in the time in which one leaves."""
STAY_NS: Final = 30_000_000_000
"""How long a class keeps an extent that it got, against one that has pages of its own to evict.

Two models that take turns would else take the same extents from each other in each turn."""


@dataclass(slots=True)
class Drain:
    """An extent that is being emptied.

    Attributes:
        position: which.
        space: who asked for its memory.
        slot_bytes: of the class that asked.
        walk: see :func:`leaving`.
    """

    position: int
    space: PrefixTree
    slot_bytes: int
    walk: Iterator[tuple[PrefixNode, int] | None]

    def serves(self, space: PrefixTree, slot_bytes: int) -> bool:
        """Whether that class gets the extent."""
        asked = self.space.identity.tenant, self.slot_bytes
        return asked == (space.identity.tenant, slot_bytes)


class Moves:
    """Extents that a class got from another one.

    Attributes:
        grown: the last one; when half of it is used, the next one is drained.
    """

    def __init__(self) -> None:
        self.grown: int | None = None
        #: Position → when it got empty; the longest ago first.
        self._since_ns: dict[int, int] = {}

    def add(self, position: int, now_ns: int) -> None:
        """An extent was drained."""
        self.grown = position
        self._since_ns.pop(position, None)
        self._since_ns[position] = now_ns

    def staying(self, now_ns: int) -> Container[int]:
        """The extents that stay where they are, whoever has pages of its own to evict."""
        while self._since_ns:
            first = next(iter(self._since_ns))
            if self._since_ns[first] + STAY_NS > now_ns:
                break
            del self._since_ns[first]
        return self._since_ns


def leaving(
    slots: SlotTable, owners: Mapping[Slot, PrefixNode], quotas: Quotas, position: int,
    space: PrefixTree, spared: PrefixNode | None,
) -> Iterator[tuple[PrefixNode, int] | None]:  # fmt: skip
    """The pages that leave memory so that an extent gets empty; it ends early if some may not.

    Args:
        slots: where the extent is.
        owners: whose slots they are, at each step.
        quotas: which spaces must not lose that much.
        position: which extent.
        space: who asks for it.
        spared: the page behind which room is made.

    Yields:
        a page and its shard, which the caller takes out of memory before the next step, or None
        for a step that found none. What only that page made reachable comes before it.
    """
    if slots.needed(position):
        return
    for at, slot in enumerate(slots.slots_in_use(position)):
        owner = owners.get(slot)
        if owner is None or owner is spared or is_held(owner):
            return
        if quotas.protects(owner.space, space, slots.extent_bytes):
            return
        if at % LOOKS == LOOKS - 1:
            yield None
    for slot in slots.slots_in_use(position):
        owner = owners.get(slot)
        for shard in list(owner.slots) if owner is not None else ():
            assert owner is not None
            below = iter(()) if shard in owner.disk else tails_first(owner, shard)
            for node in below:
                if node is not None and not _may_leave(slots, node, shard):
                    return
                yield None if node is None else (node, shard)
            if shard in owner.slots and is_live(owner):
                if not _may_leave(slots, owner, shard):
                    return
                yield owner, shard


def _may_leave(slots: SlotTable, node: PrefixNode, shard: int) -> bool:
    """Whether a page may leave memory: a use since it was looked at shows that it may not."""
    if is_held(node) or not node.ready >> shard & 1:
        return False
    return shard not in node.slots or not slots.in_use(node.slots[shard])
