"""Goal: whatever is broken in the state is found in one round, however much happens meanwhile."""

from collections.abc import Callable, Iterator
from random import Random

import pytest

from kvstore.state.choice.eviction import Passed
from kvstore.state.table.invariants import check, checks
from kvstore.state.table.residents import DROP_AT_ONCE
from kvstore.state.tree import prefix_tree, slots
from kvstore.state.tree.node import RUN_PAGES_MAX, PrefixNode
from kvstore.state.tree.places import Place
from kvstore.state.tree.slots import SlotState
from tests.state.disk.disk_world import IO_ERROR, DiskWorld
from tests.state.world import FULL, FULL_2, World, key

Corrupt = Callable[[DiskWorld, PrefixNode], object]


def passed_over_until(node: PrefixNode, until_ns: int) -> Passed:
    passed = Passed()
    passed.leaves[node], passed.until_ns = None, until_ns
    return passed


def put_wrong(of: str, value: object) -> Corrupt:
    return lambda _world, node: setattr(node, of, value)


CORRUPTIONS: dict[str, Corrupt] = {
    "a page that is READY and has no digest": lambda _, node: node.digests.clear(),
    "a page that nobody writes and is not READY": put_wrong("ready", 0),
    "a page in memory that the node does not count": put_wrong("memory", 0),
    "a page that expires and may go to disk": put_wrong("expires", {0: 7}),
    "a page on disk that must stay in memory": put_wrong("memory_only", 1),
    "children in memory that are none": put_wrong("children_in_memory", 2),
    "children on disk that are none": put_wrong("children_on_disk", 2),
    "a write that nobody began": put_wrong("to_disk", 1),
    "a node too deep": put_wrong("depth", 7),
    "a leaf that no policy knows": put_wrong("queued", ()),
    "a node of another key": put_wrong("keys", key("x")),
    "a node that the tree has lost": lambda world, node: world.mine.index.discard(node),
    "a node that its parent has lost": lambda _, node: node.parent.below.clear(),
    "a node that is not listed": lambda world, node: world.mine.by_creation.remove(node),
    "a child too many of the root": lambda world, _: setattr(world.mine.root, "depth", 1),
    "a page whose head is gone": lambda _, node: node.parent.forget(0),
    "a page on disk whose head is not": lambda _, node: node.parent.place_columns.clear(),
    "a record in no segment": lambda _, node: node.move_page(0, 0, Place(99, 0)),
    "a record behind its segment": lambda _, node: node.move_page(0, 0, Place(1, 1 << 30)),
    "a record of no page": lambda _, node: node.place_columns.clear(),
    "bytes in memory": lambda world, _: setattr(world.mine, "host_bytes", 1),
    "bytes on disk": lambda world, _: setattr(world.mine, "disk_bytes", 1),
    "tokens that are no page's": put_wrong("tokens", b"x"),
    "a page in a hole": lambda world, node: world.mine.holes.update({node: 1}),
    "a leaf that is passed over for ever": lambda world, node: world.table.eviction._passed.update(
        {("red", 4096): passed_over_until(node, 1 << 62)}
    ),
    "a queue without grace for ever": lambda world, _: (
        world.table.eviction._graceless_until_ns.update({("red", 4096): 1 << 62})
    ),
    "a queue that takes nothing over any more": lambda world, _: (
        world.table.eviction._took_over.add(("red", 4096))
    ),
    "an extent that nobody empties": lambda world, _: setattr(first(world), "draining", True),
    "a slot of two pages": lambda world, node: node.slot_columns.update(
        world.node("q").slot_columns
    ),
    "a slot that has no page": lambda world, node: world.table.residents.owners.remove(
        [node.slots[0]]
    ),
    "a page's slot that is FREE": lambda world, node: state(world, node, SlotState.FREE),
    "a page's slot in LIMBO": lambda world, node: state(world, node, SlotState.LIMBO),
    "a slot that is free twice": lambda world, _: first(world).free.append(first(world).free[0]),
    "a FREE slot that nobody finds": lambda world, _: first(world).free.pop(),
    "a FREE slot with a pin": lambda world, _: pin(world, first(world).free[0]),
    "pinned slots": lambda world, _: setattr(first(world), "pinned", 1),
    "an extent that is assigned and is not": lambda world, _: world.slots._unassigned.append(0),
    "an extent that nobody finds": lambda world, _: world.slots._open["red", 4096].clear(),
    "live bytes": lambda world, _: setattr(segment(world).pages, "live_bytes", 4096),
    "an end before the last record": lambda world, _: setattr(segment(world), "end", 1),
    "records being written": lambda world, _: setattr(segment(world), "writing", -1),
    "a failed segment": lambda world, _: setattr(segment(world), "failed", True),
    "used bytes": lambda world, _: setattr(world.disk.log, "_used_bytes", 1),
    "tombstones": lambda world, _: setattr(world.disk.graves, "waiting_keys", 3),
    "bytes of pins": lambda world, _: setattr(world.table.keeping.pins, "used_bytes", 1),
    "a space by another name": lambda world, _: world.table.spaces._by_digest.clear(),
}


def state(world: World, node: PrefixNode, wrong: SlotState) -> None:
    extent, index = world.slots._locate(node.slots[0])
    extent.states[index] = wrong


def first(world: World) -> slots.Extent:
    return world.slots.extents[world.slots._open["red", 4096][0]]


def pin(world: World, index: int) -> None:
    first(world).pins[index] = 1
    first(world).pinned = 1


def segment(world: DiskWorld) -> object:
    return next(iter(world.disk.log.segments.values()))


@pytest.fixture
def world() -> DiskWorld:
    return two_chains()


def two_chains() -> DiskWorld:
    """Two chains, written through to disk, and a FREE slot in their extent."""
    made = DiskWorld()
    made.store(made.me, made.mine, "ab")
    made.store(made.me, made.mine, "q")
    made.end_all()
    return made


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_what_is_broken_is_found_in_one_round(world, name):
    node = world.node("ab")
    check(world.table)

    CORRUPTIONS[name](world, node)

    with pytest.raises((AssertionError, KeyError)):
        check(world.table)


@pytest.mark.parametrize("wrong", ["orphans", "holes"])
def test_a_hole_is_right_as_long_as_what_is_below_it_is_leaving(wrong):
    world = World(extents=2, slots_each=2 * DROP_AT_ONCE)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "a" * 2 * DROP_AT_ONCE)
    world.table.residents.drop(space.nodes[key("a")], 0, "operator")
    world.table.residents.drop_orphans(DROP_AT_ONCE)
    check(world.table)
    assert space.holes

    {"orphans": world.table.residents.orphans, "holes": space.holes}[wrong].clear()

    with pytest.raises(AssertionError):
        check(world.table)


@pytest.mark.parametrize("name", ["a FREE slot that nobody finds", "pinned slots"])
def test_what_adds_up_wrongly_is_found_in_an_extent_of_many_stretches(monkeypatch, name):
    monkeypatch.setattr(slots, "STRETCH_SLOTS", 3)
    world = DiskWorld()
    world.store(world.me, world.mine, "ab")
    world.end_all()

    CORRUPTIONS[name](world, world.node("ab"))

    with pytest.raises(AssertionError):
        check(world.table)


def test_what_adds_up_is_not_asserted_when_something_changed_on_the_way(monkeypatch):
    """A pin moves from a slot that was not looked at yet to one that was."""
    monkeypatch.setattr(slots, "STRETCH_SLOTS", 1)
    world = World(extents=1, slots_each=8)
    engine = world.process()
    space = world.space(engine)
    for letter in "abcdefgh":
        world.store(engine, space, letter)
    lease, _ = world.acquire(engine, space, "h")
    looked: list[int] = []
    walk = world.slots.checks(lambda slot, _state: looked.append(slot))
    while len(looked) < 4:
        next(walk)
    world.acquire(engine, space, "a")
    world.table.release(engine, lease)

    assert len(list(walk)) > 0, "the walk has gone on"
    assert len(looked) == 8


CHANGES: dict[str, Callable[[DiskWorld], object]] = {
    "a page is granted": lambda world: world.begin(world.me, world.mine, "abz", start=2),
    "a page leaves": lambda world: world.table.residents.drop(world.node("ab"), 0, "operator"),
    "a page leaves memory": lambda world: world.table.residents.release_memory(world.node("ab")),
    "a page comes to disk": lambda world: world.end_job(world.write_of("x")),
    "a page does not come to disk": lambda world: world.end_job(world.write_of("x"), IO_ERROR),
    "a page leaves the disk": lambda world: world.disk.limits.forget(world.node("ab"), 0),
    "a page is lent": lambda world: world.acquire(world.me, world.mine, "q"),
    "a page is given back": lambda world: world.table.lose(world.me),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_any_two_stretches_is_no_mistake(monkeypatch, name):
    monkeypatch.setattr(slots, "STRETCH_SLOTS", 1)
    monkeypatch.setattr(prefix_tree, "STRETCH_WORK", 1)
    monkeypatch.setattr(prefix_tree, "CHILDREN_MAX", 1)
    taken, rest = 0, 1
    while rest:
        world = two_chains()
        world.store(world.me, world.mine, "x")
        world.begin(world.me, world.mine, "y")
        walk = checks(world.table)
        for _ in range(taken):
            next(walk)
        CHANGES[name](world)

        rest = len(list(walk))
        taken += 1
    assert taken > 15


def test_one_of_two_shards_that_leaves_the_disk_between_two_stretches_is_no_mistake(monkeypatch):
    monkeypatch.setattr(prefix_tree, "STRETCH_WORK", 1)
    taken, rest = 0, 1
    while rest:
        world = DiskWorld()
        assert world.space(world.me, [FULL, FULL_2]) is world.mine
        for shard in (0, 1):
            world.store(world.me, world.mine, "ab", shard=shard)
        world.end_all()
        walk = checks(world.table)
        for _ in range(taken):
            next(walk)
        run = world.mine.index[key("ab")]
        world.disk.limits.forget(run, 1)
        assert (run.count, run.on_disk) == (2, 1)

        rest = len(list(walk))
        taken += 1
    assert taken > 2


def test_memory_that_is_provided_between_two_stretches_is_no_mistake():
    world = World(extents=2, withheld=6)
    engine = world.process()
    world.store(engine, world.space(engine), "abcd")
    walk = checks(world.table)
    next(walk)

    assert len(world.slots.provide(6)) == 6

    assert sum(walk) == 4


def test_pages_that_come_and_leave_between_two_stretches_are_no_mistake(monkeypatch):
    monkeypatch.setattr(slots, "STRETCH_SLOTS", 2)
    monkeypatch.setattr(prefix_tree, "STRETCH_WORK", 1)
    monkeypatch.setattr(prefix_tree, "CHILDREN_MAX", 3)
    for seed in range(20):
        chance, world = Random(seed), DiskWorld(extents=3)
        rounds = 0
        walk: Iterator[int] = iter(())
        for _ in range(400):
            world.store(world.me, world.mine, "".join(chance.choices("abcd", k=3)))
            if chance.random() < 0.3:
                lease, _ = world.acquire(world.me, world.mine, chance.choice("abcd"))
                world.table.release(world.me, lease)
            if chance.random() < 0.3:
                for job in world.jobs(object)[:2]:
                    del world.open[job.job]
                    world.disk.completed(job.job, None)
            if next(walk, None) is None:
                rounds += 1
                walk = checks(world.table)
        assert rounds > 3


def test_one_stretch_looks_at_a_bounded_number_of_nodes_and_slots(monkeypatch):
    world = World(extents=2, slots_each=2048)
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    for at in range(1500):  # siblings, all below one page
        world.store(engine, space, "r" + chr(0x4E00 + at), start=bool(at))
        world.store(engine, space, "r" + chr(0x4E00 + at), start=bool(at), shard=1)
    looked = {"nodes": 0, "slots": 0}
    check_node = prefix_tree.PrefixTree._check_node

    def counted(self: prefix_tree.PrefixTree, node: PrefixNode) -> PrefixNode:
        looked["nodes"] += 1
        return check_node(self, node)

    monkeypatch.setattr(prefix_tree.PrefixTree, "_check_node", counted)
    state = type(world.slots).state
    monkeypatch.setattr(
        type(world.slots), "state",
        lambda self, slot: looked.__setitem__("slots", looked["slots"] + 1) or state(self, slot),
    )  # fmt: skip
    most = 0
    told = 0
    for nodes in checks(world.table):
        most = max(most, looked["nodes"] + looked["slots"])
        told += nodes
        looked["nodes"] = looked["slots"] = 0

    assert 0 < most <= prefix_tree.STRETCH_WORK
    assert told == len(space.nodes) == 1501


def test_a_stretch_of_long_runs_with_several_shards_has_one_run():
    world = World(extents=2, slots_each=2048)
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    for at in range(12):
        for shard in (0, 1):
            world.store(engine, space, chr(0x4E00 + at) * RUN_PAGES_MAX, shard=shard)
    found = [nodes for nodes in checks(world.table) if nodes]
    assert found == [RUN_PAGES_MAX] * 12


def test_the_children_of_a_node_with_very_many_are_counted_all_the_same(monkeypatch):
    monkeypatch.setattr(prefix_tree, "CHILDREN_MAX", 3)
    world = World()
    engine = world.process()
    space = world.space(engine)
    for letter in "abcdef":
        world.store(engine, space, "r" + letter, start=letter != "a")
    check(world.table)

    space.nodes[key("r")].children_in_memory -= 1

    with pytest.raises(AssertionError):
        check(world.table)
