"""Goal: a head that leaves is a miss at once, and whatever follows it leaves in turns, unseen."""

from random import Random
from typing import Any

import pytest

from kvstore.protocol.page import PrefixKey
from kvstore.state.table import residents
from kvstore.state.table.invariants import check
from kvstore.state.table.orphans import tails_first
from kvstore.state.tree.actions import PageStatus, Removed
from kvstore.state.tree.node import PrefixNode, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.testing.simulation import Simulation
from tests.state.world import FULL, FULL_2, World, chain, key

LONG = "abcdefghijkl"


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A node whose turns take two pages along, with one long prompt of two ranks."""
    monkeypatch.setattr(residents, "DROP_AT_ONCE", 2)
    made = World(extents=16)
    engine = made.process()
    space = made.space(engine, [FULL, FULL_2])
    for shard in (0, 1):
        made.store(engine, space, LONG, shard=shard)
    return made


def space_of(world: World) -> PrefixTree:
    [space] = world.table.spaces
    return space


def drop(world: World, path: str) -> None:
    world.table.residents.drop(space_of(world).nodes[key(path)], 0, "corrupt")
    check(world.table)


def sweep(world: World, steps: int) -> None:
    world.table.residents.drop_orphans(steps)
    check(world.table)


def test_a_head_that_leaves_is_a_miss_at_once_and_what_follows_it_leaves_in_turns(world: World):
    space = space_of(world)
    drop(world, "abc")

    assert world.lookup(space, LONG) == (2, 0), "nothing behind it is a hit, and nobody writes it"
    assert len(world.removed("corrupt")) == 1
    left = []
    while world.table.residents.orphans:
        sweep(world, 4)
        left.append(len(world.removed("corrupt")))
        assert world.lookup(space, LONG) == (2, 0)
    assert sum(left) == len(LONG) - 3
    assert max(left) <= 4
    assert world.lookup(space, LONG, [1]) == (len(LONG), 0), "the other rank keeps its pages"
    assert not space.holes


def test_what_follows_a_head_that_left_leaves_from_the_tails_on(world: World):
    drop(world, "abc")
    world.table.residents.drop_orphans(1000)

    removed = [one for one in world.table.actions if isinstance(one, Removed)]
    assert [one.keys[0] for one in removed][1:] == chain(LONG, start=3)[::-1]


def test_pages_between_two_holes_are_no_hits_when_the_first_hole_is_filled_before_the_second():
    world = World(extents=64, slots_each=64)
    engine = world.process()
    space = world.space(engine, [FULL])
    trunk = "".join(chr(200 + at) for at in range(40))
    world.store(engine, space, trunk)
    for at in range(300):
        world.store(engine, space, trunk + chr(1000 + at), start=len(trunk))
    prompt = trunk + chr(1000)
    drop(world, trunk[:4])
    drop(world, trunk[:21])
    while len(world.table.residents.orphans) > 1:
        sweep(world, 16)

    assert world.table.residents.orphans, "the second hole is there still"
    assert world.lookup(space, prompt) == (3, 0)
    while world.table.residents.orphans:
        sweep(world, 64)
        assert world.lookup(space, prompt) == (3, 0)


def test_a_page_cannot_be_put_where_one_left_until_all_behind_it_has(world: World):
    space = space_of(world)
    [engine] = world.sessions["engine"].processes.values()
    drop(world, "abc")

    assert world.store(engine, space, "abcd", start=2) == [PageStatus.NO_ROOM] * 2
    world.table.residents.drop_orphans(1000)
    assert world.store(engine, space, "abcd", start=2) == [PageStatus.GRANTED] * 2
    assert world.lookup(space, "abcd") == (4, 0)


def test_what_is_put_behind_a_page_that_is_about_to_leave_leaves_with_it(world: World):
    space = space_of(world)
    [engine] = world.sessions["engine"].processes.values()
    drop(world, "abc")
    sweep(world, 3)
    number, statuses, _ = world.begin(engine, space, "abcdxyz", start=4)
    assert statuses == [PageStatus.GRANTED] * 3

    world.table.residents.drop_orphans(1000)

    assert world.commit(engine, number) == [PageStatus.DROPPED] * 3
    assert not [node for node in space.nodes.values() if node.present & 1 and node.depth > 2]
    check(world.table)


def test_the_last_page_that_is_evicted_closes_the_hole_before_it(world: World):
    space = space_of(world)
    drop(world, "abc")
    for end in range(len(LONG), 3, -1):
        world.table.residents.drop(space.nodes[key(LONG[:end])], 0, "evicted")
    world.table.residents.drop(space.nodes[key(LONG)], 1, "evicted")

    sweep(world, 1000)

    assert not space.holes
    assert not world.table.residents.orphans


@pytest.mark.parametrize("seed", range(20))
def test_lookups_find_what_a_look_at_each_page_finds_while_pages_leave_in_turns(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    chance = Random(seed)
    monkeypatch.setattr(residents, "DROP_AT_ONCE", chance.choice([0, 1, 3]))
    world = World(extents=8, slots_each=6)
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    dropped = 0
    for _ in range(120):
        path = "".join(chance.choice("ab") for _ in range(chance.randrange(1, 10)))
        nodes = [node for node in space.nodes.values() if node.ready & 1]
        match chance.choice(["put", "put", "drop", "sweep", "lookup"]):
            case "put":
                world.store(engine, space, path, shard=chance.randrange(2))
            case "drop" if nodes:
                world.table.residents.drop(chance.choice(nodes), 0, "corrupt")
                dropped += bool(world.table.residents.orphans)
            case "sweep":
                world.table.residents.drop_orphans(chance.randrange(1, 6))
            case _:
                shards = chance.choice([[0], [1], [0, 1]])
                assert world.lookup(space, path, shards)[0] == ready(space, path, shards)
        check(world.table)
    world.table.residents.drop_orphans(10_000)
    assert dropped > 0
    assert not space.holes
    assert all(node.parent is space.root or node.parent.present & 1
               for node in space.nodes.values() if node.present & 1 and node.parent)  # fmt: skip


def ready(space: PrefixTree, path: str, shards: list[int]) -> int:
    """The leading pages that are READY on every shard, by looking at each."""
    mask = sum(1 << shard for shard in shards)
    for count, name in enumerate(chain(path)):
        node = space.nodes.get(PrefixKey(name))
        if node is None or node.ready & mask != mask:
            return count
    return len(path)


@pytest.mark.parametrize("seed", range(8))
def test_no_history_shows_a_wrong_byte_when_every_head_leaves_its_pages_behind(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(residents, "DROP_AT_ONCE", 0)

    outcome = Simulation(seed, extents=3).run(seconds=0.3)

    assert outcome.pages_read > 0


def test_a_long_prompt_that_was_read_once_leaves_in_turns(world: World):
    space = space_of(world)
    reader = world.process()
    once = "zyxwvutsrq"
    world.store(reader, space, once + "p", keep=Retention(read_once=True))
    lease, _ = world.acquire(reader, space, once)

    world.table.release(reader, lease)

    check(world.table)
    assert len(world.table.residents.orphans) == 1, "each page behind the first would be one more"
    assert world.lookup(space, once) == (0, 0)
    assert len(world.removed("read_once")) == 1
    world.table.residents.drop_orphans(1000)
    check(world.table)
    assert len(world.removed("read_once")) == len(once)
    assert not any(key(once[: at + 1]) in space.nodes for at in range(len(once)))


def test_every_rank_that_read_a_long_prompt_once_leaves_its_own_pages(world: World):
    space = space_of(world)
    reader = world.process()
    once = "zyxwvutsrq"
    for shard in (0, 1):
        world.store(reader, space, once, shard=shard, keep=Retention(read_once=True))
    leases = [world.acquire(reader, space, once, shard=shard)[0] for shard in (0, 1)]
    for shard, lease in enumerate(leases):
        world.table.release(reader, lease)
        check(world.table)
        assert len(world.table.residents.orphans) == shard + 1
        assert world.lookup(space, once, [1]) == (0 if shard else len(once), 0)
    world.table.residents.drop_orphans(1000)
    check(world.table)
    assert key(once[:1]) not in space.nodes


def heads_with_tails(world: World, keep: Retention, heads: int = 64) -> list[str]:
    """Store one page each, and behind it 120 others that are kept for ever."""
    engine = world.process()
    space = world.space(engine)
    paths = [chr(0x4E00 + number) for number in range(heads)]
    for path in paths:
        world.store(engine, space, path, keep=keep)
        world.store(engine, space, path + "a" * 120, start=1)
    world.removed()
    return paths


def test_pages_that_leave_with_those_that_expire_count_in_their_turn():
    world = World(extents=128, slots_each=64)
    heads = heads_with_tails(world, Retention(expires_ns=10))

    left, more = [], True
    while more:
        more = world.table.expire(10)
        left.append(len(world.removed("expired")))
    assert sum(left) == len(heads) * 121
    assert max(left) <= 256
    check(world.table)


def test_what_follows_the_pages_of_a_put_that_is_given_up_leaves_in_turns():
    world = World(extents=128, slots_each=64)
    engine = world.process()
    space = world.space(engine)
    path = "a" * 64
    number, _, _ = world.begin(engine, space, path)
    for end in range(1, 65):
        world.store(engine, space, path[:end] + "b" * 100, start=end)
    world.removed()

    world.table.abort_put(engine, number)
    assert len(world.removed("head_lost")) <= residents.DROP_AT_ONCE
    assert world.lookup(space, path + "b" * 100) == (0, 0)
    left = []
    while world.table.residents.orphans:
        sweep(world, 64)
        left.append(len(world.removed("head_lost")))
    assert max(left) <= 64
    assert not space.nodes


def test_the_first_step_behind_a_page_with_many_children_looks_at_few_of_them(
    monkeypatch: pytest.MonkeyPatch,
):
    world = World(extents=64, slots_each=64)
    engine = world.process()
    space = world.space(engine)
    for number in range(1000):
        world.store(engine, space, "a" + chr(0x4E00 + number))
    looks = [0]
    present: Any = PrefixNode.__dict__["present"]

    def looked(node: PrefixNode) -> int:
        looks[0] += 1
        found: int = present.__get__(node)
        return found

    monkeypatch.setattr(PrefixNode, "present", property(looked, present.__set__))

    walk = tails_first(space.nodes[key("a")], 0)
    next(walk)
    assert looks[0] <= 10
