"""One connection of a follower of events: its waiting data, and limits on what it sends."""

import socket
import time
from collections import deque
from itertools import islice
from typing import Final, NamedTuple

from kvstore.events import questions as asking
from kvstore.events import zmtp

_HANDSHAKE_S: Final = 5.0
_DEAF_S: Final = 120.0
"""A connection that reads nothing for this long while data waits for it is closed."""
_WRITE_BYTES: Final = 1 << 20
"""Bytes written to one follower before the next one is served."""
_BUFFERS: Final = 64


class Allowed(NamedTuple):
    """Limits on what a follower sends; serving a flood would take the GIL from the node.

    Attributes:
        message: limits of one message.
        burst_bytes: bytes in a burst.
        check_bytes: bytes in addition per check of the deadlines.
    """

    message: zmtp.MessageLimits
    burst_bytes: int
    check_bytes: int


_ALLOWED: Final = {
    zmtp.PUB: Allowed(zmtp.MessageLimits(1_024, 8), 64 << 10, 4 << 10),
    zmtp.ROUTER: Allowed(zmtp.MessageLimits(asking.QUESTION_BYTES_MAX, 8), 512 << 10, 128 << 10),
}


class FollowerConnection:
    """One connection of a follower. Belongs to the publisher's thread.

    Attributes:
        raw: its socket.
        side: type of our side.
        allowed: what the follower may send.
        peer: its protocol.
        waiting: data to send, ``waiting_bytes`` in total.
        topics: subscriptions.
        replays: next batch of each replay.
        question: its open question.
        mask: the events for which its socket is polled.
        heard: see :class:`Allowed`.
    """

    def __init__(self, raw: socket.socket, side: zmtp.Side, token: bytes, now: float) -> None:
        """Serve a connected, non-blocking socket.

        Args:
            raw: the socket.
            side: type of our side.
            token: token that the follower must send; empty = none.
            now: monotonic time, in seconds.
        """
        self.raw = raw
        self.side = side
        self.allowed = _ALLOWED[side]
        self.peer = zmtp.ZmtpPeer(side, self.allowed.message, token=token, server=True)
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self._sent_of_first = 0
        self.topics: set[bytes] = set()
        self.replays: deque[int] = deque()
        self.question: asking.OpenQuestion | None = None
        self._came = now
        self._since = now  # time of the last read, or since data waits
        self.mask = 0
        self.heard = 0

    def queue(self, data: bytes) -> None:
        """Add data to send."""
        if not self.waiting:
            self._since = time.monotonic()
        self.waiting.append(data)
        self.waiting_bytes += len(data)

    def overdue(self, now: float) -> str:
        """Why its connection must be closed; empty if not."""
        if not self.peer.ready:
            return "handshake" if now - self._came > _HANDSHAKE_S else ""
        if self.question is not None:
            if now > self.question.deadline:
                return "late"
            if self.waiting and now - self._since > asking.STALLED_S:
                return "deaf"
        return "deaf" if self.waiting and now - self._since > _DEAF_S else ""

    def write(self, now: float) -> None:
        """Write as much as the socket accepts.

        Raises:
            OSError: the connection is broken.
        """
        left = _WRITE_BYTES
        while self.waiting and left > 0:
            first = memoryview(self.waiting[0])[self._sent_of_first :]
            try:
                sent = self.raw.sendmsg([first, *islice(self.waiting, 1, _BUFFERS)])
            except BlockingIOError:
                return
            self._since = now
            left -= sent
            self.waiting_bytes -= sent
            sent += self._sent_of_first
            while self.waiting and sent >= len(self.waiting[0]):
                sent -= len(self.waiting.popleft())
            self._sent_of_first = sent
