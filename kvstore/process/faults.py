"""What others did wrong: counted by cause, and logged without filling the log."""

import logging
import time
from collections import Counter
from typing import Final

SILENCE_S: Final = 10.0
"""After a line about a cause, the next ones of that cause are only counted for so long."""


SAID_MAX: Final = 500
"""Characters of somebody else's words that go on into lines and errors."""


class Faults:
    """Counts every fault, and logs the first one of each cause in a while.

    Attributes:
        counts: cause → faults so far.
    """

    def __init__(self, log: logging.Logger, whose: str) -> None:
        """Nothing has happened yet.

        Args:
            log: where lines go, as warnings.
            whose: begins each line.
        """
        self.counts: Counter[str] = Counter()
        self._log = log
        self._whose = whose
        self._said: dict[str, tuple[float, int]] = {}  # cause → when a line was written, and at

    def note(self, cause: str, what: str) -> None:
        """Count one.

        Args:
            cause: one of a few words of ours, never what somebody else wrote.
            what: what happened, for the line.
        """
        self.counts[cause] += 1
        now = time.monotonic()
        before, count = self._said.get(cause, (-SILENCE_S, 0))
        if now - before < SILENCE_S:
            return
        self._said[cause] = (now, self.counts[cause])
        more = self.counts[cause] - count - 1
        hint = f" ({more} more since the last such line)" if more else ""
        self._log.warning("%s: %s: %s%s", self._whose, cause, printable(what), hint)


def printable(text: str) -> str:
    """What somebody else wrote, so that it cannot be more than a part of one line."""
    return "".join(c if c.isprintable() else "?" for c in text[:SAID_MAX])
