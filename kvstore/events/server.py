"""Serves a publisher's batches to followers, live and as replays, and answers their questions.

Followers connect to the listeners, or their open connections are passed in, if their data is
tunnelled through another connection.

One thread owns everything and never waits longer than its caller allows. Faults of one follower do
not affect others: an invalid message closes its connection; a follower that does not read loses
batches (and sees the gap), and is disconnected after some time. The number of connections, the
waiting bytes of each, and the kept batches are limited.
"""

import contextlib
import errno
import logging
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

from kvstore.events import questions as asking
from kvstore.events import zmtp
from kvstore.events.connection import FollowerConnection
from kvstore.events.kept import Bounds, KeptBatches
from kvstore.events.questions import ASK
from kvstore.process.faults import Faults
from kvstore.process.listeners import Listener

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence frame that ends a replay."""

PEERS_MAX: Final = 128
"""Maximum connections of followers, including replays."""
_CHECK_S: Final = 0.5
"""Seconds between checks of the deadlines."""
_ACCEPT_PAUSE_S: Final = 0.1
"""Seconds without accepting connections after descriptors ran out."""
_ACCEPTS: Final = 16
"""Connections accepted in one turn."""
_READ_BYTES: Final = 4 << 10
_HEARD_PER_MESSAGE: Final = 256
"""Bytes that each message of a follower counts in addition, see :class:`Allowed`."""
_LIVE_BYTES_MAX: Final = 4 << 20
"""Maximum bytes of live batches that wait for one slow follower."""
_REPLAY_BYTES: Final = 256 << 10
"""Maximum bytes of replays that wait for one follower; the rest is read later."""
_REQUESTS_MAX: Final = 8
"""Replays that one follower may request before it has read the first."""
_TOPICS_MAX: Final = 16
_FULL: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

_log = logging.getLogger(__name__)


class EventServer:
    """Listens for followers, and serves them.

    Attributes:
        counts: replays ``served`` completely and ``cut``, and batches ``lost`` by slow followers.
        faults: closed connections, by cause.
        handed: connections that other threads hand over, each with its side: taken at the next
            turn. They need no token, because whoever made them knows the follower.
    """

    def __init__(
        self,
        live: Listener | None,
        replay: Listener | None,
        *,
        topic: bytes,
        token: bytes,
        waiting_max: int,
        kept: Bounds,
        questions: asking.Questions,
    ) -> None:
        """Take over the listeners.

        Args:
            live: for live batches, or None.
            replay: for replays, or None. Without it, batches are kept from the first connection
                for replays on that is handed over.
            topic: first frame of every batch.
            token: token that followers over TCP must send; empty = none.
            waiting_max: maximum batches that wait for one slow follower.
            kept: limits of the batches kept for replay.
            questions: the questions of followers at ``replay``.
        """
        self.counts: Counter[str] = Counter()
        self._questions = questions
        self.faults = Faults(_log, "a follower of events was disconnected")
        self._topic = topic
        self._token = token
        self._waiting_max = waiting_max
        self._kept = KeptBatches(kept)
        self.handed: deque[tuple[socket.socket, zmtp.Side]] = deque()
        self._listeners = {
            listener.socket: (listener, side)
            for listener, side in ((live, zmtp.PUB), (replay, zmtp.ROUTER))
            if listener is not None
        }
        self._keeps = replay is not None
        self._followers: dict[socket.socket, FollowerConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._accept_at: float | None = None  # while no connection is accepted
        self._checked_at = time.monotonic()
        self._listen()

    def __len__(self) -> int:
        return len(self._followers)

    def watch(self, descriptor: int) -> None:
        """Make :meth:`turn` return when this descriptor is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def turn(self, timeout_s: float) -> bool:
        """Serve all followers that are readable or writable, or wait for one.

        Returns:
            Whether the descriptor of :meth:`watch` is readable.
        """
        woken = False
        due_s = self._checked_at + _CHECK_S - time.monotonic()
        for key, mask in self._selector.select(max(0.0, min(timeout_s, due_s))):
            found = key.fileobj
            if not isinstance(found, socket.socket):
                woken = True
            elif found in self._listeners:
                self._accept(found)
            elif follower := self._followers.get(found):
                self._serve(follower, mask)
        while self.handed:
            raw, side = self.handed.popleft()
            self._keeps = self._keeps or side is zmtp.ROUTER
            self._meet(raw, side, b"")
        if time.monotonic() - self._checked_at >= _CHECK_S:
            self._check()
        return woken

    def send(self, sequence: int, payload: bytes) -> None:
        """Queue a batch for every live follower, and keep it for replay; see :meth:`flush`."""
        data = b""
        for follower in self._followers.values():
            if not any(self._topic.startswith(topic) for topic in follower.topics):
                continue
            data = data or zmtp.encode((self._topic, sequence.to_bytes(8, "big"), payload))
            room = follower.waiting_bytes + len(data) <= _LIVE_BYTES_MAX or not follower.waiting
            if room and len(follower.waiting) < self._waiting_max:
                follower.queue(data)
            else:
                self.counts["lost"] += 1
        if self._keeps:
            self._kept.add(sequence, payload)

    def flush(self) -> bool:
        """Write as much as sockets accept; returns True if live batches still wait."""
        for follower in [f for f in self._followers.values() if f.waiting or f.question]:
            self._push(follower)
        return any(f.waiting for f in self._followers.values() if f.side is zmtp.PUB)

    def close(self) -> None:
        """Close all connections and listeners."""
        for follower in list(self._followers.values()):
            self._drop(follower, "")
        for raw, _ in self.handed:
            raw.close()
        for listener, _ in self._listeners.values():
            listener.close()
        self._selector.close()

    def _listen(self) -> None:
        for listening in self._listeners:
            self._selector.register(listening, selectors.EVENT_READ)
        self._accept_at = None

    def _accept(self, listening: socket.socket) -> None:
        side = self._listeners[listening][1]
        for _ in range(_ACCEPTS):
            if self._accept_at is not None:
                return
            try:
                raw, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _FULL:
                    self._pause(str(error))
                return
            token = b""
            if raw.family != socket.AF_UNIX:
                token = self._token
                with contextlib.suppress(OSError):  # already closed
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._meet(raw, side, token)

    def _meet(self, raw: socket.socket, side: zmtp.Side, token: bytes) -> None:
        """Start to serve a connection."""
        if len(self._followers) >= PEERS_MAX and not self._make_room():
            self.faults.note("full", f"{PEERS_MAX} are connected already")
            raw.close()
            return
        raw.setblocking(False)  # noqa: FBT003
        follower = self._followers[raw] = FollowerConnection(raw, side, token, time.monotonic())
        self._selector.register(raw, selectors.EVENT_READ)
        follower.mask = selectors.EVENT_READ
        follower.queue(follower.peer.outgoing())
        self._push(follower)

    def _pause(self, why: str) -> None:
        """Accept no connections for a while."""
        self.faults.note("no_descriptor", why)
        for listening in self._listeners:
            self._selector.unregister(listening)
        self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S

    def _make_room(self) -> bool:
        """Close the oldest connection in its handshake; returns False if there is none."""
        for follower in self._followers.values():
            if not follower.peer.ready:
                self._drop(follower, "full", "its place was needed during its handshake")
                return True
        return False

    def _check(self) -> None:
        """Check the deadlines."""
        now = self._checked_at = time.monotonic()
        for follower in list(self._followers.values()):
            follower.heard = max(0, follower.heard - follower.allowed.check_bytes)
            if cause := follower.overdue(now):
                self._drop(follower, cause, "it sent or read nothing for too long")
        if self._accept_at is not None and now >= self._accept_at:
            self._listen()

    def _serve(self, follower: FollowerConnection, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            try:
                data = follower.raw.recv(_READ_BYTES)
                if not data:
                    self._drop(follower, "")
                    return
                messages = follower.peer.feed(data)
            except BlockingIOError:
                data, messages = b"", []
            except OSError:
                self._drop(follower, "")
                return
            except zmtp.PeerError as error:
                self._say(follower)
                self._drop(follower, error.cause, str(error))
                return
            self._say(follower)
            follower.heard += len(data) + _HEARD_PER_MESSAGE * len(messages)
            if follower.heard > follower.allowed.burst_bytes:
                self._drop(follower, "flood", "it sends more than a follower should")
                return
            for message in messages:
                if not self._hear(follower, message):
                    return
        self._push(follower)

    def _say(self, follower: FollowerConnection) -> None:
        """Send pending protocol commands, including an error before closing."""
        said = follower.peer.outgoing()
        if said:
            follower.queue(said)
        try:
            follower.write(time.monotonic())
        except OSError:  # closed; the next turn notices it
            return

    def _hear(self, follower: FollowerConnection, message: zmtp.Message) -> bool:
        """Handle one message; returns False if the connection was closed."""
        if follower.side is zmtp.PUB:
            topic = message[0][1:]
            if message[0][:1] == b"\x01" and len(message) == 1:
                follower.topics.add(topic)
            elif message[0][:1] == b"\x00" and len(message) == 1:
                follower.topics.discard(topic)
            else:
                self._drop(follower, "request", "no subscription")
                return False
            if len(follower.topics) > _TOPICS_MAX:
                self._drop(follower, "request", "too many subscriptions")
                return False
            return True
        if message[:2] == [b"", ASK]:
            self._ask(follower, message)
            return self._bounded(follower)
        wellformed = len(message) == 2 and message[0] == b"" and len(message[1]) == 8
        if not wellformed:
            self.counts["cut"] += 1
            follower.queue(self._replayed(END_OF_REPLAY, b""))
        elif len(follower.replays) >= _REQUESTS_MAX:
            self.counts["cut"] += len(follower.replays)
            self._drop(follower, "request", "it requests replays without reading them")
            return False
        else:
            first = int.from_bytes(message[1], "big")
            follower.replays.append(self._kept.position(first))
        return self._bounded(follower)

    def _ask(self, follower: FollowerConnection, message: zmtp.Message) -> None:
        """Start to answer a question, or refuse it."""
        try:
            follower.question = self._questions.begin(message, follower.question)
        except asking.RefusedError as error:
            follower.queue(self._replayed(asking.REFUSED, error.payload))

    def _bounded(self, follower: FollowerConnection) -> bool:
        """Whether the waiting bytes of a follower are within the limit; else close it."""
        if follower.waiting_bytes <= _LIVE_BYTES_MAX:
            return True
        self._drop(follower, "deaf", "it sends requests without reading the answers")
        return False

    def _push(self, follower: FollowerConnection) -> None:
        """Write as much as the socket accepts, and wait for it if data is left."""
        try:
            for data in self._replay(follower):
                follower.queue(data)
            for data in self._answer(follower):
                follower.queue(data)
            follower.write(time.monotonic())
        except OSError:
            self._drop(follower, "")
            return
        if not self._bounded(follower):
            return
        mask = selectors.EVENT_READ
        asks = follower.question is not None and follower.question.is_waiting
        if follower.waiting or follower.replays or asks:
            mask |= selectors.EVENT_WRITE
        if mask != follower.mask:
            self._selector.modify(follower.raw, mask)
            follower.mask = mask

    def _replay(self, follower: FollowerConnection) -> Iterator[bytes]:
        """The next messages of its replays, as long as few bytes wait for it."""
        while follower.replays and follower.waiting_bytes < _REPLAY_BYTES:
            found = self._kept.next(follower.replays[0])
            if found is not None:
                at, kept = found
                follower.replays[0] = at + 1
                yield self._replayed(kept.sequence.to_bytes(8, "big"), kept.payload)
            else:
                follower.replays.popleft()
                self.counts["served"] += 1
                yield self._replayed(END_OF_REPLAY, b"")

    def _answer(self, follower: FollowerConnection) -> Iterator[bytes]:
        """The next messages of the answer to its question, likewise."""
        while follower.question is not None and follower.waiting_bytes < _REPLAY_BYTES:
            message = follower.question.take()
            if message is None:
                return
            word, payload = message
            if word in (asking.END, asking.REFUSED):
                self._questions.end(follower.question, answered=word == asking.END)
                follower.question = None
            yield self._replayed(word, payload)

    def _replayed(self, sequence: bytes, payload: bytes) -> bytes:
        return zmtp.encode((b"", self._topic, sequence, payload))

    def _drop(self, follower: FollowerConnection, cause: str, said: str = "") -> None:
        """Close a connection; no cause = the follower closed it."""
        if cause:
            self.faults.note(cause, said)
        self.counts["cut"] += len(follower.replays)
        follower.replays.clear()
        if follower.question is not None:
            self._questions.end(follower.question, answered=False)
            follower.question = None
        del self._followers[follower.raw]
        self._selector.unregister(follower.raw)
        follower.raw.close()
