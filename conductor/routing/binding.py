"""Chooses engines by seconds: one that has room now, or one that is worth waiting for. Pure."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np

from conductor.routing.columns import NO_KEYS, Column, Eligible, Terms, View, Waiting
from conductor.routing.computing import Prompt
from conductor.routing.groups import PairRows, Pairs, Rows, pair_rows, serving
from conductor.routing.policy import Binding, Policy
from conductor.routing.pricing import Block, PricedEngines, Prices
from kvstore.index.layout import Flags

AHEAD_S: Final = 0.1
"""A late binding policy gives an engine its next prompt this long before it has computed the last
one, so that it never waits; then others that fit into the same step, as long as none comes before
them that does not."""
JOINED: Final = 3.0
"""Others join only if they save those who wait so many times what they cost those of the step: not
all who wait are behind them, and what joins is decided earlier than it would be."""
_ROUNDING_S: Final = 1e-6
"""Differences of times are not exact: a request that is woken for an engine must find it free."""
_IN_VAIN_MAX: Final = 48
"""Requests with one key that may prefer an engine that is not free; no more are asked then."""
_ALIKE_ASKED: Final = 4
"""Of the requests that would reuse the same prefix, only this many are examined one after another;
then the 8th, the 16th and so on. Those between wait with the one before them."""
AHEAD_MAX: Final = _IN_VAIN_MAX
"""Requests that are priced at once. The first one is priced alone, as it often gets an engine; each
time that is not enough, four times as many, but not more than may still be asked."""
_NOTHING: Final = np.zeros(0)

_NONE: Final = frozenset[str]()

Key = tuple[str, frozenset[str]]
"""Model, and engines that have failed: the same engines can serve requests with equal ones."""


class ChosenEngines(NamedTuple):
    """The choice for one request.

    Attributes:
        first: row of the engine that computes the prompt; negative = the request waits.
        second: row of the engine that decodes.
        priced: the costs of each candidate.
        waits_for: row of the engine for which it waits from now on; negative = none.
        full: whether all later requests of this key wait, too.
    """

    first: int = -1
    second: int = -1
    priced: PricedEngines | None = None
    waits_for: int = -1
    full: bool = False


class _Choices(NamedTuple):
    """Rows of engines that could serve a request, until the next assignment.

    Attributes:
        pairs: prefill engines, and those that can decode after them.
        rows: the same, as arrays.
        takes: how many tokens a prompt for each prefill engine may compute; 0 = it can get none.
        any_takes: whether one can get a prompt.
        full: 1 for prefill engines that have no room.
    """

    pairs: Pairs
    rows: PairRows
    takes: Column
    any_takes: bool
    full: Column


@dataclass(slots=True)
class _Alike:
    """Requests that would reuse the same prefix, and prefer an engine that is not free.

    Attributes:
        count: how many have been considered.
        row: of the engine that the last one preferred which was asked.
        seconds: that it would have taken there.
        new_tokens: that it would have computed there.
    """

    count: int = 0
    row: int = -1
    seconds: float = 0.0
    new_tokens: float = 0.0

    def waits(self) -> bool:
        """Whether the next request does the same as the last one; it is counted."""
        self.count += 1
        return self.count > _ALIKE_ASKED and self.count & (self.count - 1) != 0


class _Priced(NamedTuple):
    """Requests that are priced together.

    Attributes:
        at: the position of each request, by its row.
        block: their prices.
        is_valid: False after an assignment: handoffs and queues are others now.
    """

    at: dict[int, int]
    block: Block
    is_valid: bool = True


class SecondsChooser:
    """The choices of one call."""

    def __init__(
        self,
        policy: Policy,
        view: View,
        room: Flags,
        least: Callable[[Sequence[Column], Sequence[int]], int],
    ) -> None:
        """Begin with what the engines have.

        Args:
            policy: with costs in seconds.
            view: the engines, with their costs.
            room: whether each engine has a free place now; who gives places keeps it so.
            least: which of the engines in some rows has the least costs.
        """
        assert view.costs is not None
        assert policy.fetches is not None
        self._policy = policy
        self._view = view
        self._room = room
        self._least = least
        self._late = policy.binds is Binding.LATE
        self._prices = Prices(view.costs, policy.fetches)
        self._choices: dict[Key, _Choices] = {}
        self._priced: _Priced | None = None
        self._ahead = 1  # requests that are priced at once next time
        self._in_vain: Counter[Key] = Counter()
        self._alike: dict[tuple[Key, object], _Alike] = {}
        self._awaited: set[int] = set()  # engines for which requests waited before this call
        self._roomless: set[Key] = set()  # no engine is left over; places only get fewer

    def choose(
        self,
        waiting: Waiting,
        row: int,
        pairs: Callable[[], tuple[Pairs, PairRows]],
        now: float,
        following: Sequence[int] = (),
    ) -> ChosenEngines:
        """Choose for one request; the choice counts for later requests.

        Args:
            waiting: the requests.
            row: of this one.
            pairs: engines that could serve it, whether they have room or not; and as arrays.
            now: time on the clock of the deadlines.
            following: rows of those that are probably next; they are priced with this one.
        """
        key = (waiting.models[row], waiting.excluded[row])
        if key not in self._choices:
            self._choices[key] = self._possible(*pairs())
        choices = self._choices[key]
        bound = self.bound(waiting, row)
        if bound in choices.rows.at:
            takers = {bound} if self._room[bound] else set[int]()
            if not takers and key not in self._roomless and waiting.waits_long(row, now):
                takers = {one for one in choices.rows.firsts if self._is_left_over(one)}
                if not takers:
                    self._roomless.add(key)
            if not takers:
                return ChosenEngines(waits_for=bound)
            only = [([one for one in some if one in takers], then) for some, then in choices.pairs]
            choices = self._possible(only, pair_rows(only), takers)
        in_vain = self._late and (not choices.any_takes or self._in_vain[key] >= _IN_VAIN_MAX)
        if not choices.rows.firsts or in_vain:
            return ChosenEngines(full=True)
        block, position = self._priced_with(waiting, row, following, choices.rows)
        prompt = block.prompts[position]
        alike = self._alike_of(key, prompt, block.reused[position])
        if self._late and alike.waits():
            self._prices.think(alike.row, alike.seconds, alike.new_tokens, NO_KEYS)
            return ChosenEngines()
        priced = self._prices.priced(block, position)
        costs = self._policy.costs(waiting, row, _priced_only(priced.terms))
        first = self._least((*costs, choices.full), choices.rows.firsts)
        at = choices.rows.at[first]
        if bound >= 0:  # it has been counted as waiting
            self._prices.unthink(bound, waiting.least_s[row])
        seconds = float(priced.terms.fetch_s[at] + priced.terms.prefill_s[at])
        new_tokens = priced.new_tokens(at)
        waits = len(waiting) / len(choices.rows.firsts)
        if not self._gets(first, choices.takes[at], priced, at, waits):
            self._prices.think(first, seconds, new_tokens, prompt.keys)
            self._in_vain[key] += self._late
            alike.row, alike.seconds, alike.new_tokens = first, seconds, new_tokens
            return ChosenEngines(waits_for=-1 if self._late else first)
        priced.chosen()
        second = first
        decoders = next(then for some, then in choices.pairs if first in some)
        if decoders:
            rows = next(then for mine, then in choices.rows.parts if mine.start <= at < mine.stop)
            found = self._prices.decoding(first, rows, prompt)
            second = self._least((found.full, found.seconds), decoders)
            self._prices.decided(priced, at, second, found)
        self._prices.give(first, seconds, new_tokens, prompt.keys)
        if second != first:
            self._prices.send(first, second, prompt)
        self._choices.clear()
        self._assigned(second if second != first else -1)
        alike.count = 0
        return ChosenEngines(first, second, priced)

    def _priced_with(
        self, waiting: Waiting, row: int, following: Sequence[int], engines: PairRows
    ) -> tuple[Block, int]:
        """A request, priced together with some that can use the same engines, if they follow.

        Returns:
            The prices of all, and its position there.
        """
        several = self._priced
        if several is not None and row in several.at:
            block, is_same = several.block, several.block.choices is engines
            if not several.is_valid and np.array_equal(block.choices.rows, engines.rows):
                block, is_same = self._prices.again(block, engines), True
                self._priced = _Priced(several.at, block)
            if is_same:
                return block, several.at[row]
        key, rows = (waiting.models[row], waiting.excluded[row]), [row]
        more = min(self._ahead, _IN_VAIN_MAX - self._in_vain[key]) - 1
        for one in following[:more] if not waiting.bound[row] else ():
            same = (waiting.models[one], waiting.excluded[one]) == key
            if same and not waiting.bound[one]:
                rows.append(one)
        prompts = [prompt_of(self._view, waiting, one) for one in rows]
        at = {one: position for position, one in enumerate(rows)}
        several = _Priced(at, self._prices.block(prompts, engines))
        if not waiting.bound[row]:
            self._priced, self._ahead = several, min(4 * self._ahead, AHEAD_MAX)
        return several.block, at[row]

    def _assigned(self, receiver: int) -> None:
        """A request has got an engine, and another one its KV; negative = none has."""
        several, self._priced, self._ahead = self._priced, None, 1
        if several is not None and receiver not in several.block.choices.at:
            self._priced = several._replace(is_valid=False)

    def _possible(
        self, pairs: Pairs, rows: PairRows, takers: Collection[int] | None = None
    ) -> _Choices:
        """Choices among these; only ``takers`` can get a prompt, None = free engines."""
        if takers is not None:
            takes = np.array([inf if one in takers else 0.0 for one in rows.firsts])
        else:
            takes = self.takes(rows.rows)
        full = (~self._room.take(rows.rows)).astype(np.float64)
        return _Choices(pairs, rows, takes, bool(takes.any()), full)

    def _alike_of(self, key: Key, prompt: Prompt, reused: float) -> _Alike:
        """Those before with the same key that would reuse the same prefix, in tokens or pages."""
        pages = len(prompt.keys)
        page = min(pages, int(reused * pages / max(1, prompt.tokens)))
        prefix = int(prompt.keys[page - 1]) if page else 0
        return self._alike.setdefault((key, prefix), _Alike())

    def _gets(self, row: int, takes: float, priced: PricedEngines, at: int, waits: float) -> bool:
        """Whether an engine gets a prompt now: it is free, or the prompt joins its next step.

        It joins if it saves those who wait for an engine much more than it costs those of the step.
        Short prompts save half of their time or more, long ones next to nothing.
        """
        if takes in (0.0, inf) or priced.new_tokens(at) > takes:
            return takes == inf
        delayed_s = float(self._prices.steps.prompts[row] * priced.terms.prefill_s[at])
        return 0.0 < JOINED * delayed_s <= waits * priced.shared_s(at)

    def keeps(self, waiting: Waiting, row: int, wanted: int) -> bool:
        """Whether the engine that was to decode a request has room for the KV that arrives now."""
        return self._prices.keeps(wanted, waiting.outputs[row])

    def with_room(self, waiting: Waiting, row: int, seconds: Sequence[int]) -> list[int]:
        """Those of some other engines that have room for this KV."""
        full, _ = self._prices.receiving(seconds, prompt_of(self._view, waiting, row))
        return [one for one, is_full in zip(seconds, full.tolist(), strict=True) if not is_full]

    def receiver(
        self, waiting: Waiting, row: int, seconds: Sequence[int], wanted: int | None
    ) -> int:
        """Row of the best of some engines to decode a request whose KV was computed elsewhere.

        The choice counts for later requests; ``wanted`` is the engine that was to decode it.
        """
        prompt = prompt_of(self._view, waiting, row)
        chosen = self._least(self._prices.receiving(seconds, prompt), seconds)
        self._prices.receive(chosen, wanted, prompt)
        return chosen

    def bound(self, waiting: Waiting, row: int) -> int:
        """Row of the engine for which a request waits; negative = none."""
        found = self._view.row_of(waiting.bound[row]) if waiting.bound[row] else None
        return -1 if found is None else found

    def keep(self, waiting: Waiting) -> None:
        """Count requests that wait for an engine already: they precede all later ones."""
        if self._policy.binds is Binding.ARRIVAL:
            rows = [self._view.row_of(bound) if bound else None for bound in waiting.bound]
            self._prices.think_all(rows, waiting.least_s)
            self._awaited.update(row for row in rows if row is not None)

    def _is_left_over(self, row: int) -> bool:
        """Whether an engine has a place that nobody waits for.

        A request that gives up its engine must not delay those who wait for another one: near the
        limit of all engines each of these would give up its own in turn, and be late as well.
        """
        return bool(self._room[row]) and row not in self._awaited

    def takes(self, rows: Rows) -> Column:
        """How many tokens a prompt may compute that engines are given; 0 = they can get none."""
        takes: Column = np.where(self._room.take(rows), inf, 0.0)
        if self._late:
            backlog_s, steps = self._prices.backlog_s.take(rows), self._prices.steps
            before_s = backlog_s - steps.seconds.take(rows)
            left = np.where(before_s <= AHEAD_S + _ROUNDING_S, steps.left(rows), 0.0)
            takes = np.minimum(takes, np.where(backlog_s <= AHEAD_S + _ROUNDING_S, inf, left))
        return takes


def _priced_only(terms: Terms) -> Eligible:
    """Policies with costs in seconds need nothing but these."""
    return Eligible([], _NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, terms)


def least_seconds(
    policy: Policy, view: View, waiting: Waiting, rows: Sequence[int]
) -> Sequence[float]:
    """Seconds of prompts, queues left out; 0 = unknown.

    They are those at the engine for which a request waits, else where it needs the fewest.
    """
    if not rows or policy.fetches is None or view.costs is None:
        return [0.0] * len(rows)
    prices, together = Prices(view.costs, policy.fetches), dict[Key | int, list[int]]()
    seconds = [0.0] * len(rows)
    for position, row in enumerate(rows):
        bound = view.row_of(waiting.bound[row]) if waiting.bound[row] else None
        engines = (waiting.models[row], _NONE) if bound is None else bound
        if serving(view, waiting.models[row]).firsts:
            together.setdefault(engines, []).append(position)
    for engines, positions in together.items():
        if isinstance(engines, int):
            where = np.array([engines], dtype=np.intp)
        else:
            where = serving(view, engines[0]).computing.rows
        prompts = [prompt_of(view, waiting, rows[one]) for one in positions]
        for one, least_s in zip(positions, prices.least_s(prompts, where), strict=True):
            seconds[one] = least_s
    return seconds


def prompt_of(view: View, waiting: Waiting, row: int) -> Prompt:
    """The prompt of a request, as engines are priced for it."""
    found = waiting.prefixes(row, view.ids)
    tokens, output = waiting.tokens[row] or 0, waiting.outputs[row]
    prefix = (found.usable, found.peer, found.held, found.at_node)
    return Prompt(tokens, *prefix, waiting.keys[row], output)
