"""Notifies the service manager: systemd's notification protocol, over plain datagrams.

A service of ``Type=notify`` gets the manager's socket in ``NOTIFY_SOCKET``. With ``WatchdogSec`` it
also gets the watchdog period in ``WATCHDOG_USEC``. The caller's loop must not block: messages that
cannot be sent now are sent in a later turn, and a missing manager is not an error.
"""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger(__name__)

ALIVE_SHARE: Final = 4
"""Watchdog messages per period, so that a lag of three quarters of the period is tolerated."""
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_STATUS_BYTES_MAX: Final = 1024


class ServiceManager:
    """The service manager that started this process, if any.

    Args:
        environ: the environment with its variables.

    Attributes:
        watchdog_s: the watchdog period; 0 = no watchdog.
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
            log.warning("NOTIFY_SOCKET=%s is not a Unix socket: the manager is not notified", name)
            return
        self._address = "\0" + name[1:] if name[0] == "@" else name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.watchdog_s = _watchdog_s(environ)

    def ready(self, status: str) -> None:
        """The process is ready."""
        self._tell(READY="1", STATUS=status)

    def stopping(self, status: str) -> None:
        """The process is stopping."""
        self._tell(STOPPING="1", STATUS=status)

    def status(self, text: str) -> None:
        """Set the one-line status; sent only if it changed."""
        self._tell(STATUS=text)

    def turn(self, now_s: float) -> None:
        """Send the watchdog message when it is due, and pending messages; call it often."""
        if self._socket is None:
            return
        if self.watchdog_s and now_s >= self._alive_due_s and self._send("WATCHDOG=1"):
            self._alive_due_s = now_s + self.watchdog_s / ALIVE_SHARE
        if self._unsent:
            self._send_states()

    def close(self) -> None:
        """Close the socket."""
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
        """Send a message; returns whether it was sent."""
        assert self._socket is not None
        try:
            self._socket.sendto(message.encode(), _FLAGS, self._address)
        except BlockingIOError:
            return False  # its buffer is full: retry in the next turn
        except OSError as error:
            if not self._broken:
                log.warning("the service manager cannot be notified: %s", error)
            self._broken = True
            return False
        self._broken = False
        return True


def _watchdog_s(environ: Mapping[str, str]) -> float:
    """The watchdog period for this process; 0 = none."""
    text, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not text or (pid and pid != str(os.getpid())):
        return 0.0
    if not text.isdecimal():
        log.warning("WATCHDOG_USEC=%s is not a number of microseconds: no watchdog", text)
        return 0.0
    return int(text) / 1e6
