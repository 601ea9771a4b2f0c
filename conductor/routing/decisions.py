"""The decision log: why each request went where it went, and what came of it.

A decision is opened when a request arrives, gets one attempt each time engines are chosen for it,
and is joined with what was measured when it ends. The log keeps the newest ones, in memory only.
"""

from collections import OrderedDict
from datetime import datetime
from itertools import islice

import msgspec

from conductor.routing.policy import Assign, Candidate


class Measured(msgspec.Struct, kw_only=True):
    """What an engine said about a request, from its ``usage`` and ``timings``.

    Attributes:
        prompt_tokens: of the prompt.
        completion_tokens: of the output.
        cached_tokens: prompt tokens that were in the engine's own cache.
        restored_tokens: prompt tokens that were restored from a node.
        restored_bytes: as ``restored_tokens``.
        queue_s: waiting in the engine.
        restore_s: lookup and restore.
        compute_s: computing.
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
        """Prompt tokens that were not computed; None when the engine does not say."""
        if self.cached_tokens is None and self.restored_tokens is None:
            return None
        return (self.cached_tokens or 0) + (self.restored_tokens or 0)


class Attempt(msgspec.Struct, kw_only=True):
    """One choice of engines for a request.

    Attributes:
        plan: ``alone`` or ``pair``.
        prefill: engine that prefills.
        decode: engine that the client's tokens come from.
        reason: what the policy went by.
        predicted_hit_tokens: prompt tokens that ``prefill`` was believed not to have to compute.
        candidates: every engine of the model with its numbers.
        assigned_s: after the arrival.
        prefill_s: how long the first half of a pair took; None when there was none.
        outcome: empty while it runs; ``ok``, or what went wrong and where.
        prefilled: what the prefill engine measured, of a pair.
        served: what the engine that answered measured.
    """

    plan: str
    prefill: str
    decode: str
    reason: str
    predicted_hit_tokens: int
    candidates: tuple[Candidate, ...]
    assigned_s: float
    prefill_s: float | None = None
    outcome: str = ""
    prefilled: Measured | None = None
    served: Measured | None = None


class Decision(msgspec.Struct, kw_only=True):
    """One request.

    Attributes:
        id: the response header ``X-Request-Id``.
        at: when it arrived, ISO 8601.
        model: model that it asked for.
        policy: name of the policy.
        stream: whether the client asked for a stream.
        prompt_tokens: None while (or because) the prompt was not tokenised.
        tokenize_s: spent on that.
        queue_s: waiting for an engine, all attempts together.
        attempts: in order; empty when it was refused at once.
        status: HTTP status that the client got; None while it runs.
        outcome: empty while it runs; ``ok``, ``rejected``, ``failed``, ``broken`` (an error after
            the first byte), ``client_gone``.
        detail: what happened, when it is not ``ok``.
        ttft_s: arrival to the first byte for the client; None when there was none.
        conductor_s: the Conductor's own share of ``ttft_s``: neither waiting for engines' answers
            nor for a free engine.
        total_s: arrival to the end.
    """

    id: str
    at: str
    model: str
    policy: str
    stream: bool
    prompt_tokens: int | None = None
    tokenize_s: float = 0.0
    queue_s: float = 0.0
    attempts: list[Attempt] = []
    status: int | None = None
    outcome: str = ""
    detail: str = ""
    ttft_s: float | None = None
    conductor_s: float | None = None
    total_s: float | None = None

    def attempted(self, assign: Assign, assigned_s: float) -> Attempt:
        """Record that engines were chosen."""
        attempt = Attempt(
            plan=str(assign.plan),
            prefill=assign.prefill,
            decode=assign.decode,
            reason=assign.reason,
            predicted_hit_tokens=assign.usable_tokens,
            candidates=assign.candidates,
            assigned_s=assigned_s,
        )
        self.attempts.append(attempt)
        return attempt

    @property
    def measured_hit_tokens(self) -> int | None:
        """Prompt tokens that the engine which prefilled did not compute; None when unknown."""
        if not self.attempts:
            return None
        last = self.attempts[-1]
        source = last.prefilled if last.plan == "pair" else last.served
        return source.hit_tokens if source else None


class DecisionLog:
    """The newest ``kept`` decisions, by id."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._decisions: OrderedDict[str, Decision] = OrderedDict()

    def open(
        self, request_id: str, model: str, policy: str, *, stream: bool, at: datetime
    ) -> Decision:
        """Start a decision; one of the same id is replaced, the oldest one goes when full."""
        when = at.isoformat(timespec="milliseconds")
        decision = Decision(id=request_id, at=when, model=model, policy=policy, stream=stream)
        self._decisions.pop(request_id, None)
        self._decisions[request_id] = decision
        while len(self._decisions) > self._kept:
            self._decisions.popitem(last=False)
        return decision

    def get(self, request_id: str) -> Decision | None:
        """The decision of that id, if it is still kept."""
        return self._decisions.get(request_id)

    def newest(self, limit: int) -> list[Decision]:
        """Up to ``limit`` decisions, newest first."""
        return list(islice(reversed(self._decisions.values()), limit))

    def __len__(self) -> int:
        return len(self._decisions)
