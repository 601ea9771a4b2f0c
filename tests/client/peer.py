"""A node by hand, and a lock that somebody else holds: what tests of a client's link share."""

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from kvstore.client.exchange import Connection
from kvstore.client.link import Link
from kvstore.protocol import wire

TIMEOUT_S = 10.0
SHORT_S = 0.3
"""Of a request that is not answered; one that is not even sent by then breaks no connection."""


class Peer:
    """A node by hand: answers as a test says.

    Attributes:
        answer: gives the answer to a request; None for none.
        heard: every message that came, in order.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.heard: list[wire.Request] = []
        self.answer: Callable[[wire.Request], wire.Answer | None] = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(16)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        reader = wire.FrameReader()
        while True:
            try:
                data = connection.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            for body in reader.feed(data):
                request = wire.decode_request(body)
                self.heard.append(request)
                answered = self.answer(request)
                if answered is not None:
                    with contextlib.suppress(OSError):  # whoever asked has left
                        connection.sendall(wire.encode(answered))

    def names(self) -> list[str]:
        return [type(message).__name__ for message in self.heard]

    def drop(self) -> None:
        """Close every connection that is open now, and none that comes for it."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(TIMEOUT_S)
        self.drop()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for connection in self._open:
            connection.close()
        Path(self.path).unlink()


def answer(request: wire.Request, minor: int = wire.PROTOCOL_MINOR) -> wire.Answer | None:
    if isinstance(request, wire.Hello):
        return wire.Welcome(request.id, 1, minor, b"b" * 16, "peer", b"s" * 16, 1 << 20, 1 << 20)
    if isinstance(request, wire.Ping):
        return wire.Pong(request.id)
    return None


class Held:
    """A lock that another thread holds inside."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._held, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)

    def _hold(self) -> None:
        with self._lock:
            self._held.set()
            assert self._done.wait(TIMEOUT_S)

    def __enter__(self) -> None:
        self._thread.start()
        assert self._held.wait(TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(TIMEOUT_S)


def connection_of(made: Link) -> Connection:
    assert made._connection is not None
    return made._connection
