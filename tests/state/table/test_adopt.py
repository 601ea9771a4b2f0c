"""Goal: whatever a start finds in the segments, it ends, with a tree of what can be reached."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.page import PrefixKey, ShardSpec
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.table.invariants import check
from kvstore.state.tree import node as nodes
from kvstore.state.tree.node import PrefixNode
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import DIGEST, FULL, FULL_2, WINDOW, identity, key

RECORD = 8192


def offsets(count: int) -> npt.NDArray[np.uint64]:
    return np.arange(count, dtype=np.uint64) * RECORD


def found(*pages: tuple[str, str], pair: int = 0) -> FoundSegment:
    """A segment with these pages, each with the one that its record says is before it."""
    count = len(pages)
    return FoundSegment(
        1, 1 << 20, True, count * RECORD, count, b"".join(key(name) for name, _ in pages),
        b"".join(key(before) or bytes(32) for _, before in pages), DIGEST * count,
        offsets(count), np.full(count, pair, np.uint16),
    )  # fmt: skip


@pytest.mark.parametrize("shard", [FULL, WINDOW])
@pytest.mark.parametrize(
    "ring",
    [
        [("a", "b"), ("b", "a"), ("c", "a"), ("d", "c")],
        [("d", "c"), ("c", "a"), ("a", "b"), ("b", "a")],
        [("a", "a"), ("b", "a")],
        [("a", "c"), ("b", "a"), ("c", "b")],
        [("a", "e"), ("d", "e"), ("e", "d"), ("f", "e")],
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
    segment = replace(segment, keys=key("x") + bytes(32))

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


PATHS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=12)


@st.composite
def records(draw: st.DrawFn) -> list[list[tuple[str, int]]]:
    """Pages of both shards in segments, with those before them or without, heads mostly first."""
    every = dict.fromkeys(
        (path[:end], pair)
        for path in draw(PATHS)
        for pair in draw(st.sampled_from([[0], [1], [0, 1], [1, 0]]))
        for end in range(draw(st.sampled_from([1, 1, 1, 2, 3])), len(path) + 1)
    )
    pages = list(every)
    if draw(st.booleans()):
        pages = draw(st.permutations(pages))
    cut = draw(st.integers(0, len(pages)))
    return [pages[:cut], pages[cut:]]


def in_segment(number: int, pages: list[tuple[str, int]]) -> FoundSegment:
    names, count = [name for name, _ in pages], len(pages)
    return FoundSegment(
        number, 1 << 20, True, count * RECORD, count, b"".join(map(key, names)),
        b"".join(key(name[:-1]) or bytes(32) for name in names),
        b"".join(key(name)[:16] for name in names), offsets(count),
        np.array([pair for _, pair in pages], np.uint16),
    )  # fmt: skip


def adopted(
    segments: list[list[tuple[str, int]]], run_pages: int
) -> tuple[DiskWorld, dict[bytes, tuple[object, ...]]]:
    """A table that has taken these segments over, and what it knows of each page."""
    world, before = DiskWorld(), nodes.RUN_PAGES_MAX
    world.mine = world.space(world.me, [FULL, FULL_2])
    nodes.RUN_PAGES_MAX = run_pages
    try:
        adopt(
            world.table,
            [in_segment(at, pages) for at, pages in enumerate(segments, 1)],
            [(identity(), FULL), (identity(), FULL_2)],
            9,
        )
    finally:
        nodes.RUN_PAGES_MAX = before
    check(world.table)
    return world, {
        name: (
            node.present, node.first_depth + at,
            {shard: node.place_at(shard, at) for shard in node.place_columns},
            {shard: node.digest_at(shard, at) for shard in node.digest_columns},
        )
        for node in set(world.mine.index.values())
        for at, name in enumerate(node.key_list())
    }  # fmt: skip


@given(segments=records())
@settings(max_examples=150, deadline=None)
def test_a_start_that_makes_runs_finds_what_one_that_makes_single_pages_finds(segments):
    runs, found = adopted(segments, 128)
    single, expected = adopted(segments, 1)

    assert found == expected
    assert runs.table.counts == single.table.counts
    assert runs.mine.disk_bytes == single.mine.disk_bytes
    assert all(node.count == 1 for node in single.mine.index.values())


def test_pages_that_follow_each_other_are_found_as_one_node():
    world, _ = adopted([[(name, 0) for name in ("a", "ab", "abc", "abcd", "x", "abx")]], 128)

    assert sorted(node.count for node in set(world.mine.index.values())) == [1, 1, 2, 2]
    assert world.lookup(world.mine, "abcd") == (4, 0)


def chained(keys: list[bytes], pairs: list[int]) -> FoundSegment:
    """A segment with these pages, each behind the one before it of the same shard."""
    last = dict.fromkeys(pairs, bytes(32))
    parents = []
    for one, pair in zip(keys, pairs, strict=True):
        parents.append(last[pair])
        last[pair] = one
    count = len(keys)
    return FoundSegment(
        1, 1 << 20, True, count * RECORD, count, b"".join(keys), b"".join(parents),
        DIGEST * count, offsets(count), np.array(pairs, np.uint16),
    )  # fmt: skip


def test_a_long_prompt_is_found_as_runs_of_the_usual_length():
    world = DiskWorld()
    world.mine = world.space(world.me, [FULL])
    names = ["x" * at for at in range(1, 301)]

    assert adopt(world.table, [chained([*map(key, names)], [0] * 300)], [(identity(), FULL)], 2)

    found = set(world.mine.index.values())
    assert sorted(node.count for node in found) == [44, 128, 128]
    assert all(node.cold for node in found), "they are on disk only"
    assert len(world.disk.log.segments[1].pages) == 300
    assert world.lookup(world.mine, "x" * 300) == (300, 0)
    check(world.table)


def test_keys_that_begin_alike_are_told_apart():
    """Engines make the keys: what is compared at once are 8 bytes of them."""
    world = DiskWorld()
    world.mine = world.space(world.me, [FULL, FULL_2])
    keys = [bytes(8) + key(name)[8:] for name in ("a", "b", "c", "d")]
    segment = chained([*keys, *keys[:2]], [0, 0, 0, 0, 1, 1])

    pairs = [(identity(), FULL), (identity(), FULL_2)]
    assert adopt(world.table, [segment], pairs, 2) == 6

    assert [set(world.mine.nodes[one].disk) for one in map(PrefixKey, keys)] == [
        {0, 1}, {0, 1}, {0}, {0},
    ]  # fmt: skip
    check(world.table)


def test_records_that_alternate_with_those_of_another_shard_are_found():
    world = DiskWorld()
    world.mine = world.space(world.me, [FULL, FULL_2])
    keys = [key(name) for name in ("a", "ab", "abc")]
    segment = chained([one for one in keys for _ in range(2)], [0, 1] * 3)

    assert adopt(world.table, [segment], [(identity(), FULL), (identity(), FULL_2)], 2) == 6

    live = [one.offset for one in world.disk.log.segments[1].pages.stretches]
    assert live == [at * RECORD for at in range(6)]
    check(world.table)


def test_a_run_without_its_head_is_left_out_also_when_another_shard_s_pages_of_it_were():
    """Taking out those splits the run; the shard's first page is in another node then."""
    pages = [("ab", 0), ("abc", 0), ("abcd", 0), ("abc", 1), ("abcd", 1)]

    _, found = adopted([pages], 128)

    assert not found


@pytest.mark.parametrize("lost", [0, 1])
def test_a_prompt_that_lies_the_other_way_round_is_looked_at_once(
    lost: int, monkeypatch: pytest.MonkeyPatch
):
    """Each page is found before the one that it continues; ``lost``: the first one is not there."""
    pages, looks = 300, [0]
    below: Any = PrefixNode.__dict__["below"]

    def looked(node: PrefixNode) -> dict[PrefixKey, PrefixNode]:
        looks[0] += 1
        found: dict[PrefixKey, PrefixNode] = below.__get__(node)
        return found

    names = ["x" * at for at in range(1 + lost, pages + 1)]
    segment = found(*((name, name[:-1]) for name in reversed(names)))
    world = DiskWorld()
    monkeypatch.setattr(PrefixNode, "below", property(looked, below.__set__))

    assert adopt(world.table, [segment], [(identity(), FULL)], 2) == (0 if lost else pages)

    assert looks[0] < 20 * pages
    check(world.table)


def test_runs_that_were_found_before_the_page_they_continue_stay_whole():
    """A reclaim carries pages that were used to a later segment, and what continues them stays."""
    world, _ = adopted([[(name, 0) for name in ("ab", "abc", "abcd", "abcde")], [("a", 0)]], 128)

    assert world.lookup(world.mine, "abcde") == (5, 0)
    assert sorted(node.count for node in set(world.mine.index.values())) == [1, 1, 3]


def test_pages_that_are_left_out_take_no_run_of_another_shard_apart():
    pages = [
        ("abc", 1),
        ("abcd", 1),
        ("abcde", 1),
        ("a", 0),
        *(("abcde"[:at], 0) for at in range(2, 6)),
    ]

    world, _ = adopted([pages], 128)

    assert world.lookup(world.mine, "abcde") == (5, 0)
    assert world.lookup(world.mine, "abcde", [1]) == (0, 0)
    assert sorted(node.count for node in set(world.mine.index.values())) == [1, 2, 2]
