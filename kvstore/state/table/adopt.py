"""Takes over the pages that were found on disk at the start. Pure.

Pages whose parent is no longer there are left out: no lookup could reach them. So is a page under
:data:`~kvstore.protocol.page.ALL_KEYS`, which nodes before 0.2 accepted. Their bytes on disk are
dead, and are reclaimed like any others.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.protocol.page import (
    ALL_KEYS,
    DIGEST_BYTES,
    KEY_BYTES,
    PrefixKey,
    ShardSpec,
    SpaceIdentity,
)
from kvstore.state.disk.order import NEVER_AWAITED, Order
from kvstore.state.table.pages import PageTable
from kvstore.state.tree import node as nodes
from kvstore.state.tree.children import deepen
from kvstore.state.tree.columns import PLACE_COLUMN, come_again, may_be_in, pack_records
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment as it was found, with its pages in the order of their records.

    Attributes:
        size_bytes: of its file.
        end: offset behind its last record.
        records: number of records, including those that are no longer pages.
        keys: of the pages, 32 bytes each.
        parents: keys before the pages, 32 bytes each; zeros at the start of a chain.
        digests: of the pages, 16 bytes each.
        offsets: start of each record.
        pairs: index of each page's (space, shard).
        first_page: lowest sequence number of a page record, including dead ones; 0 = none.
        last_tombstone: highest sequence number of a tombstone; 0 = none.
    """

    number: int
    size_bytes: int
    sealed: bool
    end: int
    records: int
    keys: bytes
    parents: bytes
    digests: bytes
    offsets: npt.NDArray[np.uint64]
    pairs: npt.NDArray[np.uint16]
    first_page: int = 0
    last_tombstone: int = 0


def adopt(
    table: PageTable, segments: list[FoundSegment], pairs: list[tuple[SpaceIdentity, ShardSpec]],
    next_segment: int,
) -> int:  # fmt: skip
    """Put found pages into an empty page table with a disk side.

    Args:
        table: the page table.
        segments: by number.
        pairs: the spaces and shards of the pages; pages of no pair are left out.
        next_segment: first number for new segments.

    Returns:
        number of reachable pages.
    """
    assert table.disk.exists
    every = np.concatenate([np.empty(0, np.uint16), *(segment.pairs for segment in segments)])
    records: list[int] = np.bincount(every, minlength=len(pairs)).tolist()
    homes = [_home(table, *pair) if records[at] else None for at, pair in enumerate(pairs)]
    spaces = list({id(home[0]): home[0] for home in homes if home is not None}.values())
    doubts = _Doubts({}, [])
    for columns in _columns(segments):
        _take_over(columns, homes, doubts)
    for space in spaces:
        order = space.by_creation
        space.index.settle([node for number in order.numbers(0) for node in order.nodes(number)])
    table.counts["orphaned_bytes"] += _dispel(doubts)
    log = table.disk.log
    for segment, age in zip(segments, _orders(segments), strict=True):
        log.adopt(
            segment.number, segment.size_bytes, segment.end, segment.records,
            sealed=segment.sealed, order=age,
        )  # fmt: skip
    log.adopt_pages(spaces)
    log.next_segment = next_segment
    return sum(len(segment.pages) for segment in log.segments.values())


class _Columns(NamedTuple):
    """A segment, and what was found out of all its pages at once.

    Attributes:
        segment: the segment.
        places: the column of its pages' places.
        stretches: the first page of each stretch, and the end of the last one. The pages of a
            stretch are of one pair and follow each other; one under :data:`ALL_KEYS` begins one.
        again: a byte for each page: 0 = no page before has its key, 1 = one may have it.
        wanted: a byte for each page: 1 = its node may be looked up by its key.
    """

    segment: FoundSegment
    places: bytes
    stretches: list[int]
    again: bytes
    wanted: bytes


def _columns(segments: list[FoundSegment]) -> Iterator[_Columns]:
    """What is known of all pages before their nodes are made.

    To look up each key, or to make it findable, takes longer than all else. So keys are compared by
    their first 8 bytes before, all at once.
    """
    stretches = [_stretches(one) for one in segments]
    heads = np.concatenate([_heads(b""), *(_heads(one.keys) for one in segments)])
    again = come_again(heads)
    parents = [
        _heads(one.parents)[begins[:-1]] for one, begins in zip(segments, stretches, strict=True)
    ]
    wanted = may_be_in(heads, np.concatenate([heads[again], *parents]))
    at = 0
    for segment, begins in zip(segments, stretches, strict=True):
        end = at + len(segment.pairs)
        yield _Columns(
            segment, pack_records(segment.number, segment.offsets), begins.tolist(),
            again[at:end].tobytes(), wanted[at:end].tobytes(),
        )  # fmt: skip
        at = end


def _heads(keys: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(keys, np.uint64)[:: KEY_BYTES // 8]


def _stretches(segment: FoundSegment) -> npt.NDArray[np.intp]:
    """See :class:`_Columns`."""
    pages = len(segment.pairs)
    keys, parents = (
        np.frombuffer(column, np.uint64).reshape(pages, KEY_BYTES // 8)
        for column in (segment.keys, segment.parents)
    )
    begins = np.ones(pages + 1, np.bool_)
    begins[1:-1] = (parents[1:] != keys[:-1]).any(axis=1)
    begins[1:-1] |= segment.pairs[1:] != segment.pairs[:-1]
    begins[1:-1] |= ~keys[1:].any(axis=1)
    return np.flatnonzero(begins)


def _orders(segments: list[FoundSegment]) -> list[Order]:
    """Which segments the tombstones of each one wait for: those with an older record of a page."""
    oldest = sorted((one.first_page, at) for at, one in enumerate(segments) if one.first_page)
    ranks = {at: rank for rank, (_, at) in enumerate(oldest)}
    return [
        Order(ranks.get(at, NEVER_AWAITED), bisect_left(oldest, (one.last_tombstone, -1)))
        for at, one in enumerate(segments)
    ]


class _Doubts(NamedTuple):
    """Cases that could not be decided when they were met: a parent may lie behind its children.

    Attributes:
        lost: nodes of one page without a parent yet → the key of their parent.
        headless: space, key and shard of pages whose parent was not on disk when they were met.
    """

    lost: dict[PrefixNode, PrefixKey]
    headless: list[tuple[PrefixTree, PrefixKey, int]]

    def contradict(self, node: PrefixNode, position: int, parent_key: PrefixKey) -> bool:
        """Whether a record names another parent for a page than an earlier record did."""
        earlier = node.key_before(position)
        return (self.lost[node] if earlier is None else earlier or _NO_PARENT) != parent_key


def _home(
    table: PageTable, identity: SpaceIdentity, spec: ShardSpec
) -> tuple[PrefixTree, int] | None:
    """The space and shard number of found pages; None if this node cannot hold such pages."""
    try:
        space, (shard,) = table.spaces.adopt(identity, [spec])
    except (InvalidArgument, CapacityError):
        table.counts["recovery_refused_shards"] += 1
        return None
    return space, shard


def _take_over(
    columns: _Columns, homes: list[tuple[PrefixTree, int] | None], doubts: _Doubts
) -> None:
    """Create the nodes of a segment's pages, under their parents where those are known."""
    segment = columns.segment
    for begin, end in pairwise(columns.stretches):
        home = homes[int(segment.pairs[begin])]
        if home is None:
            continue
        at = begin + segment.keys.startswith(ALL_KEYS, begin * KEY_BYTES)
        node: PrefixNode | None = None
        while at < end:
            most = min(end, at + nodes.RUN_PAGES_MAX)
            node = _take_over_leading(columns, at, most, *home, node, doubts)
            at += 1 if node is None else node.count


def _take_over_leading(
    columns: _Columns, first: int, end: int, space: PrefixTree, shard: int,
    head: PrefixNode | None, doubts: _Doubts,
) -> PrefixNode | None:  # fmt: skip
    """Create or find a node of the first pages of a stretch.

    Args:
        columns: of its segment.
        first: the first page.
        end: the end of the stretch.
        space: the space of its pages.
        shard: their shard.
        head: the node of the page before, if it is of this stretch.
        doubts: cases to decide later.

    Returns:
        the node; None if the first page is left out.
    """
    segment = columns.segment
    keys = segment.keys[first * KEY_BYTES : end * KEY_BYTES]
    key = PrefixKey(keys[:KEY_BYTES])
    parent_key = PrefixKey(segment.parents[first * KEY_BYTES : (first + 1) * KEY_BYTES])
    if head is None:
        head = space.root if parent_key == _NO_PARENT else space.end(parent_key)
    again = columns.again.find(1, first, end) >= 0
    known = space.index.get(key) if again else None
    if known is not None:
        position = known.position(key)
        if doubts.contradict(known, position, parent_key):
            return None
        pages = known.matching(position, keys, 0)
        node = space.exact(known, position, pages)
    else:
        if head is None:
            keys = key
        elif again:
            keys = _unknown(space, keys)
        node = PrefixNode(space, keys, head, len(keys) // KEY_BYTES)
        space.by_creation.add(node)
        _note(columns, first, node)
        if head is None:
            doubts.lost[node] = parent_key
    last = first + node.count
    node.adopt(
        shard, columns.places[first * PLACE_COLUMN : last * PLACE_COLUMN],
        segment.digests[first * DIGEST_BYTES : last * DIGEST_BYTES],
    )  # fmt: skip
    if head is None or (head is not space.root and not head.on_disk >> shard & 1):
        doubts.headless.append((space, key, shard))
    return node


def _note(columns: _Columns, first: int, node: PrefixNode) -> None:
    """Make a new node findable by those of its keys that may be looked up."""
    at, last = columns.wanted.find(1, first, first + node.count), first + node.count
    while at >= 0:
        node.space.index.note(node.key_at(at - first), node)
        at = columns.wanted.find(1, at + 1, last)


def _unknown(space: PrefixTree, keys: bytes) -> bytes:
    """The leading keys that no node has, without repetitions; the first key is one of them."""
    seen: set[PrefixKey] = set()
    for at in range(0, len(keys), KEY_BYTES):
        key = PrefixKey(keys[at : at + KEY_BYTES])
        if key in seen or space.index.get(key) is not None:
            return keys[:at]
        seen.add(key)
    return keys


_NO_PARENT: Final = ALL_KEYS


def _dispel(doubts: _Doubts) -> int:
    """Attach nodes whose parents were found; drop pages without parents, and their descendants.

    Returns:
        the size of the dropped records on disk.
    """
    orphaned_bytes = 0
    for node, parent_key in doubts.lost.items():
        space = node.space
        known = space.end(parent_key) or space.node(parent_key, PrefixKey(b""))
        node.hang(known)
    emptied = _cut_rings(list(doubts.lost))
    _correct_depths(list(doubts.lost))
    depths = [
        (space.index[key].first_depth, at) for at, (space, key, _) in enumerate(doubts.headless)
    ]
    for _, at in sorted(depths):
        space, key, shard = doubts.headless[at]
        node = space.index[key]  # as it is now: pages of another shard may have split it
        head = node.above
        assert head is not None
        assert node.first == key, node
        needs_head = head is not space.root and not space.shards[shard].window_pages
        if needs_head and node.on_disk & ~head.on_disk & 1 << shard:
            emptied += (dropped := _forget_all(node, shard))
            pages = sum([below.count for below in dropped])
            orphaned_bytes += pages * space.shards[shard].record_bytes
    for node in emptied:
        if is_live(node):
            node.space.prune(node)
    return orphaned_bytes


def _correct_depths(lost: list[PrefixNode]) -> None:
    """Correct the depths of nodes that have got a parent, and of all below them, each once."""
    below = dict.fromkeys(lost, True)
    for node in lost:
        path, at = list[PrefixNode](), node.above
        while at is not None and at not in below:
            path.append(at)
            at = at.above
        is_below = at is not None and below[at]
        below.update(dict.fromkeys(path, is_below))
        if not is_below:
            deepen(node)


def _forget_all(top: PrefixNode, shard: int) -> list[PrefixNode]:
    """Leave out the records of a node and of all that continue it; returns those nodes."""
    found = [top]
    for node in found:
        node.forget_disk(shard)
        found += [child for child in node.below.values() if child.on_disk >> shard & 1]
    return found


def _cut_rings(lost: list[PrefixNode]) -> list[PrefixNode]:
    """Drop pages whose records say that they precede each other, and their descendants.

    Keys are hashes of everything before them, but engines compute them. Every ring contains one of
    ``lost``: all other nodes were created below an existing one.

    Returns:
        the dropped nodes; they are below the root now, and have no pages.
    """
    hang, cut = set[PrefixNode](), list[PrefixNode]()
    for node in lost:
        path: set[PrefixNode] = set()
        at: PrefixNode | None = node
        while at is not None and at not in hang and at not in path:
            path.add(at)
            at = at.above
        if at is not None and at in path:
            assert at.above is not None, node
            del at.above.below[at.first]
            at.above.children_on_disk -= at.nears_disk
            at.hang(at.space.root)
            ring = [at]
            for below in ring:
                ring.extend(below.below.values())
                for shard in list(below.place_columns):
                    below.forget_disk(shard)
            cut += ring
        hang |= path
    return cut
