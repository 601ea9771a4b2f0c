"""Goal: that pages are kept as runs is seen by nobody.

Two page tables get the same requests. One keeps runs; of the other every node has one page, which
makes it a plain table of single pages. What they answer, tell and remember must be equal.
"""

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, PrefixKey, ShardSpec
from kvstore.state.choice.eviction import GRACE_NS
from kvstore.state.table.invariants import check
from kvstore.state.table.pages import PageTable
from kvstore.state.tree import node as nodes
from kvstore.state.tree.actions import PageStatus, Removed, Stored
from kvstore.state.tree.node import ORDINARY, Retention
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from kvstore.state.tree.slots import Slot
from tests.state.world import FULL, FULL_2, World, chain, key

T = TypeVar("T")

PATHS = st.one_of(
    st.text("ab", min_size=1, max_size=9),
    st.sampled_from(["aaaaaaaaaaaa", "aaaabbbbaaaa", "bbbbbbbbbbbb", "abababababab"]),
)
SHARDS = st.integers(0, 2)
LAST = ShardSpec(
    layout=CanonicalLayout(2048), layers=(2, 3), heads=(0, 1), group="last", window_pages=1
)
"""Of slots as large as the others': which slot a page has decides nothing then."""
POLICIES = ("lru", "lfu", "tinylfu", "s3-fifo")
"""Those that choose by what is equal in both; ``kvstore`` learns of a run's end only."""
RUN_PAGES_MAX = nodes.RUN_PAGES_MAX
Known = tuple[int, int, int, int, int, int, tuple[bytes, ...]]


def digests_of(pages: int, salt: int) -> bytes:
    return b"".join((salt << 32 | at).to_bytes(16, "little") for at in range(pages))


def counts_of(space: PrefixTree) -> list[int]:
    """Pages of each node, in the order of their depths."""
    return [node.count for node in sorted(set(space.index.values()), key=lambda one: one.depth)]


def one_table(shards: list[ShardSpec], slots: int) -> tuple[World, Process, PrefixTree]:
    world = World(extents=1, slots_each=slots)
    engine = world.process()
    return world, engine, world.space(engine, shards)


def lent(
    world: World, engine: Process, space: PrefixTree, path: str, start: int = 0
) -> tuple[list[Slot], bytes]:
    """Slots and digests of a path from one letter on, as an engine reads them."""
    packed = b"".join(chain(path, start))
    leased = world.table.acquire(engine, 99, space, 0, packed, 1 << 60)
    found = list(leased.lease.slots), leased.digests
    world.table.release(engine, 99)
    return found


def test_a_message_is_one_node_until_a_part_of_it_is_used():
    world, engine, space = one_table([FULL], 8)
    world.store(engine, space, "abcdef")
    assert counts_of(space) == [6]

    world.lookup(space, "abcx")

    assert counts_of(space) == [3, 3]
    assert [space.index[key(path)].hits for path in ("abc", "abcdef")] == [1, 0]


@pytest.mark.parametrize("pages", range(1, 6))
def test_every_page_keeps_its_slot_and_digest_wherever_its_run_is_split(pages):
    world, engine, space = one_table([FULL], 8)
    number, _, _ = world.begin(engine, space, "abcdef")
    world.table.commit_put(engine, number, digests_of(6, 1))
    before = lent(world, engine, space, "abcdef")
    last = space.index[key("a")]

    world.lookup(space, "abcdef"[:pages] + "x")

    check(world.table)
    assert counts_of(space) == [pages, 6 - pages]
    assert space.index[key("abcdef")] is last, "the last page keeps its node"
    assert lent(world, engine, space, "abcdef") == before
    assert before[1] == digests_of(6, 1)


@pytest.mark.parametrize("start", [1, 2, 5])
def test_pages_within_a_run_are_lent_by_themselves(start):
    world, engine, space = one_table([FULL], 8)
    world.store(engine, space, "abcdef")
    slots, digests = lent(world, engine, space, "abcdef")

    part = lent(world, engine, space, "abcdef", start)

    check(world.table)
    assert part == (slots[start:], digests[16 * start :])
    assert counts_of(space) == [start, 6 - start]


@pytest.mark.parametrize("pages", [1, 2, 3])
def test_a_run_is_split_where_prompts_part(pages):
    world, engine, space = one_table([FULL], 8)
    world.store(engine, space, "abcd")

    statuses = world.store(engine, space, "abcd"[:pages] + "x")

    check(world.table)
    assert statuses == [PageStatus.EXISTS] * pages + [PageStatus.GRANTED]
    assert sorted(counts_of(space)) == sorted([pages, 4 - pages, 1])
    assert world.lookup(space, "abcd") == (4, 0)


def test_room_is_made_from_the_end_of_a_run_with_one_event():
    world, engine, space = one_table([FULL], 8)
    world.store(engine, space, "abcdefgh")
    world.table.actions.clear()

    world.store(engine, space, "xyz")

    check(world.table)
    (left,) = [one for one in world.table.actions if isinstance(one, Removed)]
    assert left.keys == chain("abcdefgh")[:4:-1], "leaves first"
    assert sorted(counts_of(space)) == [3, 5]
    assert world.lookup(space, "abcdefgh") == (5, 0)


def test_no_more_pages_leave_than_give_the_slots_that_are_needed():
    world, engine, space = one_table([FULL, FULL_2], 8)
    for shard in (0, 1):
        world.store(engine, space, "abcd", shard=shard)

    world.store(engine, space, "xy")

    assert world.lookup(space, "abcd", [0, 1]) == (3, 0), "each page has a slot of either shard"


class Side(World):
    """One of the two tables, with an engine."""

    def __init__(self, run_pages: int, policy: str) -> None:
        super().__init__(extents=3, slots_each=8)
        self.table = PageTable(self.slots, policy)
        self.run_pages = run_pages
        self.me = self.process()
        self.mine = self.space(self.me, [FULL, FULL_2, LAST])


def told(side: Side) -> list[tuple[str, int, str, PrefixKey, PrefixKey]]:
    """What became READY and what left, page by page, one shard after the other."""
    actions, side.table.actions[:] = list(side.table.actions), []
    found: list[tuple[str, int, str, PrefixKey, PrefixKey]] = []
    for action in actions:
        if isinstance(action, Stored):
            parents = [action.parent, *action.keys]
            found += [
                ("stored", action.shard, "", one, parent)
                for one, parent in zip(action.keys, parents, strict=False)
            ]
        elif isinstance(action, Removed):
            found += [("left", action.shard, action.cause, one, key("")) for one in action.keys]
    return sorted(found, key=lambda one: one[1])


def known(space: PrefixTree) -> dict[PrefixKey, Known]:
    """Every page, and what is known of it; no node is split for that."""
    found: dict[PrefixKey, Known] = {}
    for node in set(space.index.values()):
        for at, name in enumerate(node.key_list()):
            ends = at == node.count - 1
            found[name] = (
                node.present, node.ready, node.memory, node.first_depth + at,
                node.hits * ends, node.uses * ends,
                tuple(column[16 * at : 16 * at + 16] for column in node.digest_columns.values()),
            )  # fmt: skip
    return found


class BothTables(RuleBasedStateMachine):
    """Requests to both; whatever is done to nodes of the first must not show."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 1
        self.number = 0
        self.puts: list[int] = []
        self.leases: list[int] = []

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        self.sides = [Side(RUN_PAGES_MAX, policy), Side(1, policy)]

    def both(self, do: Callable[[Side], T]) -> T:
        """Do it to both; what came of it, which is the same."""
        found: list[T | str] = []
        for side in self.sides:
            side.table.moment.now_ns = self.now_ns
            nodes.RUN_PAGES_MAX = side.run_pages
            try:
                found.append(do(side))
            except KVStoreError as error:
                found.append(str(error))
            finally:
                nodes.RUN_PAGES_MAX = RUN_PAGES_MAX
        assert found[0] == found[1]
        return found[0]

    @rule(path=PATHS, start=st.integers(0, 3), shard=SHARDS)
    def begin(self, path: str, start: int, shard: int) -> None:
        self.number += 1
        number, start = self.number, min(start, len(path) - 1)
        tokens = path[start:].encode("utf-32-le")

        def grant(side: Side) -> list[PageStatus]:
            packed = b"".join(chain(path, start))
            statuses, _ = side.table.begin_put(
                side.me, number, side.mine, shard, packed, key(path[:start]), tokens
            )
            return statuses

        if PageStatus.GRANTED in self.both(grant):
            self.puts.append(number)

    @rule(path=PATHS, shard=SHARDS, ttl=st.sampled_from([0, 0, 0, 5]), once=st.booleans())
    def store(self, path: str, shard: int, ttl: int, once: bool) -> None:
        """Begin and commit at once."""
        before = len(self.puts)
        self.begin(path, 0, shard)
        if len(self.puts) > before:
            self._commit(self.puts.pop(), ttl, once=once and ttl > 0)

    @rule(data=st.data(), ttl=st.sampled_from([0, 0, 5]))
    def commit(self, data: st.DataObject, ttl: int) -> None:
        if self.puts:
            at = data.draw(st.integers(0, len(self.puts) - 1))
            self._commit(self.puts.pop(at), ttl, once=False)

    def _commit(self, number: int, ttl: int, *, once: bool) -> None:
        keep = Retention(self.now_ns + ttl, read_once=once) if ttl else ORDINARY

        def commit(side: Side) -> list[PageStatus]:
            count = len(side.me.puts[number].slots)
            return side.table.commit_put(side.me, number, digests_of(count, number), keep)

        self.both(commit)

    @rule(data=st.data(), writing=st.booleans())
    def abort(self, data: st.DataObject, writing: bool) -> None:
        if self.puts:
            number = self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1)))
            self.both(lambda side: side.table.abort_put(side.me, number, writing=writing))

    @rule(path=PATHS, shards=st.lists(SHARDS, min_size=1, unique=True))
    def lookup(self, path: str, shards: list[int]) -> None:
        self.both(lambda side: side.lookup(side.mine, path, shards))

    @rule(path=PATHS, start=st.integers(0, 3), shard=SHARDS)
    def acquire(self, path: str, start: int, shard: int) -> None:
        self.number += 1
        number, start = self.number, min(start, len(path) - 1)

        def lease(side: Side) -> tuple[int, bytes, int]:
            packed, until_ns = b"".join(chain(path, start)), self.now_ns + 20
            leased = side.table.acquire(side.me, number, side.mine, shard, packed, until_ns)
            keys = side.leased_keys(leased.lease.slots)
            assert b"".join(keys) == packed[: len(keys) * KEY_BYTES]
            return len(keys), leased.digests, leased.lasting

        if self.both(lease)[0]:
            self.leases.append(number)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            number = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.both(lambda side: side.table.release(side.me, number))

    @rule(path=PATHS, shard=SHARDS)
    def drop(self, path: str, shard: int) -> None:
        """A page is found to be corrupt."""

        def drop(side: Side) -> None:
            node = side.mine.nodes.get(key(path))
            if node is not None:
                side.table.residents.drop(node, shard, "corrupt")

        self.both(drop)

    @rule(path=PATHS)
    def look_closely(self, path: str) -> None:
        """Whatever treats a page by itself splits its run."""
        node = self.sides[0].mine.nodes.get(key(path))
        if node is not None and node.parent is not None:
            assert node.count == node.parent.count == 1
            for child in node.children.values():
                assert child.count == 1
                assert child.parent is node

    @rule(path=PATHS, ttl=st.sampled_from([0, 9]))
    def pin(self, path: str, ttl: int) -> None:
        def pin(side: Side) -> int:
            side.table.keeping.pins.budget_bytes = 1 << 20
            until_ns = self.now_ns + ttl if ttl else self.now_ns + 30
            return side.table.keeping.pin(side.mine, key(path), until_ns).size_bytes

        self.both(pin)

    @rule(ns=st.sampled_from([1, 3, 10, GRACE_NS // 2]))
    def pass_time(self, ns: int) -> None:
        self.now_ns += ns

        def expire(side: Side) -> None:
            while side.table.expire(self.now_ns):
                pass
            while side.table.residents.orphans:
                side.table.residents.drop_orphans(100)

        self.both(expire)

    @invariant()
    def are_equal(self) -> None:
        if not hasattr(self, "sides"):
            return
        runs, single = self.sides
        assert known(runs.mine) == known(single.mine)
        assert told(runs) == told(single)
        assert runs.slots.stats() == single.slots.stats()
        assert runs.table.counts == single.table.counts
        assert all(node.count == 1 for node in single.mine.index.values())
        for side in self.sides:
            check(side.table)


BothTables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBothTables = BothTables.TestCase
