"""One connection of the data port: whole runs of memory in few calls, each with a deadline.

A plain connection leaves the waiting to the kernel (``SO_RCVTIMEO``, ``MSG_WAITALL``): a call for
megabytes is one system call. TLS copies at most one record (16 KiB) a call.
"""

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from kvstore.protocol.errors import InvalidArgument, PeerUnreachable, TransferTimeout, reason
from kvstore.transport.names import HostNames

BUFFERS_MAX: Final = 256
"""Maximum buffers of one call; the kernel accepts 1024."""
_TLS_STEP_BYTES: Final = 256 * 1024
"""Bytes of one call to OpenSSL, so that the deadline is looked at."""
_TIMEVAL: Final = struct.Struct("@ll")
_names: Final = HostNames()


class DataStream(Protocol):
    """A connection; only :meth:`shutdown` may be called while another call is in progress."""

    @property
    def descriptor(self) -> int | None:
        """Of a socket that carries just the bytes that are sent; None if there is TLS."""

    def begin(self, deadline_ns: int) -> None:
        """Do the TLS handshake, if there is TLS; raises as :meth:`receive`."""

    def receive(self, buffers: Sequence[memoryview], deadline_ns: int) -> None:
        """Fill all buffers.

        Raises:
            TransferTimeout: the deadline passed; nothing is written afterwards.
            PeerUnreachable: the connection broke.
        """

    def send(self, buffers: Sequence[memoryview | bytes], deadline_ns: int) -> None:
        """Send all buffers; raises as :meth:`receive`."""

    def shutdown(self) -> None:
        """Break the connection: calls in progress raise, and so do all later ones."""

    def close(self) -> None:
        """Break the connection, and free its descriptor."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The parts of ``host:port``; an IPv6 address is in brackets.

    Raises:
        InvalidArgument: it is not that.
    """
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    known = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16
    if not host or not known:
        raise InvalidArgument("endpoint", f"{endpoint!r} is not host:port")
    return host, int(port)


def receive_bytes(stream: DataStream, size: int, deadline_ns: int) -> bytes:
    """This many bytes; raises as :meth:`DataStream.receive`."""
    found = bytearray(size)
    stream.receive([memoryview(found)], deadline_ns)
    return bytes(found)


def connect(host: str, port: int, context: ssl.SSLContext | None, deadline_ns: int) -> DataStream:
    """Connect to a peer's data port; call :meth:`DataStream.begin` next; raises as :func:`dial`."""
    return stream_of(dial(host, port, deadline_ns), context, host=host)


def dial(host: str, port: int, deadline_ns: int) -> socket.socket:
    """Connect to a port, at the first address of a host that answers.

    Raises:
        TransferTimeout: the deadline passed.
        PeerUnreachable: nothing listens there, or the connection is refused.
    """
    refused = ""
    for address in _names.addresses(host, deadline_ns):
        try:
            return socket.create_connection((address, port), _left_s(deadline_ns))
        except TimeoutError as error:
            raise TransferTimeout(f"{host}:{port} did not answer in time") from error
        except OSError as error:
            refused = reason(error)
    raise PeerUnreachable(f"{host}:{port}: {refused}")


def stream_of(
    connection: socket.socket, context: ssl.SSLContext | None, *, host: str = ""
) -> DataStream:
    """The stream of a connected socket, which it owns; call :meth:`DataStream.begin` next.

    Args:
        connection: closed if this raises.
        context: for TLS; None = none.
        host: of the server, whose certificate may have to match it; empty = we are the server.

    Raises:
        PeerUnreachable: the connection is already broken.
    """
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        if context is None:
            return PlainStream(connection)
        return TlsStream(
            context.wrap_socket(
                connection,
                server_side=not host,
                server_hostname=host or None,
                do_handshake_on_connect=False,
            )
        )
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        connection.close()
        raise PeerUnreachable(f"the connection broke: {reason(error)}") from error


class PlainStream:
    """A connection without TLS; the kernel keeps the deadlines."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @property
    def descriptor(self) -> int:
        """See :class:`DataStream`."""
        return self._socket.fileno()

    def begin(self, deadline_ns: int) -> None:
        """See :class:`DataStream`."""

    def receive(self, buffers: Sequence[memoryview], deadline_ns: int) -> None:
        """See :class:`DataStream`."""
        left: Sequence[memoryview] = buffers
        while left:
            with _translated():
                self._limit(socket.SO_RCVTIMEO, deadline_ns)
                size = self._socket.recvmsg_into(left[:BUFFERS_MAX], 0, socket.MSG_WAITALL)[0]
            if not size:
                raise PeerUnreachable("the peer has closed the connection")
            left = _behind(left, size)

    def send(self, buffers: Sequence[memoryview | bytes], deadline_ns: int) -> None:
        """See :class:`DataStream`."""
        left: Sequence[memoryview] = [memoryview(one) for one in buffers]
        while left:
            with _translated():
                self._limit(socket.SO_SNDTIMEO, deadline_ns)
                size = self._socket.sendmsg(left[:BUFFERS_MAX])
            left = _behind(left, size)

    def shutdown(self) -> None:
        """See :class:`DataStream`."""
        with contextlib.suppress(OSError):  # it is broken already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See :class:`DataStream`."""
        self._socket.close()

    def _limit(self, option: int, deadline_ns: int) -> None:
        microseconds = max(int(_left_s(deadline_ns) * 1e6), 1)  # 0 would be for ever
        limit = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, option, limit)


class TlsStream:
    """A connection with TLS."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection

    @property
    def descriptor(self) -> None:
        """See :class:`DataStream`."""

    def begin(self, deadline_ns: int) -> None:
        """See :class:`DataStream`."""
        with _translated():
            self._socket.settimeout(_left_s(deadline_ns))
            self._socket.do_handshake()

    def receive(self, buffers: Sequence[memoryview], deadline_ns: int) -> None:
        """See :class:`DataStream`."""
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                with _translated():
                    self._socket.settimeout(_left_s(deadline_ns))
                    size = self._socket.recv_into(buffer[done:])
                if not size:
                    raise PeerUnreachable("the peer has closed the connection")
                done += size

    def send(self, buffers: Sequence[memoryview | bytes], deadline_ns: int) -> None:
        """See :class:`DataStream`."""
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                with _translated():
                    self._socket.settimeout(_left_s(deadline_ns))
                    done += self._socket.send(buffer[done : done + _TLS_STEP_BYTES])

    def shutdown(self) -> None:
        """See :class:`DataStream`.

        The connection only: ``SSLSocket.shutdown`` would forget its TLS state under the other call.
        """
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """See :class:`DataStream`."""
        self._socket.close()


def _left_s(deadline_ns: int) -> float:
    """Seconds until a deadline.

    Raises:
        TransferTimeout: it has passed.
    """
    left_ns = deadline_ns - time.monotonic_ns()
    if left_ns <= 0:
        raise TransferTimeout("the deadline of the transfer passed")
    return left_ns / 1e9


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise the errors of sockets as ours."""
    try:
        yield
    except (TimeoutError, BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
        raise TransferTimeout("the peer made no progress before the deadline") from error
    except (OSError, ValueError) as error:
        raise PeerUnreachable(f"the connection broke: {reason(error)}") from error


def _behind(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first ``done`` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
