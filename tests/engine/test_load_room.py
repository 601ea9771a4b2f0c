"""Goal: what was decided about loads is carried out, waits for room end, and nothing is left."""

from collections import Counter

import pytest

from kvstore.client.results import Hit
from kvstore.engine.fit import SAMPLES_MIN
from kvstore.engine.load_choice import LOADS_MAX, STUCK_MAX, UNMEASURED_MAX
from kvstore.engine.load_costs import STUCK_S
from kvstore.engine.messages import Report
from kvstore.engine.requests import ScheduledRequest
from tests.engine.engine import PLAIN, Request, World
from tests.engine.test_scheduler import request, table


def full(world):
    """As many loads in flight as there is room for, once some were measured."""
    world.store.answer = Hit(4)
    for number in range(SAMPLES_MIN):
        (load,) = world.load(request(f"before{number}")).loads
        world.ended(load.job, 4, 0.001)
    for number in range(LOADS_MAX):
        (load,) = world.load(request(f"other{number}")).loads
    world.side.counts.take()
    return load.job


def test_until_some_were_measured_there_is_room_for_few_loads():
    world = World()
    world.store.answer = Hit(4)
    jobs = [world.load(request(str(number))).loads[0].job for number in range(UNMEASURED_MAX)]

    assert world.side.match(request(), PLAIN, 0) == (None, False)
    world.ended(jobs[1], 4, 0.001)
    assert world.side.match(request(), PLAIN, 0) == (256, True)


def test_a_request_waits_for_room_and_is_loaded_when_a_load_ends():
    world = World()
    job = full(world)
    asked, lookups = request(), len(world.store.asked)

    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.now += 0.1
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    assert len(world.store.asked) == lookups + 1, "not looked up while there is no room"
    world.ended(job, 4)
    (load,) = world.load(asked).loads

    assert len(load.keys) == 4
    counts = world.side.counts.take()
    assert counts["room_waits"] == 1
    assert counts["room_wait_seconds"] == pytest.approx(0.1)


def test_a_request_that_waits_for_room_in_vain_is_computed():
    world = World(room_wait_ms=50)
    full(world)
    asked = request()

    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.now += 0.051
    assert world.side.match(asked, PLAIN, 0) == (0, False)
    world.step(ScheduledRequest("r", 300, [table()]))
    assert world.side.counts.take()["choices_compute_no_room"] == 1


def test_no_request_waits_for_room_longer_than_computing_it_takes():
    world = World(room_wait_ms=10_000)
    world.side.pace.seconds_per_token = 1e-3
    full(world)
    asked = request()
    world.step()  # nobody else is computed

    assert world.side.match(asked, PLAIN, 0) == (None, False)
    world.now += 0.257
    assert world.side.match(asked, PLAIN, 0) == (0, False)


def given_up(world, jobs):
    """The requests of loads stop waiting, and then much time passes."""
    world.side.reported(Report(late=set(jobs)))
    world.now += STUCK_S


def test_loads_that_never_end_take_no_room_after_a_time_and_keep_their_blocks():
    world = World()
    last = full(world)
    jobs = range(last - LOADS_MAX + 1, last + 1)
    world.side.reported(Report(late=set(jobs)))
    held = Counter(world.blocks.held)
    world.now += STUCK_S - 1
    assert world.side.match(request(), PLAIN, 0) == (None, False), "they may end yet"
    world.now += 1

    (probe,) = world.load(request()).loads
    assert world.side.counts.take()["stuck_loads"] == LOADS_MAX
    assert world.blocks.held >= held
    assert world.side.match(request("second"), PLAIN, 0) == (0, False), "one is tried"
    world.ended(probe.job, 4, 0.001)
    for number in range(LOADS_MAX):
        assert world.load(request(f"next{number}")).loads
    assert not world.side.chooser.has_room(["host"])
    assert world.blocks.held >= held

    for job in range(jobs[0], probe.job + LOADS_MAX + 1):
        world.ended(job, 0)
    assert not world.blocks.held
    assert world.side.chooser.costs.in_flight == world.side.chooser.costs.stuck == 0


def test_loads_that_never_end_leave_the_engine_most_of_its_blocks():
    """Each holds 8 blocks: seven hold a quarter, whatever else there would be room for."""
    world = World(blocks=224)
    last = full(world)
    for job in range(last - LOADS_MAX + 7, last + 1):
        world.ended(job, 4, 0.001)
    given_up(world, range(last - LOADS_MAX + 1, last - LOADS_MAX + 7))
    (load,) = world.load(request("seventh")).loads
    for _ in range(2):  # two ranks say so, one after the other
        given_up(world, [load.job])

    assert world.side.match(request("eighth"), PLAIN, 0) == (0, False)
    assert sum(world.blocks.held.values()) == 56
    world.ended(load.job, 0)
    assert world.side.match(request("eighth"), PLAIN, 0) == (256, True)


def test_loads_that_wait_leave_the_engine_blocks_to_compute_with():
    world = World(blocks=100)
    world.store.answer = Hit(4)
    for number in range(SAMPLES_MIN):
        (load,) = world.load(request(f"before{number}")).loads
        world.ended(load.job, 4, 0.001)
    jobs = [world.load(request(str(number))).loads[0].job for number in range(10)]

    assert world.side.match(request("next"), PLAIN, 0) == (None, False)
    world.ended(jobs[3], 4)
    assert world.side.match(request("next"), PLAIN, 0) == (256, True)


def test_a_device_that_ends_nothing_gets_so_many_loads_and_no_more():
    world = World(blocks=10_000)
    last = full(world)
    given_up(world, range(last - LOADS_MAX + 1, last + 1))
    for number in range(STUCK_MAX - LOADS_MAX):
        (load,) = world.load(request(f"try{number}")).loads
        given_up(world, [load.job])
    assert world.side.match(request("none"), PLAIN, 0) == (0, False)
    assert world.side.chooser.costs.stuck == STUCK_MAX
    world.ended(load.job, 0)
    assert world.side.chooser.has_room(["host"])


def test_no_request_waits_for_room_that_only_stuck_loads_could_make():
    world = World(blocks=100)
    world.store.answer = Hit(4)
    for number in range(SAMPLES_MIN):
        (load,) = world.load(request(f"before{number}")).loads
        world.ended(load.job, 4, 0.001)
    stuck = [world.load(request(f"stuck{number}")).loads[0].job for number in range(4)]
    (good,) = world.load(request("good")).loads
    world.side.reported(Report(late=set(stuck)))
    asked = request("asked")
    assert world.side.match(asked, PLAIN, 0) == (None, False), "they may end yet"
    world.now += 0.01
    world.ended(good.job, 4, 0.001)
    world.now += STUCK_S
    assert world.side.match(request("other"), PLAIN, 0) == (0, False)
    for number in range(3):
        assert world.side.match(request(f"other{number}"), PLAIN, 0) == (0, False)
    assert world.side.counts.take()["stuck_loads"] == 4
    world.ended(stuck[0], 0)
    assert world.side.match(request("at last"), PLAIN, 0) == (256, True)


@pytest.mark.parametrize("way", ["aborted", "reset", "node away"])
def test_requests_that_waited_for_room_and_went_leave_nothing(way):
    world = World()
    job = full(world)
    asked = request()
    assert world.side.match(asked, PLAIN, 0) == (None, False)
    if way == "aborted":
        world.side.finished("r")
    elif way == "reset":
        world.side.forget_all()
    else:
        world.store.answer = Hit(0)
    for number in range(job - LOADS_MAX + 1, job + 1):
        world.ended(number, 0 if way == "node away" else 4)

    assert not world.blocks.held
    assert not world.side.busy
    assert world.side.chooser.has_room(["host"])
    assert world.side.chooser.costs.in_flight == 0
    again = (0, False) if way == "node away" else (256, True)
    assert world.side.match(asked, PLAIN, 0) == again


def test_a_part_is_loaded_and_the_rest_computed_and_not_stored_again():
    world = World()
    world.side.pace.seconds_per_token = 1e-3
    world.store.answer = Hit(4, tiers={"host": 3, "ssd": 1}, load_seconds=5.0)
    asked = request()
    (load,) = world.load(asked).loads
    assert len(load.keys) == 3
    assert load.blocks[0].blocks == table(6)
    assert world.side.hit_sources("r", 3 * 64) == (0, 0), "all of it is from memory"
    world.ended(load.job, 3, 0.001)

    assert not world.step(ScheduledRequest("r", 300, [table()])).stores, "the node has all four"
    counts = world.side.counts.take()
    assert counts["choices_part_faster"] == 1
    assert counts["slower_tokens"] == 64
    assert counts["load_measured_seconds"] == pytest.approx(0.001)
    assert "choices_compute_faster" not in counts


def test_a_preempted_request_is_decided_anew():
    world = World()
    world.side.pace.seconds_per_token = 1e-6
    world.store.answer = Hit(4, load_seconds=1.0)
    asked = request()
    for _ in range(2):
        assert world.side.match(asked, PLAIN, 0) == (0, False)
        world.step(ScheduledRequest("r", 300, [table()]))
    assert world.side.counts.take()["choices_compute_faster"] == 2

    world.side.pace.seconds_per_token = 1.0
    assert world.side.match(asked, PLAIN, 0) == (256, True)


def test_a_prompt_that_is_being_computed_makes_loads_of_others_worth_more():
    world = World()
    world.side.pace.seconds_per_token = 1e-3
    world.store.answer = Hit(4, load_seconds=0.5)
    assert world.side.match(request(), PLAIN, 0) == (0, False)
    long = Request("long", list(range(5000)))
    world.side.see(long, PLAIN)
    world.step(ScheduledRequest("long", 512, [table(16)]), tokens=512)

    assert world.side.match(request("s"), PLAIN, 0) == (256, True)
    world.step(ScheduledRequest("long", 5000, [table(157)]))
    assert world.side.match(request("t"), PLAIN, 0) == (0, False)


def test_everything_is_loaded_where_the_options_say_so():
    world = World(loads="always")
    world.side.pace.seconds_per_token = 1e-6
    world.store.answer = Hit(4, load_seconds=1.0)

    assert world.side.match(request(), PLAIN, 0) == (256, True)
