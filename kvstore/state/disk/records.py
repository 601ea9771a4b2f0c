"""The records of a segment: runs of adjacent records, and the keys of their pages. Pure.

Nothing here refers to a node: nodes are split, dropped and stored again, and a record stays where
it is.
"""

from bisect import bisect_right
from dataclasses import dataclass

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.prefix_tree import PrefixTree

STRETCH_PAGES_MAX = 128
"""Maximum pages of a stretch to which single pages are added."""


@dataclass(slots=True, init=False, eq=False)
class Stretch:
    """Adjacent records of pages of one shard, placed at one tick.

    Attributes:
        space: their space.
        shard: their shard.
        tick: when they were placed.
        offset: of the first record.
        each: bytes of each record.
        keys: of the pages, 32 bytes each.
        live: bit i set = record i is the one that page i has on disk, or will have.
    """

    space: PrefixTree
    shard: int
    tick: int
    offset: int
    each: int
    keys: bytes
    live: int

    def __init__(
        self, space: PrefixTree, shard: int, tick: int, offset: int, each: int, keys: bytes,
        live: int,
    ) -> None:  # fmt: skip
        self.space = space
        self.shard = shard
        self.tick = tick
        self.offset = offset
        self.each = each
        self.keys = keys
        self.live = live

    @property
    def pages(self) -> int:
        """The number of records, including dead ones."""
        return len(self.keys) // KEY_BYTES

    def key(self, number: int) -> PrefixKey:
        """The key of the page of record ``number``."""
        return PrefixKey(self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])


class PageRecords:
    """All and only the records of one segment that their pages have, or will have, on disk.

    Attributes:
        live_bytes: bytes of the segment's records.
        stretches: the records, by offset.
    """

    __slots__ = ("_count", "_offsets", "live_bytes", "stretches")

    def __init__(self) -> None:
        self.live_bytes = 0
        self.stretches: list[Stretch] = []
        self._offsets: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(
        self, space: PrefixTree, shard: int, keys: bytes, offset: int, each: int, tick: int
    ) -> None:
        """Add records of ``each`` bytes at an offset behind all others."""
        pages = len(keys) // KEY_BYTES
        self._count += pages
        self.live_bytes += pages * each
        last = self.stretches[-1] if self.stretches else None
        if (
            pages == 1
            and last is not None
            and (last.space, last.shard, last.tick) == (space, shard, tick)
            and last.pages < STRETCH_PAGES_MAX
            and last.offset + last.pages * each == offset
        ):
            last.live |= 1 << last.pages
            last.keys += keys
            return
        assert last is None or offset > last.offset
        self.stretches.append(Stretch(space, shard, tick, offset, each, keys, (1 << pages) - 1))
        self._offsets.append(offset)

    def key_at(self, offset: int) -> PrefixKey | None:
        """The key of the page whose record starts there; None if no page has it."""
        at = bisect_right(self._offsets, offset) - 1
        if at < 0:
            return None
        one = self.stretches[at]
        number, rest = divmod(offset - one.offset, one.each)
        return one.key(number) if not rest and one.live >> number & 1 else None

    def live_up_to(self, offset: int, most: int) -> int:
        """How many adjacent live records, at most ``most``, end with the one that starts there."""
        at = bisect_right(self._offsets, offset) - 1
        if at < 0:
            return 0
        one = self.stretches[at]
        number, rest = divmod(offset - one.offset, one.each)
        dead = ~one.live & (1 << number + 1) - 1
        return min(most, number + 1 - dead.bit_length()) if not rest else 0

    def remove(self, offset: int) -> None:
        """The record that starts there is dead."""
        at = bisect_right(self._offsets, offset) - 1
        assert at >= 0
        one = self.stretches[at]
        number, rest = divmod(offset - one.offset, one.each)
        assert not rest
        assert one.live >> number & 1, "no page has this record"
        one.live &= ~(1 << number)
        self._count -= 1
        self.live_bytes -= one.each
        if not one.live:
            del self.stretches[at], self._offsets[at]
