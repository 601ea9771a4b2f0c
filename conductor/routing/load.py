"""The work assigned to each engine, and its measured speed: the basis of the costs. Pure.

See :mod:`conductor.routing.engine_work` for what is counted of each.
"""

from collections.abc import Sequence
from math import ceil, inf
from typing import Any, Final

import numpy as np

from conductor.costs.book import CostBook, EngineCosts, machine_of
from conductor.routing.columns import Column, CostColumns, CostInputs, StepColumns
from conductor.routing.engine_work import EngineWork, WorkTimes
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.moving import NO_FETCH, FetchedTokens, Restored
from conductor.routing.others import EngineOthers
from conductor.routing.together import STEP_TOKENS
from conductor.routing.work import NO_ANSWER, Answer, ComingPrompt, ComputingPrompt

_OVERDUE_S: Final = 0.01
"""A prompt that should be computed, but is not, is assumed to take this much longer."""
_TOKENS_MAX: Final = 1 << 24
"""Of an output; an engine may say any number."""
_USUAL_WEIGHT: Final = 0.05
"""Of the newest request in the moving average of seconds to the first token."""


class EngineLoads:
    """All engines that have had a request, or were asked for.

    Args:
        book: the costs of engines; measurements are added to it.

    Attributes:
        changes: counts what may change :meth:`columns`, but for the time.
        others: requests of others at the engines; change them by :meth:`tell_others`.
    """

    def __init__(self, book: CostBook) -> None:
        self.changes = 0
        self.others = EngineOthers()
        self._usual_s = 0.0
        self._book = book
        self._loads: dict[str, EngineWork] = {}
        self._senders: dict[int, str] = {}  # request → the engine from which its KV comes
        self._infos: Sequence[EngineInfo] | None = None  # of the rows
        self._at: dict[str, int] = {}  # the row of each
        self._times = np.zeros((0, 0))  # columns of `WorkTimes`
        self._inputs = np.zeros((0, 0))  # likewise, of `CostInputs`
        self._stale: set[str] = set()  # engines whose rows are to be made again

    def _changed(self, engine_id: str) -> None:
        self.changes += 1
        self._stale.add(engine_id)

    def _of(self, info: EngineInfo) -> EngineWork:
        load = self._loads.get(info.id)
        machine = machine_of(info.shape, info.hardware)
        if load is None or load.costs.machine != machine:
            costs = self._book.of(info.id, machine)
            load = self._loads.setdefault(info.id, EngineWork(costs))
            load.costs, load.step_cost_s = costs, -1.0
        ranks = max(1, len(info.ranks))
        if ranks != load.ranks:
            load.ranks, load.step_cost_s = ranks, -1.0
        return load

    def columns(
        self, infos: Sequence[EngineInfo], now: float, roles: Sequence[Role] | None = None
    ) -> CostColumns:
        """The inputs of the costs of these engines.

        Args:
            infos: the engines; another object if ``roles`` have changed.
            now: time.
            roles: the present role of each engine; None = the registered one.
        """
        if self._infos is not infos:
            self._infos, self._at = infos, {info.id: at for at, info in enumerate(infos)}
            self._times = np.zeros((len(WorkTimes._fields), len(infos)))
            self._inputs = np.zeros((len(CostInputs._fields), len(infos)))
            self._stale = set(self._at)
        changed = {self._at[one] for one in self._stale if one in self._at}
        rows: Any = WorkTimes._make(self._times)
        late = now >= rows.late_at
        if late.any():
            changed.update(np.flatnonzero(late).tolist())
        for at in changed:
            load = self._of(infos[at])
            load.pass_late(now)
            others = self.others.of(infos[at].id)
            if others != load.others:
                load.others, load.step_cost_s = others, -1.0
            self._times[:, at] = load.times()
            self._inputs[:, at] = load.inputs(infos[at].role if roles is None else roles[at])
        self._stale.clear()
        left_s = np.maximum(rows.head_s - np.maximum(now - rows.head_since, 0.0), _OVERDUE_S)
        backlog_s = np.where(rows.head_s >= 0, rows.rest_s + left_s, 0.0)
        leaving_s = np.maximum(rows.sent_at - now, 0.0)
        inputs: CostInputs[Column] = CostInputs._make(self._inputs.copy())
        return CostColumns(
            backlog_s=backlog_s, leaving_s=leaving_s, inputs=inputs, usual_s=self._usual_s,
            steps=StepColumns(rows.step_s, rows.step_tokens, rows.step_prompts),
        )  # fmt: skip

    def tell_others(
        self, engine_id: str, running: float | None, waiting: float | None, ours: int
    ) -> None:
        """An engine tells what it has; None = it does not tell. See :meth:`EngineOthers.tell`."""
        before = self.others.changes
        if running is None or waiting is None:
            self.others.forget(engine_id)
        else:
            self.others.tell(engine_id, running, waiting, ours)
        if self.others.changes != before:
            self._changed(engine_id)

    def foreseen(self, ttft_s: float) -> None:
        """A request was assigned; its first token is predicted after ``ttft_s`` seconds."""
        self._usual_s += (_USUAL_WEIGHT if self._usual_s else 1.0) * (ttft_s - self._usual_s)

    def assigned(
        self,
        number: int,
        info: EngineInfo,
        tokens: tuple[int, int],
        seconds: tuple[float, float],
        now: float,
        fetch: FetchedTokens = NO_FETCH,
    ) -> None:
        """An engine has got a prompt.

        Args:
            number: of the request.
            info: the engine.
            tokens: that it computes, and those before them.
            seconds: how long it is thought to fetch, and to compute; it fetches while it computes
                the prompts before.
            now: time.
            fetch: what it is thought to fetch.
        """
        self._changed(info.id)
        load = self._of(info)
        load.pass_late(now)
        if not load.computing:
            load.head_since = now
        fetch_s = max(0.0, seconds[0] - (load.computed_by(now) - now))
        load.computing[number] = ComputingPrompt(*tokens, fetch_s + seconds[1], fetch_s, now, now)
        load.known_steps = None
        load.moving.fetch(number, fetch)
        load.usual_s += (_USUAL_WEIGHT if load.usual_s else 1.0) * (seconds[1] - load.usual_s)

    def untold(self, number: int, engine_id: str) -> None:
        """We shall not hear when a prompt is computed.

        It counts as computed when it should be, and its request as decoding from then on.
        """
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is not None and number in load.computing:
            load.computing[number].is_reported = False

    def begun(self) -> list[tuple[int, float, float]]:
        """Requests of :meth:`untold` that decode, since when, and seconds of a step; each once."""
        found = []
        for load in self._loads.values():
            found += [(number, since, load.step_s()) for number, since in load.begun.items()]
            load.begun.clear()
        return found

    def comes(
        self, number: int, info: EngineInfo, prompt: ComingPrompt, sender: str, now: float
    ) -> None:
        """The KV of the prompt that ``sender`` has got last will go to an engine."""
        load = self._of(info)
        self._sends(number, sender, prompt.moved * load.costs.handoff_line.factor, now)
        self._changed(info.id)
        load.coming[number] = prompt
        load.step_cost_s = -1.0

    def hands_over(self, number: int, info: EngineInfo, tokens: int, now: float) -> None:
        """A handoff to an engine begins, of so many tokens that it does not have."""
        load, sender = self._of(info), self._loads.get(self._senders.get(number, ""))
        slower, link = load.costs.prior.network.bytes_per_s, None
        if sender is not None:
            slower = min(slower, sender.costs.prior.network.bytes_per_s)
            link = sender.moving.outgoing
        self._changed(info.id)
        transfer_s = load.costs.prior.kv_bytes(tokens) / slower
        load.moving.hand_over(number, tokens, transfer_s, link, now)

    def arrived(self, number: int, engine_id: str, now: float) -> None:
        """A request has its first token at the engine that decodes it: learn of the handoff."""
        load = self._loads.get(engine_id)
        if load is not None:
            self._changed(engine_id)
            load.moving.arrived(number, now, load.costs)

    def restored(self, number: int, engine_id: str, report: Restored) -> None:
        """An engine has told how long its fetch for a request took: learn from it."""
        load = self._loads.get(engine_id)
        if load is not None:
            self._changed(engine_id)
            load.moving.restored(number, report, load.costs)

    def _sends(self, number: int, engine_id: str, tokens: float, now: float) -> None:
        """Predict when a prompt's KV is sent, one prompt after the other; see :meth:`sent`."""
        self.sent(number, now)  # of an earlier try
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is not None and number in load.computing:
            prior, self._senders[number] = load.costs.prior, engine_id
            load.leaving[number] = prior.kv_bytes(tokens) / prior.network.bytes_per_s
            load.sent_at = max(load.sent_at, load.computed_by(now)) + load.leaving[number]

    def sent(self, number: int, now: float) -> None:
        """The KV of a request was sent, or never will be; unknown requests are ignored.

        The KV still to be sent takes at most as long as predicted. Otherwise an engine whose link
        is faster than predicted would seem busier with each prompt.
        """
        sender = self._senders.pop(number, "")
        load = self._loads.get(sender)
        if load is not None and load.leaving.pop(number, None) is not None:
            self._changed(sender)
            load.sent_at = min(load.sent_at, load.computed_by(now) + sum(load.leaving.values()))

    def computed(
        self,
        number: int,
        engine_id: str,
        now: float,
        hit_tokens: int | None,
        restored: Restored | None = None,
    ) -> None:
        """A prompt was computed; learn how long it took.

        Args:
            number: of the request; an unknown one does nothing.
            engine_id: the engine.
            now: time.
            hit_tokens: how many it did not compute; None = as many as was thought.
            restored: what it fetched; None = it does not tell, or not yet.
        """
        self._changed(engine_id)
        load = self._loads.get(engine_id)
        if load is None:
            return
        load.pass_late(now)
        load.moving.computed(number)
        if restored is not None:
            load.moving.restored(number, restored, load.costs)
        mine = load.overdue if number in load.overdue else load.computing
        if number not in mine:
            return
        first = next(iter(mine)) == number
        one = mine.pop(number)
        load.known_steps = None
        if first:
            since = max(one.since, load.computed_at) if mine is load.overdue else load.head_since
            tokens = one.new_tokens + one.prefix_tokens
            hit = min(one.prefix_tokens if hit_tokens is None else max(0, hit_tokens), tokens)
            fetch_s = one.fetch_s
            if restored is not None:
                fetch_s = max(0.0, min(one.got_at + restored.seconds, now) - since)
            seconds = now - since - fetch_s
            load.computed(tokens - hit, hit, seconds, now)
            if mine is load.computing:
                load.stalled_s += max(0.0, seconds)
            load.head_since = load.computed_at = now

    def decodes(
        self,
        number: int,
        info: EngineInfo,
        tokens: int,
        now: float,
        answer: Answer = NO_ANSWER,
        rank: int | None = None,
        *,
        is_reported: bool = True,
    ) -> None:
        """A request starts to decode; its KV has arrived, or comes now, if computed elsewhere.

        Args:
            number: of the request; it may decode there already.
            info: the engine.
            tokens: of its prompt.
            now: time.
            answer: what is expected of it.
            rank: data-parallel rank to which it was sent; None = the engine chooses one.
            is_reported: whether its first token was reported; else nothing is learned of its steps.
        """
        self._changed(info.id)
        load = self._of(info)
        bears_s = answer.bears_s(load.step_s())
        load.decodes(number, tokens, now, is_reported=is_reported, bears_s=bears_s, rank=rank)

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
        if one.is_reported and output_tokens > 1 and passed > 0:
            batch = (load.batch_s - one.batch_s) / passed
            context = (load.context_s - one.context_s) / passed
            load.costs.stepped(max(1.0, batch), context, passed / (output_tokens - 1))

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
            load.known_steps = None
            load.sent_at -= load.leaving.pop(number, 0.0)
        load.moving.left(number, now)
        load.coming.pop(number, None)
        load.ends(number, now)

    def prefill_seconds(self, info: EngineInfo, new_tokens: int, prefix_tokens: int) -> float:
        """Seconds that an engine needs for the end of a prompt."""
        return sum(self._of(info).prefill_line().terms(new_tokens, prefix_tokens))

    def prompts_s(self, info: EngineInfo) -> float:
        """Seconds of all prompts that an engine has, the first one whole."""
        return self._of(info).total_s()

    def answers(self, info: EngineInfo) -> int:
        """Requests that decode at an engine."""
        return len(self._of(info).decoding)

    def costs(self, info: EngineInfo) -> EngineCosts:
        """The speed of an engine, as far as it is known."""
        return self._of(info).costs

    def step_s(self, info: EngineInfo) -> float:
        """Seconds of a decode step of an engine, with one more request than it will have."""
        return self._of(info).step_s()

    def kv_tokens_max(self, engine_id: str) -> float:
        """Tokens whose KV fits next to the weights of an engine; infinite = unknown."""
        load = self._loads.get(engine_id)
        return (load.costs.prior.kv_tokens_max if load is not None else 0) or inf

    def step_seconds(self, engine_id: str, batch: float, tokens: float) -> float:
        """Seconds of a decode step with this batch and total tokens; 0 = unknown."""
        load = self._loads.get(engine_id)
        if load is None:
            return 0.0
        return load.costs.step_seconds(ceil(batch / load.ranks), tokens / load.ranks)

    def step_costs(self, engine_id: str) -> tuple[EngineCosts | None, int]:
        """The speed of an engine, None = unknown; and its number of ranks."""
        load = self._loads.get(engine_id)
        return (None, 1) if load is None else (load.costs, load.ranks)

    def free_at(self, ahead_s: float, after: float) -> float:
        """When an engine is the next to have computed its prompts, less ``ahead_s``, or its first.

        Also when this is so but for the last step, if more prompts fit into that. Only times later
        than ``after`` count; infinite = there is none.
        """
        first = inf
        for one in self._loads.values():
            for head in one.computing.values():
                steps = one.steps()
                open_s = steps.last_s if steps.last_tokens < STEP_TOKENS else 0.0
                ends_s = steps.total_s - ahead_s
                for seconds in (ends_s - open_s, ends_s, head.counts_s):
                    at = one.head_since + seconds
                    first = min(first, at) if at > after else first
                break
        return first

    def gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Errors and factors of the costs, as metrics; of engines that were measured."""
        errors: dict[tuple[str, ...], float] = {}
        factors: dict[tuple[str, ...], float] = {}
        biases: dict[tuple[str, ...], float] = {}
        for name, load in self._loads.items():
            for what, (terms, fit) in load.costs.fits.items():
                for quantile in (0.5, 0.9):
                    error = fit.error(quantile)
                    if error is not None:
                        errors[name, what, str(quantile)] = error
                for term, factor in zip(terms, fit.factors.tolist(), strict=True):
                    factors[name, what, term] = factor
            biases[name, "prefill"] = load.costs.prefill_bias.factor
            biases[name, "step"] = load.costs.step_bias.factor
        return {"cost_error": errors, "cost_factor": factors, "cost_bias": biases}

    def forget(self, engine_id: str) -> None:
        """An engine was removed."""
        self._changed(engine_id)
        self.others.forget(engine_id)
        gone = self._loads.pop(engine_id, None)
        if gone is not None:
            for number in [*gone.moving.handoffs]:
                gone.moving.left(number, gone.at)

    def check(self) -> None:
        """Assert the invariants."""
        for name, load in self._loads.items():
            assert all(self._senders.get(number) == name for number in load.leaving)
            assert load.context == sum(one.tokens for one in load.decoding.values())
            assert not load.decoding.keys() & load.coming.keys()
            assert load.moving.handoffs.keys() <= load.decoding.keys()
            load.moving.check()
            load.check_ranks()
            assert not load.overdue.keys() & load.computing.keys()
