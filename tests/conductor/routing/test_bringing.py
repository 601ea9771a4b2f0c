"""Goal: what is brought for waiting requests keeps to its budget, and is taken back in time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from conductor.routing import bringing
from conductor.routing.bringing import (
    HALF_S,
    TRIES,
    BringKind,
    BringLimits,
    BringPlanner,
    Cancel,
    HotPrefixes,
    Start,
    Wish,
    likely,
)
from conductor.routing.columns import Prefix

LIMITS = BringLimits(bytes_max=100, jobs_max=2)


def wish(request: int = 1, node: str = "a", source: str = "b", size: int = 10) -> Wish:
    return Wish(request, node, source, 64, size)


def test_a_wish_is_carried_out_once_and_kept_by_who_goes_there() -> None:
    planner = BringPlanner(LIMITS)
    [start] = planner.step([wish()])
    assert isinstance(start, Start)
    assert (start.wish.kind, wish(source="a").kind) == (BringKind.COPY, BringKind.LOAD)
    assert planner.step([wish()]) == []
    assert planner.went(1, "a") == []
    planner.ended(start.number)
    assert planner.in_flight_bytes == 0


@pytest.mark.parametrize("node", ["c", None])
def test_what_is_brought_for_who_goes_elsewhere_is_cancelled(node: str | None) -> None:
    planner = BringPlanner(LIMITS)
    [start] = planner.step([wish()])
    assert planner.went(1, node) == [Cancel(start.number)]
    assert planner.in_flight_bytes == 10, "until it has ended"
    planner.ended(start.number)
    assert planner.in_flight_bytes == 0


def test_another_node_gets_it_instead_but_not_one_after_the_other_for_ever() -> None:
    planner = BringPlanner(LIMITS)
    [first] = planner.step([wish(node="a")])
    cancel, second = planner.step([wish(node="c")])
    assert cancel == Cancel(first.number)
    assert isinstance(second, Start)
    assert planner.step([wish(node="a")]) == [Cancel(second.number)]
    assert TRIES == 2


def test_what_does_not_fit_lets_smaller_ones_pass() -> None:
    planner = BringPlanner(LIMITS)
    wishes = [wish(1, size=90), wish(2, source="c", size=20), wish(3, source="c", size=10)]
    assert [one.wish.request for one in planner.step(wishes) if isinstance(one, Start)] == [1, 3]
    assert planner.step([wish(4, source="c", size=1)]) == [], "the budget is used up"


class Carrying(RuleBasedStateMachine):
    """Any wishes, assignments and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = BringPlanner(LIMITS)
        self.under_way: dict[int, Wish] = {}
        self.cancelled: set[int] = set()
        self.begun: dict[int, int] = {}
        self.gone: set[int] = set()

    @rule(
        wishes=st.lists(
            st.builds(
                wish, st.integers(1, 6), st.sampled_from("abc"), st.sampled_from("abc"),
                st.integers(0, 120),
            ),
            unique_by=lambda one: one.request, max_size=4,
        )
    )  # fmt: skip
    def step(self, wishes: list[Wish]) -> None:
        for effect in self.planner.step([one for one in wishes if one.request not in self.gone]):
            if isinstance(effect, Start):
                self.under_way[effect.number] = effect.wish
                self.begun[effect.wish.request] = self.begun.get(effect.wish.request, 0) + 1
            else:
                self.cancel(effect)

    def cancel(self, effect: Cancel) -> None:
        assert effect.number in self.under_way
        assert effect.number not in self.cancelled, "once"
        self.cancelled.add(effect.number)

    @rule(request=st.integers(1, 6), node=st.sampled_from(["a", "b", None]))
    def goes(self, request: int, node: str | None) -> None:
        first = request not in self.gone  # where it went first, it may have begun already
        self.gone.add(request)
        for effect in self.planner.went(request, node):
            self.cancel(effect)
        for number, one in self.under_way.items():
            if first and one.request == request and one.node != node:
                assert number in self.cancelled, "what went elsewhere is of no use"

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 9))
    def ends(self, which: int) -> None:
        number = sorted(self.under_way)[which % len(self.under_way)]
        del self.under_way[number]
        self.cancelled.discard(number)
        self.planner.ended(number)

    @invariant()
    def holds(self) -> None:
        self.planner.check()
        total = sum(one.size_bytes for one in self.under_way.values())
        assert total == self.planner.in_flight_bytes <= LIMITS.bytes_max
        assert all(count <= TRIES for count in self.begun.values())


TestCarrying = Carrying.TestCase
TestCarrying.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_the_chosen_engine_is_the_likely_one_else_who_has_most_else_who_has_least_to_do() -> None:
    found = {"a": Prefix(usable=64), "b": Prefix(usable=128), "c": Prefix(usable=128)}
    assert likely("a", found, {"a": 1.0, "b": 0.0}) == "a"
    assert likely("gone", found, {"a": 0.0, "b": 0.5, "c": 0.25}) == "c"
    assert likely("", {}, {"a": 0.5, "b": 0.25}) == "b"
    assert likely("", found, {}) == ""


# Hot prefixes

KEYS = np.arange(1, 9, dtype=np.uint64)


def heat(rate: float, seconds: float, hot: HotPrefixes, start: float = 0.0) -> list[int]:
    """The copies that are asked for while requests come at a rate."""
    found = []
    for turn in range(int(rate * seconds)):
        _, copies = hot.came(KEYS, start + turn / rate)
        found += [copies] if copies else []
    hot.check()
    return found


def test_a_prefix_that_is_asked_for_more_often_gets_more_copies_each_once() -> None:
    hot = HotPrefixes(1.0, 4)
    assert heat(0.5, 600.0, hot) == []
    assert heat(10.0, 600.0, hot, 600.0) == [2, 3, 4]
    assert heat(10.0, 600.0, hot, 1200.0) == []


def test_the_longest_of_the_hot_prefixes_is_copied() -> None:
    hot = HotPrefixes(1.0, 2)
    for turn in range(40):
        hot.came(np.array([1, 2, 100 + turn, 200 + turn], dtype=np.uint64), turn * 0.1)
    assert hot.came(KEYS[:2], 4.1)[0] in (0, 2)
    asked = [hot.came(np.array([7, 8, n], dtype=np.uint64), 5 + n * 0.1) for n in range(200)]
    assert [one for one in asked if one[0]] == [(2, 2)], "both at once: the longer one"


@given(st.lists(st.floats(0.55, 1.9), min_size=1, max_size=12))
def test_a_rate_that_wavers_by_less_than_half_asks_for_nothing_twice(rates: list[float]) -> None:
    hot, at, asked = HotPrefixes(1.0, 2), 0.0, []
    asked += heat(4.0, 60.0, hot)
    at = 60.0
    for rate in rates:
        asked += heat(2 * rate, 20.0, hot, at)
        at += 20.0
    assert asked == [2]


def test_a_prefix_that_was_forgotten_is_copied_again_when_it_comes_back() -> None:
    hot = HotPrefixes(1.0, 2)
    assert heat(4.0, 60.0, hot) == [2]
    assert heat(4.0, 60.0, hot, 60.0 + 10 * HALF_S) == [2]


def test_memory_of_prefixes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringing, "PREFIXES_MAX", 3)
    hot = HotPrefixes(1.0, 2)
    for number in range(20):
        hot.came(np.array([number], dtype=np.uint64), 0.0)
        hot.check()
