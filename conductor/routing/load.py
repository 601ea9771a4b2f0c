"""The work assigned to each engine, and its measured speed: the basis of the costs. Pure.

A prompt is *computed* at an engine from its assignment to its first token; an engine computes one
after another. A request *decodes* from then on until it ends; all that do so at an engine get a
token with each of its steps. Data-parallel ranks step together, so the fullest rank counts: the
requests are thought to be spread evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Any, Final, NamedTuple

import numpy as np

from conductor.costs.book import CostBook, EngineCosts, machine_of
from conductor.costs.prior import PrefillLine
from conductor.routing.columns import CostColumns
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.work import NO_ANSWER, Answer, ComputingPrompt, DecodingRequest

_OVERDUE_S: Final = 0.01
"""A prompt that should be computed, but is not, is thought to take so much longer."""
_TOKENS_MAX: Final = 1 << 24
"""Of an output; an engine may say any number."""
_USUAL_WEIGHT: Final = 0.05
"""Of the newest request in the moving average of seconds to the first token."""
_TERMS: Final = ("constant", "weights", "attention")


class _Row(NamedTuple):
    """What the costs of an engine are computed of, whenever it is; see :class:`CostColumns`.

    Attributes:
        late_at: when its first prompt counts as computed, whatever we have heard.
        head_since: since when this is computed.
        head_s: seconds that it takes; negative = there is none.
        rest_s: seconds of the other prompts.
        sent_at: when all KV of its prompts for other engines is thought to have left.
    """

    late_at: float
    head_since: float
    head_s: float
    rest_s: float
    sent_at: float
    constant_s: float
    floor_s: float
    token_s: float
    pair_s: float
    step_s: float
    kv_room: float
    token_bytes: float
    network_bytes_per_s: float
    coming_bytes: float
    late_per_s: float
    late_per_s2: float
    late_most: float


_TIMED: Final = 5
"""Fields of :class:`_Row` whose columns depend on the time."""


@dataclass(slots=True)
class _Load:
    """One engine.

    Attributes:
        computing: its prompts, in the order in which they were assigned.
        head_since: since when the first of them is computed.
        overdue: prompts that count as computed, but of whose first tokens we have not heard.
        decoding: requests that decode there.
        context: tokens of their prompts.
        coming: tokens of the KV that is on its way there, by request.
        batch_s: requests that decoded, multiplied by seconds, since the beginning.
        context_s: their tokens likewise.
        at: time up to which these are.
        computed_at: when the last prompt of which we heard was computed.
        step_cost_s: what :meth:`step_s` says until something changes; negative = it has.
        factors: the fit's for which ``line`` is.
        line: what prompts take.
        begun: when requests of which we do not hear began to decode; until somebody asks.
        stalled_s: seconds for which it computed prompts, since the beginning.
        sent_at: when all KV of its prompts for other engines is thought to have left.
        leaving: request → seconds that its KV, which is not there yet, occupies the link.
    """

    costs: EngineCosts
    ranks: int = 1
    computing: dict[int, ComputingPrompt] = field(default_factory=dict)
    head_since: float = 0.0
    overdue: dict[int, ComputingPrompt] = field(default_factory=dict)
    decoding: dict[int, DecodingRequest] = field(default_factory=dict)
    context: int = 0
    coming: dict[int, int] = field(default_factory=dict)
    batch_s: float = 0.0
    context_s: float = 0.0
    at: float = 0.0
    computed_at: float = 0.0
    step_cost_s: float = -1.0
    factors: object = None
    line: PrefillLine | None = None
    begun: dict[int, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    sent_at: float = -inf
    leaving: dict[int, float] = field(default_factory=dict)

    def row(self, role: Role) -> _Row:
        """What is the same until something changes, or :meth:`pass_late` would change it.

        Args:
            role: what the engine does now.
        """
        head, coming = next(iter(self.computing.values()), None), sum(self.coming.values())
        token_bytes, line = self.costs.prior.kv_bytes(1), self.prefill_line()
        return _Row(
            late_at=self.head_since + head.counts_s if head is not None else inf,
            head_since=self.head_since,
            head_s=head.seconds if head is not None else -1.0,
            rest_s=self.total_s() - head.seconds if head is not None else 0.0,
            sent_at=self.sent_at,
            constant_s=line.constant_s,
            floor_s=line.floor_s,
            token_s=line.token_s,
            pair_s=line.pair_s,
            step_s=self.step_s(),
            kv_room=(self.costs.prior.kv_tokens_max or inf) - self.context - coming,
            token_bytes=token_bytes,
            network_bytes_per_s=self.costs.prior.network.bytes_per_s,
            coming_bytes=coming * token_bytes,
            **self.late(role),
        )

    def pass_late(self, now: float) -> None:
        """Count prompts as computed, when they should have been, if that was long ago."""
        while self.computing:
            number, head = next(iter(self.computing.items()))
            if now < self.head_since + head.counts_s:
                return
            del self.computing[number]
            self.overdue[number] = replace(head, since=self.head_since)
            self.stalled_s += head.seconds
            self.head_since += head.seconds
            if not head.told:
                tokens = head.new_tokens + head.prefix_tokens
                self.decodes(number, tokens, self.head_since, told=False)
                self.begun[number] = self.head_since
            for following in self.computing.values():
                self.head_since = max(self.head_since, following.since)
                break

    def decodes(
        self, number: int, tokens: int, now: float, *, told: bool = True, bears_s: float = 0.0
    ) -> None:
        """A request begins to decode; ``told``: we have heard so, and shall hear when it ends."""
        self.pass_time(now)
        self.coming.pop(number, None)
        stalled_s = self.stalled_s
        if number in self.decoding:
            self.context -= self.decoding[number].tokens
            stalled_s = self.decoding[number].stalled_s
        self.decoding[number] = DecodingRequest(
            tokens, now, self.batch_s, self.context_s, told, bears_s, stalled_s
        )
        self.context += tokens
        self.step_cost_s = -1.0

    def late(self, role: Role) -> dict[str, float]:
        """What :class:`CostColumns` says of the requests that a prompt makes late.

        Nobody knows how many prompts will come yet. So who has used a part ``u`` of the seconds
        that it bears counts as late to the part ``u**2``: the first stall costs less than the last
        one. Who is late already counts as if it were about to be, or all prompts would go there.

        An engine that was lent to prompts still has answers to end. These count nothing: it gets no
        others, and would stand idle for their sake while everybody waits.
        """
        stalled_s = self.stalled_s + self.total_s()
        line = square = most = 0.0
        for one in self.decoding.values():
            if not one.bears_s or role is Role.PREFILL:
                continue
            used = (stalled_s - one.stalled_s) / one.bears_s
            line += 2.0 * min(used, 1.0) / one.bears_s
            square += one.bears_s**-2 if used < 1.0 else 0.0
            most += 1.0 - used * used if used < 1.0 else 1.0
        return {"late_per_s": line, "late_per_s2": square, "late_most": most}

    def total_s(self) -> float:
        """Seconds of all prompts that it has, the first one whole."""
        return sum(one.seconds for one in self.computing.values())

    def computed_by(self, now: float) -> float:
        """When all its prompts are thought to be computed."""
        return max(now, self.head_since + self.total_s())

    def prefill_line(self) -> PrefillLine:
        """What prompts take; computed again after a measurement only."""
        factors = self.costs.prefill_fit.factors
        if self.line is None or factors is not self.factors:
            self.factors, self.line = factors, self.costs.prefill_line
        return self.line

    def step_s(self) -> float:
        """Seconds of a step with one more request, of usual length, than it will have anyway."""
        if self.step_cost_s < 0:
            count = len(self.decoding) + len(self.coming)
            tokens = self.context + sum(self.coming.values())
            batch = ceil((count + 1) / self.ranks)
            self.step_cost_s = self.costs.step_seconds(batch, batch * tokens / max(1, count))
        return self.step_cost_s

    def pass_time(self, now: float) -> None:
        """Count those who decode up to now."""
        passed = max(0.0, now - self.at)
        self.batch_s += passed * len(self.decoding)
        self.context_s += passed * self.context
        self.at = max(self.at, now)


class EngineLoads:
    """All engines that have had a request, or were asked for.

    Attributes:
        changes: counts what may change :meth:`columns`, but for the time.
    """

    def __init__(self, book: CostBook) -> None:
        """Start without requests; ``book`` has the costs of engines, and learns."""
        self.changes = 0
        self._usual_s = 0.0
        self._book = book
        self._loads: dict[str, _Load] = {}
        self._senders: dict[int, str] = {}  # request → the engine from which its KV comes
        self._infos: Sequence[EngineInfo] | None = None  # of the rows
        self._at: dict[str, int] = {}  # the row of each
        self._rows = np.zeros((0, 0))
        self._by_name: Any = None  # the columns of these, as a `_Row`
        self._stale: set[str] = set()  # engines whose rows are to be made again

    def _changed(self, engine_id: str) -> None:
        self.changes += 1
        self._stale.add(engine_id)

    def _of(self, info: EngineInfo) -> _Load:
        load = self._loads.get(info.id)
        machine = machine_of(info.shape, info.hardware)
        if load is None or load.costs.machine != machine:
            costs = self._book.of(info.id, machine)
            load = self._loads.setdefault(info.id, _Load(costs))
            load.costs, load.step_cost_s = costs, -1.0
        ranks = max(1, len(info.ranks))
        if ranks != load.ranks:
            load.ranks, load.step_cost_s = ranks, -1.0
        return load

    def columns(
        self, infos: Sequence[EngineInfo], now: float, roles: Sequence[Role] | None = None
    ) -> CostColumns:
        """What the costs of these engines depend on.

        Args:
            infos: the engines; another object if ``roles`` are others.
            now: time.
            roles: what each engine does now; None = what it was registered for.
        """
        if self._infos is not infos:
            self._infos, self._at = infos, {info.id: at for at, info in enumerate(infos)}
            self._rows = np.zeros((len(_Row._fields), len(infos)))
            self._by_name = _Row._make(self._rows)
            self._stale = set(self._at)
        rows, changed = self._by_name, {self._at[one] for one in self._stale if one in self._at}
        late = now >= rows.late_at
        if late.any():
            changed.update(np.flatnonzero(late).tolist())
        for at in changed:
            load = self._of(infos[at])
            load.pass_late(now)
            self._rows[:, at] = load.row(infos[at].role if roles is None else roles[at])
        self._stale.clear()
        left_s = np.maximum(rows.head_s - np.maximum(now - rows.head_since, 0.0), _OVERDUE_S)
        backlog_s = np.where(rows.head_s >= 0, rows.rest_s + left_s, 0.0)
        leaving_s = np.maximum(rows.sent_at - now, 0.0)
        named = dict(zip(_Row._fields[_TIMED:], self._rows[_TIMED:].copy(), strict=True))
        return CostColumns(backlog_s=backlog_s, leaving_s=leaving_s, usual_s=self._usual_s, **named)

    def foreseen(self, ttft_s: float) -> None:
        """A request that has got engines is thought to have its first token after so long."""
        self._usual_s += (_USUAL_WEIGHT if self._usual_s else 1.0) * (ttft_s - self._usual_s)

    def assigned(
        self,
        number: int,
        info: EngineInfo,
        tokens: tuple[int, int],
        seconds: tuple[float, float],
        now: float,
    ) -> None:
        """An engine has got a prompt.

        Args:
            number: of the request.
            info: the engine.
            tokens: that it computes, and those before them.
            seconds: how long it is thought to fetch, and to compute.
            now: time.
        """
        self._changed(info.id)
        load = self._of(info)
        load.pass_late(now)
        if not load.computing:
            load.head_since = now
        fetch_s = 0.0 if load.computing else seconds[0]
        load.computing[number] = ComputingPrompt(*tokens, sum(seconds), fetch_s, now)

    def untold(self, number: int, engine_id: str) -> None:
        """We shall not hear when a prompt is computed.

        It counts as computed when it should be, and its request as decoding from then on.
        """
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is not None and number in load.computing:
            load.computing[number].told = False

    def begun(self) -> list[tuple[int, float, float]]:
        """Requests of :meth:`untold` that decode, since when, and seconds of a step; each once."""
        found = []
        for load in self._loads.values():
            found += [(number, since, load.step_s()) for number, since in load.begun.items()]
            load.begun.clear()
        return found

    def comes(self, number: int, info: EngineInfo, tokens: int, sender: str, now: float) -> None:
        """The KV of the prompt that ``sender`` has got last will go to an engine."""
        self._sends(number, sender, tokens, now)
        self._changed(info.id)
        load = self._of(info)
        load.coming[number] = tokens
        load.step_cost_s = -1.0

    def _sends(self, number: int, engine_id: str, tokens: int, now: float) -> None:
        """One prompt leaves after the other, when the costs say; see :meth:`sent`."""
        self.sent(number, now)  # of an earlier try
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is not None and number in load.computing:
            prior, self._senders[number] = load.costs.prior, engine_id
            load.leaving[number] = prior.kv_bytes(tokens) / prior.network.bytes_per_s
            load.sent_at = max(load.sent_at, load.computed_by(now)) + load.leaving[number]

    def sent(self, number: int, now: float) -> None:
        """The KV of a request has left its engine, or never will; unknown ones do nothing.

        What is still to leave takes no longer than the costs say of it. Else an engine whose link
        is faster than they say would seem busier with each prompt.
        """
        sender = self._senders.pop(number, "")
        load = self._loads.get(sender)
        if load is not None and load.leaving.pop(number, None) is not None:
            self._changed(sender)
            load.sent_at = min(load.sent_at, load.computed_by(now) + sum(load.leaving.values()))

    def computed(self, number: int, engine_id: str, now: float, hit_tokens: int | None) -> None:
        """A prompt was computed; learn how long it took.

        Args:
            number: of the request; an unknown one does nothing.
            engine_id: the engine.
            now: time.
            hit_tokens: how many it did not compute; None = as many as was thought.
        """
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is None:
            return
        load.pass_late(now)
        mine = load.overdue if number in load.overdue else load.computing
        if number not in mine:
            return
        first = next(iter(mine)) == number
        one = mine.pop(number)
        if first:
            since = max(one.since, load.computed_at) if mine is load.overdue else load.head_since
            tokens = one.new_tokens + one.prefix_tokens
            hit = min(one.prefix_tokens if hit_tokens is None else max(0, hit_tokens), tokens)
            seconds = now - since - one.fetch_s
            load.costs.computed(tokens - hit, hit, seconds)
            if mine is load.computing:
                load.stalled_s += max(0.0, seconds)
            load.head_since = load.computed_at = now

    def decodes(
        self, number: int, info: EngineInfo, tokens: int, now: float, answer: Answer = NO_ANSWER
    ) -> None:
        """A request begins to decode; its KV has arrived if it comes from elsewhere."""
        self._changed(info.id)
        load = self._of(info)
        load.decodes(number, tokens, now, bears_s=answer.bears_s(load.step_s()))

    def decoded(self, number: int, engine_id: str, output_tokens: int, now: float) -> None:
        """A request has got all its tokens; learn how long a step took meanwhile."""
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is None or number not in load.decoding:
            return
        load.pass_time(now)
        one = load.decoding[number]
        passed = now - one.since
        output_tokens = min(output_tokens, _TOKENS_MAX)
        if one.told and output_tokens > 1 and passed > 0:
            batch = (load.batch_s - one.batch_s) / passed
            context = (load.context_s - one.context_s) / passed
            load.costs.stepped(
                max(1.0, batch / load.ranks), context / load.ranks, passed / (output_tokens - 1)
            )

    def left(self, number: int, engine_id: str, now: float) -> None:
        """An engine has nothing more to do for a request; an unknown one does nothing."""
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is None:
            return
        load.pass_late(now)
        load.overdue.pop(number, None)
        load.begun.pop(number, None)
        if number in load.computing:
            if next(iter(load.computing)) == number:
                load.head_since = now
            del load.computing[number]
            load.sent_at -= load.leaving.pop(number, 0.0)
        load.step_cost_s = -1.0
        load.coming.pop(number, None)
        decoding = load.decoding.get(number)
        if decoding is not None:
            load.pass_time(now)
            load.context -= decoding.tokens
            del load.decoding[number]

    def prefill_seconds(self, info: EngineInfo, new_tokens: int, prefix_tokens: int) -> float:
        """Seconds that an engine needs for the end of a prompt."""
        return sum(self._of(info).prefill_line().terms(new_tokens, prefix_tokens))

    def costs(self, info: EngineInfo) -> EngineCosts:
        """What is known of the speed of an engine."""
        return self._of(info).costs

    def step_s(self, info: EngineInfo) -> float:
        """Seconds of a decode step of an engine, with one more request than it will have."""
        return self._of(info).step_s()

    def kv_tokens_max(self, engine_id: str) -> float:
        """Tokens whose KV fits beside the weights of an engine; infinite = unknown."""
        load = self._loads.get(engine_id)
        return (load.costs.prior.kv_tokens_max if load is not None else 0) or inf

    def step_seconds(self, engine_id: str, batch: float, tokens: float) -> float:
        """Seconds of a decode step of a batch with so many tokens in all; 0 = unknown."""
        load = self._loads.get(engine_id)
        if load is None:
            return 0.0
        return load.costs.step_seconds(ceil(batch / load.ranks), tokens / load.ranks)

    def step_costs(self, engine_id: str) -> tuple[EngineCosts | None, int]:
        """What is known of the speed of an engine, None = nothing; and its ranks."""
        load = self._loads.get(engine_id)
        return (None, 1) if load is None else (load.costs, load.ranks)

    def free_at(self, ahead_s: float, after: float) -> float:
        """When an engine is the next to have computed its prompts, less ``ahead_s``, or its first.

        Only times later than ``after`` count; infinite = there is none.
        """
        first = inf
        for one in self._loads.values():
            for head in one.computing.values():
                for seconds in (one.total_s() - ahead_s, head.counts_s):
                    at = one.head_since + seconds
                    first = min(first, at) if at > after else first
                break
        return first

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Errors and factors of the costs, as metrics; of engines that were measured."""
        errors: dict[tuple[str, ...], float] = {}
        factors: dict[tuple[str, ...], float] = {}
        for name, load in self._loads.items():
            for what, fit in (("prefill", load.costs.prefill_fit), ("step", load.costs.step_fit)):
                for quantile in (0.5, 0.9):
                    error = fit.error(quantile)
                    if error is not None:
                        errors[name, what, str(quantile)] = error
                for term, factor in zip(_TERMS, fit.factors.tolist(), strict=True):
                    factors[name, what, term] = factor
        return {"cost_error": errors, "cost_factor": factors}

    def forget(self, engine_id: str) -> None:
        """An engine was removed."""
        self._changed(engine_id)
        self._loads.pop(engine_id, None)

    def check(self) -> None:
        """Assert the invariants."""
        for name, load in self._loads.items():
            assert all(self._senders.get(number) == name for number in load.leaving)
            assert load.context == sum(one.tokens for one in load.decoding.values())
            assert not load.decoding.keys() & load.coming.keys()
            assert not load.overdue.keys() & load.computing.keys()
