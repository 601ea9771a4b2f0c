"""Quotas and reservations of spaces in one tier, and operator pins. Pure.

A **quota** is the maximum size of a space in the tier: to store more, the space's own least
recently used leaves are evicted first, and the request is refused if none can be. A **reservation**
is what other spaces must leave it: while the space is at or below it, only the space itself evicts
its pages.

In memory, spaces with limits have eviction queues of their own; all others of a tenant share one.
How limits are enforced on disk is in :mod:`kvstore.state.disk.limits`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.errors import CapacityError, InvalidArgument, KVStoreError, NotFound
from kvstore.protocol.page import PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree

LIMITED_MAX: Final = 64
"""Maximum spaces with limits: every choice of a victim examines each of them."""
SHRINK_MAX: Final = 64
"""Maximum pages that one grant evicts to get within a quota, beside one for each page that it
brings; the rest is evicted in later turns."""


@dataclass(slots=True)
class SpaceLimits:
    """The limits of one space; 0 = none."""

    space: PrefixTree
    quota_bytes: int = 0
    reserved_bytes: int = 0


class Quotas:
    """The limits of all spaces of one node in one tier.

    Args:
        used: returns the size of a space in the tier, in bytes.

    Attributes:
        limited: number → limits of each space that has or had some; :meth:`set` changes it.
    """

    def __init__(self, used: Callable[[PrefixTree], int]) -> None:
        self.used = used
        self.limited: dict[int, SpaceLimits] = {}

    def get(self, space: PrefixTree) -> SpaceLimits:
        """The limits of a space; a copy."""
        known = self.limited.get(space.number)
        if known is None:
            return SpaceLimits(space)
        return SpaceLimits(space, known.quota_bytes, known.reserved_bytes)

    def all(self) -> list[SpaceLimits]:
        """The limits of every space that has any."""
        return [one for one in self.limited.values() if one.quota_bytes or one.reserved_bytes]

    def set(
        self, space: PrefixTree, quota_bytes: int, reserved_bytes: int, capacity_bytes: int
    ) -> None:
        """Set the limits of a space.

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
        others = sum(one.reserved_bytes for one in self.limited.values() if one.space is not space)
        if others + reserved_bytes > capacity_bytes:
            raise CapacityError(
                f"reservations may total {capacity_bytes} bytes; {others} are in use,"
                f" {reserved_bytes} do not fit",
                "reserved_bytes",
            )
        if space.number not in self.limited:
            if len(self.limited) >= LIMITED_MAX:
                raise CapacityError(
                    f"{LIMITED_MAX} spaces have (or had) limits, and no more can", "space"
                )
            self.limited[space.number] = SpaceLimits(space)
        limits = self.limited[space.number]
        assert limits.space is space
        limits.quota_bytes, limits.reserved_bytes = quota_bytes, reserved_bytes

    def payers(self, space: PrefixTree, slot_bytes: int) -> list[PrefixTree]:
        """The limited spaces whose pages may be evicted to free one slot for ``space``."""
        return [
            limits.space
            for limits in self.limited.values()
            if limits.space.identity.tenant == space.identity.tenant
            and not self.protects(limits.space, space, slot_bytes)
        ]

    def protects(self, victim: PrefixTree, space: PrefixTree, size_bytes: int) -> bool:
        """Whether ``victim`` must not lose ``size_bytes`` bytes to ``space``."""
        spare = self.spare(victim, space)
        return spare is not None and spare < size_bytes

    def exceeded(self, space: PrefixTree, more_bytes: int = 0) -> bool:
        """Whether the space is over its quota, or would be with ``more_bytes`` more."""
        return self.excess(space, more_bytes) > 0

    def excess(self, space: PrefixTree, more_bytes: int = 0) -> int:
        """Bytes that the space, with ``more_bytes`` more, is over its quota; 0 = it is not."""
        limits = self.limited.get(space.number)
        if limits is None or not limits.quota_bytes:
            return 0
        return max(0, self.used(space) + more_bytes - limits.quota_bytes)

    def spare(self, victim: PrefixTree, space: PrefixTree) -> int | None:
        """Bytes that ``victim`` may lose to ``space``; None = all that it has."""
        limits = self.limited.get(victim.number)
        if limits is None or victim is space or not limits.reserved_bytes:
            return None
        return max(0, self.used(victim) - limits.reserved_bytes)


PINS_MAX: Final = 1024
PIN_KEYS_MAX = 32_768
"""Maximum keys of one pin."""
_STEP_KEYS: Final = 32
"""Maximum pages that one step pins: each is split off its run, which costs up to 100 microseconds
if the run is on disk only."""


@dataclass(slots=True, eq=False)
class Pin:
    """One pinned prefix.

    Attributes:
        number: names the pin on this node.
        nodes: those of ``key`` and all its ancestors, these first; while it is being made, those
            that it has found, the last page first; once it has ended, those that are not let go.
        pages: how many it covers.
        size_bytes: size of their pages in its tier when the pin was made, present or not.
        tier: where the pages are kept, ``host`` or ``ssd``.
        expires_ns: when it expires; 0 = never.
        covers: whether it has found all its pages.
        written: how many of ``nodes`` are known to be on disk, or to be on their way there.
    """

    number: int
    space: PrefixTree
    key: PrefixKey
    expires_ns: int
    tier: Tier
    nodes: list[PrefixNode] = field(default_factory=list)
    pages: int = 0
    size_bytes: int = 0
    covers: bool = False
    written: int = 0


class Pins:
    """All operator pins of one node: prefixes that no policy evicts, for a time, within a budget.

    A pin covers the pages of a key and of all keys before it, in one tier. It only prevents their
    eviction from that tier: a corrupt page is dropped even if pinned. If a page that is pinned in
    memory is only on disk, it is kept there; if one that is pinned on disk is only in memory, it
    stays in memory until it is written. A pin is made in steps, the last pages first, and charged
    for each page once, when it is pinned, to the budget of its tier, wherever the page is then;
    pages that two pins share are charged twice. So no budget is ever exceeded. A pin that ends, or
    cannot be made, lets go of its pages in steps, the last ones first, and is charged until it has
    let go of all.

    Args:
        budget_bytes: maximum size of all pins in memory.
        disk_budget_bytes: maximum size of all pins on disk.
    """

    def __init__(self, budget_bytes: int = 0, disk_budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.disk_budget_bytes = disk_budget_bytes
        self.used_bytes = 0
        self.disk_used_bytes = 0
        #: Pins that have not pinned all their pages yet, by number.
        self.making: dict[int, Pin] = {}
        #: Pins that have ended and have pages to let go of.
        self.ending: deque[Pin] = deque()
        self._pins: dict[int, Pin] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def begin(self, space: PrefixTree, key: PrefixKey, expires_ns: int, tier: Tier) -> Pin:
        """Start to pin the pages of ``key`` and of all keys before it in a tier.

        The caller continues with :meth:`cover`, and ends with :meth:`complete` or :meth:`give_up`.

        Raises:
            NotFound: no page is stored under the key.
            CapacityError: there are too many pins.
        """
        _stored(space, key)
        if len(self._pins) + len(self.making) + len(self.ending) >= PINS_MAX:
            raise CapacityError(f"{PINS_MAX} pins exist already; unpin one first")
        self._number += 1
        assert self._number not in self._pins
        pin = self.making[self._number] = Pin(self._number, space, key, expires_ns, tier)
        return pin

    def cover(self, pin: Pin) -> None:
        """Pin some more pages of a pin; ``pin.covers`` says whether these were the last ones.

        Raises:
            NotFound: no page is stored under its key, or it has been dropped meanwhile.
            CapacityError: the budget does not suffice, or it is more than one pin may cover.
        """
        assert pin.number in self.making
        assert not pin.covers
        space, on_disk = pin.space, pin.tier == "ssd"
        at: PrefixNode | None = _stored(space, pin.key)
        if pin.nodes:
            if at is not pin.nodes[0]:
                raise _not_stored(pin.key)  # it was dropped, and stored again
            at = pin.nodes[-1].parent
        some: list[PrefixNode] = []
        size = 0
        while at is not None and at is not space.root and len(some) < _STEP_KEYS:
            some.append(at)
            for shard in {*at.slot_columns, *at.place_columns}:
                of = space.shards[shard]
                size += of.record_bytes if on_disk else of.slot_bytes
            at = at.parent
        if at is None:
            raise _not_stored(pin.key)  # it leaves with a page before it
        if pin.pages + len(some) > PIN_KEYS_MAX:
            raise CapacityError(f"a pin covers {PIN_KEYS_MAX} keys at most", "key")
        used = self.disk_used_bytes if on_disk else self.used_bytes
        budget = self.disk_budget_bytes if on_disk else self.budget_bytes
        if used + size > budget:
            name = "admin.pin_ssd_budget_bytes" if on_disk else "admin.pin_budget_bytes"
            before = used - pin.size_bytes
            raise CapacityError(
                f"{pin.size_bytes + size} more bytes would exceed the pin budget ({before} of"
                f" {budget} used); unpin something or raise {name}",
                name,
            )
        assert at is space.root or len(some) == _STEP_KEYS, at
        _count(some, pin.tier, 1)
        pin.nodes += some
        pin.pages += len(some)
        assert pin.pages == len(pin.nodes), pin.nodes[0]
        pin.size_bytes += size
        self._charge(pin.tier, size)
        if at is space.root:
            pin.nodes.reverse()
            pin.covers = True

    def refuse_changed(self, pin: Pin) -> None:
        """Pages may leave between the steps of a pin that has found all of its pages.

        Raises:
            NotFound: the page of its key has been dropped, or others precede its first page now.
        """
        assert pin.covers
        if _stored(pin.space, pin.key) is not pin.nodes[-1]:
            raise _not_stored(pin.key)
        if pin.nodes[0].above is not pin.space.root:
            raise NotFound("key", "pages before its first one were unknown until now; try again")

    def complete(self, pin: Pin) -> None:
        """All pages of a pin are pinned: from now on it is one of those that are listed."""
        assert pin.covers
        assert pin.nodes[0].above is pin.space.root, pin.nodes[0]
        self._pins[pin.number] = self.making.pop(pin.number)

    def give_up(self, pin: Pin) -> None:
        """A pin cannot be made: it lets go of what it has pinned."""
        assert self.making[pin.number] is pin
        del self.making[pin.number]
        if not pin.covers:
            pin.nodes.reverse()
        if pin.nodes:
            self.ending.append(pin)

    def add(self, space: PrefixTree, key: PrefixKey, expires_ns: int, tier: Tier = "host") -> Pin:
        """Make a pin at once, however long it is.

        Raises:
            NotFound, CapacityError: see :meth:`cover`.
        """
        pin = self.begin(space, key, expires_ns, tier)
        try:
            while not pin.covers:
                self.cover(pin)
        except KVStoreError:
            self.give_up(pin)
            raise
        self.complete(pin)
        return pin

    def remove(self, number: int) -> Pin:
        """End a pin; :meth:`let_go` then says which of its nodes may be evictable again.

        Raises:
            NotFound: there is no such pin.
        """
        pin = self._pins.pop(number, None)
        if pin is None:
            raise NotFound("pin", f"{number} does not exist; it may have expired")
        assert pin.number == number
        self.ending.append(pin)
        return pin

    def let_go(self, most: int) -> list[PrefixNode]:
        """Let go of up to ``most`` pages of pins that have ended; returns their nodes."""
        gone: list[PrefixNode] = []
        while self.ending and len(gone) < most:
            pin = self.ending[0]
            some = pin.nodes[len(gone) - most :]
            del pin.nodes[len(gone) - most :]
            _count(some, pin.tier, -1)
            gone += reversed(some)
            if not pin.nodes:
                self.ending.popleft()
                self._charge(pin.tier, -pin.size_bytes)
        return gone

    def _charge(self, tier: Tier, size_bytes: int) -> None:
        if tier == "ssd":
            self.disk_used_bytes += size_bytes
            assert self.disk_used_bytes >= 0
        else:
            self.used_bytes += size_bytes
            assert self.used_bytes >= 0

    def expire(self, now_ns: int) -> None:
        """End the pins that have expired."""
        for pin in list(self._pins.values()):
            if 0 < pin.expires_ns <= now_ns:
                self.remove(pin.number)

    def next_deadline_ns(self) -> int:
        """The earliest expiry of a pin; 0 = none expires."""
        return min((pin.expires_ns for pin in self._pins.values() if pin.expires_ns), default=0)

    def check(self) -> None:
        """Assert that charges and counts agree."""
        for tier, used, budget in (
            ("host", self.used_bytes, self.budget_bytes),
            ("ssd", self.disk_used_bytes, self.disk_budget_bytes),
        ):
            pins = [*self._pins.values(), *self.making.values(), *self.ending]
            sizes = [pin.size_bytes for pin in pins if pin.tier == tier]
            assert used == sum(sizes)
            assert used <= budget or not sizes
        assert all(len(pin.nodes) == pin.pages for pin in self._pins.values())
        assert all(pin.nodes for pin in self.ending), "it has nothing to let go of"
        assert len(self._pins) + len(self.making) + len(self.ending) <= PINS_MAX


def _count(nodes: list[PrefixNode], tier: Tier, change: int) -> None:
    """Count one more pin of these nodes, or one less."""
    if tier == "ssd":
        for node in nodes:
            node.disk_pins += change
            assert node.disk_pins >= 0, node
    else:
        for node in nodes:
            node.memory_pins += change
            assert node.memory_pins >= 0, node


def _stored(space: PrefixTree, key: PrefixKey) -> PrefixNode:
    node = space.nodes.get(key)
    if node is None or not node.ready:
        raise _not_stored(key)
    return node


def _not_stored(key: PrefixKey) -> NotFound:
    return NotFound("key", f"no page of {key.hex()} is stored in this space")


def expiry(ttl_s: float, now_ns: int) -> int:
    """The expiry of a pin of ``ttl_s`` seconds; 0 seconds = never.

    Raises:
        InvalidArgument: it is negative or longer than ten years.
    """
    if not 0 <= ttl_s <= 10 * 366 * 86_400:
        raise InvalidArgument("ttl_s", f"{ttl_s} is outside 0 (no end) to ten years")
    return now_ns + int(ttl_s * 1e9) if ttl_s else 0
