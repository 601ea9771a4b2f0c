"""Pages that a worker will probably have: a prefill in flight, an engine without events. Pure.

An expectation counts from one time until another. Where several of one worker have the same page,
it counts until the last of them ends.
"""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

EXPECTED_MAX: Final = 262_144
"""Maximum expected pages, those that do not count yet included."""

Chains = npt.NDArray[np.uint64]
_Event = tuple[int, int, str, Chains, bool, int]
"""When, number, worker, chains, whether they begin to count or end, and until when they do."""


class ExpectedChange(NamedTuple):
    """Pages that are expected of a worker from now on, or no longer."""

    worker: str
    chains: Chains
    begin: bool


class Expectations:
    """Every expectation that has not ended.

    Attributes:
        refused: pages that were left out because there were too many.
    """

    def __init__(self) -> None:
        self.refused = 0
        self._pages = 0
        self._numbers = count()
        self._events: list[_Event] = []  # what happens next is first
        #: worker → page → until when it is expected
        self._until: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        return self._pages

    def add(self, worker: str, chains: Chains, from_ns: int, until_ns: int) -> None:
        """Expect pages of a worker.

        Args:
            worker: its name.
            chains: chain values, heads first; of too many the last are left out.
            from_ns: from when on they count.
            until_ns: until when; not after ``from_ns`` = they never count.
        """
        left = max(0, EXPECTED_MAX - self._pages)
        self.refused += max(0, len(chains) - left)
        chains = chains[:left]
        if len(chains) and until_ns > from_ns:
            self._pages += len(chains)
            self._push(from_ns, worker, chains, until_ns, begin=True)

    def due(self, now_ns: int) -> Iterator[ExpectedChange]:
        """The changes up to now, in order of time."""
        while self._events and self._events[0][0] <= now_ns:
            _, _, worker, chains, begin, until_ns = heapq.heappop(self._events)
            until = self._until.setdefault(worker, {})
            if begin:
                for page in chains.tolist():
                    until[page] = max(until_ns, until.get(page, 0))
                self._push(until_ns, worker, chains, until_ns, begin=False)
                yield ExpectedChange(worker, chains, begin=True)
                continue
            self._pages -= len(chains)
            pages = dict.fromkeys(chains.tolist())  # a chain may be there twice
            ended = [page for page in pages if until.get(page, now_ns + 1) <= now_ns]
            for page in ended:
                del until[page]
            if not until:
                del self._until[worker]
            if ended:
                yield ExpectedChange(worker, np.array(ended, dtype=np.uint64), begin=False)

    def withdraw(self, worker: str, chains: Chains, until_ns: int, now_ns: int) -> None:
        """One expectation ends before its time; :meth:`due` tells of it. An unknown one is ignored.

        Args:
            worker: its worker.
            chains: its pages, as they were added.
            until_ns: until when they were expected.
            now_ns: time.
        """
        mine = [one for one in self._events if _is_of(one, worker, chains, until_ns)][:1]
        if not mine:
            return
        [(_, number, _, chains, begin, _)] = mine
        self._events = [one for one in self._events if one[1] != number]
        heapq.heapify(self._events)
        if begin:
            self._pages -= len(chains)
            return
        self._push(now_ns, worker, chains, now_ns, begin=False)
        until = self._until[worker]
        until.update(dict.fromkeys(chains.tolist(), now_ns))
        for _, _, other, pages, begins, ends_ns in self._events:
            if other == worker and not begins:
                for page in pages[np.isin(pages, chains)].tolist():
                    until[page] = max(ends_ns, until[page])

    def forget(self, worker: str) -> None:
        """Expect nothing of a worker any more; the caller drops its entries."""
        self._until.pop(worker, None)
        gone = [event for event in self._events if event[2] == worker]
        self._pages -= sum(len(event[3]) for event in gone)
        self._events = [event for event in self._events if event[2] != worker]
        heapq.heapify(self._events)

    def _push(
        self, when_ns: int, worker: str, chains: Chains, until_ns: int, *, begin: bool
    ) -> None:
        event = (when_ns, next(self._numbers), worker, chains, begin, until_ns)
        heapq.heappush(self._events, event)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._pages == sum(len(event[3]) for event in self._events) <= EXPECTED_MAX
        assert all(self._until.values())
        ending = {
            (event[2], page) for event in self._events if not event[4] for page in event[3].tolist()
        }
        held = {(worker, page) for worker, until in self._until.items() for page in until}
        assert held <= ending


def _is_of(event: _Event, worker: str, chains: Chains, until_ns: int) -> bool:
    """Whether an event is of this expectation; the last of its chains may have been left out."""
    _, _, of, kept, _, until = event
    return of == worker and until == until_ns and np.array_equal(kept, chains[: len(kept)])
