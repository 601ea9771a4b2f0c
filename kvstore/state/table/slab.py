"""Which pages a device slab holds, where they are, and which to evict. Pure.

A **slab** is device memory of one client: copies of whole pages of a node. It is only a cache: a
page that is not in it is read from the node. It has the same parts as the node's tiers: slots of
one size in extents, pages in a prefix tree, leaves evicted in LRU order. Differences:

* a page needs no predecessor here, because an engine that keeps the start of a prompt itself
  requests only the rest;
* while slots are free, every page is promoted; after that, only pages that were read before (as far
  as a bounded memory of keys goes back): a prompt that is read once must not evict one that is read
  all the time.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.protocol.page import (
    DIGEST_BYTES,
    KEY_BYTES,
    PrefixKey,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
)
from kvstore.state.choice.policy import LeastRecent
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.slots import SLOT_ALIGNMENT, Slot, SlotTable

SEEN_MAX = 1 << 15
"""Maximum keys of pages that were read but not promoted."""
COUNTS: Final = (
    "pages_hit", "pages_promoted", "pages_evicted", "pages_refused", "pages_forgotten",
    "pages_failed",
)  # fmt: skip
"""What is counted: pages read here, taken in, let go for others, not let in, taken out on purpose,
and not taken in because they were not copied whole or did not verify."""
_DOMAIN: Final = "slab"
_SHARD: Final = 0


@dataclass(frozen=True, slots=True)
class PageSet:
    """The pages of one shard of one space; a slab never mixes them with others.

    Attributes:
        identity: the space.
        spec: the shard.
        name: 64 bytes, equal exactly if every field of both is equal.
        page_bytes: bytes of a page.
        seed: of the pages' digests, see :func:`kvstore.protocol.page.page_seeds`.
    """

    identity: SpaceIdentity
    spec: ShardSpec
    name: bytes = field(init=False)
    page_bytes: int = field(init=False)
    seed: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        object.__setattr__(self, "name", self.identity.digest + self.spec.digest)
        object.__setattr__(self, "page_bytes", self.spec.page_bytes(self.identity))
        object.__setattr__(self, "seed", digest_seed(self.identity, self.spec))

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slot of a page."""
        return -(-self.page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(slots=True)
class Held:
    """Pages that are being read: their slots are not reused before :meth:`SlabIndex.unpin`.

    Attributes:
        digests: 16 bytes per page, from when the page became READY.
    """

    nodes: list[PrefixNode]
    slots: list[Slot]
    digests: bytes


@dataclass(slots=True)
class Reservation:
    """WRITING slots for consecutive pages; :meth:`SlabIndex.commit` ends it.

    Attributes:
        first: index of the requested key that the first slot is for.
        digests: 16 bytes per page: expected digests of the slots' contents.
    """

    pages: PageSet
    first: int
    nodes: list[PrefixNode]
    slots: list[Slot]
    digests: bytes


class SlabIndex:
    """All pages of one slab.

    Args:
        extent_bytes: slots of one size share an extent; no page may be larger.
        extent_count: extents the slab has.
    """

    def __init__(self, extent_bytes: int, extent_count: int) -> None:
        self.slots = SlotTable(extent_bytes, extent_count)
        #: How often each of ``COUNTS`` happened.
        self.counts: Counter[str] = Counter()
        #: ``PageSet.name`` → the space, for all and only the sets with a page READY or WRITING.
        self._spaces: dict[bytes, PrefixTree] = {}
        self._queues: dict[int, LeastRecent] = {}
        self._seen: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        #: WRITING slots whose page was forgotten meanwhile: free once their writer has ended.
        self._disowned: set[Slot] = set()
        self._tick = 0
        self._numbers = 0
        #: READY pages.
        self._pages = 0

    def run(self, pages: PageSet, packed: bytes) -> int:
        """The number of leading keys that are READY; does not count as a use."""
        return len(self._ready(pages, packed))

    def pin(self, pages: PageSet, packed: bytes) -> Held:
        """Use the leading run of READY pages, which are not evicted until :meth:`unpin`."""
        nodes = self._ready(pages, packed)
        slots = [node.slots[_SHARD] for node in nodes]
        self._tick += 1
        if nodes:
            nodes[-1].access = self._tick
            self.slots.pin(slots, self._tick)
            self.counts["pages_hit"] += len(nodes)
        digests = b"".join(node.digests[_SHARD] for node in nodes)
        assert len(digests) == len(slots) * DIGEST_BYTES, "a reader verifies each page"
        return Held(nodes, slots, digests)

    def unpin(self, held: Held) -> None:
        """End the use of pages."""
        self.slots.unpin(held.slots)
        self._add_candidates(held.nodes)

    def reserve(
        self, pages: PageSet, keys: PrefixKeys, digests: bytes, *, always: bool = False
    ) -> Reservation | None:
        """Reserve slots for the pages after the leading run; None if there are none.

        Args:
            pages: the page set.
            keys: consecutive keys; those that are READY already are skipped.
            digests: 16 bytes for each of ``keys``.
            always: evict other pages even for pages that are read for the first time.
        """
        assert len(digests) == len(keys) * DIGEST_BYTES
        ready = self._ready(pages, keys.packed)
        self._tick += 1
        if ready:
            ready[-1].access = self._tick
        space = self._space(pages)
        nodes: list[PrefixNode] = []
        slots: list[Slot] = []
        first = len(ready)
        last = ready[-1] if ready else None
        for at in range(first, len(keys)):
            known = space.nodes.get(keys[at])
            if known is not None and known.present:
                break  # somebody else writes it, or it is there behind a gap
            may_evict = always or (pages.name, bytes(keys[at])) in self._seen
            slot = self._allocate(pages.slot_bytes, last, may_evict=may_evict)
            if slot is None:
                break
            node = space.node(keys[at], PrefixKey(keys[at - 1] if at else keys.parent))
            node.begin(_SHARD, slot)
            node.access = self._tick
            self._spaces[pages.name] = space  # making room may have emptied and dropped it
            nodes.append(node)
            slots.append(slot)
            last = node
        refused = keys[first + len(nodes) :]
        self._remember(pages, refused)
        self.counts["pages_refused"] += len(refused)
        if not nodes:
            self._drop_if_empty(pages)
            return None
        part = digests[first * DIGEST_BYTES : (first + len(nodes)) * DIGEST_BYTES]
        return Reservation(pages, first, nodes, slots, part)

    def commit(self, reservation: Reservation, good: int) -> None:
        """End a reservation: the first ``good`` slots hold verified pages, the others are freed."""
        assert 0 <= good <= len(reservation.slots)
        for at in reversed(range(len(reservation.slots))):
            node, slot = reservation.nodes[at], reservation.slots[at]
            if slot in self._disowned:
                self._disowned.discard(slot)
                self.slots.unhold([slot])
            elif at < good:
                self.slots.commit([slot], self._tick)
                start = at * DIGEST_BYTES
                node.commit(_SHARD, reservation.digests[start : start + DIGEST_BYTES])
                self._pages += 1
                self.counts["pages_promoted"] += 1
            else:
                self._take_out(node)
                self.slots.abort([slot])
                self.counts["pages_failed"] += 1
        self._add_candidates(reservation.nodes)
        self._drop_if_empty(reservation.pages)

    def forget(self, pages: PageSet, packed: bytes) -> int:
        """Drop pages, so that they are misses from now on; returns how many there were."""
        space = self._spaces.get(pages.name)
        if space is None:
            return 0
        count = 0
        for at in range(0, len(packed), KEY_BYTES):
            node = space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            if node is None or not node.present:
                continue
            slot = node.slots[_SHARD]
            if node.ready:
                self.slots.release([slot])
            else:
                assert slot not in self._disowned
                self.slots.lose([slot])
                self._disowned.add(slot)
            self._take_out(node)
            count += 1
        self.counts["pages_forgotten"] += count
        self._drop_if_empty(pages)
        return count

    def clear(self) -> int:
        """Drop every page; returns how many there were."""
        return sum(
            self.forget(PageSet(space.identity, space.shards[_SHARD].spec), b"".join(space.nodes))
            for space in list(self._spaces.values())
        )

    def stats(self) -> dict[str, Any]:
        """Sizes and counts, as plain values."""
        slots = self.slots.stats()
        return {
            "capacity_bytes": slots.capacity_bytes,
            "ready_bytes": slots.ready_bytes,
            "writing_bytes": slots.writing_bytes,
            "in_use_bytes": slots.pinned_bytes + slots.limbo_bytes,
            "pages": self._pages,
            **{name: self.counts[name] for name in COUNTS},
        }

    def check(self) -> None:
        """Assert every invariant that spans fields."""
        for _ in self.slots.checks(lambda _slot, _state: None):
            pass
        held: list[Slot] = []
        for space in self._spaces.values():
            for _ in space.checks(lambda _node: None):
                pass
            assert space.nodes, "an empty set of pages should have been dropped"
            for node in space.nodes.values():
                held += node.slots.values()
                if self._evictable(node):
                    assert node.queued, ("a leaf that may go is not among those that can", node)
        assert len(set(held)) == len(held), "a slot has two pages"
        nodes = [node for space in self._spaces.values() for node in space.nodes.values()]
        assert self._pages == sum(1 for node in nodes if node.ready)
        in_use = [
            slot for at in range(len(self.slots.extents)) for slot in self.slots.slots_in_use(at)
        ]
        assert set(held) <= set(in_use)
        assert self._disowned <= set(in_use) - set(held)
        assert len(self._seen) <= SEEN_MAX

    # ---- inside -----------------------------------------------------------------------------

    def _ready(self, pages: PageSet, packed: bytes) -> list[PrefixNode]:
        space = self._spaces.get(pages.name)
        found: list[PrefixNode] = []
        if space is None:
            return found
        for at in range(0, len(packed), KEY_BYTES):
            node = space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            if node is None or not node.ready:
                break
            found.append(node)
        return found

    def _space(self, pages: PageSet) -> PrefixTree:
        space = self._spaces.get(pages.name)
        if space is None:
            self._numbers += 1
            shard = Shard(pages.spec, pages.page_bytes, pages.slot_bytes)
            space = self._spaces[pages.name] = PrefixTree(self._numbers, pages.identity, [shard])
        return space

    def _drop_if_empty(self, pages: PageSet) -> None:
        space = self._spaces.get(pages.name)
        if space is not None and not space.nodes:
            del self._spaces[pages.name]

    def _allocate(
        self, slot_bytes: int, last: PrefixNode | None, *, may_evict: bool
    ) -> Slot | None:
        """A WRITING slot; ``last``, the page before the new one, is not evicted for it."""
        if slot_bytes > self.slots.extent_bytes:
            return None
        slots = self.slots.allocate(1, _DOMAIN, slot_bytes)
        while not slots and may_evict and self._make_room(slot_bytes, last):
            slots = self.slots.allocate(1, _DOMAIN, slot_bytes)
        return slots[0] if slots else None

    def _make_room(self, slot_bytes: int, last: PrefixNode | None) -> bool:
        """Evict the least recently used leaf, or drain a colder extent of another size."""
        victim = self._victim(slot_bytes, last)
        age = victim.access if victim is not None else self._tick
        position = self.slots.colder_extent(_DOMAIN, slot_bytes, age)
        while position is not None:
            if self._empty_extent(position):
                if victim is not None:
                    self._add_candidates([victim])
                return True
            self.slots.extents[position].used_at = self._tick
            position = self.slots.colder_extent(_DOMAIN, slot_bytes, age)
        if victim is None:
            return False
        self._evict(victim)
        return True

    def _victim(self, slot_bytes: int, last: PrefixNode | None) -> PrefixNode | None:
        queue = self._queue(slot_bytes)
        spared: PrefixNode | None = None
        while (node := queue.pop(self._tick)) is not None:
            if node is last:
                spared = node
            elif self._evictable(node):
                break
        if spared is not None:
            self._add_candidates([spared])
        return node

    def _empty_extent(self, position: int) -> bool:
        """Evict all pages of an extent, leaves or not; False if one of them is in use."""
        wanted = set(self.slots.slots_in_use(position))
        found = [
            node
            for space in self._spaces.values()
            for node in space.nodes.values()
            if node.slots and node.slots[_SHARD] in wanted
        ]
        free = all(node.ready and not self.slots.in_use(node.slots[_SHARD]) for node in found)
        if not free or len(found) < len(wanted):
            return False
        for node in found:
            self._evict(node)
        return True

    def _evict(self, node: PrefixNode) -> None:
        assert not self.slots.in_use(node.slots[_SHARD]), ("it is being read", node)
        self.slots.release([node.slots[_SHARD]])
        self._take_out(node)
        self.counts["pages_evicted"] += 1
        if not node.space.nodes:
            self._spaces = {name: one for name, one in self._spaces.items() if one.nodes}

    def _take_out(self, node: PrefixNode) -> None:
        """Remove the page from the tree; the caller gets its slot."""
        self._pages -= bool(node.ready)
        assert self._pages >= 0, node
        node.forget(_SHARD)
        self._add_candidates([node.space.prune(node)])

    def _evictable(self, node: PrefixNode) -> bool:
        return (
            bool(node.slots)
            and bool(node.ready)
            and not node.children_in_memory
            and is_live(node)
            and not self.slots.in_use(node.slots[_SHARD])
        )

    def _add_candidates(self, nodes: Iterable[PrefixNode]) -> None:
        for node in nodes:
            if self._evictable(node):
                self._queue(node.space.shards[_SHARD].slot_bytes).add_candidate(node, self._tick)

    def _queue(self, slot_bytes: int) -> LeastRecent:
        queue = self._queues.get(slot_bytes)
        if queue is None:
            queue = self._queues[slot_bytes] = LeastRecent(slot_bytes)
        return queue

    def _remember(self, pages: PageSet, keys: Sequence[PrefixKey]) -> None:
        for key in keys:
            name = (pages.name, bytes(key))
            self._seen[name] = None
            self._seen.move_to_end(name)
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
