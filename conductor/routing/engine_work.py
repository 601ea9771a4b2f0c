"""The work assigned to one engine, and what prompts and tokens cost there. Pure.

A prompt is *computed* at an engine from its assignment to its first token; an engine computes one
after another. A request *decodes* from then on until it ends; all that do so at an engine get a
token with each of its steps. Data-parallel ranks step together, so the slowest one counts: a
request that was sent to a rank counts there, all others are thought to be spread evenly.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Final, NamedTuple

from conductor.costs.book import EngineCosts
from conductor.costs.prior import PrefillLine
from conductor.routing.columns import CostInputs
from conductor.routing.engines import Role
from conductor.routing.moving import MovingKv
from conductor.routing.others import NOBODY, USUAL_TOKENS, OtherRequests
from conductor.routing.together import STEP_TOKENS, PromptSteps, shared_s
from conductor.routing.work import ComingPrompt, ComputingPrompt, DecodingRequest


class WorkTimes(NamedTuple):
    """From what the seconds that an engine is busy follow at any time.

    Attributes:
        late_at: when its first prompt counts as computed, without a report.
        head_since: start of that prompt.
        head_s: seconds of it, and of those computed with it; negative = there is none.
        rest_s: seconds of the other prompts.
        step_s: how many of these are of the last step.
        step_tokens: tokens of prompts that this step computes.
        step_prompts: of how many prompts these are.
        sent_at: when all KV of its prompts for other engines has probably been sent.
    """

    late_at: float
    head_since: float
    head_s: float
    rest_s: float
    step_s: float
    step_tokens: float
    step_prompts: float
    sent_at: float


_TOGETHER_S: Final = 0.005
"""Prompts that are reported within so many seconds were computed in one step."""


class ComputedPrompts(NamedTuple):
    """Prompts that an engine has computed in the same step.

    Attributes:
        at: when the first one was computed.
        new_tokens: that were computed.
        pairs: of each of these and a token before it.
        seconds: that all took.
    """

    at: float
    new_tokens: int = 0
    pairs: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class EngineWork:
    """The work of one engine.

    Attributes:
        computing: its prompts, in the order in which they were assigned.
        head_since: start of the first of them.
        overdue: prompts that count as computed, but whose first tokens were not reported.
        decoding: requests that decode there.
        context: tokens of their prompts.
        of_rank: how many of them were sent to each data-parallel rank, and their tokens.
        coming: prompts that are computed elsewhere and will decode there, by request.
        moving: the KV on its way to and from it.
        batch_s: requests that decoded at the slowest rank, multiplied by seconds, since the
            beginning.
        context_s: their tokens likewise.
        at: time up to which these are counted.
        computed_at: when the last reported prompt was computed.
        together: those that were computed then, of which nothing is learned yet.
        step_cost_s: cached :meth:`step_s`; negative = to be computed again.
        factors, bias: of the costs for which ``line`` is valid.
        line: the costs of prompts.
        known_steps: cached :meth:`steps`, with ``head_since`` and ``line`` for which they are
            valid; None after every other change of ``computing``.
        begun: when requests without reports started to decode; until they are read.
        stalled_s: seconds for which it computed prompts, since the beginning.
        sent_at: when all KV of its prompts for other engines has probably been sent.
        leaving: request → seconds that its unsent KV occupies the link.
        others: requests of others that it has.
        usual_s: seconds of a prompt that it got, lately.
    """

    costs: EngineCosts
    ranks: int = 1
    computing: dict[int, ComputingPrompt] = field(default_factory=dict)
    head_since: float = 0.0
    overdue: dict[int, ComputingPrompt] = field(default_factory=dict)
    decoding: dict[int, DecodingRequest] = field(default_factory=dict)
    context: int = 0
    of_rank: dict[int, tuple[int, int]] = field(default_factory=dict)
    coming: dict[int, ComingPrompt] = field(default_factory=dict)
    moving: MovingKv = field(default_factory=MovingKv)
    batch_s: float = 0.0
    context_s: float = 0.0
    at: float = 0.0
    computed_at: float = 0.0
    together: ComputedPrompts | None = None
    step_cost_s: float = -1.0
    factors: object = None
    bias: float = 1.0
    line: PrefillLine | None = None
    known_steps: tuple[float, PrefillLine, PromptSteps] | None = None
    begun: dict[int, float] = field(default_factory=dict)
    stalled_s: float = 0.0
    sent_at: float = -inf
    leaving: dict[int, float] = field(default_factory=dict)
    others: OtherRequests = NOBODY
    usual_s: float = 0.0

    def times(self) -> WorkTimes:
        """Stay the same until something changes, or :meth:`pass_late` changes them."""
        head, steps = next(iter(self.computing.values()), None), self.steps()
        return WorkTimes(
            late_at=self.head_since + head.counts_s if head is not None else inf,
            head_since=self.head_since,
            head_s=steps.first_s if head is not None else -1.0,
            rest_s=steps.total_s - steps.first_s,
            step_s=steps.last_s,
            step_tokens=steps.last_tokens,
            step_prompts=steps.last_prompts,
            sent_at=self.sent_at,
        )

    def inputs(self, role: Role) -> CostInputs[float]:
        """Stay the same likewise.

        Args:
            role: the present role of the engine.
        """
        token_bytes, line = self.costs.prior.kv_bytes(1), self.prefill_line()
        memory, disk, network = (tokens * token_bytes for tokens in self.moving.in_flight)
        fetch, handoff = self.costs.fetch_line, self.costs.handoff_line
        return CostInputs(
            constant_s=line.constant_s,
            floor_s=line.floor_s,
            token_s=line.token_s,
            pair_s=line.pair_s,
            step_s=self.step_s(),
            kv_room=(self.costs.prior.kv_tokens_max or inf)
            - self._tokens()
            - self.others.running * self.usual_context(),
            token_bytes=token_bytes,
            network_bytes_per_s=self.costs.prior.network.bytes_per_s,
            handoff_s=handoff.constant_s,
            handoff_factor=handoff.factor,
            coming_bytes=network,
            fetch_s=fetch.constant_s,
            memory_byte_s=fetch.memory_s,
            disk_byte_s=fetch.disk_s,
            network_byte_s=fetch.network_s,
            memory_bytes=memory,
            disk_bytes=disk,
            others_s=self.others.waiting * self.usual_prompt_s(),
            **self.late(role),
        )

    def computed(self, new_tokens: int, prefix_tokens: int, seconds: float, now: float) -> None:
        """The end of a prompt was computed: learn from it, and from those computed with it."""
        self._learn(now)
        pairs = new_tokens * (prefix_tokens + (new_tokens + 1.0) / 2.0)
        one = self.together or ComputedPrompts(now)
        self.together = ComputedPrompts(
            one.at, one.new_tokens + new_tokens, one.pairs + pairs, one.seconds + seconds
        )

    def _learn(self, now: float) -> None:
        """Learn from prompts that were computed together, if nothing belongs to them any more."""
        one = self.together
        if one is not None and now > one.at + _TOGETHER_S:
            self.together = None
            if one.new_tokens:
                prefix = one.pairs / one.new_tokens - (one.new_tokens + 1.0) / 2.0
                self.costs.computed(one.new_tokens, prefix, one.seconds)

    def pass_late(self, now: float) -> None:
        """Count prompts as computed, when they should have been, if that was long ago."""
        self._learn(now)
        while self.computing:
            number, head = next(iter(self.computing.items()))
            if now < self.head_since + head.counts_s:
                return
            del self.computing[number]
            self.known_steps = None
            self.overdue[number] = replace(head, since=self.head_since)
            self.stalled_s += head.seconds
            self.head_since += head.seconds
            if not head.is_reported:
                tokens = head.new_tokens + head.prefix_tokens
                self.decodes(number, tokens, self.head_since, is_reported=False)
                self.begun[number] = self.head_since
            for following in self.computing.values():
                self.head_since = max(self.head_since, following.since)
                break

    def decodes(
        self,
        number: int,
        tokens: int,
        now: float,
        *,
        is_reported: bool = True,
        bears_s: float = 0.0,
        rank: int | None = None,
    ) -> None:
        """A request starts to decode; ``is_reported``: an engine reports its start and end."""
        self.coming.pop(number, None)
        before = self.ends(number, now)
        stalled_s = self.stalled_s if before is None else before.stalled_s
        rank = rank if self.ranks > 1 else None
        self.decoding[number] = DecodingRequest(
            tokens, now, self.batch_s, self.context_s, is_reported, bears_s, stalled_s, rank
        )
        self._count(self.decoding[number], 1)

    def ends(self, number: int, now: float) -> DecodingRequest | None:
        """A request does not decode any more; None if it did not."""
        self.pass_time(now)
        self.step_cost_s = -1.0
        one = self.decoding.pop(number, None)
        if one is not None:
            self._count(one, -1)
        return one

    def _count(self, one: DecodingRequest, sign: int) -> None:
        self.context += sign * one.tokens
        if one.rank is not None:
            count, tokens = self.of_rank.get(one.rank, (0, 0))
            self.of_rank[one.rank] = (count + sign, tokens + sign * one.tokens)
            if not self.of_rank[one.rank][0]:
                del self.of_rank[one.rank]

    def _tokens(self) -> int:
        """Of the prompts of those that decode, and will."""
        return self.context + sum(one.tokens for one in self.coming.values())

    def _slowest(self) -> tuple[float, float]:
        """Requests that decode at the slowest rank, and their tokens."""
        count, tokens = len(self.decoding) / self.ranks, self.context / self.ranks
        if not self.of_rank:
            return count, tokens
        counts, those = zip(*self.of_rank.values(), strict=True)
        return max(count, *counts), max(tokens, *those)

    def late(self, role: Role) -> dict[str, float]:
        """The values of :class:`CostInputs` about requests that a prompt makes late.

        The number of later prompts is unknown. So a request that has used a part ``u`` of the
        seconds that it tolerates counts as late to the part ``u**2``: the first stall costs less
        than the last one. A request that is late already counts as if it were about to be,
        otherwise all prompts would go there.

        An engine that was lent to prompts still has answers to finish. These count nothing: it gets
        no others, and would be idle for their sake while all requests wait.
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

    def steps(self) -> PromptSteps:
        """Seconds of all prompts that it has, those together that fit into one step."""
        line, known = self.prefill_line(), self.known_steps
        if known is None or known[0] != self.head_since or known[1] is not line:
            known = self.known_steps = (self.head_since, line, self._packed(line))
        return known[2]

    def _packed(self, line: PrefillLine) -> PromptSteps:
        first_s = -1.0
        total_s, step_s, tokens, prompts = 0.0, 0.0, 0, 0
        for one in self.computing.values():
            fits = tokens and not one.fetch_s and tokens + one.new_tokens <= STEP_TOKENS
            if fits and (first_s >= 0 or one.got_at < self.head_since):
                seconds = max(0.0, one.seconds - max(0.0, shared_s(line, tokens, one.new_tokens)))
            else:
                if tokens and first_s < 0:
                    first_s = step_s
                seconds, step_s, tokens, prompts = one.seconds, 0.0, 0, 0
            step_s += seconds
            total_s += seconds
            tokens += max(1, one.new_tokens)
            prompts += 1
        if first_s < 0:
            return PromptSteps(total_s, total_s)
        return PromptSteps(first_s, total_s, step_s, tokens, prompts)

    def total_s(self) -> float:
        """Seconds of all prompts that it has, the first one whole."""
        return self.steps().total_s

    def computed_by(self, now: float) -> float:
        """When all its prompts are thought to be computed."""
        return max(now, self.head_since + self.total_s())

    def prefill_line(self) -> PrefillLine:
        """The costs of prompts; computed again only after a measurement."""
        factors, bias = self.costs.prefill_fit.factors, self.costs.prefill_bias.factor
        if self.line is None or factors is not self.factors or bias != self.bias:
            self.factors, self.bias, self.line = factors, bias, self.costs.prefill_line
        return self.line

    def step_s(self) -> float:
        """Seconds of a step with one more request, of usual length, than it will have anyway."""
        if self.step_cost_s < 0:
            count: float = len(self.decoding) + len(self.coming)
            tokens: float = self._tokens()
            if self.others.running:
                tokens += self.others.running * self.usual_context()
                count += self.others.running
            batch = ceil((count + 1) / self.ranks)
            context = batch * tokens / max(1, count)
            fullest, longest = self._slowest()
            self.step_cost_s = self.costs.step_seconds(max(batch, fullest), max(context, longest))
        return self.step_cost_s

    def usual_context(self) -> float:
        """Mean tokens of our requests that decode there; :data:`USUAL_TOKENS` if there are none."""
        count = len(self.decoding) + len(self.coming)
        return self._tokens() / count if count else USUAL_TOKENS

    def usual_prompt_s(self) -> float:
        """Recent mean seconds of our prompts there; those of a usual one if there were none."""
        return self.usual_s or sum(self.prefill_line().terms(USUAL_TOKENS, 0))

    def pass_time(self, now: float) -> None:
        """Update the sums of decoding requests up to now."""
        passed = max(0.0, now - self.at)
        if passed:
            count, tokens = self._slowest()
            self.batch_s += passed * count
            self.context_s += passed * tokens
            self.at = now

    def check_ranks(self) -> None:
        """Assert that each rank has the requests that were sent there."""
        sent = [one for one in self.decoding.values() if one.rank is not None]
        counts = Counter(one.rank for one in sent)
        assert counts == {rank: count for rank, (count, _) in self.of_rank.items()}
        assert sum(one.tokens for one in sent) == sum(tokens for _, tokens in self.of_rank.values())
