"""Shared state of a simulation: time, random choices, fault rates and counts.

A seed determines the whole history: all random numbers are taken from one generator.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

from kvstore.protocol.page import ShardSpec

PAGE_BYTES: Final = 4096
EXTENT_BYTES: Final = 4 * PAGE_BYTES


@dataclass(frozen=True)
class FaultRates:
    """Probabilities of faults, each time one is possible.

    Attributes:
        connection: a connection breaks, during a message and in each millisecond.
        process: a process ends, at each of its steps.
        slowness: a piece of a copy takes longer than any lease.
        disk: a job of the disk fails.
        flip: a record is read with other bytes.
        unwatched: the end of a process cannot be detected.
    """

    connection: float = 0.02
    process: float = 0.002
    slowness: float = 0.02
    disk: float = 0.02
    flip: float = 0.02
    unwatched: float = 0.2


@dataclass
class SimulationOutcome:
    """Counts of a run; tests assert that each of these has occurred."""

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
    pages_fetched: int = 0
    window_pages_fetched: int = 0
    fetches_failed: int = 0
    fetches_unsettled: int = 0
    nodes_killed: int = 0
    disks_lost: int = 0
    pages_adopted: int = 0
    nodes_stopped: int = 0
    nodes_left: int = 0
    partitions: int = 0
    copies_made: int = 0


class Timeline:
    """Simulated time, with scheduled calls.

    Args:
        seed: determines all random choices.
        faults: fault rates.

    Attributes:
        random: source of all choices.
        outcome: counts so far.
        now_ns: the simulated time.
        between: called after each of the calls.
    """

    def __init__(self, seed: int, faults: FaultRates) -> None:
        self.random = Random(seed)
        self.faults = faults
        self.outcome = SimulationOutcome()
        self.now_ns = 1
        self.between: Callable[[], object] = lambda: None
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Schedule a call after this much simulated time."""
        heapq.heappush(self._agenda, (self.now_ns + delay_ns, next(self._order), call))

    def pass_until(self, end_ns: int) -> None:
        """Advance time; run the calls scheduled until then."""
        while self._agenda and self._agenda[0][0] <= end_ns:
            self.now_ns, _, call = heapq.heappop(self._agenda)
            call()
            self.between()
        self.now_ns = end_ns


def page_content(key: bytes, shard: ShardSpec | None = None) -> bytes:
    """The only correct bytes of a page; every 32 bytes of it differ from those of other pages.

    Shards are told apart by their first heads; None = the shard that begins with head 0.
    """
    part = shard.heads[0] if shard is not None else 0
    marked = bytes([byte ^ part for byte in key]) if part else key
    return marked * (PAGE_BYTES // len(key))
