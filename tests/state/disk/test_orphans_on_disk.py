"""Goal: a prompt that is only on disk is dropped without a look at all that precedes each page."""

import pytest

from kvstore.state.disk.jobs import DiskJob
from kvstore.state.tree.node import PrefixNode
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import key

PAGES = 400


def test_a_page_dropped_from_a_chain_on_disk_costs_no_walk_to_its_start(
    monkeypatch: pytest.MonkeyPatch,
):
    world = DiskWorld(extents=PAGES // 4)
    path = "a" * PAGES
    world.store(world.me, world.mine, path)
    while world.disk.unfinished or world.jobs(DiskJob):
        for job in world.jobs(DiskJob):
            del world.open[job.job]
            world.table.tiers.completed(job.job, None)
    for node in list(world.mine.nodes.values())[::-1]:
        assert world.table.residents.release_memory(node)
    looks = 0
    in_memory = vars(PrefixNode)["in_memory"]

    def counted(node: PrefixNode) -> bool:
        nonlocal looks
        looks += 1
        return bool(in_memory.__get__(node))

    monkeypatch.setattr(PrefixNode, "in_memory", property(counted))
    world.table.residents.drop(world.node("a"), 0, "corrupt")
    world.table.residents.drop_orphans(10 * PAGES)

    assert key("a") not in world.mine.nodes
    assert looks < 10 * PAGES
