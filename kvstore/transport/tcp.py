"""``tcp``: pages straight between the slots of two nodes and sockets, with TLS by choice.

A transfer that fails is settled with its end: the thread that received into the memory has closed
its connection before.
"""

import logging
import os
import select
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from kvstore.process.listeners import Listener, Tcp
from kvstore.transport.base import PageTransfer, Range, TicketEnded, TransportEvent
from kvstore.transport.frames import DataKind
from kvstore.transport.grants import Tickets
from kvstore.transport.owner import PageOwner
from kvstore.transport.reader import PageReader
from kvstore.transport.streams import host_and_port

CONNECTIONS_MAX: Final = 64
"""Connections from peers that have a ticket: three each of up to 16 nodes, and some to spare."""
_TURN_S: Final = 1.0
_FULL_PAUSE_S: Final = 0.1
"""After a connection could not be accepted, as without free descriptors."""
_JOIN_S: Final = 5.0
_log: Final = logging.getLogger(__name__)


class TcpTransport:
    """The transport over TCP; see :class:`kvstore.transport.base.Transport`.

    Attributes:
        name: ``tcp``.
        endpoint: ``host:port`` where it listens; empty = it does not.
    """

    name = "tcp"

    def __init__(
        self,
        listen: str,
        in_flight_bytes_max: int,
        *,
        server: ssl.SSLContext | None = None,
        client: ssl.SSLContext | None = None,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Listen, and start the thread that accepts connections and keeps deadlines.

        Args:
            listen: ``host:port`` where peers connect to, port 0 = any free one; empty = nobody can
                read from here.
            in_flight_bytes_max: bytes of all own transfers together.
            server: for connections from peers; None = no TLS.
            client: for connections to peers; None = no TLS.
            connections_max: connections from peers.

        Raises:
            InvalidArgument: it cannot listen there; the message says why.
        """
        self._counts: Counter[str] = Counter()
        self._tickets = Tickets(lambda ticket: self._tell(TicketEnded(ticket)))
        self._events: deque[TransportEvent] = deque()
        self._closed = False
        address = Tcp(*host_and_port(listen)) if listen else None
        self._listener = None if address is None else Listener("transfer_listen", address, 0)
        self.endpoint = (
            "" if self._listener is None else str(self._listener.endpoint).removeprefix("tcp://")
        )
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_ns = 0
        self._owner = PageOwner(self._tickets, server, connections_max, self._counts)
        self._reader = PageReader(client, in_flight_bytes_max, self._tell, self._counts)
        self._thread = threading.Thread(target=self._serve, name="kvstore-data-port", daemon=True)
        self._thread.start()

    def register(self, address: int, length: int, descriptor: int) -> None:
        """See :class:`kvstore.transport.base.Transport`; sockets need no preparation."""

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
        self._submit(transfer, DataKind.READ)

    def write(self, transfer: PageTransfer) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        self._submit(transfer, DataKind.WRITE)

    def grant(
        self,
        ticket: bytes,
        ranges: Sequence[tuple[Range, int]],
        deadline_ns: int,
        *,
        write: bool = False,
    ) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        self._tickets.grant(ticket, ranges, deadline_ns, write=write)

    def revoke(self, ticket: bytes, *, ended: bool = False) -> bool:  # noqa: ARG002
        """See :class:`kvstore.transport.base.Transport`."""
        return self._tickets.revoke(ticket)

    def poll(self) -> list[TransportEvent]:
        """See :class:`kvstore.transport.base.Transport`."""
        if self._closed:
            return []
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return []
        found: list[TransportEvent] = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def fileno(self) -> int:
        """See :class:`kvstore.transport.base.Transport`."""
        return self._event

    def cancel(self, number: int) -> None:
        """See :class:`kvstore.transport.base.Transport`."""
        self._reader.cancel(number)

    def close(self) -> None:
        """See :class:`kvstore.transport.base.Transport`; may be repeated."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_JOIN_S)
        if self._listener is not None:
            self._listener.close()
        self._reader.close()
        self._owner.close()
        os.close(self._event)
        os.close(self._wake)

    def stats(self) -> dict[str, int]:
        """See :class:`kvstore.transport.base.Transport`."""
        return {
            **self._counts,
            "in_flight_bytes": self._reader.in_flight_bytes,
            "connections_out": self._reader.connections,
            "connections_in": len(self._owner),
            "tickets": len(self._tickets),
        }

    def _submit(self, transfer: PageTransfer, kind: DataKind) -> None:
        self._reader.submit(transfer, kind)
        if not self._closed and transfer.deadline_ns < self._wake_ns:
            os.eventfd_write(self._wake, 1)

    def _tell(self, event: TransportEvent) -> None:
        """Hand over an event; any thread."""
        self._events.append(event)
        if not self._closed:
            os.eventfd_write(self._event, 1)

    # ---- the thread that accepts and keeps deadlines ------------------------------------------

    def _serve(self) -> None:
        accept_from_ns = 0
        while not self._closed:
            now_ns = time.monotonic_ns()
            self._wake_ns = now_ns + int(_TURN_S * 1e9)
            next_ns = self._reader.expire(now_ns)
            ready = select.poll()
            ready.register(self._wake, select.POLLIN)
            if self._listener is not None and now_ns >= accept_from_ns:
                ready.register(self._listener.socket, select.POLLIN)
            elif self._listener is not None:
                self._wake_ns = min(self._wake_ns, accept_from_ns)
            self._wake_ns = min(self._wake_ns, next_ns or self._wake_ns)
            found = {
                each for each, _ in ready.poll(max(self._wake_ns - now_ns, 0) // 1_000_000 + 1)
            }
            if self._wake in found:
                os.eventfd_read(self._wake)
            if found - {self._wake} and not self._accept():
                accept_from_ns = time.monotonic_ns() + int(_FULL_PAUSE_S * 1e9)

    def _accept(self) -> bool:
        """Accept a connection; False if there is no descriptor for it."""
        assert self._listener is not None
        try:
            accepted, _ = self._listener.socket.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return True
        except OSError as error:
            self._counts["accepts_failed"] += 1
            _log.warning("cannot accept a connection to the data port: %s", error)
            return False
        self._owner.take(accepted)
        return True
