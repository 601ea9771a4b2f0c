"""Who waits for pages to come to memory, wherever they come from. Pure.

A source (the SSD log, a peer) tells a :class:`~kvstore.state.tree.sessions.Fetch` of each page that
has come, which stays pinned for it, and of each load that has ended. After its last one whoever
waits asks again, and gets what is there.
"""

from collections.abc import Iterable, Sequence

from kvstore.state.tree.sessions import Fetch
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.state.tree.story import Moment


class Fetches:
    """All fetches of one node.

    Args:
        slots: where the pages come to.
        moment: the time of the message that is being carried out.

    Attributes:
        ended: fetches whose last load has ended, to be resumed.
    """

    def __init__(self, slots: SlotTable, moment: Moment) -> None:
        self._slots = slots
        self._moment = moment
        self.ended: list[Fetch] = []

    def keep(self, fetch: Fetch, slots: Sequence[Slot]) -> None:
        """Pages in memory stay there until the fetch ends; of a node it is all, or none."""
        self._slots.pin(slots, self._moment.tick)
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

    def end(self, fetch: Fetch) -> list[Slot]:
        """Whoever waited has what it wanted, or has given up; returns the slots that it pinned."""
        assert not fetch.ended
        fetch.ended = True
        pinned, fetch.pinned = fetch.pinned, []
        return pinned
