"""Tickets of a transport whose peers need none: the grants, and possible writers. Pure."""

from collections.abc import Sequence

from kvstore.protocol.errors import CapacityError
from kvstore.transport.base import Range
from kvstore.transport.grants import TICKETS_MAX, Tickets


class OpenTickets:
    """All tickets; pure except for the clock of :class:`~kvstore.transport.grants.Tickets`.

    A ticket for writing is kept until it is revoked, even past its deadline: a peer may have
    started to write before, and its end is not visible here.

    Attributes:
        revoked: tickets with which a peer may still write; the caller empties it.
    """

    def __init__(self) -> None:
        self.revoked: list[bytes] = []
        self._tickets = Tickets(lambda _ticket: None)
        self._writable: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._tickets)

    def grant(
        self, ticket: bytes, ranges: Sequence[tuple[Range, int]], deadline_ns: int, *, write: bool
    ) -> None:
        """See :meth:`kvstore.transport.base.Transport.grant`."""
        if write and len(self._writable) >= TICKETS_MAX:
            raise CapacityError(f"{TICKETS_MAX} tickets are open already", "tickets")
        self._tickets.grant(ticket, ranges, deadline_ns, write=write)
        if write:
            self._writable.add(ticket)

    def revoke(self, ticket: bytes, *, ended: bool) -> bool:
        """End a ticket; returns whether a peer may still write, and ``ended`` does not deny it."""
        self._tickets.revoke(ticket)
        doubtful = ticket in self._writable and not ended
        self._writable.discard(ticket)
        return doubtful
