"""Goal: no choice of what leaves for a quota on disk looks at many leaves that have changed."""

import pytest

from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.nodeheap import NodeHeap
from tests.state.disk.test_disk_limits import RECORD, LimitedWorld


@pytest.mark.parametrize("used", [True, False])
def test_a_choice_for_a_quota_passes_over_few_leaves_that_have_changed(used, monkeypatch):
    world = LimitedWorld(extents=20, segments=40)
    paths = [chr(0x4E00 + at) for at in range(40)]
    for path in paths:
        world.put(path)
    world.limit(world.mine, quota=40)
    for path in paths[:20]:
        if used:
            lease, _ = world.acquire(world.me, world.mine, path)
            world.table.release(world.me, lease)
        else:
            world.table.residents.drop(world.node(path), 0, "operator")
    for at in range(0 if used else 20):
        world.put(chr(0x5E00 + at))  # it is at its quota again
    monkeypatch.setattr("kvstore.state.disk.limits.LOOKS_MAX", 8)
    pops, pop = list[int](), NodeHeap.pop
    monkeypatch.setattr(NodeHeap, "pop", lambda heap: pops.append(1) or pop(heap))

    choices = 0
    limits = world.table.residents.disk.limits
    while not limits.shrink(world.mine, 1, RECORD):
        apply_effects(world.table.residents)
        choices += 1
        assert limits.behind
        assert len(pops) <= 8 * (choices + 1)
        assert choices < 20
    apply_effects(world.table.residents)
    world.end_all()

    assert len(pops) <= 8 * (choices + 1)
    gone = [path for path in paths if not world.there(path)[0]]
    assert gone == ([paths[0]] if used else paths[:21])
    assert choices == (0 if used else 2)
