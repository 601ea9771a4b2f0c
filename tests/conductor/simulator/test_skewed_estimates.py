"""A policy is tried with wrong estimates, and with those alone: engines are as before."""

import pytest

from conductor.costs.book import EngineCosts, Machine
from conductor.simulator.journal import replay
from conductor.simulator.skew import SkewedBook
from conductor.simulator.workloads import made_up
from tests.conductor.simulator.simulated import LinearSteps, fleet, simulated, trace_of

MACHINE = Machine("llama3-70b", "a800", 8)


def test_every_other_engine_seems_slower_and_those_between_faster() -> None:
    true, book = EngineCosts(MACHINE), SkewedBook(0.3)

    engines = [book.of(name, MACHINE) for name in ("p0", "p1", "p2")]

    for costs, factor in zip(engines, (1.3, 0.7, 1.3), strict=True):
        assert costs.step_seconds(4, 9_000) == pytest.approx(factor * true.step_seconds(4, 9_000))
        assert sum(costs.prefill_line.terms(2_000, 500)) == pytest.approx(
            factor * sum(true.prefill_line.terms(2_000, 500))
        )
    assert book.of("p1", MACHINE) is engines[1]


def test_fits_do_not_correct_a_skew_and_the_lasting_bias_does() -> None:
    costs, true = SkewedBook(0.3).of("p0", MACHINE), EngineCosts(MACHINE)
    step_s, prompt_s = true.step_seconds(4, 9_000), costs.prior.prefill_seconds(2_000, 500)

    for _ in range(100):  # as the truth is
        costs.stepped(4, 9_000, step_s)
        costs.computed(2_000, 500, prompt_s)

    for _, fit in costs.fits.values():
        assert fit.factors.tolist() == pytest.approx([1.0] * len(fit.factors))
    assert costs.step_seconds(4, 9_000) == pytest.approx(step_s, rel=0.01)
    assert costs.step_factors.tolist() == pytest.approx([1.0] * 3, rel=0.01)
    assert sum(costs.prefill_line.terms(2_000, 500)) == pytest.approx(prompt_s, rel=0.01)


def test_a_skew_changes_decisions_and_a_replay_has_it_too() -> None:
    trace = made_up("sessions", 40)
    straight, skewed = (
        simulated(
            trace, fleet(3, 2, room_tokens=200_000), policy="earliest-first-token", speed=8.0,
            skew=skew, journal=True,
        )
        for skew in (0.0, 0.3)
    )  # fmt: skip

    assert [one.prefill for one in straight.records] != [one.prefill for one in skewed.records]
    assert skewed.head.skew == 0.3
    assert not replay(skewed.head, skewed.journal)


def test_with_noise_each_prompt_takes_another_time_than_estimated() -> None:
    trace = trace_of(*[(9.0 * at, 1_000, 1, []) for at in range(40)])

    done = simulated(trace, fleet(mixed=1), noise=0.3)

    usual_s = LinearSteps().prefill_seconds(1_000, 0)
    factors = [(one.ttft_s or 0.0) / usual_s for one in done.records]
    assert len({round(one, 6) for one in factors}) == len(factors)
    assert 0.7 <= min(factors) < 0.75
    assert 1.25 < max(factors) <= 1.3
    assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.03)
