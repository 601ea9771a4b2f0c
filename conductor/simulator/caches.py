"""The KV that each simulated engine and node holds, and the prefixes that follow. Pure.

Blocks are named by the trace: who has one has named its whole prefix, but may have lost blocks
before it. Of each block one integer says who holds it, a bit for each engine, so that one walk over
a prompt finds the prefix at all of them.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from conductor.routing.columns import Prefix
from conductor.simulator.trace import BLOCK_TOKENS

_KINDS: Final = 5
"""Of prefixes: in an engine's cache, there or expected soon, in its node's memory, at its node, and
in any of these."""
_NODE, _USABLE = 3, 4
Bits = dict[int, int]
"""Block → bits of the engines that can use it."""


class BlockCache:
    """The blocks of one place, the one unused longest ago leaves first.

    Of a prompt, its last blocks leave before its first ones.

    Args:
        capacity: maximum blocks.
        held: shared with other places of its kind.
        bits: the engines that can use its blocks.
    """

    def __init__(self, capacity: int, held: Bits, bits: int) -> None:
        self._capacity = capacity
        self._held = held
        self._bits = bits
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def put(self, blocks: Sequence[int]) -> list[int]:
        """Add blocks of a prompt, or use them again; returns those that had to leave."""
        known, held = self._blocks, self._held
        for block in reversed(blocks):
            if block in known:
                known.move_to_end(block)
            else:
                known[block] = None
                held[block] = held.get(block, 0) | self._bits
        return self.shrink(self._capacity)

    def drop(self, block: int) -> None:
        """Forget one block that is there."""
        del self._blocks[block]
        self._lose(block)

    def shrink(self, capacity: int) -> list[int]:
        """Change the capacity; returns the blocks that had to leave."""
        assert capacity >= 0
        self._capacity = capacity
        left: list[int] = []
        while len(self._blocks) > capacity:
            block, _ = self._blocks.popitem(last=False)
            self._lose(block)
            left.append(block)
        return left

    def clear(self) -> None:
        """Lose everything."""
        for block in self._blocks:
            self._lose(block)
        self._blocks.clear()

    def _lose(self, block: int) -> None:
        bits = self._held[block] & ~self._bits
        if bits:
            self._held[block] = bits
        else:
            del self._held[block]


class Expectations:
    """Blocks that engines will have soon, because prompts with them were sent there."""

    def __init__(self) -> None:
        self.held: Bits = {}
        self._counts: dict[int, Counter[int]] = {}

    def add(self, blocks: Iterable[int], bit: int) -> None:
        """A prompt was sent to the engine with this bit."""
        counts = self._counts.setdefault(bit, Counter())
        for block in blocks:
            counts[block] += 1
            self.held[block] = self.held.get(block, 0) | bit

    def remove(self, blocks: Iterable[int], bit: int) -> None:
        """The prompt is there, or will never be."""
        counts = self._counts[bit]
        for block in blocks:
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                self.held[block] &= ~bit
                if not self.held[block]:
                    del self.held[block]

    def check(self, sent: Iterable[tuple[Sequence[int], int]]) -> None:
        """Assert that it has the blocks of these prompts, each with an engine's bit, only."""
        held: Bits = {}
        for blocks, bit in sent:
            for block in blocks:
                held[block] = held.get(block, 0) | bit
        assert held == self.held


class Tiers:
    """A node's host memory and disk: what leaves memory goes to disk."""

    def __init__(self, host: BlockCache, disk: BlockCache) -> None:
        self.host = host
        self.disk = disk

    def put(self, blocks: Sequence[int]) -> None:
        """Store blocks of a prompt in memory, or use them again."""
        for block in blocks:
            if block in self.disk:
                self.disk.drop(block)
        # Reversed, as those that leave are in order of their last use.
        self.disk.put(self.host.put(blocks)[::-1])

    def __contains__(self, block: int) -> bool:
        return block in self.host or block in self.disk


class Holders(NamedTuple):
    """Who holds what.

    Attributes:
        local: blocks in the engines' own caches.
        host: blocks in the memory of nodes, for all engines of a node.
        disk: blocks on disks of nodes, for all engines of a node.
        expected: blocks that engines will have soon.
    """

    local: Bits
    host: Bits
    disk: Bits
    expected: Bits

    def prefixes(
        self, blocks: Sequence[int], tokens: int, engines: Mapping[int, str]
    ) -> dict[str, Prefix]:
        """The prefix of a prompt at each engine, as the Conductor's index would tell it.

        Args:
            blocks: ids of its full blocks.
            tokens: of the whole prompt.
            engines: their names, by bit; each has a node of its own.
        """
        reached = [sum(engines)] * _KINDS
        lengths = {name: [0] * _KINDS for name in engines.values()}
        length = 0
        for length, block in enumerate(blocks):
            local, in_memory = self.local.get(block, 0), self.host.get(block, 0)
            own = local | self.expected.get(block, 0)
            node = in_memory | self.disk.get(block, 0)
            for kind, there in enumerate((local, own, in_memory, node, own | node)):
                before = reached[kind]
                now = reached[kind] = before & there
                if now != before:
                    for bit in _bits(before & ~now):
                        lengths[engines[bit]][kind] = length
            if not (reached[_NODE] or reached[_USABLE]):
                break
        else:
            length = len(blocks)
        for kind, rest in enumerate(reached):
            for bit in _bits(rest):
                lengths[engines[bit]][kind] = length
        stored = sorted(((one[_NODE], name) for name, one in lengths.items()), reverse=True)
        found: dict[str, Prefix] = {}
        for name, (local, own, in_memory, node, usable) in lengths.items():
            longest = stored[0] if stored[0][1] != name else stored[-1 if len(stored) < 2 else 1]
            peer = max(0, longest[0] - usable)
            in_memory = max(in_memory, own)
            found[name] = Prefix(
                min(local * BLOCK_TOKENS, tokens), min(node * BLOCK_TOKENS, tokens),
                min(usable * BLOCK_TOKENS, tokens), 0, peer * BLOCK_TOKENS,
                max(0, min(in_memory, usable) - own) * BLOCK_TOKENS,
                max(0, min(node, usable) - in_memory) * BLOCK_TOKENS,
            )  # fmt: skip
        return found


def _bits(mask: int) -> Iterator[int]:
    """The single bits of an integer."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
