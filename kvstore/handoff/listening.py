"""The port of a prefill manager: connections are accepted, and greeted a few at a time."""

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from kvstore.handoff.crowd import BACKLOG, Crowd
from kvstore.handoff.links import LinkThreads, fit_send_buffer
from kvstore.process.faults import Faults
from kvstore.protocol.errors import InvalidArgument, KVStoreError, PeerUnreachable, reason
from kvstore.transport.streams import DataStream, stream_of

GREETINGS_MAX = 64
"""Connections that greet at a time; of more, the newest waits, see :class:`Crowd`."""
_ACCEPT_PAUSE_S: Final = 0.05
_LOG: Final = logging.getLogger(__name__)


class LinkListener:
    """Listens at a port, and gives each connection a thread.

    Args:
        listen: address to listen at and to be reached at, and port; port 0 = any free one.
        greet: called in that thread with the connection, the peer's address, and a function to
            call when the greeting has ended.
        threads: to start it.
        faults: of the manager.
        tls: of the connections; None = no TLS.

    Attributes:
        address: ``host:port``.

    Raises:
        InvalidArgument: it cannot listen there.
    """

    def __init__(
        self, listen: tuple[str, int], greet: Callable[[DataStream, str, Callable[[], None]], None],
        threads: LinkThreads, faults: Faults, tls: ssl.SSLContext | None,
    ) -> None:  # fmt: skip
        self._greet, self._threads, self._faults, self._tls = greet, threads, faults, tls
        self._crowd = Crowd(GREETINGS_MAX)
        self._over = threading.Event()
        host = listen[0]
        try:
            self._listener = socket.create_server(listen, backlog=BACKLOG)
        except OSError as error:
            raise InvalidArgument("listen", f"cannot listen: {reason(error)}") from error
        self._listener.settimeout(None)
        at = self._listener.getsockname()[1]
        self.address = f"[{host}]:{at}" if ":" in host else f"{host}:{at}"
        self._acceptor = threading.Thread(
            target=self._accept, name="kvstore-handoff-acceptor", daemon=True
        )
        self._acceptor.start()

    def close(self) -> None:
        """Accept no more connections, and close those that have not sent a greeting."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._crowd.close()
        self._acceptor.join()
        self._listener.close()

    # ---- inside -----------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, peer = self._listener.accept()
            except OSError:
                self._faults.count("accept")  # no descriptor is left, perhaps
                if self._over.wait(_ACCEPT_PAUSE_S):
                    return
                continue
            try:
                fit_send_buffer(connection)
                self._begin(stream_of(connection, self._tls), str(peer[0]))
            except KVStoreError:
                continue  # it is broken already
            except Exception:  # nobody would be let in any more
                _LOG.exception("a connection was abandoned after an internal error")
                connection.close()

    def _begin(self, stream: DataStream, peer: str) -> None:
        """Start a thread to greet a connection, once it has a place."""
        has_place, are_many = self._crowd.enter(stream, stream.shutdown, peer)
        if are_many:
            self._faults.note("greetings", f"{peer}: too many connections are greeting")
        if not has_place:
            stream.close()
            return
        known = partial(self._crowd.leave, stream)
        greet = partial(self._greet, stream, peer, known)
        with contextlib.ExitStack() as undo:  # also of a fault of ours: its place would stay taken
            undo.callback(stream.close)
            undo.callback(known)
            try:
                self._threads.start(greet, "kvstore-handoff-link")
            except PeerUnreachable as error:
                self._faults.note("greeting", f"{peer}: {error}")
            else:
                undo.pop_all()
