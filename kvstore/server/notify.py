"""What the service manager is told: systemd's notification protocol, over plain datagrams.

A service of ``Type=notify`` finds the manager's socket in ``NOTIFY_SOCKET``. With ``WatchdogSec``
it also finds in ``WATCHDOG_USEC`` how soon it is ended and started again if nothing is heard of it.
Whoever calls this owns a loop that must not wait: what the manager does not take now is sent in a
later turn, and a manager that is gone is no reason to end.
"""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

ALIVE_SHARE: Final = 4
"""Signs of life in each watchdog period: a loop that is late for three quarters of it lives on."""
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_STATUS_BYTES_MAX: Final = 1024


class ServiceManager:
    """The service manager that started this process, if it wants to hear of it.

    Args:
        environ: where it says so.

    Attributes:
        watchdog_s: it ends a process of which it has heard nothing for so long; 0 = never.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._socket: socket.socket | None = None
        self._address = ""
        self._states: dict[str, str] = {}
        self._unsent: set[str] = set()
        self._alive_due_s = 0.0
        self._broken = False
        self.watchdog_s = 0.0
        name = environ.get("NOTIFY_SOCKET", "")
        if not name:
            return
        if name[0] not in "/@":
            log.warning("NOTIFY_SOCKET=%s is no Unix socket: the manager is told nothing", name)
            return
        self._address = "\0" + name[1:] if name[0] == "@" else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.watchdog_s = _watchdog_s(environ)

    def ready(self, status: str) -> None:
        """It serves from now on."""
        self._tell(READY="1", STATUS=status)

    def stopping(self, status: str) -> None:
        """It has begun to end."""
        self._tell(STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        """One line for people; what was said already is not said again."""
        self._tell(STATUS=text)

    def turn(self, now_s: float) -> None:
        """A sign of life, when one is due, and what could not be sent before; call it often."""
        if self._socket is None:
            return
        if self.watchdog_s and now_s >= self._alive_due_s and self._send("WATCHDOG=1"):
            self._alive_due_s = now_s + self.watchdog_s / ALIVE_SHARE
        if self._unsent:
            self._send_states()

    def close(self) -> None:
        """Say nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, **states: str) -> None:
        for name, text in states.items():
            line = " ".join(text.split()).encode()[:_STATUS_BYTES_MAX].decode(errors="ignore")
            if self._states.get(name) != line:
                self._states[name] = line
                self._unsent.add(name)
        if self._socket is not None and self._unsent:
            self._send_states()

    def _send_states(self) -> None:
        lines = [f"{name}={text}" for name, text in self._states.items() if name in self._unsent]
        if self._send("\n".join(lines)):
            self._unsent.clear()

    def _send(self, message: str) -> bool:
        """Whether the manager has it."""
        assert self._socket is not None
        try:
            self._socket.sendto(message.encode(), _FLAGS, self._address)
        except BlockingIOError:
            return False  # it has much to read: once more in the next turn
        except OSError as error:
            if not self._broken:
                log.warning("the service manager cannot be told anything: %s", error)
            self._broken = True
            return False
        self._broken = False
        return True


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """How long the manager waits for a sign of life of this very process; 0 = it does not."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text or (pid and pid != str(os.getpid())):
        return 0.0
    if not text.isdecimal():
        log.warning("WATCHDOG_USEC=%s is no number of microseconds: no watchdog", text)
        return 0.0
    return int(text) / 1e6
