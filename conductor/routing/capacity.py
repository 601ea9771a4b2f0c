"""How many requests a second a fleet serves in time, by its costs and a sample of requests. Pure.

Prompts are computed by a queue with one server for each engine, and answers decode in a queue with
one server for each place that an engine can fill without breaking an objective. The wait in a queue
of k servers with utilisation u, mean service s and coefficient of variation c is taken to be

``P(wait > t) = u ** (sqrt(2 (k + 1)) - 1) * exp(-2 k (1 - u) t / (s (1 + c ** 2)))``

(Sakasegawa's approximation of the probability to wait, and an exponential tail with the mean wait
of Allen and Cunneen). A rate is served if 90 % of the sample get their first token in time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.costs.prior import PrefillLine
from conductor.routing.engines import Role
from conductor.routing.recent import LoadSample

ATTAINED: Final = 0.9
"""Part of the requests that must be served in time."""
_STEPS: Final = 30
"""Of the search for a rate."""
_FIXED_POINT_STEPS: Final = 8
"""Of the number of requests that decode at a mixed engine."""
_CHUNK_TOKENS: Final = 8192
"""Tokens of prompts that a mixed engine is thought to compute in a step."""
_TAIL: Final = 0.1
"""Part of the longest intervals between tokens whose mean counts."""

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Equal engines.

    Attributes:
        role: their role.
        hardware: name of their accelerators, as registered.
        line: the costs of prompts.
        step_s: seconds of a decode step, by batch and total tokens of context.
        places: requests that one decodes at a time.
        room: tokens of KV of one; infinite = unknown.
        count: number of engines.
    """

    role: Role
    hardware: str
    line: PrefillLine
    step_s: Callable[[float, float], float]
    places: int
    room: float
    count: int


class Targets(NamedTuple):
    """Seconds to the first token, and between two tokens."""

    ttft_s: float
    tbt_s: float


class FleetRates(NamedTuple):
    """Requests a second that are served in time.

    Attributes:
        prefill: as far as prompts are concerned.
        decode: as far as answers are.
    """

    prefill: float
    decode: float

    @property
    def both(self) -> float:
        """The lower one."""
        return min(self.prefill, self.decode)


class Needs:
    """A sample of requests, in columns.

    Attributes:
        output: mean tokens of an answer.
        context: mean tokens of a request while it decodes.
        whole: mean tokens of a request at its end.
        chunks: mean steps in which a mixed engine computes a prompt.
    """

    def __init__(self, samples: Sequence[LoadSample]) -> None:
        assert samples
        columns = np.array(samples, dtype=np.float64)
        self._new, self._prefix = columns[:, 0], columns[:, 1]
        self.output = float(np.maximum(columns[:, 2], 1.0).mean())
        self.context = float((self._new + self._prefix).mean() + self.output / 2)
        self.whole = float((self._new + self._prefix).mean() + self.output)
        self._chunks = np.maximum(1.0, np.ceil(self._new / _CHUNK_TOKENS))
        self.chunks = float(self._chunks.mean())

    def prompts_s(self, line: PrefillLine) -> Numbers:
        """Seconds of each prompt."""
        pairs = self._new * (self._prefix + (self._new + 1.0) / 2.0)
        weights = np.maximum(line.floor_s, line.token_s * self._new)
        seconds: Numbers = line.constant_s + weights + line.pair_s * pairs
        return seconds

    def longest_chunks(self, seconds: Numbers) -> tuple[Numbers, Numbers]:
        """Mean seconds of the longest chunks of prompts, by which part of all chunks they are.

        Args:
            seconds: of each prompt.

        Returns:
            The means, and the parts, which rise from more than 0 to 1.
        """
        each = seconds / self._chunks
        order = np.argsort(-each, kind="stable")
        counts = self._chunks[order].cumsum()
        means: Numbers = (each * self._chunks)[order].cumsum() / counts
        return means, counts / counts[-1]


class _Queue(NamedTuple):
    """Servers with their service time.

    Attributes:
        servers: how many, in units of the mean one.
        mean_s: of the service.
        variation: square of its coefficient of variation.
        alone_s: until the first token of each request without any wait.
    """

    servers: float
    mean_s: float
    variation: float
    alone_s: Numbers

    def rate(self, ttft_s: float) -> float:
        """The highest rate at which enough requests have their first tokens in time."""
        low, high = 0.0, self.servers / self.mean_s
        if self._in_time(0.0, ttft_s) < ATTAINED:
            return 0.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            if self._in_time(middle * self.mean_s / self.servers, ttft_s) >= ATTAINED:
                low = middle
            else:
                high = middle
        return low

    def _in_time(self, used: float, ttft_s: float) -> float:
        slack_s = ttft_s - self.alone_s
        waits = used ** max(0.0, sqrt(2 * (self.servers + 1)) - 1) if used > 0 else 0.0
        decay = 2 * self.servers * (1 - used) / (self.mean_s * (1 + self.variation))
        late = waits * np.exp(-np.maximum(slack_s, 0.0) * decay)
        return float(np.where(slack_s >= 0, 1.0 - late, 0.0).mean())


def capacity(kinds: Sequence[EngineKind], needs: Needs, targets: Targets) -> FleetRates:
    """The rate that a fleet serves in time; mixed engines add to both parts."""
    pairs = FleetRates(
        _prefill(_of(kinds, Role.PREFILL), needs, targets),
        _decode(_of(kinds, Role.DECODE), needs, targets),
    )
    mixed = sum(one.count * _mixed(one, needs, targets) for one in _of(kinds, Role.MIXED))
    return FleetRates(pairs.prefill + mixed, pairs.decode + mixed)


def _of(kinds: Sequence[EngineKind], role: Role) -> list[EngineKind]:
    return [one for one in kinds if one.role is role and one.count]


def _prefill(kinds: Sequence[EngineKind], needs: Needs, targets: Targets) -> float:
    if not kinds:
        return 0.0
    seconds = [needs.prompts_s(one.line) for one in kinds]
    speed = sum(one.count / float(mine.mean()) for one, mine in zip(kinds, seconds, strict=True))
    best = min(seconds, key=lambda mine: float(mine.mean()))
    mean_s = float(best.mean())
    variation = float(best.var()) / mean_s**2
    return _Queue(speed * mean_s, mean_s, variation, best).rate(targets.ttft_s)


def batch_max(kind: EngineKind, needs: Needs, tbt_s: float) -> int:
    """Requests that an engine decodes at once without breaking an objective; 0 = none."""
    most = int(min(kind.places, kind.room / needs.whole))
    low = 0
    while low < most:
        middle = (low + most + 1) // 2
        if kind.step_s(middle, middle * needs.context) <= tbt_s:
            low = middle
        else:
            most = middle - 1
    return low


def _decode(kinds: Sequence[EngineKind], needs: Needs, targets: Targets) -> float:
    servers = speed = 0.0
    for one in kinds:
        batch = batch_max(one, needs, targets.tbt_s)
        if batch:
            stay_s = needs.output * one.step_s(batch, batch * needs.context)
            servers += one.count * batch
            speed += one.count * batch / stay_s
    if not servers:
        return 0.0
    return _Queue(servers, servers / speed, 1.0, np.zeros(1)).rate(targets.ttft_s)


def _mixed(kind: EngineKind, needs: Needs, targets: Targets) -> float:
    """Of one engine that computes prompts and decodes in the same steps.

    A request that decodes waits for every chunk that is computed meanwhile; the mean of the longest
    tenth of its intervals must not exceed its objective.
    """
    seconds = needs.prompts_s(kind.line)
    mean_s = float(seconds.mean())
    chunks_s, before = needs.longest_chunks(seconds)
    low = 0.0
    high = _Queue(1, mean_s, float(seconds.var()) / mean_s**2, seconds).rate(targets.ttft_s)
    batch_most = batch_max(kind, needs, targets.tbt_s)
    tail = max(1.0, _TAIL * needs.output)
    for _ in range(_STEPS):
        rate = (low + high) / 2
        steps = _mixed_steps(kind, needs, rate, mean_s)
        met = steps.batch * needs.chunks  # chunks that are computed while one request decodes
        slow = min(tail, met)
        # The longest ones count: of those that it meets, the part that fits in the tail.
        among = min(1.0, tail / met) if met > 0 else 1.0
        slow_s = float(np.interp(among, before, chunks_s)) + steps.besides_s
        tail_s = (slow * slow_s + (tail - slow) * steps.decode_s) / tail
        if steps.batch <= batch_most and tail_s <= targets.tbt_s:
            low = rate
        else:
            high = rate
    return low


class _MixedSteps(NamedTuple):
    """Steps of an engine that computes prompts and decodes.

    Attributes:
        batch: requests that decode; infinite = ever more.
        decode_s: seconds of a step that only decodes.
        besides_s: seconds that a step with a chunk of a prompt takes for the batch.
    """

    batch: float
    decode_s: float
    besides_s: float


def _mixed_steps(kind: EngineKind, needs: Needs, rate: float, prompt_s: float) -> _MixedSteps:
    """The steps at a rate of requests, as a fixed point.

    Those with a chunk give every request that decodes a token, too: the weights are read once, the
    tokens of the batch are computed with the chunk, and their KV is read besides.
    """
    chunks = rate * needs.chunks
    steps = _MixedSteps(1.0, kind.step_s(1.0, needs.context), 0.0)
    for _ in range(_FIXED_POINT_STEPS):
        left = 1.0 - rate * prompt_s - chunks * steps.besides_s
        if left <= 0:
            return steps._replace(batch=inf)
        batch = rate * needs.output / (chunks + left / steps.decode_s)
        full = min(float(kind.places), max(1.0, batch))
        decode_s = kind.step_s(full, full * needs.context)
        read_s = max(0.0, decode_s - kind.step_s(full, 0.0))
        steps = _MixedSteps(batch, decode_s, kind.line.token_s * full + read_s)
    return steps
