"""Goal: a walk in turns shows each page that stays exactly once, whatever comes and goes."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.state.ask import traversal as walks
from kvstore.state.ask.traversal import DROP_NODES, PASS_NODES, STEP_NODES, Removal, subtree
from kvstore.state.table.invariants import check
from kvstore.state.tree.prefix_tree import SHELF_NODES, PrefixTree
from tests.state.world import FULL, PAGE, ROOT, World, chain, ended, identity, key

paths = st.lists(st.text("abc", min_size=1, max_size=6), max_size=30)


def grown(stored: list[str]) -> tuple[World, object, PrefixTree]:
    world = World(extents=4, slots_each=64)
    process = world.process()
    space = world.space(process)
    for path in stored:
        world.store(process, space, path)
    return world, process, space


@given(paths, st.integers(1, 7), st.integers(1, 4))
def test_a_subtree_is_listed_once_and_heads_before_tails(stored, limit, depth):
    _, _, space = grown(stored)
    found, after, more = [], ROOT, True
    while more:
        nodes, more = ended(subtree(space, ROOT, after, depth, limit))
        assert len(nodes) <= limit
        found += nodes
        after = found[-1].key if found else ROOT

    assert sorted(node.key for node in found) == sorted(
        node.key for node in space.nodes.values() if node.depth <= depth
    )
    places = {node: at for at, node in enumerate(found)}
    assert all(
        places[node.parent] < at for node, at in places.items() if node.parent is not space.root
    )


def test_below_a_key_begins_with_that_key():
    _, _, space = grown(["abc", "abd", "x"])

    nodes, more = ended(subtree(space, key("ab"), ROOT, 9, 10))

    assert ([node.key for node in nodes], more) == ([key("ab"), key("abc"), key("abd")], False)


def test_a_cursor_that_left_or_lies_elsewhere_is_refused():
    _, _, space = grown(["ab", "x"])
    for top, after in ((key("a"), key("x")), (ROOT, key("gone")), (key("gone"), ROOT)):
        with pytest.raises(InvalidArgument):
            ended(subtree(space, top, after, 9, 10))


@given(paths, paths, st.randoms(use_true_random=False))
def test_shelves_show_what_stays_once_while_pages_come_and_go(stored, more, chance):
    world, process, space = grown(stored)
    for filler in range(SHELF_NODES):  # so that there is more than one shelf
        space.node(key(f"filler{filler}"), ROOT)
    before = set(space.nodes.values())
    seen = []
    for number in space.by_creation.numbers(0):
        seen += space.by_creation.nodes(number)
        for path in more[:2]:
            world.store(process, space, path)
        victim = chance.choice(list(space.nodes.values()))
        if not victim.children and victim.present:
            world.table.residents.drop(victim, 0, "operator")
        del more[:2]

    assert len(seen) == len(set(seen))
    assert before & set(space.nodes.values()) <= set(seen)


def test_a_subtree_goes_in_turns_and_what_is_pinned_or_written_stays():
    world, process, space = grown(["abcdef", "abxy", "q"])
    world.table.keeping.pins.budget_bytes = 100 * PAGE
    world.table.keeping.pins.add(space, key("abc"), 0)
    world.begin(process, space, "abxyz")  # its last page is being written
    removal, counts = Removal(space.nodes[key("a")], "operator"), [0]
    while removal.turn(world.table, limit=2):
        counts.append(removal.dropped)

    assert (removal.dropped, removal.kept) == (3, 6)
    assert all(after - before <= 2 for before, after in pairwise(counts))
    assert world.lookup(space, "abcdef") == (3, 0)
    assert world.lookup(space, "abxyz") == (4, 1)
    assert world.lookup(space, "q") == (1, 0)
    check(world.table)


def test_a_chain_deeper_than_a_turn_goes_all_the_same():
    world, process, space = grown([])
    world.store(process, space, "a" * 200)
    assert len(chain("a" * 200)) == len(space.nodes)

    removal = Removal(space.root, "cleared")
    assert removal.turn(world.table, limit=60)
    assert (removal.dropped, removal.kept, len(space.nodes)) == (40, 0, 160)


def test_on_the_way_down_a_chain_the_state_is_given_away_too():
    world = World(extents=20, slots_each=64)
    process = world.process()
    space = world.space(process)
    world.store(process, space, "a" * 1000)
    removal = Removal(space.root, "cleared")

    assert removal.turn(world.table, limit=2)
    assert len(removal._stack) <= 2 * PASS_NODES + 1
    assert removal.dropped == 0


def test_on_the_way_down_a_step_splits_few_pages_off():
    """Each costs half as much as a drop; a step passed 320 of a long prompt."""
    world = World(extents=20, slots_each=64)
    process = world.process()
    space = world.space(process)
    world.store(process, space, "a" * 1000)
    removal, depths = Removal(space.root, "cleared"), [1]
    while removal.turn(world.table):
        depths.append(len(removal._stack))

    assert max(depths) > 900
    assert max(after - before for before, after in pairwise(depths)) <= 64
    assert removal.dropped == 1000


def test_a_node_of_many_ranks_goes_a_few_at_a_time():
    world = World(extents=8, slots_each=16)
    process = world.process()
    ranks = [msgspec.structs.replace(FULL, heads=(at, at + 1)) for at in range(3 * DROP_NODES)]
    space = world.space(process, ranks)
    for shard in range(len(ranks)):
        world.store(process, space, "a", shard=shard)
    removal, counts = Removal(space.root, "cleared"), [0]
    while removal.turn(world.table):
        counts.append(removal.dropped)

    assert removal.dropped == 3 * DROP_NODES
    assert all(after - before <= DROP_NODES for before, after in pairwise(counts))


def test_finding_the_way_back_to_a_cursor_takes_steps_too():
    world = World(extents=40, slots_each=64)
    process = world.process()
    space = world.space(process)
    world.store(process, space, "a" * 2000)
    steps = subtree(space, ROOT, key("a" * 2000), 10_000, 10)

    assert sum(1 for _ in steps) >= 2000 // (STEP_NODES * 10)
    assert ended(subtree(space, ROOT, key("a" * 1990), 10_000, 5)) == (
        [space.nodes[key("a" * depth)] for depth in range(1991, 1996)], True,
    )  # fmt: skip


@pytest.mark.parametrize("going_on", [False, True])
def test_no_step_of_a_listing_splits_more_runs_than_it_examines(going_on):
    """The first page of each prompt becomes a node of its own, which costs 30 microseconds."""
    world = World(extents=10, slots_each=64)
    process = world.process()
    space = world.space(process)
    prompts = [chr(ord("A") + at) * 3 for at in range(3 * STEP_NODES)]
    for path in prompts:
        world.store(process, space, path)
    cursor = key(prompts[0][0]) if going_on else ROOT

    def split() -> int:
        return sum(node.count == 1 for node in space.root.below.values())

    counts = [split(), *(split() for _ in subtree(space, ROOT, cursor, 1, 1000)), split()]

    assert counts[-1] == len(prompts)
    most = max(after - before for before, after in pairwise(counts))
    assert most <= STEP_NODES + going_on, "and the page that is the cursor"


def test_a_listing_leaves_out_what_leaves_between_its_steps():
    world, process, space = grown([])
    for number in range(STEP_NODES + 10):
        space.node(key(f"filler{number}"), ROOT)
    world.store(process, space, "zy")
    stay = set(space.nodes.values()) - {space.nodes[key("z")], space.nodes[key("zy")]}
    steps = subtree(space, ROOT, ROOT, 9, 1000)
    next(steps)
    world.table.residents.drop(space.nodes[key("z")], 0, "operator")

    found, more = ended(steps)
    assert (set(found), len(found), more) == (stay, len(stay), False)


def test_what_stays_does_not_keep_what_comes_after_it():
    world, _, space = grown(["a" * (DROP_NODES + 1), "b"])
    world.table.keeping.pins.budget_bytes = 200 * PAGE
    world.table.keeping.pins.add(space, key("a" * (DROP_NODES + 1)), 0)
    removal = Removal(space.root, "cleared")
    while removal.turn(world.table):
        pass

    assert (removal.dropped, removal.kept) == (1, DROP_NODES + 1)
    assert world.lookup(space, "b") == (0, 0)


def test_more_pages_being_written_than_a_turn_takes_hide_none_behind_them(monkeypatch):
    monkeypatch.setattr(walks, "PINS_MAX", 0)
    world = World(extents=4, slots_each=64)
    process = world.process()
    space = world.space(process)
    writing = [chr(first) for first in range(0x4E00, 0x4E00 + DROP_NODES + 1)]
    for path in [*writing, "z"]:
        world.begin(process, space, path)
    world.store(process, space, "ab")
    removal = Removal(space.root, "cleared")
    while removal.turn(world.table):
        pass

    assert (removal.dropped, removal.kept) == (2, len(writing) + 1)
    assert world.lookup(space, "ab") == (0, 0)


def test_spaces_do_not_show_each_others_pages():
    world, process, space = grown(["ab"])
    other, _ = world.table.spaces.open(process.session, identity(model="n"), [space.shards[0].spec])

    assert other.by_creation.numbers(0) == []
    assert len(space.listed(0)) == 2
