"""The decision log: the engines chosen for each request, the reasons, and the result.

A decision is created when a request arrives. It gets one attempt each time engines are chosen, and
the measured values when the request ends. The log keeps the newest decisions, in memory only.
"""

from collections import OrderedDict
from datetime import datetime
from itertools import islice

import msgspec

from conductor.routing.choices import Assign, Candidates, Judgement
from conductor.routing.moving import Restored
from conductor.routing.packing import PackedCandidates, SharedValues


class Measured(msgspec.Struct, kw_only=True):
    """An engine's measurements of a request, from its ``usage`` and ``timings``.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens of the output.
        cached_tokens: prompt tokens found in the engine's own cache.
        restored_tokens: prompt tokens restored from a node.
        restored_bytes: bytes restored from a node.
        queue_s: seconds waiting in the engine.
        restore_s: seconds for lookup and restore.
        compute_s: seconds computing.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    restored_tokens: int | None = None
    restored_bytes: int | None = None
    queue_s: float | None = None
    restore_s: float | None = None
    compute_s: float | None = None

    @property
    def hit_tokens(self) -> int | None:
        """Prompt tokens that were not computed; None if the engine does not report them."""
        if self.cached_tokens is None and self.restored_tokens is None:
            return None
        return (self.cached_tokens or 0) + (self.restored_tokens or 0)

    @property
    def restored(self) -> Restored | None:
        """What it fetched, and how long that took; None if it fetched nothing, or does not tell."""
        tokens, seconds = self.restored_tokens or 0, self.restore_s or 0.0
        return Restored(tokens, seconds) if tokens > 0 and seconds > 0 else None


class HandoffReport(msgspec.Struct, frozen=True):
    """How one engine of a pair says that a handoff went.

    Attributes:
        way: how the KV went.
        state: in which state the handoff ended: ``success`` or ``failed``.
        code: why it failed; empty = it did not.
        seconds: how long it was in each state.
        bytes: of KV.
    """

    way: str
    state: str
    code: str
    seconds: dict[str, float]
    bytes: int


class Brought(msgspec.Struct):
    """KV that a node was asked to bring for a request that waited.

    Attributes:
        node: where it went.
        source: the node that had it: the same one, on its disk, or another one.
        tokens: tokens of the prompt, up to the end of the brought pages.
        outcome: empty while it runs; ``done``, ``incomplete``, ``failed``, ``cancelled`` (the
            request went elsewhere), ``late`` (after ``bring.deadline_s``) or ``refused``.
    """

    node: str
    source: str
    tokens: int
    outcome: str = ""


class Attempt(msgspec.Struct, kw_only=True):
    """One choice of engines for a request.

    Attributes:
        plan: ``alone`` or ``pair``.
        prefill: engine for the prefill.
        decode: engine that generates the tokens.
        reason: reason of the policy.
        predicted_hit_tokens: prompt tokens that ``prefill`` has cached, according to the index.
        candidates: all engines of the model with their numbers.
        assigned_s: seconds from arrival to the assignment.
        predicted_ttft_s: seconds from the assignment to the first token, as the costs said; None
            if the policy does not use them.
        prefill_s: duration of the first half of a pair; None if there was none.
        decode_queue_s: seconds that the KV of a pair waited for a place at the decode engine; None
            if there was no such wait.
        handoff_s: seconds from that place to the first token of the decode engine; None if its
            answer is not streamed, if it computed the prompt itself, or if both engines were asked
            at once: then they say in ``pushed`` and ``received`` how long it took.
        tbt_s: mean seconds between two tokens of a stream; None if it was not streamed to its end,
            if the engine does not say how many tokens it had, or if the client read slowly.
        way: how the KV of a pair goes: ``push``, ``store``, ``connector`` (vLLM's), or empty if
            its protocol does not say; empty without a pair.
        room: number of the attempt that both engines of a pair got, if they got one.
        pushed: how the push went, as the prefill engine says; None = it has not said yet, or the
            KV went another way. It may come after the request has ended.
        received: likewise, as the decode engine says.
        outcome: empty while it runs; then ``ok`` or the error.
        prefilled: measurements of the prefill engine of a pair.
        served: measurements of the engine that answered.
    """

    plan: str
    prefill: str
    decode: str
    reason: str
    predicted_hit_tokens: int
    candidates: Candidates | PackedCandidates
    assigned_s: float
    predicted_ttft_s: float | None = None
    prefill_s: float | None = None
    decode_queue_s: float | None = None
    handoff_s: float | None = None
    tbt_s: float | None = None
    way: str = ""
    room: int | None = None
    pushed: HandoffReport | None = None
    received: HandoffReport | None = None
    outcome: str = ""
    prefilled: Measured | None = None
    served: Measured | None = None

    def streamed(self, seconds: float) -> None:
        """Its tokens came within so many seconds after the first one."""
        tokens = self.served.completion_tokens if self.served is not None else None
        if tokens is not None and tokens > 1:
            self.tbt_s = seconds / (tokens - 1)


class Decision(msgspec.Struct, kw_only=True):
    """The decision on one request.

    Attributes:
        id: the response header ``X-Request-Id``.
        at: time of arrival, ISO 8601.
        route: path of the request: of a completion or a chat completion.
        model: requested model.
        policy: name of the policy.
        stream: whether the client requested a stream.
        prompt_tokens: number of prompt tokens; None if the prompt was not tokenised.
        tokenize_s: seconds for tokenising.
        queue_s: seconds waiting for places at engines, all attempts together.
        judgement: the prediction when it arrived; None if it was not judged.
        brought: pages brought to nodes while it waited.
        attempts: attempts in order; empty if it was refused at once.
        status: HTTP status for the client; None while it runs.
        outcome: empty while it runs; ``ok``, ``rejected``, ``failed``, ``broken`` (an error after
            the first byte), ``client_gone``.
        detail: the error, if not ``ok``.
        ttft_s: seconds from arrival to the first byte for the client; None if there was none.
        conductor_s: part of ``ttft_s`` spent in the Conductor itself, without waiting for engines.
        total_s: seconds from arrival to the end.
    """

    id: str
    at: str
    route: str
    model: str
    policy: str
    stream: bool
    prompt_tokens: int | None = None
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    judgement: Judgement | None = None
    brought: list[Brought] = []
    attempts: list[Attempt] = []
    status: int | None = None
    outcome: str = ""
    detail: str = ""
    ttft_s: float | None = None
    conductor_s: float | None = None
    total_s: float | None = None

    def attempted(self, assign: Assign, assigned_s: float) -> Attempt:
        """Add an attempt for an assignment."""
        attempt = Attempt(
            plan=str(assign.plan),
            prefill=assign.prefill,
            decode=assign.decode,
            reason=assign.reason,
            predicted_hit_tokens=assign.usable_tokens,
            candidates=assign.candidates,
            assigned_s=assigned_s,
            predicted_ttft_s=assign.ttft_s or None,
        )
        self.attempts.append(attempt)
        return attempt

    @property
    def ttft_error(self) -> float | None:
        """Relative error of the last attempt's predicted seconds to the first token.

        None if they were not predicted, or not measured: for an answer that is not streamed.
        """
        last = self.attempts[-1] if self.attempts else None
        if last is None or last.predicted_ttft_s is None or self.ttft_s is None or not self.stream:
            return None
        took_s = max(self.ttft_s - last.assigned_s, 1e-6)
        return abs(last.predicted_ttft_s - took_s) / took_s

    @property
    def measured_hit_tokens(self) -> int | None:
        """Prompt tokens that the prefilling engine did not compute; None if unknown."""
        if not self.attempts:
            return None
        last = self.attempts[-1]
        source = last.prefilled if last.plan == "pair" else last.served
        return source.hit_tokens if source else None


class DecisionLog:
    """The newest ``kept`` decisions by id."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._shared = SharedValues()

    def open(
        self, request_id: str, route: str, model: str, policy: str, *, stream: bool, at: datetime
    ) -> Decision:
        """Create a decision; replaces one with the same id; removes the oldest if full."""
        when = at.isoformat(timespec="milliseconds")
        decision = Decision(
            id=request_id, at=when, route=route, model=model, policy=policy, stream=stream
        )
        self._decisions.pop(request_id, None)
        self._decisions[request_id] = decision
        while len(self._decisions) > self._kept:
            self._decisions.popitem(last=False)
        return decision

    def ended(self, decision: Decision) -> None:
        """A request has ended: keep its explanation in fewer bytes."""
        for attempt in decision.attempts:
            if isinstance(attempt.candidates, Candidates):
                attempt.candidates = PackedCandidates(attempt.candidates, self._shared)

    def get(self, request_id: str) -> Decision | None:
        """The decision with this id, if still kept."""
        return self._decisions.get(request_id)

    def newest(self, limit: int) -> list[Decision]:
        """Up to ``limit`` decisions, newest first."""
        return list(islice(reversed(self._decisions.values()), limit))

    def __len__(self) -> int:
        return len(self._decisions)
