"""Goal: every choice of a victim is bounded, whatever it meets, and a put waits for the rest."""

from typing import Any

import pytest

from kvstore.node.awaited import room_is_coming
from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.aside import BELOW_LOOKS, leaves_behind
from kvstore.state.choice.policy import LeastRecent
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from tests.state.choice.test_policies import counted_pops
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import DIGEST, FULL, World, identity, key

GRANTED = [PageStatus.GRANTED]


def replica(world: World, engine: Process, space: PrefixTree, path: str) -> None:
    """The last page of a path was read from a peer that is reachable."""
    world.table.eviction.sources.changed("peer", b"boot")
    number, _, put = world.begin(engine, space, path, start=len(path) - 1)
    world.table.commit_put(engine, number, DIGEST * len(put.slots), peer="peer")


class Below(dict[PrefixKey, PrefixNode]):
    """Children that count how often they were gone through."""

    walks = 0

    def values(self) -> Any:
        self.walks += 1
        return super().values()


def read(world: World, engine: Process, space: PrefixTree, path: str) -> None:
    """Use a path, and give its pages back."""
    lease, _ = world.acquire(engine, space, path)
    world.table.release(engine, lease)


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_a_replica_behind_continued_pages_is_chosen_once_while_its_extent_is_drained(
    policy,
):
    """A choice out of looks finds it behind the pages before it, and as a replica."""
    world = World(extents=2, slots_each=512)
    world.table.eviction.change_policy(policy)
    engine, other = world.process(), world.process("other", 2)
    space, blue = world.space(engine), world.space(other, tenant="blue")
    world.store(engine, space, "!")
    for length in range(1, 101):
        world.store(engine, space, "a" * length, start=length - 1)
    path = "a" * 100 + "x"
    replica(world, engine, space, path)
    leaves = [chr(0x4E00 + number) for number in range(1024 - 102)]
    for leaf in leaves:
        assert world.store(engine, space, leaf) == GRANTED
    at = [world.slots.position(space.index[key(name)].slot(0)) for name in (path, leaves[-1])]
    assert at == [0, 1]
    read(world, engine, space, path)
    world.store(engine, space, "n")
    read(world, engine, space, leaves[-1])
    world.store(other, blue, "q")
    assert world.table.draining.now is not None
    assert world.table.draining.now.position == 0
    assert key(path) in space.nodes

    assert world.store(engine, space, "o") == GRANTED

    assert space.nodes[key(path)] in world.table.draining.skipped


@pytest.mark.parametrize("policy", ["lru", "kvstore"])
@pytest.mark.parametrize("changed", ["continued", "read"])
def test_no_choice_passes_many_replicas_that_may_not_leave(policy, changed, monkeypatch):
    world = World(extents=6, slots_each=128)
    world.table.eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    names = [chr(0x4E00 + number) for number in range(384 if changed == "continued" else 768)]
    replica(world, engine, space, "!")  # the first one
    for name in names[2:]:
        replica(world, engine, space, name)
        if changed == "continued":
            world.store(engine, space, name + "b", start=1)
    for name in names[2:600] if changed == "read" else []:
        world.acquire(engine, space, name)
    pops = counted_pops(monkeypatch)

    turns = granted = 0
    while granted < 20:
        pops.clear()
        granted += world.store(engine, space, chr(0x9000 + granted)) == GRANTED
        assert len(pops) <= 2 * 64 + 8
        turns += 1
        assert turns < 60
        world.table.eviction.sweep(64)


@pytest.mark.parametrize("in_memory", [0, 1])
def test_children_that_are_on_disk_only_are_looked_at_once(in_memory):
    world = DiskWorld("through", extents=20)
    world.store(world.me, world.mine, "a")
    paths = ["a" + chr(0x4E00 + number) for number in range(BELOW_LOOKS + 6)]
    for path in paths:
        world.store(world.me, world.mine, path, start=1)
    world.end_all()
    while world.disk.unfinished:
        world.disk.go_on()
        world.end_all()
    for path in paths[in_memory:BELOW_LOOKS]:
        assert world.table.residents.release_memory(world.node(path))
    node = world.node("a")
    node.below = below = Below(node.below)

    assert leaves_behind([node]) == [world.node(path) for path in paths[:in_memory]]

    assert below.walks == 1


def test_few_children_that_are_on_disk_only_are_looked_at_on_the_way_to_a_leaf():
    world = DiskWorld("through", extents=40)
    names = [chr(0x4E00 + number) for number in range(BELOW_LOOKS // 2 + 2)]
    paths = ["a" + name for name in names]
    further = [paths[-1] + name for name in names]
    for path in ["a", *paths, *further]:
        world.store(world.me, world.mine, path, start=len(path) - 1)
    world.end_all()
    while world.disk.unfinished:
        world.disk.go_on()
        world.end_all()
    for path in [*paths[:-1], *further[:-1]]:
        assert world.table.residents.release_memory(world.node(path))

    assert leaves_behind([world.node(paths[-1])]) == [world.node(further[-1])]
    assert leaves_behind([world.node("a")]) == []


@pytest.mark.parametrize("policy", ["lru", "s3-fifo"])
def test_all_choices_of_a_put_together_pass_few_pages_that_were_continued(policy, monkeypatch):
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 10)
    world = World(extents=5, slots_each=128)
    world.table.eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "!")
    for length in range(10):
        for number in range(60):
            world.store(engine, space, chr(0x4E00 + number) + "a" * length, start=length)
    world.store(engine, space, "o" * 39)
    pops = counted_pops(monkeypatch)

    for number in range(4):
        pops.clear()
        assert set(world.store(engine, space, chr(0x9000 + number) * 40)) == set(GRANTED)
        assert len(pops) <= 2 * 10 + 2 * 40


@pytest.mark.parametrize("replicas", [False, True])
def test_a_put_waits_while_leaves_of_a_space_that_has_limits_now_change_queues(replicas):
    world = World(extents=4, slots_each=128)
    engine = world.process()
    limited = world.space(engine)
    [other, _] = world.table.spaces.open(engine.session, identity(model="other"), [FULL])
    for number in range(512):
        space, name = limited if number < 448 else other, chr(0x4E00 + number)
        if replicas:
            replica(world, engine, space, name)
        else:
            world.store(engine, space, name)
    world.table.quotas.set(limited, 0, limited.host_bytes, 1 << 40)
    world.table.eviction.offer_all(list(limited.index.values()), anew=True)

    turns = 0
    while world.store(engine, other, chr(0x9000 + turns)) != GRANTED:
        assert room_is_coming(world.table)
        world.table.eviction.sweep(64)
        turns += 1

    assert 0 < turns < 10
    assert not room_is_coming(world.table)


def test_a_tenant_gets_an_extent_while_the_queue_of_another_is_behind():
    world = World(extents=8, slots_each=128)
    engine, other = world.process(), world.process("other", 2)
    red, blue = world.space(engine), world.space(other, tenant="blue")
    for number in range(1024):
        world.store(engine, red, chr(0x4E00 + number))
    for number in range(900):
        world.table.residents.drop(red.nodes[key(chr(0x4E00 + number))], 0, "operator")
    [more, _] = world.table.spaces.open(engine.session, identity(model="more"), [FULL])
    assert set(world.store(engine, more, "a" * 900)) == set(GRANTED)
    assert world.store(engine, red, "n") != GRANTED
    assert world.table.eviction.behind
    assert world.table.eviction.is_behind(red, red.shards[0].slot_bytes)

    world.store(other, blue, "q")

    assert world.table.eviction.behind
    assert world.table.draining.now is not None or blue.nodes


@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu", "s3-fifo"])
def test_sweeps_pass_what_was_continued_and_it_comes_again(policy, monkeypatch):
    """They do so without a put that waits: one that does not is not refused again and again."""
    monkeypatch.setattr("kvstore.state.choice.policy.LOOKS_MAX", 10)
    world = World(extents=11, slots_each=128)
    eviction = world.table.eviction
    eviction.change_policy(policy)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "!")
    names = [chr(0x4E00 + number) for number in range(15)]
    for length in range(90):
        for name in names:
            world.store(engine, space, name + "a" * length, start=length)
    for number in range(11 * 128 - 1 - 15 * 90):
        world.store(engine, space, chr(0x5E00 + number))
    for number in range(400):
        if world.store(engine, space, chr(0x7000 + number)) != GRANTED:
            break
    assert eviction.behind
    turns = 0
    while eviction.behind:
        eviction.sweep(64)
        turns += 1
    assert turns > 5

    for number in range(400):
        assert world.store(engine, space, chr(0x8000 + number)) == GRANTED
    assert world.store(engine, space, "z" * 1300)[-1:] == GRANTED
    check(world.table)


def test_a_queue_without_a_leaf_is_asked_once_for_all_pages_of_a_put(monkeypatch):
    world = World(extents=2, slots_each=64)
    engine = world.process()
    space = world.space(engine)
    for number in range(30):
        model = identity(model=f"limited {number}")
        [limited, _] = world.table.spaces.open(engine.session, model, [FULL])
        world.table.quotas.set(limited, 1 << 40, 0, 1 << 40)
    for number in range(128):
        world.store(engine, space, chr(0x4E00 + number))
    asked, pop = list[int](), LeastRecent.pop

    def counted(line: LeastRecent, tick: int) -> PrefixNode | None:
        asked.append(tick)
        return pop(line, tick)

    monkeypatch.setattr(LeastRecent, "pop", counted)

    for name in "bc":
        asked.clear()
        assert set(world.store(engine, space, name * 40)) == set(GRANTED)
        assert 30 < len(asked) < 30 + 60


def test_a_leaf_that_comes_to_an_empty_queue_during_a_choice_is_seen():
    world = World(extents=1, slots_each=64)
    engine = world.process()
    space = world.space(engine)
    [limited, _] = world.table.spaces.open(engine.session, identity(model="limited"), [FULL])
    world.table.quotas.set(limited, 1 << 40, 0, 1 << 40)
    world.store(engine, limited, "a")
    lease, _ = world.acquire(engine, limited, "a")
    for name in "bc":
        world.store(engine, space, name)
    eviction, size = world.table.eviction, space.shards[0].slot_bytes

    assert eviction.victim(space, size) is space.index[key("b")]
    world.table.release(engine, lease)
    assert eviction.victim(space, size) is limited.index[key("a")]
    eviction.end_choice()
    eviction.offer_all([space.index[key("b")], limited.index[key("a")]])
    check(world.table)
