"""Which pages of a reclaimed segment are carried over, and which are dropped. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.disk.records import PageRecords
from kvstore.state.tree.columns import unpack_places
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

HEADS_MARKED: Final = 512
"""Nodes before a run that a use of the run marks, for an engine may have the start of a prompt."""
STEP_PAGES = 64
"""Runs that one step of a plan examines: some hundred microseconds."""


class Part(NamedTuple):
    """Pages of one prefix whose records are adjacent.

    Attributes:
        space: their space.
        shard: their shard.
        keys: of the pages, 32 bytes each, in chain order.
        offset: of the first record in its segment.
        each: bytes of a record.
        depth: of the first page.
    """

    space: PrefixTree
    shard: int
    keys: bytes
    offset: int
    each: int
    depth: int

    @property
    def pages(self) -> int:
        """The number of pages."""
        return len(self.keys) // KEY_BYTES

    def key(self, number: int) -> PrefixKey:
        """The key of page ``number``."""
        return PrefixKey(self.keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def cut(self, first: int, end: int) -> "Part":
        """The pages from ``first`` up to ``end``."""
        keys = self.keys[first * KEY_BYTES : end * KEY_BYTES]
        offset = self.offset + first * self.each
        return Part(self.space, self.shard, keys, offset, self.each, self.depth + first)


class Reclaim(NamedTuple):
    """The plan for the pages of a segment.

    Attributes:
        carry: to write again, parents first.
        drop: to remove from disk, last pages first; each part from its end.
    """

    carry: list[Part]
    drop: list[Part]


class NodePart(NamedTuple):
    """A part, its node, and the position in it; ``tick``: when it was written."""

    node: PrefixNode
    position: int
    part: Part
    tick: int


def parts_of(records: PageRecords) -> Iterator[NodePart]:
    """The pages of a segment in which nothing is being written, each once.

    Pages may leave between two of its steps.
    """
    for one in list(records.stretches):
        at = 0
        while at < one.pages:
            if not one.live >> at & 1:
                at += 1
                continue
            node = one.space.index[one.key(at)]
            position = node.position(one.key(at))
            live = (~(one.live >> at) & (one.live >> at) + 1).bit_length() - 1
            end = at + min(live, node.matching(position, one.keys, at * KEY_BYTES))
            part = Part(
                one.space, one.shard, one.keys[at * KEY_BYTES : end * KEY_BYTES],
                one.offset + at * one.each, one.each, node.first_depth + position,
            )  # fmt: skip
            yield NodePart(node, position, part, one.tick)
            at = end


def plan(
    segment: int, parts: Sequence[NodePart], budget_bytes: int, tick: int, carry_from: float,
    kept: Mapping[int, int],
) -> Iterator[Reclaim | None]:  # fmt: skip
    """See :meth:`kvstore.state.disk.log.SegmentLog.plan`.

    Pages may leave between two steps, and nodes may be split.

    Args:
        segment: its number.
        parts: its pages.
        budget_bytes: size of the records to carry; the ancestors of the last one may exceed it.
        tick: see there.
        carry_from: see there.
        kept: see there.
    """
    many = len(parts) > STEP_PAGES
    if many:
        yield None  # to sort takes as long as a step
    used = [
        (-node.access, part.depth, at)
        for at, (node, _, part, written) in enumerate(parts)
        if node.access > written + carry_from * (tick - written)
    ]
    used.sort()
    chosen = set(kept)
    left = budget_bytes - sum(kept.values())
    #: Nodes of which all pages in the segment are chosen, and all before them.
    whole: set[tuple[PrefixNode, int]] = set()
    for looked, (_, _, at) in enumerate(used):
        if left <= 0:
            break
        if many and looked % STEP_PAGES == 0:
            yield None
        node, position, part, _ = parts[at]
        if not node.on_disk >> part.shard & 1:
            continue  # it has left, or is another node's now
        heads = _before(node, position, part.shard, segment, whole) - chosen
        chosen |= heads
        left -= len(heads) * part.each
        for offset in range(part.offset, part.offset + part.pages * part.each, part.each):
            if left <= 0:
                break
            left -= part.each * (offset not in chosen)
            chosen.add(offset)
    reclaim = Reclaim([], [])
    for looked, (_, _, part, _) in enumerate(parts):
        if many and looked % STEP_PAGES == 0:
            yield None
        _divide(part, chosen, reclaim)
    if many:
        yield None
    reclaim.carry.sort(key=lambda part: part.depth)
    reclaim.drop.sort(key=lambda part: -part.depth)
    yield reclaim


def mark_before(node: PrefixNode, tick: int) -> None:
    """Mark the nodes before a used one, too: a plan takes a mark for that of all below it."""
    at = node.above
    for _ in range(HEADS_MARKED):
        if at is None or at.access >= tick:
            return
        at.access = tick
        at = at.above


def _before(
    node: PrefixNode, position: int, shard: int, segment: int, whole: set[tuple[PrefixNode, int]]
) -> set[int]:
    """Offsets of the records of all ancestors of a page in this segment, except ``whole`` ones."""
    places = unpack_places(node.place_columns[shard])[:position]
    above = node.above
    while above is not None and above.present and (above, shard) not in whole:
        whole.add((above, shard))
        if above.on_disk >> shard & 1:
            places += unpack_places(above.place_columns[shard])
        above = above.above
    return {place.offset for place in places if place.segment == segment}


def _divide(part: Part, chosen: set[int], reclaim: Reclaim) -> None:
    """Add the pages of a part to the pages to carry or to those to drop."""
    first, pages = 0, part.pages
    while first < pages:
        carried, end = part.offset + first * part.each in chosen, first + 1
        while end < pages and (part.offset + end * part.each in chosen) == carried:
            end += 1
        (reclaim.carry if carried else reclaim.drop).append(part.cut(first, end))
        first = end
