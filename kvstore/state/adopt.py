"""Takes over the pages that a start found on disk. Pure.

Pages whose head is not there any more are left out: nobody could reach them. What they take on
disk is dead and is reclaimed like any other.
"""

from collections import deque
from dataclasses import dataclass

from kvstore.errors import CapacityError, InvalidArgument
from kvstore.page import DIGEST_BYTES, KEY_BYTES, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.log import Place
from kvstore.state.pages import PageTable
from kvstore.state.tree import Node, Space


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """One segment as it was found, its pages packed in the order they lie there.

    Attributes:
        size_bytes: of its file.
        end: the first byte behind its last record.
        records: records in it, those that are no pages any more included.
        keys: 32 bytes a page.
        parents: 32 bytes a page, zeros at a chain's start.
        digests: 16 bytes a page.
        offsets: where each record begins.
        pairs: index of each page's (space, shard).
        page_bytes: of each page.
    """

    number: int
    size_bytes: int
    sealed: bool
    end: int
    records: int
    keys: bytes
    parents: bytes
    digests: bytes
    offsets: list[int]
    pairs: list[int]
    page_bytes: list[int]


def adopt(
    table: PageTable, segments: list[FoundSegment], pairs: list[tuple[SpaceIdentity, ShardSpec]],
    next_segment: int,
) -> int:  # fmt: skip
    """Put found pages into an empty page table with a disk side.

    Args:
        table: takes them.
        segments: by number.
        pairs: what the pages belong to.
        next_segment: first number for new segments.

    Returns:
        how many pages can be reached.
    """
    assert table.disk is not None
    homes = [_home(table, identity, spec) for identity, spec in pairs]
    spaces = list({id(home[0]): home[0] for home in homes if home is not None}.values())
    heads: list[tuple[Node, bytes]] = []
    for segment in segments:
        heads += _take_over(segment, homes)
    for node, parent in heads:
        _hang(node, parent)
    count = sum(_keep_reachable(space) for space in spaces)
    log = table.disk.log
    for segment in segments:
        log.adopt(
            segment.number, segment.size_bytes, segment.end, segment.records, sealed=segment.sealed
        )
    for space in spaces:
        for node in space.nodes.values():
            for shard in node.disk:
                log.adopt_page(node, shard)
    log.next_segment = next_segment
    return count


def _home(table: PageTable, identity: SpaceIdentity, spec: ShardSpec) -> tuple[Space, int] | None:
    """The space and shard number of found pages; None when this node cannot hold such pages."""
    try:
        space, (shard,) = table.spaces.adopt(identity, [spec])
    except (InvalidArgument, CapacityError):
        table.counts["recovery_refused_shards"] += 1
        return None
    return space, shard


def _take_over(
    segment: FoundSegment, homes: list[tuple[Space, int] | None]
) -> list[tuple[Node, bytes]]:
    """Make the nodes of a segment's pages, hanging nowhere yet; each with its parent's key."""
    made: list[tuple[Node, bytes]] = []
    keys, parents, digests = segment.keys, segment.parents, segment.digests
    number = segment.number
    for at, (offset, pair) in enumerate(zip(segment.offsets, segment.pairs, strict=True)):
        home = homes[pair]
        if home is None:
            continue
        space, shard = home
        key = PrefixKey(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        node = space.nodes.get(key)
        if node is None:
            node = space.add(key)
            made.append((node, parents[at * KEY_BYTES : (at + 1) * KEY_BYTES]))
        digest = digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        node.adopt(shard, Place(number, offset), digest)
    return made


_NO_PARENT = bytes(KEY_BYTES)


def _hang(node: Node, parent_key: bytes) -> None:
    """Put a node under its parent; one whose parent is unknown under a bare one."""
    space = node.space
    head = space.root
    if parent_key != _NO_PARENT:
        key = PrefixKey(parent_key)
        head = space.nodes.get(key) or space.node(key, PrefixKey(b""))
    node.parent = head
    head.children[node.key] = node


def _keep_reachable(space: Space) -> int:
    """Set depths, and take out what cannot be reached from the root; counts the pages left."""
    windowed = [bool(shard.window_pages) for shard in space.shards]
    count = 0
    reached: dict[PrefixKey, Node] = {}
    queue = deque(space.root.children.values())
    while queue:
        node = queue.popleft()
        head = node.parent
        assert head is not None
        node.depth = head.depth + 1
        reached[node.key] = node
        for shard in list(node.disk):
            if head is not space.root and not windowed[shard] and shard not in head.disk:
                node.forget_disk(shard)
            else:
                count += 1
        queue.extend(node.children.values())
    for key in [key for key in space.nodes if key not in reached]:
        space.remove(space.nodes[key])
    for node in [node for node in reached.values() if not node.present and not node.children]:
        if node.parent is not None:
            space.prune(node)
    return count
