"""What an engine learns of its own speed."""

import pytest

from kvstore.client.results import Hit
from kvstore.engine.messages import Report
from kvstore.engine.pace import STEPS_MAX, Pace, pairs_of
from tests.engine.engine import PLAIN, World
from tests.engine.test_scheduler import request


def test_short_steps_are_no_measure_of_prefill():
    pace = Pace()

    assert not pace.note_step(31, 1.0)
    assert pace.recompute_s(10) == float("inf")
    assert pace.note_step(100, 1.0)
    assert pace.recompute_s(10) == pytest.approx(0.1)


def test_steps_that_mostly_decode_are_no_measure_of_prefill():
    world = World()
    for tokens, decoded, seconds in ((1000, 10, 1.0), (64, 64, 0.6), (100, 60, 0.6)):
        step = world.step(tokens=tokens, decoded=decoded)
        world.now += seconds
        world.side.reported(Report(step=step.number))

    assert world.side.pace.seconds_per_token == pytest.approx(1e-3)


def test_what_a_step_takes_depends_on_its_tokens_and_on_those_before_them():
    pace = Pace()
    for tokens, before in ((100, 0), (200, 1000), (50, 500), (200, 0), (150, 3000), (60, 2000)) * 4:
        pairs = pairs_of(tokens, before)
        assert pace.note_step(tokens, 0.01 + tokens * 1e-3 + pairs * 1e-6, pairs)

    for tokens, before in ((80, 0), (200, 2500)):
        expected = 0.01 + tokens * 1e-3 + pairs_of(tokens, before) * 1e-6
        assert pace.recompute_s(tokens, before) == pytest.approx(expected, rel=0.1)
    steps = 400 / 200
    expected = steps * 0.01 + 0.4 + pairs_of(400, 0) * 1e-6
    assert pace.recompute_s(400) == pytest.approx(expected, rel=0.1), "in two steps"
    assert pace.recompute_s(0) == 0.0


def test_a_step_that_waits_for_layers_is_no_measure_of_prefill():
    world = World(load="layerwise")
    world.store.answer = Hit(4)
    asked = request()
    tokens, _ = world.side.match(asked, PLAIN, 0)
    world.side.allocated(asked, [list(range(1, 11))], tokens)
    step = world.step(tokens=500)
    world.now += 1.0
    world.side.reported(Report(step=step.number))

    assert not world.side.pace.seconds_per_token


def test_a_step_that_begins_before_the_one_before_it_is_reported_is_measured_from_that_report_on():
    """Asynchronous scheduling: build 1, build 2, report 1, build 3, report 2."""
    world = World()
    first = world.step(tokens=1000)
    world.now += 0.1
    second = world.step(tokens=64, decoded=64)
    world.now += 0.9
    world.side.reported(Report(step=first.number))
    assert world.side.pace.seconds_per_token == pytest.approx(1e-3), "and not the 64 in 0.9 s"

    third = world.step(tokens=100)
    world.now += 0.5
    world.side.reported(Report(step=second.number) or None)
    world.now += 0.1
    world.side.reported(Report(step=third.number))
    assert world.side.pace.seconds_per_token == pytest.approx(1e-3), "0.1 s, and not 0.6 s"


def test_a_step_of_which_nobody_reports_is_no_measure_for_another():
    world = World()
    lost, step = world.step(tokens=1000), world.step(tokens=500)
    world.now += 0.5
    world.side.reported(Report(step=step.number))
    world.now += 5.0
    world.side.reported(Report(step=lost.number))
    for _ in range(2 * STEPS_MAX):
        world.step(tokens=100)
    world.now += 7.0
    world.side.reported(Report(step=step.number + 1))
    assert world.side.pace.seconds_per_token == pytest.approx(1e-3)


def test_ranks_report_the_step_together():
    assert Report(step=7).joined(Report(step=7)).step == 7
    assert Report(step=7).joined(Report()).step == 7
    assert not Report()
    assert Report(step=7), "it reaches the scheduler though nothing has ended"
