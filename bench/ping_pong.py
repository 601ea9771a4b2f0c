"""A bare Unix socket between two processes: the bound of every request to a node.

Run as a script this is the answering process: it does nothing but ``recv`` and ``send``.
"""

import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

WAIT_S: Final = 30
END_WAIT_S: Final = 10.0


class PingPong:
    """Calling it sends a message, waits for the other process's answer, and returns the seconds."""

    name: Final = "bare Unix socket, same bytes"

    def __init__(self, connection: socket.socket, request_bytes: int, answer_bytes: int) -> None:
        self._connection = connection
        self._request = b"\1" * request_bytes
        self._answer_bytes = answer_bytes

    def __call__(self) -> float:
        """One round trip; seconds.

        Raises:
            ConnectionError: the answering process ended.
        """
        start = time.perf_counter()
        self._connection.sendall(self._request)
        _receive(self._connection, self._answer_bytes)
        return time.perf_counter() - start


@contextmanager
def answering(request_bytes: int, answer_bytes: int) -> Iterator[PingPong]:
    """Start the answering process, exchange a first message with it, and end it afterwards.

    Args:
        request_bytes: size of each message to it, at least 1.
        answer_bytes: size of each answer, at least 1.
    """
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with mine:
        with theirs:
            number = theirs.fileno()
            arguments = [str(each) for each in (number, request_bytes, answer_bytes)]
            child = subprocess.Popen(
                [sys.executable, __file__, *arguments], stdin=subprocess.DEVNULL, pass_fds=[number]
            )
        # The kernel's deadline: one of Python's would poll before each call.
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", WAIT_S, 0))
        try:
            exchange = PingPong(mine, request_bytes, answer_bytes)
            exchange()
            yield exchange
        finally:
            mine.close()
            try:
                child.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def answer(connection: socket.socket, request_bytes: int, answer_bytes: int) -> None:
    """Answer each request, until the other side closes."""
    reply = b"\1" * answer_bytes
    while True:
        try:
            _receive(connection, request_bytes)
        except ConnectionError:
            return
        connection.sendall(reply)


def _receive(connection: socket.socket, size: int) -> None:
    while size:
        received = len(connection.recv(size))
        if not received:
            raise ConnectionError("the other side closed the socket")
        size -= received


if __name__ == "__main__":
    _number, _request_bytes, _answer_bytes = map(int, sys.argv[1:])
    with socket.socket(fileno=_number) as _connection:
        answer(_connection, _request_bytes, _answer_bytes)
