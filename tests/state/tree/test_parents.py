"""Goal: a key has one page before it, whoever says otherwise: all that is there can be reached.

Keys are hashes of all before them, but it is engines that make them, and files that tell them.
"""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvstore.state.table.adopt import adopt
from kvstore.state.table.invariants import check
from kvstore.state.tree import prefix_tree
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from tests.state.disk.disk_world import DiskWorld
from tests.state.table.test_adopt import found
from tests.state.world import FULL, FULL_2, WINDOW, World, chain, identity, key

WINDOW_AT = 1


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


def depths_set(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The depths that nodes get from now on."""
    found: list[int] = []
    depth: Any = PrefixNode.__dict__["depth"]

    def set_depth(node: PrefixNode, to: int) -> None:
        found.append(to)
        depth.__set__(node, to)

    monkeypatch.setattr(PrefixNode, "depth", property(depth.__get__, set_depth))
    return found


def put_last_first(world: World, process: Process, space: PrefixTree, path: str) -> None:
    """Store each page of a path of a group with a window before the page that it follows."""
    for end in range(len(path), 0, -1):
        granted = world.store(process, space, path[:end], start=end - 1, shard=WINDOW_AT)
        assert granted == [PageStatus.GRANTED]


def test_a_page_before_many_others_costs_no_more_than_one_before_few(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(prefix_tree, "DEPTHS_AT_ONCE", 20)
    world = World(extents=256)
    process = world.process()
    space = world.space(process, (FULL, WINDOW))
    found = depths_set(monkeypatch)

    put_last_first(world, process, space, "a" * 400)

    assert len(found) <= 400 * (20 + 5)
    check(world.table)
    assert space.moved, "some depths are corrected later"
    assert world.lookup(space, "a" * 400, [WINDOW_AT]) == (400, 0)
    for letter in range(2 * 400 // 20):
        world.store(process, space, chr(0x4E00 + letter), shard=WINDOW_AT)
        check(world.table)
    assert not space.moved
    assert [space.index[one].depth for one in chain("a" * 400)] == list(range(1, 401))


@pytest.mark.parametrize("seed", range(12))
def test_pages_in_any_order_get_the_depth_of_their_place(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prefix_tree, "DEPTHS_AT_ONCE", 1)
    chance = Random(seed)
    world = World(extents=12)
    process = world.process()
    space = world.space(process, (FULL, WINDOW))
    moved = 0
    for _ in range(150):
        path = "".join(chance.choice("aaaab") for _ in range(chance.randrange(1, 12)))
        start = max(0, len(path) - chance.randrange(1, 3))
        match chance.choice(["window", "window", "full", "look", "evict"]):
            case "window":
                world.store(process, space, path, start=start, shard=WINDOW_AT)
            case "full":
                world.store(process, space, path)
            case "look":
                assert world.lookup(space, path) == (plainly_found(space, path), 0)
                space.nodes.get(key(path))
            case _ if space.index:
                world.table.residents.drop(space.nodes[chance.choice(list(space.index))], 1, "x")
        check(world.table)
        moved += bool(space.moved)
    assert moved > 0
    while space.moved:
        prefix_tree.deepen_some(space.moved, 1)
        check(world.table)
    for node in {id(one): one for one in space.index.values()}.values():
        assert node.above is not None
        assert node.depth == node.above.depth + node.count


def plainly_found(space: PrefixTree, path: str) -> int:
    """How many leading pages of the first shard are READY, by looking at each."""
    ready = [bool(node and node.ready & 1) for node in map(space.index.get, chain(path))]
    return [*ready, False].index(False)


def test_a_ring_of_forged_parents_is_found_from_above_and_from_below():
    world = World(extents=16)
    process = world.process()
    space = world.space(process, (FULL, WINDOW))
    put_last_first(world, process, space, "abcdefgh")
    top, end = space.node_of(key("a")), space.node_of(key("abcdefgh"))
    branch = space.add(key("other"), end)
    for number in range(20):
        branch = space.add(key(str(number)), branch)

    space.hang_up(top, branch)

    assert top.above is space.root
