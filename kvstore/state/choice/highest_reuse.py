"""The policy ``kvstore``: evict what the next requests will most probably not use. Pure."""

import math
from heapq import heappop, heappush
from typing import Final

from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.policy import GONE_MAX, MOVES_MAX, Looks, enter, is_leaf, leave
from kvstore.state.choice.reuse import Kind, LearnedReuse
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.nodeheap import NodeHeap

MOVES_TICK_MAX: Final = 64
"""Leaves that all choices of one tick bring up to date at most: a message may choose 128 times."""
COST_MAX: Final = 40
"""Half octaves of seconds: a page that takes less than a microsecond, or more than ten days, counts
as one that takes so long. Engines report the time, and each cost has cells of its own."""
CELLS_EMPTY_MAX: Final = 256
"""Cells that have no leaf at present, and stay; each has a list."""
Cell = tuple[Kind, int, int]
"""Kind, bin of age, and half octaves of the seconds that computing a page again takes."""


class HighestReuse:
    """``kvstore``: keeps what the next requests will most probably use, for each tick it stays.

    See :class:`kvstore.state.choice.reuse.LearnedReuse` for what is learnt and how. Offered leaves
    stand in cells, one for each kind, bin of age and cost of a page; within a cell the longest
    unused goes first. The cost is what sessions reported for the space; a space without a report
    counts as the one that was seen last. A leaf moves to the cell of its present age when a victim
    is asked for, some leaves later than others: no call moves more than ``MOVES_MAX``.
    """

    def __init__(self, slot_bytes: int, looks: Looks | None = None) -> None:
        """Start as ``lru`` does: nothing learnt, so the older goes first."""
        self.behind = False
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
        self._looks = looks or Looks()

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
        best_rank, looked, self.behind = math.inf, 0, False
        self._age(tick)
        self._renew()
        while (leaves := self._first_cell()) is not None:
            access, _, node = leaves.pop()
            live = is_live(node)
            looked += live
            if not live:
                leave(node, self._slot_bytes)
            elif node.access > access and not node.children_in_memory:
                rank = self._push(node, tick)
                if best is None or rank < best_rank:
                    best, best_rank = node, rank
            else:
                best = node
                break
            if not self._looks.take(tick, looked if live else 0):
                self.behind = best is None
                break
        if best is not None:
            leave(best, self._slot_bytes)
            self._reuse.evicted(best)
        return best

    def sweep(self, most: int) -> int:
        """Remove first entries of what is no leaf."""
        for swept in range(most):
            leaves = self._first_cell()
            if leaves is None or is_leaf(leaves.first()[-1]):
                self.behind = False
                return swept
            leave(leaves.pop()[-1], self._slot_bytes)
        return most

    def forget(self, most: int) -> bool:
        """Let go of entries of dropped leaves, then of what was observed."""
        for cell, leaves in self._cells.items():
            leaves.discard(most)
            if not leaves:
                del self._cells[cell]
            return False
        return self._reuse.forget(most)

    def _first_cell(self) -> NodeHeap | None:
        """The leaves of the cell with the lowest rank; None if there are none."""
        while self._order or self._former:
            heap = self._former
            if self._order and (not heap or self._order[0] < heap[0]):
                heap = self._order
            rank, cell = heap[0]
            leaves = self._cells.get(cell)
            if leaves and self._ranks[cell] == rank:
                return leaves
            heappop(heap)
            if leaves is not None and not leaves:
                self._drop(cell)
        return None

    def _push(self, node: PrefixNode, tick: int) -> float:
        """Let the node stand in the cell where it belongs now; returns the rank of that cell."""
        first = self._cells.get(self._order[0][1]) if self._order else None
        for _ in range(GONE_MAX):
            if first and not is_leaf(of := first.first()[-1]):
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
                if not is_leaf(node):
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
