"""Goal: whoever asks a server for one answer has it in time and in size, or an error."""

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

import pytest

from kvstore.server import client
from tests.server.conftest import TIMEOUT_S

HEAD = b"HTTP/1.1 200 OK\r\n"
LIMIT_S = 0.3


@contextmanager
def server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server for one connection, with what it says; its address."""
    ended = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1 << 16)
            talk(connection, ended)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def ask(url: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    return client.send(url, "GET", "/v1/stats", timeout_s=timeout_s)


@pytest.mark.parametrize(
    "head", [HEAD + b"X: ", HEAD + b"\r\n", HEAD + b"Content-Length: 1000000\r\n\r\n"]
)
def test_a_server_that_trickles_has_as_long_as_one_that_is_silent(head):
    def trickle(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(head)
        while not ended.wait(LIMIT_S / 10):
            connection.sendall(b"x")

    with server(trickle) as url:
        began = monotonic()

        with pytest.raises(TimeoutError):
            ask(url, LIMIT_S)

        assert LIMIT_S <= monotonic() - began < TIMEOUT_S


def test_an_answer_in_pieces_is_put_together():
    def pieces(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        ended.wait(0.05)
        connection.sendall(b"2\r\nde\r\n0\r\n\r\n")

    with server(pieces) as url:
        assert ask(url) == (200, b"abcde")


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (HEAD + b"Content-Length: 1001\r\n\r\n", b"x" * 1001),
        (HEAD + b"\r\n", b"x" * 1001),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1F4\r\n" + b"x" * 500 + b"\r\n"),
    ],
)
def test_an_answer_that_is_too_large_is_not_read_to_its_end(head, body, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_BYTES_MAX", 1000)

    def flood(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(head)
        for _ in range(3):
            connection.sendall(body)
        ended.wait(TIMEOUT_S)

    with (
        server(flood) as url,
        pytest.raises(http.client.HTTPException, match="more than 1000 bytes"),
    ):
        ask(url)


@pytest.mark.parametrize("size", [0, 1000])
def test_an_answer_of_the_largest_size_is_read(size, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_BYTES_MAX", 1000)
    head = HEAD + f"Content-Length: {size}\r\n\r\n".encode()

    with server(lambda connection, _: connection.sendall(head + b"x" * size)) as url:
        assert ask(url) == (200, b"x" * size)
    with server(lambda connection, _: connection.sendall(HEAD + b"\r\n" + b"x" * size)) as url:
        assert ask(url) == (200, b"x" * size)


def test_an_answer_that_breaks_off_is_an_error():
    head = HEAD + b"Content-Length: 10\r\n\r\n"

    with (
        server(lambda connection, _: connection.sendall(head + b"x")) as url,
        pytest.raises(http.client.IncompleteRead),
    ):
        ask(url)
