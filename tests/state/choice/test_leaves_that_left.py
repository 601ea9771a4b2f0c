"""Goal: no choice of a victim passes many leaves that have left otherwise, and none is lost."""

from collections.abc import Iterator

import pytest

from bench.node_alone import Clock, Engine, LoneNode
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.policies import POLICIES
from kvstore.state.choice.policy import MOVES_MAX
from kvstore.state.disk.jobs import DiskJob
from kvstore.state.table.invariants import check
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from tests.state.choice.test_policies import counted_pops
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import FULL, PAGE, World, identity, key


def gone_leaves(policy: str) -> tuple[World, Process, PrefixTree, PrefixTree]:
    """A full node: of 2,560 leaves the oldest 2,000 have left, and a long prompt took the room."""
    world = World(extents=20, slots_each=128)
    world.table.eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    for number in range(2560):
        world.store(engine, space, chr(0x4E00 + number))
    for number in range(2000):
        node = space.nodes[key(chr(0x4E00 + number))]
        world.table.residents.drop(node, 0, "operator")
    model = identity(model="other")
    other, _ = world.table.spaces.open(engine.session, model, [space.shards[0].spec])
    assert set(world.store(engine, other, "a" * 2000)) == {PageStatus.GRANTED}
    return world, engine, space, other


def swept_victims(
    world: World, space: PrefixTree, pops: list[int], pops_max: int
) -> Iterator[PrefixNode | None]:
    """All victims, one in each tick; None when leaves that have left must be swept first."""
    eviction, vain = world.table.eviction, 0
    while vain < 200:
        world.table.moment.tick += 1
        eviction.used(space.index[key(chr(0x4E00 + 2559))], world.table.moment.tick)
        pops.clear()
        victim = eviction.victim(space, PAGE)
        eviction.end_choice()
        if victim is None and not eviction.behind:
            return
        if victim is None:
            assert world.table.residents.unfinished, "nobody would sweep"
            eviction.sweep(64)
            vain += 1
        assert len(pops) <= pops_max
        yield victim
    raise AssertionError("they are never passed")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("to", [*POLICIES, ""])
def test_no_choice_passes_over_many_leaves_that_have_left_and_none_behind_them_is_lost(
    policy, to, monkeypatch
):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 100)
    world, _, space, other = gone_leaves(policy)
    if to:
        world.table.eviction.change_policy(to)
    pops = counted_pops(monkeypatch)

    found = list(swept_victims(world, space, pops, 100 + 4 * 64))

    assert None in found, "all were passed at once"
    left = [space.index[key(chr(0x4E00 + number))] for number in range(2000, 2560)]
    assert set(found) == {None, *left, other.index[key("a" * 2000)]}


def test_what_follows_a_put_keeps_its_place_while_leaves_that_have_left_are_passed(monkeypatch):
    """Nothing else leaves in the place of the victim that is behind them."""
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 10)
    world, engine, space, other = gone_leaves("lru")

    assert world.store(engine, space, "n") == [PageStatus.NO_ROOM]

    assert all(key(chr(0x4E00 + number)) in space.nodes for number in range(2000, 2560))
    assert len(other.nodes) == 2000
    assert world.table.draining.now is None


def test_a_put_waits_while_entries_of_leaves_that_have_left_are_swept(monkeypatch):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 10)
    lone = LoneNode(512, "lru", Clock(), at_once=False)
    engine, node = Engine(lone, 1), lone.desk.node
    prompts = [lone.keys(1) for _ in range(512)]
    for prompt in prompts:
        engine.put(prompt)

    def drop(table: PageTable) -> None:
        [space] = table.spaces
        for prompt in prompts[:400]:
            table.residents.drop(space.nodes[PrefixKey(prompt)], 0, "operator")

    lone.desk.operate(drop)
    long = lone.keys(400)
    engine.put(long)
    begun, _ = engine.put_messages(lone.keys(1))

    lone.desk.receive(engine.connection, begun)

    assert not engine.answers, "it waits rather than be refused"
    turns = 0
    while not engine.answers:
        assert node.unfinished, "nothing would end the wait before the next tick"
        lone.go_on()
        turns += 1
    [granted] = engine.answers
    assert isinstance(granted, wire.PutGranted)
    assert set(granted.statuses) == {PageStatus.GRANTED}
    engine.answers.clear()
    assert 1 < turns < 20
    assert [engine.lookup(prompt) for prompt in prompts[400:402]] == [0, 1]
    assert engine.lookup(long) == 400


def test_a_prompt_does_not_give_its_own_pages_while_leaves_that_have_left_are_swept(monkeypatch):
    world = DiskWorld("through", extents=30, segments=40)
    names = [chr(0x4E00 + number) for number in range(60)]
    for name in names:
        world.store(world.me, world.mine, name)
        world.end_all()
    for name in names[:45]:
        world.table.residents.drop(world.node(name), 0, "operator")
    path = "a" * 105
    assert world.store(world.me, world.mine, path)[-1] == PageStatus.GRANTED
    while world.disk.unfinished or world.jobs(DiskJob):
        world.end_all()
        world.disk.go_on()
    assert all(world.on_disk(path))
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 1)

    statuses = world.store(world.me, world.mine, path + "b", start=len(path))

    assert statuses == [PageStatus.NO_ROOM]
    assert world.table.eviction.behind
    assert all(world.in_memory(path))


@pytest.mark.parametrize("spaces", [2, 8])
def test_all_queues_together_pass_few_leaves_that_have_left(spaces, monkeypatch):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 20)
    world = World(extents=spaces * 2, slots_each=128)
    engine = world.process()
    limited = [space_of(world, engine, f"limited {number}") for number in range(spaces)]
    for space in limited:
        world.table.eviction.quotas.set(space, 1 << 40, 0, 1 << 40)
        for number in range(200):
            world.store(engine, space, chr(0x4E00 + number))
        for number in range(190):
            world.table.residents.drop(space.nodes[key(chr(0x4E00 + number))], 0, "operator")
    other = space_of(world, engine, "other")
    assert world.store(engine, other, "a" * (spaces * 246))[-1] == PageStatus.GRANTED
    pops = counted_pops(monkeypatch)
    turns = 0

    while world.store(engine, other, "b") != [PageStatus.GRANTED]:
        assert world.table.eviction.behind
        assert len(pops) <= 20 + spaces + 4 * MOVES_MAX
        pops.clear()
        world.table.eviction.sweep(64)
        assert len(pops) <= 64
        pops.clear()
        turns += 1
        assert turns < 100
    assert turns > spaces


def test_what_was_just_used_does_not_go_in_the_place_of_leaves_behind_those_that_have_left(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 20)
    world = World(extents=8, slots_each=128)
    engine = world.process()
    cold, hot, other = (space_of(world, engine, name) for name in ("cold", "hot", "other"))
    world.table.eviction.quotas.set(cold, 1 << 40, 0, 1 << 40)
    for number in range(600):
        world.store(engine, cold, chr(0x4E00 + number))
    for number in range(200):
        world.store(engine, hot, chr(0x4E00 + number))
    for number in range(500):
        world.table.residents.drop(cold.nodes[key(chr(0x4E00 + number))], 0, "operator")
    for number in range(200):
        lease, _ = world.acquire(engine, hot, chr(0x4E00 + number))
        world.table.release(engine, lease)
    assert world.store(engine, other, "a" * 724)[-1] == PageStatus.GRANTED

    for number in range(50):
        while world.store(engine, other, chr(0x9000 + number)) != [PageStatus.GRANTED]:
            assert world.table.eviction.behind
            world.table.eviction.sweep(64)

    assert len(hot.nodes) == 200
    assert len(cold.nodes) == 50


@pytest.mark.parametrize("policy", POLICIES)
def test_a_put_waits_where_a_choice_meets_too_many_leaves_that_are_read(policy):
    world = World(extents=13, slots_each=128)
    world.table.eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    leaves = [chr(0x4E00 + number) for number in range(13 * 128)]
    for leaf in leaves:
        world.store(engine, space, leaf)
    for leaf in leaves[:600]:
        world.acquire(engine, space, leaf)

    for number in range(20):
        turns = 0
        while world.store(engine, space, chr(0x9000 + number)) != [PageStatus.GRANTED]:
            assert world.table.eviction.behind, "it would be refused, and not wait"
            world.table.eviction.sweep(64)
            turns += 1
            assert turns < 100
    assert all(key(leaf) in space.nodes for leaf in leaves[:600])
    check(world.table)


def test_a_choice_does_not_wait_long_for_a_queue_that_is_behind(monkeypatch):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 20)
    monkeypatch.setattr("kvstore.state.choice.aside.PATIENCE", 5)
    world = World(extents=8, slots_each=128)
    engine = world.process()
    left, other = (space_of(world, engine, name) for name in ("left", "other"))
    world.table.eviction.quotas.set(left, 1 << 40, 0, 1 << 40)
    for number in range(600):
        world.store(engine, left, chr(0x4E00 + number))
    for number in range(600):
        world.table.residents.drop(left.nodes[key(chr(0x4E00 + number))], 0, "operator")
    assert world.store(engine, other, "a" * 1024)[-1] == PageStatus.GRANTED

    turns = 0
    while world.store(engine, other, "b") != [PageStatus.GRANTED]:
        world.table.eviction.sweep(1)
        turns += 1
    assert turns == 5
    assert world.table.eviction.behind


def space_of(world: World, process: Process, model: str) -> PrefixTree:
    """Another space of the process's session, with pages of the same size."""
    return world.table.spaces.open(process.session, identity(model=model), [FULL])[0]
