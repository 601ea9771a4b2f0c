"""How probably, and how soon, a cached prompt is continued: learnt from the requests themselves.

A prompt of a conversation either never comes back or comes back after a think time. Both depend on
the **kind** of prompt: how many turns led to it, how deep it is, and whether the page ends it (an
end is often not continued exactly) or many branches leave it (a shared system prompt). So each
prompt's end, the page before it, and what was used are **observed** until they are used again,
whether or not they stay in memory. For each kind and bin of age (half octaves of ticks) two counts
result: how many were still unused when the bin ended, and how many were used again in it.

Their ratio is the hazard of reuse. A kind with few observations borrows from the more general kind
(the same without depth, then without turns, then all). The **rank** of (kind, age) is the most
reuse to expect for each tick in memory, over all times one could keep the page from now on (the
Gittins index): a prompt is worth its room just before it probably returns, not only just after.

Counts are halved now and then, so that the past fades. The numbers below bound memory and say how
fast to believe; which ones, and what they were chosen on, is in docs/internals/policies.md.
"""

from collections import deque
from typing import ClassVar, Final

from kvstore.state.tree import Node

Kind = tuple[int, ...]

OBSERVED_MAX: Final = 1 << 16
"""Prompts under observation at most; the oldest is given up first."""
BELIEF: Final = 30.0
"""Observations after which a kind's own hazard counts as much as the more general kind's."""
HAZARD_UNKNOWN: Final = 0.05
"""Reuse in each bin of age before anything is known: in every octave alike, hence LRU's order."""
HALVE_EVERY: Final = 1 << 14
"""Prompts after which all counts are halved."""
BRANCHES_SHARED: Final = 4
"""So many continuations make a prefix shared: what follows is a new conversation's first turn."""


class Observation:
    """A prefix that is watched until it is used again; ``key`` is None when that is over."""

    __slots__ = ("key", "kind", "since", "turns", "uses")

    def __init__(self, node: Node, kind: Kind, since: int) -> None:
        """Watch ``node``'s key from tick ``since`` on."""
        self.key: bytes | None = node.key
        self.kind = kind
        self.since = since
        self.turns = node.turns
        self.uses = node.uses


class LearnedReuse:
    """Observes prefixes, and ranks kinds and ages of pages by what came of them."""

    BINS: ClassVar[int] = 44

    def __init__(self) -> None:
        """Start knowing nothing."""
        self._observed: dict[bytes, Observation] = {}
        self._in_order: deque[Observation] = deque()
        self._by_age: list[deque[Observation]] = [deque() for _ in range(self.BINS)]
        self._reused: dict[Kind, list[float]] = {(): [0.0] * self.BINS}
        self._seen: dict[Kind, list[float]] = {(): [0.0] * self.BINS}
        self._ranks: dict[Kind, list[float]] = {}
        self._stale: deque[Kind] = deque()
        #: The page stored last and the one before it, which may be gone when the prompt ends.
        self._end: Node | None = None
        self._before_end: Node | None = None
        self._end_tick = 0
        self._prompts = 0

    # ---- events -----------------------------------------------------------------------------

    def used(self, node: Node, tick: int) -> None:
        """A request used the prefix that ends at ``node``."""
        self._close(node, tick)
        self._observe(node, tick)

    def stored(self, node: Node, tick: int) -> Kind | None:
        """A page came in.

        Returns:
            the kind whose ranks this changed, if any.
        """
        parent = node.parent
        assert parent is not None
        follows = parent is not node.space.root and parent.branches < BRANCHES_SHARED
        node.turns = parent.turns + (parent.uses > 0) if follows else 0
        before = self._close(node, tick)
        if before is not None:
            node.turns = max(node.turns, before.turns)
            node.uses = max(node.uses, before.uses + 1)
            node.branches = max(node.branches, 1)
        changed = None
        if self._end is not None and parent is not self._end:
            changed = self._finish_prompt(tick)
        self._end, self._before_end, self._end_tick = node, parent, tick
        return changed

    def _finish_prompt(self, tick: int) -> Kind | None:
        """The pages stored last end a prompt: watch it, and refresh what was learnt."""
        for node in (self._end, self._before_end):
            if node is not None and node is not node.space.root:
                self._observe(node, self._end_tick)
        self._advance(tick)
        self._prompts += 1
        if self._prompts % HALVE_EVERY == 0:
            for counts in (*self._reused.values(), *self._seen.values()):
                counts[:] = [count / 2 for count in counts]
        if not self._stale or self._prompts % 2:
            return None
        kind = self._stale.popleft()
        self._stale.append(kind)
        self._ranks[kind] = self._index(kind)
        return kind

    def _observe(self, node: Node, tick: int) -> None:
        old = self._observed.get(node.key)
        if old is not None:
            if old.since >= tick:
                return
            old.key = None
        watched = Observation(node, self.kind(node), tick)
        self._observed[node.key] = watched
        self._in_order.append(watched)
        self._by_age[0].append(watched)
        while len(self._in_order) > OBSERVED_MAX:
            oldest = self._in_order.popleft()
            if oldest.key is not None:
                del self._observed[oldest.key]
                oldest.key = None

    def _close(self, node: Node, tick: int) -> Observation | None:
        watched = self._observed.pop(node.key, None)
        if watched is not None:
            watched.key = None
            age_bin = self.bin_of(tick - watched.since)
            for kind in _generalised(watched.kind):
                self._counts(self._reused, kind)[age_bin] += 1
                self._counts(self._seen, kind)[age_bin] += 1
        return watched

    def _advance(self, tick: int) -> None:
        """Count what outlived its bin of age unused; each observation passes each bin once."""
        for age_bin in range(min(self.bin_of(tick) + 1, self.BINS - 1)):
            waiting, older = self._by_age[age_bin], self._by_age[age_bin + 1]
            limit = tick - self.upper_edge(age_bin)
            while waiting and waiting[0].since <= limit:
                watched = waiting.popleft()
                if watched.key is not None:
                    for kind in _generalised(watched.kind):
                        self._counts(self._seen, kind)[age_bin] += 1
                    older.append(watched)

    # ---- what was learnt --------------------------------------------------------------------

    @staticmethod
    def kind(node: Node) -> Kind:
        """What the node's reuse is expected to depend on, the most general part first."""
        if not node.branches:
            place = 0
        elif node.branches < BRANCHES_SHARED:
            place = 1
        else:
            place = 2 + min(node.uses.bit_length(), 8)
        turns = node.turns if node.turns < 5 else min(3 + node.turns.bit_length(), 9)
        return place, turns, min(node.depth.bit_length(), 9) // 2

    def rank(self, kind: Kind, age_bin: int) -> float:
        """Expected uses a tick of a page of this kind and age; higher is to be kept."""
        ranks = self._ranks.get(kind)
        if ranks is None:
            ranks = self._ranks[kind] = self._index(kind)
            self._stale.append(kind)
        return ranks[age_bin]

    @classmethod
    def bin_of(cls, age: int) -> int:
        """The bin of an age in ticks."""
        if age < 2:
            return 0
        octave = age.bit_length() - 1
        return min(2 * octave + (age >> (octave - 1) & 1), cls.BINS - 1)

    @staticmethod
    def upper_edge(age_bin: int) -> int:
        """The age at which a bin ends."""
        return _edge(age_bin + 1)

    def _counts(self, table: dict[Kind, list[float]], kind: Kind) -> list[float]:
        counts = table.get(kind)
        if counts is None:
            counts = table[kind] = [0.0] * self.BINS
        return counts

    def _hazards(self, kind: Kind) -> list[float]:
        hazards = [HAZARD_UNKNOWN] * self.BINS
        for general in reversed(_generalised(kind)):
            seen, reused = self._seen.get(general), self._reused.get(general)
            if seen is not None:
                reused = reused or [0.0] * self.BINS
                hazards = [
                    (uses + BELIEF * before) / (count + BELIEF)
                    for uses, count, before in zip(reused, seen, hazards, strict=True)
                ]
        return hazards

    def _index(self, kind: Kind) -> list[float]:
        hazards = self._hazards(kind)
        # No page is older than the clock: later bins are all alike, and need no work.
        bins = min(self.bin_of(self._end_tick) + 2, self.BINS)
        ranks: list[float] = []
        for start in range(bins):
            alive, uses, ticks, best = 1.0, 0.0, 0.0, 0.0
            for at in range(start, bins):
                hazard = hazards[at]
                uses += alive * hazard
                ticks += alive * (1 - hazard / 2) * _WIDTHS[at]
                alive *= 1 - hazard
                if uses > best * ticks:
                    best = uses / ticks
            ranks.append(best)
        return ranks + ranks[-1:] * (self.BINS - bins)


def _generalised(kind: Kind) -> tuple[Kind, ...]:
    """``kind`` and all more general ones, the most general last."""
    return kind, kind[:2], kind[:1], ()


def _edge(age_bin: int) -> int:
    if age_bin < 3:
        return 0 if age_bin == 0 else 2
    octave = age_bin // 2
    return 3 << octave - 1 if age_bin % 2 else 1 << octave


_WIDTHS: Final = tuple(
    max(1, _edge(age_bin + 1) - _edge(age_bin)) for age_bin in range(LearnedReuse.BINS)
)
