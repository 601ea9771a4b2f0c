"""Tickets: the memory that they open, and the connections that are using them."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.transport.base import PAGES_MAX, TICKET_BYTES, Range
from kvstore.transport.frames import RANGE_BYTES, DataHead, DataKind, DataStatus, pack_ranges
from kvstore.transport.streams import DataStream

TICKETS_MAX = 65_536


class TicketRefused(Exception):
    """A request that its ticket does not cover; it is answered with ``status``."""

    def __init__(self, status: DataStatus) -> None:
        super().__init__(status.name)
        self.status = status


class _Ticket:
    """One ticket.

    Attributes:
        places: packed range → address and length.
        users: connections that are transferring with it.
        revoked: it is told when the last of them has left.
    """

    __slots__ = ("deadline_ns", "places", "revoked", "users", "write")

    def __init__(
        self, places: dict[bytes, tuple[int, int]], deadline_ns: int, *, write: bool
    ) -> None:
        self.places = places
        self.deadline_ns = deadline_ns
        self.write = write
        self.users: set[DataStream] = set()
        self.revoked = False


class Tickets:
    """All tickets of a transport; may be used by all threads.

    A ticket past its deadline opens nothing. It is forgotten when another one is granted.

    Args:
        ended: called, by any thread, when a revoked ticket that was in use is no more.
    """

    def __init__(self, ended: Callable[[bytes], None]) -> None:
        self._ended = ended
        self._tickets: dict[bytes, _Ticket] = {}
        self._lock = threading.Lock()
        self._next_ns: int | None = None

    def __len__(self) -> int:
        return len(self._tickets)

    def grant(
        self, ticket: bytes, ranges: Sequence[tuple[Range, int]], deadline_ns: int, *, write: bool
    ) -> None:
        """See :meth:`kvstore.transport.base.Transport.grant`."""
        if len(ticket) != TICKET_BYTES:
            raise InvalidArgument("ticket", f"{len(ticket)} bytes are not {TICKET_BYTES}")
        if not 0 < len(ranges) <= PAGES_MAX:
            raise InvalidArgument("ranges", f"{len(ranges)} are not 1 to {PAGES_MAX}")
        packed = pack_ranges([one for one, _ in ranges])
        lengths = [one.length for one, _ in ranges]
        if min(lengths) <= 0:
            raise InvalidArgument("ranges", "one is empty")
        places = zip([address for _, address in ranges], lengths, strict=True)
        opened = _Ticket(dict(zip(packed, places, strict=True)), deadline_ns, write=write)
        with self._lock:
            self._forget_ended()
            if ticket in self._tickets:
                raise InvalidArgument("ticket", "it is in use")
            if len(self._tickets) >= TICKETS_MAX:
                raise CapacityError(f"{TICKETS_MAX} tickets are open already", "tickets")
            self._tickets[ticket] = opened
            self._next_ns = min(deadline_ns, self._next_ns or deadline_ns)

    def revoke(self, ticket: bytes) -> bool:
        """See :meth:`kvstore.transport.base.Transport.revoke`."""
        with self._lock:
            found = self._tickets.pop(ticket, None)
            if found is None or not found.users:
                return True
            found.revoked = True
            for stream in found.users:
                stream.shutdown()
            return False

    @contextmanager
    def using(
        self, head: DataHead, ranges: bytes, stream: DataStream
    ) -> Iterator[tuple[list[tuple[int, int]], int]]:
        """Use a ticket for one request.

        Args:
            head: of the request.
            ranges: packed, as the request has them.
            stream: broken if the ticket is revoked meanwhile.

        Returns:
            Address and length of each range, and the ticket's deadline.

        Raises:
            TicketRefused: the ticket does not exist, or does not open all of this.
        """
        asked = [ranges[at : at + RANGE_BYTES] for at in range(0, len(ranges), RANGE_BYTES)]
        with self._lock:
            found = self._tickets.get(head.ticket)
            alive = found is not None and time.monotonic_ns() < found.deadline_ns
            if found is None or not alive or found.write != (head.kind == DataKind.WRITE):
                raise TicketRefused(DataStatus.UNKNOWN_TICKET)
            if len(set(asked)) < len(asked) or not found.places.keys() >= set(asked):
                raise TicketRefused(DataStatus.OUTSIDE)
            found.users.add(stream)
        try:
            yield [found.places[one] for one in asked], found.deadline_ns
        finally:
            with self._lock:
                found.users.discard(stream)
                over = found.revoked and not found.users
            if over:
                self._ended(head.ticket)

    def _forget_ended(self) -> None:
        """Remove unused tickets past their deadline, as soon as there may be one."""
        now_ns = time.monotonic_ns()
        if self._next_ns is None or now_ns < self._next_ns:
            return
        kept = {
            key: one for key, one in self._tickets.items() if one.users or one.deadline_ns > now_ns
        }
        self._tickets = kept
        self._next_ns = min((one.deadline_ns for one in kept.values()), default=None)
