"""What an engine learns of its own speed."""

import pytest

from kvstore.client.results import Hit
from kvstore.engine.messages import Report
from kvstore.engine.pace import Pace
from tests.engine.engine import PLAIN, World
from tests.engine.test_scheduler import request


def test_before_the_first_load_the_nodes_guess_counts_and_then_what_was_measured():
    pace = Pace()
    hit = Hit(4, load_seconds=0.4)
    assert pace.load_s(hit, 2) == pytest.approx(0.2)

    pace.note_load(10, 0.1)
    assert pace.load_s(hit, 2) == pytest.approx(0.02)
    pace.note_load(0, 5.0)
    assert pace.load_s(hit, 2) == pytest.approx(0.02), "a load of nothing says nothing"


def test_what_loads_from_memory_took_says_nothing_of_pages_on_disk():
    pace = Pace()
    pace.note_load(10, 0.01)
    on_disk = Hit(4, tiers={"host": 2, "ssd": 2}, load_seconds=0.4)

    assert pace.load_s(on_disk, 4) == pytest.approx(0.4)
    pace.note_load(10, 100.0)
    assert pace.load_s(on_disk, 4) > 10.0, "nor is it better than what was seen"


def test_short_steps_are_no_measure_of_prefill():
    pace = Pace()

    assert not pace.note_step(31, 1.0)
    assert pace.recompute_s(10) == float("inf")
    assert pace.note_step(100, 1.0)
    assert pace.recompute_s(10) == pytest.approx(0.1)


def test_steps_that_mostly_decode_are_no_measure_of_prefill():
    world = World()
    for tokens, decoded, seconds in ((1000, 10, 1.0), (64, 64, 0.6), (100, 60, 0.6)):
        world.step(tokens=tokens, decoded=decoded)
        world.now += seconds
        world.side.reported(None)

    assert world.side.pace.seconds_per_token == pytest.approx(1e-3)


def test_loads_that_were_slower_than_computing_are_tried_again_later():
    world = World()
    world.store.answer = Hit(4)
    world.side.pace.seconds_per_token = 1e-3
    (load,) = world.load(request("slow")).loads
    report = Report()
    report.end(load.job, 4, seconds=2.0)  # half a second a page; computing it takes 64 ms
    world.side.reported(report)

    tries = 0
    while world.side.match(request(f"r{tries}"), PLAIN, 0) == (0, False):
        tries += 1
        assert tries < 50, "never tried again"
    assert tries > 1


def test_a_step_that_waits_for_layers_is_no_measure_of_prefill():
    world = World(load="layerwise")
    world.store.answer = Hit(4)
    asked = request()
    tokens, _ = world.side.match(asked, PLAIN, 0)
    world.side.allocated(asked, [list(range(1, 11))], tokens)
    world.step(tokens=500)
    world.now += 1.0
    world.side.reported(None)

    assert not world.side.pace.seconds_per_token
