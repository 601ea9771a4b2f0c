"""How probably and how soon a cached prompt is continued, learned from the requests.

A prompt of a conversation either never returns or returns after a think time. Both depend on the
**kind** of prompt: whether the page ends it (an end is often not continued exactly), lies within
it, or has many branches (a shared system prompt); how many turns led to it; and three traits: its
depth, the shortest pause between its turns, and the number of pages that the last turn added. So
the end of each prompt, the page before it, and used pages are **observed** until they are used
again, whether or not they stay in memory; of one conversation only the newest ones. For each class
of observations and bin of age (half octaves of ticks) there are two counts: how many were still
unused when the bin ended, and how many were used again in it.

Their ratio is the hazard of reuse. A class with few observations borrows from the more general one
(with the same turns from the same place, that from all): first the level, for which few
observations suffice, then the shape. Each trait then multiplies the hazard by its own factor, as if
the traits were independent, because no combination of them is observed often. The **rank** of
(kind, age) is the maximum of expected reuse per tick in memory, over all times for which the page
could be kept from now on (the Gittins index): a prompt is worth its memory just before it probably
returns, not only just after.

Counts are halved now and then, so that old observations count less. The constants below bound
memory and say how fast to believe; docs/internals/policies.md says on which data they were chosen.
"""

from collections import deque
from operator import mul
from typing import Final

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.tree.node import PrefixNode

Kind = tuple[int, ...]

BINS: Final = 44
"""Bins of age; the last one has what is older, too."""
OBSERVED_MAX: Final = 1 << 16
"""Maximum prompts under observation; the oldest is dropped first."""
BELIEF: Final = 60.0
"""Observations after which a kind's own hazard counts as much as the more general kind's."""
HAZARD_UNKNOWN: Final = 0.05
"""Reuse in each bin of age before anything is known: the same in every octave, hence LRU's
order."""
HALVE_EVERY: Final = 1 << 14
"""Prompts after which all counts are halved."""
BRANCHES_SHARED: Final = 4
"""A prefix with this many continuations is shared: each continuation starts a new conversation."""
LEVEL_BELIEF: Final = 5.0
"""Expected uses after which a kind's own level counts as much as the more general kind's."""
NEVER: Final = 1 << 60
"""Longer than any pause."""
ADVANCE_MAX: Final = 128
"""Maximum observations that one call moves to their next bin of age."""
FRESH: Final = 32
"""A rank stays valid until a class that it is computed from has grown by this fraction (1/32)."""
PARTS: Final = 16
"""Parts of the table of observations: a growing dict is copied as a whole, in one call."""
HAZARD_MAX: Final = 0.95
"""Limit of the hazard: several traits together never make a reuse certain."""
TURNS_APART: Final = 3
"""From this many turns on, traits are learned for all turns together."""
PAUSE_MIN: Final = 4
PAUSE_MAX: Final = 12
"""Pauses below and above these powers of two are treated alike."""


class ReuseCounts:
    """The outcomes of one class of observations: by bin of age, how many entered and were used.

    Attributes:
        events: number of counted outcomes, halved with the counts.
    """

    __slots__ = ("events", "reused", "seen")

    def __init__(self, bins: int) -> None:
        self.events = 0
        self.reused = [0.0] * bins
        self.seen = [0.0] * bins

    def hazards(self, before: list[float]) -> list[float]:
        """Reuse in each bin; ``before`` is the expectation without observations.

        There are as many bins as can have been reached by now; nothing is counted in later ones.
        """
        foreseen = sum(map(mul, self.seen, before))
        level = BELIEF * (sum(self.reused) + LEVEL_BELIEF) / (foreseen + LEVEL_BELIEF)
        reused, seen = self.reused, self.seen
        return [
            hazard
            if (hazard := (reused[at] + level * expected) / (seen[at] + BELIEF)) < HAZARD_MAX
            else HAZARD_MAX
            for at, expected in enumerate(before)
        ]

    def halve(self) -> None:
        """Halve all counts, so that old observations count less."""
        self.events //= 2
        self.reused = [count / 2 for count in self.reused]
        self.seen = [count / 2 for count in self.seen]


class Observation:
    """A prefix that is observed until it is used again; ``key`` is None after that."""

    __slots__ = ("counts", "key", "since", "turns", "use_interval", "uses")

    def __init__(
        self, key: bytes, node: PrefixNode, uses: int, counts: tuple[ReuseCounts, ...], since: int
    ) -> None:
        self.key: bytes | None = key
        self.counts = counts
        self.since = since
        self.turns = node.turns
        self.use_interval = node.use_interval
        self.uses = uses


class LearnedReuse:
    """Observes prefixes, and ranks kinds and ages of pages by the outcomes."""

    def __init__(self) -> None:
        self._observed: list[dict[bytes, Observation]] = [{} for _ in range(PARTS)]
        self._in_order: deque[Observation] = deque()
        self._by_age: list[deque[Observation]] = [deque() for _ in range(BINS)]
        self._table: dict[Kind, ReuseCounts] = {}
        self._tables: list[ReuseCounts] = []
        self._counted: dict[Kind, tuple[ReuseCounts, ...]] = {}
        self._ranks: dict[Kind, list[float]] = {}
        self._stale: deque[Kind] = deque()
        #: What its ranks were computed from: bins of age that were reached, events of each class.
        self._ranked: dict[Kind, list[int]] = {}
        #: The node stored last, which may be gone when the prompt ends, and the keys of its last
        #: page and of the one before that.
        self._end: PrefixNode | None = None
        self._end_key = self._before_end_key = b""
        self._end_tick = 0
        self._prompts = 0
        #: Whether more observations wait to be moved than one call may.
        self._behind = False

    # ---- events -----------------------------------------------------------------------------

    def used(self, node: PrefixNode, tick: int) -> None:
        """A request used the prefix that ends at ``node``."""
        watched = self._close(node, tick)
        if watched is not None:
            node.use_interval = min(tick - watched.since, node.use_interval or NEVER)
        self._observe(node, tick)

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> Kind | None:
        """The pages of a node were stored; where one has returned, the node is split behind it.

        Args:
            node: the node of those pages.
            keys: their keys.
            tick: the current tick.

        Returns:
            the kind whose ranks this changed, if any.
        """
        changed: Kind | None = None
        if self._has_returned(keys):
            while node.count > 1:
                pages = self._unobserved(node)
                if pages == node.count:
                    break
                changed = self._stored(node.split(pages or 1), tick) or changed
        return self._stored(node, tick) or changed

    def _has_returned(self, keys: list[PrefixKey]) -> bool:
        """Whether any of these pages is under observation."""
        observed = self._observed
        return any(key in observed[key[0] % PARTS] for key in keys)

    def _unobserved(self, node: PrefixNode) -> int:
        """How many leading pages of a node are not under observation."""
        keys, observed = node.keys, self._observed
        for at in range(0, len(keys), KEY_BYTES):
            if keys[at : at + KEY_BYTES] in observed[keys[at] % PARTS]:
                return at // KEY_BYTES
        return node.count

    def _stored(self, node: PrefixNode, tick: int) -> Kind | None:
        parent = node.above
        assert parent is not None, node
        if parent is not node.space.root and parent.branches < BRANCHES_SHARED:
            node.turns = parent.turns + (parent.uses > 0)
            node.use_interval = parent.use_interval
        node.pages_added = node.count + (parent.pages_added if parent is self._end else 0)
        before = self._close(node, tick)
        if before is not None:
            node.turns = max(node.turns, before.turns)
            node.uses = max(node.uses, before.uses + 1)
            node.branches = max(node.branches, 1)
            node.use_interval = min(tick - before.since, before.use_interval or NEVER)
            node.pages_added = 0
        changed = None
        if self._end is not None and parent is not self._end:
            changed = self._finish_prompt(tick)
        elif self._behind:
            self._behind = self._advance(tick)
        if parent.branches < BRANCHES_SHARED:
            self._take(parent.key)  # uses will be reported of its new continuation
        self._end, self._end_tick, self._end_key = node, tick, node.key
        before_end = node.key_before(node.count - 1)
        assert before_end is not None, node
        self._before_end_key = before_end
        return changed

    def evicted(self, node: PrefixNode) -> None:
        """Pass what is known of the conversation to the preceding page, the next victim."""
        parent = node.above
        assert parent is not None, node
        if parent.branches < BRANCHES_SHARED and node.turns >= parent.turns:
            parent.turns, parent.use_interval = node.turns, node.use_interval
            parent.pages_added, parent.deepest = node.pages_added, node.deepest

    def forget(self, most: int) -> bool:
        """Let go of up to ``most`` observations, or kinds; whether none is left."""
        for line in (self._in_order, *self._by_age):
            while line and most > 0:
                watched, most = line.popleft(), most - 1
                if watched.key is not None:
                    del self._part(watched.key)[watched.key]
                    watched.key = None
        for table in (self._ranks, self._ranked, self._counted, self._table):
            while table and most > 0:
                table.popitem()
                most -= 1
        while self._tables and most > 0:
            self._tables.pop()
            most -= 1
        assert most <= 0 or not any(self._observed), "all that is observed is in order, too"
        return most > 0

    def _finish_prompt(self, tick: int) -> Kind | None:
        """The pages stored last end a prompt: observe it, and update the counts."""
        end = self._end
        assert end is not None
        self._watch(self._end_key, end, end.uses, self.kind(end), self._end_tick)
        if self._before_end_key:
            before = end if end.count > 1 else end.space.index.get(PrefixKey(self._before_end_key))
            if before is not None:
                uses = 0 if before is end else before.uses
                kind = _kind_before(end) if before is end else self.kind(before)
                self._watch(self._before_end_key, before, uses, kind, self._end_tick)
        self._behind = self._advance(tick)
        self._prompts += 1
        turn = self._prompts % HALVE_EVERY
        if turn < len(self._tables) and self._prompts >= HALVE_EVERY:
            self._tables[turn].halve()
        if not self._stale:
            return None
        kind = self._stale.popleft()
        self._stale.append(kind)
        if not self._has_changed(kind):
            return None
        self._ranks[kind] = self._index(kind)
        return kind

    def _has_changed(self, kind: Kind) -> bool:
        """Whether enough was counted since a kind's ranks were computed to compute them again."""
        bins, *events = self._ranked[kind]
        if bins != self._bins():
            return True
        for at, counts in enumerate(self._counts_of(kind)):
            if not events[at] <= counts.events <= events[at] + events[at] // FRESH:
                return True
        return False

    def _observe(self, node: PrefixNode, tick: int) -> None:
        self._watch(node.key, node, node.uses, self.kind(node), tick)

    def _watch(self, key: bytes, node: PrefixNode, uses: int, kind: Kind, tick: int) -> None:
        """Observe a page of a node: its last one, or the one before."""
        observed = self._part(key)
        old = observed.get(key)
        if old is not None:
            if old.since >= tick:
                return
            old.key = None
        watched = Observation(key, node, uses, self._counts_of(kind), tick)
        observed[key] = watched
        self._in_order.append(watched)
        self._by_age[0].append(watched)
        if len(self._by_age[0]) > OBSERVED_MAX:  # nothing was stored for long, only used
            self._behind = self._advance(tick)
        while len(self._in_order) > OBSERVED_MAX:
            oldest = self._in_order.popleft()
            if oldest.key is not None:
                del self._part(oldest.key)[oldest.key]
                oldest.key = None

    def _take(self, key: bytes) -> Observation | None:
        """End the observation of a page, if there is one."""
        watched = self._part(key).pop(key, None)
        if watched is not None:
            watched.key = None
        return watched

    def _close(self, node: PrefixNode, tick: int) -> Observation | None:
        watched = self._take(node.key)
        if watched is not None:
            age_bin = self.bin_of(tick - watched.since)
            for counts in watched.counts:
                counts.reused[age_bin] += 1
                counts.seen[age_bin] += 1
                counts.events += 1
        return watched

    def _part(self, key: bytes) -> dict[bytes, Observation]:
        return self._observed[key[0] % PARTS if key else 0]  # the root has no key

    def _advance(self, tick: int) -> bool:
        """Count observations that outlived their bin of age; each passes each bin once.

        Returns:
            whether more is left than one call may do.
        """
        left = ADVANCE_MAX
        for age_bin in range(min(self.bin_of(tick) + 1, BINS - 1)):
            waiting, older = self._by_age[age_bin], self._by_age[age_bin + 1]
            if not waiting:
                continue
            limit = tick - _EDGES[age_bin + 1]
            while left and waiting:
                watched: Observation = waiting[0]
                if watched.since > limit:
                    break
                waiting.popleft()
                left -= 1
                if watched.key is not None:
                    for counts in watched.counts:
                        counts.seen[age_bin] += 1
                        counts.events += 1
                    older.append(watched)
            if not left:
                return True
        return False

    # ---- what was learnt --------------------------------------------------------------------

    @staticmethod
    def kind(node: PrefixNode) -> Kind:
        """The properties on which the node's reuse depends: place, turns, and then the traits."""
        if not node.branches:
            place = 0
        elif node.branches < BRANCHES_SHARED:
            place = 1
        else:
            place = 2 + min(node.uses.bit_length(), 8)
        return _kind(node, place, node.deepest, node.pages_added)

    def rank(self, kind: Kind, age_bin: int) -> float:
        """Expected uses per tick of a page of this kind and age; keep the highest."""
        ranks = self._ranks.get(kind)
        if ranks is None:
            ranks = self._ranks[kind] = self._index(kind)
            self._stale.append(kind)
        return ranks[age_bin]

    @staticmethod
    def bin_of(age: int) -> int:
        """The bin of an age in ticks."""
        if age < 2:
            return 0
        octave = age.bit_length() - 1
        return min(2 * octave + (age >> (octave - 1) & 1), BINS - 1)

    @staticmethod
    def upper_edge(age_bin: int) -> int:
        """The age at which a bin ends."""
        return _EDGES[age_bin + 1]

    def _counts_of(self, kind: Kind) -> tuple[ReuseCounts, ...]:
        """The tables that an observation of this kind enters."""
        counted = self._counted.get(kind)
        if counted is None:
            rows: list[ReuseCounts] = []
            for general in _general(kind):
                row = self._table.get(general)
                if row is None:
                    row = self._table[general] = ReuseCounts(BINS)
                    self._tables.append(row)
                rows.append(row)
            counted = self._counted[kind] = tuple(rows)
        return counted

    def _hazards(self, kind: Kind) -> list[float]:
        everything, place, turns, some_turns, *traits = self._counts_of(kind)
        bins = self._bins()
        placed = place.hazards(everything.hazards([HAZARD_UNKNOWN] * bins))
        hazards = turns.hazards(placed)
        usual = some_turns.hazards(placed)
        for trait in traits:
            with_trait = trait.hazards(usual)
            hazards = [
                product
                if (product := hazard * with_trait[at] / usual[at]) < HAZARD_MAX
                else HAZARD_MAX
                for at, hazard in enumerate(hazards)
            ]
        return hazards

    def _bins(self) -> int:
        """How many bins to compute: no page is older than the clock, so later ones are equal."""
        return min(self.bin_of(self._end_tick) + 2, BINS)

    def _index(self, kind: Kind) -> list[float]:
        """The Gittins index at the start of each bin, computed from the last bin to the first.

        A later stretch of bins is worth waiting for as long as it yields more per tick.
        """
        hazards = self._hazards(kind)
        bins = len(hazards)
        assert 0 < bins <= BINS
        self._ranked[kind] = [bins] + [counts.events for counts in self._counts_of(kind)]
        ranks = [0.0] * bins
        stretches: list[tuple[float, float, float, float]] = []
        for at in range(bins - 1, -1, -1):
            hazard = hazards[at]
            uses, ticks, alive = hazard, (1 - hazard / 2) * _WIDTHS[at], 1 - hazard
            while stretches and stretches[-1][0] * ticks > uses:
                _, more, longer, left = stretches.pop()
                uses, ticks, alive = uses + alive * more, ticks + alive * longer, alive * left
            ranks[at] = uses / ticks
            stretches.append((ranks[at], uses, ticks, alive))
        return ranks + ranks[-1:] * (BINS - bins)


def _kind(node: PrefixNode, place: int, deepest: int, pages_added: int) -> Kind:
    turns = node.turns if node.turns < 5 else min(3 + node.turns.bit_length(), 9)
    depth = min((deepest.bit_length() + 1) // 2, 4)
    if place > 1 or not turns:
        return place, turns, depth, 0, 0
    pause = min(max(node.use_interval.bit_length(), PAUSE_MIN), PAUSE_MAX)
    added = min(pages_added.bit_length(), 4)
    return place, turns, depth, pause, added


def _kind_before(end: PrefixNode) -> Kind:
    """The kind of the second to last page of a node, which only the last one continues."""
    return _kind(end, 1, end.depth - 1, max(0, end.pages_added - 1))


def _general(kind: Kind) -> list[Kind]:
    """The names of the tables of ``kind``: all, its place, its turns, and each of its traits."""
    place, turns, *traits = kind
    some = place, min(turns, TURNS_APART)
    return [(), (place,), (place, turns), (*some, 0, 0)] + [
        (*some, 1 + at, trait) for at, trait in enumerate(traits)
    ]


def _edge(age_bin: int) -> int:
    if age_bin < 3:
        return 0 if age_bin == 0 else 2
    octave = age_bin // 2
    return 3 << octave - 1 if age_bin % 2 else 1 << octave


_EDGES: Final[list[int]] = [_edge(age_bin) for age_bin in range(BINS + 1)]
_WIDTHS: Final[list[int]] = [
    max(1, _EDGES[age_bin + 1] - _EDGES[age_bin]) for age_bin in range(BINS)
]
