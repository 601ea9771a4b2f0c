"""Goal: whatever a start finds in the segments, it ends, with a tree of what can be reached."""

import msgspec
import pytest

from kvstore.page import ShardSpec
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.table.invariants import check
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import DIGEST, FULL, WINDOW, identity, key

RECORD = 8192


def found(*pages: tuple[str, str], pair: int = 0) -> FoundSegment:
    """A segment with these pages, each with the one that its record says is before it."""
    count = len(pages)
    return FoundSegment(
        1, 1 << 20, True, count * RECORD, count, [key(name) for name, _ in pages],
        [key(before) or bytes(32) for _, before in pages], [DIGEST] * count,
        [at * RECORD for at in range(count)], [pair] * count,
    )  # fmt: skip


@pytest.mark.parametrize("shard", [FULL, WINDOW])
@pytest.mark.parametrize(
    "ring",
    [
        [("a", "b"), ("b", "a"), ("c", "a"), ("d", "c")],
        [("d", "c"), ("c", "a"), ("a", "b"), ("b", "a")],
        [("a", "a"), ("b", "a")],
        [("a", "c"), ("b", "a"), ("c", "b")],
    ],
)
def test_pages_that_are_said_to_precede_each_other_are_left_out(ring, shard: ShardSpec):
    """No hash chain is like that, but a node takes the keys that an engine gives it."""
    world = DiskWorld()
    kept = [("x", ""), ("y", "x")]

    assert adopt(world.table, [found(*ring, *kept)], [(identity(), shard)], 2) == 2

    [space] = world.table.spaces
    assert set(space.nodes) == {key("x"), key("y")}
    check(world.table)


def test_a_page_under_the_key_that_stands_for_all_is_left_out():
    """Nodes before 0.2 accepted one; its removal would have buried every page of its shard."""
    world = DiskWorld()
    segment = found(("x", ""), ("y", "x"))
    segment.keys[1] = bytes(32)

    assert adopt(world.table, [segment], [(identity(), FULL)], 2) == 1

    [space] = world.table.spaces
    assert set(space.nodes) == {key("x")}
    check(world.table)


def test_what_no_page_belongs_to_any_more_keeps_nobody_out():
    """A footer names the shards of dead records too; one of them may contradict a living one."""
    world = DiskWorld()
    world.mine = world.space(world.me, [FULL])
    of = identity(model="upgraded")
    before, now = WINDOW, msgspec.structs.replace(WINDOW, window_pages=3)

    assert adopt(world.table, [found(("x", ""), pair=1)], [(of, before), (of, now)], 2) == 1

    assert "recovery_refused_shards" not in world.table.counts
    space, shards = world.table.spaces.open(world.me.session, of, [now])
    assert 0 in space.nodes[key("x")].disk
    assert shards == [0]
