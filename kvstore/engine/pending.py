"""A request's wait for pages that somebody else is writing. Pure.

Computing them too would store nothing new; waiting must not take longer than computing.
"""

from typing import Final

ASK_S: Final = 0.002
"""Between two lookups of a request that waits."""


class PendingWait:
    """It looks again every few milliseconds, and not for ever.

    Attributes:
        ask_at: when to look again, in monotonic seconds; 0.0 before the wait begins.
    """

    __slots__ = ("_until", "ask_at")

    def __init__(self) -> None:
        self.ask_at = 0.0
        self._until: float | None = None

    @property
    def begun(self) -> bool:
        """Whether :meth:`goes_on` was asked."""
        return self._until is not None

    def goes_on(self, now: float, wait_s: float) -> bool:
        """Whether to look again at ``ask_at``, and not to go on with what is there.

        Args:
            now: monotonic seconds.
            wait_s: length of the whole wait; what the first call says counts.
        """
        if self._until is None:
            self._until = now + wait_s
        self.ask_at = now + ASK_S
        return now < self._until

    def left_s(self, now: float, wait_s: float, least_s: float) -> float:
        """How long to wait for the load: what this wait has left of ``wait_s``, or ``least_s``."""
        if self._until is None:
            return wait_s
        return min(wait_s, max(self._until - now, least_s))


def missing_tokens(pages: int, wanted: int, computed: int, page_tokens: int) -> int:
    """Tokens of ``wanted`` pages that are neither computed nor in the first ``pages``."""
    return max(0, wanted * page_tokens - max(computed, pages * page_tokens))
