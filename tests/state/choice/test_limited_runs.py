"""Goal: for a quota or beside one, whole runs leave, and each queue is asked once in a choice."""

import pytest

from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from tests.state.world import FULL, PAGE, World, identity


def evictions(world: World, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages leave with each eviction from now on."""
    pages, evict = list[int](), world.table.residents.evict

    def counted(node: PrefixNode, most: int = 1) -> None:
        pages.append(min(most, node.count))
        evict(node, most)

    monkeypatch.setattr(world.table.residents, "evict", counted)
    return pages


def test_a_run_makes_room_within_a_quota_in_one_step(monkeypatch):
    world = World(extents=1, slots_each=16)
    process = world.process()
    space = world.space(process)
    world.store(process, space, "abcdefgh")
    world.table.quotas.set(space, 8 * PAGE, 0, 16 * PAGE)
    world.table.eviction.offer_all(space.by_creation.nodes(0), anew=True)
    left = evictions(world, monkeypatch)

    assert world.store(process, space, "stuvw") == [PageStatus.GRANTED] * 5

    assert left == [5]
    assert (space.host_bytes, world.lookup(space, "abcdefgh")) == (8 * PAGE, (3, 0))
    assert world.store(process, space, "0123456789") == [
        *[PageStatus.GRANTED] * 8, *[PageStatus.NO_ROOM] * 2
    ]  # fmt: skip
    check(world.table)


@pytest.mark.parametrize(("reserved", "leaves"), [(0, [5]), (4, [4, 1]), (6, [2, 3]), (9, [5])])
def test_a_run_of_another_space_gives_what_is_not_reserved_in_one_step(
    monkeypatch, reserved, leaves
):
    world = World(extents=1, slots_each=16)
    process = world.process()
    space = world.space(process)
    other, _ = world.table.spaces.open(
        process.session, identity(model="other"), [space.shards[0].spec]
    )
    world.table.quotas.set(space, 0, reserved * PAGE, 16 * PAGE)
    world.store(process, space, "abcdefgh")
    world.store(process, other, "12345678")
    left = evictions(world, monkeypatch)

    assert world.store(process, other, "vwxyz") == [PageStatus.GRANTED] * 5

    assert left == leaves
    assert space.host_bytes == max(min(reserved, 8), 3) * PAGE
    check(world.table)


def test_what_many_queues_have_next_is_looked_for_once_in_a_choice(monkeypatch):
    world = World(extents=1, slots_each=60)
    process = world.process()
    spaces = [
        world.table.spaces.open(process.session, identity(model=f"{at}"), [FULL])[0]
        for at in range(6)
    ]
    for space in spaces[1:]:
        world.table.quotas.set(space, 60 * PAGE, 0, 60 * PAGE)
    paths = [(spaces[at % 6], chr(0x1000 + at)) for at in range(60)]
    for space, path in paths:
        world.store(process, space, path)
    popped, pop = list[str](), world.table.eviction._pop
    monkeypatch.setattr(
        world.table.eviction, "_pop", lambda queue: popped.append(queue[0]) or pop(queue)
    )

    world.store(process, spaces[0], "b" * 30)

    assert [world.lookup(*page)[0] for page in paths] == [0] * 30 + [1] * 30, "the oldest went"
    assert len(popped) <= 6 + 30, "each queue once, and the one that a victim has left"
    assert sorted(popped[:6]) == sorted({*popped})
    check(world.table)
