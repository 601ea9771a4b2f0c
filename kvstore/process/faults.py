"""Counts faults of peers by cause, and logs them at a limited rate."""

import logging
import time
from collections import Counter
from typing import Final

from kvstore.protocol.errors import printable

SILENCE_S: Final = 10.0
"""Seconds after a log line in which faults of the same cause are only counted."""


class Faults:
    """Counts every fault, and logs at most one per cause in :data:`SILENCE_S`.

    Args:
        log: logger for the warnings.
        whose: beginning of each line.

    Attributes:
        counts: cause → number of faults.
    """

    def __init__(self, log: logging.Logger, whose: str) -> None:
        self.counts: Counter[str] = Counter()
        self._log = log
        self._whose = whose
        self._said: dict[str, tuple[float, int]] = {}  # cause → last line: time and count

    def count(self, cause: str) -> None:
        """Count one fault that somebody else logs."""
        self.counts[cause] += 1

    def note(self, cause: str, what: str) -> None:
        """Count one fault, and log it.

        Args:
            cause: one of a few fixed words, never foreign text.
            what: description for the log line.
        """
        self.count(cause)
        now = time.monotonic()
        before, count = self._said.get(cause, (-SILENCE_S, 0))
        if now - before < SILENCE_S:
            return
        self._said[cause] = (now, self.counts[cause])
        more = self.counts[cause] - count - 1
        hint = f" ({more} more since the last such line)" if more else ""
        self._log.warning("%s: %s: %s%s", self._whose, cause, printable(what), hint)
