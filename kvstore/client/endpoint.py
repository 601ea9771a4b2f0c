"""A client's Unix socket: timeouts in the kernel, and non-blocking sends."""

import ctypes
import select
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from kvstore.client import forks
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferTimeout,
    error_from_code,
)

CONNECT_TIMEOUT_S: Final = 1.0
RECEIVE_BYTES: Final = 1 << 16
_FETCH_MAX: Final = 64
_DESCRIPTOR: Final = struct.Struct("@i")
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_send: Final = ctypes.PyDLL(None).send
_send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_send.restype = ctypes.c_ssize_t


class _OpenSockets:
    """All sockets of this process. A forked child closes its copies, so that the node sees EOF."""

    def __init__(self) -> None:
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def forked(self) -> None:
        """Close copies of the parent's sockets; the node does not notice."""
        for one in list(self.sockets):
            one.close()
        self.sockets.clear()


_opened: Final = _OpenSockets()
forks.register(_opened)


def open_socket(path: str) -> socket.socket:
    """Connect to the socket at ``path``.

    Raises:
        PeerUnreachable: nobody listens there, or does not accept within CONNECT_TIMEOUT_S.
    """
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise PeerUnreachable(f"no socket available: {error.strerror or error}") from error
    _opened.sockets.add(connection)
    try:
        set_timeout(connection, CONNECT_TIMEOUT_S)
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise PeerUnreachable(f"{path}: {error.strerror or error}") from error
    return connection


def nobody_listens(error: Exception) -> bool:
    """Whether :func:`open_socket` failed because no process has the socket open."""
    return isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)


def send_now(connection: socket.socket, frame: bytes) -> int:
    """Send without blocking; returns the bytes sent, negative if none or the socket is broken.

    It keeps the GIL: the call takes some microseconds, but getting the GIL back from a thread that
    runs Python would take 5 ms.
    """
    sent: int = _send(connection.fileno(), frame, len(frame), _SEND_FLAGS)
    return sent


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Set the socket's timeouts in the kernel: one system call per message instead of two."""
    whole, part = divmod(max(seconds, 1e-4), 1.0)
    value = struct.pack("@ll", int(whole), int(part * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def wait_closed(connection: socket.socket, timeout_s: float) -> bool:
    """Wait until either side has closed the connection; returns False on timeout."""
    poll = select.poll()
    try:
        poll.register(connection.fileno(), select.POLLRDHUP)
        return bool(poll.poll(timeout_s * 1000))
    except (OSError, ValueError):
        return True  # closed by another thread


def fetch_extents(
    path: str, session: bytes, boot: bytes, numbers: Sequence[int], known: Sequence[int],
    keep: Callable[[int], None],
) -> list[int]:  # fmt: skip
    """Get descriptors of extents, over separate short connections.

    Args:
        path: the node's socket.
        session: the session, which decides the tenant.
        boot: boot of the node: other boots use the same numbers for other extents.
        numbers: extents to get; empty = only ask about ``known``.
        known: extents that this process has mapped.
        keep: called with each descriptor, in the order of ``numbers``; it must close them, also
            after an error.

    Returns:
        Those of ``known`` that are gone: they will never be used again. An old node returns none.

    Raises:
        TransferTimeout, PeerUnreachable: no answer.
        KVStoreError: the node refuses.
    """
    gone: list[int] = []
    for start in range(0, max(len(numbers), 1), _FETCH_MAX):
        part = list(numbers[start : start + _FETCH_MAX])
        # The lowest numbers are the oldest, so they include those that are gone.
        asked = [] if start else sorted(known)[: wire.KNOWN_EXTENTS_MAX]
        connection = open_socket(path)
        try:
            connection.sendall(wire.encode(wire.FetchExtents(session, part, asked, boot)))
            gone += _extents_follow(connection, part, keep)
        except (OSError, KVStoreError) as error:
            raise as_transfer_error(error, path) from error
        finally:
            connection.close()
    return gone


def _extents_follow(
    connection: socket.socket, numbers: list[int], keep: Callable[[int], None]
) -> list[int]:
    """Receive the answer to FetchExtents; returns the extents that are gone."""
    data, deadline, received = b"", monotonic() + CONNECT_TIMEOUT_S, 0
    while len(data) < 4 or len(data) < wire.frame_length(data) + 4:
        if monotonic() > deadline:
            raise TransferTimeout("no extents came in time")
        room = socket.CMSG_LEN((len(numbers) - received) * _DESCRIPTOR.size)
        # Not recv_fds: it does not set the flag, so that programs started now would inherit them.
        more, ancillary, _, _ = connection.recvmsg(RECEIVE_BYTES, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = content[: len(content) // _DESCRIPTOR.size * _DESCRIPTOR.size]
                for (descriptor,) in _DESCRIPTOR.iter_unpack(whole):
                    keep(descriptor)
                    received += 1
        if not more:
            raise PeerUnreachable("the node closed the connection")
        data += more
    answer = wire.decode_answer(memoryview(data)[4:])
    if isinstance(answer, wire.Failure):
        raise error_from_code(answer.code, answer.message, answer.field)
    if not isinstance(answer, wire.ExtentsFollow) or received != len(numbers):
        raise ProtocolError(f"{received} descriptors came for {len(numbers)} extents")
    if answer.extents != numbers:
        raise ProtocolError(f"descriptors came for extents {answer.extents}, not {numbers}")
    return answer.gone


def as_transfer_error(error: Exception, path: str) -> KVStoreError:
    """Translate an error of the socket into one of ours."""
    if isinstance(error, KVStoreError):
        return error
    if isinstance(error, BlockingIOError | TimeoutError):
        return TransferTimeout(f"{path}: no answer in time")
    return PeerUnreachable(f"{path}: {error}")
