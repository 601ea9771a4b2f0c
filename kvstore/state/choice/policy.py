"""Which leaf to evict next: what all policies have in common, and those that are simple.

All are leaf-first: the caller offers only nodes that nothing in memory continues, and pins and
checks stay its business. One object serves one class of slots. A use marks only the deepest node
of a prefix (``Node.access``, ``Node.uses``); an evicted leaf hands its marks to its parent, so what
a leaf carries is what its whole former subtree earned.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.protocol.page import PrefixKey
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import Entry, NodeHeap, NodeLine

HISTORY_MAX: Final = 1 << 16
"""Keys of pages not in memory that a policy remembers at most."""
MOVES_MAX: Final = 8
"""Leaves, and ranks, that one choice of a victim brings up to date at most."""
GONE_MAX: Final = 2
"""First entries of a heap, or of the cell whose turn is next, of leaves that have gone otherwise or
are leaves no more, that go with each that comes: so that no choice has to pass many at once."""
LOOKS_MAX = 64
"""Entries of leaves that have changed since that all choices of one tick pass over at most, and as
many of leaves that are still there beside them, of which each choice passes :data:`MOVES_MAX`: in a
heap of a million, whose memory is cold, 10 us each."""


@dataclass(slots=True, eq=False)
class Looks:
    """Entries that the choices of one tick may still pass over.

    Attributes:
        tick: the tick of the last choice.
        left: how many; below zero, how many beyond the limit were asked for.
    """

    tick: int = -1
    left: int = 0

    def take(self, tick: int, looked: int) -> bool:
        """Whether a choice may pass over one more, the ``looked``-th of it.

        0 = it is that of a dropped leaf: of those none is passed beyond the limit.
        """
        if tick != self.tick:
            self.tick, self.left = tick, LOOKS_MAX
        self.left -= 1
        return self.left >= 0 or (0 < looked <= MOVES_MAX and self.left >= -LOOKS_MAX)


class EvictionPolicy(Protocol):
    """Ranks the leaves of one class of slots; every call costs microseconds.

    Attributes:
        behind: the last :meth:`pop` stopped at entries of dropped leaves; it may have found no
            victim though there is one.
    """

    behind: bool

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:
        """Pages came in, all of ``node``; its ancestors were told before it. It may be split."""
        ...

    def used(self, node: PrefixNode, tick: int) -> None:
        """A request used the prefix that ends at ``node``; said once a request."""
        ...

    def add_candidate(self, node: PrefixNode, tick: int) -> None:
        """``node`` may be evictable now; offering it twice changes nothing."""
        ...

    def pop(self, tick: int) -> PrefixNode | None:
        """The best victim of those offered, or None; it must be offered again to come again.

        Of many leaves that were used since they were offered only some are looked at: then it is
        the best of these, and may come once more. Few entries of dropped leaves are passed, see
        ``behind``.
        """
        ...

    def sweep(self, most: int) -> int:
        """Remove up to ``most`` first entries of dropped or continued leaves; returns how many.

        It resets ``behind`` when the first entry is no longer one of those. What was continued is
        offered again when it is a leaf.
        """
        ...

    def forget(self, most: int) -> bool:
        """Let go of about ``most`` things that were learnt, and entries; whether none is left.

        Nothing else is asked of it from then on. All at once is too much for one turn.
        """
        ...


class LeastRecent:
    """``lru``: the leaf whose last use is longest ago.

    Args:
        slot_bytes: the class of slots; names this object in ``Node.queued``.
    """

    def __init__(self, slot_bytes: int, looks: Looks | None = None) -> None:
        self.behind = False
        self._slot_bytes = slot_bytes
        self._heap = NodeHeap()
        self._sequence = 0
        self._looks = looks or Looks()

    def __len__(self) -> int:
        return len(self._heap)

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:
        """Nothing to learn."""

    def used(self, node: PrefixNode, tick: int) -> None:
        """Nothing to learn: ``node.access`` says it."""

    def add_candidate(self, node: PrefixNode, tick: int) -> None:  # noqa: ARG002
        """Enter the heap, unless the node is there."""
        if enter(node, self._slot_bytes):
            if self._heap:
                self._correct_first()
            self._push(node)

    def pop(self, tick: int) -> PrefixNode | None:
        """The leaf of the lowest rank; ranks that grew since are corrected on the way."""
        node: PrefixNode
        best: PrefixNode | None = None
        looked, self.behind = 0, False
        while self._heap:
            entry = self._heap.pop()
            node = entry[-1]
            live = is_live(node)
            looked += live
            if not live:
                leave(node, self._slot_bytes)
            elif self._has_grown(entry) and not node.children_in_memory:
                self._push(node)
                if best is None or self._rank(node) < self._rank(best):
                    best = node
            else:
                leave(node, self._slot_bytes)
                return node
            if not self._looks.take(tick, looked if live else 0):
                self.behind = best is None
                break
        if best is not None:
            leave(best, self._slot_bytes)
        return best

    def sweep(self, most: int) -> int:
        """Remove first entries of what is no leaf."""
        for swept in range(most):
            if not self._heap or is_leaf(self._heap.first()[-1]):
                self.behind = False
                return swept
            leave(self._heap.pop()[-1], self._slot_bytes)
        return most

    def forget(self, most: int) -> bool:
        """Let go of entries of dropped leaves; nothing was learnt."""
        self._heap.discard(most)
        return not self._heap

    def _rank(self, node: PrefixNode) -> tuple[int, int]:
        return 0, node.access

    def _has_grown(self, entry: Entry) -> bool:
        """Whether the rank of a node has grown since its entry was made."""
        count, access, _, node = entry
        now, used = self._rank(node)
        return is_live(node) and (now > count or (now == count and used > access))

    def _correct_first(self) -> None:
        """Take first entries out whose nodes come again by themselves; correct others' ranks."""
        for _ in range(min(GONE_MAX, len(self._heap))):
            entry = self._heap.first()
            node: PrefixNode = entry[-1]
            if not is_leaf(node):
                self._heap.pop()
                leave(node, self._slot_bytes)
            elif self._has_grown(entry):
                self._heap.pop()
                self._push(node)

    def _push(self, node: PrefixNode) -> None:
        assert is_live(node), node
        self._sequence += 1
        count, access = self._rank(node)
        self._heap.push((count, access, self._sequence, node))


class LeastFrequent(LeastRecent):
    """``lfu``: the leaf with the fewest uses since it came in; ties by recency."""

    def _rank(self, node: PrefixNode) -> tuple[int, int]:
        return node.uses, node.access


class FrequencySketch(LeastRecent):
    """``tinylfu``: as ``lfu``, but uses are counted beyond a page's stay in memory.

    Counts are halved whenever ``HISTORY_MAX`` keys have one, so that old fame fades and memory is
    bounded. A new page that history does not know is the next victim: admission by frequency.
    """

    def __init__(self, slot_bytes: int, looks: Looks | None = None) -> None:
        super().__init__(slot_bytes, looks)
        self._counts: dict[bytes, int] = {}

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:  # noqa: ARG002
        """Count one more coming of each key."""
        for page in node.singles():  # each has a rank of its own
            self._counts[page.key] = self._counts.get(page.key, 0) + 1
        if len(self._counts) >= HISTORY_MAX:
            self._counts = {key: count // 2 for key, count in self._counts.items() if count > 1}

    def forget(self, most: int) -> bool:
        """Let go of counts."""
        for _ in range(min(most, len(self._counts))):
            self._counts.popitem()
        return super().forget(most) and not self._counts

    def _rank(self, node: PrefixNode) -> tuple[int, int]:
        return self._counts.get(node.key, 0) + node.uses, node.access


class SmallAndMain:
    """``s3-fifo``: a small FIFO for what is new, a main FIFO for what was used again.

    A page unused when its turn in the small queue comes goes, and its key is remembered; a page
    whose key is remembered when it is stored counts as used. In the main queue each use is worth
    one more round, three at most. The page before a leaf that goes is as old, and takes its place
    at the head of the same queue; the uses that the leaf's turns have paid for count no more.
    """

    SMALL_SHARE: Final = 10
    ROUNDS_MAX: Final = 3
    POPPED_MAX: Final = 1024

    def __init__(self, slot_bytes: int, looks: Looks | None = None) -> None:
        self.behind = False
        self._slot_bytes = slot_bytes
        #: (uses that turns have paid for, node), the next one first.
        self._small, self._main = NodeLine(), NodeLine()
        #: Page that is no leaf yet → whether its place is in the main queue, uses paid for.
        self._places: OrderedDict[PrefixNode, tuple[bool, int]] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        #: What was popped last, and its place: it is offered again if its turn was not taken.
        self._popped: OrderedDict[PrefixNode, tuple[bool, int]] = OrderedDict()
        self._looks = looks or Looks()
        self._pages = 0

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:  # noqa: ARG002
        """What went a short while ago, and comes again, was wanted."""
        for page in node.singles():  # each has a place of its own
            self._pages += 1
            if page.key in self._gone:
                del self._gone[page.key]
                page.uses += 1

    def used(self, node: PrefixNode, tick: int) -> None:
        """Nothing to learn: ``node.uses`` says it."""

    def add_candidate(self, node: PrefixNode, tick: int) -> None:  # noqa: ARG002
        """Take the place that a leaf has left to it, or the last one of the small queue."""
        if enter(node, self._slot_bytes):
            place = self._places.pop(node, None)
            if node in self._popped:
                place = self._popped.pop(node)
                self._pages += 1
            if place is None:
                self._small.append((0, node))
            else:
                (self._main if place[0] else self._small).appendleft((place[1], node))

    def pop(self, tick: int) -> PrefixNode | None:
        """The next of the small queue while that has its share, else of the main queue."""
        node: PrefixNode
        looked, self.behind = 0, False
        while self._small or self._main:
            main = self._is_mains_turn()
            paid, node = (self._main if main else self._small).popleft()
            live = is_live(node)
            used = live and not node.children_in_memory and node.uses > paid
            looked += used
            if used and self._looks.take(tick, looked):
                paid = max(paid + 1, node.uses - self.ROUNDS_MAX + 1) if main else node.uses
                self._main.append((paid, node))
                continue
            leave(node, self._slot_bytes)
            if live:
                if node.children_in_memory:
                    self._keep_place(node, main, paid)  # until it is a leaf again
                else:
                    self._goes(node, main, paid)
                return node
            if not self._looks.take(tick, 0):
                self.behind = True
                break
        return None

    def sweep(self, most: int) -> int:
        """Remove first entries of what is no leaf."""
        node: PrefixNode
        for swept in range(most):
            main = self._is_mains_turn()
            line = self._main if main else self._small
            if not line or is_leaf(line.first()[-1]):
                self.behind = False
                return swept
            paid, node = line.popleft()
            leave(node, self._slot_bytes)
            if is_live(node):
                self._keep_place(node, main, paid)
        return most

    def forget(self, most: int) -> bool:
        """Let go of places, of keys that went, and of entries of dropped leaves."""
        for _ in range(min(most, len(self._places))):
            self._places.popitem()
        for _ in range(min(most, len(self._gone))):
            self._gone.popitem()
        for line in (self._small, self._main):
            for _ in range(min(most, len(line))):
                line.popleft()
        return not (self._places or self._gone or self._small or self._main)

    def _is_mains_turn(self) -> bool:
        small, main = len(self._small), len(self._main)
        return main > 0 and (not small or small * self.SMALL_SHARE < small + main)

    def _goes(self, node: PrefixNode, main: bool, paid: int) -> None:  # noqa: FBT001
        self._popped[node] = main, paid
        if len(self._popped) > self.POPPED_MAX:
            self._popped.popitem(last=False)
        self._pages = max(0, self._pages - 1)
        parent = node.parent
        assert parent is not None, node
        in_main, paid = self._places.get(parent, (False, 0))
        self._keep_place(parent, in_main or main, paid + node.uses)
        if not main:
            self._gone[node.key] = None
            while len(self._gone) > min(HISTORY_MAX, self._pages + 1):
                self._gone.popitem(last=False)

    def _keep_place(self, node: PrefixNode, main: bool, paid: int) -> None:  # noqa: FBT001
        self._places[node] = main, paid
        if len(self._places) > HISTORY_MAX:
            self._places.popitem(last=False)


def classes(node: PrefixNode) -> list[int]:
    """The slot sizes of the node's pages, each once."""
    shards = node.space.shards
    found = [shards[shard].slot_bytes for shard in node.slot_columns]
    return found if len(found) < 2 else sorted(set(found))


def is_leaf(node: PrefixNode) -> bool:
    """Whether the node is still there, and no page in memory continues it."""
    return not node.children_in_memory and is_live(node)


def enter(node: PrefixNode, slot_bytes: int) -> bool:
    """Note that the policy of this class holds ``node``; False if it did before."""
    if slot_bytes in node.queued:
        return False
    node.queued = (*node.queued, slot_bytes)
    return True


def leave(node: PrefixNode, slot_bytes: int) -> None:
    """Note that the policy of this class no longer holds ``node``."""
    node.queued = tuple([size for size in node.queued if size != slot_bytes])
