"""Goal: a conversation is kept on disk, as far as the disk takes it."""

import pytest

from kvstore.state.tree.node import Retention
from tests.state.disk.test_disk_limits import RECORD, LimitedWorld
from tests.state.world import key


@pytest.fixture
def world() -> LimitedWorld:
    return LimitedWorld()


def test_a_conversation_is_kept_on_disk_until_it_ends(world):
    world.table.keeping.conversations.disk_budget_bytes = 10 * RECORD
    world.put("a")
    world.put("ab")
    keys = [key("a"), key("ab")]

    assert world.table.keeping.keep(world.mine, "chat", keys, 1 << 50, 0) == (2, "")
    assert world.table.keeping.conversations.disk_used_bytes == 2 * RECORD
    world.flood(200)
    assert world.there("a", "ab") == [True, True]

    world.table.keeping.end(world.mine, "chat")
    world.table.moment.now_ns = max(1, world.table.now_ns)
    world.table.expire(world.table.now_ns)
    assert [one.disk_pins for one in world.mine.nodes.values()] == [0, 0]
    assert world.table.keeping.conversations.disk_used_bytes == 0


def test_what_the_disk_does_not_take_is_not_kept(world):
    world.table.keeping.conversations.disk_budget_bytes = 10 * RECORD
    world.put("a")
    world.store(world.me, world.mine, "at", start=1, keep=Retention(expires_ns=1 << 50))
    keys = [key("a"), key("at")]

    assert world.table.keeping.keep(world.mine, "chat", keys, 1 << 50, 0) == (1, "disk")

    assert world.table.keeping.conversations.disk_used_bytes == RECORD
    assert [one.disk_pins for one in world.mine.nodes.values()] == [1, 0]
