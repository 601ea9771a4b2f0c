"""Identifies the processes of connections, and watches their exit with pidfds.

``SO_PEERPIDFD`` (Linux 6.5) works across PID namespaces, so it is tried first: an engine in another
container may have no process id here. On older kernels the process id of ``SO_PEERCRED`` is used.
If neither gives a pidfd, the process is *unwatched*: its exit is not detected, and the resources it
holds when its connection breaks are freed by retiring memory
(:mod:`kvstore.state.table.deadlines`).
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

from kvstore.protocol.errors import ProtocolError

log = logging.getLogger(__name__)

_SO_PEERPIDFD: Final = 77
_PEERCRED: Final = struct.Struct("3i")
_UNIQUE_INODES_SINCE: Final = (6, 9)
"""From this kernel version on, all pidfds of a process have a unique inode number."""
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_ELSEWHERE: Final = (
    "it is in another PID namespace, and this kernel (before Linux 6.5) does not report its exit;"
    " share the PID namespace to avoid that"
)


class Credentials(NamedTuple):
    """The kernel's data on a connected process; ``pid`` 0 = not in our namespace."""

    pid: int
    uid: int
    gid: int


def credentials(connection: socket.socket) -> Credentials:
    """The credentials of the peer."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return Credentials(*_PEERCRED.unpack(packed))


class Watched(NamedTuple):
    """One process in :class:`Processes`.

    Attributes:
        identity: equal for all connections of one process; different for processes that run at the
            same time.
        watched: its exit will be detected.
    """

    identity: int
    watched: bool


class Processes:
    """The watched processes.

    Args:
        ended: called on the loop with the identity of a process that has exited.
    """

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._ended = ended
        self._pidfds: dict[int, int] = {}
        self._anonymous = count(-1, -1)
        #: Why processes were not watched, as far as the log says it.
        self._said: set[str] = set()

    def add(self, connection: socket.socket, pid: int) -> Watched:
        """Watch the process behind a connection.

        Raises:
            ProtocolError: it has already exited.
        """
        try:
            pidfd = _open(connection, pid)
        except ProcessLookupError as error:
            raise ProtocolError(f"process {pid} has ended already") from error
        except OSError as error:
            hint = "; raise ulimit -n (LimitNOFILE)" if error.errno == errno.EMFILE else ""
            return self._unwatched(pid, f"{error.strerror or error}{hint}")
        if pidfd is None:
            return self._unwatched(pid, _ELSEWHERE)
        identity = self._identity(pidfd, pid)
        known = self._pidfds.get(identity)
        if known is not None and not _runs(known):
            self.forget(identity)
            self._ended(identity)  # its id was reused before its exit was reported
            known = None
        if known is not None:
            os.close(pidfd)
        else:
            self._pidfds[identity] = pidfd
            asyncio.get_running_loop().add_reader(pidfd, self._exited, identity)
        return Watched(identity, watched=True)

    def runs(self, identity: int) -> bool:
        """Whether a process still runs; assumed for unwatched ones."""
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

    def _unwatched(self, pid: int, why: str) -> Watched:
        """A process whose exit will not be detected; each reason is logged once."""
        if why not in self._said:
            self._said.add(why)
            log.warning(
                "process %s cannot be watched: %s. Memory that such processes hold is freed a"
                " minute after they end",
                pid or "of a new connection", why,
            )  # fmt: skip
        return Watched(next(self._anonymous), watched=False)

    def _exited(self, identity: int) -> None:
        self.forget(identity)
        self._ended(identity)

    def _identity(self, pidfd: int, pid: int) -> int:
        if _inodes_are_unique():
            return os.fstat(pidfd).st_ino
        return pid or next(self._anonymous)


def _open(connection: socket.socket, pid: int) -> int | None:
    """A pidfd of the peer, or None if the kernel gives none for a process of another namespace.

    Raises:
        ProcessLookupError: the process has exited.
        OSError: there is no descriptor for it, or this process may not have one.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ESRCH):  # until Linux 6.16: it was already reaped
            raise ProcessLookupError(error.errno, "it has ended") from error
        if error.errno in _NO_DESCRIPTOR:
            raise
    return os.pidfd_open(pid) if pid > 0 else None


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
