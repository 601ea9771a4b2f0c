"""Who waits for pages to come to memory, wherever they come from. Pure.

A source (the SSD log, a peer) tells a :class:`~kvstore.state.tree.sessions.Fetch` of each page that
has come, which stays pinned for it, and of each load that has ended. After its last one whoever
waits asks again, and gets what is there.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.state.tree.story import Moment


class PinnedMemory(Protocol):
    """What this needs of the page table."""

    slots: SlotTable
    moment: Moment

    def owner(self, slot: Slot) -> PrefixNode | None:
        """The node of the page in a slot; None for a slot of no page in the trees."""
        ...

    def add_candidate(self, node: PrefixNode) -> None:
        """The node may be evictable now."""
        ...


class Fetches:
    """All fetches of one node.

    Args:
        memory: where the pages come to.

    Attributes:
        ended: fetches whose last load has ended, to be resumed.
    """

    def __init__(self, memory: PinnedMemory) -> None:
        self._memory = memory
        self.ended: list[Fetch] = []

    def keep(self, fetch: Fetch, slots: Sequence[Slot]) -> None:
        """Pages in memory stay there until the fetch ends; of a node it is all, or none."""
        self._memory.slots.pin(slots, self._memory.moment.tick)
        fetch.pinned += slots

    def came(self, waiters: Iterable[Fetch]) -> None:
        """One of the things that each of these waits for has come, or never will."""
        for fetch in waiters:
            if not fetch.ended:
                fetch.outstanding -= 1
                assert fetch.outstanding >= 0
                self.tell(fetch)

    def tell(self, fetch: Fetch) -> None:
        """Let whoever waits be resumed, if there is nothing left to wait for."""
        if not fetch.waits:
            self.ended.append(fetch)

    def end(self, fetch: Fetch) -> None:
        """Whoever waited has what it wanted, or has given up."""
        assert not fetch.ended
        fetch.ended = True
        self.unpin(fetch.pinned)

    def unpin(self, slots: list[Slot]) -> None:
        """Let go of pages in memory; empties the list."""
        self._memory.slots.unpin(slots)
        last: PrefixNode | None = None
        for slot in slots:
            node = self._memory.owner(slot)  # its page may have left the index meanwhile
            if node is not None and node is not last:
                self._memory.add_candidate(node)
            last = node
        slots.clear()
