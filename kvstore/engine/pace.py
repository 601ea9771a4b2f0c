"""Measures how fast an engine computes and loads. Pure.

Loads that fetch pages from other nodes are not measured here: the node measures each of them.
"""

from typing import Final

from kvstore.client.results import Hit
from kvstore.engine.pending import missing_tokens

MEASURED_TOKENS_MIN: Final = 32
"""Steps with fewer tokens are ignored."""
REPORT_S: Final = 1.0
"""Seconds between reports of the measured seconds per token to the node."""
_WEIGHT: Final = 0.3
_FADE: Final = 0.9


class Pace:
    """Moving averages of the speed of prefill and loads.

    Attributes:
        seconds_per_token: seconds per token of prefill; 0.0 while unknown.
        seconds_per_page: seconds per page of loads, on the slowest rank; 0.0 while unknown.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.seconds_per_page = 0.0
        self._report_at = 0.0

    def note_step(self, tokens: int, seconds: float) -> bool:
        """Measure a step that computed ``tokens``; returns False if it was ignored."""
        if tokens < MEASURED_TOKENS_MIN:
            return False
        self.seconds_per_token = _towards(self.seconds_per_token, seconds / tokens)
        return True

    def note_load(self, pages: int, seconds: float) -> None:
        """Measure a load of ``pages``."""
        if pages and seconds > 0:
            self.seconds_per_page = _towards(self.seconds_per_page, seconds / pages)

    def recompute_s(self, tokens: int) -> float:
        """Estimated seconds to compute ``tokens``; infinite while unknown."""
        return tokens * self.seconds_per_token if self.seconds_per_token else float("inf")

    def load_s(self, hit: Hit, pages: float) -> float:
        """Estimated seconds to load ``pages`` of a hit.

        The node's estimate is used before the first load, and as a minimum for pages on disk,
        because most measured loads are from memory.

        Args:
            hit: a hit of at least one page.
            pages: number of its pages; may be a fraction.
        """
        guess = hit.load_seconds / hit.pages
        least = guess if hit.tiers.get("ssd") or not self.seconds_per_page else 0.0
        return pages * max(self.seconds_per_page, least)

    def is_slower(self, hit: Hit, tokens: int, page_tokens: int) -> bool:
        """Whether loading the last ``tokens`` of a hit takes longer than computing them."""
        return self.load_s(hit, tokens / page_tokens) > self.recompute_s(tokens)

    def remote_pages(self, hit: Hit, computed: int, page_tokens: int) -> int:
        """How many pages to fetch from other nodes: all of a hit's, or none if that is slower.

        Args:
            hit: the pages before them are loaded too.
            computed: leading tokens that the engine has.
            page_tokens: tokens per page.
        """
        wanted = hit.pages + hit.remote
        tokens = missing_tokens(hit.pages, wanted, computed, page_tokens)
        if not tokens:
            return 0
        load_s = hit.remote_seconds + tokens / page_tokens * self.seconds_per_page
        return hit.remote if load_s <= self.recompute_s(tokens) else 0

    def wait_s(self, tokens: int, shortest_s: float, longest_s: float) -> float:
        """Maximum seconds to wait for ``tokens``: the time to compute them, within the limits."""
        return min(longest_s, max(shortest_s, self.recompute_s(tokens)))

    def report_due(self, now: float) -> bool:
        """Whether to report ``seconds_per_token`` to the node now."""
        if now < self._report_at:
            return False
        self._report_at = now + REPORT_S
        return True

    def doubt_loads(self) -> None:
        """Lower the estimate after a load was skipped as too slow, so that loads are retried."""
        self.seconds_per_page *= _FADE


def _towards(known: float, value: float) -> float:
    return known + _WEIGHT * (value - known) if known else value
