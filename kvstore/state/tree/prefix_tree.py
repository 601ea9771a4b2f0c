"""The prefix tree: which pages exist, what precedes them, and which one to evict next.

A **node** stands for one prefix key of one space; its pages are the shards that ranks stored under
that key. Nodes hang under the node of the key before them, so that

* a page is evicted only when nothing that continues it is stored (leaf-first), hence the tail of a
  prompt never outlives its head unnoticed;
* using a page uses all that precede it: a touch marks only the deepest node, and an evicted leaf
  hands its mark to its parent. The order is exactly the one of least recent use.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple

from kvstore.page import PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.tree.keyindex import KeyIndex
from kvstore.state.tree.listing import CreationOrder
from kvstore.state.tree.places import Place, record_bytes
from kvstore.state.tree.slots import Slot

_NO_SLOTS: Final[Mapping[int, Slot]] = MappingProxyType({})
"""Of every node without a page in memory: a disk has millions of them."""
_NEVER: Final[Mapping[int, int]] = MappingProxyType({})
"""Of every node whose pages do not expire, as nearly all of them."""


class Retention(NamedTuple):
    """How long one page stays, and where it may be kept.

    Attributes:
        expires_ns: when it leaves the index by itself; 0 = never.
        read_once: it leaves the index when its first reader is done.
        memory_only: it never goes to disk; pages of the two other kinds do not either.
    """

    expires_ns: int = 0
    read_once: bool = False
    memory_only: bool = False


SHARD_LABEL_DIGITS: Final = 16

CHILDREN_MAX = 512
"""Children of a node that one stretch of :meth:`PrefixTree.checks` looks at together."""
STRETCH_WORK = 160
"""Of one stretch: some 100 microseconds. A node takes 4, each page of it 1, 4 children 1."""

ORDINARY: Final = Retention()
"""A page stays until something else needs its room, in any tier."""


class PrefixNode:
    """One prefix key of one space.

    Attributes:
        parent: the node of the key before this one; the space's root for the first page.
        children: nodes that continue this one.
        slots: shard number → slot, for every page of this node that is WRITING or READY in memory.
        disk: shard number → place in the SSD log, for every page that was written there.
        digests: shard number → digest, for all and only the READY pages.
        tokens: of the page, uint32 little-endian, if they are known and a page of it is in memory;
            else empty. On disk they are in its records.
        memory: bit i set = the page of shard i has a slot.
        present: bit i set = the page of shard i is WRITING or READY, in whatever tier.
        ready: bit i set = the page of shard i is READY, in whatever tier.
        children_in_memory: children that have slots or lead to nodes that do.
        depth: nodes between this one and the root, itself included.
        access: tick of the last use of this node or of a descendant that is gone.
        uses: requests whose prefix ended here, or at a descendant that is gone.
        turns: requests that extended this node's prefix, one after the other, before it was stored.
        branches: nodes that ever continued this one.
        use_interval: fewest ticks from a request to one that extended it; 0 = not known.
        pages_added: nodes up to this one that the request which stored it had to store.
        ask_depth: how deep the page must not be to be asked about again, once refused; 0 = ask.
        deepest: its depth, or that of the descendants that eviction took before it.
        expires: shard number → when that page leaves the index by itself; others never do.
        read_once: bit i set = the page of shard i leaves the index when its first reader is done.
        memory_only: bit i set = the page of shard i never goes to disk.
        queued: slot sizes of the eviction policies in which an entry stands for this node.
        hits: lookups and acquires that ended here, or at a descendant that is gone.
        stored_ns: when a page of it last became READY; 0 = not in this life of the node.
        used_ns: when the last of ``hits`` was; 0 = never.
        memory_pins: operator pins that keep its pages in memory.
        disk_pins: operator pins that keep its pages on disk.
        serial: its place in the space's order of creation.
    """

    __slots__ = (
        "access",
        "ask_depth",
        "branches",
        "children",
        "children_in_memory",
        "deepest",
        "depth",
        "digests",
        "disk",
        "disk_pins",
        "expires",
        "hits",
        "key",
        "memory",
        "memory_only",
        "memory_pins",
        "pages_added",
        "parent",
        "present",
        "queued",
        "read_once",
        "ready",
        "serial",
        "slots",
        "space",
        "stored_ns",
        "tokens",
        "turns",
        "use_interval",
        "used_ns",
        "uses",
    )  # fmt: skip

    def __init__(self, space: "PrefixTree", key: PrefixKey, parent: "PrefixNode | None") -> None:
        """Make a node without pages and hang it under its parent."""
        self.space = space
        self.key = key
        self.parent = parent
        self.children: dict[PrefixKey, PrefixNode] = {}
        self.children_in_memory = 0
        self.slots: Mapping[int, Slot] = _NO_SLOTS
        self.disk: dict[int, Place] = {}
        self.digests: dict[int, bytes] = {}
        self.tokens = b""
        self.memory = 0
        self.present = 0
        self.ready = 0
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.access = 0
        self.expires = _NEVER
        self.read_once = 0
        self.memory_only = 0
        self.queued: tuple[int, ...] = ()
        self.hits = self.stored_ns = self.used_ns = self.serial = 0
        self.memory_pins = self.disk_pins = 0
        self.uses = self.turns = self.branches = self.use_interval = self.pages_added = (
            self.ask_depth
        ) = 0
        self.deepest = self.depth
        if parent is not None:
            parent.children[key] = self
            parent.branches += 1

    @property
    def pins(self) -> int:
        """Operator pins that cover this node."""
        return self.memory_pins + self.disk_pins

    def begin(self, shard: int, slot: Slot) -> None:
        """The page of ``shard``, in no tier yet, is being written to ``slot``."""
        assert not self.present >> shard & 1
        self._enter_memory(shard, slot)
        self.present |= 1 << shard
        self.space.writing.add(self)

    def fill(self, shard: int, slot: Slot) -> None:
        """The page of ``shard``, which is in memory, has this slot from now on."""
        self.slots = {**self.slots, shard: slot}
        self.memory |= 1 << shard

    def learn(self, tokens: bytes) -> None:
        """Keep the tokens of a page in memory: the first that are given, if they are one page's."""
        if not self.tokens and len(tokens) == self.space.token_bytes and self.slots:
            self.tokens = tokens

    def commit(self, shard: int, digest: bytes, keep: Retention = ORDINARY) -> None:
        """The page of ``shard`` is READY."""
        assert self.present >> shard & 1
        self.digests[shard] = digest
        if keep != ORDINARY:
            bit = 1 << shard
            self.memory_only |= bit
            if keep.read_once:
                self.read_once |= bit
            if keep.expires_ns:
                self.expires = {**self.expires, shard: keep.expires_ns}
        self.ready |= 1 << shard
        self._settle()

    def promote(self, shard: int, slot: Slot) -> None:
        """The page of ``shard``, so far only on disk, is READY in ``slot`` too."""
        assert shard in self.disk
        assert shard not in self.slots
        self._enter_memory(shard, slot)

    def demote(self, shard: int, place: Place) -> None:
        """The READY page of ``shard`` is on disk too."""
        assert self.ready >> shard & 1
        self.space.changes += 1
        self.disk[shard] = place

    def adopt(self, shard: int, place: Place, digest: bytes) -> None:
        """The page of ``shard`` was found on disk at start-up."""
        self.disk[shard] = place
        self.digests[shard] = digest
        self.present |= 1 << shard
        self.ready = self.present

    def forget(self, shard: int) -> Slot:
        """The page of ``shard`` is no longer in memory; returns its slot."""
        slot = self.slots[shard]
        self.space.changes += 1
        self.slots = {at: of for at, of in self.slots.items() if at != shard} or _NO_SLOTS
        self.memory &= ~(1 << shard)
        self.space.host_bytes -= self.space.shards[shard].slot_bytes
        if not self.slots:
            self.tokens = b""
        if not self.in_memory:
            self._count_above(-1)
        self._leave(shard)
        return slot

    def forget_disk(self, shard: int) -> Place:
        """The page of ``shard`` is no longer on disk; returns where it was."""
        place = self.disk.pop(shard)
        self.space.changes += 1
        self.space.disk_bytes -= self.space.shards[shard].record_bytes
        self._leave(shard)
        return place

    def _enter_memory(self, shard: int, slot: Slot) -> None:
        if not self.in_memory:
            self._count_above(1)
        self.fill(shard, slot)
        self.space.changes += 1
        self.space.host_bytes += self.space.shards[shard].slot_bytes

    def hold(self) -> None:
        """Pages that continue it are about to come: it is no leaf, and stays, until then."""
        if not self.in_memory:
            self._count_above(1)
        self.children_in_memory += 1

    def unhold(self) -> None:
        """They have come, or will not."""
        self.children_in_memory -= 1
        if not self.in_memory:
            self._count_above(-1)

    @property
    def in_memory(self) -> bool:
        """Whether this node or any below it has slots."""
        return bool(self.slots) or self.children_in_memory > 0

    def _count_above(self, change: int) -> None:
        """Tell the ancestors that something here came to memory (1) or left it (-1)."""
        at = self.parent
        while at is not None:
            before = at.in_memory
            at.children_in_memory += change
            if at.in_memory == before:
                return
            at = at.parent

    def _leave(self, shard: int) -> None:
        if shard in self.slots or shard in self.disk:
            return
        bit = 1 << shard
        self.present &= ~bit
        self.ready &= ~bit
        self.read_once &= ~bit
        self.memory_only &= ~bit
        if shard in self.expires:
            self.expires = {at: ns for at, ns in self.expires.items() if at != shard} or _NEVER
        self.digests.pop(shard, None)
        self._settle()

    def _settle(self) -> None:
        if self.present == self.ready:
            self.space.writing.discard(self)


@dataclass(slots=True)
class Shard:
    """One shard of a space, as the node knows it; ``window_pages`` as in its ``spec``.

    Attributes:
        record_bytes: what a page of it takes on disk.
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
        nodes: all and only the nodes below ``root``.
        writing: all and only the nodes with a page that is being written.
        holes: nodes without a page of the shards of a mask, below which there are pages of them
            that are leaving; see :mod:`kvstore.state.table.orphans`.
        by_creation: the nodes of ``nodes`` in the order they were made.
        shard_numbers: the position of each spec in ``shards``.
        needs: KV group → the window and the head size that all its shards have.
        sessions: how many have it open.
        full_mask: bit i set = a hit needs the page of shard i for every key, not for the last few.
        changes: how often a page came to a tier or left it, or a node found its parent.
        host_bytes: slot bytes of its pages in memory.
        disk_bytes: record bytes of its pages that are on disk or being written there.
        prefill_s_per_token: what computing a token again costs, as told last; 0 = not known.
        label: hex digest of the identity: the space's name in events and statistics.
        token_bytes: what the tokens of a page take, a uint32 each.
    """

    number: int
    identity: SpaceIdentity
    shards: list[Shard] = field(default_factory=list)
    nodes: KeyIndex[PrefixNode] = field(default_factory=KeyIndex)
    writing: set[PrefixNode] = field(default_factory=set)
    holes: dict[PrefixNode, int] = field(default_factory=dict)
    by_creation: CreationOrder[PrefixNode] = field(default_factory=CreationOrder)
    shard_numbers: dict[ShardSpec, int] = field(default_factory=dict)
    needs: dict[str, tuple[int, int]] = field(default_factory=dict)
    sessions: int = 0
    full_mask: int = 0
    changes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    prefill_s_per_token: float = 0.0
    root: PrefixNode = field(init=False)
    label: str = field(init=False)
    token_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.label = self.identity.digest.hex()
        self.token_bytes = self.identity.page_tokens * 4
        self.root = PrefixNode(self, PrefixKey(b""), None)

    def node(self, key: PrefixKey, parent_key: PrefixKey) -> PrefixNode:
        """The node of ``key``, made if need be; an unknown parent is made as a bare node.

        A bare node whose own parent was unknown is moved to its place once that is told.
        """
        found = self.nodes.get(key)
        parent = self.root
        if parent_key:
            parent = self.nodes.get(parent_key) or self.add(parent_key, self.root)
        if found is None:
            return self.add(key, parent)
        if found.parent is self.root and parent is not self.root and not self._above(found, parent):
            del self.root.children[key]
            self.root.children_in_memory -= found.in_memory
            found.parent = parent
            parent.children[key] = found
            self.changes += 1
            if found.in_memory:
                found._count_above(1)  # noqa: SLF001
            deepen(found)
        return found

    def node_of(self, key: PrefixKey) -> PrefixNode:
        """The node of a key; the root for the empty key, and for one that is not known."""
        return self.nodes.get(key) or self.root

    def contradicts(self, known: PrefixNode, parent_key: PrefixKey, above: PrefixNode) -> bool:
        """Whether a node cannot follow ``parent_key``: it is known to follow another one.

        A key is a hash of all before it, so this is a mistake of whoever says so.

        Args:
            known: a node of this tree.
            parent_key: what it is said to follow.
            above: the deepest node that is known on the way to ``parent_key``, itself included.
        """
        if known.parent is None or known.parent.key == parent_key:
            return False
        if known.parent is not self.root or known.present & self.full_mask:
            return True
        return self._above(known, above)

    def prune(self, node: PrefixNode) -> PrefixNode:
        """Remove ``node`` and its ancestors as far as they hold and lead to nothing.

        Returns:
            the deepest ancestor that stays (the root at last).
        """
        while node is not self.root and not (
            node.present or node.children or node.children_in_memory
        ):
            parent = node.parent
            assert parent is not None
            del self.nodes[node.key]
            del parent.children[node.key]
            self.by_creation.remove(node)
            self.holes.pop(node, None)
            parent.access = max(parent.access, node.access)
            parent.hits += node.hits
            parent.uses += node.uses
            parent.used_ns = max(parent.used_ns, node.used_ns)
            node.parent = None
            node = parent
        return node

    def fill_hole(self, node: PrefixNode, shard: int) -> None:
        """Nothing of ``shard`` is below a hole any more."""
        left = self.holes.pop(node, 0) & ~(1 << shard)
        if left:
            self.holes[node] = left

    def checks(self, also: Callable[[PrefixNode], None]) -> Iterator[int]:
        """Assert every invariant, a stretch at a time; see :mod:`kvstore.state.table.invariants`.

        Args:
            also: asserts what else must hold of a node.

        Yields:
            how many nodes were looked at.
        """
        changes, count, host_bytes, looked, work = self.changes, 0, 0, 0, 0
        #: Of nodes with too many children to look at together: those found in memory.
        counted: Counter[PrefixNode] = Counter()
        _check_children(self.root)
        for number in self.by_creation.numbers(0):
            for node in self.by_creation.nodes(number):
                if not is_live(node):
                    continue
                parent = self._check_node(node)
                also(node)
                host_bytes += sum(self.shards[shard].slot_bytes for shard in node.slots)
                if len(parent.children) > CHILDREN_MAX:
                    counted[parent] += node.in_memory
                count += 1
                looked += 1
                work += 4 + len(node.slots) + len(node.disk)
                work += len(node.children) // 4 if len(node.children) <= CHILDREN_MAX else 0
                if work >= STRETCH_WORK:
                    yield looked
                    looked = work = 0
        yield looked
        if self.changes == changes:
            assert count == len(self.nodes), "a node that is not listed"
            assert self.host_bytes == host_bytes
            assert all(node.children_in_memory == found for node, found in counted.items())

    def _check_node(self, node: PrefixNode) -> PrefixNode:
        """Assert what must hold of a node of the tree; returns its parent."""
        parent = node.parent
        assert parent is not None
        assert self.nodes[node.key] is node
        assert parent is self.root or self.nodes[parent.key] is parent
        assert parent.children[node.key] is node
        assert node.present or node.children, "a bare leaf should have been pruned"
        assert node.depth == parent.depth + 1
        assert node.present == sum(1 << shard for shard in {*node.slots, *node.disk})
        assert (node in self.writing) == (node.present != node.ready)
        assert node.memory == sum(1 << shard for shard in node.slots)
        assert node.ready == sum(1 << shard for shard in node.digests)
        assert not node.tokens or (node.slots and len(node.tokens) == self.token_bytes)
        assert not node.present & self.holes.get(node, 0), "a page in a hole"
        _check_children(node)
        assert node.present >> len(self.shards) == 0
        assert not node.memory_only & ~node.ready, "only a READY page is kept for a time"
        assert not node.read_once & ~node.memory_only
        assert all(node.memory_only >> shard & 1 for shard in node.expires)
        assert not any(node.memory_only >> shard & 1 for shard in node.disk)
        return parent

    def add(self, key: PrefixKey, parent: PrefixNode | None = None) -> PrefixNode:
        """Make a node; without a parent it hangs nowhere yet, which the caller sees to."""
        node = self.nodes[key] = PrefixNode(self, key, parent)
        self.by_creation.add(node)
        return node

    def remove(self, node: PrefixNode) -> None:
        """Forget a node that nothing leads to."""
        del self.nodes[node.key]
        self.by_creation.remove(node)
        node.parent = None

    def _above(self, node: PrefixNode, other: PrefixNode) -> bool:
        """Whether ``node`` is ``other`` or above it (a forged parent could make a ring)."""
        at: PrefixNode | None = other
        while at is not None:
            if at is node:
                return True
            at = at.parent
        return False


def _check_children(node: PrefixNode) -> None:
    if len(node.children) <= CHILDREN_MAX:
        in_memory = sum(1 for child in node.children.values() if child.in_memory)
        assert node.children_in_memory == in_memory


def deepen(node: PrefixNode) -> None:
    """Correct the depths below a node that was moved."""
    moved = [node]
    for at in moved:
        assert at.parent is not None
        at.depth = at.parent.depth + 1
        moved.extend(at.children.values())


def is_live(node: PrefixNode) -> bool:
    """Whether the node is still in its tree (the root always is)."""
    return node.parent is not None or node is node.space.root
