"""Goal: what a mixed engine is thought to serve in time is what the simulated engine serves."""

import pytest

from conductor.costs.book import CostBook
from conductor.routing.capacity import Needs, Targets, capacity
from conductor.routing.engines import Role
from conductor.routing.fleet import fleet_of
from conductor.routing.recent import LoadSample
from conductor.simulator.fleet import Running, engines_of
from conductor.simulator.report import Objectives, summary_of
from conductor.simulator.scenario import NEVER, Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.workloads import made_up

TARGETS = Targets(2.0, 0.5)
TRACE = made_up("short", 600, 3)
RATE = len(TRACE) / max(one.at_s for one in TRACE)


def simulation(rate: float) -> Simulation:
    scenario = Scenario(policy="earliest-first-token", speed=rate / RATE, wait_s=NEVER)
    engines = engines_of({Role.MIXED: "1xh800"}, "llama3-70b", Running(mixed=64))
    return Simulation(TRACE, engines, scenario)


@pytest.fixture(scope="module")
def predicted() -> float:
    """Requests a second that one engine is thought to serve in time."""
    dispatcher, registry = simulation(1.0).head.dispatcher(CostBook())
    engines, others = fleet_of(registry, dispatcher.loads)
    assert (len(engines), len(others)) == (1, 0)
    needs = Needs([LoadSample(one.tokens, 0, one.output) for one in TRACE])
    return capacity([engines[0].kind], needs, TARGETS).both


@pytest.mark.parametrize(("part", "enough"), [(0.9, True), (1.1, False)])
def test_a_mixed_engine_serves_what_is_predicted_and_not_much_more(
    predicted: float, part: float, enough: bool
) -> None:
    served = simulation(predicted * part)
    served.run()
    effective = summary_of(served, Objectives(*TARGETS)).effective
    assert (effective >= 0.9) is enough, f"{effective:.3f} at {predicted * part:.1f} a second"
