"""One engine or a pair: is the choice per request as good as the better choice for all?

Rows ``choice/LOAD/FLEET/SEED`` are requests a second and engine of which 90 % are served in time by
mixed engines that are lent as the load needs, each request by one engine or by a pair; beside them
the best of the same engines in fixed roles: all mixed, or one of the pairings of :data:`FIXED`.

With more load the part that is in time may fall, and rise again: the load may end before the short
prompts are late for the long ones, which are late anyway. So all are searched from the same speed
downwards, and the highest speed at which 90 % are in time counts.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from bench.measure import Progress
from conductor.routing.admission import AdmissionRules, ServiceClass
from conductor.routing.engines import Role
from conductor.simulator.fleet import Running, engines_of
from conductor.simulator.goodput import ATTAINED, Highest, highest_speed, highest_up_to
from conductor.simulator.report import Objectives, run_while_attained, summary_of
from conductor.simulator.scenario import NEVER, Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import TracedRequest
from conductor.simulator.workloads import made_up

POLICY: Final = "earliest-first-token"
MODEL: Final = "llama3-70b"
LOWEST: Final = 0.98
"""The choice per request is never over 2 % under the better fixed one."""
_PRECISION: Final = 0.01
_TOP: Final = 1.5
"""Searched from so many times the first limit that is found for fixed roles."""
_BOTTOM: Final = 0.2
"""Down to so many times the limit of the fixed roles."""


class ChoiceLoad(NamedTuple):
    """A made-up load: objectives in seconds, how many requests, and where the search begins."""

    ttft_s: float
    tbt_s: float
    requests: int
    first: float


LOADS: Final = {
    "short": ChoiceLoad(2.0, 0.1, 1500, 28.0),
    "mixed": ChoiceLoad(5.0, 0.1, 1200, 4.0),
    "long": ChoiceLoad(20.0, 0.1, 400, 0.4),
    "answers": ChoiceLoad(5.0, 0.1, 3000, 12.0),
}
Roles = Mapping[Role, str]
FIXED: Final[dict[str, dict[str, Roles]]] = {
    "equal": {
        "3+1": {Role.PREFILL: "3xa800", Role.DECODE: "1xa800"},
        "2+2": {Role.PREFILL: "2xa800", Role.DECODE: "2xa800"},
        "1+3": {Role.PREFILL: "1xa800", Role.DECODE: "3xa800"},
        "mixed": {Role.MIXED: "4xa800"},
    },
    "unequal": {
        "h800+a800": {Role.PREFILL: "2xh800", Role.DECODE: "2xa800"},
        "a800+h800": {Role.PREFILL: "2xa800", Role.DECODE: "2xh800"},
        "all-but-one+a800": {Role.PREFILL: "1xa800,2xh800", Role.DECODE: "1xa800"},
        "mixed": {Role.MIXED: "2xa800,2xh800"},
    },
}
"""By fleet: the fixed roles of the same engines."""


class Chosen(NamedTuple):
    """One row: requests a second and engine.

    Attributes:
        case: its name.
        ours: chosen for each request.
        fixed: of the best fixed roles.
        best: their name.
    """

    case: str
    ours: float
    fixed: float
    best: str


class PlayedLoad(NamedTuple):
    """A load that is played to engines.

    Attributes:
        trace: its requests.
        load: its objectives.
    """

    trace: Sequence[TracedRequest]
    load: ChoiceLoad

    def effective(self, roles: Roles, speed: float, *, lends: bool) -> float:
        """The part that is served in time."""
        service = ServiceClass(ttft_s=self.load.ttft_s, tbt_s=self.load.tbt_s)
        scenario = Scenario(
            policy=POLICY, speed=speed, wait_s=NEVER, lends=lends,
            rules=AdmissionRules(classes=(service,)),
        )  # fmt: skip
        engines = engines_of(dict(roles), MODEL, Running())
        simulation = Simulation(self.trace, engines, scenario)
        objectives = Objectives(self.load.ttft_s, self.load.tbt_s)
        run_while_attained(simulation, objectives)
        return summary_of(simulation, objectives).effective

    def highest(self, roles: Roles, first: float, *, lends: bool = False) -> Highest:
        """The highest speed at which enough are."""
        return highest_speed(
            lambda speed: self.effective(roles, speed, lends=lends), first, _PRECISION
        )

    def highest_up_to(
        self, roles: Roles, top: float, floor: float, *, lends: bool = False
    ) -> Highest:
        """The highest speed between two at which enough are; 0 = none."""
        return highest_up_to(
            lambda speed: self.effective(roles, speed, lends=lends), top, floor, _PRECISION
        )

    def rate(self, speed: float, engines: int) -> float:
        """Requests a second and engine at a speed."""
        return len(self.trace) / max(one.at_s for one in self.trace) * speed / engines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that others do not have."""
    parser.add_argument("--choice", action="store_true",
                        help="compare mixed engines that change roles with fixed"
                        " roles")  # fmt: skip


def choices(
    loads: Sequence[str], fleets: Sequence[str], seeds: Sequence[int], requests: int | None
) -> Iterator[Chosen]:
    """Search the goodput of the choice per request, and of each fixed one.

    Args:
        loads: of :data:`LOADS`.
        fleets: of :data:`FIXED`.
        seeds: of the loads.
        requests: how many; None = as many as the load says.
    """
    with Progress("choice", len(loads) * len(fleets) * len(seeds)) as progress:
        for name in loads:
            load = LOADS[name]
            for fleet in fleets:
                for seed in seeds:
                    progress.step(f"{name}/{fleet}/{seed}")
                    case = PlayedLoad(made_up(name, requests or load.requests, seed), load)
                    best, top, limit = _best_fixed(case, FIXED[fleet], progress)
                    mixed = FIXED[fleet]["mixed"]
                    ours = case.highest_up_to(mixed, top, _BOTTOM * limit, lends=True).speed
                    count = len(engines_of(dict(mixed), MODEL, Running()))
                    yield Chosen(
                        f"choice/{name}/{fleet}/{seed}",
                        case.rate(ours, count), case.rate(limit, count), best,
                    )  # fmt: skip


def _best_fixed(
    case: PlayedLoad, every: Mapping[str, Roles], progress: Progress
) -> tuple[str, float, float]:
    """The best fixed roles, the speed from which all are searched, and theirs.

    What is no better than another one is not searched.
    """
    best, limit = "", 0.0
    for name, roles in every.items():
        better = limit * (1 + _PRECISION)
        if limit and case.effective(roles, better, lends=False) < ATTAINED:
            progress.note(f"{name} does not hold 90 % at speed {better:.3g}")
            continue
        best, limit = name, case.highest(roles, better or case.load.first).speed
        progress.note(f"{name} holds 90 % at speed {limit:.3g}")
    top = _TOP * (limit or case.load.first)
    for name, roles in every.items():
        higher = case.highest_up_to(roles, top, limit * (1 + _PRECISION) or top * _BOTTOM).speed
        if higher:
            best, limit = name, higher
            progress.note(f"{name} holds 90 % at speed {limit:.3g}, too")
    return best, top, limit or case.load.first
