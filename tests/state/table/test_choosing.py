"""Goal: room is chosen before anything changes, and what is chosen is what leaves.

A plan is made of a drawn tree, carried out, and compared with room for one page after the other.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.state.table.choosing import Leaving, RoomChooser, RoomPlan, RoomRequest
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import Removed
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.slots import Slot
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import PAGE, World, key

SLOTS = 24
PATHS = st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=12)
POLICIES = ("lru", "lfu", "tinylfu", "kvstore")


def known(world: World, space: PrefixTree) -> list[object]:
    """All that a change would show in."""
    table = world.table
    pages = [
        (node.key, node.count, node.memory, node.present, node.access, node.uses, node.hits,
         node.children_in_memory, *node.slot_columns.values())
        for node in sorted(set(space.index.values()), key=lambda one: one.keys)
    ]  # fmt: skip
    return [
        pages, world.slots.stats(), list(table.actions), dict(table.counts),
        list(table.disk.jobs), list(table.disk.effects), space.changes, space.host_bytes,
    ]  # fmt: skip


class Drawn:
    """A node without a disk that holds some prompts, of which some are read again."""

    def __init__(self, paths: list[str], again: list[str], policy: str) -> None:
        self.world = world = World(extents=1, slots_each=SLOTS)
        world.table.eviction.change_policy(policy)
        self.engine = world.process()
        self.space = world.space(self.engine)
        for path in paths:
            world.store(self.engine, self.space, path)
        for path in again:
            number, _ = world.acquire(self.engine, self.space, path)
            world.table.release(self.engine, number)
        world.removed()

    def choose(self, head: PrefixNode, slots: int) -> RoomPlan:
        """A plan, as if these slots were to be found behind a page."""
        table = self.world.table
        table.eviction.now_ns = table.moment.now_ns
        head.hold()
        plan = RoomChooser(table.residents).choose(RoomRequest(self.space, PAGE, slots, head))
        head.unhold()
        table.eviction.end_choice()
        return plan

    def allocated(self, path: str, pages: int, *, at_once: bool) -> list[bytes]:
        """Let room for pages behind a path be made; the keys that left, in order."""
        table, head, held = self.world.table, self.space.node_of(key(path)), list[Slot]()
        head.hold()
        for count in [pages] if at_once else [1] * pages:
            held += table.room.allocate(self.space, head, PAGE, count)
        head.unhold()
        self.world.slots.abort(held)
        table.residents.tidy(head)
        gone: list[bytes] = []
        for action in table.actions:
            if isinstance(action, Removed):
                gone += action.keys
        return gone


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40)
@given(paths=PATHS, again=PATHS, head=st.integers(0, 100), slots=st.integers(1, SLOTS))
def test_choosing_changes_nothing_and_spares_the_chain_that_goes_on(
    policy: str, paths: list[str], again: list[str], head: int, slots: int
) -> None:
    node = Drawn(paths, again, policy)
    heads = [node.space.root, *set(node.space.index.values())]
    spared = heads[head % len(heads)]
    before = known(node.world, node.space)

    plan = node.choose(spared, slots)

    assert known(node.world, node.space) == before
    plan.check()
    assert plan.asked is None, "there is no disk to ask"
    left, chain = slots, set()
    at: PrefixNode | None = spared
    while at is not None:
        chain.add(at)
        at = at.above
    for victim in plan.victims:
        assert victim.node not in chain
        assert not victim.node.children_in_memory
        assert 0 < victim.pages <= left
        left -= min(victim.pages, victim.node.count)


@pytest.mark.parametrize("pages", [1, 5, 20])
def test_choosing_within_a_quota_changes_nothing(pages: int) -> None:
    world = World(extents=1, slots_each=SLOTS)
    engine = world.process()
    space = world.space(engine)
    world.table.quotas.set(space, 8 * PAGE, 0, SLOTS * PAGE)
    world.store(engine, space, "abcdefgh")
    before = known(world, space)

    plan = RoomChooser(world.table.residents).choose_own(space, pages, pages * PAGE)
    world.table.eviction.end_choice()

    assert known(world, space) == before
    assert plan.asked is not None
    assert (plan.asked.node.count, plan.asked.pages) == (8, min(pages, 8))


@pytest.mark.parametrize(("write", "victims", "writes"), [("through", [5], []), ("back", [], [12])])
def test_choosing_among_the_pages_of_the_prompt_itself_changes_nothing(
    write: str, victims: list[int], writes: list[int]
) -> None:
    world, path = DiskWorld(write), "abcdefghijkl"
    world.store(world.me, world.mine, path)
    world.end_all()
    before = known(world, world.mine)

    wanted = RoomRequest(world.mine, PAGE, 5, world.mine.index[key(path)])
    plan = RoomChooser(world.table.residents).choose_spill(wanted)

    assert known(world, world.mine) == before
    assert [one.pages for one in plan.victims] == victims
    assert [one.pages for one in plan.writes] == writes


@pytest.mark.parametrize("policy", ["lru", "lfu", "tinylfu"])
@settings(max_examples=40)
@given(paths=PATHS, again=PATHS, after=st.text("abc", max_size=4), pages=st.integers(1, SLOTS))
def test_room_for_many_pages_takes_those_that_room_for_one_after_the_other_takes(
    policy: str, paths: list[str], again: list[str], after: str, pages: int
) -> None:
    at_once, single = Drawn(paths, again, policy), Drawn(paths, again, policy)
    while key(after) not in at_once.space.index and after:
        after = after[:-1]

    gone = at_once.allocated(after, pages, at_once=True)

    assert sorted(gone) == sorted(single.allocated(after, pages, at_once=False))
    for one in (at_once, single):
        check(one.world.table)


class Walked(list[Leaving]):
    """A list that counts how often it is gone through."""

    walks = 0

    def __iter__(self) -> Iterator[Leaving]:
        self.walks += 1
        return super().__iter__()


def test_a_plan_knows_its_victims_without_going_through_them_for_each_one() -> None:
    world = World()
    space = world.space(world.process())
    *leaves, stranger = [PrefixNode(space, key(str(at)), None) for at in range(129)]
    plan = RoomPlan(None)
    plan.victims = victims = Walked()

    for leaf in leaves:
        assert not plan.takes(leaf)
        plan.take(Leaving(leaf, 1))
        assert plan.takes(leaf)

    assert all(plan.takes(leaf) for leaf in leaves)
    assert not plan.takes(stranger)
    assert victims.walks <= 1
