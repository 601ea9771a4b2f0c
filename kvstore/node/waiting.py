"""Requests that wait for a page to be written or loaded, for a free slot, or for a sync. Pure.

Every request has a deadline. Their number and their bytes are limited per session and in total; but
every session may always have a few, so that no session blocks the others. An event does not resume
requests at once: they join a queue that the node processes in turns, because one event can concern
thousands of them.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from kvstore.node.copies import CopyRequests, tell_copies
from kvstore.node.requests import Outcome, Requests, acknowledge
from kvstore.protocol import wire
from kvstore.state.disk.jobs import Durable
from kvstore.state.remote.spreads import Spreading
from kvstore.state.tree.sessions import Fetch, Process

WAITERS_MAX: Final = 4096
"""Maximum waiting requests of all sessions, in addition to the few that each may always have."""
WAITING_BYTES_MAX: Final = 128 << 20
"""Maximum bytes of their messages."""
SESSION_WAITERS_MAX: Final = 512
SESSION_WAITING_BYTES_MAX: Final = 16 << 20
"""Maximum requests and bytes of one session."""
SESSION_WAITERS_ALWAYS: Final = 4
SESSION_WAITING_BYTES_ALWAYS: Final = 256 << 10
"""Each session may always use these, however much the others use; there are fewer than
connections."""


@dataclass(slots=True, init=False, eq=False)
class Waiter:
    """One waiting request.

    Attributes:
        connection: number of its connection.
        session: token of its session.
        size_bytes: size of its message.
        since_ns: time of its arrival.
        awaited: what it waits for.
        ready: its event has happened, and it waits for its turn.
    """

    connection: int
    session: bytes
    request: Any
    size_bytes: int
    since_ns: int
    deadline_ns: int
    awaited: Hashable
    ready: bool

    # Written out for the compiler: what `dataclass` makes stays interpreted.
    def __init__(
        self, connection: int, session: bytes, request: Any, size_bytes: int, since_ns: int,
        deadline_ns: int, awaited: Hashable,
    ) -> None:  # fmt: skip
        self.connection = connection
        self.session = session
        self.request = request
        self.size_bytes = size_bytes
        self.since_ns = since_ns
        self.deadline_ns = deadline_ns
        self.awaited = awaited
        self.ready = False


class WaitingRoom:
    """All waiting requests of one node."""

    def __init__(self) -> None:
        #: Requests that are not ready, by what they wait for, in order of arrival.
        self._by_thing: dict[Hashable, dict[Waiter, None]] = {}
        self._ready: deque[Waiter] = deque()
        self._by_connection: dict[int, dict[Waiter, None]] = {}
        self._counts: Counter[bytes] = Counter()
        self._sizes: Counter[bytes] = Counter()
        self.count = 0
        self.size_bytes = 0
        self._put_off = False

    def __len__(self) -> int:
        return self.count

    def admits(self, session: bytes, size_bytes: int) -> bool:
        """Whether a session may have one more waiting request of this size."""
        count = self._counts.get(session, 0) + 1
        size = self._sizes.get(session, 0) + size_bytes
        if count <= SESSION_WAITERS_ALWAYS and size <= SESSION_WAITING_BYTES_ALWAYS:
            return True
        return (
            count <= SESSION_WAITERS_MAX
            and size <= SESSION_WAITING_BYTES_MAX
            and self.count < WAITERS_MAX
            and self.size_bytes + size_bytes <= WAITING_BYTES_MAX
        )

    def add(self, waiter: Waiter) -> None:
        """Add a request; :meth:`admits` returned True for it, or it has waited before."""
        assert waiter not in self._by_connection.get(waiter.connection, ())
        waiter.ready = False
        self._by_thing.setdefault(waiter.awaited, {})[waiter] = None
        self._by_connection.setdefault(waiter.connection, {})[waiter] = None
        self._count(waiter, 1)

    def remove(self, waiter: Waiter) -> None:
        """Remove a request."""
        if waiter.ready:
            self._ready.remove(waiter)
        else:
            self._leave_thing(waiter)
        self._forget(waiter)

    def put_off(self, *, took_long: bool) -> bool:
        """Whether requests go on in the next turn: this one ``took_long``, the last one did not.

        Returns:
            True at most every second time, so that no request waits for two turns.
        """
        self._put_off = took_long and not self._put_off
        return self._put_off

    def wake(self, thing: Hashable) -> None:
        """An event has happened: mark its requests as ready, in order of arrival."""
        for waiter in self._by_thing.pop(thing, ()):
            assert not waiter.ready
            waiter.ready = True
            self._ready.append(waiter)

    def wake_due(self, now_ns: int) -> None:
        """Mark all requests whose deadline has passed as ready."""
        due = [
            waiter
            for waiters in self._by_thing.values()
            for waiter in waiters
            if waiter.deadline_ns <= now_ns
        ]
        for waiter in due:
            assert not waiter.ready
            self._leave_thing(waiter)
            waiter.ready = True
            self._ready.append(waiter)

    def take(self) -> Waiter | None:
        """Remove and return the next ready request; None if there is none."""
        if not self._ready:
            return None
        waiter = self._ready.popleft()
        assert waiter.ready
        self._forget(waiter)
        return waiter

    def first_on(self, thing: Hashable) -> Waiter | None:
        """The request that has waited longest for one thing."""
        return next(iter(self._by_thing.get(thing, ())), None)

    def awaits_others(self, thing: Hashable) -> bool:
        """Whether a request that is not ready waits for something else than this."""
        return len(self._by_thing) > (thing in self._by_thing)

    def of(self, connection: int) -> list[Waiter]:
        """The waiting requests of one connection."""
        return list(self._by_connection.get(connection, ()))

    def next_deadline_ns(self) -> int:
        """The earliest deadline of requests that are not ready; 0 = none."""
        waiting = (waiter for waiters in self._by_thing.values() for waiter in waiters)
        return min((waiter.deadline_ns for waiter in waiting), default=0)

    @property
    def ready(self) -> bool:
        """Whether a request is ready."""
        return bool(self._ready)

    def check(self) -> None:
        """Assert that the counts match the requests."""
        everyone = [
            *self._ready,
            *(waiter for waiters in self._by_thing.values() for waiter in waiters),
        ]
        assert self.count == len(everyone) == len(set(everyone))
        assert self.size_bytes == sum(waiter.size_bytes for waiter in everyone)
        assert all(waiter.ready for waiter in self._ready)
        assert all(self._by_thing.values())
        assert all(self._by_connection.values())
        assert all(self._counts.values())
        assert self._counts == Counter(waiter.session for waiter in everyone)
        sizes: Counter[bytes] = Counter()
        for waiter in everyone:
            sizes[waiter.session] += waiter.size_bytes
        assert self._sizes == sizes

    def _leave_thing(self, waiter: Waiter) -> None:
        assert not waiter.ready
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
        assert self.count >= 0 <= self.size_bytes
        self._counts[waiter.session] += change
        assert self._counts[waiter.session] >= 0
        self._sizes[waiter.session] += change * waiter.size_bytes
        if not self._counts[waiter.session]:
            del self._counts[waiter.session], self._sizes[waiter.session]


def request_bytes(request: Any) -> int:
    """Approximate memory of a waiting request."""
    return len(request.keys) + len(getattr(request, "tokens", b""))


PATIENT: Final = (
    wire.Lookup, wire.Acquire, wire.BeginPut, wire.Persist, wire.Bring, wire.Replicate,
)  # fmt: skip


class PatientRequests:
    """All requests that may wait; their outcome says what for.

    Args:
        requests: the messages of sessions.
        copies: requests about copies at other nodes.

    Attributes:
        first: type of a request → the answer of now, and what to wait for to get a better one; from
            its process, itself, the time, and whether it may wait.
    """

    def __init__(self, requests: Requests, copies: CopyRequests) -> None:
        self._requests = requests
        self._copies = copies
        self.first: dict[type, Callable[[Process, Any, int, bool], Outcome]] = {
            wire.Lookup: lambda process, request, _now, _waits: requests.lookup(process, request),
            wire.Acquire: lambda process, request, now_ns, waits: requests.acquire(
                process, request, now_ns, waits=waits
            ),
            wire.BeginPut: lambda process, asked, _now, _waits: requests.begin_put(process, asked),
            wire.Persist: lambda process, request, _now, waits: requests.persist(
                process, request, waits=waits
            ),
            wire.Bring: lambda process, request, _now, waits: copies.bring(
                process, request, waits=waits
            ),
            wire.Replicate: lambda process, request, _now, waits: copies.replicate(
                process, request, waits=waits
            ),
        }

    def ask_again(
        self, process: Process, request: Any, now_ns: int, awaited: Hashable, *, waits: bool
    ) -> Outcome:
        """The answer after the awaited event or the deadline; ``waits``: it may wait again."""
        if type(request) is not wire.BeginPut:  # of that nothing else is asked
            match request, awaited:
                case wire.Acquire(), _:
                    return self._requests.acquire_again(
                        process, request, now_ns, awaited, waits=waits
                    )
                case wire.Lookup(), _:
                    return self._requests.lookup(process, request, awaited)
                case wire.Bring(), Fetch():
                    return self._copies.bring_again(process, request, awaited, waits=waits)
                case _, Durable():
                    return acknowledge(request, awaited), None
                case _, Spreading():
                    return tell_copies(request, awaited), None
        may_wait = True  # who resumes it looks at its deadline
        return self.first[type(request)](process, request, now_ns, may_wait)
