"""Which pages of a reclaimed segment are carried over, and which are dropped. Pure.

A segment may have thousands of runs, so it is looked at in steps. Between two of them its pages may
be used, split, pinned or lost, but it gets no new ones.
"""

from collections.abc import Generator, Iterator, Mapping
from typing import Final, NamedTuple

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.disk.records import PageRecords
from kvstore.state.tree.columns import PLACE_COLUMN, offsets_in
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree

STEP_PARTS = 32
"""Parts of a segment, or runs before one, that one step looks at: some 200 microseconds."""
HEADS_MARKED: Final = 512
"""Nodes before a run that a use of the run marks, for an engine may have the start of a prompt."""


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

    Pages that have left before their turn comes are left out.
    """
    offset = 0
    while (one := records.stretch_from(offset)) is not None:
        at = max(0, (offset - one.offset) // one.each)
        offset = one.end
        rest = one.live >> at
        if not rest:
            continue
        at += (rest & -rest).bit_length() - 1
        node = one.space.index[one.key(at)]
        position = node.position(one.key(at))
        live = (~(one.live >> at) & (one.live >> at) + 1).bit_length() - 1
        end = at + min(live, node.matching(position, one.keys, at * KEY_BYTES))
        part = Part(
            one.space, one.shard, one.keys[at * KEY_BYTES : end * KEY_BYTES],
            one.offset + at * one.each, one.each, node.first_depth + position,
        )  # fmt: skip
        offset = one.offset + end * one.each
        yield NodePart(node, position, part, one.tick)


def plan(
    segment: int, parts: Iterator[NodePart], budget_bytes: int, tick: int, carry_from: float,
    kept: Mapping[int, int],
) -> Generator[None, None, Reclaim]:  # fmt: skip
    """See :meth:`kvstore.state.disk.log.SegmentLog.plan`.

    Args:
        segment: its number.
        parts: its pages.
        budget_bytes: size of the records to carry; the ancestors of the last one may exceed it.
        tick: see there.
        carry_from: see there.
        kept: see there.
    """
    used: list[tuple[int, int, int]] = []
    found: list[Part] = []
    for node, _, part, written in parts:
        if node.access > written + carry_from * (tick - written):
            used.append((-node.access, part.depth, len(found)))
        found.append(part)
        if not len(found) % STEP_PARTS:
            yield
    chosen, left = set(kept), budget_bytes - sum(kept.values())
    #: Nodes of which all pages in the segment are chosen, and all before them.
    whole: set[tuple[PrefixNode, int]] = set()
    for count, (_, _, at) in enumerate(sorted(used), start=1):
        if left <= 0:
            break
        part = found[at]
        before = yield from _before(part, segment, whole)
        heads = before - chosen
        chosen |= heads
        left -= len(heads) * part.each
        for offset in range(part.offset, part.offset + part.pages * part.each, part.each):
            if left <= 0:
                break
            left -= part.each * (offset not in chosen)
            chosen.add(offset)
        if not count % STEP_PARTS:
            yield
    reclaim = Reclaim([], [])
    for count, part in enumerate(found, start=1):
        _divide(part, chosen, reclaim)
        if not count % STEP_PARTS:
            yield
    reclaim.carry.sort(key=lambda part: part.depth)
    reclaim.drop.sort(key=lambda part: -part.depth)
    return reclaim


def mark_before(node: PrefixNode, tick: int) -> None:
    """Mark the nodes before a used one, too: a plan takes a mark for that of all below it."""
    at = node.above
    for _ in range(HEADS_MARKED):
        if at is None or at.access >= tick:
            return
        at.access = tick
        at = at.above


def _before(
    part: Part, segment: int, whole: set[tuple[PrefixNode, int]]
) -> Generator[None, None, set[int]]:
    """Offsets of the records of all ancestors of a page in this segment, except ``whole`` ones."""
    shard, node = part.shard, part.space.index.get(part.key(0))
    if node is None or not node.on_disk >> shard & 1:
        return set()  # it has left since it was found
    first = node.position(part.key(0)) * PLACE_COLUMN
    offsets = offsets_in(node.place_columns[shard][:first], segment)
    above, looked = node.above, 0
    while above is not None and above.present and (above, shard) not in whole:
        whole.add((above, shard))
        if above.on_disk >> shard & 1:
            offsets += offsets_in(above.place_columns[shard], segment)
        above, looked = above.above, looked + 1
        if not looked % STEP_PARTS:
            yield
    return set(offsets)


def _divide(part: Part, chosen: set[int], reclaim: Reclaim) -> None:
    """Add the pages of a part to the pages to carry or to those to drop."""
    first, pages = 0, part.pages
    while first < pages:
        carried, end = part.offset + first * part.each in chosen, first + 1
        while end < pages and (part.offset + end * part.each in chosen) == carried:
            end += 1
        (reclaim.carry if carried else reclaim.drop).append(part.cut(first, end))
        first = end
