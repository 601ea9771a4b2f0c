"""Slots: the places for pages in one tier, and which processes may access the bytes in them.

::

             allocate            commit             release
      FREE ───────────► WRITING ────────► READY ──────────────► FREE
        ▲                  │                │ pins or holds left   ▲
        │ abort            │ lose           ▼                      │ the last one goes
        └──────────────────┴─────────────► LIMBO ──────────────────┘

A **pin** prevents eviction while bytes are copied. A **hold** is a reader or writer that may still
access the bytes although it no longer has the right to (its lease expired, its connection broke):
the page may be dropped, but its slot is not reused before the hold is released, so that a late read
or write never hits another page.

Slots of one size are carved from **extents**. An extent belongs to one domain (tenant) at a time,
because a process that maps it can read all of it.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Final, NamedTuple, NewType

from kvstore.protocol.counts import HostSizes
from kvstore.state.tree.coldest import ColdestExtents, empty_of_others, is_empty

Slot = NewType("Slot", int)
"""``extent position << 20 | index within the extent``."""

SLOT_ALIGNMENT: Final = 4096
INDEX_BITS: Final = 20
"""Bits of a slot's index within its extent."""
INDEX_MASK: Final = (1 << INDEX_BITS) - 1
STRETCH_SLOTS = 128
"""Slots that one stretch of :meth:`SlotTable.checks` examines: some 50 microseconds."""


class SlotState(IntEnum):
    """The state of a slot; see the picture above."""

    FREE = 0
    WRITING = 1
    READY = 2
    LIMBO = 3


_FREE: Final = int(SlotState.FREE)
_WRITING: Final = int(SlotState.WRITING)
_READY: Final = int(SlotState.READY)
_LIMBO: Final = int(SlotState.LIMBO)
_WRITINGS: Final = bytes([_WRITING])
_READIES: Final = bytes([_READY])
_WORD: Final = (1 << 32) - 1
"""Members of an enumeration are looked up by name each time, plain numbers are not."""


@dataclass(slots=True)
class Extent:
    """A piece of the tier's memory that holds slots of one size for one domain.

    Attributes:
        number: names its memory on the wire; a new number is new memory.
        domain: tenant that may map it; None while unassigned.
        slot_bytes: bytes of each slot; 0 while unassigned.
        free: all and only the indexes of FREE slots.
        pinned: slots with a pin.
        writing: WRITING slots.
        limbo: LIMBO slots; all others are FREE or READY.
        used_at: tick of the last commit or pin of any of its slots.
        retiring: its slots are not allocated any more; it gets new memory once it is not needed.
        draining: its slots are not allocated until it is empty; then any class may get it.
        addresses: two words per slot, see :meth:`SlotTable.addresses`.
        generation: number of allocations; each slot stores the one that made it WRITING.
    """

    number: int
    domain: str | None = None
    slot_bytes: int = 0
    count: int = 0
    states: bytearray = field(default_factory=bytearray)
    pins: "array[int]" = field(default_factory=partial(array, "I"))
    holds: "array[int]" = field(default_factory=partial(array, "I"))
    addresses: "array[int]" = field(default_factory=partial(array, "Q"))
    free: "array[int]" = field(default_factory=partial(array, "I"))
    pinned: int = 0
    writing: int = 0
    limbo: int = 0
    used_at: int = 0
    generation: int = 0
    retiring: bool = False
    draining: bool = False

    @property
    def closed(self) -> bool:
        """Whether its FREE slots may not be allocated."""
        return self.retiring or self.draining

    @property
    def ready(self) -> int:
        """READY slots."""
        return self.count - len(self.free) - self.writing - self.limbo

    @property
    def class_of(self) -> tuple[str | None, int]:
        """The tenant and the size of its slots."""
        return self.domain, self.slot_bytes

    def carve(self, domain: str, slot_bytes: int, extent_bytes: int) -> None:
        """Divide the whole extent into FREE slots of ``slot_bytes``."""
        assert len(self.free) == self.count, "only an empty extent may change"
        self.domain, self.slot_bytes, self.draining = domain, slot_bytes, False
        self.count = count = extent_bytes // slot_bytes
        self.states = bytearray(count)
        self.pins = array("I", bytes(4 * count))
        self.holds = array("I", bytes(4 * count))
        self.addresses = array("Q", bytes(16 * count))
        self.addresses[1::2] = array("Q", range(0, count * slot_bytes, slot_bytes))
        self.free = array("I", range(count - 1, -1, -1))

    def name_slots(self, first: int, end: int) -> None:
        """Slots are allocated: each gets a new generation."""
        made, self.generation = self.generation + 1, self.generation + end - first
        words = [self.number | (one & _WORD) << 32 for one in range(made, self.generation + 1)]
        self.addresses[2 * first : 2 * end : 2] = array("Q", words)

    def change_pins(self, first: int, end: int, change: int) -> None:
        """Add (1) or remove (-1) a pin of each slot."""
        count, before = end - first, self.pins[first]
        if self.pins[first:end] != array("I", [before]) * count:
            for at in range(first, end):
                self.change_pins(at, at + 1, change)
            return
        after = before + change
        assert after >= 0
        self.pins[first:end] = array("I", [after]) * count
        self.pinned += count * (bool(after) - bool(before))
        assert 0 <= self.pinned <= self.count


class Replacement(NamedTuple):
    """An extent gets new memory.

    Attributes:
        old: number of its old memory.
        new: number of its new memory.
        in_use: the old memory may still be read: unmap it, and leave its bytes as they are.
            Otherwise its memory is freed at once.
    """

    old: int
    new: int
    in_use: bool


class SlotTable:
    """All slots of one tier of one node.

    Args:
        extent_bytes: bytes of each extent.
        extent_count: extents in use from the start.
        withheld: further extents whose memory is not available yet (see :meth:`provide`).
    """

    def __init__(self, extent_bytes: int, extent_count: int, withheld: int = 0) -> None:
        assert extent_bytes % SLOT_ALIGNMENT == 0
        self.extent_bytes = extent_bytes
        self.extents = [Extent(number) for number in range(extent_count)]
        self.withheld = withheld
        #: Calls that changed a slot.
        self.changes = 0
        #: Memory that must be replaced before the next answer goes out.
        self.replaced: list[Replacement] = []
        self._next_number = extent_count
        #: All and only the positions of unassigned extents.
        self._unassigned = list(range(extent_count - 1, -1, -1))
        #: Per class all positions of extents with a FREE slot (and, lazily, some without).
        self._open: dict[tuple[str, int], list[int]] = {}
        #: All positions of assigned extents whose slots are all FREE (and, lazily, some others).
        self._empty: set[int] = set()
        self._coldest = ColdestExtents()

    def provide(self, count: int) -> list[int]:
        """Start to use ``count`` withheld extents; returns their numbers."""
        self.changes += 1
        numbers = self.withheld_numbers(count)
        self.withheld -= len(numbers)
        for number in numbers:
            self._unassigned.insert(0, len(self.extents))
            self.extents.append(Extent(number))
        self._next_number += len(numbers)
        assert self.withheld >= 0, "more memory than there is"
        return numbers

    def withheld_numbers(self, count: int) -> list[int]:
        """The numbers that the next ``count`` withheld extents will have, or of all if fewer."""
        return list(range(self._next_number, self._next_number + min(count, self.withheld)))

    # ---- life of a slot ---------------------------------------------------------------------

    def allocate(self, count: int, domain: str, slot_bytes: int) -> list[Slot]:
        """Make up to ``count`` FREE slots of a class WRITING; fewer if there are fewer."""
        assert slot_bytes % SLOT_ALIGNMENT == 0
        assert slot_bytes <= self.extent_bytes
        open_positions = self._open.get((domain, slot_bytes))
        if open_positions is None:
            open_positions = self._open[domain, slot_bytes] = []
        taken: list[Slot] = []
        self.changes += 1
        while len(taken) < count:
            if not open_positions and not self._claim(domain, slot_bytes):
                break
            position = open_positions[-1]
            extent = self.extents[position]
            other = extent.slot_bytes != slot_bytes or extent.domain != domain
            if extent.closed or other or not extent.free:
                open_positions.pop()
                continue
            indexes = extent.free[len(taken) - count :]  # the last ones, fewer when there are fewer
            del extent.free[len(taken) - count :]
            indexes.reverse()
            base = position << INDEX_BITS
            some = [Slot(base | index) for index in indexes.tolist()]
            for _, first, end in self._blocks(some):
                assert extent.states.count(_FREE, first, end) == end - first
                extent.states[first:end] = _WRITINGS * (end - first)
                extent.writing += end - first
                extent.name_slots(first, end)
            taken += some
        return taken

    def commit(self, slots: list[Slot], tick: int) -> None:
        """WRITING → READY: the bytes are complete and not written any more."""
        self.changes += 1
        for extent, first, end in self._blocks(slots):
            assert extent.states.count(_WRITING, first, end) == end - first
            extent.states[first:end] = _READIES * (end - first)
            extent.writing -= end - first
            extent.used_at = tick

    def abort(self, slots: Iterable[Slot]) -> None:
        """WRITING → FREE: the writer is known to have stopped."""
        self.changes += 1
        for slot in slots:
            extent, index = self._locate(slot)
            assert extent.states[index] == SlotState.WRITING
            assert not extent.holds[index], "a slot that its writer may still write to"
            extent.writing -= 1
            self._free(slot, extent, index)

    def lose(self, slots: Iterable[Slot]) -> None:
        """WRITING → LIMBO with one hold: the writer may still write; see :meth:`unhold`."""
        self.changes += 1
        for slot in slots:
            extent, index = self._locate(slot)
            assert extent.states[index] == SlotState.WRITING
            extent.states[index] = SlotState.LIMBO
            extent.writing -= 1
            extent.limbo += 1
            extent.holds[index] += 1

    def release(self, slots: list[Slot]) -> None:
        """READY → FREE, or → LIMBO while it may still be read: its page was evicted or dropped.

        Slots are reused in the given order, so that neighbours stay neighbours.
        """
        self.changes += 1
        for slot in reversed(slots):
            extent, index = self.extents[slot >> INDEX_BITS], slot & INDEX_MASK
            assert extent.states[index] == _READY
            if extent.pins[index] or extent.holds[index]:
                extent.states[index] = _LIMBO
                extent.limbo += 1
            else:
                self._free(slot, extent, index)

    def pin(self, slots: list[Slot], tick: int) -> None:
        """Prevent the eviction of READY slots; each call adds one pin."""
        self.changes += 1
        for extent, first, end in self._blocks(slots):
            assert extent.states.count(_READY, first, end) == end - first
            extent.change_pins(first, end, 1)
            extent.used_at = tick

    def unpin(self, slots: list[Slot]) -> None:
        """Remove one pin from each; a LIMBO slot without pins and holds becomes FREE."""
        self.changes += 1
        limbo = 0
        for extent, first, end in self._blocks(slots):
            extent.change_pins(first, end, -1)
            gone = extent.states.count(_LIMBO, first, end)
            assert extent.states.count(_READY, first, end) + gone == end - first
            limbo += gone
        for slot in slots if limbo else ():
            self._settle(slot, *self._locate(slot))

    def pin_to_hold(self, slots: Iterable[Slot]) -> None:
        """A lease expired, but its reader may still read: eviction is allowed, reuse is not."""
        self.changes += 1
        for slot in slots:
            extent, index = self._locate(slot)
            assert extent.pins[index] > 0
            extent.pins[index] -= 1
            extent.pinned -= not extent.pins[index]
            assert extent.pinned >= 0
            extent.holds[index] += 1

    def unhold(self, slots: Iterable[Slot]) -> None:
        """The reader or writer behind one hold of each is known to have stopped."""
        self.changes += 1
        for slot in slots:
            extent, index = self._locate(slot)
            assert extent.holds[index] > 0
            extent.holds[index] -= 1
            self._settle(slot, extent, index)

    # ---- memory that changes its class ------------------------------------------------------

    def drain(self, position: int) -> None:
        """Allocate no slot of an extent until it is empty, see :meth:`end_drain`."""
        assert self.extents[position].domain is not None, "nothing to drain"
        assert not self.extents[position].closed
        self.extents[position].draining = True

    def end_drain(self, position: int) -> bool:
        """Whether the extent is empty, and free for any class; else its slots are used again."""
        extent = self.extents[position]
        if len(extent.free) == extent.count:
            return True
        extent.draining = False
        self._coldest.changes += 1
        if extent.free and not extent.retiring:
            self._reopen(position)
        return False

    # ---- memory that nobody may use again ---------------------------------------------------

    def retire(self, position: int) -> None:
        """Allocate no slot of an extent any more; :meth:`replace` ends this."""
        assert self.extents[position].domain is not None, "nobody has had it"
        assert not self.extents[position].retiring
        self.extents[position].retiring = True

    def retirable(self, position: int, given_up: Mapping[Slot, int]) -> bool:
        """Whether only holds that were ``given_up`` (a number per slot) keep the extent."""
        extent = self.extents[position]
        assert extent.retiring
        return all(
            extent.states[self.index(slot)] == SlotState.LIMBO
            and not extent.pins[self.index(slot)]
            and extent.holds[self.index(slot)] == given_up.get(slot, 0)
            for slot in self.slots_in_use(position)
        )

    def replace(self, position: int) -> None:
        """Give an extent new memory: late accesses through old mappings then hit no page."""
        extent = self.extents[position]
        assert extent.retiring
        assert extent.domain is not None
        self._open[extent.domain, extent.slot_bytes] = [
            at for at in self._open[extent.domain, extent.slot_bytes] if at != position
        ]
        self.changes += 1
        self._renumber(extent, in_use=True)
        self.extents[position] = Extent(extent.number, generation=extent.generation)
        self._unassigned.insert(0, position)

    # ---- questions --------------------------------------------------------------------------

    def address(self, slot: Slot) -> tuple[int, int, int]:
        """``(extent number, generation, byte offset)`` of a slot, as sent on the wire.

        The generation is its last 32 bits.
        """
        extent, index = self._locate(slot)
        return extent.number, extent.addresses[2 * index] >> 32, index * extent.slot_bytes

    def addresses(self, slots: list[Slot]) -> bytes:
        """The same for several slots, as :data:`kvstore.protocol.wire.ADDRESS`."""
        blocks = self._blocks(slots)
        return b"".join([one.addresses[2 * at : 2 * end].tobytes() for one, at, end in blocks])

    def state(self, slot: Slot) -> SlotState:
        """The slot's state."""
        extent, index = self._locate(slot)
        return SlotState(extent.states[index])

    def pinned(self, slot: Slot) -> bool:
        """Whether a pin prevents the slot's eviction."""
        extent, index = self._locate(slot)
        return extent.pins[index] > 0

    def in_use(self, slot: Slot) -> bool:
        """Whether the slot is being read, or may still be."""
        extent, index = self._locate(slot)
        return extent.pins[index] > 0 or extent.holds[index] > 0

    def position(self, slot: Slot) -> int:
        """The index in ``extents`` of the slot's extent."""
        return slot >> INDEX_BITS

    def slot(self, position: int, index: int) -> Slot:
        """The slot of an extent at ``position`` in ``extents``."""
        return Slot(position << INDEX_BITS | index)

    def index(self, slot: Slot) -> int:
        """The index of the slot within its extent."""
        return slot & INDEX_MASK

    @property
    def capacity_bytes(self) -> int:
        """Bytes of all extents in use."""
        return len(self.extents) * self.extent_bytes

    def colder_extent(
        self, domain: str, slot_bytes: int, tick: int, staying: Set[int] = frozenset()
    ) -> int | None:
        """The least recently used extent of any other class, if not used since ``tick``.

        Extents in ``staying``, and those already being drained, are excluded.
        """
        if len(self._open) < 2:
            return None
        return self._coldest.find(self.extents, (domain, slot_bytes), tick, staying)

    def slots_in_use(self, position: int) -> list[Slot]:
        """All slots of one extent that are not FREE."""
        states = self.extents[position].states
        return [Slot(position << INDEX_BITS | at) for at in range(len(states)) if states[at]]

    def needed(self, position: int) -> bool:
        """Whether a slot of one extent is being written or read, or may still be accessed."""
        extent = self.extents[position]
        return extent.writing + extent.limbo + extent.pinned > 0 or any(extent.holds)

    def stats(self) -> HostSizes:
        """A consistent snapshot of sizes by state, in a time that depends on extents alone."""
        free = writing = ready = pinned = limbo = retiring = 0
        for extent in self.extents:
            retiring += self.extent_bytes * extent.retiring
            if extent.domain is None:
                free += self.extent_bytes
                continue
            free += len(extent.free) * extent.slot_bytes
            writing += extent.writing * extent.slot_bytes
            ready += extent.ready * extent.slot_bytes
            pinned += extent.pinned * extent.slot_bytes
            limbo += extent.limbo * extent.slot_bytes
        return HostSizes(
            capacity_bytes=self.capacity_bytes, withheld_bytes=self.withheld * self.extent_bytes,
            free_bytes=free, writing_bytes=writing, ready_bytes=ready, pinned_bytes=pinned,
            limbo_bytes=limbo, retiring_bytes=retiring,
        )  # fmt: skip

    def checks(self, also: Callable[[Slot, int], None]) -> Iterator[None]:
        """Assert every invariant, a stretch at a time; see :mod:`kvstore.state.table.invariants`.

        Args:
            also: asserts further invariants of a slot in this state.
        """
        changes, unassigned, seen = self.changes, 0, set[int]()
        for position in range(len(self.extents)):  # more may be provided meanwhile
            for at in self._unassigned[position : position + 1]:
                assert self.extents[at].domain is None
                assert at not in seen or self.changes != changes, "an extent is unassigned twice"
                seen.add(at)
            extent = self.extents[position]
            unassigned += extent.domain is None
            assert position in self._empty or not is_empty(extent), "nobody would get it"
            if extent.free and extent.domain is not None and not extent.closed:
                assert position in self._open[extent.domain, extent.slot_bytes]
            yield from self._check_slots(position, extent, also)
        assert unassigned == len(self._unassigned) or self.changes != changes

    def _check_slots(
        self, position: int, extent: Extent, also: Callable[[Slot, int], None]
    ) -> Iterator[None]:
        """Assert the invariants of each slot of an extent, and their sums."""
        changes, count, pinned, states = self.changes, extent.count, 0, [0, 0, 0, 0]
        seen = bytearray(count)
        for first in range(0, count or 1, STRETCH_SLOTS):
            last = min(first + STRETCH_SLOTS, count)
            for index in extent.free[first:last]:
                assert extent.states[index] == SlotState.FREE
                assert not seen[index] or self.changes != changes, "a slot is free twice"
                seen[index] = 1
            for index in range(first, last):
                state, used = extent.states[index], extent.pins[index] + extent.holds[index]
                assert state not in (SlotState.FREE, SlotState.WRITING) or used == 0
                assert state != SlotState.LIMBO or used > 0
                states[state] += 1
                pinned += extent.pins[index] > 0
                also(self.slot(position, index), state)
            yield
            if self.extents[position] is not extent or extent.count != count:
                return  # it has changed hands
        if self.changes == changes:
            assert len(extent.free) == states[_FREE], "a FREE slot that nobody finds"
            assert extent.pinned == pinned
            assert [extent.writing, extent.ready, extent.limbo] == states[_WRITING:]

    # ---- inside -----------------------------------------------------------------------------

    def _locate(self, slot: Slot) -> tuple[Extent, int]:
        return self.extents[slot >> INDEX_BITS], slot & INDEX_MASK

    def _blocks(self, slots: list[Slot]) -> list[tuple[Extent, int, int]]:
        """The slots grouped into runs: extent, first index, index behind the last."""
        found: list[tuple[Extent, int, int]] = []
        at, count = 0, len(slots)
        while at < count:
            first = end = slots[at]
            while at < count and slots[at] == end <= first | INDEX_MASK:
                at, end = at + 1, Slot(end + 1)
            index = first & INDEX_MASK
            found.append((self.extents[first >> INDEX_BITS], index, index + end - first))
        return found

    def _settle(self, slot: Slot, extent: Extent, index: int) -> None:
        if extent.states[index] == _LIMBO and not (extent.pins[index] or extent.holds[index]):
            extent.limbo -= 1
            self._free(slot, extent, index)

    def _free(self, slot: Slot, extent: Extent, index: int) -> None:
        extent.states[index] = _FREE
        if not extent.free and not extent.closed:
            self._reopen(self.position(slot))
        extent.free.append(index)
        if len(extent.free) == extent.count:
            self._empty.add(self.position(slot))

    def _reopen(self, position: int) -> None:
        """The extent again has a FREE slot that may be allocated."""
        extent = self.extents[position]
        assert extent.domain is not None
        open_positions = self._open[extent.domain, extent.slot_bytes]
        if position not in open_positions:
            open_positions.append(position)

    def _claim(self, domain: str, slot_bytes: int) -> bool:
        """Give the class one more extent: an unassigned one, or else any empty one."""
        position = self._unassigned.pop() if self._unassigned else self._others(domain, slot_bytes)
        if position is None:
            return False
        extent = self.extents[position]
        self._coldest.changes += 1
        assert not extent.retiring, "a late access would hit its new pages"
        if extent.domain is not None:
            former = self._open[extent.domain, extent.slot_bytes]
            if position in former:
                former.remove(position)
            if extent.domain != domain:
                self._renumber(extent, in_use=False)
        extent.carve(domain, slot_bytes, self.extent_bytes)
        self._open[domain, slot_bytes].append(position)
        return True

    def _others(self, domain: str, slot_bytes: int) -> int | None:
        """An empty extent of another class, or one that was drained; None if there is none."""
        if len(self._open) < 2:
            return None  # what is empty belongs to this class, or to none
        self._empty = {at for at in self._empty if is_empty(self.extents[at])}
        return empty_of_others(self.extents, self._empty, (domain, slot_bytes))

    def _renumber(self, extent: Extent, *, in_use: bool) -> None:
        """The extent will get new memory, under a new number."""
        assert in_use or len(extent.free) == extent.count, "memory in use would be freed"
        self.replaced.append(Replacement(extent.number, self._next_number, in_use))
        extent.number = self._next_number
        self._next_number += 1
