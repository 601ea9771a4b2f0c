"""Goal: what is said to be served in time is what was, of the newest requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.routing.attainment import REQUESTS_KEPT, Attainment
from conductor.routing.capacity import Targets

TARGETS = Targets(ttft_s=5.0, tbt_s=0.1)


def test_a_request_is_late_for_its_first_token_or_for_those_after_it() -> None:
    attained = Attainment(TARGETS)
    for number in range(4):
        attained.came("m", number, 10.0)
        attained.assigned(number)
    assert attained.part("m", 0.0, 10.0, 1) is None
    attained.began(0, 15.0)
    attained.began(0, 17.0)  # only the first report counts
    assert attained.part("m", 0.0, 17.0, 1) == 1.0
    assert attained.part("m", 0.0, 17.0, 2) is None
    attained.began(1, 15.1)
    assert attained.part("m", 0.0, 17.0, 1) == 0.5
    attained.ended(0, 101, 24.9)
    attained.began(2, 11.0)
    attained.ended(2, 101, 21.1)
    assert attained.part("m", 0.0, 25.0, 1) == pytest.approx(1 / 3)
    attained.left(3)  # nobody has served it
    assert attained.part("m", 0.0, 25.0, 1) == pytest.approx(1 / 4)


def test_who_waits_for_an_engine_too_long_is_late_and_who_has_one_may_not_be() -> None:
    attained = Attainment(TARGETS)
    for number in range(2):
        attained.came("m", number, 10.0)
    attained.assigned(1)
    assert attained.part("m", 0.0, 15.0, 1) is None
    assert attained.part("m", 0.0, 15.1, 1) == 0.0
    attained.began(1, 20.0)
    assert attained.part("m", 0.0, 20.0, 2) == 0.0


def test_models_are_counted_apart_and_forgotten_with_their_engines() -> None:
    attained = Attainment(TARGETS)
    for number, model in enumerate(("a", "b", "b")):
        attained.came(model, number, 0.0)
        attained.began(number, 1.0 if model == "a" else 6.0)
    attained.began(7, 1.0)  # nobody knows it
    assert (attained.part("a", 0.0, 6.0, 1), attained.part("b", 0.0, 6.0, 2)) == (1.0, 0.0)
    attained.forget("b")
    assert (attained.part("a", 0.0, 6.0, 1), attained.part("b", 0.0, 6.0, 1)) == (1.0, None)


def test_of_an_answer_that_was_read_slowly_only_a_late_first_token_counts() -> None:
    attained = Attainment(TARGETS)
    for number in range(2):
        attained.came("m", number, 0.0)
        attained.assigned(number)
        attained.began(number, 1.0 + 5.0 * number)
        attained.ended(number, 100, 90.0, read_slowly=True)
    assert attained.part("m", 0.0, 90.0, 1) == 0.0
    assert attained.part("m", 0.0, 90.0, 2) is None


def test_an_answer_that_is_not_streamed_counts_for_nothing() -> None:
    attained = Attainment(TARGETS)
    attained.came("m", 1, 0.0)
    attained.assigned(1)
    attained.ended(1, 100, 90.0)
    attained.began(1, 91.0)  # it is forgotten
    assert attained.part("m", 0.0, 100.0, 1) is None


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=3 * REQUESTS_KEPT),
       st.floats(0, 200))  # fmt: skip
def test_the_newest_since_a_time_count(rows: list[tuple[float, bool]], since: float) -> None:
    attained, now, came = Attainment(TARGETS), 0.0, list[tuple[float, bool]]()
    for number, (passed, served) in enumerate(rows):
        now += passed
        attained.came("m", number, now)
        attained.began(number, now + (1.0 if served else 6.0))
        came.append((now, served))
    counted = [served for at, served in came[-REQUESTS_KEPT:] if at >= since]
    wanted = sum(counted) / len(counted) if counted else None
    assert attained.part("m", since, now, 1) == wanted
