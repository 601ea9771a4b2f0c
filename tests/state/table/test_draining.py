"""Goal: memory changes between pages of other sizes or tenants in turns, and not in circles."""

import pytest

from kvstore.state.table.draining import STAY_NS, WHOLE_MAX
from kvstore.state.table.invariants import check
from kvstore.state.table.room import EMPTY_MAX
from kvstore.state.tree.actions import PageStatus, Removed
from tests.state.world import FULL, PAGE, WINDOW, World, chain, key

GRANTED, NO_ROOM = PageStatus.GRANTED, PageStatus.NO_ROOM
MANY = 3 * EMPTY_MAX
"""Pages of an extent that no single request empties."""


class Tenants:
    """A full node of one tenant's pages, and another tenant that comes."""

    def __init__(self, extents: int = 2, slots_each: int = MANY) -> None:
        self.world = world = World(extents=extents, slots_each=slots_each)
        self.each = slots_each
        self.red, self.blue = world.process("red"), world.process("blue", pid=2)
        self.old = world.space(self.red, tenant="red")
        self.new = world.space(self.blue, tenant="blue")
        self.stored = [chr(0x1000 + at) * slots_each for at in range(extents)]
        for prompt in self.stored:
            world.store(self.red, self.old, prompt)
        world.removed()

    def drain(self) -> int:
        """Carry on until no extent is drained; the turns that took."""
        for turn in range(10_000):
            if self.world.table.draining.now is None:
                return turn
            self.world.table.room.drain(EMPTY_MAX)
            check(self.world.table)
        pytest.fail("it never ends")


def test_a_request_that_waits_for_an_extent_loses_none_of_its_own_pages():
    node = Tenants()
    world = node.world

    assert world.store(node.blue, node.new, "ab") == [NO_ROOM] * 2
    assert world.table.draining.now is not None
    assert node.drain() > 1
    assert world.store(node.blue, node.new, "ab") == [GRANTED] * 2

    assert world.lookup(node.new, "ab") == (2, 0)
    assert world.lookup(node.old, node.stored[1]) == (node.each, 0), "the warmer one stays"
    assert world.table.counts["moved_extents"] == 1


def test_pages_of_an_extent_that_is_being_drained_are_hits_until_they_leave():
    node = Tenants()

    node.world.store(node.blue, node.new, "a")

    found, _ = node.world.lookup(node.old, node.stored[0])
    assert 0 < found < node.each or node.world.table.draining.now is not None


def test_an_extent_of_which_a_page_is_read_is_left_as_it_is():
    node = Tenants()
    world = node.world
    number, lease = world.acquire(node.red, node.old, node.stored[0][:1])
    world.lookup(node.old, node.stored[1])  # does not count: only reads and puts warm an extent

    world.store(node.blue, node.new, "a")
    node.drain()

    assert world.lookup(node.old, node.stored[0][:1]) == (1, 0)
    assert len(lease.slots) == 1
    world.table.release(node.red, number)
    check(world.table)


def test_a_page_that_is_read_meanwhile_ends_the_drain_and_its_free_slots_are_used_again():
    node = Tenants(extents=1)
    world = node.world
    assert world.store(node.blue, node.new, "a") == [NO_ROOM]
    while len(world.slots.slots_in_use(0)) == node.each:
        world.table.room.drain(EMPTY_MAX)
    number, _ = world.acquire(node.red, node.old, node.stored[0])

    node.drain()

    left, _ = world.lookup(node.old, node.stored[0])
    assert 0 < left < node.each
    assert world.table.counts["moved_extents"] == 0
    assert world.store(node.blue, node.new, "a") == [NO_ROOM], "all of it is being read"
    world.table.release(node.red, number)
    assert world.store(node.red, node.old, "x") == [GRANTED]
    assert world.lookup(node.old, node.stored[0]) == (left, 0), "there was a free slot"
    check(world.table)


def test_a_put_takes_no_page_out_of_an_extent_that_is_drained_for_others():
    node = Tenants(extents=3)
    world = node.world
    assert world.store(node.blue, node.new, "a") == [NO_ROOM]
    assert world.table.draining.now is not None

    assert world.store(node.red, node.old, "xyz") == [GRANTED] * 3
    assert world.removed("evicted") == chain(node.stored[1])[:-4:-1], "the next in order"

    node.drain()
    assert world.table.counts["moved_extents"] == 1
    assert world.lookup(node.old, node.stored[2]) == (node.each, 0)


def test_pages_that_were_skipped_while_their_extent_was_drained_leave_later():
    node = Tenants()
    world = node.world
    world.store(node.blue, node.new, "a")
    assert world.store(node.red, node.old, "x") == [GRANTED]
    assert world.lookup(node.old, node.stored[1]) == (node.each - 1, 0)
    number, _ = world.acquire(node.red, node.old, node.stored[0])
    node.drain()
    assert world.table.counts["moved_extents"] == 0, "it is left to its class"
    assert world.table.residents.unfinished, "they come back in turns"
    world.table.release(node.red, number)
    while world.table.residents.offer_more(1):
        check(world.table)
    assert not world.table.residents.unfinished

    assert world.store(node.red, node.old, "y" * (2 * node.each)) == [GRANTED] * 2 * node.each
    assert world.lookup(node.old, node.stored[0]) == (0, 0)
    check(world.table)


def test_a_page_that_a_put_is_told_to_exist_does_not_leave_for_the_put():
    world = World(extents=3, slots_each=2)
    engine = world.process()
    space = world.space(engine, [FULL, WINDOW])
    world.store(engine, space, "a")
    assert world.store(engine, space, "ab", shard=1) == [GRANTED] * 2

    told = world.store(engine, space, "abc", shard=1)

    assert told == [PageStatus.EXISTS, PageStatus.EXISTS, NO_ROOM]
    assert world.lookup(space, "ab", [1]) == (2, 0)


def test_pages_that_can_be_reached_without_those_of_an_extent_stay():
    world = World(extents=3, slots_each=2)
    red, blue = world.process("red"), world.process("blue", pid=2)
    old, new = world.space(red, [WINDOW], tenant="red"), world.space(blue, tenant="blue")
    world.store(red, old, "abc")
    world.removed()

    assert world.store(blue, new, "x") == [GRANTED]

    assert world.removed("evicted") == [key("a")]


def test_the_next_extent_is_drained_ahead_of_need():
    node = Tenants(extents=3)
    world = node.world
    world.store(node.blue, node.new, "a")
    node.drain()
    half = "a" * (node.each // 2 - 1)
    assert set(world.store(node.blue, node.new, half)) <= {GRANTED, PageStatus.EXISTS}
    assert world.table.draining.now is None

    world.store(node.blue, node.new, half + "b")

    assert world.table.draining.now is not None, "half of the first one is used"
    node.drain()
    rest = "a" * (node.each + 8)
    assert NO_ROOM not in world.store(node.blue, node.new, rest), "nobody waits for the second"


def test_two_models_that_take_turns_do_not_take_extents_from_each_other_in_circles():
    node = Tenants(extents=4, slots_each=4)
    world = node.world
    for turn in range(40):
        world.table.moment.now_ns += STAY_NS // 8
        process, space = ((node.red, node.old), (node.blue, node.new))[turn % 2]
        for prompt in range(4):
            world.store(process, space, chr(0x2000 + turn * 8 + prompt) * 4)
            node.drain()

    assert 0 < world.table.counts["moved_extents"] <= 4 * (1 + 40 // 8), "each once in STAY_NS"


@pytest.mark.parametrize("pages", [32, 2 * WHOLE_MAX])
def test_runs_leave_an_extent_whole_unless_they_are_long(pages: int):
    each = 12 * pages
    world = World(extents=1, slots_each=each)
    red, blue = world.process("red"), world.process("blue", pid=2)
    old, new = world.space(red, tenant="red"), world.space(blue, tenant="blue")
    for at in range(12):
        world.store(red, old, chr(0x1000 + at) * pages)
    world.removed()

    assert world.store(blue, new, "a") == [NO_ROOM]
    assert len(world.slots.slots_in_use(0)) >= each - EMPTY_MAX - pages, "that is for other turns"
    steps = 0
    while world.table.draining.now is not None:
        taken = world.table.room.drain(EMPTY_MAX)
        steps += taken
        check(world.table)

    removed = [len(one.keys) for one in world.table.actions if isinstance(one, Removed)]
    assert removed == ([pages] * 12 if pages <= WHOLE_MAX else [1] * each)
    assert steps >= each - EMPTY_MAX, "each page takes a step, whatever leaves together"


def test_a_run_with_pages_in_two_extents_leaves_one_of_them_page_by_page():
    world = World(extents=2, slots_each=8)
    red, blue = world.process("red"), world.process("blue", pid=2)
    old, new = world.space(red, tenant="red"), world.space(blue, tenant="blue")
    for path in "a" * 4, "b" * 8, "c" * 4:
        world.store(red, old, path)
    assert {world.slots.position(slot) for slot in old.index[key("b")].slots_of(0)} == {0, 1}
    world.removed()

    world.store(blue, new, "x")
    while world.table.draining.now is not None:
        world.table.room.drain(EMPTY_MAX)
        check(world.table)

    removed = [len(one.keys) for one in world.table.actions if isinstance(one, Removed)]
    assert sorted(removed) == [1] * 8 + [4], "one run leaves whole, the other one does not"
    assert world.lookup(old, "b" * 8) == (0, 0)
    assert world.lookup(old, "c" * 4) == (4, 0)
    assert world.table.counts["moved_extents"] == 1
    check(world.table)


def test_what_a_space_has_reserved_stays_though_its_chain_lies_in_two_extents():
    world = World(extents=2, slots_each=8)
    red, blue = world.process("red"), world.process("blue", pid=2)
    old, new = world.space(red, tenant="red"), world.space(blue, tenant="blue")
    world.store(red, old, "abcdefghijklmnop")
    world.table.quotas.set(old, 0, 8 * PAGE, 16 * PAGE)
    world.table.eviction.offer_all(old.by_creation.nodes(0), anew=True)

    for _ in range(6):
        world.store(blue, new, "zyx")
        world.table.room.drain(EMPTY_MAX)
        assert old.host_bytes >= 8 * PAGE
        check(world.table)
