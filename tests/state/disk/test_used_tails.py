"""Goal: who reads the end of a prompt uses its start, which then outlives its segment."""

from kvstore.state.disk.plans import HEADS_MARKED
from tests.state.disk.disk_world import DiskWorld
from tests.state.disk.test_disk_limits import LimitedWorld
from tests.state.world import chain, key


def read_end(world: DiskWorld, path: str) -> None:
    """Read only the last page of a prompt, as an engine does that has all before it."""
    number = 1000 + world.table.moment.tick
    leased = world.table.acquire(world.me, number, world.mine, 0, key(path), 1 << 60)
    assert len(leased.lease.slots) == 1
    world.table.release(world.me, number)


def test_a_use_of_the_last_page_marks_all_pages_before_it():
    world = DiskWorld()
    world.store(world.me, world.mine, "abcd")

    for _ in range(5):
        read_end(world, "abcd")

    marks = [world.mine.nodes[one].access for one in chain("abcd")]
    assert marks == [world.table.moment.tick] * 4


def test_a_use_marks_no_more_nodes_than_its_limit():
    world = DiskWorld(extents=HEADS_MARKED)
    path = "a" * (HEADS_MARKED + 9)
    world.store(world.me, world.mine, path)
    world.mine.nodes[key(path)].explode()
    nodes = [world.mine.nodes[one] for one in chain(path)]

    read_end(world, path)

    marked = [node.access == world.table.moment.tick for node in nodes]
    assert marked == [False] * 8 + [True] * (HEADS_MARKED + 1)


def test_the_start_of_a_prompt_whose_end_is_read_is_carried_over():
    world = LimitedWorld(segments=6)
    world.put("a")
    first = world.node("a").place(0).segment
    while max(world.disk.log.segments) == first:
        world.flood(1)
    world.put("ab")
    read_end(world, "ab")

    while first in world.disk.log.segments:
        world.flood(1)

    assert world.there("a", "ab") == [True, True]
