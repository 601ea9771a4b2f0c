"""Receives short answers over a socket; looks for them before the thread sleeps (``_answers.c``).

To wake a thread on an idle core takes some 25 microseconds, as long as a node needs for most
answers. So a thread looks for its answer first, without the GIL. It does so only as long as that
helps: where answers come later, because they take longer or because the cores are busy, it sleeps
at once, and tries again after some requests.
"""

import ctypes
import errno
import os
import socket
from typing import Final

from kvstore.mover.binary import LIBRARY, load

LOOK_NS: Final = 150_000
"""How long to look for an answer."""
PAUSE_MAX: Final = 64
"""Answers that are waited for without a look, at most: twice as many after each look in vain, one
less after each that was not. So hardly any time is lost where one look in ten is in vain."""


class AnswerReader:
    """Reads from one socket; used by one thread at a time.

    Args:
        connection: a blocking socket; its own timeout limits each wait. It stays the caller's.
        room: bytes of one read, at most.
    """

    def __init__(self, connection: socket.socket, room: int) -> None:
        self._socket = connection
        self._room = room
        self._memory = ctypes.create_string_buffer(room if _receive is not None else 1)
        self._view = memoryview(self._memory)
        self._slept = ctypes.c_int32()
        #: With one core the node would have to wait until this thread has looked.
        self._looks = len(os.sched_getaffinity(0)) > 1
        #: Answers that are still waited for without a look, and how many after the next one in
        #: vain.
        self._pause, self._next_pause = 0, 1

    def receive(self) -> memoryview | bytes:
        """Wait for some bytes; they are valid until the next call. Empty = the peer has closed.

        Raises:
            BlockingIOError: the socket's timeout has passed.
            OSError: the connection broke.
        """
        if _receive is None:
            return self._socket.recv(self._room)
        look_ns = LOOK_NS if self._looks and not self._pause else 0
        arguments = (self._memory, self._room, look_ns, ctypes.byref(self._slept))
        size = _receive(self._socket.fileno(), *arguments)
        self._learn(looked=look_ns > 0, slept=self._slept.value > 0)
        while size == -errno.EINTR:  # the signal's handler has run
            size = _receive(self._socket.fileno(), self._memory, self._room, 0, arguments[3])
        if size < 0:
            raise OSError(-size, os.strerror(-size))
        return self._view[:size]

    def _learn(self, *, looked: bool, slept: bool) -> None:
        if not looked:
            self._pause = max(0, self._pause - 1)
        elif slept:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, PAUSE_MAX)
        else:
            self._next_pause = max(1, self._next_pause - 1)


def _bound(library: ctypes.CDLL | None) -> "ctypes._NamedFuncPointer | None":
    if library is None:
        return None
    receive = library.kv_receive_answer
    receive.restype = ctypes.c_int64
    receive.argtypes = [
        ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    return receive


_receive: Final = _bound(load(LIBRARY))
