"""One connection to a node: requests with deadlines, and messages without an answer.

The calling thread waits for its own answer; there is one request at a time, or several that are
sent together. Messages without an answer never block: they are posted, and sent with the next
request, or as soon as no other thread is writing, or within 50 ms, or at once if nobody has needed
the connection lately. Posted messages belong to this connection: if it breaks before they were
sent, they are never sent on a later one.
"""

import socket
import threading
from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Final

from kvstore.client.answers import check_answer
from kvstore.client.endpoint import (
    RECEIVE_BYTES,
    open_socket,
    send_now,
    set_timeout,
    wait_closed,
)
from kvstore.protocol import wire
from kvstore.protocol.errors import PeerUnreachable, ProtocolError, TransferTimeout

POSTED_MAX: Final = 4096
"""Maximum posted messages; beyond it the connection is closed, which ends its leases."""
_BATCH: Final = 32
_SEND_BYTES: Final = 1 << 15
_CLOSE_TIMEOUT_S: Final = 1.0


class Connection:
    """A connection that is used until its first error; thread-safe.

    The first :meth:`request` must be Hello.

    Args:
        path: the node's socket.
        number: number of the connection among its link's connections.

    Attributes:
        broken: why it cannot be used any more; empty = it can.
        watched: another thread calls :meth:`flush` every 50 ms; otherwise posted messages are sent
            at once. Set by that thread.
        postponed: changes with each message that need not be sent at once.

    Raises:
        PeerUnreachable: nothing listens there.
    """

    def __init__(self, path: str, number: int) -> None:
        self.number = number
        self.broken = ""
        self.watched = True
        self.postponed = 0
        self._path = path
        self._socket = open_socket(path)
        self._timeout_s = 0.0
        self._identifier = 0
        self._posted: deque[bytes] = deque()
        #: Held by the thread that waits for an answer. Taken before the two below.
        self._turn = threading.Lock()
        #: Held by the thread that writes to the socket. Threads without ``_turn`` hold it only for
        #: non-blocking sends.
        self._writing = threading.Lock()
        #: Held while the socket is shut down or closed, because its number could be used again.
        self._ending = threading.Lock()

    def request(self, message: wire.Request, deadline: float) -> wire.Answer:
        """Send a request and wait for its answer, which may be a Failure.

        Args:
            message: the request; this method sets its ``id``.
            deadline: deadline on the clock of :func:`time.monotonic`.

        Raises:
            TransferTimeout: other requests took too long (nothing was sent, the connection still
                works), or the node did (the connection is broken, because the answer may still
                come).
            PeerUnreachable, ProtocolError, OSError: the connection is broken.
        """
        free = self._turn.acquire(blocking=False)
        if not free and not self._turn.acquire(timeout=max(deadline - monotonic(), 0.0)):
            raise TransferTimeout(f"{self._path}: other requests took too long")
        try:
            if self.broken:
                raise PeerUnreachable(f"{self._path}: {self.broken}")
            if monotonic() >= deadline:
                raise TransferTimeout(f"{self._path}: other requests took too long")
            try:
                return self._exchange(message, deadline)
            except BaseException as error:
                self._end(str(error) or type(error).__name__)
                raise
        finally:
            self._turn.release()

    def request_all(self, messages: Sequence[wire.Request], deadline: float) -> list[wire.Answer]:
        """Send requests together and wait for all answers; see :meth:`request`.

        Args:
            messages: they fit the node's buffers, and so do their answers: some hundred KB each.
            deadline: of the last answer.
        """
        if not self._turn.acquire(timeout=max(deadline - monotonic(), 0.0)):
            raise TransferTimeout(f"{self._path}: other requests took too long")
        try:
            if self.broken:
                raise PeerUnreachable(f"{self._path}: {self.broken}")
            try:
                return self._exchange_all(messages, deadline)
            except BaseException as error:
                self._end(str(error) or type(error).__name__)
                raise
        finally:
            self._turn.release()

    def post(self, message: wire.Request, *, now: bool) -> None:
        """Send a message without an answer; never blocks. ``now`` False: within 50 ms."""
        if len(self._posted) >= POSTED_MAX:
            self.abort("it does not read our messages")
            return
        self._posted.append(wire.encode(message))
        self.postponed += not now  # before ``watched`` is read: see Link._maintain
        if now or len(self._posted) >= _BATCH or not self.watched:
            self.flush()

    def flush(self) -> None:
        """Send posted messages, unless another thread is writing, which then sends them."""
        while self._posted and self._writing.acquire(blocking=False):
            try:
                frames = self._take_posted()
                if not self.broken and frames and send_now(self._socket, frames) != len(frames):
                    self.abort("it does not read our messages")
            finally:
                self._writing.release()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until it is broken or closed by the node; returns False on timeout."""
        return bool(self.broken) or wait_closed(self._socket, timeout_s)

    def abort(self, why: str) -> None:
        """Break the connection now; a thread that waits for an answer gets an error."""
        with self._ending:
            self.broken = self.broken or why
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # already closed

    def close(self, why: str) -> bool:
        """Send posted messages and close; returns whether all of them were sent."""
        said = False
        if self._writing.acquire(timeout=_CLOSE_TIMEOUT_S):
            try:
                frames = self._take_posted()
                said = not self.broken and send_now(self._socket, frames) == len(frames)
            finally:
                self._writing.release()
        self.abort(why)
        if self._turn.acquire(timeout=_CLOSE_TIMEOUT_S):  # otherwise its holder closes the socket
            try:
                self._end(why)
            finally:
                self._turn.release()
        return said

    # ---- internal ---------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """Close the socket; the caller holds ``_turn``."""
        self.abort(why)
        with self._writing, self._ending:
            self._posted.clear()
            self._socket.close()

    def _exchange(self, message: wire.Request, deadline: float) -> wire.Answer:
        self._identifier += 1
        message.id = self._identifier  # type: ignore[union-attr]
        frame = wire.encode(message)
        with self._writing:
            self._send(self._take_posted() + frame if self._posted else frame, deadline)
        if self._posted:
            self.flush()
        self._limit(deadline)
        data = self._socket.recv(RECEIVE_BYTES)
        length = wire.frame_length(data) + 4 if len(data) >= 4 else 4
        if len(data) < length:
            data = self._rest(data, deadline)
        answer = wire.decode_answer(memoryview(data)[4:])
        if getattr(answer, "id", 0) != self._identifier:
            raise ProtocolError(f"answer {answer!r} does not belong to request {self._identifier}")
        check_answer(message, answer)
        return answer

    def _exchange_all(self, messages: Sequence[wire.Request], deadline: float) -> list[wire.Answer]:
        first = self._identifier + 1
        for message in messages:
            self._identifier += 1
            message.id = self._identifier  # type: ignore[union-attr]
        with self._writing:
            self._send(self._take_posted() + b"".join(map(wire.encode, messages)), deadline)
        if self._posted:
            self.flush()
        answers: dict[int, wire.Answer] = {}
        reader = wire.FrameReader()
        while len(answers) < len(messages) or reader.unread_bytes:
            self._limit(deadline)
            data = self._socket.recv(RECEIVE_BYTES)
            if not data:
                why = self.broken or "the node closed the connection"
                raise PeerUnreachable(f"{self._path}: {why}")
            for body in reader.feed(data):
                answer = wire.decode_answer(body)
                number = getattr(answer, "id", 0)
                if number in answers or not first <= number <= self._identifier:
                    raise ProtocolError(f"answer {answer!r} belongs to none of these requests")
                check_answer(messages[number - first], answer)
                answers[number] = answer
        return [answers[number] for number in range(first, self._identifier + 1)]

    def _send(self, frame: bytes, deadline: float) -> None:
        sent = max(send_now(self._socket, frame), 0)
        while sent < len(frame):
            self._limit(deadline)
            # Blocks, or raises the error. The kernel's timeout applies to each part it can queue.
            sent += self._socket.send(memoryview(frame)[sent : sent + _SEND_BYTES])

    def _rest(self, data: bytes, deadline: float) -> bytes:
        buffer = bytearray(data)
        while True:
            if len(buffer) >= 4 and len(buffer) >= wire.frame_length(buffer) + 4:
                return bytes(buffer)
            if not data:
                why = self.broken or "the node closed the connection"
                raise PeerUnreachable(f"{self._path}: {why}")
            self._limit(deadline)
            data = self._socket.recv(1 << 20)
            buffer += data

    def _limit(self, deadline: float) -> None:
        """Set the kernel's timeout for the next calls to the deadline."""
        left = deadline - monotonic()
        if left <= 0:
            raise TransferTimeout(f"{self._path}: no answer in time")
        if not self._timeout_s * 0.5 <= left <= self._timeout_s:
            self._timeout_s = left * 1.1
            set_timeout(self._socket, self._timeout_s)

    def _take_posted(self) -> bytes:
        # Other threads may append meanwhile; no message is lost.
        return b"".join(self._posted.popleft() for _ in range(len(self._posted)))
