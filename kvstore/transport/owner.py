"""The owner's side of ``tcp``: peers connect, show tickets, and read or write bytes.

Each connection has a thread; their number is limited. A connection without a valid request so far
is **silent**. Few of those are allowed, and a new one closes the oldest: strangers cannot keep
peers out. One that has made requests and waits for the next gives its place to a peer that asks:
readers keep connections that they do not use, and make a new one when they need it.
"""

import logging
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import KVStoreError, PeerUnreachable, ProtocolError
from kvstore.transport.frames import (
    HEAD_BYTES,
    RANGE_BYTES,
    DataHead,
    DataKind,
    DataStatus,
    pack_answer,
    read_head,
)
from kvstore.transport.grants import TicketRefused, Tickets
from kvstore.transport.streams import DataStream, receive_bytes, stream_of

FIRST_S = 5.0
"""A connection must have made its first request within this time, TLS handshake included."""
SILENT_MAX = 16
IDLE_S: Final = 120.0
"""A connection without a request for this long is closed; readers close theirs earlier."""
_JOIN_S: Final = 5.0
_log: Final = logging.getLogger(__name__)


class _Caller:
    """One connection.

    Attributes:
        silent: it has not made a valid request yet.
        idle_ns: since when it waits for its next request; 0 = it does not.
        replaced: it has given its place to another one, and is ending.
    """

    __slots__ = ("idle_ns", "replaced", "silent", "stream", "thread")

    def __init__(self, stream: DataStream) -> None:
        self.stream = stream
        self.silent, self.replaced = True, False
        self.idle_ns = 0
        self.thread: threading.Thread | None = None


class PageOwner:
    """Serves the connections of peers.

    Args:
        tickets: what they may ask for.
        context: for TLS; None = none.
        connections_max: connections that have made a request.
        counts: where it counts.
    """

    def __init__(
        self,
        tickets: Tickets,
        context: ssl.SSLContext | None,
        connections_max: int,
        counts: Counter[str],
    ) -> None:
        self._tickets = tickets
        self._context = context
        self._connections_max = connections_max
        self._counts = counts
        self._lock = threading.Lock()
        self._callers: dict[_Caller, None] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._callers)

    def take(self, accepted: socket.socket) -> None:
        """Serve a new connection in a thread of its own."""
        try:
            caller = _Caller(stream_of(accepted, self._context))
        except PeerUnreachable:
            self._count("connections_failed")
            return
        with self._lock:
            silent = [one for one in self._callers if one.silent]
            refused = self._closed or len(self._callers) >= self._connections_max + SILENT_MAX
            if not refused:
                self._callers[caller] = None
        if refused:
            self._refuse(caller)
            return
        if len(silent) >= SILENT_MAX:
            self._count("connections_refused")
            silent[0].stream.shutdown()
        thread = threading.Thread(
            target=self._run, args=(caller,), name="kvstore-data-owner", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            _log.warning("refused a connection to the data port: %s", error)
            self._refuse(caller)
            return
        caller.thread = thread

    def _refuse(self, caller: _Caller) -> None:
        self._count("connections_refused")
        self._forget(caller)
        caller.stream.close()

    def close(self) -> None:
        """Break all connections, and wait until nothing is read or written any more."""
        with self._lock:
            self._closed = True
            callers = list(self._callers)
        for caller in callers:
            caller.stream.shutdown()
        for caller in callers:
            if caller.thread is not None:
                caller.thread.join(_JOIN_S)

    # ---- a connection's thread --------------------------------------------------------------

    def _run(self, caller: _Caller) -> None:
        stream, deadline_ns = caller.stream, _after(FIRST_S)
        try:
            stream.begin(deadline_ns)
            while self._answer(caller, stream, deadline_ns):
                caller.idle_ns = time.monotonic_ns()
                deadline_ns = _after(IDLE_S)
        except KVStoreError as error:
            # A peer may close, or say nothing for long, between two requests.
            if caller.silent or isinstance(error, ProtocolError):
                self._count("connections_failed")
                _log.debug("a connection for pages ended: %s", error)
        finally:
            stream.close()
            self._forget(caller)

    def _answer(self, caller: _Caller, stream: DataStream, deadline_ns: int) -> bool:
        """Answer one request; returns whether another may follow."""
        try:
            head = read_head(receive_bytes(stream, HEAD_BYTES, deadline_ns))
        except ProtocolError:
            stream.send([pack_answer(DataStatus.PROTOCOL)], _after(FIRST_S))
            raise
        caller.idle_ns = 0
        deadline_ns = _after(head.budget_ms / 1e3)
        try:
            first_ns = min(deadline_ns, _after(FIRST_S))
            ranges = receive_bytes(stream, head.range_count * RANGE_BYTES, first_ns)
            with self._tickets.using(head, ranges, stream) as (places, end_ns):
                if not self._admit(caller):
                    return False
                deadline_ns = min(deadline_ns, end_ns)
                answer = self._move(head, places, stream, deadline_ns)
            if answer:  # whoever hears that a write has ended may revoke its ticket at once
                stream.send([answer], deadline_ns)
        except TicketRefused as refusal:
            self._count("requests_refused")
            stream.send([pack_answer(refusal.status)], deadline_ns)
            return False  # who asks for what it must not have makes a new connection
        except KVStoreError:
            self._count("requests_failed")
            raise
        return True

    def _admit(self, caller: _Caller) -> bool:
        """Note that it has a ticket; returns False if too many others have and use theirs."""
        with self._lock:
            if caller.silent:
                others = [one for one in self._callers if not (one.silent or one.replaced)]
                if len(others) >= self._connections_max and not self._replace_idle(others):
                    self._counts["connections_refused"] += 1
                    return False
                caller.silent = False
        return True

    def _replace_idle(self, callers: Sequence[_Caller]) -> bool:
        """End the one that has waited longest for a request; False if none waits; under the lock.

        Its peer, which may be asking just now, makes a new one.
        """
        idle = [one for one in callers if one.idle_ns]
        if not idle:
            return False
        oldest = min(idle, key=lambda one: one.idle_ns)
        oldest.replaced = True
        oldest.stream.shutdown()
        self._counts["connections_replaced"] += 1
        return True

    def _move(
        self,
        head: DataHead,
        places: Sequence[tuple[int, int]],
        stream: DataStream,
        deadline_ns: int,
    ) -> bytes:
        """Send the bytes of a read, or receive those of a write; returns the status to send."""
        total = sum(length for _, length in places)
        memory = [memory_at(*place) for place in places]
        accepted = pack_answer(DataStatus.OK, total)
        if head.kind == DataKind.READ:
            stream.send([accepted, *memory], deadline_ns)
            self._count("sent_bytes", total)
            return b""
        stream.send([accepted], deadline_ns)
        stream.receive(memory, deadline_ns)
        self._count("taken_bytes", total)
        return accepted

    def _forget(self, caller: _Caller) -> None:
        with self._lock:
            self._callers.pop(caller, None)

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


def _after(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)
