"""Goal: lookups stop a step for a limited time in all, and every request is answered in the end."""

import pytest

from kvstore.client.results import Hit
from tests.engine.engine import PLAIN, Request, World

SLOW_S = 0.004
"""One lookup, just within the timeout of 5 ms: three of them are in time in a step."""


class Slow(World):
    """A node that answers every lookup in time, but slowly."""

    def __init__(self, **extra):
        super().__init__(**extra)
        answered, self.looked_up = self.store.lookup, 0
        self.slow_s = SLOW_S

        def lookup(keys, **more):
            self.now += self.slow_s
            self.looked_up += 1
            return answered(keys, **more)

        self.store.lookup = lookup

    def turn(self, waiting):
        """Schedule a step; returns the answers of those that need not ask again."""
        answers = {}
        for one in waiting:
            tokens, _ = self.side.match(one, PLAIN, 0)
            if tokens is not None:
                answers[one.request_id] = tokens
        self.step()
        self.now += 0.001
        return answers


def requests(count, name="r"):
    return [Request(f"{name}{at}", [at] * 300) for at in range(count)]


def test_a_step_is_stopped_for_the_same_time_however_many_requests_wait():
    world = Slow()
    waiting = requests(256)

    assert len(world.turn(waiting)) == 3
    assert world.looked_up == 3


def test_requests_are_looked_up_in_turn_and_each_one_once():
    world = Slow()
    waiting, seen = requests(30), []
    for _ in range(10):
        answers = world.turn(waiting)
        seen += answers
        waiting = [one for one in waiting if one.request_id not in answers]

    assert seen == [f"r{at}" for at in range(30)]
    assert world.looked_up == 30
    assert world.side.counts.take()["passed_over"] == 27


def test_requests_that_ask_again_and_again_do_not_hold_up_others():
    world = Slow()
    world.store.answer = Hit(1, pending=3)
    waiting = requests(12)
    for _ in range(4):
        assert not world.turn(waiting)

    assert world.looked_up == 12
    assert len({keys.packed for keys in world.store.asked}) == 12, "each one once"


def test_a_request_that_is_always_passed_over_is_a_miss_at_its_deadline():
    world = Slow(load_timeout_ms=40)
    waiting, answers, steps = requests(256), {}, 0
    world.store.answer = Hit(4)
    for one in waiting:
        world.side.see(one, PLAIN)
    while waiting:
        found = world.turn(waiting)
        answers |= found
        waiting = [one for one in waiting if one.request_id not in found]
        steps += 1
        assert steps < 10

    assert answers["r0"] == 256
    assert answers["r255"] == 0


def test_a_wait_for_a_turn_and_one_for_pages_have_one_deadline():
    world = Slow(load_timeout_ms=40)
    world.store.answer = Hit(1, pending=3)
    waiting, began = requests(6), world.now
    while len(waiting) > 3 or world.now < began + 0.04:
        found = world.turn(waiting)
        waiting = [one for one in waiting if one.request_id not in found]
        assert world.now < began + 0.08
    found = world.turn(waiting)
    assert {one.request_id for one in waiting} == set(found)
    assert world.side.counts.take()["waits"] == 6


@pytest.mark.parametrize("slow_steps", [3, 12])
def test_a_node_that_was_slow_for_some_steps_is_asked_for_all_once_it_is_fast(slow_steps):
    """Also if requests arrive in every step, so that none ends without one that waited."""
    world, waiting, delays = Slow(), [], {}
    world.store.answer = Hit(4)
    for step in range(slow_steps + 30):
        world.slow_s = SLOW_S if step < slow_steps else SLOW_S / 20
        waiting += [Request(f"{step}-{at}", [step, at] * 150) for at in range(4)]
        answers = world.turn(waiting)
        if step >= slow_steps + 20:
            delays |= {name: step - int(name.split("-")[0]) for name in answers}
            assert set(answers.values()) == {256}
        waiting = [one for one in waiting if one.request_id not in answers]
        world.now += 0.03

    assert len(delays) == 40
    assert set(delays.values()) == {0}


def test_a_wait_for_few_pages_is_short_also_after_one_for_a_turn():
    world = Slow(load_timeout_ms=10_000)
    world.side.pace.seconds_per_token = 0.001
    world.store.answer = Hit(4)
    late = Request("late", [9] * 3000)
    assert "late" not in world.turn([*requests(3), late])
    world.store.answer = Hit(45, pending=1)
    asked_s = world.now

    while not world.turn([late]):
        assert world.now < asked_s + 1.0, "computing the page takes 0.064 s, the prompt 3 s"
    assert world.looked_up > 4


def test_what_was_found_is_loaded_when_a_wait_ends_beside_an_older_request_that_left():
    world = Slow(load_timeout_ms=30)
    world.store.answer = Hit(3, pending=1)
    asked, older = Request("asked", [8] * 300), Request("older", [9] * 300)
    assert not world.turn([asked, *requests(2), older])
    world.side.finished("older")
    world.now += 0.03

    assert world.turn([asked]) == {"asked": 192}


def test_one_that_does_not_come_again_holds_up_the_others_for_one_step():
    world = Slow()
    gone, others = requests(4), requests(2, "other")
    world.turn(gone)

    assert not world.turn(others)
    assert world.turn(others).keys() == {"other0", "other1"}
