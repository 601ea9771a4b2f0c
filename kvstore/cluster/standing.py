"""Whether the session with one other node is up, and the log lines that say when that changes."""

import logging
from collections import Counter
from time import monotonic
from typing import Final

from kvstore.process.logs import event
from kvstore.protocol.counts import SessionFault
from kvstore.protocol.errors import printable

log = logging.getLogger(__name__)

REFUSED: Final = "refused"
"""Cause if one of the two nodes refuses the session."""
SAID_MAX: Final = 64
"""Maximum refusals that are remembered, so that they are not logged again."""
MANY_S: Final = 10.0
"""Beyond that number, a further one is logged at most this often: an attacker can invent names."""
NAME_MAX: Final = 64
FIELDS: Final = frozenset({"cluster", "node", "protocol", "scheme"})
"""The fields that a refusal may name; other values are text of the other node."""


class Standing:
    """The session with one other node, as an operator sees it.

    It logs one line when the session comes up, one when it is down, and one for each field that
    refuses it; none of them is repeated before the session was up again.

    Args:
        peer: name of the other node.
        place: ``host:port`` of its peer service.

    Attributes:
        up: the other node has welcomed this one.
        faults: broken sessions and attempts, by cause.
    """

    def __init__(self, peer: str, place: str) -> None:
        self.up = False
        self.faults: Counter[str] = Counter()
        self._peer = peer
        self.place = place
        self._cause = self._why = self._field = ""
        self._failed_s = 0.0
        self._said: set[str] = set()

    def came(self, boot: bytes, transport: str) -> None:
        """The session is up.

        Args:
            boot: boot id of the other node.
            transport: through which its pages are read; empty = the nodes have none in common.
        """
        if self.up:
            return
        self.up = True
        self._said.clear()
        event(log, logging.INFO, "node up", peer=self._peer, at=self.place, boot=boot.hex(),
              transport=transport or "none in common")  # fmt: skip

    def left(self) -> None:
        """The other node left the cluster, or has another address."""
        self.up = False
        event(log, logging.INFO, "node left", peer=self._peer, at=self.place)

    def failed(self, cause: str, why: str, field: str = "") -> None:
        """The session has ended, or could not start.

        Args:
            cause: one of a few fixed words.
            why: description, possibly text of the other node.
            field: the field that refuses the session, if any.
        """
        self.up = False
        self.faults[cause] += 1
        self._cause, self._why = cause, printable(why)
        self._field = field if field in FIELDS else ""
        self._failed_s = monotonic()
        refused = cause == REFUSED
        news = f"{REFUSED} {self._field}" if refused else "down"
        if news in self._said:
            return
        self._said.add(news)
        fields = {"field": self._field} if refused else {"cause": cause}
        event(log, logging.WARNING, "node refused" if refused else "node down", peer=self._peer,
              at=self.place, **fields, why=self._why)  # fmt: skip

    def fault(self) -> SessionFault | None:
        """The last fault, even if the session is up again; None = there was none."""
        if not self._cause:
            return None
        s_ago = monotonic() - self._failed_s
        return SessionFault(cause=self._cause, why=self._why, field=self._field, s_ago=s_ago)


class Refusals:
    """Refused nodes; logs each once per field, until it is admitted."""

    def __init__(self) -> None:
        #: In the order of their lines; the first ones are forgotten beyond :data:`SAID_MAX`.
        self._said: dict[tuple[str, str], None] = {}
        self._many_s = -MANY_S

    def refused(self, node: str, field: str, why: str) -> None:
        """A node is refused.

        Args:
            node: the name that it gives itself.
            field: the field that differs.
            why: description, possibly text of the other node.
        """
        node = printable(node)[:NAME_MAX]
        if (node, field) in self._said:
            return
        if len(self._said) >= SAID_MAX:
            now_s = monotonic()
            if now_s - self._many_s < MANY_S:
                return
            self._many_s = now_s
            del self._said[next(iter(self._said))]
        self._said[node, field] = None
        event(log, logging.WARNING, "node not admitted", peer=node, field=field,
              why=printable(why))  # fmt: skip

    def admitted(self, node: str) -> None:
        """A node is admitted: its next refusal is logged again."""
        for key in [key for key in self._said if key[0] == node]:
            del self._said[key]
