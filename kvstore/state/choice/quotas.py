"""Quotas and reservations of spaces in one tier. Pure.

A **quota** is the most bytes a space may have there: what would exceed it takes the space's own
least recently used leaves out first, and is refused when none can go. A **reservation** is what the
others must leave it: while the space is at or under it, only the space itself costs it pages.

In memory, spaces with limits have eviction queues of their own; all others of a tenant share one.
How limits are kept on disk is in :mod:`kvstore.state.disk.limits`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument
from kvstore.state.tree.prefix_tree import PrefixTree

LIMITED_MAX: Final = 64
"""Every choice of a page to evict looks at each space with limits."""
SHRINK_MAX: Final = 64
"""Pages that one grant evicts to come within a quota; the rest goes in turns."""


@dataclass(slots=True)
class SpaceLimits:
    """What one space may and must have; 0 = no limit."""

    space: PrefixTree
    quota_bytes: int = 0
    reserved_bytes: int = 0


class Quotas:
    """The limits of all spaces of one node in one tier.

    Args:
        used: what a space has there, in bytes.
    """

    def __init__(self, used: Callable[[PrefixTree], int]) -> None:
        self.used = used
        self._limits: dict[int, SpaceLimits] = {}

    def get(self, space: PrefixTree) -> SpaceLimits:
        """The limits of a space; a copy."""
        known = self._limits.get(space.number)
        if known is None:
            return SpaceLimits(space)
        return SpaceLimits(space, known.quota_bytes, known.reserved_bytes)

    def is_limited(self, space: PrefixTree) -> bool:
        """Whether the space has limits, or had some."""
        return space.number in self._limits

    def all(self) -> list[SpaceLimits]:
        """The limits of every space that has any."""
        return [one for one in self._limits.values() if one.quota_bytes or one.reserved_bytes]

    def set(
        self, space: PrefixTree, quota_bytes: int, reserved_bytes: int, capacity_bytes: int
    ) -> None:
        """Limit a space.

        Raises:
            InvalidArgument: they contradict each other.
            CapacityError: more would be reserved than there is, or too many spaces have limits.
        """
        if quota_bytes < 0 or reserved_bytes < 0:
            raise InvalidArgument("quota_bytes", "limits are not negative")
        if quota_bytes and reserved_bytes > quota_bytes:
            raise InvalidArgument(
                "reserved_bytes", f"{reserved_bytes} is more than the quota of {quota_bytes}"
            )
        others = sum(one.reserved_bytes for one in self._limits.values() if one.space is not space)
        if others + reserved_bytes > capacity_bytes:
            raise CapacityError(
                f"{others} of the {capacity_bytes} bytes that can be are reserved already;"
                f" {reserved_bytes} more do not fit",
                "reserved_bytes",
            )
        if space.number not in self._limits:
            if len(self._limits) >= LIMITED_MAX:
                raise CapacityError(
                    f"{LIMITED_MAX} spaces have (or had) limits, and no more can", "space"
                )
            self._limits[space.number] = SpaceLimits(space)
        limits = self._limits[space.number]
        limits.quota_bytes, limits.reserved_bytes = quota_bytes, reserved_bytes

    def queue_name(self, space: PrefixTree) -> str:
        """Which eviction queues the pages of a space are in."""
        return f"\0{space.label}" if space.number in self._limits else space.identity.tenant

    def payers(self, space: PrefixTree, slot_bytes: int) -> list[str]:
        """The queues from which room of one slot may be made for ``space``."""
        tenant = space.identity.tenant
        return [
            tenant,
            *(
                self.queue_name(limits.space)
                for limits in self._limits.values()
                if limits.space.identity.tenant == tenant
                and not self._protected(limits, space, slot_bytes)
            ),
        ]

    def protects(self, victim: PrefixTree, space: PrefixTree, size_bytes: int) -> bool:
        """Whether ``victim`` must not lose that many bytes for the sake of ``space``."""
        limits = self._limits.get(victim.number)
        return limits is not None and self._protected(limits, space, size_bytes)

    def exceeded(self, space: PrefixTree, more_bytes: int = 0) -> bool:
        """Whether the space is over its quota, or would be with so much more."""
        limits = self._limits.get(space.number)
        return limits is not None and 0 < limits.quota_bytes < self.used(space) + more_bytes

    def _protected(self, limits: SpaceLimits, space: PrefixTree, size_bytes: int) -> bool:
        return (
            limits.space is not space
            and limits.reserved_bytes > 0
            and self.used(limits.space) - size_bytes < limits.reserved_bytes
        )
