"""Goal: policy ``kvstore`` brings only leaves up to date, whatever else has stood in its cells."""

from bench.policy import SLOT_BYTES
from kvstore.state.choice.highest_reuse import HighestReuse
from tests.state.world import World, key


def test_a_leaf_that_was_continued_does_not_age_and_comes_again_when_it_is_a_leaf():
    """Each message that continues a prompt leaves one behind: choices are not to move them on."""
    world = World(extents=1)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "a")
    node = space.nodes[key("a")]
    policy = HighestReuse(SLOT_BYTES + 1)  # a class of its own: the table has offered it as well
    policy.add_candidate(node, 0)
    world.store(engine, space, "ab", start=1)

    assert policy.pop(1 << 20) is None
    assert not any(policy._cells.values())
    world.table.residents.drop(space.nodes[key("ab")], 0, "evicted")
    policy.add_candidate(node, 1 << 20)
    assert policy.pop(1 << 20) is node
