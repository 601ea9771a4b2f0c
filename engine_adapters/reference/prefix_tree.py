"""Reference counts of blocks, and the tree of pages whose K/V this engine still has.

Pure: no torch, no clock. A block is free if and only if its reference count is 0. Requests, the
prefix tree and store jobs each hold references, so ending a request never frees memory that a job
is still copying.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvstore.protocol.page import PrefixKey, PrefixKeys


class BlockAllocator:
    """Allocates the blocks ``0..count-1`` of a pool.

    Attributes:
        generations: shape (count,), uint64: how often each block was allocated. It changes before
            the new owner can write, so that who still reads for the old one finds it.
    """

    def __init__(self, count: int) -> None:
        self.generations = np.zeros(count, dtype=np.uint64)
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))  # the blocks without references

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def references(self, block: int) -> int:
        """Reference count of ``block``."""
        return self._references[block]

    def allocate(self, count: int) -> list[int] | None:
        """Allocate ``count`` blocks with one reference each; None if there are too few."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self.generations[blocks] += np.uint64(1)
        self.retain(blocks)
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each block; the last one frees it."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released too often"
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def check(self) -> None:
        """Assert that free and used blocks are all blocks, each exactly once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert not free & used, f"free and in use: {free & used}"
        assert len(free) + len(used) == self.count, "a block is neither free nor in use"


@dataclass(slots=True, eq=False)
class _Node:
    key: PrefixKey
    parent: PrefixKey | None
    blocks: tuple[int, ...]
    children: int = 0
    used: int = 0


@dataclass(frozen=True, slots=True)
class TreeChange:
    """Pages that were added to the tree (``stored``) or removed.

    Attributes:
        keys: the pages; added pages are a run of one chain.
    """

    stored: bool
    keys: PrefixKeys


class PrefixTree:
    """The full pages in the pool, by prefix key; holds one reference to each of their blocks.

    A page is in the tree only with all pages before it. Eviction removes the least recently used
    page that has no successor and no other references.
    """

    def __init__(self, allocator: BlockAllocator, page_blocks: int) -> None:
        self._allocator = allocator
        self._page_blocks = page_blocks
        self._nodes: dict[PrefixKey, _Node] = {}
        self._uses = 0
        self._changes: list[TreeChange] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, keys: PrefixKeys) -> list[int]:
        """Blocks of the longest prefix in the tree, with a reference for the caller."""
        blocks: list[int] = []
        self._uses += 1
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                break
            node.used = self._uses
            blocks += node.blocks
        self._allocator.retain(blocks)
        return blocks

    def insert(self, keys: PrefixKeys, blocks: Sequence[int]) -> None:
        """Add completely computed pages.

        Args:
            keys: keys from the start of the chain; pages already in the tree keep their blocks.
            blocks: blocks of all pages, in order; the caller has a reference to each.
        """
        assert len(blocks) == len(keys) * self._page_blocks, "blocks are not these pages"
        self._uses += 1
        parent: _Node | None = None
        first_new = len(keys)
        for index, key in enumerate(keys):
            node = self._nodes.get(key)
            if node is None:
                first_new = min(first_new, index)
                own = tuple(blocks[index * self._page_blocks : (index + 1) * self._page_blocks])
                node = _Node(key, parent.key if parent else None, own)
                self._nodes[key] = node
                self._allocator.retain(own)
                if parent is not None:
                    parent.children += 1
            node.used = self._uses
            parent = node
        if first_new < len(keys):
            self._changes.append(TreeChange(stored=True, keys=keys[first_new:]))

    def evict(self) -> bool:
        """Remove the least recently used evictable page; returns False if there is none."""
        candidates = [node for node in self._nodes.values() if self._is_evictable(node)]
        if not candidates:
            return False
        node = min(candidates, key=lambda candidate: candidate.used)
        del self._nodes[node.key]
        if node.parent is not None:
            self._nodes[node.parent].children -= 1
        self._allocator.release(node.blocks)
        self._changes.append(TreeChange(stored=False, keys=PrefixKeys(bytes(node.key))))
        return True

    @property
    def evictable(self) -> int:
        """Blocks that evictions would free: pages that nobody else refers to."""
        return sum(
            len(node.blocks)
            for node in self._nodes.values()
            if all(self._allocator.references(block) == 1 for block in node.blocks)
        )

    def take_changes(self) -> list[TreeChange]:
        """The changes since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def _is_evictable(self, node: _Node) -> bool:
        return not node.children and all(
            self._allocator.references(block) == 1 for block in node.blocks
        )

    def check(self) -> None:
        """Assert the cross-field invariants."""
        children = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            assert len(node.blocks) == self._page_blocks, "a page has the wrong number of blocks"
            assert all(self._allocator.references(block) for block in node.blocks)
            if node.parent is not None:
                assert node.parent in self._nodes, "a page without its predecessor"
                children[node.parent] += 1
        for key, node in self._nodes.items():
            assert node.children == children[key], "a page miscounts its successors"
        held = [block for node in self._nodes.values() for block in node.blocks]
        assert len(held) == len(set(held)), "two pages share a block"
