"""Requests that wait for a page to be written or loaded, for a free slot, or for a sync. Pure.

Every request has a deadline. Their number and their bytes are limited per session and in total; but
every session may always have a few, so that no session blocks the others. An event does not resume
requests at once: they join a queue that the node processes in turns, because one event can concern
thousands of them.

Requests that wait for room have a queue for each session, space, size and use, and one that finds
none keeps its place in it. Sessions, and the queues of each, are tried in turn. When something has
made room, the requests for a tenant's slots of one size are tried until one finds none. At each
tick, the first ones of some queues of each session are tried besides: not all that makes room is
told, and one space may have room where another has none.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from kvstore.node.awaited import Outcome, RoomFor, acknowledge
from kvstore.node.copies import CopyRequests, tell_copies
from kvstore.node.requests import Requests
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
SESSION_QUEUES_TICK: Final = 4
QUEUES_TICK: Final = 16
"""Queues of one session, and of all, that each tick tries: an attempt in vain takes a tenth of a
millisecond or more, there may be hundreds of sessions, and a session may have as many spaces."""


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
        self._by_thing: dict[Hashable, OrderedDict[Waiter, None]] = {}
        #: The queues for room among these; the one that was tried longest ago is the first.
        self._rooms: dict[RoomFor, None] = {}
        #: Session → its queues whose first request will be tried; and whether it is even if one for
        #: the same tenant, size and use finds no room. Who was tried longest ago is the first, of
        #: the sessions and of the queues.
        self._to_try: dict[bytes, dict[RoomFor, bool]] = {}
        self._ready: deque[Waiter] = deque()
        self._by_connection: dict[int, dict[Waiter, None]] = {}
        self._counts: Counter[bytes] = Counter()
        self._sizes: Counter[bytes] = Counter()
        self.count = 0
        self.size_bytes = 0
        self._put_off = False
        #: There may be more room since requests were last chosen to be tried.
        self._room_noted = False

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
        waiter.ready, thing = False, waiter.awaited
        if thing not in self._by_thing:
            self._by_thing[thing] = OrderedDict()
            if isinstance(thing, RoomFor):
                self._rooms[thing] = None
        self._by_thing[thing][waiter] = None
        self._by_connection.setdefault(waiter.connection, {})[waiter] = None
        self._count(waiter, 1)

    def add_again(self, waiter: Waiter, awaited: Hashable) -> bool:
        """Add a request that :meth:`take` returned, for what it waits for now.

        Returns:
            whether it found no room again; it has its old place then, before all that came later.
        """
        in_vain = isinstance(awaited, RoomFor) and awaited == waiter.awaited
        waiter.awaited = awaited
        self.add(waiter)
        if in_vain:
            assert isinstance(awaited, RoomFor)
            self._by_thing[awaited].move_to_end(waiter, last=False)
            self._try_no_more(awaited)
            self._try_no_more_alike(awaited)
        return in_vain

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

    def note_room(self) -> None:
        """There may be more room: requests of each tenant, size and use will be tried."""
        self._room_noted = True

    def try_some(self) -> None:
        """The first requests of some queues will be tried, those first that were not for longest.

        If one of them finds room, :meth:`note_room` lets all others try.
        """
        chosen: Counter[bytes] = Counter()
        left = QUEUES_TICK
        for room in self._rooms:
            chosen[room.session] += 1
            if chosen[room.session] <= SESSION_QUEUES_TICK:
                self._to_try.setdefault(room.session, {})[room] = True
                left -= 1
            if not left:
                break

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
        """Remove and return the next request that may go on; None if there is none."""
        if self._ready:
            waiter = self._ready.popleft()
            assert waiter.ready
            self._forget(waiter)
            return waiter
        if self._room_noted:
            self._room_noted = False
            for room in self._rooms:
                self._to_try.setdefault(room.session, {}).setdefault(room, False)
        if not self._to_try:
            return None
        session = next(iter(self._to_try))
        rooms = self._to_try.pop(session)
        room = next(iter(rooms))
        # Its next turn is after those of the other queues and sessions.
        rooms[room], self._rooms[room] = rooms.pop(room), self._rooms.pop(room)
        self._to_try[session] = rooms
        waiter = next(iter(self._by_thing[room]))
        self.remove(waiter)
        return waiter

    @property
    def awaits_events(self) -> bool:
        """Whether a request that is not ready waits for something else than room."""
        return len(self._by_thing) > len(self._rooms)

    def of(self, connection: int) -> list[Waiter]:
        """The waiting requests of one connection."""
        return list(self._by_connection.get(connection, ()))

    def next_deadline_ns(self) -> int:
        """The earliest deadline of requests that are not ready; 0 = none."""
        waiting = (waiter for waiters in self._by_thing.values() for waiter in waiters)
        return min((waiter.deadline_ns for waiter in waiting), default=0)

    @property
    def may_go_on(self) -> bool:
        """Whether :meth:`take` would return a request."""
        return bool(self._ready or self._to_try or (self._room_noted and self._rooms))

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
        assert self._rooms.keys() == {one for one in self._by_thing if isinstance(one, RoomFor)}
        for session, rooms in self._to_try.items():
            assert rooms
            assert all(room in self._rooms and room.session == session for room in rooms)
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
            thing = waiter.awaited
            del self._by_thing[thing]
            if isinstance(thing, RoomFor):
                del self._rooms[thing]
                self._try_no_more(thing)

    def _try_no_more(self, room: RoomFor) -> None:
        """Nobody is in this queue, or its first request found no room."""
        rooms = self._to_try.get(room.session, {})
        rooms.pop(room, None)
        if not rooms:
            self._to_try.pop(room.session, None)

    def _try_no_more_alike(self, room: RoomFor) -> None:
        """What made room made none for this tenant, size and use, or it was taken."""
        listed = [pair for rooms in self._to_try.values() for pair in rooms.items()]
        for other, anyway in listed:
            if not anyway and other[:3] == room[:3]:
                self._try_no_more(other)

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
        # Whoever resumes it looks at its deadline, but writes must not begin then.
        may_wait = waits or type(request) is not wire.Persist
        return self.first[type(request)](process, request, now_ns, may_wait)
