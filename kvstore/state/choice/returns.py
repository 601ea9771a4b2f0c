"""Learns which share of the pages that left memory is requested again. Pure.

When a prompt leaves memory, each of its pages is remembered with its **kind**. The kind of a page
that was seen once depends on whether the prompt continued an earlier one, whether the page is the
last one, and how many pages were new (in octaves); the kind of one that was seen more often on how
often, and on its distance from the prompt's end. If a later prompt that leaves memory has the page
too, the page has returned, and changes its kind. Whether a page was written does not matter, so a
rejected page teaches as much as an admitted one.

The rate of a kind is the share of its pages that returned. A kind with few pages borrows from the
more general one.
"""

from collections import OrderedDict
from typing import Final

from kvstore.protocol.page import PrefixKey
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

Kind = tuple[int, ...]

REMEMBERED_MAX = 1 << 16
"""Maximum remembered pages; the one that left memory longest ago is forgotten first."""
WALK_MAX: Final = 1024
"""Maximum pages before the end of a prompt that are examined."""
WALK_TICK_MAX = 2 * WALK_MAX
"""Maximum pages that are examined for all prompts that leave at one tick, beside the last run of
each and the page before it: a put may evict 128 leaves, and all may follow one long prompt."""
BELIEF: Final = 30.0
"""Pages after which a kind's own rate counts as much as the more general kind's."""
RATE_UNKNOWN: Final = 0.5
HALVE_EVERY: Final = 1 << 18
"""Pages after which all counts are halved, so that old observations count less."""
SIGHTS_MAX: Final = 4
"""A page seen in this many prompts is shared; more make no difference."""
FAR_OCTAVES: Final = 4
"""Pages farther from the end than this power of two are treated alike."""
ADDED_OCTAVES: Final = 8
"""Prompts that added more than this power of two are treated alike."""


class Returns:
    """The share of pages of each kind that were requested again."""

    def __init__(self) -> None:
        #: Page → its kind, how many prompts had it, and the tick when the last of them left.
        self._remembered: OrderedDict[int, tuple[Kind, int, int]] = OrderedDict()
        self._seen: dict[Kind, float] = {}
        self._returned: dict[Kind, float] = {}
        self._pages = 0
        #: The tick when a prompt left last, and pages that may still be examined at it.
        self._tick, self._walk_left = -1, 0

    def __len__(self) -> int:
        """How many pages are remembered."""
        return len(self._remembered)

    def left(self, end: PrefixNode, tick: int) -> bool:
        """The prompt that ends at ``end`` leaves memory; returns False if that was known."""
        last = self._remembered.get(_name(end))
        if last is not None and last[2] >= end.access:
            return False
        path = self._path(end, tick)
        known = [self._remembered.get(name) for name in path]
        sights_before, added = 0, len(path)
        for distance, one in enumerate(known):
            if one is not None:
                sights_before, added = min(one[1], SIGHTS_MAX), distance
                break
        first = min(added.bit_length(), ADDED_OCTAVES)
        for distance, (name, one) in enumerate(zip(path, known, strict=True)):
            if one is None:
                sights = 1
                kind: Kind = (1, sights_before, int(not distance), first)
            else:
                sights = min(one[1] + 1, SIGHTS_MAX)
                kind = (sights, min(distance.bit_length(), FAR_OCTAVES))
                if end.access > one[2]:
                    _count(self._returned, one[0], 1)
                else:
                    _count(self._seen, one[0], -1)  # the same stay in memory
            _count(self._seen, kind, 1)
            self._remember(name, kind, sights, tick)
        return True

    def _path(self, end: PrefixNode, tick: int) -> list[int]:
        """The last pages of a prompt, the last one first, as many as are examined now."""
        if tick != self._tick:
            self._tick, self._walk_left = tick, WALK_TICK_MAX
        most = min(WALK_MAX, max(self._walk_left, end.count + 1))
        path: list[int] = []
        at: PrefixNode | None = end
        while at is not None and at is not end.space.root and len(path) < most:
            path += [_named(at.space, key) for key in reversed(at.key_list())]
            at = at.above
        del path[most:]
        self._walk_left -= len(path)
        return path

    def rate(self, space: PrefixTree, key: PrefixKey) -> float:
        """The share of similar pages that were requested again, 0 to 1."""
        known = self._remembered.get(_named(space, key))
        kind = known[0] if known is not None else ()
        rate = RATE_UNKNOWN
        for depth in range(len(kind) + 1):
            general = kind[:depth]
            seen, returned = self._seen.get(general, 0.0), self._returned.get(general, 0.0)
            rate = (returned + BELIEF * rate) / (max(seen, 0.0) + BELIEF)
        return min(rate, 1.0)

    def _remember(self, name: int, kind: Kind, sights: int, tick: int) -> None:
        self._remembered[name] = kind, sights, tick
        self._remembered.move_to_end(name)
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        self._pages += 1
        if self._pages % HALVE_EVERY == 0:
            for counts in (self._seen, self._returned):
                for one in counts:
                    counts[one] /= 2


def _count(counts: dict[Kind, float], kind: Kind, change: float) -> None:
    for depth in range(len(kind) + 1):
        general = kind[:depth]
        counts[general] = counts.get(general, 0.0) + change


def _name(node: PrefixNode) -> int:
    return _named(node.space, node.key)


def _named(space: PrefixTree, key: PrefixKey) -> int:
    """Keys are digests: a part of one is enough, and a rare confusion of two pages costs little."""
    return space.number << 64 | int.from_bytes(key[:8], "little")
