"""Blocks of an engine whose tokens are unknown, until an event shows them. Pure."""

from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

_NAME_BYTES: Final = 8


@dataclass(slots=True, eq=False)
class WaitingBlocks:
    """The blocks of one event.

    Attributes:
        hashes: msgpack array of their hashes.
        parent: name of the block before the first.
        names: their names, in chain order.
        bit: the holder that has them.
        tokens: msgpack array of their tokens.
        extras: what else distinguishes each block; None if nothing does.
        there: names that were not removed since.
        has_lora: they are of a LoRA.
    """

    hashes: bytes
    parent: int
    names: list[int]
    bit: int
    tokens: bytes
    extras: list[bytes] | None
    there: set[int]
    has_lora: bool = False

    @property
    def size(self) -> int:
        """Bytes of hashes, tokens and extras, and 8 for each block."""
        extras = sum(map(len, self.extras)) if self.extras is not None else 0
        return len(self.hashes) + len(self.tokens) + extras + _NAME_BYTES * len(self.names)


class WaitingEvents:
    """The waiting blocks of one engine; the oldest events make room for new ones.

    Args:
        blocks_max: maximum number of blocks.
        size_max: maximum size in bytes.

    Attributes:
        blocks: number of blocks.
        size: their size in bytes, see :attr:`WaitingBlocks.size`.
    """

    __slots__ = ("_blocks_max", "_by_name", "_by_parent", "_events", "_size_max", "blocks", "size")

    def __init__(self, blocks_max: int, size_max: int) -> None:
        self._blocks_max = blocks_max
        self._size_max = size_max
        self.clear()

    def __len__(self) -> int:
        """Number of events."""
        return len(self._events)

    def clear(self) -> None:
        """Forget all."""
        self._events: dict[WaitingBlocks, None] = {}  # oldest first
        self._by_parent: dict[int, dict[WaitingBlocks, None]] = {}  # oldest first
        self._by_name: dict[tuple[int, int], dict[WaitingBlocks, None]] = {}  # name and bit
        self.blocks = 0
        self.size = 0

    def add(self, event: WaitingBlocks) -> int:
        """Add the blocks of an event; returns the number of blocks dropped for them."""
        dropped = 0
        self._events[event] = None
        self.blocks += len(event.names)
        self.size += event.size
        self._by_parent.setdefault(event.parent, {})[event] = None
        for name in event.there:
            self._by_name.setdefault((name, event.bit), {})[event] = None
        while self.blocks > self._blocks_max or self.size > self._size_max:
            oldest = next(iter(self._events))
            dropped += len(oldest.there)
            self._forget(oldest)
        return dropped

    def take_all(self) -> list[WaitingBlocks]:
        """Remove and return all events, oldest first."""
        events = list(self._events)
        self.clear()
        return events

    def take(self, parent: int) -> WaitingBlocks | None:
        """Remove and return the oldest event that waits for this block; None if there is none."""
        events = self._by_parent.get(parent)
        if events is None:
            return None
        event = next(iter(events))
        self._forget(event)
        return event

    def remove(self, names: list[int], bit: int) -> None:
        """Blocks were removed from a holder: they wait no more."""
        for name in set(names):
            for event in self._by_name.pop((name, bit), ()):
                event.there.discard(name)
                if not event.there:
                    self._forget(event)

    def _forget(self, event: WaitingBlocks) -> None:
        del self._events[event]
        self.blocks -= len(event.names)
        self.size -= event.size
        _take_out(self._by_parent, event.parent, event)
        for name in event.there:
            _take_out(self._by_name, (name, event.bit), event)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.blocks == sum(len(event.names) for event in self._events)
        assert self.size == sum(event.size for event in self._events)
        assert self.blocks <= self._blocks_max
        assert self.size <= self._size_max
        assert all(event.there for event in self._events)
        assert {id(e) for each in self._by_parent.values() for e in each} == set(
            map(id, self._events)
        )
        assert sum(map(len, self._by_name.values())) == sum(len(e.there) for e in self._events)


class WaitingNames:
    """Blocks of which only names and holders are known; the oldest make room.

    Of a KV group with states or a window, an engine names the blocks that exist, with the tokens of
    all: only the event of a group that has all blocks shows which tokens belong to which block.

    Args:
        blocks_max: maximum number of blocks; a block with two holders counts twice.
    """

    __slots__ = ("_bits", "_blocks_max", "blocks")

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self.clear()

    def __len__(self) -> int:
        """Number of names."""
        return len(self._bits)

    def clear(self) -> None:
        """Forget all."""
        self._bits: dict[int, set[int]] = {}  # by name, oldest first
        self.blocks = 0

    def add(self, names: list[int], bit: int) -> int:
        """Add blocks of a holder; returns the number of blocks dropped for them."""
        dropped = max(0, len(names) - self._blocks_max)
        for name in names[dropped:]:
            bits = self._bits.setdefault(name, set())
            self.blocks += bit not in bits
            bits.add(bit)
        while self.blocks > self._blocks_max:
            dropped += len(self.take(next(iter(self._bits))))
        return dropped

    def among(self, names: list[int]) -> list[int]:
        """Positions of those of the names that wait."""
        if self._bits.keys().isdisjoint(names):
            return []
        return [at for at, name in enumerate(names) if name in self._bits]

    def take(self, name: int) -> set[int]:
        """Remove a name and return its holders."""
        bits = self._bits.pop(name, set())
        self.blocks -= len(bits)
        return bits

    def remove(self, names: list[int], bit: int) -> None:
        """Blocks were removed from a holder: they wait no more."""
        for name in self._bits.keys() & names:
            bits = self._bits[name]
            self.blocks -= bit in bits
            bits.discard(bit)
            if not bits:
                del self._bits[name]

    def check(self, known: set[int]) -> None:
        """Assert the invariants; ``known``: names that need not wait."""
        assert self.blocks == sum(map(len, self._bits.values())) <= self._blocks_max
        assert all(self._bits.values())
        assert not known & self._bits.keys()

    def names(self) -> list[int]:
        """All names, oldest first."""
        return list(self._bits)


def _take_out(by: dict[T, dict[WaitingBlocks, None]], key: T, event: WaitingBlocks) -> None:
    """Remove an event from those of a key, and the key with its last event."""
    del by[key][event]
    if not by[key]:
        del by[key]
