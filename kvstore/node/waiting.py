"""Requests whose answer waits: for a page to be written or loaded, for room, for a sync. Pure.

Every waiter has a deadline. How many there are, and how many bytes their messages take, is bounded
for each session and for all of them; but every session may always have a few, so that none keeps
the others out. What a waiter waited for does not answer it at once: it joins a queue that the node
serves in turns, because one event can concern thousands of them.
"""

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Final

WAITERS_MAX: Final = 4096
"""Requests that may wait, besides the few that every session always may have."""
WAITING_BYTES_MAX: Final = 128 << 20
"""Bytes of their messages, likewise."""
SESSION_WAITERS_MAX: Final = 512
SESSION_WAITING_BYTES_MAX: Final = 16 << 20
"""What of both one session may use."""
SESSION_WAITERS_ALWAYS: Final = 4
SESSION_WAITING_BYTES_ALWAYS: Final = 256 << 10
"""What one session may use however much the others do; there are fewer of them than connections."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One request that is not answered yet.

    Attributes:
        connection: whose it is.
        session: whose share it takes.
        size_bytes: of its message.
        since_ns: when it came.
        awaited: what it waits for.
        ready: what it waited for has happened, and it waits for its turn.
    """

    connection: int
    session: bytes
    request: Any
    size_bytes: int
    since_ns: int
    deadline_ns: int
    awaited: Hashable
    ready: bool = False


class WaitingRoom:
    """All requests of one node that wait."""

    def __init__(self) -> None:
        #: Those that are not ready yet, by what they wait for, in the order they came.
        self._by_thing: dict[Hashable, dict[Waiter, None]] = {}
        self._ready: deque[Waiter] = deque()
        self._by_connection: dict[int, dict[Waiter, None]] = {}
        self._counts: Counter[bytes] = Counter()
        self._sizes: Counter[bytes] = Counter()
        self.count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self.count

    def admits(self, session: bytes, size_bytes: int) -> bool:
        """Whether one more request of so many bytes may wait for a session."""
        count, size = self._counts[session] + 1, self._sizes[session] + size_bytes
        if count <= SESSION_WAITERS_ALWAYS and size <= SESSION_WAITING_BYTES_ALWAYS:
            return True
        return (
            count <= SESSION_WAITERS_MAX
            and size <= SESSION_WAITING_BYTES_MAX
            and self.count < WAITERS_MAX
            and self.size_bytes + size_bytes <= WAITING_BYTES_MAX
        )

    def add(self, waiter: Waiter) -> None:
        """Let a request wait; the caller has asked :meth:`admits`, or it waited before."""
        waiter.ready = False
        self._by_thing.setdefault(waiter.awaited, {})[waiter] = None
        self._by_connection.setdefault(waiter.connection, {})[waiter] = None
        self._count(waiter, 1)

    def remove(self, waiter: Waiter) -> None:
        """It waits no more."""
        if waiter.ready:
            self._ready.remove(waiter)
        else:
            self._leave_thing(waiter)
        self._forget(waiter)

    def wake(self, thing: Hashable) -> None:
        """What some waited for has happened: they are ready, in the order they came."""
        for waiter in self._by_thing.pop(thing, ()):
            waiter.ready = True
            self._ready.append(waiter)

    def wake_due(self, now_ns: int) -> None:
        """Whoever's deadline has passed is ready."""
        due = [
            waiter
            for waiters in self._by_thing.values()
            for waiter in waiters
            if waiter.deadline_ns <= now_ns
        ]
        for waiter in due:
            self._leave_thing(waiter)
            waiter.ready = True
            self._ready.append(waiter)

    def take(self) -> Waiter | None:
        """The waiter whose turn it is, which waits no more; None when none is ready."""
        if not self._ready:
            return None
        waiter = self._ready.popleft()
        self._forget(waiter)
        return waiter

    def first_on(self, thing: Hashable) -> Waiter | None:
        """Who has waited longest for one thing."""
        return next(iter(self._by_thing.get(thing, ())), None)

    def of(self, connection: int) -> list[Waiter]:
        """Who waits on one connection."""
        return list(self._by_connection.get(connection, ()))

    def next_deadline_ns(self) -> int:
        """The earliest deadline; 0 = nobody waits."""
        waiting = (waiter for waiters in self._by_thing.values() for waiter in waiters)
        return min((waiter.deadline_ns for waiter in waiting), default=0)

    @property
    def ready(self) -> bool:
        """Whether somebody waits for nothing but its turn."""
        return bool(self._ready)

    def check(self) -> None:
        """Assert that the counts are those of who waits."""
        everyone = [
            *self._ready,
            *(waiter for waiters in self._by_thing.values() for waiter in waiters),
        ]
        assert self.count == len(everyone) == len(set(everyone))
        assert self.size_bytes == sum(waiter.size_bytes for waiter in everyone)
        assert all(waiter.ready for waiter in self._ready)
        assert all(self._by_thing.values())
        assert all(self._by_connection.values())
        for session in {waiter.session for waiter in everyone} | self._counts.keys():
            mine = [waiter for waiter in everyone if waiter.session == session]
            assert self._counts[session] == len(mine) > 0
            assert self._sizes[session] == sum(waiter.size_bytes for waiter in mine)

    def _leave_thing(self, waiter: Waiter) -> None:
        waiters = self._by_thing[waiter.awaited]
        del waiters[waiter]
        if not waiters:
            del self._by_thing[waiter.awaited]

    def _forget(self, waiter: Waiter) -> None:
        mine = self._by_connection[waiter.connection]
        del mine[waiter]
        if not mine:
            del self._by_connection[waiter.connection]
        self._count(waiter, -1)

    def _count(self, waiter: Waiter, change: int) -> None:
        self.count += change
        self.size_bytes += change * waiter.size_bytes
        self._counts[waiter.session] += change
        self._sizes[waiter.session] += change * waiter.size_bytes
        if not self._counts[waiter.session]:
            del self._counts[waiter.session], self._sizes[waiter.session]
