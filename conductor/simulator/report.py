"""The results of a simulation: latencies, hits, and how many requests were served in time."""

import math
from collections.abc import Iterable, Sequence

import msgspec

from conductor.advice.advise import Advice, advise
from conductor.routing.capacity import Targets
from conductor.routing.fleet import kinds_of
from conductor.simulator.goodput import ATTAINED
from conductor.simulator.scenario import Record
from conductor.simulator.simulation import Simulation


class Objectives(msgspec.Struct, frozen=True):
    """Service level objectives of one request.

    Attributes:
        ttft_s: maximum seconds to its first token.
        tbt_s: maximum mean of the longest tenth of its intervals between tokens, seconds.
    """

    ttft_s: float = 30.0
    tbt_s: float = 0.1

    def met(self, record: Record) -> bool:
        """Whether a request was served, and in time."""
        ttft = record.ttft_s
        served = record.outcome == "ok" and ttft is not None
        return served and ttft <= self.ttft_s and record.tbt_s <= self.tbt_s  # type: ignore[operator]


class Summary(msgspec.Struct, frozen=True):
    """The figures of one simulation.

    Attributes:
        requests: number of requests of the trace.
        ttft: mean seconds to the first token of the served requests; 0 if none was served.
        p50, p90, p99: percentiles of the same.
        tbt_p99: 99th percentile of the time between tokens of a request, which is the mean of the
            longest tenth of its intervals; seconds.
        hit: tokens of the served prompts that were not computed, as part of all.
        effective: requests served within both objectives, as part of all.
        rejected: requests refused, broken or too long, as part of all.
        lost: requests that were not effective, refused or served too late, as part of all.
        wasted: lost requests for which an engine computed something, as part of all.
        goodput: effective requests a second and engine, from the first arrival to the last.
        long_effective: part of the longest tenth of the prompts that is effective.
        predicted_hit: tokens of the served prompts that the dispatcher expected not to be
            computed, as part of all.
        seconds: seconds from the first arrival to the last end.
    """

    requests: int
    ttft: float
    p50: float
    p90: float
    p99: float
    tbt_p99: float
    hit: float
    effective: float
    rejected: float
    lost: float
    wasted: float
    goodput: float
    long_effective: float
    predicted_hit: float
    seconds: float


def summary_of(simulation: Simulation, objectives: Objectives) -> Summary:
    """The figures of a simulation that has run."""
    records = simulation.records
    served = [one for one in records if one.outcome == "ok"]
    ttfts = sorted(one.ttft_s for one in served if one.ttft_s is not None)
    tokens = sum(one.request.tokens for one in served) or 1
    met = [one for one in records if objectives.met(one)]
    by_length = sorted(records, key=lambda one: (-one.request.tokens, one.request.number))
    longest = by_length[: math.ceil(len(records) / 10)]
    arriving = max((one.arrived for one in records), default=0.0) or 1.0
    return Summary(
        requests=len(records),
        ttft=sum(ttfts) / len(ttfts) if ttfts else 0.0,
        p50=percentile(ttfts, 50),
        p90=percentile(ttfts, 90),
        p99=percentile(ttfts, 99),
        tbt_p99=percentile(sorted(one.tbt_s for one in served), 99),
        hit=sum(one.hit_tokens for one in served) / tokens,
        effective=_part(len(met), len(records)),
        rejected=_part(len(records) - len(served), len(records)),
        lost=_part(len(records) - len(met), len(records)),
        wasted=_part(
            sum(one.tries > 0 and not objectives.met(one) for one in records), len(records)
        ),
        goodput=len(met) / arriving / len(simulation.head.engines),
        long_effective=_part(sum(map(objectives.met, longest)), len(longest)),
        predicted_hit=sum(one.predicted_hit for one in served) / tokens,
        seconds=max((one.ended or 0.0 for one in records), default=0.0),
    )


def run_while_attained(simulation: Simulation, objectives: Objectives) -> None:
    """Simulate until all have ended, or too many are lost for this rate to count as goodput."""
    bearable = (1 - ATTAINED) * len(simulation.records) + 1e-6
    lost = looked_at = 0
    while lost <= bearable and simulation.step():
        lost += sum(not objectives.met(one) for one in simulation.ended[looked_at:])
        looked_at = len(simulation.ended)


def advice_of(simulation: Simulation, objectives: Objectives) -> Advice:
    """What would be advised at the end of the arrivals, by what the dispatcher knows."""
    dispatcher, registry = simulation.desk.dispatcher, simulation.desk.registry
    model = simulation.head.engines[0].model
    last = simulation.records[-1].arrived if simulation.records else 0.0
    load = dispatcher.admission.recent.shape({model}, last)
    targets = Targets(objectives.ttft_s, objectives.tbt_s)
    return advise(kinds_of(registry, dispatcher.loads), load, targets)


def shown_advice(advice: Advice) -> str:
    """Advice in a line."""
    if advice.reason:
        return f"no advice: {advice.reason}"
    found = f"{advice.rate:.3g} requests/s came, {advice.served:.3g} can be served in time"
    found += f", limited by {advice.limit}"
    short = [f"{one.engines} {one.hardware}" for one in advice.short]
    if short:
        found += f", short of {' or '.join(short)}"
    if advice.flip is not None:
        one = advice.flip
        found += f"; advice: let one {one.hardware} {one.role} instead of {one.was}"
        found += f" ({one.gain - 1:+.0%})"
    return found


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % do not exceed; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1]


def _part(count: int, of: int) -> float:
    return count / of if of else 0.0


def rejections(records: Iterable[Record]) -> dict[str, int]:
    """How many requests were not served, by why."""
    counts: dict[str, int] = {}
    for one in records:
        if one.outcome != "ok":
            why = one.code or one.outcome
            counts[why] = counts.get(why, 0) + 1
    return counts
