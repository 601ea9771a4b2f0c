"""Operator pins: prefixes that no policy may evict, for a time and within a budget. Pure.

A pin covers the pages of a key and of all keys before it. It keeps them from being evicted, and
from nothing else: a corrupt page leaves whoever pinned it. What a pin covers is charged once, when
it is made; pages that two pins share are charged to both, so the budget is never exceeded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument, NotFound
from kvstore.page import PrefixKey
from kvstore.state.tree import Node, Space

PINS_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Pin:
    """One prefix that is pinned.

    Attributes:
        number: names the pin on this node.
        nodes: the node of ``key`` and all above it.
        size_bytes: slot bytes of their pages in memory when the pin was made.
        expires_ns: when it ends by itself; 0 = never.
    """

    number: int
    space: Space
    key: PrefixKey
    nodes: tuple[Node, ...]
    size_bytes: int
    expires_ns: int


class Pins:
    """All operator pins of one node.

    Args:
        budget_bytes: what they may cover together.
    """

    def __init__(self, budget_bytes: int = 0) -> None:
        """Start with none."""
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._pins: dict[int, Pin] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, space: Space, key: PrefixKey, expires_ns: int) -> Pin:
        """Pin the pages of ``key`` and of all keys before it.

        Raises:
            NotFound: no page is stored under the key.
            CapacityError: the budget does not suffice, or there are too many pins.
        """
        node = space.nodes.get(key)
        if node is None or not node.ready:
            raise NotFound("key", f"no page of {key.hex()} is stored in this space")
        nodes: list[Node] = []
        at: Node | None = node
        while at is not None and at is not space.root:
            nodes.append(at)
            at = at.parent
        size = sum(space.shards[shard].slot_bytes for one in nodes for shard in one.slots)
        if self.used_bytes + size > self.budget_bytes:
            raise CapacityError(
                f"{size} more bytes would exceed the pin budget ({self.used_bytes} of"
                f" {self.budget_bytes} used); unpin something or raise admin.pin_budget_bytes"
            )
        if len(self._pins) >= PINS_MAX:
            raise CapacityError(f"{PINS_MAX} pins exist already; unpin one first")
        self._number += 1
        pin = Pin(self._number, space, key, tuple(nodes), size, expires_ns)
        self._pins[pin.number] = pin
        self.used_bytes += size
        for one in nodes:
            one.pins += 1
        return pin

    def remove(self, number: int) -> Pin:
        """End a pin; its nodes may be evictable again.

        Raises:
            NotFound: there is no such pin.
        """
        pin = self._pins.pop(number, None)
        if pin is None:
            raise NotFound("pin", f"{number} does not exist; it may have expired")
        self.used_bytes -= pin.size_bytes
        for node in pin.nodes:
            node.pins -= 1
        return pin

    def expire(self, now_ns: int) -> list[Node]:
        """End every pin whose time is up; returns the nodes that lost one."""
        ended = [pin for pin in self._pins.values() if 0 < pin.expires_ns <= now_ns]
        return [node for pin in ended for node in self.remove(pin.number).nodes]

    def next_deadline_ns(self) -> int:
        """The earliest end of a pin; 0 = none ends by itself."""
        return min((pin.expires_ns for pin in self._pins.values() if pin.expires_ns), default=0)

    def check(self) -> None:
        """Assert that what is charged and what is counted agree."""
        assert self.used_bytes == sum(pin.size_bytes for pin in self._pins.values())
        assert self.used_bytes <= self.budget_bytes or not self._pins


def expiry(ttl_s: float, now_ns: int) -> int:
    """When a pin of ``ttl_s`` seconds ends; 0 seconds = never.

    Raises:
        InvalidArgument: it is negative or longer than ten years.
    """
    if not 0 <= ttl_s <= 10 * 366 * 86_400:
        raise InvalidArgument("ttl_s", f"{ttl_s} is outside 0 (no end) to ten years")
    return now_ns + int(ttl_s * 1e9) if ttl_s else 0
