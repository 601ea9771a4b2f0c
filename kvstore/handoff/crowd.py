"""Connections that have not sent their greeting yet: their limit, and which is closed first."""

import threading
from collections.abc import Callable

Cut = Callable[[], None]
"""Breaks a connection that another thread may be using; does not wait."""


class Crowd:
    """The connections of one port that have not sent their greeting; thread-safe.

    Args:
        most: maximum; beyond that, the oldest one is closed. At most this many more exist, which
            were closed and whose threads have not ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._cuts: dict[object, Cut] = {}  # oldest first
        self._gone: set[object] = set()  # those of them that have given way
        self._closed = False

    def __len__(self) -> int:
        """Their number, including closed ones."""
        return len(self._cuts)

    def enter(self, connection: object, cut: Cut) -> tuple[bool, bool]:
        """Add a connection.

        Returns:
            Whether it may stay, and whether the maximum was reached.
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
        """Break the connection in another way from now on, for example after TLS started."""
        with self._lock:
            self._cuts[connection] = cut
            if connection in self._gone:
                cut()

    def leave(self, connection: object) -> None:
        """A connection has sent its greeting, or is broken; may be repeated."""
        with self._lock:
            self._cuts.pop(connection, None)
            self._gone.discard(connection)

    def close(self) -> None:
        """Break all connections; accept no more."""
        with self._lock:
            self._closed = True
            for cut in self._cuts.values():
                cut()
