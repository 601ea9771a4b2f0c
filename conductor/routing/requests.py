"""Requests, as the dispatcher knows them. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from conductor.routing.choices import Assign, Reject
from conductor.routing.columns import NO_KEYS, NO_PREFIX, Matches
from conductor.routing.engines import EngineInfo, Role
from conductor.routing.pending import WaitingRow
from conductor.routing.recent import LoadSample
from conductor.routing.scheduler import Handoff
from kvstore.index.layout import Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request that arrives.

    Attributes:
        number: unique; increases in order of arrival.
        model: requested model, or LoRA adapter.
        arrived: time of arrival, seconds.
        tokens: tokens of the prompt; None = unknown.
        keys: a chain value for each leading page of the prompt; empty = unknown.
        tenant: on whose behalf; empty = unknown.
        session: conversation that it belongs to; empty = unknown.
        service: name of its class; empty = the first one.
        output_max: maximum tokens of its answer; None = no limit is known.
    """

    number: int
    model: str
    arrived: float
    tokens: int | None = None
    keys: Words = field(default_factory=lambda: NO_KEYS)
    tenant: str = ""
    session: str = ""
    service: str = ""
    output_max: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the prompt and its answer, as far as they are known."""
        return 0 if self.tokens is None else self.tokens + (self.output_max or 1)

    def queue_full(self, waiting: int, retry_after_s: int) -> Reject:
        """Its refusal because that many wait and no more may."""
        why = f"{waiting} requests are waiting already"
        return Reject(self.number, why, retry_after_s, "queue_full", status=429)

    def broken(self) -> Reject:
        """Its refusal because a decision about it could not be carried out."""
        what = "an internal error; see the Conductor's log"
        return Reject(self.number, what, 0, "internal", status=500)

    def closing(self) -> Reject:
        """Its refusal while the Conductor shuts down."""
        return Reject(self.number, "the Conductor is shutting down", 1, "shutting_down")


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """Bounds of the dispatcher.

    Attributes:
        waiting_max: maximum waiting requests; those that failed at an engine may exceed it.
        wait_s: maximum seconds of one wait.
        tries: maximum assignments of one request.
    """

    waiting_max: int
    wait_s: float
    tries: int


@dataclass(slots=True)
class KnownRequest:
    """A request that has not ended.

    Attributes:
        assign: its present assignment; None = it waits for one.
        excluded: engines that failed it, or do not accept so many tokens.
        held: engines at which it has a place.
        promised: its decode engine, at which it has no place yet.
        arrived: whether its KV has arrived, so that it waits for this place.
        least_s: seconds of its prompt where it waits, else where it needs the fewest; 0 = unknown.
        bound: engine for which it waits; empty = none has been chosen.
    """

    request: Request
    deadline: float
    excluded: frozenset[str] = frozenset()
    tries: int = 0
    matches: Matches = field(default_factory=dict)
    assign: Assign | None = None
    held: list[str] = field(default_factory=list)
    promised: str | None = None
    arrived: bool = False
    least_s: float = 0.0
    bound: str = ""

    def row(self, priority: int, output: float) -> WaitingRow:
        """The row for the scheduler.

        Args:
            priority: lower is more urgent.
            output: expected tokens of its answer.
        """
        one = self.request
        return WaitingRow(
            one.number, one.model, one.arrived, self.deadline, (one.arrived + self.deadline) / 2,
            self.excluded, one.tokens, one.keys, priority, one.tenant, one.session, self.matches,
            self.least_s, self.bound, output,
        )  # fmt: skip

    def needs(self, output: float) -> LoadSample:
        """Its needs, if its length is known.

        The prefix at its assigned engine is excluded; while it waits, the longest prefix at any
        engine. At least one token is computed.

        Args:
            output: expected tokens of its answer.
        """
        if self.assign is not None:
            prefix = self.assign.prefix_tokens
        else:
            prefix = max((one.usable + one.peer for one in self.matches.values()), default=0)
        tokens = self.request.tokens or 0
        prefix = max(0, min(prefix, tokens - 1))
        return LoadSample(tokens - prefix, prefix, round(output))

    def rank(self, engine_id: str) -> int | None:
        """The data-parallel rank of an engine to which it goes; None = the engine chooses one."""
        if self.assign is not None and engine_id in self.assign.ranks:
            return self.assign.ranks[engine_id]
        return self.matches[engine_id].rank if engine_id in self.matches else None

    def missing(self, engine_id: str) -> int:
        """Tokens of its prompt that an engine has neither itself nor at its node, when looked up.

        What is expected there counts as missing: a handoff does not wait for another one.
        """
        one = self.matches.get(engine_id, NO_PREFIX)
        return max(0, (self.request.tokens or 0) - max(one.local, one.node))

    def engines_failed(self, why: str, retry_after_s: int) -> Reject:
        """Its refusal after the last try; ``why`` is the error of that one."""
        text = f"{self.tries} tries failed; the last error: {why}"
        return Reject(self.request.number, text, retry_after_s, "engines_failed")

    def check(self, *, waits: bool, arrived: bool) -> None:
        """Assert that it has places only if assigned, and waits for what it should."""
        assert waits == (self.assign is None)
        assert arrived == self.arrived
        assert self.assign is not None or not self.held

    @property
    def handoff(self) -> Handoff:
        """Whose KV has arrived, and for which engine."""
        assert self.assign is not None
        assert self.promised is not None
        return Handoff(self.assign.protocol, self.promised)


def tokens_max(engines: Iterable[EngineInfo]) -> float:
    """Maximum tokens of prompt and answer that an engine or a pair accepts; may be infinite."""
    longest = dict.fromkeys(Role, 0.0)
    for info in engines:
        longest[info.role] = max(longest[info.role], info.max_model_len or inf)
    return max(longest[Role.MIXED], min(longest[Role.PREFILL], longest[Role.DECODE]))


def too_long(request: Request, engines: Sequence[EngineInfo]) -> Reject | None:
    """The refusal of a request that none of these engines accepts."""
    most = tokens_max(engines)
    if not engines or request.length <= most:
        return None
    why = f"{request.length} tokens with its answer; at most {most:.0f} are possible"
    return Reject(request.number, f"prompt: {why}", 0, "context_length_exceeded", status=400)


def too_short(engines: Iterable[EngineInfo], tokens: int) -> frozenset[str]:
    """Engines that do not accept this many tokens of a prompt and its answer."""
    return frozenset(info.id for info in engines if 0 < info.max_model_len < tokens)
