"""The prefix tree: which pages exist, what precedes them, and which one to evict next.

A **page** is one prefix key of one space, with the shards that ranks stored under that key. Pages
that are stored together and used together are one **node**, a run
(:class:`~kvstore.state.tree.node.PrefixNode`). The parent of a node ends with the key before it, so
that

* a page is evicted only after all its descendants (leaf-first), so the end of a prompt never
  outlives its beginning;
* using a page uses all pages before it: a use marks only the deepest page, the end of its node, and
  an evicted leaf passes its mark to its parent. The resulting order is exactly LRU.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvstore.protocol.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.tree.children import deepen_some, is_above
from kvstore.state.tree.cold_keys import ColdKeys
from kvstore.state.tree.column_checks import check_columns
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import record_bytes

DEPTHS_AT_ONCE = 128
"""Maximum nodes whose depth is corrected when one page comes. Pages that are put last first, each
with an unknown parent, would otherwise take time that grows with the square of their number."""
PARTS: Final = 256
"""Parts of a large index; one for each value of a key's first byte, which is random."""
SMALL: Final = 4096
"""Maximum entries of a single dict; the next one creates the parts, which takes about a
millisecond."""


class KeyIndex(Mapping[PrefixKey, PrefixNode]):
    """Which node has a key: a dict in parts, because growing a dict of millions takes too long.

    Keys of nodes that are only on disk are **cold**: they take an eighth of the memory, and finding
    them takes three times as long.

    Python copies a dict whenever it is full: for 1.4 million entries this took 56 ms, in which no
    request is answered. With parts, only one is copied at a time: with two million keys 0.5 ms (AMD
    EPYC).
    """

    __slots__ = ("_cold", "_length", "_parts")

    def __init__(self) -> None:
        self._parts: list[dict[PrefixKey, PrefixNode]] = [{}]
        self._cold = ColdKeys()
        #: Keys that are not cold.
        self._length = 0

    def __getitem__(self, key: PrefixKey) -> PrefixNode:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: PrefixKey, default: None = None) -> PrefixNode | None:  # type: ignore[override]  # noqa: ARG002
        """The node that contains the page of a key; None if there is none."""
        parts = self._parts
        found = (parts[key[0]] if len(parts) > 1 and key else parts[0]).get(key)
        return self._cold.get(key) if found is None and self._cold.count and key else found

    def put(self, keys: list[PrefixKey], node: PrefixNode) -> None:
        """Add a node under keys that are not there."""
        parts = self._parts
        for key in keys:
            (parts[key[0]] if len(parts) > 1 else parts[0])[key] = node
        self._length += len(keys)
        assert len(parts) > 1 or len(parts[0]) == self._length, ("a key was there already", node)
        if self._length > SMALL and len(parts) == 1:
            self._divide()

    def note(self, key: PrefixKey, node: PrefixNode) -> None:
        """Find a node by one of its keys until :meth:`settle`; nothing else is added before."""
        self._parts[0][key] = node

    def settle(self, nodes: list[PrefixNode]) -> None:
        """Find these nodes, all there are, by all of their keys; they are on disk only."""
        assert not self._length
        self._parts = [{}]
        self._cold.fill(nodes)

    def divide(self, node: PrefixNode, head: PrefixNode) -> None:
        """The first pages of a node, which are here, now belong to another one."""
        if node.cold:
            self._cold.assign(head.keys, node, head)
            return
        parts = self._parts
        for key in head.key_list():
            (parts[key[0]] if len(parts) > 1 else parts[0])[key] = head

    def discard(self, node: PrefixNode) -> None:
        """Remove the pages of a node."""
        if node.cold:
            self._cold.discard(node, node.key_list())
        else:
            self.remove(node.key_list())

    def remove(self, keys: list[PrefixKey]) -> None:
        """Remove keys of pages that are in memory, or were just now."""
        parts = self._parts
        for key in keys:
            del (parts[key[0]] if len(parts) > 1 else parts[0])[key]
        self._length -= len(keys)

    def cool(self, node: PrefixNode) -> None:
        """The pages of a node are now only on disk: store their keys compactly."""
        assert node.on_disk, node
        assert not node.memory, node
        keys = node.key_list()
        self.remove(keys)
        self._cold.put(node, keys)

    def warm(self, node: PrefixNode) -> None:
        """The pages of a cold node were loaded to memory."""
        assert node.cold, node
        keys = node.key_list()
        self._cold.discard(node, keys)
        self.put(keys, node)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.get(PrefixKey(key)) is not None

    def __len__(self) -> int:
        return self._length + self._cold.count

    def __iter__(self) -> Iterator[PrefixKey]:
        for part in self._parts:
            yield from part
        yield from self._cold

    def _part(self, key: PrefixKey) -> dict[PrefixKey, PrefixNode]:
        parts = self._parts
        return parts[key[0]] if len(parts) > 1 and key else parts[0]

    def _divide(self) -> None:
        (small,) = self._parts
        self._parts = [{} for _ in range(PARTS)]
        for key, value in small.items():
            self._part(key)[key] = value
        assert sum(map(len, self._parts)) == self._length


SHELF_NODES: Final = 256
"""Serial numbers of one chunk: the maximum pages that one step of a walk examines."""
_SHIFT: Final = SHELF_NODES.bit_length() - 1


class CreationOrder:
    """All nodes of one space by serial number, so that they can be listed in steps.

    A walk over a million nodes would block the state for too long, and a walk with pauses must
    neither miss a page nor show one twice while others are added and removed. So each page gets a
    serial number when it is created, and pages with neighbouring numbers share a **chunk**: a walk
    proceeds chunk by chunk, and needs to remember only the number of the next page. A page that
    exists during the whole walk is shown exactly once. A node of several pages has consecutive
    numbers of one chunk, and its pages keep theirs when it is split.
    """

    def __init__(self) -> None:
        #: chunk number → serial number of its first page → node; chunks are in ascending order,
        #: and none is empty.
        self._chunks: dict[int, dict[int, PrefixNode]] = {}
        self._next = 0

    def add(self, node: PrefixNode) -> None:
        """Give the pages of a new node their serial numbers."""
        serial, count = self._next, node.count
        if count > 1 and serial % SHELF_NODES + count > SHELF_NODES:
            serial = self.after(serial >> _SHIFT)
        node.serial = serial
        self._next = serial + count
        chunk = self._chunks.get(serial >> _SHIFT)
        if chunk is None:
            chunk = self._chunks[serial >> _SHIFT] = {}
        chunk[serial] = node

    def divide(self, node: PrefixNode, head: PrefixNode) -> None:
        """The first pages of a node now belong to ``head``."""
        chunk = self._chunks[node.serial >> _SHIFT]
        assert chunk[node.serial] is node, node
        head.serial = node.serial
        node.serial += head.count
        chunk[head.serial] = head
        chunk[node.serial] = node

    def remove(self, node: PrefixNode) -> None:
        """The node is removed from the tree."""
        number = node.serial >> _SHIFT
        chunk = self._chunks[number]
        assert chunk[node.serial] is node, node
        del chunk[node.serial]
        if not chunk:
            del self._chunks[number]

    def numbers(self, cursor: int) -> list[int]:
        """Numbers of the chunks that hold pages with serial numbers from ``cursor`` on."""
        every = list(self._chunks)
        return every[bisect_left(every, cursor >> _SHIFT) :]

    def nodes(self, number: int, cursor: int = 0) -> list[PrefixNode]:
        """The nodes of one chunk with pages from serial number ``cursor`` on, in order."""
        chunk = self._chunks.get(number, {})
        found = [node for node in chunk.values() if node.serial + node.count > cursor]
        found.sort(key=_serial)
        return found

    @staticmethod
    def after(number: int) -> int:
        """The first serial number after a chunk."""
        return number + 1 << _SHIFT


def _serial(node: PrefixNode) -> int:
    return node.serial


SHARD_LABEL_DIGITS = 16

CHILDREN_MAX = 512
"""Children of a node that one stretch of :meth:`PrefixTree.checks` examines together."""
ANCESTORS_MAX: Final = 256
"""Nodes before a page that are examined to find whether one of them is departing."""
STRETCH_WORK = 160
"""Maximum work of one stretch of several nodes, some 100 microseconds; see :func:`_work_of`."""


@dataclass(slots=True)
class Shard:
    """One shard of a space, as the node knows it; ``window_pages`` as in its ``spec``.

    Attributes:
        record_bytes: size of the record of a page on disk.
        label: hex digest of its ``spec``: the shard's name, equal on every node.
        event_label: the first digits of ``label``, its name in events.
    """

    spec: ShardSpec
    page_bytes: int
    slot_bytes: int
    window_pages: int = field(init=False)
    record_bytes: int = field(init=False)
    label: str = field(init=False)
    event_label: str = field(init=False)

    def __post_init__(self) -> None:
        self.window_pages = self.spec.window_pages
        self.label = self.spec.digest.hex()
        self.event_label = self.label[:SHARD_LABEL_DIGITS]
        self.record_bytes = record_bytes(self.page_bytes)


@dataclass(slots=True)
class PrefixTree:
    """One space: its identity, the shards that sessions declared and its pages.

    Attributes:
        number: names the space on this node's wire.
        index: key → the node that the page is part of, for all and only the pages below ``root``.
        nodes: the same as single pages: each one accessed becomes a node of its own.
        writing: all and only the nodes with a page that is being written.
        holes: nodes without a page of the shards of a mask, with descendants that are being
            dropped; see :mod:`kvstore.state.table.orphans`.
        departing: pages whose records of the shards of a mask leave the disk once those of all
            descendants have; none is written below them meanwhile.
        moved: nodes with children whose depth may not follow from theirs, because a parent was
            unknown for a time; see :func:`~kvstore.state.tree.children.deepen_some`.
        by_creation: the nodes of ``index`` in order of creation.
        shard_numbers: the position of each spec in ``shards``.
        needs: KV group → the window and the head size of all its shards.
        sessions: number of sessions that have it open.
        full_mask: bit i set = a hit needs the page of shard i for every key, not for the last few.
        changes: number of times a page was added to or removed from a tier, or a node got its
            parent.
        host_bytes: slot bytes of its pages in memory.
        disk_bytes: record bytes of its pages that are on disk or being written there.
        prefill_s_per_token: seconds to compute a token again, as last reported; 0 = unknown.
        leaving: the keys of chains that are being moved to other nodes, 32 bytes each: other
            nodes are no longer told that they are here.
        label: hex digest of the identity: the space's name in events and statistics.
        token_bytes: size of the tokens of a page, a uint32 each.
    """

    number: int
    identity: SpaceIdentity
    shards: list[Shard] = field(default_factory=list)
    index: KeyIndex = field(default_factory=KeyIndex)
    writing: set[PrefixNode] = field(default_factory=set)
    holes: dict[PrefixNode, int] = field(default_factory=dict)
    departing: dict[PrefixNode, int] = field(default_factory=dict)
    moved: dict[PrefixNode, Iterator[PrefixKey]] = field(default_factory=dict)
    by_creation: CreationOrder = field(default_factory=CreationOrder)
    shard_numbers: dict[ShardSpec, int] = field(default_factory=dict)
    needs: dict[str, tuple[int, int]] = field(default_factory=dict)
    sessions: int = 0
    full_mask: int = 0
    changes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    prefill_s_per_token: float = 0.0
    leaving: list[bytes] = field(default_factory=list)
    root: PrefixNode = field(init=False)
    nodes: "SinglePages" = field(init=False)
    label: str = field(init=False)
    token_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.label = self.identity.digest.hex()
        self.token_bytes = self.identity.page_tokens * 4
        self.root = PrefixNode(self, PrefixKey(b""), None)
        self.nodes = SinglePages(self)

    def node(self, key: PrefixKey, parent_key: PrefixKey) -> PrefixNode:
        """The page of ``key``, created if needed; an unknown parent is created as an empty node.

        An empty node without a parent is moved to its place once its parent is known.
        """
        found = self.nodes.get(key)
        parent = self.root
        if parent_key:
            parent = self.end(parent_key) or self.add(parent_key, self.root)
        if found is None:
            return self.add(key, parent)
        self.hang_up(found, parent)
        return found

    def hang_up(self, found: PrefixNode, parent: PrefixNode) -> None:
        """Attach a node to its parent, which was unknown before.

        The depths of all below it are corrected now and when further pages come.
        """
        if found.above is self.root and parent is not self.root and not is_above(found, parent):
            assert is_live(parent), parent
            del self.root.below[found.first]
            self.root.children_in_memory -= found.in_memory
            self.root.children_on_disk -= found.nears_disk
            found.hang(parent)
            self.changes += 1
            if found.in_memory:
                found.count_above(1)
            found.depth = parent.depth + found.count
            if found.below:
                self.moved[found] = iter(list(found.below))
            deepen_some(self.moved, DEPTHS_AT_ONCE)

    def end(self, key: PrefixKey) -> PrefixNode | None:
        """The node whose last page has a key; None if there is none."""
        found = self.index.get(key)
        if found is None or found.count == 1:
            return found
        at = found.position(key) + 1
        return found if at == found.count else found.split(at)

    def node_of(self, key: PrefixKey) -> PrefixNode:
        """The node that ends with a key; the root for the empty key, and for an unknown one."""
        return self.end(key) or self.root

    def exact(self, node: PrefixNode, offset: int, pages: int) -> PrefixNode:
        """A node with exactly ``pages`` pages of a node, from ``offset`` on."""
        if offset:
            node.split(offset)
        return node.split(pages) if pages < node.count else node

    def listed(self, number: int, cursor: int = 0) -> list[PrefixNode]:
        """The single pages of one chunk of ``by_creation`` from serial number ``cursor`` on."""
        for node in self.by_creation.nodes(number, cursor):
            node.explode()
        return self.by_creation.nodes(number, cursor)

    def shown(self, number: int, cursor: int = 0) -> list[PrefixNode]:
        """The same, read-only: runs are not split, and copies of their pages are returned."""
        return [
            page
            for node in self.by_creation.nodes(number, cursor)
            for page in node.copies()
            if page.serial >= cursor
        ]

    def divided(self, node: PrefixNode, head: PrefixNode) -> None:
        """A node of this tree was split; ``head`` is new."""
        assert node.above is head, node
        assert head.ready == node.ready, node
        self.index.divide(node, head)
        self.by_creation.divide(node, head)
        self.changes += 1
        if node in self.writing:
            self.writing.add(head)

    def contradicts(
        self, known: PrefixNode, key: PrefixKey, parent_key: PrefixKey, above: PrefixNode
    ) -> bool:
        """Whether a page is known to follow another page than ``parent_key``.

        A key is a hash of everything before it, so the client is wrong.

        Args:
            known: the node of this tree that contains the page.
            key: of the page.
            parent_key: the claimed parent.
            above: the deepest known node on the way to ``parent_key``, or that node itself.
        """
        position = known.position(key)
        before = known.key_before(position)
        if before is None or before == parent_key:
            return False
        if position or known.above is not self.root or known.present & self.full_mask:
            return True
        return is_above(known, above)

    def prune(self, node: PrefixNode) -> PrefixNode:
        """Remove ``node`` and its ancestors, as long as they have no pages and no children.

        Returns:
            the deepest ancestor that stays (at most the root).
        """
        while node is not self.root and not (node.present or node.below or node.children_in_memory):
            parent = node.above
            assert parent is not None, node
            del parent.below[node.first]
            self.index.discard(node)
            self.by_creation.remove(node)
            self.holes.pop(node, None)
            parent.access = max(parent.access, node.access)
            parent.hits += node.hits
            parent.uses += node.uses
            parent.used_ns = max(parent.used_ns, node.used_ns)
            node.above = None
            node = parent
        return node

    def fill_hole(self, node: PrefixNode, shard: int) -> None:
        """No page of ``shard`` is left below a hole."""
        _clear(self.holes, node, shard)

    def departed(self, node: PrefixNode, shard: int) -> None:
        """No record of ``shard`` is left of a departing page, nor below it."""
        _clear(self.departing, node, shard)

    def departs(self, node: PrefixNode) -> int:
        """The shards, as a mask, of which this page or one before it is departing.

        Of a page with too many before it all that can depart, as long as any page does.
        """
        at: PrefixNode | None = node
        mask = 0
        for _ in range(ANCESTORS_MAX if self.departing else 0):
            if at is None:
                return mask
            mask |= self.departing.get(at, 0)
            at = at.above
        return self.full_mask if self.departing else 0

    def checks(self, also: Callable[[PrefixNode], None]) -> Iterator[int]:
        """Assert every invariant, a stretch at a time; see :mod:`kvstore.state.table.invariants`.

        Args:
            also: asserts further invariants of a node.

        Yields:
            number of nodes examined.
        """
        changes, count, host_bytes, looked, work = self.changes, 0, 0, 0, 0
        #: Of nodes with too many children to look at together: those found in memory, and on disk.
        in_memory: Counter[PrefixNode] = Counter()
        on_disk: Counter[PrefixNode] = Counter()
        _check_children(self.root)
        for number in self.by_creation.numbers(0):
            for node in self.by_creation.nodes(number):
                more = _work_of(node)
                if work and work + more > STRETCH_WORK:
                    yield looked
                    looked = work = 0
                if not is_live(node):
                    continue
                work += more
                parent = self._check_node(node)
                also(node)
                host_bytes += node.count * sum(
                    self.shards[shard].slot_bytes for shard in node.slot_columns
                )
                if len(parent.below) > CHILDREN_MAX:
                    in_memory[parent] += node.in_memory
                    on_disk[parent] += node.nears_disk
                count += node.count
                looked += node.count
        yield looked
        if self.changes == changes:
            assert count == len(self.index), "a page that is not listed"
            assert self.host_bytes == host_bytes
            assert all(node.children_in_memory == found for node, found in in_memory.items())
            assert all(node.children_on_disk == found for node, found in on_disk.items())

    def _check_node(self, node: PrefixNode) -> PrefixNode:
        """Assert the invariants of a node of the tree; returns its parent."""
        parent = node.above
        assert parent is not None, node
        assert parent is self.root or self.index[parent.key] is parent, node
        assert parent.below[node.first] is node, node
        assert node.present or node.below, ("a bare leaf should have been pruned", node)
        assert node.depth == parent.depth + node.count or parent in self.moved, node
        assert node.present == node.memory | node.on_disk, node
        assert (node in self.writing) == (node.present != node.ready), node
        assert not node.present & self.holes.get(node, 0), ("a page in a hole", node)
        check_columns(node)
        _check_children(node)
        assert node.present >> len(self.shards) == 0, node
        assert not node.memory_only & ~node.ready, ("only a READY page is kept for a time", node)
        assert not node.read_once & ~node.memory_only, node
        assert all(node.memory_only >> shard & 1 for shard in node.expires), node
        assert not node.memory_only & node.on_disk, node
        return parent

    def add(self, key: PrefixKey, parent: PrefixNode | None = None) -> PrefixNode:
        """Create a node; without a parent, the caller attaches it later."""
        node = PrefixNode(self, key, parent)
        self.index.put([key], node)
        self.by_creation.add(node)
        return node

    def add_run(self, keys: list[PrefixKey], parent: PrefixNode) -> PrefixNode:
        """Create a node of consecutive pages; no page has one of their keys yet."""
        if self.moved:
            deepen_some(self.moved, DEPTHS_AT_ONCE)
        node = PrefixNode(self, b"".join(keys), parent, len(keys))
        self.index.put(keys, node)
        self.by_creation.add(node)
        return node

    def remove(self, node: PrefixNode) -> None:
        """Remove a node without children."""
        assert not node.below, node
        assert not node.present, node
        self.index.discard(node)
        self.by_creation.remove(node)
        node.above = None


class SinglePages(Mapping[PrefixKey, PrefixNode]):
    """The pages of a space by key; each one accessed becomes a node of its own.

    Args:
        space: the space.
    """

    __slots__ = ("_space",)

    def __init__(self, space: PrefixTree) -> None:
        self._space = space

    def __getitem__(self, key: PrefixKey) -> PrefixNode:
        found = self.get(key)
        if found is None:
            raise KeyError(key)
        return found

    def get(self, key: PrefixKey, default: None = None) -> PrefixNode | None:  # type: ignore[override]  # noqa: ARG002
        """The page of a key."""
        found = self._space.index.get(key)
        if found is None or found.count == 1:
            return found
        return self._space.exact(found, found.position(key), 1)

    def __contains__(self, key: object) -> bool:
        return key in self._space.index

    def __len__(self) -> int:
        return len(self._space.index)

    def __iter__(self) -> Iterator[PrefixKey]:
        return iter(self._space.index)


def _clear(masks: dict[PrefixNode, int], node: PrefixNode, shard: int) -> None:
    """Remove a shard from the mask of a node."""
    left = masks.pop(node, 0) & ~(1 << shard)
    if left:
        masks[node] = left


def _work_of(node: PrefixNode) -> int:
    """Work of checking a node: 4, and 1 for each key, slot and place, and for 4 children."""
    columns = 1 + len(node.slot_columns) + len(node.place_columns)
    children = len(node.below) // 4 if len(node.below) <= CHILDREN_MAX else 0
    return 4 + node.count * columns + children


def _check_children(node: PrefixNode) -> None:
    if len(node.below) <= CHILDREN_MAX:
        in_memory = sum(1 for child in node.below.values() if child.in_memory)
        assert node.children_in_memory == in_memory, node
        on_disk = sum(1 for child in node.below.values() if child.nears_disk)
        assert node.children_on_disk == on_disk, node
