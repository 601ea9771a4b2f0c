"""Nodes of the prefix tree: each is a run of pages of one prefix. Pure."""

from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.protocol.page import DIGEST_BYTES, KEY_BYTES, PrefixKey
from kvstore.state.tree.children import Children
from kvstore.state.tree.columns import (
    PLACE_COLUMN,
    SLOT_COLUMN,
    between,
    leading,
    no_columns,
    pack_slots,
    replace_place,
    trailing,
    unpack_place,
    unpack_slots,
    with_column,
    without,
)
from kvstore.state.tree.places import Place, Tier
from kvstore.state.tree.slots import Slot

if TYPE_CHECKING:
    from kvstore.state.tree.prefix_tree import PrefixTree

RUN_PAGES_MAX = 128
"""Maximum pages of a run: splitting it into single pages takes about half a millisecond."""
TOKENS_SHARE: Final = 16
"""Tokens take at most this part of the slots of their page: an engine may choose small pages of
many tokens, and nothing else limits the memory of those."""
_NEVER: Final[dict[int, int]] = {}
"""Shared by all nodes whose pages do not expire, which are nearly all; never changed."""


class Retention(NamedTuple):
    """How long a page is kept, and where.

    Attributes:
        expires_ns: when it is dropped; 0 = never.
        read_once: it is dropped after its first read.
        memory_only: it is never written to disk; pages of the other two kinds are not either.
    """

    expires_ns: int = 0
    read_once: bool = False
    memory_only: bool = False


ORDINARY: Final = Retention()
"""A page is kept until its room is needed, in any tier."""


_NOTHING: Final["dict[PrefixKey, PrefixNode]"] = {}
"""Shared by all nodes without children; never changed."""


class PrefixNode:
    """A run: consecutive pages of one prefix with the same properties, each the only child so far.

    Uses, evictions and branches happen at the end of a run: a run is split where one happens in the
    middle. So only keys, slots, digests, tokens and places are stored per page, in columns;
    everything else describes all pages, or the **last** page, as marked. A split creates a new
    node for the leading pages; the last page keeps its node.

    Rarely used code may treat every node as one page: :attr:`PrefixTree.nodes`, :attr:`parent` and
    :attr:`children` split the nodes that they return into single pages. ``slots``, ``disk`` and
    ``digests`` are those of a single page.

    Attributes:
        keys: of its pages, 32 bytes each.
        count: number of its pages.
        above: the node of the page before the first one; the space's root for a chain's start.
        below: key → child nodes, which start with it and continue the last page; read-only.
        slot_columns: shard number → 8 bytes of each page's slot, for every shard in memory.
        place_columns: shard number → 16 bytes of each page's place in the SSD log.
        digest_columns: shard number → digest of each page, for all and only the READY pages.
        tokens: of its pages, uint32 little-endian, if those of all are known and it is in memory;
            else empty. On disk they are in its records.
        memory: bit i set = the pages of shard i have slots.
        on_disk: bit i set = the pages of shard i have places.
        present: bit i set = the pages of shard i are WRITING or READY, in any tier.
        ready: bit i set = the pages of shard i are READY, in any tier.
        to_disk: bit i set = the pages of shard i are being written to the SSD log.
        children_in_memory: number of children that have slots, or descendants with slots.
        children_on_disk: number of children that have places, or are being written to get some.
        cold: its number among the cold keys of the space's index: its pages are on disk only; else
            0.
        depth: pages up to the last one, itself included.
        access: tick of the last use of the last page or of a descendant that was removed.
        uses: requests whose prefix ended at the last page, or at a descendant that was removed;
            none ended at a page before it.
        turns: requests that extended this node's prefix, one after the other, before it was stored.
        branches: number of children that the last page ever had.
        use_interval: minimum ticks from a request to one that extended it; 0 = unknown.
        pages_added: pages that the request which stored the last page stored, up to that page.
        ask_depth: after admission rejected the page: maximum depth to ask again; 0 = ask.
        deepest: its depth, or that of its deepest evicted descendant.
        expires: shard number → when that page expires; others never do.
        read_once: bit i set = the page of shard i is dropped after its first read.
        memory_only: bit i set = the page of shard i is never written to disk. Such pages, and
            those that expire, are nodes of one page.
        replica: its READY pages were read from a peer, and no client of this node put them: the
            number of the peer's boot, see :class:`kvstore.state.choice.sources.Sources`; else 0.
        queued: slot sizes of the eviction queues that have an entry for this node.
        hits: lookups and acquires whose last hit page was its last page, or a removed descendant.
        stored_ns: when a page of it last became READY; 0 = not in this life of the node.
        used_ns: time of the last of ``hits``; 0 = never.
        memory_pins: operator pins that keep its pages in memory; pinned nodes are of one page.
        disk_pins: operator pins that keep its pages on disk.
        serial: the first page's number in the space's order of creation; the others follow.
    """

    __slots__ = (
        "above", "access", "ask_depth", "below", "branches", "children_in_memory",
        "children_on_disk", "cold", "count", "deepest", "depth", "digest_columns", "disk_pins",
        "expires", "hits", "keys", "memory", "memory_only", "memory_pins", "on_disk",
        "pages_added", "place_columns", "present", "queued", "read_once", "ready", "replica",
        "serial", "slot_columns", "space", "stored_ns", "to_disk", "tokens", "turns",
        "use_interval", "used_ns", "uses",
    )  # fmt: skip

    def __init__(
        self, space: "PrefixTree", keys: bytes, above: "PrefixNode | None", count: int = 1
    ) -> None:
        """Create a node without slots, as a child of the node of the preceding page."""
        self.space, self.keys, self.count = space, keys, count
        self.above: PrefixNode | None = None
        self.below: dict[PrefixKey, PrefixNode] = _NOTHING
        self.children_in_memory = self.children_on_disk = 0
        self.cold = self.access = self.replica = 0
        self.slot_columns: dict[int, bytes] = no_columns()
        self.place_columns: dict[int, bytes] = no_columns()
        self.digest_columns: dict[int, bytes] = no_columns()
        self.tokens, self.expires = b"", _NEVER
        self.memory = self.on_disk = self.to_disk = self.present = self.ready = 0
        self.depth: int = above.depth + count if above is not None else 0
        self.read_once = self.memory_only = self.memory_pins = self.disk_pins = 0
        self.queued: tuple[int, ...] = ()
        self.uses = self.turns = self.branches = self.use_interval = self.pages_added = 0
        self.hits = self.stored_ns = self.used_ns = self.serial = self.ask_depth = 0
        self.deepest = self.depth
        if above is not None:
            self.hang(above)
            above.branches += 1

    def __repr__(self) -> str:
        """Its last page, as a failed assertion names it."""
        last, space = self.keys[-KEY_BYTES:].hex()[:16], self.space.number
        return f"<node {last} of space {space}: {self.count} pages up to depth {self.depth}>"

    def hang(self, above: "PrefixNode") -> None:
        """Make this node a child of another one; the caller corrects the depths."""
        first = self.first
        assert first not in above.below, "two children with one key"
        self.above = above
        if above.below is _NOTHING:
            above.below = {}
        above.below[first] = self
        above.children_on_disk += (self.on_disk | self.to_disk) > 0

    # ---- keys -------------------------------------------------------------------------------

    @property
    def key(self) -> PrefixKey:
        """The key of the last page."""
        return PrefixKey(self.keys if self.count == 1 else self.keys[-KEY_BYTES:])

    @property
    def first(self) -> PrefixKey:
        """The key of the first page."""
        return PrefixKey(self.keys if self.count == 1 else self.keys[:KEY_BYTES])

    @property
    def first_depth(self) -> int:
        """Number of pages up to the first one, including it."""
        return self.depth - self.count + 1

    def key_list(self, first: int = 0) -> list[PrefixKey]:
        """The keys of its pages from index ``first`` on."""
        if self.count == 1:
            return [PrefixKey(self.keys)]
        keys = self.keys
        return [
            PrefixKey(keys[at : at + KEY_BYTES])
            for at in range(first * KEY_BYTES, len(keys), KEY_BYTES)
        ]

    def key_at(self, position: int) -> PrefixKey:
        """The key of the page at ``position``."""
        return PrefixKey(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    def key_before(self, position: int) -> PrefixKey | None:
        """The key of the page before ``position``; None if the node has no parent yet."""
        if position:
            return PrefixKey(self.keys[(position - 1) * KEY_BYTES : position * KEY_BYTES])
        return self.above.key if self.above is not None else None

    def position(self, key: PrefixKey) -> int:
        """The position of the page with this key; one has it."""
        if self.count == 1 or self.keys.startswith(key):
            return 0
        at = self.keys.rfind(key)  # from the end: the last page is asked for most
        while at % KEY_BYTES:
            at = self.keys.rfind(key, 0, at + KEY_BYTES - 1)
        return at // KEY_BYTES

    def matching(self, offset: int, packed: bytes, at: int) -> int:
        """How many of its pages from ``offset`` on match the keys from byte ``at`` on."""
        if not offset and packed.startswith(self.keys, at):
            return self.count
        most = min(self.count - offset, (len(packed) - at) // KEY_BYTES)
        mine = self.keys[offset * KEY_BYTES : (offset + most) * KEY_BYTES]
        if packed.startswith(mine, at):
            return most
        end = 0
        while mine[end : end + KEY_BYTES] == packed[at + end : at + end + KEY_BYTES]:
            end += KEY_BYTES
        return end // KEY_BYTES

    # ---- single pages -----------------------------------------------------------------------

    @property
    def parent(self) -> "PrefixNode | None":
        """The page before the first one, split off as a node of its own."""
        above = self.above
        if above is not None and above.count > 1:
            above.explode()
        return above

    @property
    def children(self) -> Children:
        """The pages that continue the last one, each as a node of its own once accessed."""
        return Children(self)

    def tiers(self, shard: int) -> tuple[Tier, ...]:
        """The tiers in which its pages of a shard are, or are being written."""
        here: tuple[Tier, ...] = ("host",) if self.memory >> shard & 1 else ()
        return (*here, "ssd") if self.on_disk >> shard & 1 else here

    @property
    def slots(self) -> dict[int, Slot]:
        """Shard number → slot of a single page, for each shard in memory."""
        assert self.count == 1
        return {at: Slot(int.from_bytes(of, "little")) for at, of in self.slot_columns.items()}

    @property
    def disk(self) -> dict[int, Place]:
        """Shard number → place of a single page, for each shard on disk."""
        assert self.count == 1
        return {at: unpack_place(column) for at, column in self.place_columns.items()}

    @property
    def digests(self) -> dict[int, bytes]:
        """Shard number → digest of a single page, for each shard that is READY."""
        assert self.count == 1
        return self.digest_columns

    def slot(self, shard: int) -> Slot:
        """The slot of a single page, which is in memory."""
        assert self.count == 1
        return Slot(int.from_bytes(self.slot_columns[shard], "little"))

    def place(self, shard: int) -> Place:
        """The place of a single page, which is on disk."""
        assert self.count == 1
        return unpack_place(self.place_columns[shard])

    def digest_at(self, shard: int, position: int) -> bytes:
        """The digest of one of its pages, which are READY."""
        at = position * DIGEST_BYTES
        return self.digest_columns[shard][at : at + DIGEST_BYTES]

    def place_at(self, shard: int, position: int) -> Place:
        """The place of one of its pages, which are on disk."""
        return unpack_place(self.place_columns[shard], position)

    def slots_of(self, shard: int) -> list[Slot]:
        """The slots of its pages, which are in memory."""
        return unpack_slots(self.slot_columns[shard])

    # ---- runs -------------------------------------------------------------------------------

    def split(self, at: int) -> "PrefixNode":
        """Split off the first ``at`` pages as a node above this one; returns it."""
        assert 0 < at < self.count
        assert not self.pins
        assert self.above is not None
        space, rest = self.space, self.count - at
        head = PrefixNode(space, self.keys[: at * KEY_BYTES], None, at)
        self.above.below[head.first] = head
        self._describe(head, 0)
        head.above, self.above = self.above, head
        self.keys, self.count = self.keys[at * KEY_BYTES :], rest
        head.below = {self.first: self}
        head.children_in_memory = int(self.in_memory)
        head.children_on_disk = int(self.nears_disk)
        self.slot_columns = trailing(self.slot_columns, at * SLOT_COLUMN)
        self.place_columns = trailing(self.place_columns, at * PLACE_COLUMN)
        self.digest_columns = trailing(self.digest_columns, at * DIGEST_BYTES)
        self.tokens = self.tokens[at * space.token_bytes :]
        space.divided(self, head)
        return head

    def _describe(self, head: "PrefixNode", first: int) -> None:
        """Copy the properties of my pages from ``first`` on to another node."""
        at = first + head.count
        rest = self.count - at
        head.slot_columns = between(self.slot_columns, first * SLOT_COLUMN, at * SLOT_COLUMN)
        head.place_columns = between(self.place_columns, first * PLACE_COLUMN, at * PLACE_COLUMN)
        head.digest_columns = between(self.digest_columns, first * DIGEST_BYTES, at * DIGEST_BYTES)
        size = self.space.token_bytes
        head.tokens = self.tokens[first * size : at * size]
        head.memory, head.on_disk, head.to_disk = self.memory, self.on_disk, self.to_disk
        head.present, head.ready, head.replica = self.present, self.ready, self.replica
        head.expires, head.read_once, head.memory_only = (
            self.expires, self.read_once, self.memory_only,
        )  # fmt: skip
        head.depth = head.deepest = self.depth - rest
        head.access, head.stored_ns, head.ask_depth = self.access, self.stored_ns, self.ask_depth
        head.turns, head.use_interval, head.branches = self.turns, self.use_interval, 1
        head.pages_added = max(0, self.pages_added - rest)
        head.serial = self.serial + first

    def copies(self) -> list["PrefixNode"]:
        """Copies of its pages as single nodes, read-only: they are in no tree."""
        if self.count == 1:
            return [self]
        found: list[PrefixNode] = []
        above = self.above
        for at, key in enumerate(self.key_list()):
            page = PrefixNode(self.space, key, None)
            self._describe(page, at)
            page.above = above
            if above is not None and found:
                above.below = {key: page}
            found.append(page)
            above = page
        last = found[-1]
        last.below, last.branches, last.pages_added = self.below, self.branches, self.pages_added
        last.hits, last.uses, last.used_ns = self.hits, self.uses, self.used_ns
        return found

    def explode(self) -> None:
        """Split it into single pages; this node keeps the last one."""
        while self.count > 1:
            self.split(1)

    def singles(self) -> list["PrefixNode"]:
        """Split it into single pages; returns them in order."""
        count = self.count
        self.explode()
        found = [self]
        while len(found) < count:
            above = found[-1].above
            assert above is not None
            found.append(above)
        found.reverse()
        return found

    def shorten(self, keys: list[PrefixKey]) -> None:
        """Remove the last pages, of these keys, which were dropped; more are left, and no child."""
        space, pages, left = self.space, len(keys), self.count - len(keys)
        assert 0 < pages < self.count
        assert not self.below
        assert not self.on_disk
        space.changes += 1
        for shard in self.slot_columns:
            space.host_bytes -= pages * space.shards[shard].slot_bytes
        self.slot_columns = leading(self.slot_columns, left * SLOT_COLUMN)
        self.digest_columns = leading(self.digest_columns, left * DIGEST_BYTES)
        self.tokens = self.tokens[: left * space.token_bytes]
        space.index.remove(keys)
        self.keys = self.keys[: left * KEY_BYTES]
        self.count = left
        self.depth -= pages
        self.branches = max(1, self.branches)

    @property
    def pins(self) -> int:
        """Number of operator pins that cover this node."""
        return self.memory_pins + self.disk_pins

    def begin(self, shard: int, slot: Slot) -> None:
        """The page of ``shard``, in no tier yet, is being written to ``slot``."""
        self.begin_all(shard, pack_slots([slot]))

    def begin_all(self, shard: int, slots: bytes) -> None:
        """The pages of ``shard``, in no tier yet, are being written to the slots of a column."""
        assert not self.present >> shard & 1
        self._enter_memory(shard, slots)
        self.present |= 1 << shard
        self.space.writing.add(self)

    def learn(self, tokens: bytes) -> None:
        """Keep the leading tokens of its pages in memory, if there are enough, and not too many."""
        right = len(tokens) == self.space.token_bytes * self.count
        if tokens and not self.tokens and right and self._has_room_for_tokens():
            self.tokens = tokens

    def _has_room_for_tokens(self) -> bool:
        shards = self.space.shards
        slot_bytes = sum([shards[shard].slot_bytes for shard in self.slot_columns])
        return self.space.token_bytes * TOKENS_SHARE <= slot_bytes

    def commit(self, shard: int, digests: bytes, keep: Retention = ORDINARY) -> None:
        """The pages of ``shard`` are READY; ``digests`` are packed."""
        assert self.present & ~self.ready & 1 << shard, "only a page that is being written"
        assert len(digests) == self.count * DIGEST_BYTES
        self.digest_columns = with_column(self.digest_columns, shard, digests)
        if keep is not ORDINARY and keep != ORDINARY:
            assert self.count == 1
            bit = 1 << shard
            self.memory_only |= bit
            if keep.read_once:
                self.read_once |= bit
            if keep.expires_ns:
                self.expires = {**self.expires, shard: keep.expires_ns}
        self.ready |= 1 << shard
        self._settle()

    def promote(self, shard: int, slots: bytes) -> None:
        """The pages of ``shard``, only on disk so far, are also READY in the slots of a column."""
        assert self.on_disk >> shard & 1
        self._enter_memory(shard, slots)

    def demote(self, shard: int, places: bytes) -> None:
        """The READY pages of ``shard`` are also on disk, at the places of a column."""
        assert self.ready >> shard & 1
        assert len(places) == self.count * PLACE_COLUMN
        self.place_columns = with_column(self.place_columns, shard, places)
        self._set_disk(self.on_disk | 1 << shard, self.to_disk & ~(1 << shard))

    def write_begun(self, shard: int) -> None:
        """The READY pages of ``shard`` are being written to disk."""
        assert self.memory & self.ready & ~(self.on_disk | self.to_disk) & 1 << shard
        self._set_disk(self.on_disk, self.to_disk | 1 << shard)

    def write_ended(self, shard: int) -> None:
        """They could not be written; those that were are demoted."""
        assert self.to_disk >> shard & 1
        self._set_disk(self.on_disk, self.to_disk & ~(1 << shard))

    def move_page(self, shard: int, position: int, place: Place) -> None:
        """The record of one of its pages has a new place."""
        assert self.on_disk >> shard & 1
        assert 0 <= position < self.count
        column = replace_place(self.place_columns[shard], position, place)
        self.place_columns = {**self.place_columns, shard: column}

    def adopt(self, shard: int, places: bytes, digests: bytes) -> None:
        """The pages of ``shard`` were found on disk at the start, at the places of a column."""
        assert self.ready == self.present, "a client writes a page of it"
        assert len(digests) == self.count * DIGEST_BYTES
        self.digest_columns = {**self.digest_columns, shard: digests}
        self.ready = self.present = self.present | 1 << shard
        self.demote(shard, places)

    def forget(self, shard: int) -> Slot:
        """The page of ``shard`` is no longer in memory; returns its slot."""
        assert self.count == 1
        return self.forget_all(shard)[0]

    def forget_all(self, shard: int) -> list[Slot]:
        """The pages of ``shard`` are no longer in memory; returns their slots."""
        assert self.memory >> shard & 1
        slots = self.slots_of(shard)
        self.space.changes += 1
        self.slot_columns = without(self.slot_columns, shard)
        self.memory &= ~(1 << shard)
        if self.to_disk >> shard & 1:
            self._set_disk(self.on_disk, self.to_disk & ~(1 << shard))
        self.space.host_bytes -= len(slots) * self.space.shards[shard].slot_bytes
        assert self.space.host_bytes >= 0
        if self.tokens and not self._has_room_for_tokens():
            self.tokens = b""
        if not self.in_memory:
            self.count_above(-1)
        self._leave(shard)
        if self.on_disk and not self.memory:
            self.space.index.cool(self)
        return slots

    def forget_disk(self, shard: int) -> None:
        """The pages of ``shard`` are no longer on disk."""
        assert self.on_disk >> shard & 1
        self.place_columns = without(self.place_columns, shard)
        self._set_disk(self.on_disk & ~(1 << shard), self.to_disk)
        self.space.disk_bytes -= self.count * self.space.shards[shard].record_bytes
        self._leave(shard)

    def _enter_memory(self, shard: int, slots: bytes) -> None:
        assert not self.memory >> shard & 1
        assert len(slots) == self.count * SLOT_COLUMN
        if not self.in_memory:
            self.count_above(1)
        if self.cold:
            self.space.index.warm(self)
        self.slot_columns = with_column(self.slot_columns, shard, slots)
        self.memory |= 1 << shard
        self.space.changes += 1
        self.space.host_bytes += self.count * self.space.shards[shard].slot_bytes

    def hold(self) -> None:
        """Children are about to be added: until then it is not a leaf, and is not removed."""
        if not self.in_memory:
            self.count_above(1)
        self.children_in_memory += 1

    def unhold(self) -> None:
        """The children were added, or will not be."""
        self.children_in_memory -= 1
        assert self.children_in_memory >= 0
        if not self.in_memory:
            self.count_above(-1)

    @property
    def in_memory(self) -> bool:
        """Whether this node or a descendant has slots."""
        return self.memory > 0 or self.children_in_memory > 0

    def count_above(self, change: int) -> None:
        """Update the ancestors: this node got slots (1) or lost them (-1)."""
        at = self.above
        while at is not None:
            before = at.in_memory
            at.children_in_memory += change
            if at.in_memory == before:
                return
            at = at.above

    @property
    def nears_disk(self) -> bool:
        """Whether pages of it are on disk, or being written there."""
        return (self.on_disk | self.to_disk) > 0

    def _set_disk(self, on_disk: int, to_disk: int) -> None:
        above, was = self.above, self.on_disk | self.to_disk
        self.on_disk = on_disk
        self.to_disk = to_disk
        self.space.changes += 1
        if above is not None and not (was and on_disk | to_disk):  # nearly always neither is 0
            above.children_on_disk += (not was) - (not on_disk | to_disk)
            assert above.children_on_disk >= 0

    def _leave(self, shard: int) -> None:
        bit = 1 << shard
        if (self.memory | self.on_disk) & bit:
            return
        self.present &= ~bit
        self.ready &= ~bit
        self.read_once &= ~bit
        self.memory_only &= ~bit
        if shard in self.expires:
            self.expires = {at: ns for at, ns in self.expires.items() if at != shard} or _NEVER
        if shard in self.digest_columns:
            self.digest_columns = without(self.digest_columns, shard)
        self._settle()

    def _settle(self) -> None:
        if self.present == self.ready:
            self.space.writing.discard(self)


def is_live(node: PrefixNode) -> bool:
    """Whether the node is still in its tree (the root always is)."""
    return node.above is not None or node is node.space.root
