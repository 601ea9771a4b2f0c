"""Goal: a slot that anyone may still touch is never given to anyone else."""

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.protocol.counts import HostSizes
from kvstore.protocol.wire import unpack_addresses
from kvstore.state.tree.slots import INDEX_MASK, Replacement, Slot, SlotState, SlotTable
from tests.state.world import hold

PAGE = 4096
EXTENT_BYTES = 4 * PAGE
SIZES = (PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE)  # three of PAGE leave a rest at the end
DOMAINS = ("red", "blue")


@dataclass
class Used:
    """What the model knows of one slot that is not FREE."""

    state: SlotState
    domain: str
    size: int
    place: tuple[int, int, int]
    pins: int = 0
    holds: int = 0


class SlotMachine(RuleBasedStateMachine):
    """Random lives of slots against a plain dict of those in use."""

    @initialize(extents=st.integers(1, 4), withheld=st.integers(0, 2))
    def start(self, extents: int, withheld: int) -> None:
        self.table = SlotTable(EXTENT_BYTES, extents, withheld)
        self.extents, self.withheld = extents, withheld
        self.used: dict[Slot, Used] = {}
        self.domain_of_number: dict[int, str] = {}
        self.allocations: set[tuple[int, int]] = set()
        self.tick = 0

    def choose(self, data: st.DataObject, *states: SlotState, **at_least: int) -> Slot | None:
        fitting = [
            slot
            for slot, used in self.used.items()
            if used.state in states and all(getattr(used, k) >= v for k, v in at_least.items())
        ]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def choose_some(self, data: st.DataObject, *states: SlotState, **at_least: int) -> list[Slot]:
        """Neighbours, mostly; or slots with gaps between them, or the wrong way round."""
        first = self.choose(data, *states, **at_least)
        if first is None:
            return []
        some = [first]
        for step in data.draw(st.sampled_from([(), (1,), (1, 1), (1, 1, 1), (2, 1), (-1, -1)])):
            used = self.used.get(slot := Slot(some[-1] + step))
            if used is None or used.state not in states:
                break
            if any(getattr(used, name) < least for name, least in at_least.items()):
                break
            some.append(slot)
        return some

    @rule(count=st.integers(1, 6), domain=st.sampled_from(DOMAINS), size=st.sampled_from(SIZES))
    def allocate(self, count: int, domain: str, size: int) -> None:
        taken = self.table.allocate(count, domain, size)
        assert len(set(taken)) == len(taken) <= count
        for slot in taken:
            assert slot not in self.used, "a slot in use was handed out"
            number, generation, offset = self.table.address(slot)
            assert 0 <= offset <= EXTENT_BYTES - size
            for other in self.used.values():
                there, _, start = other.place
                assert there != number or offset + size <= start or start + other.size <= offset
            assert self.domain_of_number.setdefault(number, domain) == domain
            assert (number, generation) not in self.allocations, "an address was given out twice"
            self.allocations.add((number, generation))
            place = (number, generation, offset)
            self.used[slot] = Used(SlotState.WRITING, domain, size, place)
        if len(taken) < count:
            self._assert_full(domain, size)

    def _assert_full(self, domain: str, size: int) -> None:
        """There was really no room: every extent holds this class, full, or another in use."""
        for position in range(len(self.table.extents)):
            inside = [u for s, u in self.used.items() if self.table.position(s) == position]
            assert inside, "an empty extent could have been taken"
            if (inside[0].domain, inside[0].size) == (domain, size):
                assert len(inside) == EXTENT_BYTES // size

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        some = self.choose_some(data, SlotState.WRITING)
        self.tick += 1
        self.table.commit(some, self.tick)
        for slot in some:
            self.used[slot].state = SlotState.READY

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if (slot := self.choose(data, SlotState.WRITING)) is not None:
            self.table.abort([slot])
            del self.used[slot]

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if (slot := self.choose(data, SlotState.WRITING)) is not None:
            self.table.lose([slot])
            self.used[slot].state = SlotState.LIMBO
            self.used[slot].holds = 1

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        some = self.choose_some(data, SlotState.READY)
        self.table.release(some)
        for slot in some:
            self.used[slot].state = SlotState.LIMBO
            self._settle(slot)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        some = self.choose_some(data, SlotState.READY)
        self.tick += 1
        self.table.pin(some, self.tick)
        for slot in some:
            self.used[slot].pins += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        some = self.choose_some(data, SlotState.READY, SlotState.LIMBO, pins=1)
        self.table.unpin(some)
        for slot in some:
            self.used[slot].pins -= 1
            self._settle(slot)

    @rule(data=st.data())
    def pin_to_hold(self, data: st.DataObject) -> None:
        if (slot := self.choose(data, SlotState.READY, SlotState.LIMBO, pins=1)) is not None:
            self.table.pin_to_hold([slot])
            self.used[slot].pins -= 1
            self.used[slot].holds += 1

    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        if (slot := self.choose(data, SlotState.READY, SlotState.LIMBO, holds=1)) is not None:
            self.table.unhold([slot])
            self.used[slot].holds -= 1
            self._settle(slot)

    def _settle(self, slot: Slot) -> None:
        used = self.used[slot]
        if used.state == SlotState.LIMBO and not used.pins and not used.holds:
            del self.used[slot]

    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """Whoever holds an extent's slots is given up; it gets new memory if nobody else is in."""
        if not self.used:
            return
        position = self.table.position(data.draw(st.sampled_from(list(self.used))))
        inside = {s: u for s, u in self.used.items() if self.table.position(s) == position}
        if any(used.state != SlotState.LIMBO or used.pins for used in inside.values()):
            return
        self.table.retire(position)
        held = {slot: used.holds for slot, used in inside.items()}
        assert not self.table.retirable(position, {})
        assert self.table.retirable(position, held)
        old = self.table.extents[position].number
        self.table.replace(position)
        assert self.table.replaced[-1][::2] == (old, True)
        for slot in inside:
            del self.used[slot]

    @precondition(lambda self: self.withheld)
    @rule(count=st.integers(0, 3))
    def provide(self, count: int) -> None:
        numbers = self.table.provide(count)
        assert len(numbers) == min(count, self.withheld)
        assert not set(numbers) & set(self.domain_of_number)
        self.withheld -= len(numbers)
        self.extents += len(numbers)

    @rule()
    def replace_memory(self) -> None:
        """The tier made new memory: each old number was known, each new one is new."""
        for old, new, _ in self.table.replaced:
            assert old in self.domain_of_number
            assert new > old
        self.table.replaced.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        hold(self.table.checks(lambda _slot, _state: None))
        for slot, used in self.used.items():
            assert self.table.state(slot) == used.state
            assert self.table.pinned(slot) == (used.pins > 0)
            assert self.table.in_use(slot) == (used.pins + used.holds > 0)
            extent, index = self.table.extents[self.table.position(slot)], self.table.index(slot)
            assert (extent.pins[index], extent.holds[index]) == (used.pins, used.holds)
            assert self.table.address(slot) == used.place, "a slot in use moved"
        for slots in (sorted(self.used), list(self.used)):
            told = unpack_addresses(self.table.addresses(slots))
            assert told == [self.used[slot].place for slot in slots]
        held = {
            slot
            for position in range(len(self.table.extents))
            for slot in self.table.slots_in_use(position)
        }
        assert held == set(self.used)

    @invariant()
    def bytes_add_up(self) -> None:
        stats = self.table.stats()
        assert stats.capacity_bytes == self.extents * EXTENT_BYTES
        assert stats.withheld_bytes == self.withheld * EXTENT_BYTES
        for state, told in (
            (SlotState.WRITING, stats.writing_bytes),
            (SlotState.READY, stats.ready_bytes),
            (SlotState.LIMBO, stats.limbo_bytes),
        ):
            assert told == sum(used.size for used in self.used.values() if used.state == state)
        assert stats.pinned_bytes == sum(used.size for used in self.used.values() if used.pins)
        in_use = stats.writing_bytes + stats.ready_bytes + stats.limbo_bytes
        assert stats.free_bytes + in_use <= stats.capacity_bytes


TestSlotMachine = SlotMachine.TestCase


def test_sizes_are_known_without_a_look_at_any_slot():
    table = SlotTable(EXTENT_BYTES, 2)
    slots = table.allocate(7, "red", PAGE)
    table.commit(slots[:5], 1)
    table.pin(slots[:1], 2)
    table.pin(slots[1:2], 2)
    table.pin_to_hold(slots[1:2])
    table.release(slots[1:3])
    table.lose(slots[5:6])

    for extent in table.extents:
        del extent.states[:], extent.pins[:], extent.holds[:], extent.addresses[:]

    assert table.stats() == HostSizes(
        capacity_bytes=8 * PAGE, withheld_bytes=0, free_bytes=2 * PAGE, writing_bytes=PAGE,
        ready_bytes=3 * PAGE, pinned_bytes=PAGE, limbo_bytes=2 * PAGE, retiring_bytes=0,
    )  # fmt: skip


def test_an_extent_that_changes_its_tenant_gets_new_memory():
    table = SlotTable(EXTENT_BYTES, 1)
    slots = table.allocate(4, "red", PAGE)
    old = table.address(slots[0])[0]
    table.abort(slots)

    taken = table.allocate(1, "blue", PAGE)

    assert table.replaced == [Replacement(old, old + 1, in_use=False)]
    assert table.address(taken[0])[0] == old + 1


def test_an_extent_that_only_changes_its_class_keeps_its_memory():
    table = SlotTable(EXTENT_BYTES, 1)
    table.abort(table.allocate(4, "red", PAGE))

    assert len(table.allocate(9, "red", 2 * PAGE)) == 2
    assert not table.replaced


def test_memory_of_the_same_tenant_is_recut_before_that_of_another():
    table = SlotTable(EXTENT_BYTES, 2)
    blue = table.allocate(1, "blue", PAGE)
    red = table.allocate(1, "red", PAGE)
    table.abort(blue)
    table.abort(red)

    table.allocate(1, "red", 2 * PAGE)

    assert not table.replaced


def test_a_reader_whose_right_ran_out_keeps_a_dropped_slot_from_being_used_again():
    table = SlotTable(EXTENT_BYTES, 1)
    slots = table.allocate(4, "red", PAGE)
    table.commit(slots, 1)
    table.pin(slots[:1], 2)
    table.pin_to_hold(slots[:1])
    table.release(slots)

    assert set(table.allocate(4, "red", PAGE)) == set(slots[1:])
    assert table.state(slots[0]) == SlotState.LIMBO
    assert table.allocate(1, "blue", PAGE) == [], "nor may its extent go to another tenant"

    table.unhold(slots[:1])
    assert table.allocate(4, "red", PAGE) == slots[:1]


def test_the_coldest_extent_of_another_class_is_found_by_its_last_use():
    table = SlotTable(EXTENT_BYTES, 3)
    for tick, domain in ((5, "red"), (3, "blue"), (9, "green")):
        table.commit(table.allocate(1, domain, PAGE), tick)

    positions = {extent.domain: at for at, extent in enumerate(table.extents)}
    assert table.colder_extent("red", PAGE, 9) == positions["blue"]
    assert table.colder_extent("blue", PAGE, 9) == positions["red"]
    assert table.colder_extent("blue", PAGE, 5) is None


@pytest.mark.parametrize("state", [SlotState.WRITING, SlotState.LIMBO])
def test_only_ready_slots_can_be_pinned(state):
    table = SlotTable(EXTENT_BYTES, 1)
    slots = table.allocate(1, "red", PAGE)
    if state == SlotState.LIMBO:
        table.lose(slots)

    with pytest.raises(AssertionError):
        table.pin(slots, 1)


def test_neighbours_of_one_extent_that_leave_come_back_as_neighbours():
    table = SlotTable(EXTENT_BYTES, 2)
    slots = table.allocate(4, "red", PAGE)
    assert slots == list(range(slots[0], slots[0] + 4))
    table.commit(slots, 1)

    table.release(slots[1:])

    assert table.allocate(3, "red", PAGE) == slots[1:]


def test_all_slots_of_two_full_extents_that_leave_at_once_are_found_again():
    table = SlotTable(EXTENT_BYTES, 2)
    slots = table.allocate(8, "red", PAGE)
    assert table.allocate(1, "red", PAGE) == [], "no extent counts as open any more"
    table.commit(slots, 1)

    table.release(slots)

    hold(table.checks(lambda _slot, _state: None))
    assert set(table.allocate(8, "red", PAGE)) == set(slots)


@pytest.mark.parametrize("seed", range(6))
def test_many_slots_at_a_time_fare_as_one_after_the_other(seed):
    """Neighbours of one extent or of two, slots with gaps between them and in any order."""
    random, many, single = Random(seed), SlotTable(16 * PAGE, 2), SlotTable(16 * PAGE, 2)
    slots = many.allocate(32, "red", PAGE)
    assert slots == single.allocate(32, "red", PAGE)
    pins = dict.fromkeys(slots, 0)
    many.commit(slots, 1)
    for slot in slots:
        single.commit([slot], 1)
    there = set(slots)
    for step in range(150):
        first = random.randrange(len(slots))
        some = sorted(slots)[first : first + random.randint(1, 16)]
        if random.random() < 0.3:
            some = random.sample(some, random.randint(1, len(some)))
        if step > 100 and random.random() < 0.1:  # what is pinned goes to LIMBO
            leaving = [slot for slot in some if slot in there]
            there -= set(leaving)
            many.release(leaving)
            for slot in leaving:
                single.release([slot])
        elif random.random() < 0.1:  # its reader may still read
            some = [slot for slot in some if pins[slot]]
            many.pin_to_hold(some)
            for slot in some:
                single.pin_to_hold([slot])
                pins[slot] -= 1
        elif random.random() < 0.5:
            some = [slot for slot in some if slot in there]
            many.pin(some, step)
            for slot in some:
                single.pin([slot], step)
                pins[slot] += 1
        else:
            some = [slot for slot in some if pins[slot]]
            many.unpin(some)
            for slot in some:
                single.unpin([slot])
                pins[slot] -= 1
        for mine, other in zip(many.extents, single.extents, strict=True):
            assert (mine.states, mine.pins, mine.holds) == (other.states, other.pins, other.holds)
            assert mine.pinned == other.pinned
            assert mine.used_at == other.used_at
            assert sorted(mine.free) == sorted(other.free)
        told = [single.address(slot) for slot in some]
        assert unpack_addresses(many.addresses(some)) == told
        hold(many.checks(lambda _slot, _state: None))


def test_the_last_slot_of_an_extent_and_the_first_of_the_next_are_no_neighbours():
    table = SlotTable((INDEX_MASK + 1) * PAGE, 2)
    for extent, index in zip(table.extents, (INDEX_MASK, 0), strict=True):
        extent.carve("red", PAGE, table.extent_bytes)
        extent.name_slots(index, index + 1)

    told = table.addresses([Slot(INDEX_MASK), Slot(INDEX_MASK + 1)])

    assert unpack_addresses(told) == [(0, 1, INDEX_MASK * PAGE), (1, 1, 0)]
