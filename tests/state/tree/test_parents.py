"""Goal: a key has one page before it, whoever says otherwise: all that is there can be reached.

Keys are hashes of all before them, but it is engines that make them, and files that tell them.
"""

from dataclasses import replace

import pytest

from kvstore.state.table.adopt import adopt
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from tests.state.disk.disk_world import DiskWorld
from tests.state.table.test_adopt import found
from tests.state.world import FULL, FULL_2, WINDOW, World, identity, key


@pytest.fixture
def world() -> World:
    """A node with the page "b" behind "a", on the first of two ranks."""
    made = World()
    engine = made.process()
    space = made.space(engine, [FULL, FULL_2, WINDOW])
    made.store(engine, space, "a")
    made.store(engine, space, "x", shard=1)
    made.table.begin_put(engine, 1, space, 0, key("b"), key("a"))
    made.commit(engine, 1)
    return made


def begin(world: World, shard: int, name: str, before: str) -> PageStatus:
    [process] = world.sessions["engine"].processes.values()
    [space] = world.table.spaces
    statuses, put = world.table.begin_put(process, 9, space, shard, key(name), key(before))
    if put.slots:
        world.commit(process, 9)
    check(world.table)
    return statuses[0]


@pytest.mark.parametrize(
    ("shard", "name", "before"),
    [
        (1, "b", "x"),  # another rank has it behind another page
        (1, "b", ""),  # ... or at a chain's start
        (1, "a", "x"),  # it is a chain's start, and is told to follow a page
        (2, "b", "x"),  # pages of a window are told so too
        (2, "a", "b"),  # a ring
    ],
)
def test_a_page_that_is_told_to_follow_another_one_than_before_is_refused(
    world: World, shard: int, name: str, before: str
):
    assert begin(world, shard, name, before) is PageStatus.NO_PARENT

    assert world.table.counts["contradicting_pages"] == 1
    assert set(next(iter(world.table.spaces)).nodes) == {key("a"), key("b"), key("x")}


def test_a_page_of_a_window_may_come_before_what_it_follows(world: World):
    assert begin(world, 2, "late", "unknown") is PageStatus.GRANTED
    assert begin(world, 2, "unknown", "a") is PageStatus.GRANTED

    [space] = world.table.spaces
    assert space.nodes[key("unknown")].parent is space.nodes[key("a")]
    assert space.nodes[key("late")].depth == 3


@pytest.mark.parametrize("order", [["a", "x", "b1", "b2"], ["b1", "b2", "a", "x"]])
def test_of_records_that_contradict_each_other_a_start_believes_the_first(order: list[str]):
    world = DiskWorld()
    segments = {
        "a": found(("a", ""), pair=0), "x": found(("x", ""), pair=1),
        "b1": found(("b", "a"), pair=0), "b2": found(("b", "x"), pair=1),
    }  # fmt: skip
    numbered = []
    for number, name in enumerate(order, 1):
        one = segments[name]
        numbered.append(replace(one, number=number))

    assert adopt(world.table, numbered, [(identity(), FULL), (identity(), FULL_2)], 9) == 3

    [space] = world.table.spaces
    assert space.nodes[key("b")].parent is space.nodes[key("a")]
    assert set(space.nodes[key("b")].disk) == {0}
    check(world.table)


def test_a_lookup_of_keys_that_are_no_chain_finds_what_is_there_of_them():
    world = World()
    process = world.process()
    space = world.space(process)
    world.store(process, space, "ab")
    world.begin(process, space, "abcd")
    stranger = bytes(key("a")) + b"x" * 32 + bytes(key("abc")) + bytes(key("abcd"))

    assert world.table.lookup(space, [0], stranger) == (1, 0), "ends of it fit by their depth"


def begin_many(world: World, shard: int, names: list[str], before: str) -> list[PageStatus]:
    [process] = world.sessions["engine"].processes.values()
    [space] = world.table.spaces
    keys = b"".join(map(key, names))
    statuses, _ = world.table.begin_put(process, 9, space, shard, keys, key(before))
    check(world.table)
    return statuses


def test_a_ring_that_a_page_of_the_same_message_would_close_is_refused(world: World):
    begin(world, 2, "late", "unknown")

    statuses = begin_many(world, 2, ["new", "unknown", "more"], "late")

    assert statuses == [PageStatus.GRANTED, PageStatus.NO_PARENT, PageStatus.NO_PARENT]


def test_a_page_that_one_message_names_twice_is_granted_once(world: World):
    statuses = begin_many(world, 0, ["p", "p", "q"], "a")

    assert statuses == [PageStatus.GRANTED, PageStatus.PENDING, PageStatus.GRANTED]


def test_a_head_without_pages_that_room_was_asked_behind_in_vain_is_pruned():
    world = World(extents=1, slots_each=2)
    engine = world.process()
    space = world.space(engine, [WINDOW])
    world.begin(engine, space, "ab")  # all slots are being written
    known = set(space.nodes)

    [status] = begin_many(world, 0, ["late"], "unknown")

    assert status is PageStatus.NO_ROOM
    assert set(space.nodes) == known


def test_a_page_is_refused_behind_an_unknown_one_between_it_and_the_page_before_it():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    world.store(engine, space, "ab", shard=1)
    keys = key("a") + key("between") + key("ab")

    statuses, _ = world.table.begin_put(engine, 9, space, 0, keys, key(""))

    assert statuses == [PageStatus.GRANTED, PageStatus.GRANTED, PageStatus.NO_PARENT]
    assert world.table.counts["contradicting_pages"] == 1
