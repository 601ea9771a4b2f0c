"""The parameters of a simulation, and the outcome of each request."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from conductor.routing.admission import EVERYBODY, AdmissionRules
from conductor.routing.moving import Restored
from conductor.simulator.trace import TracedRequest

NEVER: Final = math.inf
_GOLDEN: Final = (5**0.5 - 1) / 2
"""Its multiples are spread evenly between whole numbers, and look as if by chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An engine that dies, and comes back empty.

    Attributes:
        engine: its id.
        at_s: when, in seconds after the first arrival.
        back_s: when it comes back.
    """

    engine: str
    at_s: float
    back_s: float = NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated, besides the trace and the engines.

    Attributes:
        policy: name of the Conductor's policy.
        speed: how much faster requests arrive than in the trace.
        waiting_max: maximum requests that wait for an engine; others are rejected.
        wait_s: maximum seconds of such a wait.
        tries: maximum assignments of one request.
        chunk_tokens: tokens that one step of an engine computes at most.
        host_bytes: memory of each node for KV.
        disk_bytes: disk of each node for KV; 0 = none.
        disk_bytes_per_s: how fast it reads.
        peers: whether nodes fetch from each other.
        bring_bytes: maximum bytes that nodes load from disks and copy at a time for requests that
            wait; 0 = they do not.
        handoff_part: part of a prompt's KV that leaves for the decode engine when all of it is
            computed, as with protocols that ask the engines in turn; the rest went before.
        failures: engines that die.
        sample_s: seconds between two samples of load; 0 = none.
        journal: whether inputs and decisions of the dispatcher are kept.
        rules: who is admitted, and who comes first.
        skew: by which part the dispatcher's estimates are off for ever, 0 to less than 1: too high
            for every other engine, too low for the engines between.
        noise: by which part a prompt takes longer or shorter than any estimate can know, at most;
            another for each, 0 to less than 1.
        lends: whether mixed engines are lent to prompts or tokens.
    """

    policy: str = "longest-prefix"
    speed: float = 1.0
    waiting_max: int = 1_000_000
    wait_s: float = NEVER
    tries: int = 3
    chunk_tokens: int = 8192
    host_bytes: float = 1e12
    disk_bytes: float = 0.0
    disk_bytes_per_s: float = 6e9
    peers: bool = True
    bring_bytes: float = 0.0
    handoff_part: float = 1.0
    failures: Sequence[Failure] = ()
    sample_s: float = 0.0
    journal: bool = False
    rules: AdmissionRules = EVERYBODY
    skew: float = 0.0
    noise: float = 0.0
    lends: bool = False

    def factor(self, number: int) -> float:
        """How much longer the prompt of a request takes than usual; evenly spread."""
        return 1.0 + self.noise * (2.0 * (number * _GOLDEN % 1.0) - 1.0)


@dataclass(slots=True)
class Record:
    """What became of a request.

    Attributes:
        request: as it is in the trace.
        arrived: seconds after the first.
        outcome: empty while it runs; ``ok``, ``rejected``, ``too_long`` (no engine has so much
            room), ``broken`` (its engine died after the first token).
        code: of the rejection.
        tries: assignments.
        prefill: engine that computed the prompt last.
        decode: engine that generated the tokens last.
        hit_tokens: of the prompt, not computed there.
        predicted_hit: the same, as the dispatcher thought.
        assigned: time of the first assignment.
        first_s: time of the first token.
        ended: time of the end.
        tbt_s: mean of the longest tenth of its intervals between tokens.
    """

    request: TracedRequest
    arrived: float
    outcome: str = ""
    code: str = ""
    tries: int = 0
    prefill: str = ""
    decode: str = ""
    hit_tokens: int = 0
    predicted_hit: int = 0
    assigned: float | None = None
    first_s: float | None = None
    ended: float | None = None
    tbt_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; None = it got none."""
        return None if self.first_s is None else self.first_s - self.arrived


@dataclass(slots=True)
class Flight:
    """A request that engines have.

    Attributes:
        prefill: engine of the prompt.
        decode: engine of the tokens; it may change until ``continued``.
        expected: engines that were told to the index.
        fetched: positions of blocks that were fetched for it.
        transfers: numbers of its transfers.
        computed: whether its prompt is computed.
        continued: whether the decode engine has a place for it.
        fetches: whether the prefill engine's node may fetch from others.
        restored: what was fetched for it; None = nothing.
        followers: called when its fetches have ended, for those who count on them.
    """

    record: Record
    prefill: str
    decode: str
    expected: set[str] = field(default_factory=set)
    fetched: range = range(0)
    transfers: set[int] = field(default_factory=set)
    computed: bool = False
    continued: bool = False
    fetches: bool = True
    restored: Restored | None = None
    followers: list[Callable[[int], None]] = field(default_factory=list)

    @property
    def where(self) -> set[str]:
        """Engines without which it cannot go on."""
        if not self.continued:
            return {self.prefill}
        return {self.prefill, self.decode} if self.transfers else {self.decode}
