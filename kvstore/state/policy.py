"""Which leaf to evict next: the policies, chosen by name.

All are leaf-first: the caller offers only nodes that nothing in memory continues, and pins and
checks stay its business. One object serves one class of slots. A use marks only the deepest node
of a prefix (``Node.access``, ``Node.uses``); an evicted leaf hands its marks to its parent, so what
a leaf carries is what its whole former subtree earned.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

from kvstore.errors import InvalidArgument
from kvstore.state.reuse import LearnedReuse
from kvstore.state.tree import Node, is_live

HISTORY_MAX: Final = 1 << 16
"""Keys of pages not in memory that a policy remembers at most."""


class EvictionPolicy(Protocol):
    """Ranks the leaves of one class of slots; every call costs microseconds."""

    def stored(self, node: Node, tick: int) -> None:
        """A page of ``node`` came in; its ancestors were told before it."""
        ...

    def used(self, node: Node, tick: int) -> None:
        """A request used the prefix that ends at ``node``; said once a request."""
        ...

    def offer(self, node: Node, tick: int) -> None:
        """``node`` may be evictable now; offering it twice changes nothing."""
        ...

    def pop(self, tick: int) -> Node | None:
        """The best victim of those offered, or None; it must be offered again to come again."""
        ...


class LeastRecent:
    """``lru``: the leaf whose last use is longest ago.

    Args:
        slot_bytes: the class of slots; names this object in ``Node.queued``.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Start empty."""
        self._slot_bytes = slot_bytes
        self._heap: list[tuple[int, int, int, Node]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._heap)

    def stored(self, node: Node, tick: int) -> None:
        """Nothing to learn."""

    def used(self, node: Node, tick: int) -> None:
        """Nothing to learn: ``node.access`` says it."""

    def offer(self, node: Node, tick: int) -> None:  # noqa: ARG002
        """Enter the heap, unless the node is there."""
        if enter(node, self._slot_bytes):
            self._push(node)

    def pop(self, tick: int) -> Node | None:  # noqa: ARG002
        """The leaf of the lowest rank; ranks that grew since are corrected on the way."""
        while self._heap:
            count, access, _, node = heapq.heappop(self._heap)
            if is_live(node) and self._rank(node) > (count, access):
                self._push(node)
                continue
            leave(node, self._slot_bytes)
            if is_live(node):
                return node
        return None

    def _rank(self, node: Node) -> tuple[int, int]:
        return 0, node.access

    def _push(self, node: Node) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (*self._rank(node), self._sequence, node))


class LeastFrequent(LeastRecent):
    """``lfu``: the leaf with the fewest uses since it came in; ties by recency."""

    def _rank(self, node: Node) -> tuple[int, int]:
        return node.uses, node.access


class FrequencySketch(LeastRecent):
    """``tinylfu``: as ``lfu``, but uses are counted beyond a page's stay in memory.

    Counts are halved whenever ``HISTORY_MAX`` keys have one, so that old fame fades and memory is
    bounded. A new page that history does not know is the next victim: admission by frequency.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Start without history."""
        super().__init__(slot_bytes)
        self._counts: dict[bytes, int] = {}

    def stored(self, node: Node, tick: int) -> None:  # noqa: ARG002
        """Count one more coming of this key."""
        self._counts[node.key] = self._counts.get(node.key, 0) + 1
        if len(self._counts) >= HISTORY_MAX:
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}

    def _rank(self, node: Node) -> tuple[int, int]:
        return self._counts.get(node.key, 0) + node.uses, node.access


class SmallAndMain:
    """``s3-fifo``: a small FIFO for what is new, a main FIFO for what was used again.

    A page unused when its turn in the small queue comes goes, and its key is remembered; a page
    whose key is remembered enters the main queue at once. In the main queue each use is worth one
    more round, three at most.
    """

    SMALL_SHARE: Final = 10
    ROUNDS_MAX: Final = 3

    def __init__(self, slot_bytes: int) -> None:
        """Start empty."""
        self._slot_bytes = slot_bytes
        self._small: deque[tuple[int, Node]] = deque()
        self._main: deque[tuple[int, Node]] = deque()
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    def stored(self, node: Node, tick: int) -> None:
        """Nothing to learn."""

    def used(self, node: Node, tick: int) -> None:
        """Nothing to learn: ``node.uses`` says it."""

    def offer(self, node: Node, tick: int) -> None:  # noqa: ARG002
        """Join the queue that history says."""
        if enter(node, self._slot_bytes):
            if node.key in self._gone:
                del self._gone[node.key]
                self._main.append((node.uses, node))
            else:
                self._small.append((node.uses, node))

    def pop(self, tick: int) -> Node | None:  # noqa: ARG002
        """The next of the small queue while that has its share, else of the main queue."""
        while self._small or self._main:
            total = len(self._small) + len(self._main)
            from_small = bool(self._small) and (
                not self._main or len(self._small) * self.SMALL_SHARE >= total
            )
            uses, node = (self._small if from_small else self._main).popleft()
            if is_live(node) and node.uses > uses:
                later = node.uses if from_small else max(uses + 1, node.uses - self.ROUNDS_MAX)
                self._main.append((later, node))
                continue
            leave(node, self._slot_bytes)
            if is_live(node):
                self._remember(node)
                return node
        return None

    def _remember(self, node: Node) -> None:
        self._gone[node.key] = None
        while len(self._gone) > min(HISTORY_MAX, len(self._small) + len(self._main) + 1024):
            self._gone.popitem(last=False)


class HighestReuse:
    """``kvstore``: keeps what the next requests will most probably use, for each tick it stays.

    See :class:`kvstore.state.reuse.LearnedReuse` for what is learnt and how. Offered leaves stand
    in cells, one for each class of prompts and age; within a cell the longest unused goes first.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Start as ``lru`` does: nothing learnt, so the older goes first."""
        self._slot_bytes = slot_bytes
        self._reuse = LearnedReuse()
        self._cells: dict[tuple[tuple[int, ...], int], list[tuple[int, int, Node]]] = {}
        #: (rank, cell), lazily: an entry counts only while the rank is the cell's.
        self._order: list[tuple[float, tuple[tuple[int, ...], int]]] = []
        self._sequence = 0
        self._aged_at = 0

    def stored(self, node: Node, tick: int) -> None:
        """Learn from the page's return, or from its prompt's first coming."""
        changed = self._reuse.stored(node, tick)
        if changed is not None:
            for age_bin in range(self._reuse.BINS):
                if self._cells.get((changed, age_bin)):
                    rank = self._reuse.rank(changed, age_bin)
                    heapq.heappush(self._order, (rank, (changed, age_bin)))

    def used(self, node: Node, tick: int) -> None:
        """Learn from the reuse."""
        self._reuse.used(node, tick)

    def offer(self, node: Node, tick: int) -> None:
        """Enter the cell of the node's class and age."""
        if enter(node, self._slot_bytes):
            self._push(node, tick)

    def pop(self, tick: int) -> Node | None:
        """The longest unused leaf of the cell with the lowest rank."""
        if tick >= self._aged_at + 4:
            self._aged_at = tick
            self._age(tick)
        while self._order:
            rank, cell = self._order[0]
            leaves = self._cells.get(cell)
            if not leaves or self._reuse.rank(*cell) != rank:
                heapq.heappop(self._order)
                continue
            access, _, node = heapq.heappop(leaves)
            if is_live(node) and node.access > access:
                self._push(node, tick)
                continue
            leave(node, self._slot_bytes)
            if is_live(node):
                self._reuse.evicted(node)
                return node
        return None

    def _push(self, node: Node, tick: int) -> None:
        self._sequence += 1
        cell = (self._reuse.kind(node), self._reuse.bin_of(tick - node.access))
        self._put(cell, (node.access, self._sequence, node))

    def _put(self, cell: tuple[tuple[int, ...], int], entry: tuple[int, int, Node]) -> None:
        leaves = self._cells.setdefault(cell, [])
        if not leaves:
            heapq.heappush(self._order, (self._reuse.rank(*cell), cell))
        heapq.heappush(leaves, entry)

    def _age(self, tick: int) -> None:
        """Move every leaf to the cell of its present age, each a few times in its life."""
        for cell in list(self._cells):
            leaves = self._cells[cell]
            if not leaves:
                del self._cells[cell]
                continue
            kind, age_bin = cell
            oldest = tick - self._reuse.upper_edge(age_bin)
            while leaves and leaves[0][0] <= oldest:
                entry = heapq.heappop(leaves)
                node = entry[2]
                if is_live(node) and node.access == entry[0]:
                    self._put((kind, self._reuse.bin_of(tick - entry[0])), entry)
                elif is_live(node):
                    self._push(node, tick)
                else:
                    leave(node, self._slot_bytes)
        if len(self._order) > 4 * len(self._cells) + 64:
            self._order = [
                (self._reuse.rank(*cell), cell) for cell, leaves in self._cells.items() if leaves
            ]
            heapq.heapify(self._order)


POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "lru": LeastRecent,
    "lfu": LeastFrequent,
    "tinylfu": FrequencySketch,
    "s3-fifo": SmallAndMain,
    "kvstore": HighestReuse,
}


def new_policy(name: str, slot_bytes: int) -> EvictionPolicy:
    """A policy for one class of slots.

    Args:
        name: one of :data:`POLICIES`.
        slot_bytes: the class.

    Raises:
        InvalidArgument: no policy has that name.
    """
    made = POLICIES.get(name)
    if made is None:
        raise InvalidArgument("policy", f"{name!r} is none of {', '.join(POLICIES)}")
    return made(slot_bytes)


def enter(node: Node, slot_bytes: int) -> bool:
    """Note that the policy of this class holds ``node``; False if it did before."""
    if slot_bytes in node.queued:
        return False
    node.queued += (slot_bytes,)
    return True


def leave(node: Node, slot_bytes: int) -> None:
    """Note that the policy of this class no longer holds ``node``."""
    node.queued = tuple(size for size in node.queued if size != slot_bytes)
