"""How many seconds each engine would need for a request. Pure.

It includes the present work of engines, the assignments of the same call, and the predicted work of
requests that are considered earlier.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
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


class OwnTimes(NamedTuple):
    """The estimated times of some engines for prompts, those before them and handoffs left out.

    Attributes:
        known: see :class:`Computing`.
        fetch_s: seconds to fetch that are left when the engine's present prompts are computed;
            float64 [prompts, engines].
        new_tokens: prompt tokens that they compute, likewise.
        step_s: seconds of a step with these alone, but for attention, likewise.
        late_s: see :class:`Terms`; if nothing else is computed in the same step, likewise.
    """

    known: Computing
    fetch_s: Column
    new_tokens: Column
    step_s: Column
    late_s: Column

    def of(self, row: int) -> "OwnTimes":
        """One prompt, copied."""
        one = slice(row, row + 1)
        known = Computing._make([column[..., one, :].copy() for column in self.known])
        return OwnTimes(known, *[column[one].copy() for column in self[1:]])

    def put(self, at: Sequence[int], others: "OwnTimes") -> None:
        """Replace those of the engines at some positions."""
        for mine, its in zip((*self.known, *self[1:]), (*others.known, *others[1:]), strict=True):
            mine[..., at] = its


class Block(NamedTuple):
    """The estimated times of some engines for several prompts, until the next assignment.

    Attributes:
        prompts: the prompts.
        columns: the same.
        choices: engines that could compute them, and those that could decode after these.
        reused: tokens of each prompt that it would reuse where it reuses the most.
        own: the times that do not depend on other prompts of the call.
        tbt_s: between two tokens where the prompts would decode; float64 [prompts, engines].
        handoffs: seconds of the handoff to the best decode engine: by the link of that, by the link
            of the engine without the bytes, and of the bytes there; float64 [3, prompts, engines];
            None = no engine hands over.
        leaving_s: seconds until the KV of earlier prompts has been sent; float64 [engines].
    """

    prompts: Sequence[Prompt]
    columns: PromptColumns
    choices: PairRows
    reused: list[float]
    own: OwnTimes
    tbt_s: Column
    handoffs: Column | None
    leaving_s: Column


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
        return float(self._block.own.new_tokens[self._row, at])

    def shared_s(self, at: int) -> float:
        """How many seconds less it takes there because others are computed in the same step."""
        assert self._block is not None
        known = self._block.own.known
        return float(known.prefill_s[self._row, at] - self.terms.prefill_s[at])

    def chosen(self) -> None:
        """The request gets an engine: keep what :meth:`at` and :meth:`shown` need, and no more."""
        assert self._block is not None
        self._known, self._block = self._block.own.known.of(self._row), None
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

    def block(self, prompts: Sequence[Prompt], choices: PairRows) -> Block:
        """What the times for some prompts have in common until the next :meth:`give`.

        Args:
            prompts: the prompts.
            choices: engines that could compute them, and those that could decode after these.
        """
        columns = prompt_columns(prompts)
        known = self._alone(prompts, columns, choices.rows)
        own = self._own(columns, known, choices.rows, self._of(choices.rows))
        reused = (columns.usable + columns.peer).max(axis=1, initial=0.0).tolist()
        return self._block(prompts, columns, choices, reused, own)

    def again(self, block: Block, choices: PairRows) -> Block:
        """A block after a :meth:`give`: nothing but queues and handoffs is different then.

        Args:
            block: of the call; nothing was sent to engines that could compute its prompts.
            choices: now; the same engines compute, but others may decode.
        """
        own, rows = block.own, block.choices.rows
        own = own._replace(fetch_s=np.maximum(own.known.fetch_s - self.backlog_s.take(rows), 0.0))
        return self._block(block.prompts, block.columns, choices, block.reused, own)

    def _block(
        self,
        prompts: Sequence[Prompt],
        columns: PromptColumns,
        choices: PairRows,
        reused: list[float],
        own: OwnTimes,
    ) -> Block:
        """Prompts with the best handoffs."""
        rows, handoffs, tbt_s = choices.rows, None, np.empty(own.fetch_s.shape)
        tbt_s[:] = self._of(rows).step_s
        if choices.parts:
            handoffs = np.zeros((3, *tbt_s.shape))
            handoffs[2] = -inf  # of those that decode themselves: with it, the handoff takes 0
            for mine, decode in choices.parts:
                tbt_s[:, mine] = self._handoffs(columns, rows[mine], decode, handoffs[:, :, mine])
        leaving_s = self._leaving_s.take(rows)
        return Block(prompts, columns, choices, reused, own, tbt_s, handoffs, leaving_s)

    def _own(
        self, columns: PromptColumns, known: Computing, rows: Rows, fixed: CostInputs[Column]
    ) -> OwnTimes:
        new_tokens = np.maximum(columns.tokens - known.prefix, 0.0)
        return OwnTimes(
            known,
            fetch_s=np.maximum(known.fetch_s - self.backlog_s.take(rows), 0.0),
            new_tokens=new_tokens,
            step_s=fixed.constant_s + np.maximum(fixed.floor_s, fixed.token_s * new_tokens),
            late_s=self._late_s(known.prefill_s, fixed),
        )

    def _late_s(self, own_s: Column, fixed: CostInputs[Column]) -> Column:
        late = np.minimum(fixed.late_most, own_s * (fixed.late_per_s + own_s * fixed.late_per_s2))
        seconds: Column = late * self._costs.usual_s
        return seconds

    def _handoffs(
        self, columns: PromptColumns, rows: Rows, decode: Rows, handoffs: Column
    ) -> Column:
        """Put down handoffs from some engines to the best one for each prompt.

        Returns:
            Seconds of a step there; float64 [prompts, 1].
        """
        comes_s, costs = self._comes_s(decode, columns), self._costs.inputs
        full, seconds = self._decoding(decode, comes_s, columns)
        if full.any():
            seconds = np.where(full > full.min(axis=1, keepdims=True), inf, seconds)
        best = seconds.argmin(axis=1)
        each, there = np.arange(len(best)), self._of(decode)
        factor = there.handoff_factor[best] * self._moved(decode, columns)[each, best]
        token_s = costs.token_bytes.take(rows) / costs.network_bytes_per_s.take(rows)
        handoffs[0] = comes_s[each, best, None]
        handoffs[1] = there.handoff_s[best, None]
        handoffs[2] = factor[:, None] * token_s
        step_s: Column = there.step_s[best, None]
        return step_s

    def priced(self, block: Block, row: int) -> PricedEngines:
        """The times for one prompt of a block: with the best decode engine after each engine."""
        expected = self._expected(block.prompts[row])
        if expected:
            block, row = self._expecting(block, row, expected), 0
        rows, own = block.choices.rows, block.own
        queue_s = self._thought_s.take(rows)
        fetch_s, own_s, late_s = own.fetch_s[row], own.known.prefill_s[row], own.late_s[row]
        if block.handoffs is None:
            handoff_s = np.zeros(len(rows))
        else:
            comes_s, constant_s, sends_s = block.handoffs[:, row]
            before_s = np.maximum(block.leaving_s - (queue_s + fetch_s + own_s), 0.0)
            handoff_s = np.maximum(comes_s, constant_s + before_s + sends_s)
        steps = self._thought_steps
        if steps.may_be_open:
            fixed = self._of(rows)
            shared_s = steps.shared_s(rows, own.new_tokens[row], own.step_s[row], fixed)
            if shared_s is not None:
                if np.count_nonzero(fetch_s):
                    shared_s = np.where(fetch_s > 0.0, 0.0, shared_s)
                own_s = np.maximum(own_s - shared_s, 0.0)
                if np.count_nonzero(fixed.late_most):
                    late_s = self._late_s(own_s, fixed)
        terms = Terms(queue_s, fetch_s, own_s, handoff_s, block.tbt_s[row], late_s)
        return PricedEngines(block, row, terms)

    def _expecting(self, block: Block, row: int, expected: Mapping[int, float]) -> Block:
        """One prompt of a block, as some engines will have more of it than they have now."""
        choices, prompts = block.choices, block.prompts[row : row + 1]
        at, own = [choices.at[one] for one in expected if one in choices.at], block.own.of(row)
        if at:
            rows, columns = choices.rows[at], prompt_columns(prompts)
            fixed: CostInputs[Column] = CostInputs._make(self._kept.all.take(rows, axis=1))
            coming = self._coming_bytes.take(rows)
            known = computing(columns, rows, fixed, coming, self._fetches, expected)
            own.put(at, self._own(columns, known, rows, fixed))
        one = slice(row, row + 1)
        return block._replace(
            prompts=prompts, own=own, tbt_s=block.tbt_s[one],
            handoffs=None if block.handoffs is None else block.handoffs[:, one],
        )  # fmt: skip

    def least_s(self, prompts: Sequence[Prompt], rows: Rows) -> list[float]:
        """Seconds of each prompt at that of some engines that needs the fewest, queues left out."""
        found = self._alone(prompts, prompt_columns(prompts), rows)
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

    def _alone(self, prompts: Sequence[Prompt], columns: PromptColumns, rows: Rows) -> Computing:
        """The estimated times of engines to compute prompts, without queues."""
        kept: _Kept | None = self._kept.computing
        keeps = len(prompts) == 1 and not self._sent
        if keeps and kept is not None and kept.fits(prompts[0], rows, self._fetches):
            return kept.found
        coming_bytes = self._coming_bytes.take(rows)
        found = computing(columns, rows, self._of(rows), coming_bytes, self._fetches, _NOTHING)
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
            least = max(prompt.own(row), expected.get(row, 0.0))
            size, page = min(len(given), len(keys)), int(least // page_tokens)
            if page >= size or given[page] != keys[page]:  # it has as many without
                continue
            tokens = int(np.count_nonzero(given[:size] == keys[:size])) * page_tokens
            if tokens > least:
                expected[row] = tokens
        return expected
