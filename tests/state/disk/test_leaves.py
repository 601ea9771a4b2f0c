"""Goal: for a quota on disk only leaves leave, as few as are enough, and choosing them is cheap."""

from itertools import pairwise

import pytest

from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec
from kvstore.state.disk import limits
from kvstore.state.disk.leaves import Leaves
from kvstore.state.table.invariants import check
from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.node import PrefixNode
from tests.state.disk.test_disk_limits import RECORD, LimitedWorld
from tests.state.world import FULL, key

WIDE = ShardSpec(layout=CanonicalLayout(2048), layers=(1, 5), heads=(0, 1))
"""Its records are of two and a half."""


class Looked(dict[PrefixKey, PrefixNode]):
    """Children of a node, which count how many of them are looked at."""

    looks = 0

    def values(self):
        """All of them, each of which is looked at."""
        for node in super().values():
            self.looks += 1
            yield node


@pytest.mark.parametrize("in_memory", [True, False])
def test_whether_a_page_is_a_leaf_costs_no_look_at_each_of_its_children(*, in_memory):
    """A page with 10,000 children is asked of with each of them that comes or goes."""
    world, children = LimitedWorld("through", extents=20), 30
    world.put("a")
    for at in range(children):
        world.put("a" + chr(0x4E00 + at))
    top = world.node("a")
    for node in () if in_memory else [*top.children.values(), top]:
        assert world.table.residents.release_memory(node)
    world.disk.limit(world.mine, 40 * RECORD, 0)
    top.below = below = Looked(top.below)

    world.disk.limits.add_candidate(top)
    for _, node in list(below.items()):
        world.disk.limits.forget(node, 0)

    assert below.looks == 0
    assert world.node("a").children_on_disk == 0


def test_the_leaves_of_a_quota_that_ends_are_let_go_in_turns(monkeypatch):
    """Of a million the whole heap would be freed in the turn of one message."""
    monkeypatch.setattr(limits, "FREED_TURN", 8)
    world, pages = LimitedWorld("through", extents=20), 40
    for at in range(pages):
        world.put(chr(0x4E00 + at))
    world.limit(world.mine, quota=pages + 1)
    leaves = world.disk.limits._leaves[world.mine.number]
    held = [len(leaves._heap)]
    assert len(leaves.queued) == held[0] == pages

    world.disk.limit(world.mine, 0, 0)
    held.append(len(leaves._heap))
    for _ in range(pages):
        world.disk.go_on()
        held.append(len(leaves._heap))
        if not world.table.residents.unfinished:
            break

    assert held[-1] == len(leaves.queued) == 0
    assert max(before - after for before, after in pairwise(held)) <= 2 * 8
    check(world.table)


def wide_and_narrow() -> tuple[LimitedWorld, int]:
    """A space at its quota: two free pages of one record each, and more that are pinned."""
    world = LimitedWorld()
    world.space(world.me, [FULL, WIDE])
    for path in ("a", "b", "c", "d"):
        world.put(path)
    for path in ("a", "b"):
        world.table.keeping.pin(world.mine, key(path), 0, "ssd")
    world.limit(world.mine, quota=4)
    return world, world.mine.shard_numbers[WIDE]


def test_nothing_leaves_for_a_page_that_does_not_fit_then_either():
    world, wide = wide_and_narrow()
    size = world.mine.shards[wide].record_bytes
    assert 2 * RECORD < size <= 4 * RECORD, "two pages are not enough"

    world.store(world.me, world.mine, "e", shard=wide)
    world.end_all()

    assert not world.node("e").on_disk
    assert world.there("a", "b", "c", "d") == [True] * 4
    assert world.table.counts["disk_quota_pages"] == 0
    check(world.table)
    world.table.keeping.unpin(next(iter(world.table.keeping.pins)).number)
    world.end_all()
    world.table.residents.offer_more(64)
    world.store(world.me, world.mine, "f", shard=wide)
    world.end_all()
    assert world.node("f").on_disk, "three are"
    assert world.there("b", "c", "d") == [True, False, False]
    check(world.table)


def test_what_is_beyond_a_quota_leaves_even_if_a_new_page_does_not_fit_then():
    world, wide = wide_and_narrow()
    world.disk.limit(world.mine, 3 * RECORD, 0)

    world.store(world.me, world.mine, "e", shard=wide)
    world.end_all()

    assert not world.node("e").on_disk
    assert world.there("c", "d") == [False, True], "the quota alone asks for one"
    assert world.table.counts["disk_quota_pages"] == 1


def test_a_choice_that_a_turn_cuts_short_goes_on_in_the_next():
    world = LimitedWorld()
    for path in ("a", "ab", "abc", "abcd"):
        world.put(path)
    world.limit(world.mine, quota=4)

    assert not world.disk.limits.shrink(world.mine, 2, 3 * RECORD)
    apply_effects(world.table.residents)
    assert world.there("a", "ab", "abc", "abcd") == [True, True, False, False]
    assert world.disk.limits.shrink(world.mine, 2, 3 * RECORD)
    apply_effects(world.table.residents)

    assert world.there("a", "ab") == [True, False]


def test_of_a_run_only_the_pages_that_must_go_are_split_off():
    world = LimitedWorld()
    world.store(world.me, world.mine, "abcdef")
    world.end_all()

    world.disk.limit(world.mine, 4 * RECORD, 0)
    world.table.residents.add_candidate(world.mine.index[key("abcdef")])

    assert world.table.tiers.shrink(world.mine, 64)

    head = world.mine.index[key("abcd")]
    assert (head.count, head.on_disk) == (4, 1)
    assert world.there("abcde", "abcdef") == [False, False]
    check(world.table)


def test_a_head_that_was_split_off_is_offered_beside_its_tail_of_the_same_age():
    world = LimitedWorld()
    world.store(world.me, world.mine, "abc")  # one run
    tail = world.mine.index[key("abc")]
    leaves = Leaves()
    leaves.add(tail)
    head = tail.split(1)
    assert (head.access, head.serial) != (tail.access, tail.serial)

    leaves.add(head)  # its serial number is the one that its tail had when that was offered

    assert [leaves.pop(), leaves.pop(), leaves.pop()] == [(tail, False), (head, False), None]
