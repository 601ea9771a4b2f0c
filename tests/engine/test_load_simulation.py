"""Goal: with what is measured, prompts are not later than with the better of two fixed rules."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.engine.load_choice import PROBE_AFTER
from kvstore.engine.options import Loads
from tests.engine.load_simulation import (
    LOAD_TIMEOUT_S,
    ROOM_WAIT_S,
    Arrival,
    Machine,
    Outcome,
    Simulation,
)

MARGIN = 1.25
"""Times the better fixed rule, once loads and steps were measured."""
WARM = 40
"""Prompts until then."""
PROMPTS = 100

machines = st.builds(
    Machine,
    step_s=st.sampled_from([0.0005, 0.002, 0.01]),
    token_s=st.sampled_from([1e-5, 1e-4, 1e-3]),
    pair_s=st.sampled_from([0.0, 1e-9, 1e-7]),
    page_s=st.sampled_from([1e-4, 0.001, 0.005, 0.02, 0.1]),
    open_s=st.sampled_from([0.0, 0.001, 0.02]),
    lanes=st.sampled_from([1, 2, 4, 8]),
    budget=st.sampled_from([256, 512, 2048]),
)


@st.composite
def traffic(draw: st.DrawFn) -> list[Arrival]:
    """Prompts of one size, so that no rule gains by serving short ones first."""
    pages, at_once = draw(st.sampled_from([4, 8, 16, 64])), draw(st.sampled_from([1, 3, 8]))
    gap_s = draw(st.sampled_from([0.05, 0.5, 5.0]))
    return [Arrival(number // at_once * gap_s, pages) for number in range(PROMPTS)]


def outcomes(machine: Machine, arrivals: list[Arrival]) -> dict[Loads, Outcome]:
    return {rule: Simulation(machine, rule).run(arrivals) for rule in Loads}


@settings(max_examples=20)
@given(machines, traffic())
def test_no_fixed_rule_is_better_by_more_than_the_margin(machine, arrivals):
    found = outcomes(machine, arrivals)
    late_s = {rule: sum(one.waits[WARM:]) for rule, one in found.items()}
    best_s = min(late_s[Loads.ALWAYS], late_s[Loads.NEVER])

    assert late_s[Loads.FASTER] <= MARGIN * best_s + 0.001 * PROMPTS


@settings(max_examples=20)
@given(machines, traffic())
def test_before_anything_is_known_no_prompt_is_later_than_a_failed_load_makes_it(machine, arrivals):
    found = outcomes(machine, arrivals)
    latest_s = max(found[Loads.NEVER].waits)

    limit_s = MARGIN * latest_s + LOAD_TIMEOUT_S + ROOM_WAIT_S + machine.page_s
    assert max(found[Loads.FASTER].waits) <= limit_s


def burst(gap_s: float, pages: int = 16) -> list[Arrival]:
    """Eight at once."""
    return [Arrival(number // 8 * gap_s, pages) for number in range(PROMPTS)]


def test_a_fast_disk_is_always_used():
    found = Simulation(Machine(page_s=0.0001)).run(burst(5.0))

    assert found.loaded_pages == 16 * PROMPTS


def test_a_slow_disk_is_only_tried_now_and_then():
    found = Simulation(Machine(page_s=0.5)).run(burst(5.0))
    counts = found.counts

    assert counts["choices_compute_faster"] >= 0.8 * PROMPTS
    assert counts["choices_part_probe"] <= PROMPTS / PROBE_AFTER


def test_with_a_crowded_disk_some_are_loaded_and_some_computed_and_all_are_earlier():
    machine = Machine(page_s=0.012, token_s=2e-4)  # a page is computed in 0.0128 s
    found = outcomes(machine, burst(5.0))
    late_s = {rule: sum(one.waits[WARM:]) for rule, one in found.items()}
    counts = found[Loads.FASTER].counts

    assert counts["choices_load_faster"] + counts.get("choices_part_faster", 0) >= 15
    assert counts["choices_compute_faster"] >= 15
    # Loads that are always taken are not given up when computing would have ended.
    assert late_s[Loads.FASTER] <= 0.9 * min(late_s[Loads.ALWAYS], late_s[Loads.NEVER])


def test_expectations_are_close_once_loads_were_measured():
    simulation = Simulation(Machine(page_s=0.002, lanes=4))
    counts = simulation.run(burst(5.0)).counts

    assert counts["load_error_seconds"] <= 0.3 * counts["load_measured_seconds"]


def test_a_disk_that_becomes_slow_and_fast_again_is_left_and_used_again():
    simulation = Simulation(Machine())
    simulation.run([Arrival(0.5 * number, 16) for number in range(50)])
    simulation.machine = Machine(page_s=0.5)
    began = simulation.now
    slow = simulation.run([Arrival(began + 5.0 * number, 16) for number in range(100)])
    loaded = slow.loaded_pages
    assert slow.counts["choices_compute_faster"] >= 80
    simulation.machine = Machine()
    began = simulation.now
    simulation.run([Arrival(began + 0.5 * number, 16) for number in range(150)])

    assert simulation.outcome.loaded_pages - loaded >= 16 * 80
