"""Goal: no choice of what leaves for a quota on disk looks at many leaves that have changed."""

import pytest

from kvstore.protocol.errors import CapacityError
from kvstore.state.disk.jobs import DiskWrite
from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.nodeheap import NodeHeap
from tests.state.disk.test_disk_limits import RECORD, LimitedWorld
from tests.state.world import key


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
    world.disk.limits._looks_left = 8
    pops, pop = list[int](), NodeHeap.pop
    monkeypatch.setattr(NodeHeap, "pop", lambda heap: pops.append(1) or pop(heap))

    choices = 0
    limits = world.table.residents.disk.limits
    while not limits.shrink(world.mine, 1, RECORD):
        apply_effects(world.table.residents)
        choices += 1
        assert limits.behind
        limits._looks_left = 8  # the next turn
        assert len(pops) <= 8 * (choices + 1)
        assert choices < 20
    apply_effects(world.table.residents)
    world.end_all()

    assert len(pops) <= 8 * (choices + 1)
    gone = [path for path in paths if not world.there(path)[0]]
    assert gone == ([paths[0]] if used else paths[:21])
    assert choices == (0 if used else 2)


def at_its_quota() -> LimitedWorld:
    """A space at its quota; a prompt that grew page by page, then other leaves.

    The pages of the prompt are in the order of leaves, and are leaves no more.
    """
    world = LimitedWorld("back", extents=80, segments=100)
    world.limit(world.mine, quota=100)
    leaves = [chr(0x5000 + at) for at in range(40)]
    for path in [*("a" * end for end in range(1, 61)), *leaves]:
        world.put(path)
        world.persist(path)
        world.end_all()
    return world


def test_a_durable_put_waits_while_leaves_that_have_changed_are_passed(monkeypatch):
    world = at_its_quota()
    monkeypatch.setattr("kvstore.state.disk.limits.LOOKS_MAX", 8)
    world.disk.go_on()
    world.put("x")

    with pytest.raises(CapacityError):
        world.persist("x")
    assert world.disk.busy, "its request waits"
    world.disk.take_passed()
    turns = 0
    while world.disk.busy:
        assert world.disk.unfinished
        assert not world.disk.take_passed()
        world.disk.go_on()
        turns += 1
        assert turns < 20
    assert world.disk.unfinished, "its request would wait for the next tick"
    assert world.disk.take_passed()
    durable = world.persist("x")
    world.end_all()

    assert turns > 4
    assert durable.ended
    assert durable.error is None
    assert world.there("x", "a" * 59, "a" * 60, chr(0x5000)) == [True, True, False, True]


def test_a_durable_put_at_a_quota_begins_few_pages_in_a_step(monkeypatch):
    monkeypatch.setattr("kvstore.state.disk.writes.SHORT_PAGES", 8)
    world = at_its_quota()
    path = "b" * 60
    assert set(world.store(world.me, world.mine, path)) == {PageStatus.GRANTED}

    durable = world.persist(path)

    begun = [len(world.jobs(DiskWrite))]
    while world.disk.unfinished:
        world.disk.go_on()
        begun.append(len(world.jobs(DiskWrite)) - sum(begun))
    assert max(begun) <= 8
    world.end_all()
    while not durable.ended:
        world.disk.go_on()
        world.end_all()
    assert durable.error is None
    assert all(world.on_disk(path))


def test_a_move_and_a_pin_to_disk_wait_while_leaves_that_have_changed_are_passed(monkeypatch):
    for pins in (False, True):
        world = at_its_quota()
        monkeypatch.setattr("kvstore.state.disk.limits.LOOKS_MAX", 8)
        world.disk.go_on()
        world.put("x")
        turns = 0
        if pins:
            pin = world.table.keeping.begin_pin(world.mine, key("x"), 1 << 60, "ssd")
            while not world.table.keeping.go_on_with(pin):
                turns += 1
                assert turns < 40
        else:
            while not world.table.tiers.ensure_written(world.node("x"), 0):
                world.disk.go_on()
                for job in world.jobs(DiskWrite):
                    world.end_job(job)
                turns += 1
                assert turns < 40
        world.end_all()

        assert turns > 4
        assert world.there("x") == [True]


def test_a_long_prompt_at_its_quota_looks_at_each_of_its_pages_a_few_times(monkeypatch):
    """The state serves nobody meanwhile: the square of 2,000 pages is most of a second."""
    monkeypatch.setattr("kvstore.state.disk.persists.PAGES_STEP", 150)
    monkeypatch.setattr("kvstore.state.disk.writes.SHORT_PAGES", 150)
    world, pages = LimitedWorld("back", extents=100, segments=100), 150
    for at in range(pages):
        world.put(chr(0x4E00 + at))
        world.persist(chr(0x4E00 + at))
        world.end_all()
    world.limit(world.mine, quota=pages)
    path = "".join(chr(0x8000 + at) for at in range(pages))
    assert set(world.store(world.me, world.mine, path)) == {PageStatus.GRANTED}
    looked: list[PrefixNode] = []
    add = world.disk.limits.add_candidate
    monkeypatch.setattr(
        world.disk.limits, "add_candidate", lambda node: (looked.append(node), add(node))
    )

    world.persist(path)

    assert len(world.jobs(DiskWrite)) == pages
    assert len(looked) < 20 * pages
