"""Connections that have not sent their greeting yet: their limit, and which is closed first."""

import threading
from collections.abc import Callable

Cut = Callable[[], None]
"""Breaks a connection under whoever uses it; it does not wait."""


class Crowd:
    """The connections of one port that are not known yet; thread-safe.

    Args:
        most: of more, the oldest gives way. There are as many besides at most, of those that have
            given way and whose threads have not ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._cuts: dict[object, Cut] = {}  # oldest first
        self._gone: set[object] = set()  # those of them that have given way
        self._closed = False

    def __len__(self) -> int:
        """How many there are, those that have given way among them."""
        return len(self._cuts)

    def enter(self, connection: object, cut: Cut) -> tuple[bool, bool]:
        """A connection has come.

        Returns:
            Whether it may stay, and whether there were as many as may be.
        """
        with self._lock:
            many = len(self._cuts) - len(self._gone) >= self._most
            if self._closed or len(self._cuts) >= 2 * self._most:
                return False, many
            if many:
                oldest = next(one for one in self._cuts if one not in self._gone)
                self._gone.add(oldest)
                self._cuts[oldest]()
            self._cuts[connection] = cut
            return True, many

    def change(self, connection: object, cut: Cut) -> None:
        """It must be broken in another way from now on, as with TLS."""
        with self._lock:
            self._cuts[connection] = cut
            if connection in self._gone:
                cut()

    def leave(self, connection: object) -> None:
        """A connection is known, or broken; it may be closed after this. May be repeated."""
        with self._lock:
            self._cuts.pop(connection, None)
            self._gone.discard(connection)

    def close(self) -> None:
        """Break all; nobody enters any more."""
        with self._lock:
            self._closed = True
            for cut in self._cuts.values():
                cut()
