"""Which pages may be written to the SSDs when they are evicted, within a daily budget.

Writes wear a flash device, and most pages are never requested again. The decision is made for a
chain, ancestors first: a leading part of it is admitted, so that no page is on disk without its
ancestors. It is made when pages leave memory; until then their uses are observed.

``evidence`` admits pages that were used, lead to used pages, or follow from several turns.
``learned`` knows for each page which share of similar pages was requested again
(:mod:`kvstore.state.choice.returns`), and writes where that is worth the **price** of a write. A
token bucket sets the price: every write, also of pages carried over, takes tokens, and the fewer
are left, the higher the price. The bucket fills over time, so that the budget is used for the pages
that return most; without a budget, ``learned`` fills it with a share of the offered bytes.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.protocol.counts import WearCounts
from kvstore.protocol.errors import InvalidArgument
from kvstore.state.choice.returns import Returns
from kvstore.state.tree.node import PrefixNode

DAY_NS: Final = 86_400 * 10**9
BURST_SHARE: Final = 24
"""Maximum content of the bucket, as a part of a day's budget: an hour."""
EVIDENCE_MAX: Final = 4
"""Maximum required uses and turns, when the bucket is nearly empty."""
WRITE_SHARE: Final = 0.25
"""Share of the offered bytes that ``learned`` writes without a budget, carried over included."""
LEARNED_CARRY_FROM: Final = 0.5
"""``learned`` carries over pages that were used in the later half of their time on disk: if little
is written, that time is long, and a use at its beginning predicts little."""
BUCKET_DISK_SHARE: Final = 4
"""Maximum content of the bucket of ``learned``, as a part of the disk: a quarter."""
NAMES: Final = ("all", "none", "evidence", "learned")


class Admission:
    """Decides which leading pages of a chain are written.

    Args:
        name: one of :data:`NAMES`; all but ``none`` obey the budget.
        budget_bytes_per_day: bytes per day, positive; 0 = no limit: ``evidence`` then requires one
            use or turn, and ``learned`` writes :data:`WRITE_SHARE` of the offered bytes.
        capacity_bytes: of the disk, positive.

    Raises:
        InvalidArgument: the name is unknown, or the budget negative.
    """

    def __init__(self, name: str, budget_bytes_per_day: int, capacity_bytes: int) -> None:
        if name not in NAMES:
            raise InvalidArgument("admission", f"{name!r} is not one of {', '.join(NAMES)}")
        if budget_bytes_per_day < 0:
            raise InvalidArgument("budget_bytes_per_day", f"{budget_bytes_per_day} is negative")
        self.name = name
        self.budget_bytes_per_day = budget_bytes_per_day
        self.returns = Returns()
        self._share = WRITE_SHARE if name == "learned" and not budget_bytes_per_day else 0.0
        self._bucket_max = budget_bytes_per_day / BURST_SHARE
        if name == "learned":
            most = capacity_bytes / BUCKET_DISK_SHARE
            self._bucket_max = min(self._bucket_max or most, most)
        self._bucket = self._bucket_max
        self._first_ns: int | None = None
        self._now_ns = 0
        self._day = 0
        self._today_bytes = 0
        self._total_bytes = 0
        self._admitted = 0
        self._refused = 0

    @property
    def bounded(self) -> bool:
        """Whether writes are charged to a bucket."""
        return self._bucket_max > 0

    def admit(
        self, chain: Sequence[tuple[PrefixNode, int]], size_bytes: int, now_ns: int, tick: int
    ) -> int:
        """Decide about the pages of a chain that are not on disk; all their ancestors are.

        Args:
            chain: (node, shard) of the pages, ancestors first.
            size_bytes: of each record, positive.
            now_ns: a monotonic clock.
            tick: the current tick.

        Returns:
            how many leading pages to write; they are charged to the budget.
        """
        self._advance(now_ns)
        pages = sum([node.count for node, _ in chain])
        if chain and not chain[-1][0].children_in_memory:
            end = chain[-1][0]
            self.leaves(end, pages * size_bytes * len(end.slot_columns), tick)
        wanted = self._wanted(chain)
        if self.bounded:
            wanted = min(wanted, int(max(0, self._bucket) // size_bytes))
        assert 0 <= wanted <= pages
        self.charge(wanted * size_bytes)
        self._admitted += wanted
        self._refused += wanted < pages
        if wanted < pages:
            ask_later(_behind(chain, wanted))
        return wanted

    def leaves(self, end: PrefixNode, offered_bytes: int, tick: int) -> None:
        """Learn from a prompt that leaves memory; repeated calls change nothing.

        Args:
            end: its last page; no page in memory continues it.
            offered_bytes: of the prompt's records that are not on disk.
            tick: the current tick.
        """
        if self.name == "learned" and self.returns.left(end, tick):
            self._fill(offered_bytes * self._share)

    def refuse(self, pages: int) -> None:
        """Count evicted pages that were rejected, with their descendants."""
        self._refused += pages

    def take_back(self, pages: int, size_bytes: int) -> None:
        """Refund admitted pages that found no room on the disk."""
        self._admitted -= pages
        assert self._admitted >= 0
        self.charge(-pages * size_bytes)

    @property
    def carry_from(self) -> float:
        """From which part of its time on disk a page must be used to be carried over, 0 to 1."""
        return LEARNED_CARRY_FROM if self.name == "learned" else 0.0

    def charge(self, size_bytes: int) -> None:
        """Charge bytes that are written or carried over."""
        if self.bounded:
            self._bucket -= size_bytes
        self._today_bytes += size_bytes
        self._total_bytes += size_bytes
        assert self._total_bytes >= 0

    def wear(self) -> WearCounts:
        """A snapshot, as of the last decision."""
        forecast = 0
        if self._first_ns is not None:
            # Less than an hour says little of a day: take what was written as an hour's.
            elapsed = max(self._now_ns - self._first_ns, DAY_NS // BURST_SHARE)
            forecast = self._total_bytes * DAY_NS // elapsed
        return WearCounts(
            admitted=self._admitted, refused=self._refused, today_bytes=self._today_bytes,
            forecast_bytes=forecast, budget_bytes=self.budget_bytes_per_day,
        )  # fmt: skip

    def _wanted(self, chain: Sequence[tuple[PrefixNode, int]]) -> int:
        if self.name == "none":
            return 0
        if self.name == "all":
            return sum([node.count for node, _ in chain])
        if self.name == "learned":
            return self._learned(chain)
        needed = 1 + self._shortage() * (EVIDENCE_MAX - 1)
        behind, below = 0, 0
        for node, _ in reversed(chain):
            below += node.uses  # who used a descendant used this page too
            if below + node.turns >= needed:
                return sum([one.count for one, _ in chain]) - behind
            behind += node.count
        return 0

    def _learned(self, chain: Sequence[tuple[PrefixNode, int]]) -> int:
        """The leading part that is worth most, net of the price of writing it."""
        price = self._shortage()
        worth = most = 0.0
        wanted = at = 0
        for node, _ in chain:
            for key in node.key_list():
                at += 1
                worth += self.returns.rate(node.space, key) - price
                if worth >= most:
                    most, wanted = worth, at
        return wanted

    def _shortage(self) -> float:
        """0 while the bucket is at least half full, 1 when it is empty."""
        if not self.bounded:
            return 0.0
        return min(1.0, max(0.0, 1 - 2 * self._bucket / self._bucket_max))

    def _fill(self, size_bytes: float) -> None:
        assert size_bytes >= 0
        self._bucket = min(self._bucket_max, self._bucket + size_bytes)

    def _advance(self, now_ns: int) -> None:
        if self._first_ns is None:
            self._first_ns = self._now_ns = now_ns
        elapsed = max(0, now_ns - self._now_ns)
        self._now_ns += elapsed
        self._fill(self.budget_bytes_per_day * elapsed / DAY_NS)
        if self._now_ns // DAY_NS != self._day:
            self._day = self._now_ns // DAY_NS
            self._today_bytes = 0


def ask_later(refused: Sequence[PrefixNode]) -> None:
    """Decide about the pages of a chain again when half of them are evicted, not for each one."""
    if refused:
        depth = (refused[0].first_depth + refused[-1].depth) // 2
        for node in refused:
            node.ask_depth = depth


def _behind(chain: Sequence[tuple[PrefixNode, int]], pages: int) -> list[PrefixNode]:
    """The nodes of a chain after its first ``pages`` pages."""
    found: list[PrefixNode] = []
    for node, _ in chain:
        pages -= node.count
        if pages < 0:
            found.append(node)
    return found
