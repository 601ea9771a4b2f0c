"""How many seconds each engine would need for a request. Pure.

It includes the present work of engines, the assignments of the same call, and the predicted work of
requests that are considered earlier.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.routing.columns import Column, CostColumns, CostInputs, Terms
from conductor.routing.groups import PairRows, Rows
from conductor.routing.moving import FetchedTokens
from conductor.routing.policy import Fetches, sooner
from conductor.routing.together import LastSteps
from kvstore.index.layout import Words

_ROWS_KEPT: Final = 64
"""Arrays of rows whose columns are kept."""
_HANDOFF: Final = Terms._fields.index("handoff_s")
_TBT: Final = Terms._fields.index("tbt_s")
_PROMPTS_COMPARED: Final = 8
"""Prompts of this call that later ones are compared with."""


class Prompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        tokens: their number; 0 = unknown.
        usable: how much of it each engine has; float64 [engines].
        peer: how much more its node could fetch; likewise.
        held: how much of it each engine has now; likewise.
        at_node: of ``usable``, what the engine's node has in memory and on disk; float64
            [2, engines]; None = nothing.
        keys: a chain value for each of its leading pages.
        output: tokens that its answer is expected to have.
    """

    tokens: int
    usable: Column
    peer: Column
    held: Column
    at_node: Column | None
    keys: Words
    output: float


class Computing(NamedTuple):
    """The estimated times of some engines to compute one prompt, if no other one comes before it.

    Attributes:
        prompt: the prompt.
        rows: rows of the engines.
        fetches: decides whether they fetch.
        fetch_s: seconds to fetch.
        prefill_s: see :class:`Terms`.
        prefix: prompt tokens that it need not compute.
        fetched: number of these tokens that each engine fetches from the memory of its node, from
            its disk, and from another node; float64 [3, engines].
    """

    prompt: Prompt
    rows: Rows
    fetches: Fetches
    fetch_s: Column
    prefill_s: Column
    prefix: Column
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


class PricedEngines:
    """The estimated times of some engines for one request, in columns.

    Attributes:
        rows: rows of these engines in the view.
        terms: seconds.
        decoders: rows of the engines that could decode after the chosen one, seconds of the handoff
            to each, and between two tokens there; None = nothing was chosen, or one that decodes.
    """

    def __init__(self, computing: Computing, terms: Terms) -> None:
        self.rows = computing.rows
        self.terms = terms
        self.decoders: tuple[Rows, Column, Column] | None = None
        self._computing = computing

    def new_tokens(self, at: int) -> float:
        """Prompt tokens that the engine at a position computes."""
        return max(0.0, self._computing.prompt.tokens - float(self._computing.prefix[at]))

    def shared_s(self, at: int) -> float:
        """How many seconds less it takes there because others are computed in the same step."""
        return float(self._computing.prefill_s[at] - self.terms.prefill_s[at])

    def at(self, row: int) -> PricedPrompt:
        """Of one engine."""
        at, mine = int(np.flatnonzero(self.rows == row)[0]), self._computing
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
        self._given: deque[tuple[int, Words]] = deque(maxlen=_PROMPTS_COMPARED)
        self.backlog_s = costs.backlog_s.copy()
        self.steps, self._thought_steps = LastSteps(costs.steps), LastSteps(costs.steps)

    def pairs(self, prompt: Prompt, choices: PairRows) -> PricedEngines:
        """The estimated times for a prompt: for each engine, with the best decode engine after it.

        Args:
            prompt: the prompt.
            choices: engines that could compute it, and those that could decode after them.
        """
        rows = choices.rows
        handoff_s, tbt_s = np.zeros(len(rows)), self._of(rows).step_s.copy()
        known = self._alone(prompt, rows)
        fetch_s = np.maximum(known.fetch_s - self.backlog_s.take(rows), 0.0)
        before_s = token_s = handoff_s
        if choices.parts:
            computed_s = self._thought_s.take(rows) + fetch_s + known.prefill_s
            before_s = np.maximum(self._leaving_s.take(rows) - computed_s, 0.0)
            token_s = self._of(rows).token_bytes / self._of(rows).network_bytes_per_s
        for mine, decode in choices.parts:
            comes_s = self._comes_s(decode, prompt)
            full, seconds = self._decoding(decode, comes_s, prompt)
            best = int(seconds.argmin())
            if full.any():
                best = int(np.lexsort((seconds, full))[0])
            fixed, moved = self._of(decode), self._moved(decode, prompt)
            sends_s = fixed.handoff_s[best] + before_s[mine]
            sends_s += fixed.handoff_factor[best] * moved[best] * token_s[mine]
            handoff_s[mine] = np.maximum(comes_s[best], sends_s)
            tbt_s[mine] = fixed.step_s[best]
        return self._computing(known, fetch_s, handoff_s, tbt_s)

    def least_s(self, prompt: Prompt, rows: Rows) -> float:
        """Seconds of a prompt at that of some engines that needs the fewest, queues left out."""
        found = self._alone(prompt, rows)
        return float((found.fetch_s + found.prefill_s).min())

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

    def _computing(
        self, known: Computing, fetch_s: Column, handoff_s: Column, tbt_s: Column
    ) -> PricedEngines:
        queue_s = self._thought_s.take(known.rows)
        fixed, own_s = self._of(known.rows), known.prefill_s
        if self._thought_steps.may_be_open:
            new = np.maximum(known.prompt.tokens - known.prefix, 0.0)
            shared_s = self._thought_steps.shared_s(known.rows, new, fixed)
            own_s = np.maximum(own_s - np.where(fetch_s > 0.0, 0.0, shared_s), 0.0)
        late = np.minimum(fixed.late_most, own_s * (fixed.late_per_s + own_s * fixed.late_per_s2))
        late_s = late * self._costs.usual_s
        return PricedEngines(known, Terms(queue_s, fetch_s, own_s, handoff_s, tbt_s, late_s))

    def _alone(self, prompt: Prompt, rows: Rows) -> Computing:
        """The estimated times of engines to compute a prompt, without queues."""
        if self._sent or (len(prompt.keys) and self._given):
            return self._computed(prompt, rows)
        kept: Computing | None = self._kept.computing
        if kept is None or not kept.fits(prompt, rows, self._fetches):
            kept = self._kept.computing = self._computed(prompt, rows)
        return kept

    def _computed(self, prompt: Prompt, rows: Rows) -> Computing:
        tokens, last = prompt.tokens, max(0, prompt.tokens - 1)
        usable, peer = prompt.usable.take(rows), prompt.peer.take(rows)
        memory = disk = None
        if prompt.at_node is not None:
            memory, disk = prompt.at_node.take(rows, axis=1)
            usable -= memory + disk
        if len(prompt.keys) and self._given:
            self._expect(usable, rows, prompt)
        np.minimum(usable, last, out=usable)
        fetched, zeros = np.zeros((3, len(rows))), np.zeros(len(rows))
        found = Computing(
            prompt, rows, self._fetches, zeros, self._prefill_s(rows, tokens, usable), usable,
            fetched,
        )  # fmt: skip
        ends = np.minimum(prompt.usable.take(rows), last)
        if memory is not None and disk is not None:
            fixed = self._of(rows)
            own = prompt.usable.take(rows) - disk
            ahead = (
                (fixed.memory_byte_s, fixed.memory_bytes),
                (fixed.disk_byte_s, fixed.disk_bytes),
            )
            for kind, (end, (byte_s, before)) in enumerate(zip((own, ends), ahead, strict=True)):
                end = np.minimum(end, last)
                found = self._fetching(found, kind, end, byte_s, before, sooner)
        if not peer.any():
            return found
        there = np.where(found.prefix >= ends, ends + peer, 0.0)
        before = self._coming_bytes[rows]
        byte_s = self._of(rows).network_byte_s
        return self._fetching(found, 2, np.minimum(there, last), byte_s, before, self._fetches)

    def _fetching(
        self,
        found: Computing,
        kind: int,
        end: Column,
        byte_s: Column,
        ahead: Column,
        wanted: Fetches,
    ) -> Computing:
        """What engines take if those for which it is ``wanted`` fetch one more part of the prompt.

        Args:
            found: what they take without.
            kind: row of ``fetched``.
            end: tokens of the prompt up to the end of this part, if it is longer than their prefix.
            byte_s: seconds of a byte.
            ahead: bytes that arrive before it.
            wanted: decides.
        """
        more = np.maximum(end - found.prefix, 0.0)
        if not more.any():
            return found
        fixed, rows = self._of(found.rows), found.rows
        constant_s = np.where(found.fetch_s > 0.0, 0.0, fixed.fetch_s)
        part_s = constant_s + (more * fixed.token_bytes + ahead) * byte_s
        rest_s = self._prefill_s(rows, found.prompt.tokens, found.prefix + more)
        yes = (more > 0.0) & wanted(
            found.prefix, found.prefix + more, part_s + rest_s, found.prefill_s
        )
        fetched = found.fetched.copy()
        fetched[kind] = np.where(yes, more, 0.0)
        return found._replace(
            fetch_s=found.fetch_s + np.where(yes, part_s, 0.0),
            prefill_s=np.where(yes, rest_s, found.prefill_s),
            prefix=found.prefix + fetched[kind],
            fetched=fetched,
        )

    def _moved(self, rows: Rows, prompt: Prompt) -> Column:
        """Tokens of a prompt that each of these engines would have to get from another."""
        moved: Column = np.maximum(prompt.tokens - prompt.held[rows], 0.0)
        return moved

    def _comes_s(self, rows: Rows, prompt: Prompt) -> Column:
        """Seconds until a prompt's KV has arrived at each of these engines, by their links."""
        fixed = self._of(rows)
        size = self._moved(rows, prompt) * fixed.token_bytes + self._coming_bytes[rows]
        seconds: Column = fixed.handoff_s + fixed.handoff_factor * size / fixed.network_bytes_per_s
        return seconds

    def _decoding(self, rows: Rows, comes_s: Column, prompt: Prompt) -> tuple[Column, Column]:
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
            self._given.append((row, keys))

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
