"""A process with a Mooncake engine: its start, its messages, and its certain end.

The engine is not in the node's process. Its destructor holds the interpreter lock for 0.5 to 0.9 s,
and a first contact with a suspended peer blocks every other submission for 60 s, during which it
cannot be destroyed at all. When a process was killed and has ended, nothing arrives any more.
"""

import contextlib
import socket
import subprocess
import sys
import time
from typing import Final

from kvstore.protocol.errors import ProtocolError
from kvstore.transport.engine_messages import (
    FromEngine,
    MessageReader,
    StartEngine,
    ToEngine,
    framed,
)

SEND_S: Final = 1.0
"""Its message thread accepts messages at once; a process that does not is suspended."""
_RECEIVE_BYTES: Final = 1 << 20


class EngineProcess:
    """One run of ``python -m kvstore.transport.engine_child``.

    Args:
        start: its first message.

    Raises:
        OSError: it cannot be started.

    Attributes:
        killed: its end was asked for.
    """

    def __init__(self, start: StartEngine) -> None:
        self.killed = False
        self._reader = MessageReader()
        self._socket, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.transport.engine_child", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._socket.settimeout(SEND_S)
        self.send(start)

    def fileno(self) -> int:
        """Readable when it has said something, or has ended."""
        return self._socket.fileno()

    def send(self, message: ToEngine, descriptor: int = -1) -> bool:
        """Send a message; False = the process has ended or does not accept any."""
        data = framed(message)
        try:
            if descriptor >= 0:
                sent = socket.send_fds(self._socket, [data], [descriptor])
                data = data[sent:]
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> list[FromEngine] | None:
        """Its messages, once :meth:`fileno` is readable; None = it has ended."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
            found = list(self._reader.feed(data))
        except TimeoutError:
            return []
        except (OSError, ProtocolError):
            return None
        return found if data else None  # type: ignore[return-value]

    def close(self, until_s: float) -> bool:
        """Kill it, and wait for its end until this time of ``time.monotonic()``.

        Returns:
            Whether it has ended, so that nothing of it is in progress. False: call this again.
        """
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            self._process.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return False
        self._socket.close()
        return True
