"""Takes over the pages that were found on disk at the start. Pure.

Pages whose parent is no longer there are left out: no lookup could reach them. So is a page under
:data:`~kvstore.protocol.page.ALL_KEYS`, which nodes before 0.2 accepted. Their bytes on disk are
dead, and are reclaimed like any others.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.protocol.errors import CapacityError, InvalidArgument
from kvstore.protocol.page import ALL_KEYS, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.table.orphans import subtree
from kvstore.state.table.pages import PageTable
from kvstore.state.tree import node as nodes
from kvstore.state.tree.columns import pack_records
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree, deepen


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment as it was found, with its pages in the order of their records.

    Attributes:
        size_bytes: of its file.
        end: offset behind its last record.
        records: number of records, including those that are no longer pages.
        keys: of each page.
        parents: key before each page; zeros at the start of a chain.
        digests: of each page.
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
    keys: list[PrefixKey]
    parents: list[PrefixKey]
    digests: list[bytes]
    offsets: list[int]
    pairs: list[int]
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
    used = set[int]().union(*(segment.pairs for segment in segments))
    homes = [_home(table, *pair) if at in used else None for at, pair in enumerate(pairs)]
    spaces = list({id(home[0]): home[0] for home in homes if home is not None}.values())
    doubts = _Doubts({}, [])
    for segment in segments:
        _take_over(segment, homes, doubts)
    table.counts["orphaned_bytes"] += _dispel(doubts)
    log = table.disk.log
    for segment in segments:
        log.adopt(
            segment.number, segment.size_bytes, segment.end, segment.records,
            sealed=segment.sealed, waits_for=_waits_for(segment, segments),
        )  # fmt: skip
    log.adopt_pages(spaces)
    for space in spaces:
        for number in space.by_creation.numbers(0):
            for node in space.by_creation.nodes(number):
                if node.on_disk:
                    space.index.cool(node)
    log.next_segment = next_segment
    return sum(len(segment.pages) for segment in log.segments.values())


def _waits_for(segment: FoundSegment, segments: list[FoundSegment]) -> list[int]:
    """Segments with a record that is older than a tombstone of this one.

    If two segments would wait for each other, only the younger one waits.
    """
    if not segment.last_tombstone:
        return []  # nearly all: else a start would compare each of them with each other
    return [
        other.number
        for other in segments
        if 0 < other.first_page < segment.last_tombstone
        and other is not segment
        and not (other.last_tombstone and 0 < segment.first_page < other.first_page)
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
    segment: FoundSegment, homes: list[tuple[PrefixTree, int] | None], doubts: _Doubts
) -> None:
    """Create the nodes of a segment's pages, under their parents where those are known."""
    at, keys = 0, segment.keys
    while at < len(keys):
        home, end = homes[segment.pairs[at]], _stretch_end(segment, at)
        if home is None or keys[at] == ALL_KEYS:
            at = end if home is None else at + 1
            continue
        while at < end:
            at += _take_over_leading(segment, at, end, *home, doubts)


def _stretch_end(segment: FoundSegment, first: int) -> int:
    """The end of the records that follow the first one and whose pages follow its page."""
    keys, parents, pairs = segment.keys, segment.parents, segment.pairs
    pair, end = pairs[first], first + 1
    most = min(len(keys), first + nodes.RUN_PAGES_MAX)
    while end < most and parents[end] == keys[end - 1] and pairs[end] == pair:
        if keys[end] == ALL_KEYS:
            break
        end += 1
    return end


def _take_over_leading(
    segment: FoundSegment, first: int, end: int, space: PrefixTree, shard: int, doubts: _Doubts
) -> int:
    """Create or find a node of the first pages of a stretch; returns how many pages."""
    keys = segment.keys
    key, parent_key = keys[first], segment.parents[first]
    head = space.root if parent_key == _NO_PARENT else space.end(parent_key)
    known = space.index.get(key)
    if known is not None:
        position = known.position(key)
        if doubts.contradict(known, position, parent_key):
            return 1
        pages = known.matching(position, b"".join(keys[first:end]), 0)
        node = space.exact(known, position, pages)
    elif head is None:
        node = space.add(key)
        doubts.lost[node] = parent_key
    else:
        node = space.add_run(_unknown(space, keys[first:end]), head)
    last = first + node.count
    node.adopt(
        shard, pack_records(segment.number, segment.offsets[first:last]),
        b"".join(segment.digests[first:last]),
    )  # fmt: skip
    if head is None or (head is not space.root and not head.on_disk >> shard & 1):
        doubts.headless.append((space, key, shard))
    return node.count


def _unknown(space: PrefixTree, keys: list[PrefixKey]) -> list[PrefixKey]:
    """The leading keys that no node has, without repetitions; the first key is one of them."""
    seen: set[PrefixKey] = set()
    for at, key in enumerate(keys):
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
    _cut_rings(list(doubts.lost))
    for node in doubts.lost:
        deepen(node)
    depths = [
        (space.index[key].first_depth, at) for at, (space, key, _) in enumerate(doubts.headless)
    ]
    for _, at in sorted(depths):
        space, key, shard = doubts.headless[at]
        node = space.index[key]  # as it is now: what was taken out before may have split it
        head = node.above
        assert head is not None
        assert node.first == key, node
        needs_head = head is not space.root and not space.shards[shard].window_pages
        if needs_head and not head.on_disk >> shard & 1:
            for below in subtree(node):
                if below.on_disk >> shard & 1:
                    below.forget_disk(shard)
                    orphaned_bytes += below.count * space.shards[shard].record_bytes
    for space, key, _ in doubts.headless:
        found = space.index.get(key)
        if found is not None:
            _prune_below(found)
    return orphaned_bytes


def _cut_rings(lost: list[PrefixNode]) -> None:
    """Drop pages whose records say that they precede each other, and their descendants.

    Keys are hashes of everything before them, but engines compute them. Every ring contains one of
    ``lost``: all other nodes were created below an existing one.
    """
    hang: set[PrefixNode] = set()
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
            for below in subtree(at):
                for shard in list(below.place_columns):
                    below.forget_disk(shard)
        hang |= path


def _prune_below(node: PrefixNode) -> None:
    """Remove empty nodes at and below a node."""
    for below in reversed(subtree(node)) if is_live(node) else ():
        if is_live(below) and not below.present and not below.below:
            node.space.prune(below)
