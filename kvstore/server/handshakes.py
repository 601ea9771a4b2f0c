"""Accepting connections, the limits until their first message, and answers that nobody reads."""

import asyncio
import fcntl
import logging
import socket
import termios
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain, count, filterfalse
from typing import Any, Final

from kvstore.protocol import wire
from kvstore.protocol.errors import CapacityError, ProtocolError

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
SILENT_MAX: Final = 128
"""Maximum connections without a first message; a new one replaces the oldest."""
HANDSHAKES_MAX: Final = 2 * SILENT_MAX
"""The same, including those that wait for memory; further ones are not accepted yet."""
FIRST_FRAME_BYTES_MAX: Final = 64 << 10
ACCEPT_PAUSE_S: Final = 0.1
UNREAD_MAX: Final = 64
"""Maximum answers with descriptors that the processes of one user have not read."""
UNREAD_LOOK_S: Final = 0.5
"""Time between two looks whether such answers have been read."""


class Handshakes:
    """The connections of one listening socket until their first message has been processed.

    Attributes:
        accepted: number of all accepted connections.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self._serials = count()
        self._running = asyncio.Semaphore(HANDSHAKES_MAX)
        #: Connections without a first message, and their deadlines.
        self._silent: dict[int, asyncio.Timeout] = {}

    async def serve(
        self, listener: socket.socket,
        handshake: Callable[[socket.socket], Coroutine[Any, Any, None]],
    ) -> None:  # fmt: skip
        """Accept connections until cancelled; ``handshake`` owns the accepted socket."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._running.acquire()
                try:
                    raw, _ = await loop.sock_accept(listener)
                except OSError as error:  # no descriptors left: pending connections wait
                    self._running.release()
                    log.warning("connections cannot be accepted: %s", error)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                raw.setblocking(False)  # noqa: FBT003
                self.accepted += 1
                task = tasks.create_task(handshake(raw))
                task.add_done_callback(lambda _: self._running.release())

    @asynccontextmanager
    async def limits(self) -> AsyncIterator[Callable[[], object]]:
        """Bound a handshake; yields what to call once the first message has come.

        Raises:
            TimeoutError: it took too long, or its place was needed by a newer connection.
        """
        serial = next(self._serials)
        heard = partial(self._silent.pop, serial, None)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S) as deadline:
            self._make_place()
            self._silent[serial] = deadline
            try:
                yield heard
            finally:
                heard()

    def _make_place(self) -> None:
        """Close the oldest connection without a first message, if there are too many."""
        if len(self._silent) >= SILENT_MAX:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest).reschedule(asyncio.get_running_loop().time())


class Unread:
    """Answers with descriptors until their peers have read them.

    Until then the kernel counts the descriptors for the node's user, even once the node has closed
    the socket, and at the limit (``RLIMIT_NOFILE``) it lets the node send none to anybody.
    """

    def __init__(self) -> None:
        self._sockets: dict[int, list[socket.socket]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def check(self, user: int) -> None:
        """Look which answers have been read.

        Raises:
            CapacityError: this user has too many left.
        """
        self._close_read()
        if len(self._sockets.get(user, ())) >= UNREAD_MAX:
            raise CapacityError(f"user {user} has not read {UNREAD_MAX} answers with descriptors")

    def add(self, user: int, raw: socket.socket) -> None:
        """The answer has been sent; the socket closes once it has been read."""
        raw.shutdown(socket.SHUT_WR)
        self._sockets.setdefault(user, []).append(raw)
        self._look_later()

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(UNREAD_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._close_read()
        if self._sockets:
            self._look_later()

    def _close_read(self) -> None:
        """Close the sockets whose answers have been read."""
        for user, sockets in list(self._sockets.items()):
            for raw in list(filterfalse(_unread, sockets)):
                sockets.remove(raw)
                raw.close()
            if not sockets:
                del self._sockets[user]

    def close(self) -> None:
        """Close all sockets."""
        if self._timer is not None:
            self._timer.cancel()
        for raw in chain.from_iterable(self._sockets.values()):
            raw.close()


def _unread(raw: socket.socket) -> bool:
    return any(fcntl.ioctl(raw, termios.TIOCOUTQ, bytes(4)))


class FirstFrame:
    """Finds the first message in received bytes."""

    def __init__(self) -> None:
        self._data = b""

    def add(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Add received bytes; returns the body of the first frame and the bytes after it.

        Raises:
            ProtocolError: it is too long, or the peer closed before it was complete.
        """
        if not data:
            raise ProtocolError("closed before its first message was complete")
        self._data = data = self._data + data
        if len(data) < 4:
            return None
        end = wire.frame_length(data) + 4
        if len(data) >= end:
            return data[4:end], data[end:]
        if end > FIRST_FRAME_BYTES_MAX:
            raise ProtocolError(f"a first message of {end} bytes")
        return None
