"""Connections that have not greeted yet: how many there may be, and which gives way."""

import threading
from typing import Final

from kvstore.transport.streams import DataStream

GREETINGS_MAX: Final = 16
"""Connections that have not greeted yet; of more, the oldest gives way. There are as many besides
at most, of those that have given way and whose threads have not ended."""


class GreetingCrowd:
    """The connections of one port; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[DataStream, bool] = {}  # oldest first → whether it has given way
        self._closed = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self._streams)

    def enter(self, stream: DataStream) -> tuple[bool, bool]:
        """A connection begins to greet.

        Returns:
            Whether it may, and whether there were as many as may be.
        """
        with self._lock:
            greeting = [one for one, has_given_way in self._streams.items() if not has_given_way]
            many = len(greeting) >= GREETINGS_MAX
            if self._closed or len(self._streams) >= 2 * GREETINGS_MAX:
                return False, many
            if many:
                greeting[0].shutdown()
                self._streams[greeting[0]] = True
            self._streams[stream] = False
            return True, many

    def leave(self, stream: DataStream) -> None:
        """A connection has greeted, or is broken; it may be closed after this."""
        with self._lock:
            self._streams.pop(stream, None)

    def close(self) -> None:
        """Break all; nobody enters any more."""
        with self._lock:
            self._closed = True
            for stream in self._streams:
                stream.shutdown()
