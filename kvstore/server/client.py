"""One HTTP request to a node's admin API, over TCP or over its Unix socket."""

import http.client
import io
import socket
import ssl
from collections.abc import Mapping
from time import monotonic
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from kvstore.config import HttpConfig
from kvstore.process.smallfile import read_token
from kvstore.server.auth import token_file
from kvstore.server.environment import admin_socket

HERE: Final = f"unix://{admin_socket()}"
"""The default admin socket."""
HERE_TCP: Final = f"http://{HttpConfig().host}:{HttpConfig().port}"
ANSWER_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of the body of an answer."""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """See :class:`http.client.HTTPConnection`."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _Timed(io.RawIOBase):
    """What comes from a socket within the socket's timeout, as a whole.

    Args:
        connection: the socket.
        raw: reads from it.
    """

    def __init__(self, connection: socket.socket, raw: io.RawIOBase) -> None:
        timeout_s = connection.gettimeout()
        assert timeout_s is not None
        self._connection = connection
        self._raw = raw
        self._deadline = monotonic() + timeout_s

    def readable(self) -> bool:
        """See :class:`io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """See :class:`io.RawIOBase`.

        Raises:
            TimeoutError: the time is over, even if bytes still come.
        """
        left_s = self._deadline - monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        """See :class:`io.RawIOBase`."""
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer that comes within the socket's timeout, as a whole."""

    def __init__(self, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        assert isinstance(self.fp, io.BufferedReader)
        self.fp = io.BufferedReader(_Timed(sock, self.fp.detach()))

    def body(self) -> bytes:
        """The whole body.

        Raises:
            http.client.HTTPException: it is too large, or broken.
        """
        if (self.length or 0) <= ANSWER_BYTES_MAX:
            # With a length, a body that ends early is an error, but only if all of it is asked for.
            body = self.read(ANSWER_BYTES_MAX + 1 if self.length is None else None)
            if len(body) <= ANSWER_BYTES_MAX:
                return body
        raise http.client.HTTPException(f"the answer has more than {ANSWER_BYTES_MAX} bytes")


def is_address(url: str) -> bool:
    """Whether this is a valid address of a node.

    ``http://…``, ``https://…`` or ``unix:///path``.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme == "unix":
        return parts.path.startswith("/") and not parts.netloc and url.isprintable()
    named = parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
    return named and url.isascii() and url.isprintable() and " " not in url


def send(
    url: str, method: str, path: str, *, body: bytes | None = None, token: str = "",
    timeout_s: float, headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:  # fmt: skip
    """Send a request directly, without any proxy of the environment.

    Args:
        url: the node's address.
        method: HTTP method.
        path: path and query.
        body: JSON; None = none.
        token: bearer token; empty = none.
        timeout_s: maximum seconds to connect, to send the request, and until the whole answer is
            there, each.
        headers: additional headers.

    Returns:
        Status and body of the answer.

    Raises:
        OSError, http.client.HTTPException: no answer in time, one that is not HTTP, or one of more
            than 64 MiB.
    """
    every = dict(headers or {})
    if token:
        every["Authorization"] = f"Bearer {token}"
    if body is not None:
        every.setdefault("Content-Type", "application/json")
    parts = urlsplit(url)
    connection = _connection(parts, timeout_s)
    connection.response_class = _Answer
    try:
        connection.request(
            method, (parts.path if parts.scheme != "unix" else "") + path, body, every
        )
        answer = connection.getresponse()
        assert isinstance(answer, _Answer)
        return answer.status, answer.body()
    finally:
        connection.close()


def endpoint(url: str, token: str) -> tuple[str, str]:
    """The address and the token to use for a node.

    They are the given ones, except if the address is the default socket and that does not exist:
    then the default TCP port with the node's generated token, if this user may read it.
    """
    socket_path = admin_socket()
    try:
        if url != HERE or socket_path.is_socket():
            return url, token
    except PermissionError:  # of its folder: a request fails, and its message says why
        return url, token
    try:
        return HERE_TCP, token or read_token(token_file(socket_path))
    except (OSError, UnicodeDecodeError):
        return HERE_TCP, token


def _connection(parts: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    if parts.scheme == "unix":
        return _UnixConnection(parts.path, timeout_s)
    assert parts.hostname is not None
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout_s, context=context
        )
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
