"""Accepting connections, and the limits until their first message."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, Final

from kvstore.protocol import wire
from kvstore.protocol.errors import ProtocolError

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S: Final = 5.0
SILENT_MAX: Final = 128
"""Maximum connections without a first message; a new one replaces the oldest."""
HANDSHAKES_MAX: Final = 2 * SILENT_MAX
"""The same, including those that wait for memory; further ones are not accepted yet."""
FIRST_FRAME_BYTES_MAX: Final = 64 << 10
ACCEPT_PAUSE_S: Final = 0.1


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
