"""The threads of a link, and its queues of messages and jobs.

A link is two connections, so that each is used in one direction by one thread: decode writes its
messages on one, prefill its messages and ranges on the other. If one ends, so does the other.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from kvstore.handoff.effects import PushJob
from kvstore.handoff.greeting import SealedStream
from kvstore.handoff.messages import FromDecode, FromPrefill, HandoffPing, encode_message
from kvstore.handoff.states import FailureCode, Patience
from kvstore.process.faults import Faults
from kvstore.protocol.errors import KVStoreError, PeerUnreachable, ProtocolError, TransferTimeout

PING_S: Final = 0.4
"""A ping is sent after this time without other data: twice within the shortest silence allowed."""
SEND_S: Final = 15.0
"""A frame that is not written within this time closes its link, unless the silence limit is
longer."""
TICK_S: Final = 5.0
"""A call of a ticker that takes longer is not waited for."""
IDLE_S = 1.0
"""A link on which no handoff lives gives way to another one after this time: its last messages have
arrived by then."""
MESSAGES_MAX: Final = 4_096
"""Messages that wait to be written; a peer that reads no more than that has its link closed."""
_REFUSALS: Final = ("foreign_messages", "repeated_messages", "failed_protocol", "failed_refused")
_LOG: Final = logging.getLogger(__name__)
_NEAR_BYTES: Final = 160 * 1024
"""Linux doubles it. Pushes are equally fast from 112 to 192 KiB, and take half as long again with
256."""
_PING: Final = encode_message(HandoffPing())


def fit_send_buffer(connection: socket.socket) -> None:
    """Limit the send buffer of a connection to this machine, so that its data stays in the cache.

    Data in the socket is written by one core and read by another. With the buffers that Linux grows
    for a distant peer, megabytes, both access memory. Connections to distant peers keep those.
    """
    with contextlib.suppress(OSError):  # it is broken already: whoever uses it finds out
        if connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NEAR_BYTES)


def send_limit_s(patience: Patience) -> float:
    """Seconds after which a frame that is not written closes its link."""
    return max(SEND_S, patience.silence_s)


def refusals(counts: Counter[str]) -> int:
    """How many messages a core has refused that were wrong, and not only late."""
    return sum([counts.get(name, 0) for name in _REFUSALS])


def note_refused(
    faults: Faults, link: "PushLink", message: FromDecode | FromPrefill, counts: Counter[str],
    before: int,
) -> None:  # fmt: skip
    """Log a message with its peer if a core has refused it; ``before`` is :func:`refusals`."""
    if refusals(counts) > before and not isinstance(message, HandoffPing):
        what = f"{type(message).__name__} about room {message.room} was refused"
        faults.note("refused", f"{link.peer}: {what}")


def cause_of(error: KVStoreError) -> FailureCode:
    """Why a link ends on which reading has failed."""
    if isinstance(error, TransferTimeout):
        return FailureCode.PEER_SILENT
    return FailureCode.PROTOCOL if isinstance(error, ProtocolError) else FailureCode.PEER_CLOSED


class _Used(Protocol):
    """Links of which one may give way."""

    @property
    def used_ns(self) -> int:
        """When something was last put on them, in ``time.monotonic_ns()``."""


_Links = TypeVar("_Links", bound=_Used)


def longest_idle(found: Iterable[_Links]) -> _Links | None:
    """Of links on which no handoff lives, those that were used longest ago.

    Returns:
        the links; None = there are none, or they were used within :data:`IDLE_S`.
    """
    longest = min(found, key=lambda one: one.used_ns, default=None)
    since_ns = time.monotonic_ns() - int(IDLE_S * 1e9)
    return longest if longest is not None and longest.used_ns <= since_ns else None


class Outbox:
    """The data to write on a link: messages first, then jobs; thread-safe.

    Attributes:
        used_ns: when something was last put, in ``time.monotonic_ns()``.
    """

    def __init__(self) -> None:
        self.used_ns = time.monotonic_ns()
        self._changed = threading.Condition()
        self._messages: deque[bytes] = deque()
        self._jobs: deque[PushJob] = deque()
        self._closed = False

    def put_message(self, body: bytes) -> bool:
        """Add a message; False if there are too many. A closed outbox forgets it."""
        with self._changed:
            if len(self._messages) >= MESSAGES_MAX:
                return False
            if not self._closed:
                self._messages.append(body)
                self.used_ns = time.monotonic_ns()
                self._changed.notify()
            return True

    def put_job(self, job: PushJob) -> bool:
        """Add a job; False if the outbox is closed. The core bounds their number."""
        with self._changed:
            if self._closed:
                return False
            self._jobs.append(job)
            self.used_ns = time.monotonic_ns()
            self._changed.notify()
            return True

    def next(self) -> bytes | PushJob | None:
        """The next item to write, a ping if nothing came for a while; None once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._messages or self._jobs, PING_S)
            if self._closed:
                return None
            if self._messages:
                return self._messages.popleft()
            return self._jobs.popleft() if self._jobs else _PING

    def close(self) -> None:
        """End the writer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def left(self) -> list[PushJob]:
        """The jobs that were never started; the outbox is closed."""
        with self._changed:
            assert self._closed
            jobs = list(self._jobs)
            self._jobs.clear()
            return jobs


class PushLink:
    """One link at one side.

    Args:
        number: 16 bytes.
        peer: for logs, and at decode the registry's URL.

    Attributes:
        outbox: the data to write.
        connected: set when both connections exist, or it was closed.
        writer: at decode, the thread that writes messages; None = none was started.
    """

    def __init__(self, number: bytes, peer: str) -> None:
        self.writer: threading.Thread | None = None
        self.number = number
        self.peer = peer
        self.outbox = Outbox()
        self.connected = threading.Event()
        self._lock = threading.Lock()
        self._streams: dict[str, SealedStream] = {}
        self._closed = False

    def add(self, purpose: str, stream: SealedStream) -> bool:
        """Add a connection; False if there is one for this purpose, or the link is closed."""
        with self._lock:
            if self._closed or purpose in self._streams:
                return False
            self._streams[purpose] = stream
            if len(self._streams) == 2:
                self.connected.set()
            return True

    def stream(self, purpose: str) -> SealedStream:
        """The connection for a purpose."""
        return self._streams[purpose]

    @property
    def used_ns(self) -> int:
        """When something was last put on it, in ``time.monotonic_ns()``; now, while it is made."""
        return self.outbox.used_ns if self.connected.is_set() else time.monotonic_ns()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    def close(self) -> bool:
        """Break both connections; their threads end. False if that was done before."""
        with self._lock:
            first, self._closed = not self._closed, True
            for stream in self._streams.values():
                stream.shutdown()
        self.outbox.close()
        self.connected.set()
        return first


class PeerLinks:
    """The links of decode to the ranks of one prefill instance; they live and die together.

    Args:
        peer: URL of the instance's registry.

    Attributes:
        links: links made so far.
        reserved: number of links that it has, or that are being made.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.reserved = 0
        self.links: list[PushLink] = []
        self._lock = threading.Lock()
        self._closed = False

    def add(self, link: PushLink) -> bool:
        """Add a link; False if they were closed."""
        with self._lock:
            if not self._closed:
                self.links.append(link)
            return not self._closed

    @property
    def used_ns(self) -> int:
        """When something was last put on one, in ``time.monotonic_ns()``; now, if there is none."""
        return max((link.used_ns for link in self.links), default=time.monotonic_ns())

    @property
    def is_closed(self) -> bool:
        """Whether they were closed."""
        return self._closed

    def close(self) -> None:
        """Close all links."""
        with self._lock:
            self._closed = True
        for link in self.links:
            link.close()


class Ticker:
    """Calls something ten times a second in a thread of its own, until it is closed.

    Args:
        call: must not wait.
        name: of the thread.
        every_s: seconds between two calls.
    """

    def __init__(self, call: Callable[[], None], name: str, every_s: float = 0.1) -> None:
        self._call = call
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self, within_s: float = TICK_S) -> bool:
        """Stop, and wait for the thread, at most ``within_s``; returns whether it has ended."""
        self._over.set()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self._call()
            except Exception:  # no deadline would be kept any more
                _LOG.exception("%s continues after an internal error", self._thread.name)


class LinkThreads:
    """The threads that use a manager's connections; they end when those are broken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()

    def __len__(self) -> int:
        """How many run."""
        return len(self._running)

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Run something in a thread of its own.

        Returns:
            The thread.

        Raises:
            PeerUnreachable: the system has no thread left; nothing runs.
        """

        def target() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._running.discard(threading.current_thread())

        thread = threading.Thread(target=target, name=name, daemon=True)
        with self._lock:  # until it runs, nobody can wait for it
            try:
                thread.start()
            except RuntimeError as error:
                raise PeerUnreachable(f"no thread for a connection: {error}") from error
            self._running.add(thread)
        return thread

    def join(self, each_s: float) -> None:
        """Wait for all running threads, at most ``each_s`` seconds for each."""
        with self._lock:
            running = list(self._running)
        for thread in running:
            thread.join(each_s)
