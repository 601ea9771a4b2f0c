"""How many seconds each engine would need for a request. Pure.

It includes the present work of engines, the assignments of the same call, and the predicted work of
requests that are considered earlier.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import Column, CostColumns, CostInputs, Terms
from conductor.routing.computing import (
    Computing,
    Prompt,
    PromptColumns,
    computing,
    prompt_columns,
)
from conductor.routing.groups import PairRows, Rows
from conductor.routing.moving import FetchedTokens
from conductor.routing.policy import Fetches
from conductor.routing.together import LastSteps
from kvstore.index.layout import Words

_ROWS_KEPT: Final = 64
"""Arrays of rows whose columns are kept."""
_HANDOFF: Final = Terms._fields.index("handoff_s")
_TBT: Final = Terms._fields.index("tbt_s")
_PROMPTS_COMPARED: Final = 8
"""Prompts of this call that later ones are compared with."""
_NOTHING: Final[Mapping[int, float]] = {}


class _Kept(NamedTuple):
    """What was found out of one prompt."""

    prompt: Prompt
    rows: Rows
    fetches: Fetches
    found: Computing

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


class PricedPrompt(NamedTuple):
    """What one engine would take for a prompt.

    Attributes:
        prefix: prompt tokens that it need not compute.
        fetch: number of these tokens that it fetches.
        fetch_s: seconds to fetch, whatever it computes meanwhile.
        prefill_s: seconds to compute the rest.
        ttft_s: seconds until the first token.
    """

    prefix: int
    fetch: FetchedTokens
    fetch_s: float
    prefill_s: float
    ttft_s: float


class Decoding(NamedTuple):
    """What it costs to decode a prompt at some engines, in columns.

    Attributes:
        rows: rows of these engines in the view.
        full: whether the KV has no room there.
        seconds: until the KV is there and the answer decoded.
        comes_s: until the KV has arrived, by the engine's link.
        sends_s: until the KV has been sent, by the link of the engine that computes it.
        tbt_s: between two tokens.
    """

    rows: Rows
    full: Column
    seconds: Column
    comes_s: Column
    sends_s: Column
    tbt_s: Column


class Block(NamedTuple):
    """The estimated times of some engines for several prompts, until the next assignment.

    Attributes:
        prompts: the prompts.
        choices: engines that could compute them, and those that could decode after these.
        known: see :class:`Computing`.
        fetch_s: seconds to fetch that are left when the engine's present prompts are computed;
            float64 [prompts, engines].
        new_tokens: prompt tokens that they compute, likewise.
        tbt_s: between two tokens where the prompts would decode, likewise.
        handoffs: of each part of ``choices``.
    """

    prompts: Sequence[Prompt]
    choices: PairRows
    known: Computing
    fetch_s: Column
    new_tokens: Column
    tbt_s: Column
    handoffs: "Sequence[BlockHandoffs]"


class BlockHandoffs(NamedTuple):
    """Handoffs from some of the engines of a :class:`Block` to the best decode engine.

    Attributes:
        mine: positions of these engines.
        comes_s: seconds by the link of the decode engine; float64 [prompts].
        constant_s: seconds by the links of these engines without the bytes, likewise.
        sends_s: seconds of the bytes there; float64 [prompts, engines].
    """

    mine: slice
    comes_s: Column
    constant_s: Column
    sends_s: Column


class PricedEngines:
    """The estimated times of some engines for one request, in columns.

    Attributes:
        rows: rows of these engines in the view.
        terms: seconds.
        decoders: rows of the engines that could decode after the chosen one, seconds of the handoff
            to each, and between two tokens there; None = nothing was chosen, or one that decodes.
    """

    def __init__(self, block: Block, row: int, terms: Terms) -> None:
        self.rows = block.choices.rows
        self.terms = terms
        self.decoders: tuple[Rows, Column, Column] | None = None
        self._block: Block | None = block
        self._row = row
        self._known: Computing | None = None

    def new_tokens(self, at: int) -> float:
        """Prompt tokens that the engine at a position computes."""
        assert self._block is not None
        return float(self._block.new_tokens[self._row, at])

    def shared_s(self, at: int) -> float:
        """How many seconds less it takes there because others are computed in the same step."""
        assert self._block is not None
        return float(self._block.known.prefill_s[self._row, at] - self.terms.prefill_s[at])

    def chosen(self) -> None:
        """The request gets an engine: keep what :meth:`at` and :meth:`shown` need, and no more."""
        assert self._block is not None
        self._known, self._block = self._block.known.of(self._row), None
        self.terms = Terms._make([one.copy() for one in self.terms])

    def at(self, row: int) -> PricedPrompt:
        """Of one engine, after :meth:`chosen`."""
        at, mine = int(np.flatnonzero(self.rows == row)[0]), self._known
        assert mine is not None
        return PricedPrompt(
            int(mine.prefix[at]), FetchedTokens(*mine.fetched[:, at].tolist()),
            float(mine.fetch_s[at]), float(mine.prefill_s[at]), float(self.terms.ttft_s[at]),
        )  # fmt: skip

    def shown(self, rows: Rows) -> npt.NDArray[np.float32]:
        """The terms of other rows, float32 [6, rows]; not a number for engines that have none."""
        every = np.full((len(self.terms), int(rows.max()) + 1), np.nan, dtype=np.float32)
        if self.decoders is not None:
            decode, handoff_s, tbt_s = self.decoders
            every[_HANDOFF, decode], every[_TBT, decode] = handoff_s, tbt_s
        every[:, self.rows] = self.terms
        return every.take(rows, axis=1)


class Prices:
    """The prices of one call.

    Attributes:
        backlog_s: seconds until the prompts that each engine has are computed; float64 [engines].
        steps: the last step of each engine; another prompt may be computed with it.
    """

    def __init__(self, costs: CostColumns, fetches: Fetches) -> None:
        """Begin with what the engines have.

        Args:
            costs: of all engines.
            fetches: decides for each engine whether it fetches or computes.
        """
        inputs = costs.inputs
        self._kv_room, self._coming_bytes = inputs.kv_room.copy(), inputs.coming_bytes.copy()
        self._costs = costs
        self._leaving_s = costs.leaving_s.copy()
        self._sent = False  # a prompt was sent in this call
        self._fetches = fetches
        self._kept = costs.kept
        if self._kept.all is None:
            self._kept.all = np.array(costs.inputs)
        self._thought_s = costs.backlog_s + inputs.others_s
        self._given: deque[tuple[int, int, Words]] = deque(maxlen=_PROMPTS_COMPARED)
        self.backlog_s = costs.backlog_s.copy()
        self.steps, self._thought_steps = LastSteps(costs.steps), LastSteps(costs.steps)

    def pairs(self, prompt: Prompt, choices: PairRows) -> PricedEngines:
        """The estimated times for one prompt; see :meth:`block` and :meth:`priced`."""
        return self.priced(self.block([prompt], choices), 0)

    def block(
        self,
        prompts: Sequence[Prompt],
        choices: PairRows,
        expected: Mapping[int, float] = _NOTHING,
    ) -> Block:
        """What the times for some prompts have in common until the next :meth:`give`.

        Args:
            prompts: the prompts.
            choices: engines that could compute them, and those that could decode after these.
            expected: row of an engine → tokens of each of these prompts that it will have.
        """
        rows, columns = choices.rows, prompt_columns(prompts)
        known = self._alone(prompts, columns, rows, expected)
        fixed = self._of(rows)
        tbt_s = np.empty(known.prefix.shape)
        tbt_s[:] = fixed.step_s
        handoffs = []
        for mine, decode in choices.parts:
            one, its_tbt_s = self._handoffs(columns, rows, mine, decode)
            handoffs.append(one)
            tbt_s[:, mine] = its_tbt_s[:, None]
        return Block(
            prompts, choices, known,
            fetch_s=np.maximum(known.fetch_s - self.backlog_s.take(rows), 0.0),
            new_tokens=np.maximum(columns.tokens - known.prefix, 0.0),
            tbt_s=tbt_s, handoffs=handoffs,
        )  # fmt: skip

    def _handoffs(
        self, columns: PromptColumns, rows: Rows, mine: slice, decode: Rows
    ) -> tuple[BlockHandoffs, Column]:
        """Handoffs from some engines to the best one for each prompt, and seconds of its steps."""
        comes_s, firsts = self._comes_s(decode, columns), self._of(rows)
        full, seconds = self._decoding(decode, comes_s, columns)
        best = seconds.argmin(axis=1)
        for row in np.flatnonzero(full.any(axis=1)).tolist():
            best[row] = np.lexsort((seconds[row], full[row]))[0]
        each, there = np.arange(len(best)), self._of(decode)
        factor = there.handoff_factor[best] * self._moved(decode, columns)[each, best]
        token_s = (firsts.token_bytes / firsts.network_bytes_per_s)[mine]
        sends_s = factor[:, None] * token_s
        found = BlockHandoffs(mine, comes_s[each, best], there.handoff_s[best], sends_s)
        return found, there.step_s[best]

    def priced(self, block: Block, row: int) -> PricedEngines:
        """The times for one prompt of a block: with the best decode engine after each engine."""
        prompt, choices = block.prompts[row], block.choices
        expected = self._expected(prompt)
        if expected:
            block, row = self.block([prompt], choices, expected), 0
        rows = choices.rows
        queue_s = self._thought_s.take(rows)
        fetch_s, own_s = block.fetch_s[row], block.known.prefill_s[row]
        handoff_s = np.zeros(len(rows))
        if block.handoffs:
            computed_s = queue_s + fetch_s + own_s
            before_s = np.maximum(self._leaving_s.take(rows) - computed_s, 0.0)
            for some in block.handoffs:
                sent_s = some.constant_s[row] + before_s[some.mine] + some.sends_s[row]
                handoff_s[some.mine] = np.maximum(some.comes_s[row], sent_s)
        fixed = self._of(rows)
        if self._thought_steps.may_be_open:
            shared_s = self._thought_steps.shared_s(rows, block.new_tokens[row], fixed)
            if shared_s is not None:
                own_s = np.maximum(own_s - np.where(fetch_s > 0.0, 0.0, shared_s), 0.0)
        late = np.minimum(fixed.late_most, own_s * (fixed.late_per_s + own_s * fixed.late_per_s2))
        late_s = late * self._costs.usual_s
        terms = Terms(queue_s, fetch_s, own_s, handoff_s, block.tbt_s[row], late_s)
        return PricedEngines(block, row, terms)

    def least_s(self, prompts: Sequence[Prompt], rows: Rows) -> list[float]:
        """Seconds of each prompt at that of some engines that needs the fewest, queues left out."""
        found = self._alone(prompts, prompt_columns(prompts), rows, _NOTHING)
        least: list[float] = (found.fetch_s + found.prefill_s).min(axis=1).tolist()
        return least

    def _of(self, rows: Rows) -> CostInputs[Column]:
        """The costs of some engines at the beginning of the call."""
        fixed = self._kept.of_rows
        known = fixed.get(id(rows))
        if known is None:
            if len(fixed) >= _ROWS_KEPT:
                fixed.clear()
            known = fixed[id(rows)] = (rows, CostInputs._make(self._kept.all.take(rows, axis=1)))
        found: CostInputs[Column] = known[1]
        return found

    def decoding(self, first: int, decode: Rows, prompt: Prompt) -> Decoding:
        """What it costs to decode at each of some engines a prompt computed by ``first``."""
        costs = self._costs.inputs
        byte_s = costs.token_bytes[first] / costs.network_bytes_per_s[first]
        fixed, moved = self._of(decode), self._moved(decode, prompt)
        sends_s = fixed.handoff_s + fixed.handoff_factor * moved * byte_s
        comes_s = self._comes_s(decode, prompt)
        full, seconds = self._decoding(decode, np.maximum(comes_s, sends_s), prompt)
        return Decoding(decode, full, seconds, comes_s, sends_s, fixed.step_s)

    def decided(self, priced: PricedEngines, at: int, second: int, found: Decoding) -> None:
        """Let the terms be those with the decode engine that was chosen after the first one.

        Before that they are those with the best one as far as it is known without the first.

        Args:
            priced: of this prompt, in this call; changed.
            at: position of the first engine in it.
            second: row of the decode engine.
            found: of the engines that could decode after the first one.
        """
        terms, first = priced.terms, int(priced.rows[at])
        computed_s = terms.queue_s[at] + terms.fetch_s[at] + terms.prefill_s[at]
        before_s = max(0.0, self._leaving_s[first] - computed_s)
        handoff_s = np.maximum(found.comes_s, found.sends_s + before_s)
        priced.decoders = (found.rows, handoff_s, found.tbt_s)
        chosen = int(np.flatnonzero(found.rows == second)[0])
        terms.handoff_s[at], terms.tbt_s[at] = handoff_s[chosen], found.tbt_s[chosen]

    def receiving(self, seconds: Sequence[int], prompt: Prompt) -> tuple[Column, Column]:
        """The same if the engine that computed it is unknown."""
        decode = np.array(seconds, dtype=np.intp)
        return self._decoding(decode, self._comes_s(decode, prompt), prompt)

    def keeps(self, row: int, output: float) -> bool:
        """Whether an engine has room for a prompt that it counts already, and for this answer."""
        return bool(self._kv_room[row] >= output)

    def receive(self, row: int, wanted: int | None, prompt: Prompt) -> None:
        """An engine gets the KV of a prompt; ``wanted`` has counted it: None = nobody has."""
        if wanted is not None:
            self._kv_room[wanted] += prompt.tokens
        self._kv_room[row] -= prompt.tokens

    def _alone(
        self,
        prompts: Sequence[Prompt],
        columns: PromptColumns,
        rows: Rows,
        expected: Mapping[int, float],
    ) -> Computing:
        """The estimated times of engines to compute prompts, without queues."""
        kept: _Kept | None = self._kept.computing
        keeps = len(prompts) == 1 and not expected and not self._sent
        if keeps and kept is not None and kept.fits(prompts[0], rows, self._fetches):
            return kept.found
        coming_bytes = self._coming_bytes.take(rows)
        found = computing(columns, rows, self._of(rows), coming_bytes, self._fetches, expected)
        if keeps:
            self._kept.computing = _Kept(prompts[0], rows, self._fetches, found)
        return found

    def _moved(self, rows: Rows, prompt: Prompt | PromptColumns) -> Column:
        """Tokens of a prompt that each of these engines would have to get from another."""
        moved: Column = np.maximum(prompt.tokens - prompt.held.take(rows, axis=-1), 0.0)
        return moved

    def _comes_s(self, rows: Rows, prompt: Prompt | PromptColumns) -> Column:
        """Seconds until a prompt's KV has arrived at each of these engines, by their links."""
        fixed = self._of(rows)
        size = self._moved(rows, prompt) * fixed.token_bytes + self._coming_bytes[rows]
        seconds: Column = fixed.handoff_s + fixed.handoff_factor * size / fixed.network_bytes_per_s
        return seconds

    def _decoding(
        self, rows: Rows, comes_s: Column, prompt: Prompt | PromptColumns
    ) -> tuple[Column, Column]:
        full = (self._kv_room[rows] < prompt.tokens + prompt.output).astype(np.float64)
        return full, comes_s + prompt.output * self._of(rows).step_s

    def give(self, row: int, seconds: float, new_tokens: float, keys: Words) -> None:
        """An engine gets a prompt in this call, of which it computes so many tokens."""
        self.steps.add(row, seconds, new_tokens, begins=not self.backlog_s[row])
        self.backlog_s[row] += seconds
        self._count(row, seconds, new_tokens, keys)

    def think(self, row: int, seconds: float, new_tokens: float, keys: Words) -> None:
        """An engine is thought to get a prompt later, and nobody else before it."""
        self.steps.close(row)
        self._count(row, seconds, new_tokens, keys)

    def _count(self, row: int, seconds: float, new_tokens: float, keys: Words) -> None:
        self._thought_steps.add(row, seconds, new_tokens, begins=not self._thought_s[row])
        self._thought_s[row] += seconds
        if len(keys):
            self._given.append((row, int(keys[0]), keys))

    def think_all(self, rows: Sequence[int | None], seconds: Sequence[float]) -> None:
        """Predict that engines get prompts of these seconds later; row None = none does."""
        there = [at for at, row in enumerate(rows) if row is not None]
        whose = np.array([rows[at] for at in there], dtype=np.intp)
        np.add.at(self._thought_s, whose, np.array([seconds[at] for at in there]))
        self._thought_steps.close(whose)

    def unthink(self, row: int, seconds: float) -> None:
        """One of these does not wait any more."""
        self._thought_s[row] -= seconds

    def send(self, first: int, row: int, prompt: Prompt) -> None:
        """A decode engine gets the KV of the prompt that ``first`` has been given last."""
        self._sent, costs = True, self._costs.inputs
        moved = max(0.0, prompt.tokens - prompt.held[row])
        seconds = moved * costs.token_bytes[first] / costs.network_bytes_per_s[first]
        seconds *= costs.handoff_factor[row]
        self._leaving_s[first] = max(self._leaving_s[first], self.backlog_s[first]) + seconds
        self._coming_bytes[row] += moved * costs.token_bytes[row]
        self._kv_room[row] -= prompt.tokens

    def _expected(self, prompt: Prompt) -> dict[int, float]:
        """The engines that will have more of a prompt than now, after the prompts of this call."""
        keys, expected = prompt.keys, dict[int, float]()
        if not self._given or not len(keys):
            return expected
        page_tokens = (
            prompt.tokens // (len(keys) + 1) + 1
        )  # at least so many; the last is not whole
        begins = int(keys[0])
        for row, first, given in self._given:
            if first != begins:  # no later ones are equal then
                continue
            size = min(len(given), len(keys))
            tokens = int(np.count_nonzero(given[:size] == keys[:size])) * page_tokens
            if tokens > max(prompt.own(row), expected.get(row, 0.0)):
                expected[row] = tokens
        return expected
