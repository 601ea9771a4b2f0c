"""Listening sockets: parsing of endpoints, and Unix sockets with limited access.

A Unix socket gets its permissions before it has a name, so it is never accessible to others. A
socket left by a dead process is replaced. The socket of a running process is never replaced, even
if two processes start at the same time, because they check under a lock.
"""

import errno
import fcntl
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument, reason

_log = logging.getLogger(__name__)

PATH_BYTES_MAX: Final = 107
"""Maximum length of the path of a Unix socket on Linux."""
_BACKLOG: Final = 64
_LOCK_WAIT_S: Final = 5.0
_LOCK_PAUSE_S: Final = 0.01
_PROBE_S: Final = 1.0
_ADVICE_TCP: Final[dict[int | None, str]] = {
    errno.EADDRINUSE: ": another program listens there: stop it, or choose another port",
    errno.EACCES: ": choose a port of 1024 or more",
    errno.EADDRNOTAVAIL: ": no interface of this machine has that address",
}
_ADVICE_UNIX: Final[dict[int | None, str]] = {
    errno.EACCES: ": give this user write access to {folder}, or choose another path",
    errno.EROFS: ": {folder} is read-only: choose another path",
    errno.ENOTDIR: ": a part of {folder} is not a directory: choose another path",
    errno.EEXIST: ": {folder} is not a directory: choose another path",
}


class Unix(NamedTuple):
    """``ipc:///run/kvstore/events``."""

    path: str

    def __str__(self) -> str:
        return f"ipc://{self.path}"


class Tcp(NamedTuple):
    """``tcp://10.0.0.5:5557``.

    Attributes:
        host: address; empty = all addresses.
        port: 0 = any free port.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host or '*'}:{self.port}"


Endpoint = Unix | Tcp


def parse_endpoint(field: str, text: str) -> Endpoint:
    """Parse an endpoint.

    Raises:
        InvalidArgument: the text is not an endpoint; ``field`` is the given name.
    """
    scheme, _, rest = text.partition("://")
    if scheme == "ipc" and rest and rest[0] not in "@*":  # abstract names have no permissions
        if len(os.fsencode(rest)) > PATH_BYTES_MAX or "\0" in rest:
            raise InvalidArgument(
                field,
                f"{text!r} is too long: a Unix socket's path has {PATH_BYTES_MAX} bytes at most",
            )
        return Unix(rest)
    host, colon, port = rest.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    known = port == "*" or (
        port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65_535
    )
    if scheme != "tcp" or not (colon and host and known):
        raise InvalidArgument(
            field, f"{text!r} is neither ipc:///path/of/a/socket nor tcp://address:port"
        )
    return Tcp("" if host == "*" else host, 0 if port == "*" else int(port))


class Listener:
    """A listening socket, and its file.

    Attributes:
        endpoint: the actual address.
        socket: the non-blocking socket.
    """

    def __init__(self, field: str, endpoint: Endpoint, mode: int) -> None:
        """Listen.

        Args:
            field: name of the endpoint in errors.
            endpoint: address; the directory of a Unix socket is created if it does not exist.
            mode: mode of a Unix socket's file.

        Raises:
            InvalidArgument: listening is not possible; the message says why.
        """
        self.endpoint = endpoint
        self._inode: tuple[int, int] | None = None
        try:
            if isinstance(endpoint, Unix):
                self.socket = _listen_unix(field, Path(endpoint.path), mode)
                self._inode = _inode(endpoint.path)
            else:
                self.socket = _listen_tcp(endpoint)
                self.endpoint = Tcp(endpoint.host, self.socket.getsockname()[1])
        except (OSError, UnicodeError) as error:  # a host name that IDNA cannot encode
            what = f"cannot listen at {endpoint}: {reason(error)}"
            raise InvalidArgument(field, what + advice(endpoint, error)) from error

    def close(self) -> None:
        """Stop listening; remove the file if it is still ours, and can be removed."""
        try:
            # Before the socket is closed: a dead socket could be replaced meanwhile.
            if isinstance(self.endpoint, Unix) and self._inode == _inode(self.endpoint.path):
                Path(self.endpoint.path).unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s stays behind: %s", self.endpoint, reason(error))
        finally:
            self.socket.close()


def advice(endpoint: Endpoint, error: Exception) -> str:
    """What to do when listening failed, to be appended to the message; empty = not known."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(endpoint, Tcp):
        return _ADVICE_TCP.get(code, "")
    return _ADVICE_UNIX.get(code, "").format(folder=Path(endpoint.path).parent)


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:  # removed, perhaps with its directory
        return None
    return found.st_dev, found.st_ino


def _listen_tcp(endpoint: Tcp) -> socket.socket:
    found = socket.getaddrinfo(
        endpoint.host or None, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)  # noqa: FBT003
    return listener


def _listen_unix(field: str, path: Path, mode: int) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), mode)  # Linux uses it for the file that bind creates
        with _locked(path):
            _make_way(field, path)
            listener.bind(str(path))
            path.chmod(mode)  # add bits that the umask removed
            listener.listen(_BACKLOG)
    except (OSError, InvalidArgument):
        listener.close()
        raise
    listener.setblocking(False)  # noqa: FBT003
    return listener


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, and that other users cannot take.

    The holder removes the lock file, so after locking check that it is still the same file.
    """
    lock = f"{path}.lock"
    deadline = time.monotonic() + _LOCK_WAIT_S
    while (held := _try_lock(lock)) is None:
        if time.monotonic() >= deadline:
            raise TimeoutError(f"{lock} is locked by another process")
        time.sleep(_LOCK_PAUSE_S)
    try:
        yield
    finally:
        Path(lock).unlink(missing_ok=True)
        os.close(held)


def _try_lock(lock: str) -> int | None:
    """A descriptor that holds the lock; None if another process has it."""
    held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return None
    found = os.fstat(held)
    if _inode(lock) == (found.st_dev, found.st_ino):
        return held
    os.close(held)
    return None


def _make_way(field: str, path: Path) -> None:
    """Remove the socket of a dead process.

    Raises:
        InvalidArgument: the path is not a socket, or a process listens there.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidArgument(field, f"{path} is not a socket: remove it, or choose another path")
    if answers(path):
        what = "another node listens there (or another program): stop it, or choose another path"
        raise InvalidArgument(field, f"{path}: {what}")
    path.unlink()


def answers(path: Path) -> bool:
    """Whether a program listens at a Unix socket's path, or may: only a dead one is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it exists and does not accept: do not replace it
            return True
        return True
