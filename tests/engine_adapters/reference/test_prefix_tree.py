"""Goal: a block is never handed out while somebody needs it, and a match never lies."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_adapters.reference.prefix_tree import BlockAllocator, PrefixTree
from kvstore.protocol.page import PrefixKeys, page_keys

BLOCKS = 12
PAGE_BLOCKS = 2
# Chains over a two-letter alphabet: they share prefixes often.
chains = st.lists(st.integers(0, 1), min_size=1, max_size=4)


def keys_of(chain: list[int]) -> PrefixKeys:
    return page_keys(chain, 1)


class PrefixTreeMachine(RuleBasedStateMachine):
    """Requests and jobs come and go; ``content`` is what each block really holds."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.tree = PrefixTree(self.allocator, PAGE_BLOCKS)
        self.held: list[list[int]] = []
        self.content: dict[int, tuple[bytes, int]] = {}
        self.announced: set[bytes] = set()

    def allocate(self, count: int) -> list[int] | None:
        while self.allocator.free < count and self.tree.evict():
            pass
        before = self.allocator.generations.copy()
        blocks = self.allocator.allocate(count)
        for block in blocks or ():
            assert not any(block in held for held in self.held), "handed out twice"
        changed = (self.allocator.generations != before).nonzero()[0].tolist()
        assert changed == sorted(blocks or ()), "who still reads a block finds its new owner"
        return blocks

    @rule(chain=chains)
    def compute(self, chain: list[int]) -> None:
        keys = keys_of(chain)
        shared = self.tree.match(keys)
        assert [self.content[block] for block in shared] == [
            (bytes(key), part) for key in keys for part in range(PAGE_BLOCKS)
        ][: len(shared)], "a match gave blocks that hold something else"
        fresh = self.allocate(len(keys) * PAGE_BLOCKS - len(shared))
        if fresh is None:
            self.allocator.release(shared)
            return
        blocks = shared + fresh
        for index, block in enumerate(blocks):
            self.content[block] = (bytes(keys[index // PAGE_BLOCKS]), index % PAGE_BLOCKS)
        self.held.append(blocks)
        self.tree.insert(keys, blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.allocator.release(self.held.pop(index))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def start_job(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.allocator.retain(blocks)
        self.held.append(list(blocks))

    @rule()
    def evict(self) -> None:
        self.tree.evict()

    @rule()
    def read_changes(self) -> None:
        for change in self.tree.take_changes():
            keys = {bytes(key) for key in change.keys}
            if change.stored:
                assert not keys & self.announced, "announced twice"
                self.announced |= keys
            else:
                assert keys <= self.announced, "removed what was never there"
                self.announced -= keys

    @invariant()
    def consistent(self) -> None:
        self.allocator.check()
        self.tree.check()

    def teardown(self) -> None:
        for blocks in self.held:
            self.allocator.release(blocks)
        while self.tree.evict():
            pass
        assert len(self.tree) == 0, "a page cannot be evicted though nobody needs it"
        assert self.allocator.free == BLOCKS
        self.read_changes()
        assert not self.announced


TestPrefixTree = PrefixTreeMachine.TestCase


def test_the_least_recently_used_leaf_goes_first() -> None:
    allocator = BlockAllocator(8)
    tree = PrefixTree(allocator, 1)
    for chain in ([0, 0], [1], [2]):
        blocks = allocator.allocate(len(chain))
        assert blocks is not None
        tree.insert(keys_of(chain), blocks)
        allocator.release(blocks)
    allocator.release(tree.match(keys_of([1])))  # used again: [0, 0] is the oldest now
    gone = []
    tree.take_changes()
    while tree.evict():
        gone += [bytes(change.keys[0]) for change in tree.take_changes()]
    first, second = keys_of([0, 0])
    assert gone == [bytes(k) for k in (second, first, keys_of([2])[0], keys_of([1])[0])]


def test_releasing_a_free_block_is_a_programmers_error() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    assert blocks is not None
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="released too often"):
        allocator.release(blocks)


def test_too_few_blocks_change_nothing() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate(5) is None
    assert allocator.free == 4


def test_a_page_that_somebody_needs_is_not_evicted() -> None:
    allocator = BlockAllocator(4)
    tree = PrefixTree(allocator, 1)
    blocks = allocator.allocate(1)
    assert blocks is not None
    tree.insert(keys_of([0]), blocks)
    assert not tree.evict(), "it would free nothing and forget a page in use"
    allocator.release(blocks)
    assert tree.evict()
