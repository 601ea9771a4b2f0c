"""Goal: a node that is full takes puts of every class, whoever has slots that are reserved ahead.

The clients that have them never put again and never give one back, as if they were stopped.
"""

from kvstore.state.choice.eviction import GRACE_NS
from kvstore.state.table import ahead
from kvstore.state.table.ahead import AHEAD_SHARE, EXTENTS_SHARE
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from kvstore.state.tree.slots import SlotState
from tests.state.world import World, chain

EXTENTS = 8
SLOTS_EACH = 32
SLOTS = EXTENTS * SLOTS_EACH


class FullNode:
    """A node full of single pages, of which the coldest lie in one extent after the other."""

    def __init__(self) -> None:
        self.world = World(EXTENTS, SLOTS_EACH)
        self.world.table.eviction.change_policy("lru")
        self.engine = self.world.process()
        self.space = self.world.space(self.engine)
        paths = [chr(0x4E00 + at) for at in range(SLOTS)]
        for path in paths:
            assert self.world.store(self.engine, self.space, path) == [PageStatus.GRANTED]
        for at, path in enumerate(paths):
            if at % SLOTS_EACH:
                number, _ = self.world.acquire(self.engine, self.space, path)
                self.world.table.release(self.engine, number)
        self.world.table.moment.now_ns = 2 * GRACE_NS
        self.clients = [self._client(at) for at in range(SLOTS)]

    def _client(self, at: int) -> Process:
        process = self.world.process(f"client {at}")
        self.world.space(process)
        return process

    def reserve(self) -> int:
        """Each client asks for a slot; how many got one."""
        table = self.world.table
        for at, client in enumerate(self.clients):
            table.moment.now_ns += 1
            table.ahead.reserve(client, 1 << 30 | at, self.space, 0)
        check(table)
        return table.ahead.slots

    def extents(self) -> set[int]:
        """Extents in which a slot is reserved."""
        puts = [put for client in self.clients for put in client.puts.values()]
        return {self.world.slots.position(put.slots[0]) for put in puts}

    def granted(self, engine: Process, space: PrefixTree, pages: int) -> int:
        """Put so many pages, one after the other; how many were taken."""
        granted = 0
        for at in range(pages):
            self.world.table.moment.now_ns += 1
            said = self.world.store(engine, space, chr(0x9000 + at))
            granted += said == [PageStatus.GRANTED]
        check(self.world.table)
        return granted


def test_a_full_node_takes_puts_of_all_its_memory_beside_slots_that_are_never_used() -> None:
    node = FullNode()

    reserved = node.reserve()

    assert 0 < reserved <= SLOTS // AHEAD_SHARE
    pages = SLOTS - reserved
    assert node.granted(node.engine, node.space, pages) == pages
    assert sum(path in node.space.nodes for at in range(pages) for path in chain(chr(0x9000 + at)))\
        == pages  # fmt: skip


def test_slots_that_are_never_used_leave_most_extents_to_another_class() -> None:
    node = FullNode()
    node.reserve()
    other = node.world.process("blue")
    space = node.world.space(other, tenant="blue")

    node.granted(other, space, SLOTS)

    assert 0 < len(node.extents()) <= EXTENTS // EXTENTS_SHARE
    blue = [one for one in node.world.slots.extents if one.domain == "blue"]
    assert len(blue) >= EXTENTS - EXTENTS // EXTENTS_SHARE


def test_a_slot_that_is_given_back_lets_another_extent_have_one(monkeypatch) -> None:
    monkeypatch.setattr(ahead, "EXTENTS_SHARE", EXTENTS)
    node = FullNode()
    first, second = node.clients[:2]
    table = node.world.table
    put = table.ahead.reserve(first, 1, node.space, 0)
    assert put is not None
    assert table.ahead.reserve(second, 2, node.space, 0) is None, "it would lie in another extent"
    free = sum(one.states.count(SlotState.FREE) for one in node.world.slots.extents)
    assert free == 1, "what could not be reserved is anybody's"

    table.abort_put(first, 1)

    assert node.granted(node.engine, node.space, 2) == 2, "what is free is used first"
    there = table.ahead.reserve(second, 2, node.space, 0)
    assert there is not None
    assert node.world.slots.position(there.slots[0]) != node.world.slots.position(put.slots[0])
    check(table)
