"""In which order segments may be deleted, for the sake of their tombstones. Pure.

A tombstone keeps a start from finding the older records of its pages. A segment with tombstones is
therefore not deleted before the segments that may hold older records. Which these are is kept as
two numbers for each segment, not as a set: with a tombstone in each of thousands of segments the
sets would have millions of members.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

NEVER_AWAITED: Final = 1 << 62
"""Rank of a segment without records of pages, which no tombstone waits for."""


@dataclass(slots=True)
class Order:
    """The place of a segment in this order.

    Attributes:
        rank: by the age of its oldest record of a page; each segment has another one.
        until: its tombstones are newer than the segments with lower ranks than this; 0 = it has
            none, or no segment is older than they are.
    """

    rank: int
    until: int = 0

    def waits_for(self, other: "Order") -> bool:
        """Whether a segment is not deleted before another one.

        If each of two has tombstones that are newer than the other one, only the younger waits.
        """
        return other.rank < (min(self.until, self.rank) if other.until else self.until)


@dataclass(frozen=True, slots=True)
class Awaited:
    """Which segments are waited for by some of many.

    Attributes:
        plain: those without tombstones whose ranks are lower than this.
        others: those with tombstones whose ranks are lower than this.
    """

    plain: int
    others: int

    def has(self, order: Order) -> bool:
        """Whether one of the many waits for a segment."""
        return order.rank < (self.others if order.until else self.plain)


def awaited_by(orders: Iterable[Order]) -> Awaited:
    """Which segments these wait for."""
    plain = others = 0
    for order in orders:
        if order.until:
            plain = max(plain, order.until)
            others = max(others, min(order.until, order.rank))
    return Awaited(plain, others)


@dataclass(frozen=True, slots=True)
class Eldest:
    """The segments that are waited for longest.

    Attributes:
        plain: the lowest rank of those without tombstones.
        others: the lowest rank of those with tombstones.
    """

    plain: int
    others: int

    def holds_up(self, order: Order) -> bool:
        """Whether a segment waits for another one of those from which this was made."""
        assert order.rank >= min(self.plain, self.others)
        # Neither is itself: `plain` has no tombstones, and `others` has a lower rank.
        return self.plain < order.until or self.others < min(order.until, order.rank)


def eldest_of(orders: Iterable[Order]) -> Eldest:
    """See :class:`Eldest`."""
    plain = others = NEVER_AWAITED
    for order in orders:
        if order.until:
            others = min(others, order.rank)
        else:
            plain = min(plain, order.rank)
    return Eldest(plain, others)
