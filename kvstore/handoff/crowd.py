"""Connections that have not sent their greeting yet: their limit, and which is closed first."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

Cut = Callable[[], None]
"""Breaks a connection that another thread may be using; does not wait."""

TURN_S = 0.25
"""A connection is not closed for a newer one before it has had this time; a greeting takes some
milliseconds, and the other side waits for two seconds."""
BACKLOG: Final = 256
"""Connections that the kernel takes while a newer one waits."""


class _Guest(NamedTuple):
    cut: Cut
    address: str
    since_s: float


class Crowd:
    """The connections of one port that have not sent their greeting; thread-safe.

    Of too many, the oldest of the address that has most is closed, once it has had its turn. The
    newest waits until then, and so do all that come after it: whoever greets is not cut off by
    others that do so, as when all decode engines come back to a prefill engine at once.

    Args:
        most: maximum. At most this many more exist, which were closed and whose threads have not
            ended.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._guests: dict[object, _Guest] = {}  # oldest first
        self._gone: set[object] = set()  # those of them that have given way
        self._closed = False

    def __len__(self) -> int:
        """Their number, including closed ones."""
        return len(self._guests)

    def enter(self, connection: object, cut: Cut, address: str) -> tuple[bool, bool]:
        """Add a connection; waits at most :data:`TURN_S` for a place. One thread may call this.

        Args:
            connection: the connection.
            cut: closes it when it has to give way.
            address: of its peer.

        Returns:
            Whether it may stay, and whether the maximum was reached.
        """
        with self._changed:
            are_many, has_place = self._is_full, len(self._guests) < 2 * self._most
            while has_place and self._is_full and not self._closed:
                oldest = self._gives_way(address)
                left_s = self._guests[oldest].since_s + TURN_S - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                else:
                    self._gone.add(oldest)
                    self._guests[oldest].cut()
            if self._closed or not has_place:
                return False, are_many
            self._guests[connection] = _Guest(cut, address, time.monotonic())
            return True, are_many

    def change(self, connection: object, cut: Cut) -> None:
        """Break the connection in another way from now on, for example after TLS started."""
        with self._changed:
            self._guests[connection] = self._guests[connection]._replace(cut=cut)
            if connection in self._gone:
                cut()

    def leave(self, connection: object) -> None:
        """A connection has sent its greeting, or is broken; may be repeated."""
        with self._changed:
            self._guests.pop(connection, None)
            self._gone.discard(connection)
            self._changed.notify_all()

    def close(self) -> None:
        """Break all connections; accept no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for guest in self._guests.values():
                guest.cut()

    @property
    def _is_full(self) -> bool:
        return len(self._guests) - len(self._gone) >= self._most

    def _gives_way(self, address: str) -> object:
        """The next to be closed for one of an address: of its own, unless another has more."""
        here = {one: guest for one, guest in self._guests.items() if one not in self._gone}
        has = Counter(guest.address for guest in here.values())
        most = max(has, key=lambda one: has[one])
        if has[most] <= has[address] + 1:
            most = address
        return next((one for one, guest in here.items() if guest.address == most), next(iter(here)))
