"""Goal: every choice of a victim is bounded, whatever it meets, and a put waits for the rest."""

import pytest

from kvstore.state.choice.policy import MOVES_MAX
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from tests.state.choice.test_policies import counted_pops
from tests.state.world import DIGEST, World, key

GRANTED, NO_ROOM = [PageStatus.GRANTED], [PageStatus.NO_ROOM]


def replica(world: World, engine: Process, space: PrefixTree, path: str) -> None:
    """The last page of a path was read from a peer that is reachable."""
    world.table.eviction.sources.changed("peer", b"boot")
    number, _, put = world.begin(engine, space, path, start=len(path) - 1)
    world.table.commit_put(engine, number, DIGEST * len(put.slots), peer="peer")


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
        assert len(pops) <= 64 + 2 * MOVES_MAX**2
        turns += 1
        assert turns < 60
        world.table.eviction.sweep(64)
