"""``memory``: transports of one process, for tests and simulations.

There is no thread and no clock: the owner of a :class:`MemoryNetwork` steps it through time, and
decides the :class:`Fate` of each transfer. The same steps and fates have the same results.
"""

import heapq
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import (
    CapacityError,
    InvalidArgument,
    KVStoreError,
    NotFound,
    PeerUnreachable,
    TransferError,
    TransferTimeout,
)
from kvstore.transport.base import (
    TICKET_BYTES,
    PageArrival,
    PageTransfer,
    Range,
    TransferEnd,
    TransferSettled,
    TransportEvent,
)


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to one transfer.

    Attributes:
        delay_ns: its bytes arrive this long after its start. If that is after its deadline, it has
            ended before.
        pages: only this many of its first pages arrive then, and the peer says nothing more; -1 =
            all. With 0 it says nothing at all, not even that it refuses.
        broken: the connection breaks when the others would arrive: it ends then, instead of at its
            deadline.
        damaged: pages that arrive with a wrong byte.
        late_ns: after an end without all bytes, the rest arrives this long after that end, and only
            then it is settled; -1 = never, and it is settled with its end.
    """

    delay_ns: int = 0
    pages: int = -1
    broken: bool = False
    damaged: tuple[int, ...] = ()
    late_ns: int = -1


UNTROUBLED: Final = Fate()


@dataclass(frozen=True, slots=True)
class _Ticket:
    places: dict[Range, int]
    deadline_ns: int
    write: bool


class _Moving:
    """A transfer that is not settled.

    Attributes:
        content: bytes of each page as they were when it began.
        targets: address of each page where they go.
    """

    def __init__(
        self, by: "MemoryTransport", transfer: PageTransfer, fate: Fate, *, write: bool
    ) -> None:
        self.by = by
        self.transfer = transfer
        self.fate = fate
        self.write = write
        self.content: list[bytes] = []
        self.targets: list[int] = []
        self.good = bytearray(len(transfer.remote))
        self.ended = False


class MemoryNetwork:
    """Joins transports, and carries their bytes when it is stepped.

    Args:
        fate: asked once for each transfer, with the names of the reading or writing transport and
            of its peer.

    Attributes:
        now_ns: time of the last step.
    """

    def __init__(self, fate: Callable[[str, str, PageTransfer], Fate] | None = None) -> None:
        self.now_ns = 0
        self._fate = fate or (lambda _by, _peer, _transfer: UNTROUBLED)
        self._transports: dict[str, MemoryTransport] = {}
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0

    def open(self, endpoint: str, in_flight_bytes_max: int) -> "MemoryTransport":
        """A new transport that peers reach by this name.

        Raises:
            InvalidArgument: an open transport has the name.
        """
        if endpoint in self._transports:
            raise InvalidArgument("endpoint", f"{endpoint} is in use")
        made = MemoryTransport(self, endpoint, in_flight_bytes_max)
        self._transports[endpoint] = made
        return made

    def step(self, now_ns: int) -> None:
        """Process all events until ``now_ns``, in order."""
        assert now_ns >= self.now_ns, "time goes forward"
        while self._events and self._events[0][0] <= now_ns:
            at_ns, _, event = heapq.heappop(self._events)
            self.now_ns = max(at_ns, self.now_ns)
            event()
        self.now_ns = now_ns

    def next_ns(self) -> int | None:
        """Time of the next event; None = there is none."""
        return self._events[0][0] if self._events else None

    def at(self, at_ns: int, event: Callable[[], None]) -> None:
        """Add an event at a time; events at the same time happen in the order of these calls."""
        self._number += 1
        heapq.heappush(self._events, (at_ns, self._number, event))

    def begin(self, moving: _Moving) -> None:
        """Start a transfer with the present bytes, or refuse it."""
        transfer = moving.transfer
        fate, refusal = moving.fate, self._open_ticket(moving)
        answer_ns = self.now_ns + fate.delay_ns
        if refusal is None:
            self.at(answer_ns, lambda: self._arrive(moving))
        elif fate.pages:
            self.at(answer_ns, lambda: moving.by.end(moving, refusal))
        late = TransferTimeout("the peer made no progress before the deadline")
        self.at(transfer.deadline_ns, lambda: moving.by.end(moving, late))

    def fate_of(self, by: str, transfer: PageTransfer) -> Fate:
        """Ask for the fate of a transfer."""
        return self._fate(by, transfer.endpoint, transfer)

    def forget(self, transport: "MemoryTransport") -> None:
        """A transport was closed: transfers of peers with it break."""
        self._transports.pop(transport.endpoint, None)

    def _open_ticket(self, moving: _Moving) -> KVStoreError | None:
        """Find both sides of each page, and copy its bytes; returns why that is impossible."""
        transfer = moving.transfer
        peer = self._transports.get(transfer.endpoint)
        if peer is None:
            return PeerUnreachable(f"{transfer.endpoint}: nobody listens there")
        found = peer.tickets.get(transfer.ticket)
        if found is None or found.deadline_ns <= self.now_ns or found.write != moving.write:
            return NotFound("ticket", "the peer does not know it, or it has ended")
        if len(set(transfer.remote)) < len(transfer.remote) or not (
            found.places.keys() >= set(transfer.remote)
        ):
            return InvalidArgument("ranges", "not all of them belong to the ticket")
        remote = [found.places[one] for one in transfer.remote]
        local = transfer.local.tolist()
        sources, moving.targets = (local, remote) if moving.write else (remote, local)
        moving.content = [bytes(memory_at(at, transfer.page_bytes)) for at in sources]
        return None

    def _arrive(self, moving: _Moving) -> None:
        """Deliver the pages that arrive in time, and end the transfer if those are all."""
        transfer, fate = moving.transfer, moving.fate
        if moving.ended or moving.by.closed or not self._is_open(moving):
            moving.by.end(moving, PeerUnreachable("the peer has ended the ticket"))
            return
        count = len(transfer.remote) if fate.pages < 0 else min(fate.pages, len(transfer.remote))
        for page in range(count):
            self._deliver(moving, page)
        if not moving.write:
            moving.good[:count] = transfer.arrivals(0, count)
        elif count == len(transfer.remote):
            moving.good[:] = bytes([PageArrival.RIGHT]) * count
        if count == len(transfer.remote):
            moving.by.end(moving, None)
        elif fate.broken:
            moving.by.end(moving, PeerUnreachable("the connection broke"))

    def land(self, moving: _Moving) -> None:
        """Deliver the pages that arrived after the end; then the transfer is settled."""
        for page, good in enumerate(moving.good):
            lands = moving.content and (self._is_open(moving) or not moving.write)
            if good == PageArrival.MISSING and lands and not moving.by.closed:
                self._deliver(moving, page)
        moving.by.settle(moving)

    def _is_open(self, moving: _Moving) -> bool:
        """Whether the peer still allows this transfer."""
        peer = self._transports.get(moving.transfer.endpoint)
        found = None if peer is None else peer.tickets.get(moving.transfer.ticket)
        return found is not None and self.now_ns < found.deadline_ns

    def _deliver(self, moving: _Moving, page: int) -> None:
        size = moving.transfer.page_bytes
        target = memory_at(moving.targets[page], size)
        target[:] = moving.content[page]
        if page in moving.fate.damaged:
            target[size // 2] ^= 1


class MemoryTransport:
    """One node's transport of a network; see :class:`kvstore.transport.base.Transport`.

    :meth:`MemoryNetwork.open` makes it.

    Attributes:
        name: ``memory``.
        endpoint: its name in the network.
        closed: whether it is.
        tickets: what peers may read and write.
    """

    name = "memory"

    def __init__(self, network: MemoryNetwork, endpoint: str, in_flight_bytes_max: int) -> None:
        self.endpoint = endpoint
        self.closed = False
        self.tickets: dict[bytes, _Ticket] = {}
        self._network = network
        self._in_flight_bytes_max = in_flight_bytes_max
        self._under_way: dict[int, _Moving] = {}
        self._happened: deque[TransportEvent] = deque()
        self._counts: Counter[str] = Counter()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def register(self, address: int, length: int, descriptor: int) -> None:
        """See :class:`kvstore.transport.base.Transport`; memory needs no preparation."""

    def unregister(self, address: int) -> None:
        """See :class:`kvstore.transport.base.Transport`."""

    def addresses(self, ranges: Sequence[tuple[Range, int]]) -> bytes | None:  # noqa: ARG002
        """See :class:`kvstore.transport.base.Transport`; the ticket is all that is needed."""
        return b""

    def takes(self, transfer: PageTransfer) -> bool:  # noqa: ARG002
        """See :class:`kvstore.transport.base.Transport`."""
        return True

    def read(self, transfer: PageTransfer) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        transfer.check(verified=True)
        self._submit(transfer, write=False)

    def write(self, transfer: PageTransfer) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        transfer.check(verified=False)
        self._submit(transfer, write=True)

    def grant(
        self,
        ticket: bytes,
        ranges: Sequence[tuple[Range, int]],
        deadline_ns: int,
        *,
        write: bool = False,
    ) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        if len(ticket) != TICKET_BYTES or ticket in self.tickets:
            raise InvalidArgument("ticket", "already in use, or not 16 bytes")
        self.tickets[ticket] = _Ticket(dict(ranges), deadline_ns, write)

    def revoke(self, ticket: bytes, *, ended: bool = False) -> bool:  # noqa: ARG002
        """See :class:`kvstore.transport.base.Transport`."""
        self.tickets.pop(ticket, None)
        return True

    def poll(self) -> list[TransportEvent]:
        """See :class:`kvstore.transport.base.Transport`."""
        found = list(self._happened)
        self._happened.clear()
        if found:
            os.eventfd_read(self._event)
        return found

    def fileno(self) -> int:
        """See :class:`kvstore.transport.base.Transport`."""
        return self._event

    def cancel(self, number: int) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        found = self._under_way.get(number)
        if found is not None:
            self.end(found, TransferError("the transfer was cancelled"))

    def close(self) -> None:
        """See :class:`kvstore.transport.base.Transport`; may be repeated."""
        if not self.closed:
            self.closed = True
            self._network.forget(self)
            self._under_way.clear()
            self.tickets.clear()
            os.close(self._event)

    def stats(self) -> dict[str, int]:
        """See :class:`kvstore.transport.base.Transport`."""
        return {**self._counts, "in_flight_bytes": self._in_flight(), "tickets": len(self.tickets)}

    def end(self, moving: _Moving, error: KVStoreError | None) -> None:
        """End a transfer, if it has not; the network calls this."""
        if moving.ended or self.closed:
            return
        moving.ended = True
        late = error is not None and moving.fate.late_ns >= 0
        self._counts["transfers_failed" if error else "transfers_done"] += 1
        self._tell(TransferEnd(moving.transfer.number, bytes(moving.good), error, settled=not late))
        if late:
            at_ns = self._network.now_ns + moving.fate.late_ns
            self._network.at(at_ns, lambda: self._network.land(moving))
        else:
            del self._under_way[moving.transfer.number]

    def settle(self, moving: _Moving) -> None:
        """Say that nothing arrives any more; the network calls this."""
        if not self.closed:
            del self._under_way[moving.transfer.number]
            self._tell(TransferSettled(moving.transfer.number))

    def _submit(self, transfer: PageTransfer, *, write: bool) -> None:
        if transfer.number in self._under_way:
            raise InvalidArgument("number", f"transfer {transfer.number} is in progress")
        fate = self._network.fate_of(self.endpoint, transfer)
        moving = _Moving(self, transfer, fate, write=write)
        wanted = self._in_flight() + transfer.total_bytes
        refusal: KVStoreError | None = None
        if wanted > self._in_flight_bytes_max:
            refusal = CapacityError(f"{wanted} bytes in flight", "in_flight_bytes_max")
        elif transfer.deadline_ns <= self._network.now_ns:
            refusal = TransferTimeout("the deadline had passed before the transfer began")
        if refusal is not None:
            self._counts["transfers_refused"] += 1
            self._tell(TransferEnd(transfer.number, bytes(moving.good), refusal, settled=True))
            return
        self._under_way[transfer.number] = moving
        self._network.begin(moving)

    def _in_flight(self) -> int:
        return sum(one.transfer.total_bytes for one in self._under_way.values())

    def _tell(self, happened: TransportEvent) -> None:
        self._happened.append(happened)
        os.eventfd_write(self._event, 1)
