"""Requests whose answer waits: for a page to be written or loaded, for room, for a sync. Pure.

Every waiter has a deadline, and there is a bound on how many there are.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

WAITERS_MAX: Final = 4096


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that is not answered yet.

    Attributes:
        connection: whose it is.
        awaited: what it waits for.
    """

    connection: int
    request: Any
    deadline_ns: int
    awaited: Hashable


class WaitingRoom:
    """All requests of one node that wait."""

    def __init__(self) -> None:
        """Start empty."""
        self._by_thing: dict[Hashable, list[Waiter]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether nobody else may wait."""
        return self._count >= WAITERS_MAX

    def add(self, waiter: Waiter) -> None:
        """Let a request wait."""
        self._by_thing.setdefault(waiter.awaited, []).append(waiter)
        self._count += 1

    def remove(self, waiter: Waiter) -> None:
        """It waits no more."""
        waiters = self._by_thing[waiter.awaited]
        waiters.remove(waiter)
        self._count -= 1
        if not waiters:
            del self._by_thing[waiter.awaited]

    def on(self, thing: Hashable) -> list[Waiter]:
        """Who waits for one thing, in the order they came."""
        return list(self._by_thing.get(thing, ()))

    def of(self, connection: int) -> list[Waiter]:
        """Who waits on one connection."""
        return [waiter for waiter in self._all() if waiter.connection == connection]

    def due(self, now_ns: int) -> list[Waiter]:
        """Whose deadline has passed."""
        return [waiter for waiter in self._all() if waiter.deadline_ns <= now_ns]

    def next_deadline_ns(self) -> int:
        """The earliest deadline; 0 = nobody waits."""
        return min((waiter.deadline_ns for waiter in self._all()), default=0)

    def _all(self) -> list[Waiter]:
        return [waiter for waiters in self._by_thing.values() for waiter in waiters]
