"""Chooses engines by seconds: one that has room now, or one that is worth waiting for. Pure."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from conductor.routing.columns import NO_KEYS, Column, Offers, View, Waiting
from conductor.routing.engines import Role
from conductor.routing.policy import Binding, Policy
from conductor.routing.pricing import PairRows, Pairs, PricedEngines, Prices, Prompt, pair_rows

AHEAD_S: Final = 0.1
"""A late binding policy gives an engine its next prompt so long before it has computed the last: so
it never waits, and can compute short prompts together."""
_ROUNDING_S: Final = 1e-6
"""Differences of times are not exact: one who is woken for an engine must find it free."""
_IN_VAIN_MAX: Final = 48
"""Requests with one key that may prefer an engine that is not free; no more are asked then."""
_ALIKE_ASKED: Final = 4
"""Of those that would reuse the same prefix only so many of these are asked one after another; then
the 8th, the 16th and so on. Those between wait with the one before them."""
_NOTHING: Final = np.zeros(0)
_NO_OFFERS: Final = Offers([], _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
"""Policies with costs in seconds need nothing but these."""

Key = tuple[str, frozenset[str]]
"""Model, and engines that have failed: the same engines can serve requests with equal ones."""


class ChosenEngines(NamedTuple):
    """What was chosen for one request.

    Attributes:
        first: row of the engine that computes the prompt; negative = the request waits.
        second: row of the engine that decodes.
        priced: what each candidate would take.
        waits_for: row of the engine for which it waits from now on; negative = none.
        full: whether all later requests of this key wait, too.
    """

    first: int = -1
    second: int = -1
    priced: PricedEngines | None = None
    waits_for: int = -1
    full: bool = False


class _Choices(NamedTuple):
    """Rows of engines that could serve a request, until somebody is assigned.

    Attributes:
        pairs: first ones, and those that can decode after them.
        firsts: the position of each first one among all.
        rows: the same, as arrays.
        free: first ones that can be given a prompt.
        full: 1 for first ones that have no room.
    """

    pairs: Pairs
    rows: PairRows
    firsts: dict[int, int]
    free: set[int]
    full: Column


@dataclass(slots=True)
class _Alike:
    """Requests that would reuse the same prefix, and prefer an engine that is not free.

    Attributes:
        count: how many have been considered.
        row: of the engine that the last one preferred which was asked.
        seconds: that it would have taken there.
    """

    count: int = 0
    row: int = -1
    seconds: float = 0.0

    def waits(self) -> bool:
        """Whether the next one does what the last one did; it is counted."""
        self.count += 1
        return self.count > _ALIKE_ASKED and self.count & (self.count - 1) != 0


class SecondsChooser:
    """The choices of one call."""

    def __init__(
        self,
        policy: Policy,
        view: View,
        has_room: Callable[[int], bool],
        least: Callable[[Sequence[Column], Sequence[int]], int],
    ) -> None:
        """Begin with what the engines have.

        Args:
            policy: with costs in seconds.
            view: the engines, with their costs.
            has_room: whether the engine in a row has a free place now.
            least: which of the engines in some rows has the least costs.
        """
        assert view.costs is not None
        assert policy.fetches is not None
        self._policy = policy
        self._view = view
        self._has_room = has_room
        self._least = least
        self._late = policy.binds is Binding.LATE
        self._prices = Prices(view.costs, policy.fetches)
        self._choices: dict[Key, _Choices] = {}
        self._in_vain: Counter[Key] = Counter()
        self._alike: dict[tuple[Key, object], _Alike] = {}
        self._alone: dict[tuple[int, ...], PairRows] = {}
        self._roomless: set[Key] = set()  # no first engine has a place; places only get fewer

    def choose(
        self, waiting: Waiting, row: int, pairs: Callable[[], Pairs], now: float
    ) -> ChosenEngines:
        """Choose for one request; what is chosen counts for those that come later.

        Args:
            waiting: the requests.
            row: of this one.
            pairs: engines that could serve it, whether the first ones have room or not.
            now: time on the clock of the deadlines.
        """
        key = (waiting.models[row], waiting.excluded[row])
        if key not in self._choices:
            self._choices[key] = self._possible(pairs(), self.is_free)
        choices = self._choices[key]
        bound = self.bound(waiting, row)
        if bound in choices.firsts:
            takers = {bound} if self._has_room(bound) else set[int]()
            if not takers and key not in self._roomless and waiting.waits_long(row, now):
                takers = set(filter(self._has_room, choices.firsts))
                if not takers:
                    self._roomless.add(key)
            if not takers:
                return ChosenEngines(waits_for=bound)
            only = [([one for one in some if one in takers], then) for some, then in choices.pairs]
            choices = self._possible(only, takers.__contains__)
        in_vain = self._late and (not choices.free or self._in_vain[key] >= _IN_VAIN_MAX)
        if not choices.firsts or in_vain:
            return ChosenEngines(full=True)
        prompt = self._prompt(waiting, row)
        alike = self._alike_of(key, prompt)
        if self._late and alike.waits():
            self._prices.think(alike.row, alike.seconds, NO_KEYS)
            return ChosenEngines()
        priced = self._prices.pairs(prompt, choices.rows)
        costs = self._policy.costs(waiting, row, _NO_OFFERS._replace(terms=priced.terms))
        first = self._least((*costs, choices.full), choices.rows.firsts)
        at = choices.firsts[first]
        if bound >= 0:  # it has been counted as waiting
            self._prices.think(bound, -waiting.least_s[row], NO_KEYS)
        seconds = float(priced.terms.fetch_s[at] + priced.terms.prefill_s[at])
        if first not in choices.free:
            self._prices.think(first, seconds, prompt.keys)
            self._in_vain[key] += 1
            alike.row, alike.seconds = first, seconds
            return ChosenEngines(waits_for=-1 if self._late else first)
        second = first
        if self._view.roles[first] is not Role.MIXED:
            decoders = next(then for some, then in choices.pairs if first in some)
            second = self._least(self._prices.decoding(first, decoders, prompt), decoders)
            self._prices.send(second, prompt.tokens)
        self._prices.give(first, seconds, prompt.keys)
        self._choices.clear()
        alike.count = 0
        return ChosenEngines(first, second, priced)

    def _alike_of(self, key: Key, prompt: Prompt) -> _Alike:
        """Those before with the same key that would reuse the same prefix, in tokens or pages."""
        pages, reused = len(prompt.keys), float((prompt.usable + prompt.peer).max(initial=0.0))
        page = min(pages, int(reused * pages / max(1, prompt.tokens)))
        prefix = int(prompt.keys[page - 1]) if page else 0
        return self._alike.setdefault((key, prefix), _Alike())

    def _prompt(self, waiting: Waiting, row: int) -> Prompt:
        found = waiting.prefixes(row, self._view.ids)
        tokens, output = waiting.tokens[row] or 0, waiting.outputs[row]
        return Prompt(tokens, found.usable, found.peer, waiting.keys[row], output)

    def _possible(self, pairs: Pairs, is_free: Callable[[int], bool]) -> _Choices:
        rows = pair_rows(pairs)
        firsts = {one: at for at, one in enumerate(rows.firsts)}
        full = np.array([not self._has_room(row) for row in rows.firsts], dtype=np.float64)
        return _Choices(pairs, rows, firsts, set(filter(is_free, firsts)), full)

    def receiver(self, waiting: Waiting, row: int, seconds: Sequence[int]) -> int:
        """Row of the best of some engines to decode a request whose KV was computed elsewhere."""
        return self._least(self._prices.receiving(seconds, self._prompt(waiting, row)), seconds)

    def bound(self, waiting: Waiting, row: int) -> int:
        """Row of the engine for which a request waits; negative = none."""
        found = self._view.row_of(waiting.bound[row]) if waiting.bound[row] else None
        return -1 if found is None else found

    def keep(self, waiting: Waiting) -> None:
        """Count those who wait for an engine already: they are before all who come later."""
        if self._policy.binds is Binding.ARRIVAL:
            rows = [self._view.row_of(bound) if bound else None for bound in waiting.bound]
            self._prices.think_all(rows, waiting.least_s)

    def is_free(self, row: int) -> bool:
        """Whether an engine can be given a prompt."""
        idle = not self._late or self._prices.backlog_s[row] <= AHEAD_S + _ROUNDING_S
        return bool(idle) and self._has_room(row)

    def least_s(self, waiting: Waiting, row: int, firsts: list[int]) -> float:
        """Seconds of a prompt at that of some engines that needs the fewest, queues left out."""
        key = tuple(firsts)
        if key not in self._alone:
            self._alone[key] = pair_rows([(firsts, [])])
        terms = self._prices.pairs(self._prompt(waiting, row), self._alone[key]).terms
        return float((terms.fetch_s + terms.prefill_s).min())
