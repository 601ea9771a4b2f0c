"""How fast this engine computes and loads, learned from its own steps and loads. Pure."""

from typing import Final

from kvstore.client.results import Hit

MEASURED_TOKENS_MIN: Final = 32
"""Steps with fewer tokens say little about prefill."""
REPORT_S: Final = 1.0
"""Between reports of the measured seconds per token to the node."""
_WEIGHT: Final = 0.3
_FADE: Final = 0.9


class Pace:
    """Moving averages.

    Attributes:
        seconds_per_token: of prefill; 0.0 while unknown.
        seconds_per_page: of loads, on the slowest rank; 0.0 while unknown.
    """

    def __init__(self) -> None:
        self.seconds_per_token = 0.0
        self.seconds_per_page = 0.0
        self._report_at = 0.0

    def note_step(self, tokens: int, seconds: float) -> bool:
        """Learn from a step that computed ``tokens``; False when it says too little."""
        if tokens < MEASURED_TOKENS_MIN:
            return False
        self.seconds_per_token = _towards(self.seconds_per_token, seconds / tokens)
        return True

    def note_load(self, pages: int, seconds: float) -> None:
        """Learn from a load that ended with ``pages``."""
        if pages and seconds > 0:
            self.seconds_per_page = _towards(self.seconds_per_page, seconds / pages)

    def recompute_s(self, tokens: int) -> float:
        """How long computing ``tokens`` would take; infinite while unknown."""
        return tokens * self.seconds_per_token if self.seconds_per_token else float("inf")

    def load_s(self, hit: Hit, pages: float) -> float:
        """How long loading ``pages`` of a hit would take.

        The node's guess counts before the first load, and as the least for pages on disk: most
        loads are from memory.

        Args:
            hit: at least one page.
            pages: of them, perhaps with a part of one.
        """
        guess = hit.load_seconds / hit.pages
        least = guess if hit.tiers.get("ssd") or not self.seconds_per_page else 0.0
        return pages * max(self.seconds_per_page, least)

    def is_slower(self, hit: Hit, tokens: int, page_tokens: int) -> bool:
        """Whether loading the last ``tokens`` of a hit takes longer than computing them."""
        return self.load_s(hit, tokens / page_tokens) > self.recompute_s(tokens)

    def wait_s(self, tokens: int, shortest_s: float, longest_s: float) -> float:
        """How long waiting for ``tokens`` is worth it: while computing them would take as long."""
        return min(longest_s, max(shortest_s, self.recompute_s(tokens)))

    def report_due(self, now: float) -> bool:
        """Whether to tell the node of ``seconds_per_token`` now: once in a while."""
        if now < self._report_at:
            return False
        self._report_at = now + REPORT_S
        return True

    def doubt_loads(self) -> None:
        """A load seemed too slow to be worth it: believe that a little less each time."""
        self.seconds_per_page *= _FADE


def _towards(known: float, value: float) -> float:
    return known + _WEIGHT * (value - known) if known else value
