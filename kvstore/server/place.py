"""The path of the node's socket: one node at a time may use it.

A node locks the path before it creates or writes anything, so that a node that is refused leaves
the files of the running node alone: its sockets, and the record of its memory.
"""

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from kvstore.process.listeners import answers
from kvstore.protocol.errors import ConfigError, reason

_LOCKS: Final = Path("/proc/locks")
_ADVICE: Final[dict[int | None, str]] = {
    errno.EACCES: ": give the node's user write access to {folder}, or set socket.path",
    errno.EPERM: ": give the node's user write access to {folder}, or set socket.path",
    errno.EROFS: ": {folder} is read-only: set socket.path",
    errno.ENOTDIR: ": a part of {folder} is not a directory: set socket.path",
    errno.EEXIST: ": {folder} is not a directory: set socket.path",
}


def claim(path: Path) -> int:
    """Lock ``path`` for this node; returns a descriptor that holds the lock while it is open.

    Raises:
        ConfigError: another node has it, another program listens there, or the lock file cannot be
            created.
    """
    place = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        advice = _ADVICE.get(error.errno, "").format(folder=path.parent)
        raise ConfigError(f"socket.path={path}: {reason(error)}{advice}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_free(path)
    except OSError as error:
        pid = _holder(descriptor)
        os.close(descriptor)
        who = f"another kvstore-server{f' (pid {pid})' if pid else ''}"
        told = f"socket.path={path}: {who} uses it: stop it, or set socket.path"
        raise ConfigError(told) from error
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def check_free(path: Path) -> None:
    """Check that there is nothing at ``path``, or the socket of a dead node.

    Raises:
        ConfigError: a program listens there, or it is not a socket.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"socket.path={path} is not a socket: remove it, or set socket.path")
    if answers(path):
        told = "another program listens there: stop it, or set socket.path"
        raise ConfigError(f"socket.path={path}: {told}")


def _holder(descriptor: int) -> str:
    """The process that has locked this file; empty if it is not visible here."""
    found = os.fstat(descriptor)
    device, number = found.st_dev, found.st_ino
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}:{number}"
    try:
        lines = [line.split() for line in _LOCKS.read_text().splitlines()]
    except OSError:
        return ""
    pids = [one[4] for one in lines if one[1:2] == ["FLOCK"] and one[5:6] == [wanted]]
    return next((pid for pid in pids if int(pid) > 0), "")
