"""Who is behind a connection, and when that process ends: pidfds.

``SO_PEERPIDFD`` (Linux 6.5) works across PID namespaces, so it is asked first: an engine in another
container has no process id here. Before that there is the process id of ``SO_PEERCRED``. Where
neither leads to a pidfd the process is *unwatched*: its end is never told, and what it holds when
its connection breaks comes back by retiring memory (:mod:`kvstore.state.table.retirement`).
"""

import asyncio
import errno
import logging
import os
import select
import socket
import struct
from collections.abc import Callable
from itertools import count
from typing import Final, NamedTuple

from kvstore.errors import ProtocolError

log = logging.getLogger(__name__)

_SO_PEERPIDFD: Final = 77
_PEERCRED: Final = struct.Struct("3i")
_UNIQUE_INODES_SINCE: Final = (6, 9)
"""From this kernel on all pidfds of a process have an inode number that no other ever has."""


class Credentials(NamedTuple):
    """What the kernel says of the process that connected; ``pid`` 0 = not of our namespace."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """Who connected."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return Credentials(*_PEERCRED.unpack(packed))


class Watched(NamedTuple):
    """One process, as :class:`Processes` knows it.

    Attributes:
        identity: equal for all connections of one process, and for no two processes at a time.
        watched: its end will be told.
    """

    identity: int
    watched: bool


class Processes:
    """The processes that the node waits for.

    Args:
        ended: called with the identity of a process that has ended, on the loop.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._pidfds: dict[int, int] = {}
        self._anonymous = count(-1, -1)
        self._warned = False

    def add(self, connection: socket.socket, pid: int) -> Watched:
        """Watch the process behind a connection.

        Raises:
            ProtocolError: it has ended already.
        """
        try:
            pidfd = _open(connection, pid)
        except ProcessLookupError as error:
            raise ProtocolError(f"process {pid} has ended already") from error
        if pidfd is None:
            if not self._warned:
                self._warned = True
                log.warning(
                    "process %s cannot be watched: it is in another PID namespace, and this kernel"
                    " (before Linux 6.5) does not tell its end. What such processes hold when they"
                    " end is withheld for a minute; share the PID namespace to avoid that",
                    pid or "of a new connection",
                )
            return Watched(next(self._anonymous), watched=False)
        identity = self._identity(pidfd, pid)
        known = self._pidfds.get(identity)
        if known is not None and not _runs(known):
            self.forget(identity)
            self._ended(identity)  # its number was given to another process before we were told
            known = None
        if known is not None:
            os.close(pidfd)
        else:
            self._pidfds[identity] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._told, identity)
        return Watched(identity, watched=True)

    def runs(self, identity: int) -> bool:
        """Whether a process still runs; one that is not watched is taken to."""
        pidfd = self._pidfds.get(identity)
        return pidfd is None or _runs(pidfd)

    def forget(self, identity: int) -> None:
        """Stop watching a process."""
        pidfd = self._pidfds.pop(identity, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        """Stop watching."""
        for identity in list(self._pidfds):
            self.forget(identity)

    def _told(self, identity: int) -> None:
        self.forget(identity)
        self._ended(identity)

    def _identity(self, pidfd: int, pid: int) -> int:
        if _inodes_are_unique():
            return os.fstat(pidfd).st_ino
        return pid or next(self._anonymous)


def _open(connection: socket.socket, pid: int) -> int | None:
    """A pidfd of the peer, or None where there is no way to one.

    Raises:
        ProcessLookupError: the process has ended.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ESRCH):  # until Linux 6.16: it was waited for
            raise ProcessLookupError(error.errno, "it has ended") from error
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        log.debug("no pidfd of process %d: %s", pid, error)
        return None


def _inodes_are_unique() -> bool:
    release = os.uname().release.split(".")
    try:
        return (int(release[0]), int(release[1])) >= _UNIQUE_INODES_SINCE
    except (IndexError, ValueError):
        return False


def _runs(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return not poll.poll(0)
