"""Goal: how long a page stays is a matter of that page: of its key and its shard."""

from kvstore.state.tree.node import Retention
from tests.state.world import FULL, FULL_2, PAGE, World, chain, key


def test_a_page_with_a_deadline_leaves_by_itself_and_takes_its_tail_along():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "a", keep=Retention(expires_ns=100))
    world.store(engine, space, "ab", start=1)
    assert world.table.next_deadline_ns() == 100

    world.table.expire(99)
    assert world.lookup(space, "ab") == (2, 0)
    world.removed()
    world.table.expire(100)

    assert world.removed("expired") == [key("ab"), key("a")]
    assert world.slots.stats().ready_bytes == 0


def test_each_shard_of_a_key_keeps_its_own_deadline():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    world.store(engine, space, "ab", shard=0, keep=Retention(expires_ns=100))
    world.store(engine, space, "ab", shard=1)

    world.table.expire(100)

    assert world.lookup(space, "ab", [0]) == (0, 0)
    assert world.lookup(space, "ab", [1]) == (2, 0)
    assert world.table.next_deadline_ns() == 0


def test_a_deadline_of_a_page_that_was_stored_anew_is_not_the_old_one():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    world.store(engine, space, "a", shard=1)  # keeps the node
    world.store(engine, space, "a", shard=0, keep=Retention(expires_ns=100))
    world.table.residents.drop(space.nodes[key("a")], 0, "operator")
    world.store(engine, space, "a", shard=0)

    world.table.expire(100)

    assert world.lookup(space, "a", [0, 1]) == (1, 0)


def test_another_ranks_commit_does_not_take_back_that_a_page_is_read_once():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    world.store(engine, space, "ab", shard=0, keep=Retention(read_once=True))
    world.store(engine, space, "ab", shard=1)
    lease, _ = world.acquire(engine, space, "ab", shard=0)
    other, _ = world.acquire(engine, space, "ab", shard=1)

    world.table.release(engine, other)
    world.table.release(engine, lease)

    assert world.lookup(space, "ab", [0]) == (0, 0)
    assert world.lookup(space, "ab", [1]) == (2, 0)


def test_a_page_stored_to_be_read_once_leaves_with_its_first_reader():
    world = World()
    engine = world.process()
    space = world.space(engine)
    world.store(engine, space, "ab", keep=Retention(read_once=True))
    first, _ = world.acquire(engine, space, "ab")
    second, _ = world.acquire(engine, space, "ab")
    world.removed()

    world.table.release(engine, first)

    assert set(world.removed("read_once")) == set(chain("ab"))
    assert world.lookup(space, "ab") == (0, 0)
    assert world.slots.stats().limbo_bytes == 2 * PAGE, "the second reader still reads"
    world.table.release(engine, second)
    assert world.slots.stats().limbo_bytes == 0


def test_a_late_reader_does_not_drop_the_page_that_was_stored_anew():
    world = World()
    engine = world.process()
    space = world.space(engine, [FULL, FULL_2])
    world.store(engine, space, "a", shard=1)  # keeps the node
    world.store(engine, space, "a", shard=0, keep=Retention(read_once=True))
    first, _ = world.acquire(engine, space, "a")
    second, _ = world.acquire(engine, space, "a")
    world.table.release(engine, first)
    world.store(engine, space, "a", shard=0, keep=Retention(read_once=True))

    world.table.release(engine, second)

    assert world.lookup(space, "a") == (1, 0)
