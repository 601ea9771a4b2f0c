"""Slots that the node has reserved for the next single pages of this process."""

import threading
from time import monotonic
from typing import Final, NamedTuple

from kvstore.client import forks

AHEAD_IDLE_S = 1.0
"""A slot that was not used for this long is given back; only clients that put single pages at least
that often request one."""
SLOTS_MAX: Final = 4
"""Slots of one connection; the node reserves no more."""


class ReservedSlot(NamedTuple):
    """A slot that only this process writes to.

    Attributes:
        put: the number under which it is reserved.
        epoch: epoch of the connection that has the slot.
        space: number of the space of its pages on that connection.
        shard: number of their shard.
        address: see :data:`kvstore.protocol.wire.ADDRESS`.
    """

    put: int
    epoch: int
    space: int
    shard: int
    address: bytes


class ReservedSlots:
    """The reserved slots of one connection to the node; thread-safe.

    A taken slot is used by one caller, until it is kept again or given back.
    """

    def __init__(self) -> None:
        self._begin_empty()
        self._closed = False
        forks.register(self)

    def _begin_empty(self) -> None:
        #: Protects the fields below; never held during a wait.
        self._lock = threading.Lock()
        #: Space and shard → its slot, and when it was kept.
        self._slots: dict[tuple[int, int], tuple[ReservedSlot, float]] = {}
        #: Space and shard → when a single page was put last.
        self._put_s: dict[tuple[int, int], float] = {}

    def take(self, epoch: int, space: int, shard: int) -> ReservedSlot | None:
        """The slot for a page of a shard; None = there is none on this connection."""
        with self._lock:
            kept = self._slots.get((space, shard))
            if kept is None or kept[0].epoch != epoch:
                return None
            del self._slots[space, shard]
            return kept[0]

    def is_worth_asking(self, space: int, shard: int) -> bool:
        """Whether to ask for a slot with a single page that is put now: is it one of many?"""
        now = monotonic()
        with self._lock:
            last = self._put_s.get((space, shard))
            if last is None and len(self._put_s) >= SLOTS_MAX:
                recent = {at: then for at, then in self._put_s.items() if now - then < AHEAD_IDLE_S}
                self._put_s = recent
                if len(recent) >= SLOTS_MAX:
                    return False
            self._put_s[space, shard] = now
            return not self._closed and last is not None and now - last < AHEAD_IDLE_S

    def forget(self, space: int, shard: int) -> None:
        """A page was there already: pages of this shard are asked about before they are copied."""
        with self._lock:
            self._put_s.pop((space, shard), None)

    def keep(self, slot: ReservedSlot) -> bool:
        """Keep a slot for the next page; False = give it back: there is one, or no more puts."""
        with self._lock:
            known = self._slots.get((slot.space, slot.shard))
            if self._closed or (known is not None and known[0].epoch == slot.epoch):
                return False
            self._slots[slot.space, slot.shard] = slot, monotonic()
            return True

    @property
    def any(self) -> bool:
        """Whether slots are kept."""
        return bool(self._slots)

    def unused(self) -> list[ReservedSlot]:
        """Slots that were not used for a while, to be given back."""
        if not self._slots:  # nearly always
            return []
        now = monotonic()
        with self._lock:
            idle = [slot for slot, since in self._slots.values() if now - since > AHEAD_IDLE_S]
            for slot in idle:
                del self._slots[slot.space, slot.shard]
            return idle

    def close(self) -> list[ReservedSlot]:
        """Keep no more; returns all slots, to be given back."""
        with self._lock:
            self._closed = True
            slots, self._slots = self._slots, {}
            return [slot for slot, _ in slots.values()]

    def forked(self) -> None:
        """In a forked child: the slots are the parent's."""
        self._begin_empty()
