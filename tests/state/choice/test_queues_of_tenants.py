"""Goal: tenants that come and go leave no queues behind, and freeing these takes no long turn."""

from collections.abc import Iterator
from itertools import count

import pytest

from kvstore.state.choice.policies import POLICIES, new_policy
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from tests.state.choice.test_bounded_choices import replica
from tests.state.world import FULL, PAGE, World, identity, key


def tenants(world: World) -> Iterator[None]:
    """One tenant after another stores pages, and leaves."""
    for number in count():
        engine = world.process(f"session {number}", number + 2)
        space = world.space(engine, tenant=f"tenant {number}")
        world.table.residents.close_idle_spaces()
        for name in "abc":
            world.store(engine, space, name)
        replica(world, engine, space, "r")
        for name in "abcr":
            world.table.residents.drop(space.nodes[key(name)], 0, "operator")
        world.end(engine)
        world.table.spaces.left(engine.session)
        yield


@pytest.mark.parametrize("policy", POLICIES)
def test_queues_go_with_the_last_space_of_their_tenant(policy, monkeypatch):
    monkeypatch.setattr("kvstore.state.tree.sessions.SPACES_MAX", 8)
    world = World()
    eviction = world.table.eviction
    eviction.change_policy(policy)
    engine = world.process()
    mine = world.space(engine)
    assert world.store(engine, mine, "mine") == [PageStatus.GRANTED] * 4
    come = tenants(world)

    for _ in range(100):
        next(come)
        assert len(eviction._queues) < 40
        assert len(eviction._replicas) < 40
        assert len(eviction._replaced) < 40
    check(world.table)
    other = world.table.spaces.open(engine.session, identity(model="other"), [FULL])[0]
    assert world.store(engine, other, "o" * 16) == [PageStatus.GRANTED] * 16
    assert not mine.nodes, "they were in the queue of their tenant"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_queue_holds_is_let_go_in_steps(policy):
    world = World(extents=1, slots_each=64)
    engine = world.process()
    space = world.space(engine)
    queue = new_policy(policy, PAGE)
    for number in range(50):
        world.store(engine, space, chr(0x4E00 + number))
        node = space.index[key(chr(0x4E00 + number))]
        node.queued = ()
        queue.add_candidate(node, number)

    steps = 1
    while not queue.forget(4):
        steps += 1

    assert steps > 5
