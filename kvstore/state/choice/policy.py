"""Which leaf to evict next: the policies, chosen by name.

All are leaf-first: the caller offers only nodes that nothing in memory continues, and pins and
checks stay its business. One object serves one class of slots. A use marks only the deepest node
of a prefix (``Node.access``, ``Node.uses``); an evicted leaf hands its marks to its parent, so what
a leaf carries is what its whole former subtree earned.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Protocol

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.reuse import Kind, LearnedReuse
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import Entry, NodeHeap, NodeLine

HISTORY_MAX: Final = 1 << 16
"""Keys of pages not in memory that a policy remembers at most."""
MOVES_MAX: Final = 8
"""Leaves, and ranks, that one choice of a victim brings up to date at most."""
MOVES_TICK_MAX: Final = 64
"""Leaves that all choices of one tick bring up to date at most: a message may choose 128 times."""
GONE_MAX: Final = 2
"""First entries of a heap, or of the cell whose turn is next, of leaves that have gone otherwise or
are leaves no more, that go with each that comes: so that no choice has to pass many at once."""
LOOKS_MAX = 1024
"""Entries of leaves that have changed since that all choices of one tick pass over at most, beside
:data:`MOVES_MAX` of each choice."""
COST_MAX: Final = 40
"""Half octaves of seconds: a page that takes less than a microsecond, or more than ten days, counts
as one that takes so long. Engines report the time, and each cost has cells of its own."""
CELLS_EMPTY_MAX: Final = 256
"""Cells that have no leaf at present, and stay; each has a list."""
Cell = tuple[Kind, int, int]
"""Kind, bin of age, and half octaves of the seconds that computing a page again takes."""


@dataclass(slots=True, eq=False)
class Looks:
    """Entries that the choices of one tick may still pass over.

    Attributes:
        tick: the tick of the last choice.
        left: how many.
    """

    tick: int = -1
    left: int = 0

    def take(self, tick: int, looked: int) -> bool:
        """Whether a choice may pass over one more, the ``looked``-th of it."""
        if tick != self.tick:
            self.tick, self.left = tick, LOOKS_MAX
        self.left -= 1
        return self.left >= 0 or looked <= MOVES_MAX


class EvictionPolicy(Protocol):
    """Ranks the leaves of one class of slots; every call costs microseconds."""

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
        the best of these, and may come once more.
        """
        ...

    def forget(self, most: int) -> bool:
        """Let go of up to ``most`` things that were learnt; whether none is left.

        Nothing else is asked of it from then on. All at once is too much for one turn.
        """
        ...


class LeastRecent:
    """``lru``: the leaf whose last use is longest ago.

    Args:
        slot_bytes: the class of slots; names this object in ``Node.queued``.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._heap = NodeHeap()
        self._sequence = 0
        self._looks = Looks()

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
        looked = 0
        while self._heap:
            entry = self._heap.pop()
            node = entry[-1]
            if self._has_grown(entry) and not node.children_in_memory:
                self._push(node)
                looked += 1
                if best is None or self._rank(node) < self._rank(best):
                    best = node
                if self._looks.take(tick, looked):
                    continue
                node = best
            leave(node, self._slot_bytes)
            if is_live(node):
                return node
        return None

    def forget(self, most: int) -> bool:  # noqa: ARG002
        """Nothing was learnt."""
        return True

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
            if not is_live(node) or node.children_in_memory:
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

    def __init__(self, slot_bytes: int) -> None:
        super().__init__(slot_bytes)
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
        return not self._counts

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

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        #: (uses that turns have paid for, node), the next one first.
        self._small, self._main = NodeLine(), NodeLine()
        #: Page that is no leaf yet → whether its place is in the main queue, uses paid for.
        self._places: OrderedDict[PrefixNode, tuple[bool, int]] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        #: What was popped last, and its place: it is offered again if its turn was not taken.
        self._popped: OrderedDict[PrefixNode, tuple[bool, int]] = OrderedDict()
        self._looks = Looks()
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
        looked = 0
        while self._small or self._main:
            total = len(self._small) + len(self._main)
            main = bool(self._main) and (
                not self._small or len(self._small) * self.SMALL_SHARE < total
            )
            paid, node = (self._main if main else self._small).popleft()
            used = is_live(node) and not node.children_in_memory and node.uses > paid
            looked += used
            if used and self._looks.take(tick, looked):
                paid = max(paid + 1, node.uses - self.ROUNDS_MAX + 1) if main else node.uses
                self._main.append((paid, node))
                continue
            leave(node, self._slot_bytes)
            if is_live(node):
                if node.children_in_memory:
                    self._keep_place(node, main, paid)  # until it is a leaf again
                else:
                    self._goes(node, main, paid)
                return node
        return None

    def forget(self, most: int) -> bool:
        """Let go of places, and of keys that went."""
        for _ in range(min(most, len(self._places))):
            self._places.popitem()
        for _ in range(min(most, len(self._gone))):
            self._gone.popitem()
        return not self._places and not self._gone

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


class HighestReuse:
    """``kvstore``: keeps what the next requests will most probably use, for each tick it stays.

    See :class:`kvstore.state.choice.reuse.LearnedReuse` for what is learnt and how. Offered leaves
    stand in cells, one for each kind, bin of age and cost of a page; within a cell the longest
    unused goes first. The cost is what sessions reported for the space; a space without a report
    counts as the one that was seen last. A leaf moves to the cell of its present age when a victim
    is asked for, some leaves later than others: no call moves more than ``MOVES_MAX``.
    """

    def __init__(self, slot_bytes: int) -> None:
        """Start as ``lru`` does: nothing learnt, so the older goes first."""
        self._slot_bytes = slot_bytes
        self._reuse = LearnedReuse()
        self._cells: dict[Cell, NodeHeap] = {}
        self._of_kind: dict[Kind, set[Cell]] = {}
        #: (rank, cell), lazily: an entry counts only while it is the cell's in ``_ranks``.
        self._order: list[tuple[float, Cell]] = []
        #: A former ``_order``, a heap too, from which what counts moves over a few at a time.
        self._former: list[tuple[float, Cell]] = []
        self._ranks: dict[Cell, float] = {}
        #: (tick at which the cell's oldest leaf leaves it, cell), lazily as ``_order``.
        self._due: list[tuple[int, Cell]] = []
        self._due_at: dict[Cell, int] = {}
        self._sequence = 0
        self._usual_cost = 0
        #: The tick of the last choice, and leaves that its choices may still bring up to date.
        self._aged_tick = self._moves_left = 0
        self._looks = Looks()

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:
        """Learn from the page's return, or from its prompt's first coming."""
        changed = self._reuse.stored(node, keys, tick)
        for cell in self._of_kind.get(changed, ()) if changed is not None else ():
            self._rank(cell)

    def used(self, node: PrefixNode, tick: int) -> None:
        """Learn from the reuse."""
        self._reuse.used(node, tick)

    def add_candidate(self, node: PrefixNode, tick: int) -> None:
        """Enter the cell of the node's class and age."""
        if enter(node, self._slot_bytes):
            self._push(node, tick)

    def pop(self, tick: int) -> PrefixNode | None:
        """The longest unused leaf of the cell with the lowest rank."""
        node: PrefixNode
        best: PrefixNode | None = None
        best_rank, looked = math.inf, 0
        self._age(tick)
        self._renew()
        while self._order or self._former:
            heap = self._former
            if self._order and (not heap or self._order[0] < heap[0]):
                heap = self._order
            rank, cell = heap[0]
            leaves = self._cells.get(cell)
            if not leaves or self._ranks[cell] != rank:
                heappop(heap)
                if leaves is not None and not leaves:
                    self._drop(cell)
                continue
            access, _, node = leaves.pop()
            if is_live(node) and node.access > access and not node.children_in_memory:
                rank = self._push(node, tick)
                looked += 1
                if best is None or rank < best_rank:
                    best, best_rank = node, rank
                if self._looks.take(tick, looked):
                    continue
                node = best
            leave(node, self._slot_bytes)
            if is_live(node):
                self._reuse.evicted(node)
                return node
        return None

    def forget(self, most: int) -> bool:
        """Let go of what was observed."""
        return self._reuse.forget(most)

    def _push(self, node: PrefixNode, tick: int) -> float:
        """Let the node stand in the cell where it belongs now; returns the rank of that cell."""
        first = self._cells.get(self._order[0][1]) if self._order else None
        for _ in range(GONE_MAX):
            if first and (not is_live(of := first.first()[-1]) or of.children_in_memory):
                first.pop()
                leave(of, self._slot_bytes)
        self._sequence += 1
        seconds = node.space.prefill_s_per_token * node.space.identity.page_tokens
        if seconds > 0:
            cost = round(2 * math.log2(seconds))
            self._usual_cost = max(-COST_MAX, min(cost, COST_MAX))
        age_bin = self._reuse.bin_of(tick - node.access)
        cell = self._reuse.kind(node), age_bin, self._usual_cost
        self._put(cell, (node.access, self._sequence, node))
        return self._ranks[cell]

    def _put(self, cell: Cell, entry: tuple[int, int, PrefixNode]) -> None:
        leaves = self._cells.get(cell)
        if leaves is None:
            leaves = self._cells[cell] = NodeHeap()
            self._of_kind.setdefault(cell[0], set()).add(cell)
            self._rank(cell)
        leaves.push(entry)
        oldest: int = leaves.first()[0]
        due = oldest + self._reuse.upper_edge(cell[1])
        if oldest == entry[0] and due < self._due_at.get(cell, due + 1):  # else as before
            self._due_at[cell] = due
            heappush(self._due, (due, cell))

    def _rank(self, cell: Cell) -> None:
        kind, age_bin, cost = cell
        rank = self._reuse.rank(kind, age_bin) * 2.0 ** (cost / 2)
        if self._ranks.get(cell) != rank:
            self._ranks[cell] = rank
            heappush(self._order, (rank, cell))

    def _drop(self, cell: Cell) -> None:
        """Forget an empty cell."""
        assert not self._cells[cell], "nobody would find its leaves"
        del self._cells[cell], self._ranks[cell]
        self._due_at.pop(cell, None)
        cells = self._of_kind[cell[0]]
        cells.remove(cell)
        if not cells:
            del self._of_kind[cell[0]]

    def _age(self, tick: int) -> None:
        """Move leaves whose time in their cell is over; a bounded number, the rest goes later."""
        if tick != self._aged_tick:
            self._aged_tick, self._moves_left = tick, MOVES_TICK_MAX
        for _ in range(min(MOVES_MAX, self._moves_left)):
            if not self._due or self._due[0][0] > tick:
                return
            self._moves_left -= 1
            due, cell = heappop(self._due)
            if self._due_at.get(cell) != due:
                continue
            del self._due_at[cell]
            leaves = self._cells[cell]
            if leaves and leaves.first()[0] + self._reuse.upper_edge(cell[1]) <= tick:
                entry = leaves.pop()
                access, _, node = entry
                if not is_live(node) or node.children_in_memory:
                    leave(node, self._slot_bytes)  # offered again as a leaf
                elif node.access == access:
                    age_bin = self._reuse.bin_of(tick - access)
                    self._put((cell[0], age_bin, cell[2]), entry)
                else:
                    self._push(node, tick)
            if not leaves:
                if len(self._cells) > CELLS_EMPTY_MAX:
                    self._drop(cell)
            else:
                due = leaves.first()[0] + self._reuse.upper_edge(cell[1])
                self._due_at[cell] = due
                heappush(self._due, (due, cell))

    def _renew(self) -> None:
        """Leave entries that no longer count behind, a few at a time."""
        if not self._former and len(self._order) > 4 * len(self._cells) + 64:
            self._former, self._order = self._order, []
        # The last entry of a heap may go without harm to the others' order.
        for _ in range(min(MOVES_MAX, len(self._former))):
            rank, cell = self._former.pop()
            if self._ranks.get(cell) == rank:
                heappush(self._order, (rank, cell))


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
        raise InvalidArgument("policy", f"{name!r} is not one of {', '.join(POLICIES)}")
    return made(slot_bytes)


def enter(node: PrefixNode, slot_bytes: int) -> bool:
    """Note that the policy of this class holds ``node``; False if it did before."""
    if slot_bytes in node.queued:
        return False
    node.queued = (*node.queued, slot_bytes)
    return True


def leave(node: PrefixNode, slot_bytes: int) -> None:
    """Note that the policy of this class no longer holds ``node``."""
    node.queued = tuple([size for size in node.queued if size != slot_bytes])
