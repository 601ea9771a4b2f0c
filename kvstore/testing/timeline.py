"""What all parts of a simulation share: time, chance, what goes wrong, and what came of it.

One seed is one history: whoever wants a random number takes the next one here.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

PAGE_BYTES: Final = 4096
EXTENT_BYTES: Final = 4 * PAGE_BYTES


@dataclass(frozen=True)
class FaultRates:
    """How likely things go wrong, as probabilities at each chance they have.

    Attributes:
        connection: a connection breaks, while a message is on its way and in each millisecond.
        process: a process ends, at each step it takes.
        slowness: a piece of a copy takes longer than any lease.
        disk: a job of the disk fails.
        flip: a record comes back from the disk with other bytes.
        unwatched: nobody can tell when a process ends.
    """

    connection: float = 0.02
    process: float = 0.002
    slowness: float = 0.02
    disk: float = 0.02
    flip: float = 0.02
    unwatched: float = 0.2


@dataclass
class SimulationOutcome:
    """What happened in a run; a test asks that each of these did happen."""

    pages_read: int = 0
    pages_stored: int = 0
    lookups_waited: int = 0
    connections_lost: int = 0
    processes_ended: int = 0
    late_pieces: int = 0
    pages_from_disk: int = 0
    disk_failures: int = 0
    pages_persisted: int = 0
    pages_checked: int = 0
    extents_retired: int = 0


class Timeline:
    """Simulated time, and what happens when.

    Args:
        seed: decides everything.
        faults: what goes wrong how often.

    Attributes:
        random: where every choice comes from.
        outcome: what has happened so far.
        now_ns: the time.
    """

    def __init__(self, seed: int, faults: FaultRates) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.outcome = SimulationOutcome()
        self.now_ns = 1
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Call it after so much simulated time."""
        heapq.heappush(self._agenda, (self.now_ns + delay_ns, next(self._order), call))

    def pass_until(self, end_ns: int) -> None:
        """Let time pass; what was to be called until then is."""
        while self._agenda and self._agenda[0][0] <= end_ns:
            self.now_ns, _, call = heapq.heappop(self._agenda)
            call()
        self.now_ns = end_ns


def page_content(key: bytes) -> bytes:
    """The only right bytes of a page, different in every 32 of them from any other page's."""
    return key * (PAGE_BYTES // len(key))
