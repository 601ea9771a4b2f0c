"""Goal: a long pin is made in short steps, and one that cannot be made holds nothing."""

from itertools import pairwise

import pytest

from kvstore.protocol.errors import CapacityError, NotFound
from kvstore.state.choice.quotas import Pin
from kvstore.state.disk.jobs import DiskWrite
from kvstore.state.table.invariants import check
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import PAGE, WINDOW, World, chain, key


def test_a_long_pin_is_made_in_steps_and_is_listed_when_all_is_pinned():
    world = World(extents=20, slots_each=64)
    process = world.process()
    space, keeping = world.space(process), world.table.keeping
    world.store(process, space, "a" * 1000)
    keeping.pins.budget_bytes = 1000 * PAGE
    pin = keeping.begin_pin(space, key("a" * 1000), 0)
    pinned = [0]
    while not keeping.go_on_with(pin):
        assert not list(keeping.pins)
        pinned.append(sum(node.memory_pins for node in space.nodes.values()))
        assert keeping.pins.used_bytes == pinned[-1] * PAGE
        check(world.table)

    assert [after - before for before, after in pairwise(pinned)] == [32] * 31
    assert list(keeping.pins) == [pin]
    assert (len(pin.nodes), pin.pages, pin.size_bytes) == (1000, 1000, 1000 * PAGE)
    assert [node.key for node in pin.nodes] == chain("a" * 1000)
    check(world.table)


def begun_pin() -> tuple[World, PrefixTree, Pin]:
    """A pin of 300 pages, of which 32 are pinned."""
    world = World(extents=20, slots_each=64)
    process = world.process()
    space, keeping = world.space(process), world.table.keeping
    world.store(process, space, "a" * 300)
    keeping.pins.budget_bytes = 300 * PAGE
    pin = keeping.begin_pin(space, key("a" * 300), 0)
    assert not keeping.go_on_with(pin)
    return world, space, pin


def assert_let_go(world: World, space: PrefixTree, pin: Pin) -> None:
    keeping = world.table.keeping
    keeping.give_up(pin)
    world.table.expire(1)
    assert not any(node.pins for node in space.nodes.values())
    assert (keeping.pins.used_bytes, len(keeping.pins), keeping.is_used) == (0, 0, False)
    check(world.table)


@pytest.mark.parametrize("left", [1, 100, 299, 300])
def test_a_pin_is_not_made_if_a_page_of_it_leaves_meanwhile(left):
    world, space, pin = begun_pin()
    world.table.residents.drop(space.nodes[key("a" * left)], 0, "corrupt")
    while world.table.residents.unfinished:
        world.table.residents.drop_orphans(64)

    with pytest.raises(NotFound):
        world.table.keeping.go_on_with(pin)
    assert_let_go(world, space, pin)


def test_a_pin_is_not_made_of_a_page_that_left_and_came_again():
    world, space, pin = begun_pin()
    world.table.residents.drop(space.nodes[key("a" * 300)], 0, "corrupt")
    process = world.process()
    world.space(process)
    world.store(process, space, "a" * 300, start=299)
    assert space.nodes[key("a" * 300)].ready

    with pytest.raises(NotFound):
        world.table.keeping.go_on_with(pin)
    assert_let_go(world, space, pin)


def test_a_pin_that_the_budget_does_not_suffice_for_lets_go_of_what_it_had():
    world, space, pin = begun_pin()
    world.table.keeping.pins.budget_bytes = 299 * PAGE
    while pin.pages < 300 - 32:
        assert not world.table.keeping.go_on_with(pin)

    with pytest.raises(CapacityError, match=rf"^{300 * PAGE} more bytes .* \(0 of {299 * PAGE}"):
        world.table.keeping.go_on_with(pin)
    assert_let_go(world, space, pin)


def test_a_pin_that_nobody_wants_any_more_lets_go_of_its_last_pages_first():
    world, _, pin = begun_pin()

    world.table.keeping.pins.give_up(pin)

    gone = world.table.keeping.pins.let_go(3)
    assert [node.key for node in gone] == [key("a" * pages) for pages in (300, 299, 298)]
    check(world.table)


@pytest.mark.parametrize("left", [1, 32, 33, 100])
def test_a_pin_on_disk_is_not_made_if_a_page_of_it_leaves_while_it_is_written(left):
    world = DiskWorld("back", extents=60)
    keeping = world.table.keeping
    world.store(world.me, world.mine, "a" * 100)
    keeping.pins.disk_budget_bytes = 1 << 30
    pin = keeping.begin_pin(world.mine, key("a" * 100), 0, "ssd")
    while not pin.covers or not pin.written:
        assert not keeping.go_on_with(pin)
    assert len(world.jobs(DiskWrite)) == pin.written == 32
    world.table.residents.drop(world.node("a" * left), 0, "corrupt")

    with pytest.raises(NotFound):
        keeping.go_on_with(pin)
    assert_let_go(world, world.mine, pin)
    world.end_all()


def test_a_pin_on_disk_is_not_made_if_pages_before_its_first_one_become_known():
    world = DiskWorld(extents=60)
    space = world.table.spaces.open(world.me.session, world.mine.identity, [WINDOW])[0]
    number = space.shard_numbers[WINDOW]
    world.store(world.me, space, "abc", start=2, shard=number)
    keeping = world.table.keeping
    keeping.pins.disk_budget_bytes = 1 << 30
    pin = keeping.begin_pin(space, key("abc"), 0, "ssd")
    assert not keeping.go_on_with(pin)
    assert [node.key for node in pin.nodes] == [key("ab"), key("abc")]
    world.store(world.me, space, "ab")

    with pytest.raises(NotFound):
        keeping.go_on_with(pin)
    assert_let_go(world, space, pin)
