"""A Unix socket as a client uses it: deadlines by the kernel, and sending without a wait."""

import ctypes
import socket
import struct
from typing import Final

from kvstore.errors import KVStoreError, PeerUnreachable, TransferTimeout

CONNECT_TIMEOUT_S: Final = 1.0
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_send: Final = ctypes.PyDLL(None).send
_send.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
_send.restype = ctypes.c_ssize_t


def open_socket(path: str) -> socket.socket:
    """Connect to the socket at ``path``.

    Raises:
        PeerUnreachable: nobody listens there, or not within CONNECT_TIMEOUT_S.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        set_timeout(connection, CONNECT_TIMEOUT_S)
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise PeerUnreachable(f"{path}: {error.strerror or error}") from error
    return connection


def send_now(connection: socket.socket, frame: bytes) -> int:
    """Bytes that the socket takes at once; negative when it takes none or is broken.

    The interpreter lock is kept: this takes some microseconds, and getting the lock back from a
    thread that runs Python would take 5 ms.
    """
    sent: int = _send(connection.fileno(), frame, len(frame), _SEND_FLAGS)
    return sent


def set_timeout(connection: socket.socket, seconds: float) -> None:
    """Deadlines by the kernel: one system call a message instead of two."""
    whole, part = divmod(max(seconds, 1e-4), 1.0)
    value = struct.pack("@ll", int(whole), int(part * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def as_transfer_error(error: Exception, path: str) -> KVStoreError:
    """What the system says about a socket, as one of our errors."""
    if isinstance(error, KVStoreError):
        return error
    if isinstance(error, BlockingIOError | TimeoutError):
        return TransferTimeout(f"{path}: no answer in time")
    return PeerUnreachable(f"{path}: {error}")
