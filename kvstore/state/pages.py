"""Pages: the state a node decides with. Batches in, results and actions out; pure.

This is where slots, prefix trees and sessions meet. What callers must do with ``actions`` (publish
events, replace memory, wake waiters) is the node's business; nothing here does I/O or reads a
clock. Every list of keys is a run of one chain, packed as 32 bytes each.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from kvstore.errors import CapacityError, InvalidArgument, LayoutMismatch
from kvstore.page import KEY_BYTES, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.sessions import Lease, Process, Put, Session
from kvstore.state.slots import SLOT_ALIGNMENT, Slot, SlotState, SlotTable
from kvstore.state.tree import EvictionQueue, Node, Shard, Space, is_live

SPACES_MAX = 4096
SHARDS_MAX = 1024


class PageStatus(IntEnum):
    """What became of one page of a put."""

    GRANTED = 0
    """A slot waits for its bytes; nobody else will be granted this page meanwhile."""
    EXISTS = 1
    PENDING = 2
    """Someone else is writing it."""
    NO_ROOM = 3
    NO_PARENT = 4
    """The page before it is not stored, so nobody could ever reach it."""
    STORED = 5
    DROPPED = 6
    """The page before it vanished while this one was being written."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Action: these pages became READY."""

    space: Space
    shard: int
    keys: list[PrefixKey]
    parent: PrefixKey
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Removed:
    """Action: these pages left the index; leaves first. Their slots are not re-used before."""

    space: Space
    shard: int
    keys: list[PrefixKey]
    cause: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Action: a page that was being written will not come from that writer; who waits may stop."""

    space: Space
    keys: list[PrefixKey]


Action = Stored | Removed | Abandoned


class PageTable:
    """All pages of one node, and who holds them.

    Args:
        slots: the slots of the host tier.
    """

    def __init__(self, slots: SlotTable) -> None:
        """Start empty."""
        self.slots = slots
        self.spaces: list[Space] = []
        self.actions: list[Action] = []
        self.counts: Counter[str] = Counter()
        self._by_digest: dict[bytes, Space] = {}
        self._queues: dict[tuple[str, int], EvictionQueue] = {}
        #: All and only the slots of pages in the trees.
        self._owners: dict[Slot, Node] = {}
        self._lease_deadlines: list[tuple[int, int, Process, int, Lease]] = []
        self._page_deadlines: list[tuple[int, int, Node]] = []
        self._tick = 0
        self._sequence = count()

    # ---- spaces -----------------------------------------------------------------------------

    def open_space(
        self, session: Session, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[Space, list[int]]:
        """Find or make the space and its shards.

        Returns:
            the space, and the number of each of ``shards`` in it.

        Raises:
            LayoutMismatch, InvalidArgument: names the field that does not fit what is known.
        """
        if session.domain and session.domain != identity.tenant:
            raise InvalidArgument("tenant", f"this session belongs to {session.domain!r}")
        if not shards:
            raise InvalidArgument("shards", "at least one is needed")
        sizes = [spec.page_bytes(identity) for spec in shards]
        for size in sizes:
            if size > self.slots.extent_bytes:
                limit = self.slots.extent_bytes
                raise InvalidArgument("page_bytes", f"{size} is more than an extent ({limit})")
        space = self._by_digest.get(identity.digest)
        known = space.shards if space else []
        for spec in shards:
            _refuse_contradiction(spec, known)
        if space is None:
            if len(self.spaces) >= SPACES_MAX:
                raise CapacityError(f"{SPACES_MAX} spaces exist already")
            space = Space(len(self.spaces), identity)
            self.spaces.append(space)
            self._by_digest[identity.digest] = space
        session.domain = identity.tenant
        return space, [
            self._shard_number(space, spec, size) for spec, size in zip(shards, sizes, strict=True)
        ]

    def space(self, number: int, session: Session) -> Space:
        """The space of that number.

        Raises:
            InvalidArgument: there is none, or it is another tenant's.
        """
        if not 0 <= number < len(self.spaces):
            raise InvalidArgument("space", f"{number} is not open")
        space = self.spaces[number]
        if space.identity.tenant != session.domain:
            raise InvalidArgument("space", f"{number} belongs to another tenant")
        return space

    # ---- reading ----------------------------------------------------------------------------

    def lookup(self, space: Space, shards: Sequence[int], packed: bytes) -> tuple[int, int]:
        """The longest prefix of which every needed shard is READY.

        Returns:
            (pages, pending): pages of the hit; and how many more would be a hit once everything
            that is being written now is READY.
        """
        self._tick += 1
        windows: dict[int, int] = {}
        for number in shards:
            window = space.shards[number].spec.window_pages
            windows[window] = windows.get(window, 0) | 1 << number
        nodes = space.nodes
        found = [
            nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            for at in range(0, len(packed), KEY_BYTES)
        ]
        ready = [node.ready if node else 0 for node in found]
        pages = _longest(ready, windows)
        pending = 0
        if pages < len(found) and (node := found[pages]) is not None and node.slots:
            present = [sum(1 << shard for shard in node.slots) if node else 0 for node in found]
            pending = _longest(present, windows) - pages
        if pages:
            deepest = found[pages - 1]
            assert deepest is not None
            deepest.access = self._tick
        self.counts["lookup_pages"] += len(found)
        self.counts["hit_pages"] += pages
        return pages, pending

    def acquire(
        self, process: Process, lease_id: int, space: Space, shard: int, packed: bytes,
        deadline_ns: int,
    ) -> Lease:  # fmt: skip
        """Pin the leading run of READY pages of one shard under a lease.

        Raises:
            CapacityError: the session's quota is used up; nothing was pinned.
        """
        if lease_id in process.leases:
            raise InvalidArgument("lease", f"{lease_id} is in use")
        self._tick += 1
        pages: list[tuple[Node, int, Slot]] = []
        bit = 1 << shard
        for at in range(0, len(packed), KEY_BYTES):
            node = space.nodes.get(PrefixKey(packed[at : at + KEY_BYTES]))
            if node is None or not node.ready & bit:
                break
            pages.append((node, shard, node.slots[shard]))
        lease = Lease(pages, len(pages) * space.shards[shard].slot_bytes, deadline_ns)
        if not process.session.admits(lease.size_bytes):
            raise CapacityError(
                f"the session's quota of {process.session.quota_bytes} bytes is used up"
            )
        if pages:
            self.slots.pin(lease.slots, self._tick)
            pages[-1][0].access = self._tick
            self._hold(process, lease.size_bytes)
            process.leases[lease_id] = lease
            entry = (deadline_ns, next(self._sequence), process, lease_id, lease)
            heapq.heappush(self._lease_deadlines, entry)
        return lease

    def release(self, process: Process, lease_id: int) -> None:
        """The reader is done; unknown leases are ignored (the answer to them may be late)."""
        lease = process.leases.pop(lease_id, None)
        if lease is None:
            return
        self._hold(process, -lease.size_bytes)
        if lease.expired:
            self.slots.unhold(lease.slots)
        else:
            self.slots.unpin(lease.slots)
        for node, shard, _ in lease.pages:
            if node.read_once and is_live(node):
                self.drop(node, shard, "read_once")
            else:
                self._offer(node)

    # ---- writing ----------------------------------------------------------------------------

    def begin_put(
        self, process: Process, put_id: int, space: Space, shard: int, packed: bytes,
        parent: PrefixKey, tokens: bytes = b"",
    ) -> tuple[list[PageStatus], Put]:  # fmt: skip
        """Grant a slot for every page that is neither stored nor being written.

        Pages before the first NO_ROOM or NO_PARENT are decided; all after it get the same answer.
        """
        if put_id in process.puts:
            raise InvalidArgument("put", f"{put_id} is in use")
        self._tick += 1
        keys = [PrefixKey(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES)]
        if parent and parent in keys:
            raise InvalidArgument("parent", "is among the keys that are to follow it")
        put = Put([], shard, 0)
        statuses: list[PageStatus] = []
        token_bytes = len(tokens) // len(keys) if keys else 0
        for index, key in enumerate(keys):
            status = self._grant(process, put, space, key, parent)
            if status in (PageStatus.NO_ROOM, PageStatus.NO_PARENT):
                statuses += [status] * (len(keys) - index)
                break
            if status is PageStatus.GRANTED:
                put.tokens += tokens[index * token_bytes : (index + 1) * token_bytes]
            statuses.append(status)
            parent = key
        if put.pages:
            process.puts[put_id] = put
        return statuses, put

    def commit_put(
        self, process: Process, put_id: int, digests: bytes, expires_ns: int, *, read_once: bool
    ) -> list[PageStatus]:
        """The bytes are there: make the granted pages READY.

        Raises:
            InvalidArgument: no such put, or not one digest a page; the put is left as it was.
        """
        put = process.puts.get(put_id)
        if put is None:
            raise InvalidArgument("put", f"{put_id} is not open")
        size = len(digests) // len(put.pages)
        if size * len(put.pages) != len(digests) or size != 16:
            raise InvalidArgument("digests", f"{len(digests)} bytes for {len(put.pages)} pages")
        del process.puts[put_id]
        self._hold(process, -put.size_bytes)
        self._tick += 1
        statuses: list[PageStatus] = []
        stored: list[Node] = []
        for index, (node, slot) in enumerate(put.pages):
            if not self._owns(node, put.shard, slot):
                self.slots.abort([slot])
                statuses.append(PageStatus.DROPPED)
                continue
            self.slots.commit([slot], self._tick)
            node.digests[put.shard] = digests[index * size : (index + 1) * size]
            node.ready |= 1 << put.shard
            node.access = self._tick
            node.read_once = read_once
            if expires_ns:
                node.expires_ns = expires_ns
                heapq.heappush(self._page_deadlines, (expires_ns, next(self._sequence), node))
            stored.append(node)
            statuses.append(PageStatus.STORED)
            self._offer(node)
        self._announce(put, stored)
        self.counts["stored_pages"] += len(stored)
        return statuses

    def abort_put(self, process: Process, put_id: int, *, writing: bool = False) -> None:
        """Take the pages of an open put back.

        Args:
            writing: the writer may still write, so the slots go to LIMBO until it settled.
        """
        put = process.puts.get(put_id)
        if put is None or put.lost:
            return
        for node, slot in reversed(put.pages):
            if self._owns(node, put.shard, slot):
                self._abandon(node, put.shard)
                self._drop_below(node, put.shard, "head_lost")
                self._tidy(node)
        if writing:
            self.slots.lose(put.slots)
            put.lost = True
            self.counts["lost_puts"] += 1
        else:
            self.slots.abort(put.slots)
            self._end_put(process, put_id)
        self.counts["aborted_puts"] += 1

    # ---- ends -------------------------------------------------------------------------------

    def lose(self, process: Process) -> None:
        """The connection broke but the process lives: what it writes goes to LIMBO."""
        process.lost = True
        for put_id in list(process.puts):
            self.abort_put(process, put_id, writing=True)

    def end(self, process: Process) -> None:
        """The process is known to touch no byte of this tier any more: free all it held."""
        for lease_id in list(process.leases):
            self.release(process, lease_id)
        for put_id, put in list(process.puts.items()):
            if put.lost:
                self.slots.unhold(put.slots)
                self._end_put(process, put_id)
            else:
                self.abort_put(process, put_id)
        assert process.idle

    def drop(self, node: Node, shard: int, cause: str) -> None:
        """Take one READY page out of the index, and with it what only it made reachable."""
        if not node.ready >> shard & 1:
            return
        self._drop_below(node, shard, cause)
        self._remove(node, shard, cause)
        self._tidy(node)

    def expire(self, now_ns: int) -> None:
        """Apply every deadline up to ``now_ns``."""
        leases, pages = self._lease_deadlines, self._page_deadlines
        while leases and leases[0][0] <= now_ns:
            _, _, process, lease_id, lease = heapq.heappop(leases)
            if process.leases.get(lease_id) is lease and not lease.expired:
                lease.expired = True
                self.slots.pin_to_hold(lease.slots)
                self.counts["expired_leases"] += 1
                for node, _, _ in lease.pages:
                    self._offer(node)
        while pages and pages[0][0] <= now_ns:
            _, _, node = heapq.heappop(pages)
            if is_live(node) and 0 < node.expires_ns <= now_ns:
                for shard in list(node.digests):
                    self.drop(node, shard, "expired")

    def next_deadline_ns(self) -> int:
        """The earliest deadline that :meth:`expire` would apply; 0 = none."""
        queues = (self._lease_deadlines, self._page_deadlines)
        return min((queue[0][0] for queue in queues if queue), default=0)

    def check(self) -> None:
        """Assert every invariant that spans slots, trees and sessions."""
        self.slots.check()
        owned: dict[Slot, Node] = {}
        for space in self.spaces:
            space.check()
            for node in space.nodes.values():
                for shard, slot in node.slots.items():
                    owned[slot] = node
                    ready = self.slots.state(slot) == SlotState.READY
                    assert ready == bool(node.ready >> shard & 1)
                    needs_head = not space.shards[shard].spec.window_pages
                    head = node.parent
                    assert head is space.root or not needs_head or shard in head.slots  # type: ignore[union-attr]
                if self._evictable(node):
                    assert node.queued, "an evictable leaf must be in its queue"
        assert owned == self._owners

    # ---- inside -----------------------------------------------------------------------------

    def _announce(self, put: Put, stored: list[Node]) -> None:
        """Add one Stored action for each run of ``stored`` in which page follows page."""
        size = len(put.tokens) // len(put.pages)
        tokens = {
            id(node): put.tokens[at * size : (at + 1) * size]
            for at, (node, _) in enumerate(put.pages)
        }
        run: list[Node] = []
        for node in [*stored, None]:
            if run and (node is None or node.parent is not run[-1]):
                assert run[0].parent is not None
                keys = [member.key for member in run]
                told = b"".join(tokens[id(member)] for member in run)
                self.actions.append(Stored(run[0].space, put.shard, keys, run[0].parent.key, told))
                run = []
            if node is not None:
                run.append(node)

    def _grant(
        self, process: Process, put: Put, space: Space, key: PrefixKey, parent: PrefixKey
    ) -> PageStatus:
        shard = put.shard
        known = space.nodes.get(key)
        if known is not None and shard in known.slots:
            known.access = self._tick
            return PageStatus.EXISTS if known.ready >> shard & 1 else PageStatus.PENDING
        of = space.shards[shard]
        if parent and not of.spec.window_pages:
            head = space.nodes.get(parent)
            if head is None or shard not in head.slots:
                return PageStatus.NO_PARENT
        if not process.session.admits(of.slot_bytes):
            return PageStatus.NO_ROOM
        node = space.node(key, parent)
        # In the tree before room is made, so that its ancestors are no leaves meanwhile.
        node.slots[shard] = Slot(-1)
        slot = self._allocate(space.identity.tenant, of.slot_bytes)
        if slot is None:
            del node.slots[shard]
            self._tidy(node)
            return PageStatus.NO_ROOM
        node.slots[shard] = slot
        self._owners[slot] = node
        put.pages.append((node, slot))
        put.size_bytes += of.slot_bytes
        self._hold(process, of.slot_bytes)
        return PageStatus.GRANTED

    def _allocate(self, domain: str, slot_bytes: int) -> Slot | None:
        while not (taken := self.slots.allocate(1, domain, slot_bytes)):
            if not self._make_room(domain, slot_bytes):
                return None
        return taken[0]

    def _make_room(self, domain: str, slot_bytes: int) -> bool:
        """Evict the least recently used leaf of the class, or a colder extent of another class."""
        queue = self._queues.setdefault((domain, slot_bytes), EvictionQueue())
        while (node := queue.pop()) is not None and not self._evictable(node):
            pass
        age = node.access if node is not None else self._tick
        position = self.slots.colder_extent(domain, slot_bytes, age)
        while position is not None:
            if self._empty_extent(position):
                if node is not None:
                    queue.offer(node)
                return True
            self.slots.extents[position].used_at = self._tick
            position = self.slots.colder_extent(domain, slot_bytes, age)
        if node is None:
            return False
        for shard in list(node.slots):
            self._remove(node, shard, "evicted")
        self._tidy(node)
        return True

    def _empty_extent(self, position: int) -> bool:
        """Evict every page of an extent and what hangs below them; False if something is in use."""
        slots = self.slots.slots_in_use(position)
        doomed: list[Node] = []
        for slot in slots:
            owner = self._owners.get(slot)
            if owner is None:
                return False  # LIMBO
            doomed.append(owner)
        for owner in doomed:
            for node in _subtree(owner):
                for shard, slot in node.slots.items():
                    if not node.ready >> shard & 1 or self.slots.in_use(slot):
                        return False
        for owner in doomed:
            if is_live(owner):
                for shard in list(owner.digests):
                    self.drop(owner, shard, "evicted")
        return not self.slots.slots_in_use(position)

    def _drop_below(self, node: Node, shard: int, cause: str) -> None:
        """Take the pages of one shard below ``node`` out: without their head nobody reaches them."""
        if node.space.shards[shard].spec.window_pages:
            return
        for below in reversed(_subtree(node)[1:]):
            if below.ready >> shard & 1:
                self._remove(below, shard, cause)
            elif shard in below.slots:
                self._abandon(below, shard)  # its writer will find it DROPPED
            self._tidy(below)

    def _remove(self, node: Node, shard: int, cause: str) -> None:
        slot = self._forget(node, shard)
        node.ready &= ~(1 << shard)
        del node.digests[shard]
        self.actions.append(Removed(node.space, shard, [node.key], cause))
        self.counts[f"removed_{cause}"] += 1
        self.slots.release([slot])

    def _abandon(self, node: Node, shard: int) -> None:
        self._forget(node, shard)
        self.actions.append(Abandoned(node.space, [node.key]))

    def _forget(self, node: Node, shard: int) -> Slot:
        slot = node.slots.pop(shard)
        del self._owners[slot]
        return slot

    def _owns(self, node: Node, shard: int, slot: Slot) -> bool:
        return is_live(node) and node.slots.get(shard) == slot

    def _tidy(self, node: Node) -> None:
        """After pages went: prune bare nodes, and offer what became a leaf."""
        if is_live(node):
            self._offer(node.space.prune(node))

    def _offer(self, node: Node) -> None:
        if self._evictable(node):
            shard = next(iter(node.slots))
            of = node.space.shards[shard]
            key = (node.space.identity.tenant, of.slot_bytes)
            self._queues.setdefault(key, EvictionQueue()).offer(node)

    def _evictable(self, node: Node) -> bool:
        return (
            bool(node.slots)
            and not node.children
            and is_live(node)
            and len(node.digests) == len(node.slots)
            and not any(self.slots.pinned(slot) for slot in node.slots.values())
        )

    def _shard_number(self, space: Space, spec: ShardSpec, page_bytes: int) -> int:
        for number, shard in enumerate(space.shards):
            if shard.spec == spec:
                return number
        if len(space.shards) >= SHARDS_MAX:
            raise CapacityError(f"the space has {SHARDS_MAX} shards already")
        slot_bytes = -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        space.shards.append(Shard(spec, page_bytes, slot_bytes))
        return len(space.shards) - 1

    def _hold(self, process: Process, delta: int) -> None:
        process.session.used_bytes += delta
        assert process.session.used_bytes >= 0

    def _end_put(self, process: Process, put_id: int) -> None:
        put = process.puts.pop(put_id)
        self._hold(process, -put.size_bytes)


def _longest(have: list[int], windows: dict[int, int]) -> int:
    """The largest n such that every group's need is met by the first n pages.

    Args:
        have: bit mask of the shards present, a page.
        windows: pages needed at the end of the prefix (0 = all) → mask of the shards that need so.
    """
    full = windows.get(0, 0)
    best = len(have)
    if full:
        best = next((at for at, mask in enumerate(have) if mask & full != full), len(have))
    partial = {window: mask for window, mask in windows.items() if window}
    if not partial:
        return best
    runs = dict.fromkeys(partial, 0)
    longest = 0
    for at in range(best):
        for window, mask in partial.items():
            runs[window] = runs[window] + 1 if have[at] & mask == mask else 0
        if all(runs[window] >= min(window, at + 1) for window in partial):
            longest = at + 1
    return longest


def _subtree(node: Node) -> list[Node]:
    """``node`` and all below it, every parent before its children."""
    found = [node]
    for at in found:
        found.extend(at.children.values())
    return found


def _refuse_contradiction(spec: ShardSpec, known: Sequence[Shard]) -> None:
    """One model has one head size and one need a group; who says otherwise is misconfigured."""
    for shard in known:
        other = shard.spec
        if spec.group != other.group:
            continue
        if spec.window_pages != other.window_pages:
            raise LayoutMismatch(
                "window_pages", f"{spec.window_pages} here, {other.window_pages} in the space"
            )
        mine, theirs = getattr(spec.layout, "head_dim", 0), getattr(other.layout, "head_dim", 0)
        if mine and theirs and mine != theirs:
            raise LayoutMismatch("head_dim", f"{mine} here, {theirs} in the space")
