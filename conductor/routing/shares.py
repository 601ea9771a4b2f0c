"""Fair shares of tenants: tenants above their share wait behind the others. Pure.

The usage of a tenant is counted in tokens, and counts half after :data:`HALF_S`. Its share is an
equal part of the usage of all tenants that have requests now. Below its share, the policy's order
holds; above it, its requests are considered after those of tenants with less usage, in steps of a
fifth. So no engine is idle while a tenant has requests, and two tenants that both request more than
there is get equal parts.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from math import floor, log2
from typing import Final

from conductor.routing.columns import Waiting

HALF_S: Final = 60.0
_SLACK: Final = 1.1
"""A tenant is above its share from this multiple of it on."""
_STEPS: Final = 4
"""In each power of two."""
OUTPUT_WEIGHT: Final = 4.0
"""A token of an answer counts as so many of a prompt."""
TENANTS_MAX: Final = 4096
_RENEWED: Final = 512
"""Halvings after which all numbers are scaled down."""


class FairShares:
    """What the tenants got."""

    def __init__(self) -> None:
        self._got: OrderedDict[str, float] = OrderedDict()  # at the scale of now
        self._scaled_at = 0.0
        self._present: Counter[str] = Counter()  # requests that have not ended

    def came(self, tenant: str) -> None:
        """A request of a tenant has come."""
        self._present[tenant] += 1

    def went(self, tenant: str) -> None:
        """It has ended."""
        self._present[tenant] -= 1
        if not self._present[tenant]:
            del self._present[tenant]

    def charge(self, tenant: str, tokens: float, now: float) -> None:
        """A tenant got engines for so many tokens; negative = it was charged too many before."""
        halvings = (now - self._scaled_at) / HALF_S
        if halvings > _RENEWED or halvings < 0:
            scale = 0.5**halvings if halvings > 0 else 1.0
            self._got = OrderedDict((one, got * scale) for one, got in self._got.items())
            self._scaled_at, halvings = now, 0.0
        got = self._got.get(tenant, 0.0) + tokens * 2.0**halvings
        self._got[tenant] = max(0.0, got)
        self._got.move_to_end(tenant)
        if len(self._got) > TENANTS_MAX:
            self._got.popitem(last=False)

    def levels(self) -> Mapping[str, int]:
        """How far each tenant is above its share: 4 = twice as much, 8 = four times.

        Those that are within are not among them.
        """
        if len(self._present) < 2:
            return {}
        got = {tenant: self._got.get(tenant, 0.0) for tenant in self._present}
        share = sum(got.values()) / len(got)
        if share <= 0:  # usage of long ago underflows to 0
            return {}
        return {
            tenant: max(1, floor(_STEPS * log2(one / share)))
            for tenant, one in got.items()
            if one > _SLACK * share
        }

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._got) <= TENANTS_MAX
        assert all(count > 0 for count in self._present.values())
        assert all(got >= 0 for got in self._got.values())


def in_turn(rows: Sequence[int], waiting: Waiting, levels: Mapping[str, int]) -> Sequence[int]:
    """Rows in their order, but urgent priorities first, and of each those within their shares."""
    if not levels and len(set(waiting.priorities)) < 2:
        return rows
    tenants = waiting.tenants
    return sorted(rows, key=lambda row: (waiting.priorities[row], levels.get(tenants[row], 0)))
