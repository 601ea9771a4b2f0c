"""What a client says of its node in an engine's log: when it is lost and when it is back.

A node that is slow, not away, is lost and found again many times a second: that is said once a
minute.
"""

import logging
from time import monotonic

SAY_S = 60.0
"""Time after a message about a lost node in which further ones have level DEBUG."""


class Notices:
    """The log lines of one link.

    Args:
        log: the link's log.
        name: the engine's name.
        path: the node's socket.
        level: log level of messages that the node is away.
    """

    def __init__(self, log: logging.Logger, name: str, path: str, level: int) -> None:
        self._log = log
        self._where = name, path
        self._level = level
        self._said_at = float("-inf")
        self._unsaid = 0

    def absent(self, why: str) -> None:
        """There was no node at the start."""
        text = "%s: no node at %s (%s); everything is a miss until it is there"
        self._log.log(self._level, text, *self._where, why)

    def lost(self, why: str) -> None:
        """The connection is broken."""
        now = monotonic()
        if now - self._said_at < SAY_S:
            self._unsaid += 1
            self._log.debug("%s: lost the node at %s again (%s)", *self._where, why)
            return
        before = f"; {self._unsaid} times more since this was said last" if self._unsaid else ""
        self._said_at, self._unsaid = now, 0
        text = "%s: lost the node at %s (%s); misses until it is back%s"
        self._log.log(self._level, text, *self._where, why, before)

    def back(self) -> None:
        """There is a connection again."""
        level = logging.DEBUG if self._unsaid else logging.INFO
        self._log.log(level, "%s: connected to the node at %s again", *self._where)
