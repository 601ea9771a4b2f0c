"""One HTTP request to a node's admin API, over TCP or over its Unix socket."""

import http.client
import socket
import ssl
from collections.abc import Mapping
from typing import Final
from urllib.parse import SplitResult, urlsplit

from kvstore.config import HttpConfig
from kvstore.process.smallfile import read_token
from kvstore.server.auth import token_file
from kvstore.server.environment import admin_socket

HERE: Final = f"unix://{admin_socket()}"
"""The default admin socket."""
HERE_TCP: Final = f"http://{HttpConfig().host}:{HttpConfig().port}"


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
        timeout_s: timeout of each step of the connection.
        headers: additional headers.

    Returns:
        Status and body of the answer.

    Raises:
        OSError, http.client.HTTPException: no answer, or not HTTP.
    """
    every = dict(headers or {})
    if token:
        every["Authorization"] = f"Bearer {token}"
    if body is not None:
        every.setdefault("Content-Type", "application/json")
    parts = urlsplit(url)
    connection = _connection(parts, timeout_s)
    try:
        connection.request(
            method, (parts.path if parts.scheme != "unix" else "") + path, body, every
        )
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def endpoint(url: str, token: str) -> tuple[str, str]:
    """The address and the token to use for a node.

    They are the given ones, except if the address is the default socket and that does not exist:
    then the default TCP port with the node's generated token, if this user may read it.
    """
    socket_path = admin_socket()
    if url != HERE or socket_path.is_socket():
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
