"""Maps block hashes of engines to prefix keys, using the token ids in their events. Pure.

An engine names a block by its own hash, with any block size. The token ids and the parent of a
block are sufficient to extend our chain. A page is complete in the block with its last token, and
is stored as long as all blocks with its tokens are stored. For blocks of 16 tokens and pages of
64::

    blocks   b0 ─ b1 ─ b2 ─ b3 ─ b4 ─ b5 …
    pages    └───── page 0 ─────┘└─ …        page 0 ends in b3 and needs b0, b1, b2, b3

Blocks that cannot be mapped (unknown parent, no token ids, table full) are counted and skipped: the
index may lose, it never lies.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

BlockHash = bytes | int

_TOKEN_BYTES: Final = 4
_POINTER_BYTES: Final = 8
TAIL_BYTES_MAX: Final = 256 << 20
"""Maximum bytes of tokens of incomplete pages, for all blocks together."""
PARTS_PER_BLOCK: Final = 4
"""Maximum average number of pages of which a block has a part."""
_WORK: Final = 2_048
"""Approximate number of blocks per step: a few milliseconds."""


@dataclass(slots=True)
class _Block:
    """A block in at least one medium.

    Attributes:
        media: its media.
        chain: prefix key of the last complete page at its end; empty if none.
        tail: tokens after that page, little-endian uint32, less than a page.
        tail_blocks: the blocks with the tail, this one last.
        ends: pages that end in this block.
        before: blocks with the start of the first page that ends here.
        part_of: pages with tokens in this block that end in a later block.
    """

    media: set[str]
    chain: bytes
    tail: bytes
    tail_blocks: tuple[BlockHash, ...]
    ends: tuple[bytes, ...]
    before: tuple[BlockHash, ...]
    part_of: set[bytes] = field(default_factory=set)


class ForeignBlocks:
    """The blocks of one engine with its own hashes."""

    def __init__(self, page_tokens: int, blocks_max: int) -> None:
        """Start empty.

        Args:
            page_tokens: tokens per page of our index.
            blocks_max: maximum blocks remembered; further ones are not mapped.
        """
        self._page_bytes = page_tokens * _TOKEN_BYTES
        self._blocks_max = blocks_max
        self._blocks: dict[BlockHash, _Block] = {}
        self._pages: dict[bytes, tuple[BlockHash, ...]] = {}  # key → blocks with its tokens
        self._tail_bytes = 0
        self._parts = 0
        self.unmapped = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def stored(
        self,
        medium: str,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        tokens: Sequence[int],
        block_tokens: int,
    ) -> Iterator[list[bytes]]:
        """Blocks were stored.

        Args:
            medium: their medium.
            hashes: hashes in chain order.
            parent: the block before the first; None at the start of a chain.
            tokens: tokens of these blocks; empty if the engine does not repeat them.
            block_tokens: tokens per block.

        Yields:
            Keys of the pages that are now in ``medium`` because of it, in pieces.
        """
        ids = _packed(tokens, len(hashes) * block_tokens)
        size = block_tokens * _TOKEN_BYTES
        keys: list[bytes] = []
        work = 0
        for number, name in enumerate(hashes):
            block = self._blocks.get(name)
            if block is None and ids is not None:
                before = hashes[number - 1] if number else parent
                block = self._add(name, before, ids[number * size : (number + 1) * size])
            if block is None:
                self.unmapped += len(hashes) - number  # later blocks depend on this one
                break
            block.media.add(medium)
            work += 1 + len(block.tail_blocks)
            for key in (*block.ends, *block.part_of):
                holders = self._pages.get(key, ())
                work += 1 + len(holders)
                if self._are_there(holders, medium):
                    keys.append(key)
                if work >= _WORK:
                    yield keys
                    keys, work = [], 0
        yield keys

    def _add(self, name: BlockHash, before: BlockHash | None, ids: bytes) -> _Block | None:
        """Extend the chain; None if the block before is unknown or the table is full."""
        parent = self._blocks.get(before) if before is not None else None
        if (before is not None and parent is None) or not self._has_room:
            return None
        chain = parent.chain if parent else b""
        data = (parent.tail if parent else b"") + ids
        started = parent.tail_blocks if parent else ()
        holders = (*started, name)
        ends: list[bytes] = []
        at = 0
        while len(data) - at >= self._page_bytes:
            chain = hashlib.sha256(chain + data[at : at + self._page_bytes]).digest()
            at += self._page_bytes
            ends.append(chain)
            self._pages[chain] = holders
            for holder in holders[:-1]:
                if holder in self._blocks:
                    self._join(self._blocks[holder], chain)
            holders = (name,)
        data = data[at:]
        block = _Block(
            set(), chain, data, holders if data else (), tuple(ends), started if ends else ()
        )
        self._blocks[name] = block
        self._tail_bytes += _tail_bytes(block)
        return block

    @property
    def _has_room(self) -> bool:
        return (
            len(self._blocks) < self._blocks_max
            and self._tail_bytes < TAIL_BYTES_MAX
            and self._parts < PARTS_PER_BLOCK * self._blocks_max
        )

    def _join(self, block: _Block, key: bytes) -> None:
        self._parts += key not in block.part_of
        block.part_of.add(key)

    def _are_there(self, holders: Iterable[BlockHash], medium: str) -> bool:
        """Whether all blocks of a page are in the medium; False if no block ends it any more."""
        there = False
        for holder in holders:
            block = self._blocks.get(holder)
            if block is None or medium not in block.media:
                return False
            there = True
        return there

    def removed(self, medium: str, hashes: Sequence[BlockHash]) -> Iterator[list[bytes]]:
        """Blocks were removed from a medium.

        Yields:
            Keys of the pages that are not in the medium any more, in pieces.
        """
        keys: list[bytes] = []
        for name in hashes:
            block = self._blocks.get(name)
            if block is None or medium not in block.media:
                continue
            keys += [*block.ends, *block.part_of]
            block.media.remove(medium)
            if not block.media:
                self._forget(name, block)
            while len(keys) >= _WORK:
                yield keys[:_WORK]
                keys = keys[_WORK:]
        yield keys

    def _forget(self, name: BlockHash, block: _Block) -> None:
        del self._blocks[name]
        self._tail_bytes -= _tail_bytes(block)
        self._parts -= len(block.part_of)
        for key in block.ends:
            self._pages.pop(key, None)
        for holder in block.before:
            other = self._blocks.get(holder)
            if other is not None and block.ends[0] in other.part_of:
                other.part_of.remove(block.ends[0])
                self._parts -= 1

    def clear(self) -> None:
        """Forget every block."""
        self._blocks.clear()
        self._pages.clear()
        self._tail_bytes = self._parts = 0

    def check(self) -> None:
        """Assert the invariants."""
        assert len(self._blocks) <= self._blocks_max
        for block in self._blocks.values():
            assert block.media
            assert len(block.tail) < self._page_bytes
            assert bool(block.tail) == bool(block.tail_blocks)
        blocks = self._blocks.values()
        ends = {key for block in blocks for key in block.ends}
        assert set(self._pages) <= ends
        assert self._parts == sum(len(block.part_of) for block in blocks)
        assert self._tail_bytes == sum(_tail_bytes(block) for block in blocks)


def _tail_bytes(block: _Block) -> int:
    return len(block.tail) + _POINTER_BYTES * len(block.tail_blocks)


def _packed(tokens: Sequence[int], count: int) -> bytes | None:
    """Tokens as little-endian uint32; None if these are not ``count`` token ids."""
    if not count or len(tokens) != count:
        return None
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    return ids.tobytes()
