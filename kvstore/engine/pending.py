"""A request's wait for pages that another client is writing, or that are being located. Pure.

Computing them too would store nothing new, but waiting must not take longer than computing.
"""

from typing import Final

ASK_S: Final = 0.002
"""Seconds between two lookups of a waiting request, at least."""
LATER_SHARE: Final = 1 / 16
"""Of the time that it has waited, added until the next lookup: a long wait ends this much later,
and costs some hundred lookups at most, whatever a request promises."""


class PendingWait:
    """The state of one wait: looks up again after some milliseconds, for a limited time.

    Attributes:
        ask_at: time of the next lookup, monotonic seconds; 0.0 before the wait begins.
    """

    __slots__ = ("_began", "_until", "ask_at")

    def __init__(self) -> None:
        self.ask_at = self._began = 0.0
        self._until: float | None = None

    @property
    def begun(self) -> bool:
        """Whether :meth:`goes_on` was called."""
        return self.ask_at > 0.0

    def is_over(self, now: float) -> bool:
        """Whether the wait has begun and ended."""
        return self._until is not None and now >= self._until

    def waits_for_turn(self, now: float, wait_s: float) -> bool:
        """Begin the wait of a request whose lookup was put off; whether it may wait longer."""
        if self._until is None:
            self._began, self._until = now, now + wait_s
        return not self.is_over(now)

    def goes_on(self, now: float, wait_s: float) -> bool:
        """Whether to look up again at ``ask_at``; False = continue with the pages found.

        Args:
            now: monotonic seconds.
            wait_s: seconds of the whole wait; only the value of the first call is used.
        """
        if self._until is not None and not self.begun:  # it has waited for its turn
            self._until = min(self._until, now + wait_s)
        goes_on = self.waits_for_turn(now, wait_s)
        self.ask_at = now + max(ASK_S, LATER_SHARE * (now - self._began))
        return goes_on

    def left_s(self, now: float, wait_s: float, least_s: float) -> float:
        """Seconds to wait for the load: the rest of ``wait_s``, at least ``least_s``."""
        if self._until is None:
            return wait_s
        return min(wait_s, max(self._until - now, least_s))


def missing_tokens(pages: int, wanted: int, computed: int, page_tokens: int) -> int:
    """Number of tokens of ``wanted`` pages that are neither computed nor in the first ``pages``."""
    return max(0, wanted * page_tokens - max(computed, pages * page_tokens))
