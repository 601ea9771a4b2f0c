"""What may be written to the SSD when it leaves memory, within a budget of bytes a day.

A flash device wears by what is written, and most pages are never asked for again. The decision is
taken for a chain, ancestors first: a leading part of it is admitted, so that no tail is on disk
without its head. Pages are decided when they leave memory: until then their uses are observed.

How likely a page returns is judged by the **evidence** for its chain: requests that used it or
what hangs below it, and turns that led to it; or by what was **learned**: the share of prompts of
its kind that returned (:mod:`kvstore.state.returns`). The threshold is moved so that what is
admitted follows the budget: a token bucket of at most an hour's bytes fills with the clock, and
the less it holds the more is asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.errors import InvalidArgument
from kvstore.state.returns import Returns
from kvstore.state.tree import Node

DAY_NS: Final = 86_400 * 10**9
BURST_SHARE: Final = 24
"""The bucket holds at most this part of a day's budget: an hour."""
EVIDENCE_MAX: Final = 4
"""Uses and turns that are asked for at most, when the bucket is nearly empty."""
RETURNS_MIN: Final = 0.25
"""A page is worth a write if one in so many returns, while the budget lasts."""
BRANCHES_SHARED: Final = 4
"""So many continuations make a prefix shared, and worth a write whatever becomes of one."""
NAMES: Final = ("all", "none", "evidence", "learned")


@dataclass(frozen=True, slots=True)
class Wear:
    """What was admitted so far.

    Attributes:
        admitted: pages.
        refused: pages whose memory was needed; a page before them is asked about in its turn.
        today_bytes: admitted since the day began that ``now_ns`` // a day counts.
        forecast_bytes: of a whole day, at the mean rate since the first decision.
    """

    admitted: int
    refused: int
    today_bytes: int
    forecast_bytes: int


class Admission:
    """Decides which leading pages of a chain are written.

    Args:
        name: one of :data:`NAMES`; all but ``none`` keep to the budget.
        budget_bytes_per_day: bytes a day, positive; 0 = no limit, and ``evidence`` then asks for
            one use or turn, ``learned`` for ``returns_min``.
        returns_min: share of prompts that must return, 0 to 1, while the bucket is half full.
    """

    def __init__(
        self, name: str, budget_bytes_per_day: int, returns_min: float = RETURNS_MIN
    ) -> None:
        """Start with a full bucket.

        Raises:
            InvalidArgument: the name is unknown, or the budget negative.
        """
        if name not in NAMES:
            raise InvalidArgument("admission", f"{name!r} is none of {', '.join(NAMES)}")
        if budget_bytes_per_day < 0:
            raise InvalidArgument("budget_bytes_per_day", f"{budget_bytes_per_day} is negative")
        self.name = name
        self.budget_bytes_per_day = budget_bytes_per_day
        self.returns_min = returns_min
        self.returns = Returns()
        self._bucket_max = budget_bytes_per_day / BURST_SHARE
        self._bucket = self._bucket_max
        self._first_ns: int | None = None
        self._now_ns = 0
        self._day = 0
        self._today_bytes = 0
        self._total_bytes = 0
        self._admitted = 0
        self._refused = 0

    def admit(self, chain: Sequence[tuple[Node, int]], size_bytes: int, now_ns: int) -> int:
        """Decide for the pages of a chain that are not on disk, all before them being there.

        Args:
            chain: (node, shard) of each page, ancestors first.
            size_bytes: of each record, positive.
            now_ns: a clock that never goes back.

        Returns:
            how many leading pages to write; they are charged to the budget.
        """
        self._advance(now_ns)
        wanted = self._wanted(chain)
        if self.budget_bytes_per_day:
            wanted = min(wanted, int(self._bucket // size_bytes))
        written = wanted * size_bytes
        if self.budget_bytes_per_day:
            self._bucket -= written
        self._today_bytes += written
        self._total_bytes += written
        self._admitted += wanted
        self._refused += wanted < len(chain)
        return wanted

    def wear(self) -> Wear:
        """A snapshot, as of the last decision."""
        forecast = 0
        if self._first_ns is not None:
            # Less than an hour says little of a day: take what was written as an hour's.
            elapsed = max(self._now_ns - self._first_ns, DAY_NS // BURST_SHARE)
            forecast = self._total_bytes * DAY_NS // elapsed
        return Wear(self._admitted, self._refused, self._today_bytes, forecast)

    def _wanted(self, chain: Sequence[tuple[Node, int]]) -> int:
        if self.name == "none":
            return 0
        if self.name == "all":
            return len(chain)
        if self.name == "learned":
            return self._learned(chain) if chain else 0
        needed = 1 + self._shortage() * (EVIDENCE_MAX - 1)
        wanted, below = 0, 0
        for at in range(len(chain) - 1, -1, -1):
            node = chain[at][0]
            below += node.uses  # who used a descendant used this page too
            if below + node.turns >= needed:
                wanted = at + 1
                break
        return wanted

    def _learned(self, chain: Sequence[tuple[Node, int]]) -> int:
        """All of a prompt whose kind returns, its end only if ends do; else what is shared."""
        end, shard = chain[-1]
        if not end.branches:
            needed = self.returns_min + self._shortage() * (1 - self.returns_min)
            prompt_rate, end_rate = self.returns.leaves(end, shard)
            if prompt_rate >= needed:
                return len(chain) - (end_rate < needed)
        # What lies before a prompt's end was decided with it, but for what was used or shared.
        for at in range(len(chain) - 1, -1, -1):
            if chain[at][0].uses or chain[at][0].branches >= BRANCHES_SHARED:
                return at + 1
        return 0

    def _shortage(self) -> float:
        """0 while the bucket is at least half full, 1 when it is empty."""
        if not self.budget_bytes_per_day:
            return 0.0
        return max(0.0, 1 - 2 * self._bucket / self._bucket_max)

    def _advance(self, now_ns: int) -> None:
        if self._first_ns is None:
            self._first_ns = self._now_ns = now_ns
        elapsed = max(0, now_ns - self._now_ns)
        self._now_ns += elapsed
        self._bucket = min(
            self._bucket_max, self._bucket + self.budget_bytes_per_day * elapsed / DAY_NS
        )
        if self._now_ns // DAY_NS != self._day:
            self._day = self._now_ns // DAY_NS
            self._today_bytes = 0
