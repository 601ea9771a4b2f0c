"""Does our policy beat the others as promised, whatever the load, hardware and estimate errors?

With ``--trace``: at the speed at which ``cache-global`` just holds 90 % effective, rows
``promise/ttft``, ``/p99``, ``/effective`` and ``/longest`` (effective of the longest tenth of the
prompts) compare the two policies, and ``promise/load`` the speeds at which each just holds 90 %.

Without it: rows ``shape/LOAD/FLEET/ESTIMATES/PART/ttft`` and ``/effective`` compare ours with the
best other policy on made-up loads, as means over some seeds. A fleet is ``equal`` or ``unequal`` in
hardware, pairs or ``mixed``, or ``learned``: its engines are 30 % slower or faster than is thought
at first. ``ESTIMATES`` are ``exact``, ``fixed`` (30 % off for good, up or down by engine) or
``noise`` (off by up to 30 %, another part for each request). ``PART`` is of the speed at which
``cache-global`` just holds 90 % there. Everybody waits as long as it takes, so that the mean is of
the same requests for all.

With ``--choice``: rows ``choice/LOAD/FLEET/SEED`` compare the goodput of mixed engines that are
lent with that of the same engines in fixed roles; see :mod:`bench.scheduling_choice`.

``ratio`` is 1 where both are equal and more where ours is better; ``kept`` is whether it is at
least ``floor``. Everything is simulated; the exit status is 1 if a promise is not kept.
"""

import argparse
import math
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from bench import scheduling_choice
from bench.measure import Progress, Report, Result
from conductor.routing.engines import Role
from conductor.routing.policy import POLICIES
from conductor.simulator.fleet import Running, SimulatedEngine, engines_of
from conductor.simulator.goodput import PRECISION, Highest, highest_speed
from conductor.simulator.report import Objectives, Summary, run_while_attained, summary_of
from conductor.simulator.scenario import NEVER, Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import TracedRequest, read_trace
from conductor.simulator.workloads import made_up
from kvstore.protocol.errors import InvalidArgument, reason

OURS: Final = "earliest-first-token"
BESIDE: Final = "cache-global"
"""The policy whose limit is the speed of a comparison."""
MODEL: Final = "llama3-70b"
FLEETS: Final[dict[str, dict[Role, str]]] = {
    "equal": {Role.PREFILL: "4xa800", Role.DECODE: "4xa800"},
    "unequal": {Role.PREFILL: "2xa800,2xh800", Role.DECODE: "2xh800,2xa800"},
    "mixed": {Role.MIXED: "3xa800,3xh800"},
    "learned": {Role.PREFILL: "2xa800@1.3,2xa800@0.7", Role.DECODE: "2xa800@1.3,2xa800@0.7"},
}


class Load(NamedTuple):
    """A made-up load.

    Attributes:
        ttft_s: maximum seconds to the first token.
        requests: how many, unless the options say.
        first: speed with which the search for the limit begins.
    """

    ttft_s: float
    requests: int
    first: float


LOADS: Final = {
    "short": Load(2.0, 1200, 100.0),
    "mixed": Load(5.0, 400, 8.0),
    "long": Load(20.0, 400, 1.0),
    "sessions": Load(5.0, 400, 9.0),
    "hot": Load(5.0, 400, 9.0),
    "burst": Load(10.0, 400, 9.0),
}
PARTS: Final = (0.5, 1.0)
ESTIMATES: Final = {
    "exact": (0.0, 0.0),
    "fixed": (0.3, 0.0),
    "noise": (0.0, 0.3),
}
"""Skew and noise of a scenario."""
OTHERS: Final = tuple(name for name in POLICIES if name not in (OURS, "random", "round-robin"))
"""Policies that somebody would choose; the two that look at nothing are never the best."""
_TBT_S: Final = 0.1
_ROUGHLY: Final = 0.08
"""So precise are the limits on made-up loads."""
_BEARABLE: Final = 0.97
"""Our policy is never over 3 % worse than the best other one."""


class Case(NamedTuple):
    """What is simulated with different policies and speeds."""

    trace: Sequence[TracedRequest]
    engines: Sequence[SimulatedEngine]
    objectives: Objectives
    wait_s: float
    skew: float = 0.0
    noise: float = 0.0

    def simulation(self, policy: str, speed: float) -> Simulation:
        """One simulation, not yet run."""
        scenario = Scenario(
            policy=policy, speed=speed, wait_s=self.wait_s, skew=self.skew, noise=self.noise
        )
        return Simulation(self.trace, self.engines, scenario)

    def summary(self, policy: str, speed: float) -> Summary:
        """The figures of one policy at one speed."""
        simulation = self.simulation(policy, speed)
        simulation.run()
        return summary_of(simulation, self.objectives)

    def highest(self, policy: str, first: float, precision: float = PRECISION) -> Highest:
        """The highest speed at which a policy holds 90 % effective; the search begins at one."""

        def effective(speed: float) -> float:
            simulation = self.simulation(policy, speed)
            run_while_attained(simulation, self.objectives)
            return summary_of(simulation, self.objectives).effective

        return highest_speed(effective, first, precision)


class Promise(Result, frozen=True, kw_only=True):
    """Adds what the ratio must be at least, and whether it is."""

    floor: float
    kept: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    scheduling_choice.add_arguments(parser)
    parser.add_argument("--trace", type=Path, help="trace file in Mooncake's format")
    parser.add_argument(
        "--requests",
        type=int,
        help="number of requests; default: the whole trace, or what each load defines",
    )
    parser.add_argument("--prefill", default="8xa800",
                        help="prefill engines for the trace; default: %(default)s")  # fmt: skip
    parser.add_argument("--decode", default="8xa800",
                        help="decode engines for the trace; default: %(default)s")  # fmt: skip
    parser.add_argument("--wait-s", type=float, default=30.0,
                        help="how long a request may wait; default: %(default)s")  # fmt: skip
    parser.add_argument("--first", type=float, default=1.9,
                        help="speed at which the search starts; default: %(default)s")  # fmt: skip
    parser.add_argument("--loads", help="synthetic loads, comma-separated; default: all")
    parser.add_argument("--fleets", help="fleets, comma-separated; default: all")
    parser.add_argument("--estimates",
                        help="kinds of wrong estimates, comma-separated; default: all")  # fmt: skip
    parser.add_argument("--seeds", default="1,2",
                        help="random seeds of the synthetic loads; default:"
                        " %(default)s")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Simulate and print; exit status 1 if a promise is not kept, 2 if an option is wrong."""
    kept = True
    try:
        if options.choice:
            wanted = choices(options)
        else:
            wanted = promises(options) if options.trace is not None else shapes(options)
        with Report(json=options.json) as report:
            for one in wanted:
                report.add(one)
                kept = kept and one.kept
    except InvalidArgument as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{reason(error)}\n")
        return 1
    return 0 if kept else 1


def promises(options: argparse.Namespace) -> Iterator[Promise]:
    """Compare two policies on a trace."""
    if not 0 < options.first < math.inf:
        raise InvalidArgument("first", "a number above 0 is needed")
    trace = read_trace(options.trace, options.requests)
    if not trace:
        raise InvalidArgument("trace", f"{options.trace} is empty")
    specs = {Role.PREFILL: options.prefill, Role.DECODE: options.decode}
    engines = engines_of(specs, MODEL, Running())
    case = Case(trace, engines, Objectives(), options.wait_s)
    with Progress("search", 4) as progress:
        progress.step(f"the limit of {BESIDE}")
        limit = case.highest(BESIDE, options.first)
        progress.note(f"{BESIDE} holds {limit.effective:.1%} at speed {limit.speed:.4g}")
        progress.step(f"{BESIDE} there")
        theirs = case.summary(BESIDE, limit.speed)
        progress.step(f"{OURS} there")
        ours = case.summary(OURS, limit.speed)
        yield _lower("promise/ttft", ours.ttft, theirs.ttft, 1 / 0.7)
        yield _lower("promise/p99", ours.p99, theirs.p99, 1 / 1.03)
        yield _higher("promise/effective", ours.effective, theirs.effective, 1.0)
        lost = theirs.long_effective - 0.02
        yield _higher("promise/longest", ours.long_effective, theirs.long_effective,
                      lost / theirs.long_effective)  # fmt: skip
        progress.step(f"the limit of {OURS}")
        best = case.highest(OURS, limit.speed * 1.2)
        yield _higher("promise/load", best.speed, limit.speed, 1.1, unit="x")


def shapes(options: argparse.Namespace) -> Iterator[Promise]:
    """Compare ours with the best other policy on made-up loads."""
    loads, fleets = _names(options, "loads", LOADS), _names(options, "fleets", FLEETS)
    estimates, seeds = _names(options, "estimates", ESTIMATES), _seeds(options)
    with Progress("shape", len(loads) * len(fleets)) as progress:
        for load in loads:
            ttft_s, requests, first = LOADS[load]
            count, objectives = options.requests or requests, Objectives(ttft_s, _TBT_S)
            traces = [made_up(load, count, seed) for seed in seeds]
            for fleet in fleets:
                progress.step(f"{load}/{fleet}")
                engines = engines_of(FLEETS[fleet], MODEL, Running())
                cases = [Case(trace, engines, objectives, NEVER) for trace in traces]
                limit = cases[0].highest(BESIDE, first, _ROUGHLY).speed
                progress.note(f"{load}/{fleet}: {BESIDE} holds 90 % at speed {limit:.4g}")
                found: dict[str, Means] = {}
                for wrong in estimates:
                    skew, noise = ESTIMATES[wrong]
                    cases = [one._replace(skew=skew, noise=noise) for one in cases]
                    for part in PARTS:
                        name = f"shape/{load}/{fleet}/{wrong}/{part:g}"
                        yield from _against_all(name, cases, limit * part, found)


def choices(options: argparse.Namespace) -> Iterator[Promise]:
    """Compare one engine or a pair per request with the best fixed roles."""
    loads = _names(options, "loads", scheduling_choice.LOADS)
    fleets = _names(options, "fleets", scheduling_choice.FIXED)
    for one in scheduling_choice.choices(loads, fleets, _seeds(options), options.requests):
        lowest = scheduling_choice.LOWEST
        yield _higher(one.case, one.ours, one.fixed, lowest, one.best, unit="1/s")


def _names(options: argparse.Namespace, name: str, known: Collection[str]) -> list[str]:
    given = getattr(options, name)
    names = [*known] if given is None else given.split(",")
    if not set(names) <= set(known):
        raise InvalidArgument(name, f"{', '.join(known)} are possible")
    return names


def _seeds(options: argparse.Namespace) -> list[int]:
    if not options.seeds.replace(",", "").isdecimal():
        raise InvalidArgument("seeds", f"{options.seeds!r} is not like 1,2")
    return [int(seed) for seed in options.seeds.split(",")]


class Means(NamedTuple):
    """Means of a policy over some seeds: of its mean TTFT, and of the part that is effective."""

    ttft: float
    effective: float


def _means(cases: Sequence[Case], policy: str, speed: float) -> Means:
    found = [case.summary(policy, speed) for case in cases]
    return Means(fmean(one.ttft for one in found), fmean(one.effective for one in found))


def _against_all(
    name: str, cases: Sequence[Case], speed: float, known: dict[str, Means]
) -> Iterator[Promise]:
    """Ours and the best of the others, each figure by itself.

    ``known`` has what does not depend on estimates, by policy and speed.
    """
    others: dict[str, Means] = {}
    for policy in OTHERS:
        key = f"{policy}/{speed}/{cases[0].noise}"
        others[policy] = known[key] if key in known else _means(cases, policy, speed)
        if POLICIES[policy].fetches is None:
            known[key] = others[policy]
    ours = _means(cases, OURS, speed)
    best = min(others, key=lambda one: others[one].ttft)
    yield _lower(f"{name}/ttft", ours.ttft, others[best].ttft, _BEARABLE, best)
    best = max(others, key=lambda one: others[one].effective)
    yield _higher(f"{name}/effective", ours.effective, others[best].effective, _BEARABLE, best)


def _lower(case: str, ours: float, theirs: float, floor: float, beside: str = BESIDE) -> Promise:
    """A figure in seconds: the lower one is better."""
    ratio = theirs / ours if ours else math.inf
    return Promise(
        case, ours, "s", beside, theirs, ratio, floor=round(floor, 3), kept=ratio >= floor
    )


def _higher(
    case: str, ours: float, theirs: float, floor: float, beside: str = BESIDE, unit: str = ""
) -> Promise:
    """A figure of which more is better."""
    ratio = ours / theirs if theirs else math.inf
    return Promise(
        case, ours, unit, beside, theirs, ratio, floor=round(floor, 3), kept=ratio >= floor
    )
