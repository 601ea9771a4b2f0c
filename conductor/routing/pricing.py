"""How many seconds each engine would need for a request. Pure.

It includes the present work of engines, the assignments of the same call, and the predicted work of
requests that are considered earlier.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import Column, CostColumns, Terms
from conductor.routing.groups import PairRows, Rows
from conductor.routing.policy import Fetches
from kvstore.index.layout import Words

_ROWS_KEPT: Final = 64
"""Arrays of rows whose columns are kept."""
_PROMPTS_COMPARED: Final = 8
"""Prompts of this call that later ones are compared with."""


class Prompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        tokens: their number; 0 = unknown.
        usable: how much of it each engine has; float64 [engines].
        peer: how much more its node could fetch; likewise.
        keys: a chain value for each of its leading pages.
        output: tokens that its answer is expected to have.
    """

    tokens: int
    usable: Column
    peer: Column
    keys: Words
    output: float


class _Fixed(NamedTuple):
    """The inputs that do not change during a call, of some engines; see :class:`CostColumns`."""

    constant_s: Column
    floor_s: Column
    token_s: Column
    pair_s: Column
    token_bytes: Column
    network_bytes_per_s: Column
    step_s: Column
    late_per_s: Column
    late_per_s2: Column
    late_most: Column


class Computing(NamedTuple):
    """The estimated times of some engines to compute one prompt, if no other one comes before it.

    Attributes:
        prompt: the prompt.
        rows: of the engines.
        fetches: decides whether they fetch.
        fetch_s: see :class:`Terms`.
        prefill_s: likewise.
        fetched: prompt tokens that each fetches; float64.
    """

    prompt: Prompt
    rows: Rows
    fetches: Fetches
    fetch_s: Column
    prefill_s: Column
    fetched: Column

    def fits(self, prompt: Prompt, rows: Rows, fetches: Fetches) -> bool:
        """Whether it is of this prompt, of these engines."""
        mine = self.prompt
        return (
            mine.usable is prompt.usable
            and mine.peer is prompt.peer
            and mine.tokens == prompt.tokens
            and self.fetches is fetches
            and (self.rows is rows or np.array_equal(self.rows, rows))
        )


class PricedEngines:
    """The estimated times of some engines for one request, in columns.

    Attributes:
        rows: of these engines, in the view.
        terms: seconds.
        fetched: prompt tokens that each fetches; float64.
    """

    def __init__(self, rows: Rows, terms: Terms, fetched: Column) -> None:
        self.rows = rows
        self.terms = terms
        self.fetched = fetched

    def at(self, row: int) -> tuple[int, float, float, float]:
        """Of one engine: tokens that it fetches, and seconds to fetch, to prefill and in all."""
        at = int(np.flatnonzero(self.rows == row)[0])
        terms = self.terms
        fetch_s, prefill_s, ttft_s = terms.fetch_s[at], terms.prefill_s[at], terms.ttft_s[at]
        return int(self.fetched[at]), float(fetch_s), float(prefill_s), float(ttft_s)

    def shown(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The terms of other rows, float32 [6, rows]; not a number for engines that have none."""
        every = np.full((len(self.terms), int(rows.max()) + 1), np.nan, dtype=np.float32)
        every[:, self.rows] = self.terms
        return every.take(rows, axis=1)


class Prices:
    """The prices of one call.

    Attributes:
        backlog_s: seconds until the prompts that each engine has are computed; float64 [engines].
    """

    def __init__(self, costs: CostColumns, fetches: Fetches) -> None:
        """Begin with what the engines have.

        Args:
            costs: of all engines.
            fetches: decides for each engine whether it fetches or computes.
        """
        self._kv_room, self._coming_bytes = costs.kv_room.copy(), costs.coming_bytes.copy()
        self._costs = costs
        self._leaving_s = costs.leaving_s.copy()
        self._sent = False  # a prompt was sent in this call
        self._fetches = fetches
        self._kept = costs.kept
        if self._kept.all is None:
            self._kept.all = np.array([getattr(costs, name) for name in _Fixed._fields])
        self._thought_s = costs.backlog_s + costs.others_s
        self._given: deque[tuple[int, Words]] = deque(maxlen=_PROMPTS_COMPARED)
        self.backlog_s = costs.backlog_s.copy()

    def pairs(self, prompt: Prompt, choices: PairRows) -> PricedEngines:
        """The estimated times for a prompt: for each engine, with the best decode engine after it.

        Args:
            prompt: the prompt.
            choices: engines that could compute it, and those that could decode after them.
        """
        rows = choices.rows
        handoff_s, tbt_s = np.zeros(len(rows)), self._of(rows).step_s.copy()
        known = self._alone(prompt, rows)
        sends_s = handoff_s
        if choices.parts:
            computed_s = self._thought_s.take(rows) + known.fetch_s + known.prefill_s
            sends_s = self._sends_s(rows, prompt)
            sends_s += np.maximum(self._leaving_s.take(rows) - computed_s, 0.0)
        for mine, decode in choices.parts:
            comes_s = self._comes_s(decode, prompt)
            full, seconds = self._decoding(decode, comes_s, prompt)
            best = int(seconds.argmin())
            if full.any():
                best = int(np.lexsort((seconds, full))[0])
            handoff_s[mine] = np.maximum(comes_s[best], sends_s[mine])
            tbt_s[mine] = self._of(decode).step_s[best]
        return self._computing(known, handoff_s, tbt_s)

    def least_s(self, prompt: Prompt, rows: Rows) -> float:
        """Seconds of a prompt at that of some engines that needs the fewest, queues left out."""
        found = self._alone(prompt, rows)
        return float((found.fetch_s + found.prefill_s).min())

    def _of(self, rows: Rows) -> _Fixed:
        fixed = self._kept.of_rows
        known = fixed.get(id(rows))
        if known is None:
            if len(fixed) >= _ROWS_KEPT:
                fixed.clear()
            known = fixed[id(rows)] = (rows, _Fixed(*self._kept.all.take(rows, axis=1)))
        found: _Fixed = known[1]
        return found

    def decoding(self, first: int, decode: Rows, prompt: Prompt) -> tuple[Column, Column]:
        """The costs of decoding at each of some engines a prompt computed by ``first``.

        Returns:
            Whether the KV has no room there; then seconds.
        """
        costs = self._costs
        sends_s = prompt.tokens * costs.token_bytes[first] / costs.network_bytes_per_s[first]
        return self._decoding(decode, np.maximum(self._comes_s(decode, prompt), sends_s), prompt)

    def receiving(self, seconds: Sequence[int], prompt: Prompt) -> tuple[Column, Column]:
        """The same if the engine that computed it is unknown."""
        decode = np.array(seconds, dtype=np.intp)
        return self._decoding(decode, self._comes_s(decode, prompt), prompt)

    def _computing(self, known: Computing, handoff_s: Column, tbt_s: Column) -> PricedEngines:
        rows = known.rows
        queue_s = self._thought_s.take(rows)
        fixed, own_s = self._of(rows), known.prefill_s
        late = np.minimum(fixed.late_most, own_s * (fixed.late_per_s + own_s * fixed.late_per_s2))
        late_s = late * self._costs.usual_s
        terms = Terms(queue_s, known.fetch_s, own_s, handoff_s, tbt_s, late_s)
        return PricedEngines(rows, terms, known.fetched)

    def _alone(self, prompt: Prompt, rows: Rows) -> Computing:
        """The estimated times of engines to compute a prompt, without queues."""
        if self._sent or (len(prompt.keys) and self._given):
            return self._computed(prompt, rows)
        kept: Computing | None = self._kept.computing
        if kept is None or not kept.fits(prompt, rows, self._fetches):
            kept = self._kept.computing = self._computed(prompt, rows)
        return kept

    def _computed(self, prompt: Prompt, rows: Rows) -> Computing:
        tokens = prompt.tokens
        usable, peer = prompt.usable.take(rows), prompt.peer.take(rows)
        if len(prompt.keys) and self._given:
            self._expect(usable, rows, prompt)
        last = max(0, tokens - 1)
        np.minimum(usable, last, out=usable)
        computed_s = self._prefill_s(rows, tokens, usable)
        reached = np.minimum(usable + peer, last)
        longer = reached > usable
        if not longer.any():
            nothing = np.zeros(len(rows))
            return Computing(prompt, rows, self._fetches, nothing, computed_s, nothing)
        fixed = self._of(rows)
        size = (reached - usable) * fixed.token_bytes + self._coming_bytes[rows]
        fetch_s = np.where(longer, size / fixed.network_bytes_per_s, 0.0)
        rest_s = self._prefill_s(rows, tokens, reached)
        fetched = longer & self._fetches(usable, reached, fetch_s + rest_s, computed_s)
        return Computing(
            prompt, rows, self._fetches,
            fetch_s=np.where(fetched, fetch_s, 0.0),
            prefill_s=np.where(fetched, rest_s, computed_s),
            fetched=np.where(fetched, reached - usable, 0.0),
        )  # fmt: skip

    def _comes_s(self, rows: Rows, prompt: Prompt) -> Column:
        """Seconds until the KV of a prompt has arrived at each of these engines."""
        missing = np.maximum(prompt.tokens - prompt.usable[rows], 0.0)
        fixed = self._of(rows)
        size = missing * fixed.token_bytes + self._coming_bytes[rows]
        seconds: Column = size / fixed.network_bytes_per_s
        return seconds

    def _sends_s(self, rows: Rows, prompt: Prompt) -> Column:
        """Seconds in which each of these engines could send the KV of a prompt."""
        fixed = self._of(rows)
        seconds: Column = prompt.tokens * fixed.token_bytes / fixed.network_bytes_per_s
        return seconds

    def _decoding(self, rows: Rows, comes_s: Column, prompt: Prompt) -> tuple[Column, Column]:
        full = (self._kv_room[rows] < prompt.tokens + prompt.output).astype(np.float64)
        return full, comes_s + prompt.output * self._of(rows).step_s

    def give(self, row: int, seconds: float, keys: Words) -> None:
        """An engine gets a prompt in this call."""
        self.backlog_s[row] += seconds
        self.think(row, seconds, keys)

    def think(self, row: int, seconds: float, keys: Words) -> None:
        """An engine is thought to get a prompt later."""
        self._thought_s[row] += seconds
        if len(keys):
            self._given.append((row, keys))

    def think_all(self, rows: Sequence[int | None], seconds: Sequence[float]) -> None:
        """Predict that engines get prompts of these seconds later; row None = none does."""
        there = [at for at, row in enumerate(rows) if row is not None]
        whose = np.array([rows[at] for at in there], dtype=np.intp)
        np.add.at(self._thought_s, whose, np.array([seconds[at] for at in there]))

    def send(self, first: int, row: int, tokens: int) -> None:
        """A decode engine gets the KV of the prompt that ``first`` has been given last."""
        self._sent = True
        seconds = tokens * self._costs.token_bytes[first] / self._costs.network_bytes_per_s[first]
        self._leaving_s[first] = max(self._leaving_s[first], self.backlog_s[first]) + seconds
        self._coming_bytes[row] += tokens * self._costs.token_bytes[row]
        self._kv_room[row] -= tokens

    def _prefill_s(self, rows: Rows, tokens: int, prefix: Column) -> Column:
        """Seconds to compute the end of a prompt, as ``CostPrior.prefill_seconds``."""
        fixed = self._of(rows)
        new = np.maximum(tokens - prefix, 0.0)
        pairs = new * (prefix + (new + 1.0) / 2.0)
        weights_s = np.maximum(fixed.floor_s, fixed.token_s * new)
        seconds: Column = fixed.constant_s + weights_s + fixed.pair_s * pairs
        return seconds

    def _expect(self, usable: Column, rows: Rows, prompt: Prompt) -> None:
        """Count the part of a prompt that engines will have after the prompts of this call."""
        keys = prompt.keys
        page_tokens = (
            prompt.tokens // (len(keys) + 1) + 1
        )  # at least so many; the last is not whole
        for row, given in self._given:
            if given[0] != keys[0]:  # no later ones are equal then
                continue
            size = min(len(given), len(keys))
            common = int(np.count_nonzero(given[:size] == keys[:size]))
            if common:
                at = np.flatnonzero(rows == row)
                usable[at] = np.maximum(usable[at], common * page_tokens)
