"""Engines' own block hashes → our prefix keys, through the token ids in their events. Pure.

An engine names a block by a hash of its own, of any block size. Its token ids and its parent are
enough to go on with our chain: a page is complete in the block that holds its last token, and is
there as long as every block is there that holds one of its tokens. For blocks of 16 tokens and
pages of 64::

    blocks   b0 ─ b1 ─ b2 ─ b3 ─ b4 ─ b5 …
    pages    └───── page 0 ─────┘└─ …        page 0 ends in b3 and needs b0, b1, b2, b3

What cannot be mapped (unknown parent, no token ids, no room) is counted and left out: the index may
lose, it never lies.
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
"""What all blocks together may remember of pages that are not complete."""
PARTS_PER_BLOCK: Final = 4
"""Pages that a block may hold a part of, on average over all that can be remembered."""
_WORK: Final = 2_048
"""Blocks looked at, or so, after which others may run: a few milliseconds."""


@dataclass(slots=True)
class _Block:
    """One block that is in at least one medium.

    Attributes:
        media: where it is.
        chain: prefix key of the last page that is complete at its end; empty when there is none.
        tail: tokens after that page, little-endian uint32, less than a page of them.
        tail_blocks: the blocks that hold the tail, this one last.
        ends: pages that are complete in this block.
        before: blocks that hold the start of the first page that ends here.
        part_of: pages that it holds tokens of, and that end in a later block.
    """

    media: set[str]
    chain: bytes
    tail: bytes
    tail_blocks: tuple[BlockHash, ...]
    ends: tuple[bytes, ...]
    before: tuple[BlockHash, ...]
    part_of: set[bytes] = field(default_factory=set)


class ForeignBlocks:
    """The blocks of one engine that hashes in its own way."""

    def __init__(self, page_tokens: int, blocks_max: int) -> None:
        """Start empty.

        Args:
            page_tokens: tokens in a page of ours.
            blocks_max: blocks that are remembered; further ones are not mapped.
        """
        self._page_bytes = page_tokens * _TOKEN_BYTES
        self._blocks_max = blocks_max
        self._blocks: dict[BlockHash, _Block] = {}
        self._pages: dict[bytes, tuple[BlockHash, ...]] = {}  # key → blocks that hold its tokens
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
        """Blocks appeared.

        Args:
            medium: where.
            hashes: in chain order.
            parent: block before the first; None when it starts the chain.
            tokens: of exactly these blocks; empty when the engine does not tell again.
            block_tokens: tokens in a block.

        Yields:
            keys of the pages that are in ``medium`` now because of it, in pieces.
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
                self.unmapped += len(hashes) - number  # what follows hangs on this one
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
        """Go on with the chain; None when what is before is not known, or there is no room."""
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
        """Whether a page is whole; one that no block ends any more is not."""
        there = False
        for holder in holders:
            block = self._blocks.get(holder)
            if block is None or medium not in block.media:
                return False
            there = True
        return there

    def removed(self, medium: str, hashes: Sequence[BlockHash]) -> Iterator[list[bytes]]:
        """Blocks left a medium.

        Yields:
            keys of the pages that are no longer there because of it, or were not anyway, in pieces.
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
    """Little-endian uint32; None when these are not ``count`` token ids."""
    if not count or len(tokens) != count:
        return None
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    return ids.tobytes()
