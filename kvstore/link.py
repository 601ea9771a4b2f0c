"""A client's connection to a node: requests under deadlines, re-made by itself.

The calling thread does its own round trips. A missed deadline or a broken socket closes the
connection: from then on every call fails at once (``PeerUnreachable``) until a background thread
has connected again, so an engine never waits twice for a node that is stopped. The background
thread also notices at once when the node goes away and unmaps its memory.
"""

import logging
import os
import select
import socket
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Final, Protocol

from kvstore import wire
from kvstore.endpoint import (
    CONNECT_TIMEOUT_S,
    as_transfer_error,
    open_socket,
    send_now,
    set_timeout,
)
from kvstore.errors import (
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
    error_from_code,
)
from kvstore.mapping import Mapping

log = logging.getLogger(__name__)

_BACKOFF_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_RECEIVE_BYTES: Final = 1 << 16
_FETCH_MAX: Final = 64
_ORIGIN_BYTES: Final = 16
_LATER_MAX: Final = 32
_LATER_MS: Final = 50
_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


class NodeLink(Protocol):
    """What the client needs of a node, whether it is behind a socket or in this process."""

    @property
    def epoch(self) -> int:
        """Rises with every new connection; what was opened on an earlier one is void."""

    @property
    def connected(self) -> bool:
        """Whether a request may succeed now."""

    @property
    def quota_bytes(self) -> int:
        """What this engine may have pinned or reserved at the node; 0 while that is not known."""

    def request(
        self, message: wire.Request, timeout_s: float, epoch: int | None = None
    ) -> wire.Answer:
        """Send a request and wait for its answer.

        Args:
            message: gets its ``id`` here.
            timeout_s: longest wait.
            epoch: the connection it is meant for; on another one it is not sent.

        Raises:
            TransferTimeout, PeerUnreachable: no answer.
            KVStoreError: the node refused; its own error.
        """

    def send(self, message: wire.Request) -> None:
        """Send a message that has no answer; lost without a word when the node is away."""

    def send_later(self, message: wire.Request) -> None:
        """Send a message that has no answer and no hurry: with the next one, or soon."""

    @contextmanager
    def moving(self) -> Iterator[Mapping]:
        """Touch the node's memory inside: it stays mapped, and the node knows when it ended."""

    def close(self) -> None:
        """End the connection and unmap."""


class Link:
    """A :class:`NodeLink` over the node's Unix socket.

    Args:
        path: the socket.
        name: what the node calls this engine in its statistics.
        session: the session to join; empty for a new one.
        level: at which it logs that the node is away: once an engine is enough.
    """

    def __init__(
        self, path: str, name: str, session: bytes = b"", level: int = logging.WARNING
    ) -> None:
        """Connect if the node is there; otherwise the background thread goes on trying."""
        self.path = path
        self._level = level
        self.name = name
        self.session = session
        self.quota_bytes = 0
        self._epoch = 0
        self._origin = os.urandom(_ORIGIN_BYTES)
        #: Moves of earlier epochs are those of the process that this one was forked from.
        self._first_epoch = 0
        self.why = "not connected yet"
        self._refusal = ""
        self._socket: socket.socket | None = None
        self._mapping: Mapping | None = None
        self._retired: list[Mapping] = []
        self._moves: Counter[int] = Counter()
        self._users: Counter[int] = Counter()
        self._identifier = 0
        #: Frames that wait for the next message; all of them for the present connection.
        self._later: deque[bytes] = deque()
        self._timeout_s = 0.0
        self._unsettled = False
        self._closing = False
        #: None in a forked child until its first request.
        self._thread: threading.Thread | None = None
        self._locks()
        try:
            self._connect()
        except KVStoreError as error:
            self.why = self._refusal = str(error)
            log.log(level, "%s: no node at %s (%s); all misses until there is", name, path, error)
        self._start()
        _links.add(self)

    def _locks(self) -> None:
        #: The socket and everything said on it. Taken before ``_state``.
        self._lock = threading.Lock()
        #: Moves, mappings and the epoch.
        self._state = threading.Lock()
        self._wake = threading.Event()
        self._reviving = threading.Lock()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._maintain, name="kvstore-link", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """See :class:`NodeLink`."""
        if self._thread is None:
            self._revive()
        return self._epoch

    @property
    def connected(self) -> bool:
        """Whether a request may succeed now."""
        return self._socket is not None

    def request(
        self, message: wire.Request, timeout_s: float, epoch: int | None = None
    ) -> wire.Answer:
        """See :class:`NodeLink`."""
        if self._thread is None:
            self._revive()
        deadline = monotonic() + timeout_s
        if self._socket is None:
            raise PeerUnreachable(f"{self.path}: {self.why}")
        if not (self._lock.acquire(blocking=False) or self._lock.acquire(timeout=timeout_s)):
            raise TransferTimeout(f"{self.path}: other requests took longer than {timeout_s} s")
        try:
            connection = self._socket
            if connection is None:
                raise PeerUnreachable(f"{self.path}: {self.why}")
            if epoch is not None and epoch != self._epoch:
                raise PeerUnreachable(f"{self.path}: connected anew in the middle of a call")
            try:
                answer = self._exchange(connection, message, deadline)
            except (OSError, KVStoreError) as error:
                self._disconnect(str(error))
                raise as_transfer_error(error, self.path) from error
        finally:
            self._lock.release()
        if isinstance(answer, wire.Failure):
            raise error_from_code(answer.code, answer.message, answer.field)
        return answer

    def send(self, message: wire.Request) -> None:
        """See :class:`NodeLink`."""
        frame = wire.encode(message)
        with self._lock:
            if self._socket is not None and send_now(self._socket, frame) != len(frame):
                self._disconnect("it does not take our messages")

    def send_later(self, message: wire.Request) -> None:
        """See :class:`NodeLink`.

        A node that is woken for it would keep this process from its own work for some 50 µs.
        """
        self._later.append(wire.encode(message))
        if len(self._later) >= _LATER_MAX:
            self._flush()

    def _flush(self) -> None:
        """Send what has waited."""
        with self._lock:
            connection = self._socket
            if connection is None or not self._later:
                return
            frames = self._take_later()
            if send_now(connection, frames) != len(frames):
                self._disconnect("it does not take our messages")

    def _take_later(self) -> bytes:
        # Other threads may append meanwhile; none is lost.
        return b"".join(self._later.popleft() for _ in range(len(self._later)))

    @contextmanager
    def moving(self) -> Iterator[Mapping]:
        """See :class:`NodeLink`."""
        if self._thread is None:
            self._revive()
        with self._state:
            mapping, epoch = self._mapping, self._epoch
            if mapping is None:
                raise PeerUnreachable(f"{self.path}: {self.why}")
            self._moves[epoch] += 1
            self._users[id(mapping)] += 1
        try:
            yield mapping
        finally:
            if epoch >= self._first_epoch:
                self._moved(mapping, epoch)

    def close(self) -> None:
        """See :class:`NodeLink`."""
        self._flush()
        self._closing = True
        self._wake.set()
        with self._lock:
            self._disconnect("closed")
        if self._thread is not None:
            self._thread.join(CONNECT_TIMEOUT_S * 3)
        with self._state:
            mappings = [*self._retired, *([self._mapping] if self._mapping else [])]
            # What is still being moved or viewed is unmapped when that ends.
            self._retired = [mapping for mapping in mappings if self._users[id(mapping)]]
            self._mapping = None
            idle = [mapping for mapping in mappings if mapping not in self._retired]
        for mapping in idle:
            mapping.close()

    # ---- one exchange -----------------------------------------------------------------------

    def _exchange(
        self, connection: socket.socket, message: wire.Request, deadline: float
    ) -> wire.Answer:
        self._identifier += 1
        message.id = self._identifier  # type: ignore[union-attr]
        self._limit(connection, deadline)
        frame = wire.encode(message)
        if self._later:
            frame = self._take_later() + frame
        sent = send_now(connection, frame)
        if sent < len(frame):
            connection.sendall(frame[max(sent, 0) :])  # waits, or raises what is wrong
        data = connection.recv(_RECEIVE_BYTES)
        length = wire.frame_length(data) + 4 if len(data) >= 4 else 4
        if len(data) < length:
            data = self._rest(connection, data, deadline)
        answer = wire.decode_answer(memoryview(data)[4:])
        if getattr(answer, "id", 0) != self._identifier:
            raise ProtocolError(f"answer {answer!r} does not belong to request {self._identifier}")
        return answer

    def _rest(self, connection: socket.socket, data: bytes, deadline: float) -> bytes:
        buffer = bytearray(data)
        while True:
            if len(buffer) >= 4 and len(buffer) >= wire.frame_length(buffer) + 4:
                return bytes(buffer)
            self._limit(connection, deadline)
            more = connection.recv(1 << 20)
            if not more:
                raise PeerUnreachable(f"{self.path}: the node closed the connection")
            buffer += more

    def _limit(self, connection: socket.socket, deadline: float) -> None:
        """Let the kernel end the next calls when the deadline passes."""
        left = deadline - monotonic()
        if left <= 0:
            raise TransferTimeout(f"{self.path}: no answer in time")
        if not self._timeout_s * 0.5 <= left <= self._timeout_s:
            self._timeout_s = left * 1.1
            set_timeout(connection, self._timeout_s)

    # ---- connecting -------------------------------------------------------------------------

    def _connect(self) -> None:
        """One attempt to connect and to say Hello.

        Raises:
            KVStoreError: why not.
        """
        connection = open_socket(self.path)
        try:
            deadline = monotonic() + CONNECT_TIMEOUT_S
            hello = wire.Hello(
                0, wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR, self.name, self.session, self._origin
            )
            self._timeout_s = 0.0
            self._later.clear()  # what was to be said on an earlier connection
            answer = self._exchange(connection, hello, deadline)
            if isinstance(answer, wire.Failure):
                raise error_from_code(answer.code, answer.message, answer.field)
            if not isinstance(answer, wire.Welcome):
                raise ProtocolError(f"{type(answer).__name__} is no answer to Hello")
        except (OSError, KVStoreError) as error:
            connection.close()
            raise as_transfer_error(error, self.path) from error
        with self._lock, self._state:
            if self._closing:
                connection.close()
                return
            self._adopt(answer)
            self._socket = connection
            self._unsettled = True
        self._settle()

    def _adopt(self, welcome: wire.Welcome) -> None:
        """Take over what the node said of itself; memory of an earlier boot is retired."""
        self.session = welcome.session
        self.quota_bytes = welcome.quota_bytes
        self._epoch += 1
        old = self._mapping
        if old is None or old.boot != welcome.boot:
            self._mapping = Mapping(welcome.boot, self._fetch)
            if old is not None:
                self._retire(old)

    def _retire(self, mapping: Mapping) -> None:
        if self._users[id(mapping)]:
            self._retired.append(mapping)
        else:
            mapping.close()

    def _disconnect(self, why: str) -> None:
        """Close the connection; the caller holds ``_lock``."""
        connection, self._socket = self._socket, None
        self._later.clear()  # its leases end with it
        if connection is None:
            return
        self.why = why
        connection.close()
        self._wake.set()
        if not self._closing:
            log.log(self._level, "%s: lost the node at %s (%s); misses until it is back",
                    self.name, self.path, why)  # fmt: skip

    def _maintain(self) -> None:
        attempt = 0
        while not self._closing:
            connection = self._socket
            if connection is not None:
                attempt = 0
                self._watch(connection)
                continue
            self._wake.wait(_BACKOFF_S[min(attempt, len(_BACKOFF_S) - 1)])
            self._wake.clear()
            try:
                self._connect()
            except KVStoreError as error:
                self.why = str(error)
                attempt += 1
                if isinstance(error, PeerUnreachable):
                    self._drop_mapping()
                elif isinstance(error, ProtocolError) and str(error) != self._refusal:
                    self._refusal = str(error)
                    log.log(self._level, "%s: %s; misses until that changes", self.name, error)
            else:
                log.info("%s: connected to the node at %s again", self.name, self.path)

    def _watch(self, connection: socket.socket) -> None:
        """Return once the node has gone; then drop its memory if nothing uses it."""
        poll = select.poll()
        try:
            poll.register(connection.fileno(), select.POLLRDHUP)
            gone = poll.poll(_LATER_MS)
        except (OSError, ValueError):
            return  # closed by another thread meanwhile
        if not gone:
            if self._later:
                self._flush()
            return
        with self._lock:
            if self._socket is connection:
                self._disconnect("the node closed the connection")
        self._drop_mapping()

    def _drop_mapping(self) -> None:
        """The node is gone for good: give its memory back as soon as nothing here uses it."""
        with self._state:
            mapping, self._mapping = self._mapping, None
            if mapping is not None:
                self._retire(mapping)

    def _fetch(self, numbers: Sequence[int]) -> Sequence[int]:
        """Descriptors of extents, over a short connection of their own."""
        descriptors: list[int] = []
        for start in range(0, len(numbers), _FETCH_MAX):
            part = list(numbers[start : start + _FETCH_MAX])
            connection = open_socket(self.path)
            try:
                connection.sendall(wire.encode(wire.FetchExtents(self.session, part)))
                data, got, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, len(part))
                descriptors += got
                if not data:
                    raise PeerUnreachable(f"{self.path}: the node closed the connection")
                answer = wire.decode_answer(memoryview(data)[4:])
                if isinstance(answer, wire.Failure):
                    raise error_from_code(answer.code, answer.message, answer.field)
                if len(got) != len(part):
                    raise ProtocolError(f"{len(got)} descriptors came for {len(part)} extents")
            except (OSError, KVStoreError) as error:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise as_transfer_error(error, self.path) from error
            finally:
                connection.close()
        return descriptors

    # ---- moves ------------------------------------------------------------------------------

    def _moved(self, mapping: Mapping, epoch: int) -> None:
        closable: Mapping | None = None
        with self._state:
            self._moves[epoch] -= 1
            if not self._moves[epoch]:
                del self._moves[epoch]
            self._users[id(mapping)] -= 1
            if not self._users[id(mapping)]:
                del self._users[id(mapping)]
                if mapping in self._retired:
                    self._retired.remove(mapping)
                    closable = mapping
        if closable is not None:
            closable.close()
        if self._unsettled:
            self._settle()

    def _settle(self) -> None:
        """Tell the node once that nothing begun on earlier connections moves bytes any more."""
        with self._state:
            if not self._unsettled or any(epoch < self._epoch for epoch in self._moves):
                return
            self._unsettled = False
        self.send(wire.Settled())

    # ---- fork -------------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child: give up what is the parent's; the next request connects anew."""
        self._locks()
        inherited, self._socket = self._socket, None
        if inherited is not None:
            inherited.close()
        for mapping in [*self._retired, *([self._mapping] if self._mapping else [])]:
            mapping.abandon()
        self._mapping, self._retired = None, []
        self._moves.clear()
        self._users.clear()
        self._unsettled = False
        self._later.clear()
        self._origin = os.urandom(_ORIGIN_BYTES)
        self._epoch += 1
        self._first_epoch = self._epoch
        self.why = "forked"
        self._thread = None

    def _revive(self) -> None:
        """The first request or move of a forked child."""
        with self._reviving:
            if self._thread is not None:
                return
            try:
                self._connect()
            except KVStoreError as error:
                self.why = str(error)
            self._start()


def _after_fork() -> None:
    for link in list(_links):
        link.forked()


os.register_at_fork(after_in_child=_after_fork)
