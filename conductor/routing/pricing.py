"""What each engine would take for a request, in seconds. Pure.

It counts what engines have to do already, what they got in the same call, and what those who are
considered earlier are thought to bring them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import Column, CostColumns, Terms
from conductor.routing.policy import Fetches
from kvstore.index.layout import Words

Rows = npt.NDArray[np.intp]
"""Rows of engines in the view."""
OUTPUT_TOKENS: Final = 100
"""So many steps count as much as the handoff when an engine is chosen to decode."""
_PROMPTS_COMPARED: Final = 8
"""Prompts of this call that later ones are compared with."""


class Prompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        tokens: their number; 0 = unknown.
        usable: how much of it each engine has; float64 [engines].
        peer: how much more its node could fetch; likewise.
        keys: a chain value for each of its leading pages.
    """

    tokens: int
    usable: Column
    peer: Column
    keys: Words


class PricedEngines:
    """What some engines would take for one request, in columns.

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

    def shown(self, rows: Sequence[int]) -> npt.NDArray[np.float32]:
        """The terms of other rows, float32 [5, rows]; not a number for engines that have none."""
        every = np.full((len(self.terms), max(rows) + 1), np.nan, dtype=np.float32)
        every[:, self.rows] = self.terms
        return every[:, np.array(rows, dtype=np.intp)]


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
        self._costs = replace(
            costs, kv_room=costs.kv_room.copy(), coming_bytes=costs.coming_bytes.copy()
        )
        self._fetches = fetches
        self._thought_s = costs.backlog_s.copy()
        self._given: deque[tuple[int, Words]] = deque(maxlen=_PROMPTS_COMPARED)
        self.backlog_s = costs.backlog_s.copy()

    def pairs(
        self, prompt: Prompt, choices: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> PricedEngines:
        """What engines would take for a prompt, each with the best that decodes after it.

        Args:
            prompt: the prompt.
            choices: rows of engines that could compute it, and of those that could decode after
                them; none of these = they decode themselves.
        """
        firsts = [one for some, _ in choices for one in some]
        rows = np.array(firsts, dtype=np.intp)
        handoff_s, tbt_s = np.zeros(len(firsts)), self._costs.step_s[rows]
        start = 0
        for some, seconds in choices:
            mine = slice(start, start + len(some))
            start += len(some)
            if some and seconds:
                decode = np.array(seconds, dtype=np.intp)
                comes_s = self._comes_s(decode, prompt)
                best = int(np.lexsort(self._decoding(decode, comes_s, prompt)[::-1])[0])
                sends_s = self._sends_s(rows[mine], prompt)
                handoff_s[mine] = np.maximum(comes_s[best], sends_s)
                tbt_s[mine] = self._costs.step_s[decode[best]]
        return self._computing(prompt, rows, handoff_s, tbt_s)

    def decoding(self, first: int, seconds: Sequence[int], prompt: Prompt) -> tuple[Column, Column]:
        """What it costs to decode at each of some engines what ``first`` computes.

        Returns:
            Whether the KV has no room there; then seconds.
        """
        decode = np.array(seconds, dtype=np.intp)
        sends_s = self._sends_s(np.array([first], dtype=np.intp), prompt)
        return self._decoding(decode, np.maximum(self._comes_s(decode, prompt), sends_s), prompt)

    def receiving(self, seconds: Sequence[int], prompt: Prompt) -> tuple[Column, Column]:
        """The same if nothing is known of who computed it."""
        decode = np.array(seconds, dtype=np.intp)
        return self._decoding(decode, self._comes_s(decode, prompt), prompt)

    def _computing(
        self, prompt: Prompt, rows: Rows, handoff_s: Column, tbt_s: Column
    ) -> PricedEngines:
        tokens = prompt.tokens
        usable, peer = prompt.usable[rows], prompt.peer[rows]
        if len(prompt.keys) and self._given:
            self._expect(usable, rows, prompt)
        last = max(0, tokens - 1)
        np.minimum(usable, last, out=usable)
        reached = np.minimum(usable + peer, last)
        costs = self._costs
        computed_s = self._prefill_s(rows, tokens, usable)
        size = (reached - usable) * costs.token_bytes[rows] + costs.coming_bytes[rows]
        fetch_s = np.where(reached > usable, size / costs.network_bytes_per_s[rows], 0.0)
        rest_s = self._prefill_s(rows, tokens, reached)
        fetched = (reached > usable) & self._fetches(usable, reached, fetch_s + rest_s, computed_s)
        terms = Terms(
            queue_s=self._thought_s[rows],
            fetch_s=np.where(fetched, fetch_s, 0.0),
            prefill_s=np.where(fetched, rest_s, computed_s),
            handoff_s=handoff_s,
            tbt_s=tbt_s,
        )
        return PricedEngines(rows, terms, np.where(fetched, reached - usable, 0.0))

    def _comes_s(self, rows: Rows, prompt: Prompt) -> Column:
        """Seconds until the KV of a prompt has come to each of these engines, by their links."""
        missing = np.maximum(prompt.tokens - prompt.usable[rows], 0.0)
        costs = self._costs
        size = missing * costs.token_bytes[rows] + costs.coming_bytes[rows]
        seconds: Column = size / costs.network_bytes_per_s[rows]
        return seconds

    def _sends_s(self, rows: Rows, prompt: Prompt) -> Column:
        """Seconds in which each of these engines could send the KV of a prompt."""
        costs = self._costs
        size = prompt.tokens * costs.token_bytes[rows]
        seconds: Column = size / costs.network_bytes_per_s[rows]
        return seconds

    def _decoding(self, rows: Rows, comes_s: Column, prompt: Prompt) -> tuple[Column, Column]:
        full = (self._costs.kv_room[rows] < prompt.tokens).astype(np.float64)
        return full, comes_s + OUTPUT_TOKENS * self._costs.step_s[rows]

    def give(self, row: int, seconds: float, keys: Words) -> None:
        """An engine gets a prompt in this call."""
        self.backlog_s[row] += seconds
        self.think(row, seconds, keys)

    def think(self, row: int, seconds: float, keys: Words) -> None:
        """An engine is thought to get a prompt later."""
        self._thought_s[row] += seconds
        if len(keys):
            self._given.append((row, keys))

    def send(self, row: int, tokens: int) -> None:
        """A decode engine gets the KV of a prompt."""
        self._costs.coming_bytes[row] += tokens * self._costs.token_bytes[row]
        self._costs.kv_room[row] -= tokens

    def _prefill_s(self, rows: Rows, tokens: int, prefix: Column) -> Column:
        """Seconds to compute the end of a prompt, as ``CostPrior.prefill_seconds``."""
        costs = self._costs
        new = np.maximum(tokens - prefix, 0.0)
        pairs = new * (prefix + (new + 1.0) / 2.0)
        weights_s = np.maximum(costs.floor_s[rows], costs.token_s[rows] * new)
        seconds: Column = costs.constant_s[rows] + weights_s + costs.pair_s[rows] * pairs
        return seconds

    def _expect(self, usable: Column, rows: Rows, prompt: Prompt) -> None:
        """Count what engines will have of a prompt when those of this call are computed."""
        keys = prompt.keys
        for row, given in self._given:
            size = min(len(given), len(keys))
            common = int(np.count_nonzero(given[:size] == keys[:size]))
            if common:
                at = np.flatnonzero(rows == row)
                usable[at] = np.maximum(usable[at], common * (prompt.tokens // len(keys)))
