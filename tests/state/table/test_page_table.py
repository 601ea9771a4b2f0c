"""Goal: what happens to pages in the situations that engines bring about, one sentence each."""

from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import pytest

from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.table.invariants import check
from kvstore.state.table.orphans import subtree
from kvstore.state.table.room import EMPTY_MAX
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.match import SCAN_LOOKS_MAX, WINDOWS_MAX
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.slots import SlotState
from tests.state.world import FULL, FULL_2, PAGE, STATE, WINDOW, World, chain, key

GRANTED, EXISTS, PENDING = PageStatus.GRANTED, PageStatus.EXISTS, PageStatus.PENDING
NO_ROOM, NO_PARENT, DROPPED = PageStatus.NO_ROOM, PageStatus.NO_PARENT, PageStatus.DROPPED


# Reading


def test_a_prefix_is_as_long_as_every_shard_is_ready():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    world.store(engine, space, "abcd", shard=0)
    world.store(engine, space, "ab", shard=1)

    assert world.lookup(space, "abcd", [0]) == (4, 0)
    assert world.lookup(space, "abcd", [1]) == (2, 0)
    assert world.lookup(space, "abcd", [0, 1]) == (2, 0)


def test_a_sliding_window_needs_only_the_last_pages():
    world = World(extents=8)
    engine = world.process()
    space = world.space(engine, [FULL, WINDOW])
    world.store(engine, space, "abcdef", shard=0)
    world.store(engine, space, "abcd", start=2, shard=1)  # pages c and d of the window

    assert world.lookup(space, "abcdef", [0, 1]) == (4, 0)
    assert world.lookup(space, "abc", [0, 1]) == (0, 0), "its window reaches back to b"


def test_a_lookup_with_many_windows_looks_at_the_leading_keys_only(monkeypatch):
    world = World(extents=16)
    engine = world.process()
    windows = [
        msgspec.structs.replace(WINDOW, group=f"of {pages}", window_pages=pages)
        for pages in range(1, WINDOWS_MAX + 1)
    ]
    space = world.space(engine, windows)
    for shard in range(WINDOWS_MAX):
        world.store(engine, space, "abc", shard=shard)
    monkeypatch.setattr(space, "nodes", looked := Looked(space.nodes))
    packed = b"".join(chain("abc")) + Random(1).randbytes(KEY_BYTES * 65_533)

    found = world.table.lookup(space, list(range(WINDOWS_MAX)), packed)

    assert found == (3, 0)
    assert looked.looks <= SCAN_LOOKS_MAX // WINDOWS_MAX


class Looked(dict[PrefixKey, PrefixNode]):
    """Nodes that count how often they are looked up."""

    looks = 0

    def get(self, name: PrefixKey, otherwise: Any = None) -> Any:
        self.looks += 1
        return super().get(name, otherwise)


def test_a_recurrent_state_is_needed_at_the_last_page_alone():
    world = World(extents=8)
    engine = world.process()
    space = world.space(engine, [FULL, STATE])
    world.store(engine, space, "abcde", shard=0)
    world.store(engine, space, "abc", start=2, shard=1)

    assert world.lookup(space, "abcde", [0, 1]) == (3, 0)
    assert world.lookup(space, "ab", [0, 1]) == (0, 0)


def test_what_is_being_written_is_pending_and_not_a_hit():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab")
    number, _, _ = world.begin(engine, space, "abcd")

    assert world.lookup(space, "abcde") == (2, 2)
    world.commit(engine, number)
    assert world.lookup(space, "abcde") == (4, 0)


def test_a_lease_covers_the_leading_run_only():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab")
    world.store(engine, space, "abx", start=2)

    _, lease = world.acquire(engine, space, "abc")

    assert world.leased_keys(lease.slots) == chain("ab")


def test_a_lease_over_the_quota_pins_nothing():
    world = World(quota=2 * PAGE)
    engine = world.process()
    space = world.space(engine)
    for end in (1, 2, 3):
        world.store(engine, space, "abc"[:end], start=end - 1)

    with pytest.raises(CapacityError, match="quota"):
        world.acquire(engine, space, "abc")

    assert world.slots.stats().pinned_bytes == 0
    assert engine.session.used_bytes == 0


# Writing


def test_a_page_is_granted_once_and_then_pending_or_existing():
    world = World()
    first, second = world.process("p"), world.process("q", pid=2)
    space = world.space(first)
    number, statuses, _ = world.begin(first, space, "ab")
    assert statuses == [GRANTED, GRANTED]
    assert world.store(second, world.space(second), "abc") == [PENDING, PENDING, GRANTED]

    world.commit(first, number)
    assert world.store(second, space, "abc") == [EXISTS] * 3


def test_a_page_without_its_head_is_refused_unless_only_a_window_is_needed():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, WINDOW])

    assert world.store(engine, space, "abc", start=1, shard=0) == [NO_PARENT, NO_PARENT]
    assert world.store(engine, space, "abc", start=1, shard=1) == [GRANTED, GRANTED]
    check(world.table)


def test_a_put_larger_than_the_pool_stores_its_head():
    world = World(extents=2)
    engine = world.process()
    space = world.space(engine)
    path = "abcdefghijkl"

    assert world.store(engine, space, path) == [GRANTED] * 8 + [NO_ROOM] * 4
    assert world.lookup(space, path) == (8, 0)
    check(world.table)


def test_a_put_over_the_quota_stores_what_the_quota_admits():
    world = World(quota=3 * PAGE)
    engine = world.process()
    space = world.space(engine)

    assert world.store(engine, space, "abcde") == [GRANTED] * 3 + [NO_ROOM] * 2
    assert engine.session.used_bytes == 0, "what is READY is nobody's any more"


def test_two_processes_of_a_session_share_its_quota():
    world = World(quota=3 * PAGE)
    first, second = world.process(), world.process(pid=2)
    space = world.space(first)
    world.begin(first, space, "ab")

    _, statuses, _ = world.begin(second, space, "xyz")
    assert statuses == [GRANTED, NO_ROOM, NO_ROOM]


def test_a_commit_with_the_wrong_number_of_digests_changes_nothing():
    world = World()
    engine = world.process()
    space = world.space(engine)
    number, _, _ = world.begin(engine, space, "ab")
    for wrong in (b"", bytes(16), bytes(33), bytes(48), bytes(64)):
        with pytest.raises(InvalidArgument, match="digests"):
            world.table.commit_put(engine, number, wrong)

    assert world.commit(engine, number) == [PageStatus.STORED] * 2


def test_numbers_in_use_are_refused():
    world = World()
    engine = world.process()
    space = world.space(engine)
    put, _, _ = world.begin(engine, space, "a")
    with pytest.raises(InvalidArgument, match="put"):
        world.table.begin_put(engine, put, space, 0, key("b"), key(""))
    world.commit(engine, put)
    lease, _ = world.acquire(engine, space, "a")
    with pytest.raises(InvalidArgument, match="lease"):
        world.table.acquire(engine, lease, space, 0, key("a"), 1)


def test_stored_pages_are_told_as_runs_with_parent_and_tokens():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab")
    world.stored()
    number, _, _ = world.begin(engine, space, "abxy")
    world.commit(engine, number)

    (action,) = world.stored()
    assert (action.keys, action.parent) == (chain("abxy", 2), key("ab"))
    assert action.tokens == "xy".encode("utf-32-le")


def test_a_put_around_an_existing_page_is_told_as_two_runs():
    world = World()
    engine = world.process()
    space = world.space(engine, [WINDOW])
    world.store(engine, space, "ab", start=1)
    world.stored()
    world.store(engine, space, "abc")

    assert [(action.parent, action.keys) for action in world.stored()] == [
        (key(""), chain("a")),
        (key("ab"), chain("abc", 2)),
    ]


# Eviction


def test_a_tail_is_evicted_before_its_head():
    world = World(extents=1)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "abcd")
    world.removed()

    world.store(engine, space, "xy")

    assert world.removed("evicted") == [key("abcd"), key("abc")]


def test_using_a_tail_uses_its_head():
    world = World(extents=1)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab")
    world.store(engine, space, "xy")
    world.lookup(space, "ab")
    world.removed()

    world.store(engine, space, "pq")

    assert world.removed("evicted") == [key("xy"), key("x")]


def test_a_pinned_leaf_stays_and_keeps_all_that_precede_it():
    world = World(extents=1)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "abc")
    number, _ = world.acquire(engine, space, "abc")

    assert world.store(engine, space, "xyz") == [GRANTED, NO_ROOM, NO_ROOM]
    world.table.release(engine, number)
    assert world.store(engine, space, "xyz")[1:] == [GRANTED, GRANTED]
    assert world.lookup(space, "abc") == (1, 0)


def test_an_extent_of_another_tenant_is_taken_when_it_is_colder():
    world = World(extents=2)
    red, blue = world.process("red"), world.process("blue", pid=2)
    cold = world.space(red, tenant="red")
    world.store(red, cold, "abcd")
    warm = world.space(blue, tenant="blue")
    world.store(blue, warm, "wxyz")
    world.removed()

    assert world.store(blue, warm, "efgh") == [GRANTED] * 4
    assert set(world.removed("evicted")) == set(chain("abcd"))
    assert world.lookup(warm, "wxyz") == (4, 0)
    assert len(world.slots.replaced) == 1, "another tenant never sees the old memory"
    check(world.table)


def test_an_extent_of_another_tenant_stays_while_it_is_warmer():
    world = World(extents=2)
    red, blue = world.process("red"), world.process("blue", pid=2)
    mine = world.space(blue, tenant="blue")
    world.store(blue, mine, "wxyz")
    theirs = world.space(red, tenant="red")
    world.store(red, theirs, "abcd")
    world.removed()

    world.store(blue, mine, "ef")

    assert world.removed("evicted") == [key("wxyz"), key("wxy")]
    assert world.lookup(theirs, "abcd") == (4, 0)


def test_an_extent_with_many_pages_is_taken_in_turns_and_who_needs_it_asks_again():
    world = World(extents=1, slots_each=3 * EMPTY_MAX + 2)
    engine = world.process("engine")
    small, large = "s" * (3 * EMPTY_MAX + 2), "l"
    long = world.space(engine)
    world.store(engine, long, small)
    other = world.space(engine, [FULL, STATE])
    world.removed()

    left = [world.lookup(long, small)[0]]
    while world.store(engine, other, large, shard=1) == [NO_ROOM]:
        assert world.table.draining.now is not None
        left.append(world.lookup(long, small)[0])

    assert all(before - after <= EMPTY_MAX for before, after in pairwise(left))
    assert len(left) > 3
    assert world.lookup(long, small) == (0, 0)
    assert world.table.draining.now is None
    check(world.table)


def test_the_pages_below_each_other_in_an_extent_are_looked_at_once():
    world = World(extents=1, slots_each=800)
    engine = world.process("engine")
    space = world.space(engine)
    world.store(engine, space, "s" * 800)
    top = space.nodes[key("s")]
    every = list(space.nodes.values())

    assert subtree(*every) == subtree(top)
    assert sorted(node.depth for node in subtree(*reversed(every))) == list(range(1, 801))


def test_an_extent_with_a_reader_is_not_taken_however_cold():
    world = World(extents=2)
    red, blue = world.process("red"), world.process("blue", pid=2)
    cold = world.space(red, tenant="red")
    world.store(red, cold, "abcd")
    world.acquire(red, cold, "a")
    mine = world.space(blue, tenant="blue")
    world.store(blue, mine, "wxyz")
    world.removed()

    world.store(blue, mine, "e")

    assert world.removed("evicted") == [key("wxyz")]


def test_pages_of_a_class_are_evicted_though_another_shard_of_the_page_came_first():
    world = World(extents=2)
    engine = world.process()
    space = world.space(engine, [FULL, WINDOW])
    world.store(engine, space, "a", shard=0)
    world.store(engine, space, "x", shard=0)
    world.store(engine, space, "a", shard=1)
    world.store(engine, space, "x", shard=1)  # the window's only extent is full now
    world.acquire(engine, space, "x", shard=0)  # and that of the other class cannot be taken

    assert world.store(engine, space, "p", shard=1) == [GRANTED]
    assert world.lookup(space, "a", [0]) == (0, 0)
    check(world.table)


# Deadlines


def test_a_lease_that_ran_out_lets_the_page_go_but_not_its_slot():
    world = World(extents=1)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "abcd")
    number, lease = world.acquire(engine, space, "abcd", until_ns=50)
    slots = lease.slots
    assert world.table.next_deadline_ns() == 50

    world.table.expire(50)
    world.table.expire(60)
    assert world.lookup(space, "abcd") == (4, 0), "nobody needs the room yet"
    assert world.store(engine, space, "x") == [NO_ROOM]
    assert world.lookup(space, "abcd") == (0, 0)
    assert {world.slots.state(slot) for slot in slots} == {SlotState.LIMBO}

    world.table.release(engine, number)
    assert world.store(engine, space, "x") == [GRANTED]
    check(world.table)


def test_an_expired_lease_ends_with_its_process():
    world = World(extents=1)
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab")
    world.acquire(engine, space, "ab", until_ns=50)
    world.table.expire(50)

    world.end(engine)

    assert engine.session.used_bytes == 0
    assert not world.slots.in_use(space.nodes[key("ab")].slots[0])


# Ends


def test_a_writer_whose_connection_broke_keeps_its_slots_from_everyone():
    world = World(extents=1)
    lost, other = world.process("p"), world.process("q", pid=2)
    space = world.space(lost)
    _, _, put = world.begin(lost, space, "abcd")
    world.table.lose(lost)

    assert world.lookup(space, "abcd") == (0, 0)
    assert {world.slots.state(slot) for slot in put.slots} == {SlotState.LIMBO}
    assert world.store(other, world.space(other), "a") == [NO_ROOM]

    world.end(lost)
    assert world.store(other, space, "abcd") == [GRANTED] * 4


def test_an_aborted_put_takes_along_what_others_wrote_below_it():
    world = World()
    first, second, third = (world.process(name, pid) for pid, name in enumerate("pqr"))
    space = world.space(first)
    for process in (second, third):
        world.space(process)
    number, _, _ = world.begin(first, space, "a")
    world.store(second, space, "ab", start=1)
    late, _, _ = world.begin(third, space, "abc", start=2)
    world.removed()

    world.table.abort_put(first, number)

    assert world.removed("head_lost") == [key("ab")]
    assert world.commit(third, late) == [DROPPED]
    assert world.slots.stats().free_bytes == world.slots.stats().capacity_bytes
    assert not space.nodes
    check(world.table)


def test_dropping_a_head_drops_its_tail_but_not_the_windows_of_it():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, WINDOW])
    world.store(engine, space, "abc", shard=0)
    world.store(engine, space, "abc", start=1, shard=1)
    world.removed()

    world.table.residents.drop(space.nodes[key("a")], 0, "corrupt")

    assert world.removed("corrupt") == [key("abc"), key("ab"), key("a")]
    assert world.lookup(space, "abc", [1]) == (3, 0)
    check(world.table)


def test_a_lease_that_was_given_back_is_not_kept_until_its_deadline():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab")
    number, lease = world.acquire(engine, space, "ab")

    world.table.release(engine, number)

    assert not lease.slots, "a deadline far away must not hold them in memory"
