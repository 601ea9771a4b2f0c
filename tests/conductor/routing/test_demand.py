"""Goal: the forecast of who decodes is that of a model that looks at every request."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from conductor.routing.demand import HORIZON_S, STEP_S, Crowd, DecodeDemand


def test_who_comes_and_goes_is_counted_when_it_is_there() -> None:
    demand = DecodeDemand()
    demand.pass_time(0.0)
    demand.decodes(1, 100, 5.0)
    demand.comes(2, 200, starts_at=10.0, stays_s=10.0)

    assert demand.now == demand.at(0.0, 0.0) == Crowd(1, 100)
    assert demand.at(0.0, 4.0) == Crowd(1, 100)
    assert demand.at(0.0, 8.0) == Crowd(0, 0)
    assert demand.at(0.0, 12.0) == Crowd(1, 200)
    assert demand.at(0.0, 25.0) == Crowd(0, 0)


def test_who_is_late_counts_less_and_less() -> None:
    demand = DecodeDemand()
    demand.pass_time(0.0)
    demand.decodes(1, 100, 5.0)
    demand.pass_time(20.0)

    assert demand.at(20.0, 20.0) == Crowd(1, 100)
    later = demand.at(20.0, 20.0 + demand.typical_s)
    assert later.size == pytest.approx(0.37, abs=0.01)


def test_who_should_decode_but_does_not_is_due() -> None:
    demand = DecodeDemand()
    demand.pass_time(0.0)
    demand.comes(1, 100, starts_at=2.0, stays_s=5.0)
    assert demand.due.size == 0
    demand.pass_time(3.0)

    assert (demand.due, demand.now) == (Crowd(1, 100), Crowd())
    assert demand.at(3.0, 3.0) == Crowd(1, 100)
    demand.decodes(1, 100, 5.0)
    assert (demand.due, demand.now) == (Crowd(), Crowd(1, 100))


def test_who_is_noticed_late_ends_no_later() -> None:
    demand = DecodeDemand()
    demand.pass_time(10.0)
    demand.decodes(1, 100, 5.0, passed_s=4.0)
    demand.decodes(2, 100, 5.0, passed_s=60.0)

    assert demand.now == demand.at(10.0, 10.0) == Crowd(2, 200)
    assert demand.at(10.0, 12.0) == Crowd()
    demand.check()


class ModelOfDemand(RuleBasedStateMachine):
    """The demand beside a list of stays."""

    def __init__(self) -> None:
        super().__init__()
        self.demand = DecodeDemand()
        self.now = 0.0
        self.demand.pass_time(0.0)
        self.number = 0
        self.stays: dict[int, tuple[float, float, bool]] = {}  # start, end, whether it decodes

    @rule(starts=st.integers(1, 40), stays=st.integers(1, 1_000))
    def comes(self, starts: int, stays: int) -> None:
        self.number += 1
        self.demand.comes(self.number, self.number, self.now + starts, stays)
        start = self.now + starts
        self.stays[self.number] = (start, start + min(stays, HORIZON_S), False)

    @rule(stays=st.integers(1, 1_000), which=st.integers(0, 100))
    def decodes(self, stays: int, which: int) -> None:
        number = which % (self.number + 1) + 1
        self.number = max(self.number, number)
        self.demand.decodes(number, number, stays)
        self.stays[number] = (self.now, self.now + min(stays, HORIZON_S), True)

    @rule(which=st.integers(1, 100))
    def left(self, which: int) -> None:
        self.demand.left(which)
        self.stays.pop(which, None)

    @rule(seconds=st.sampled_from([0, 1, 5, 90, 2_000]))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.demand.pass_time(self.now)

    @invariant()
    def agrees(self) -> None:
        self.demand.check()
        assert len(self.demand) == len(self.stays)
        for ahead in (0.0, 1.0, 7.0, 30.0):
            at = self.now + ahead
            punctual = late = 0.0
            for start, end, decodes in self.stays.values():
                if end <= self.now or (not decodes and start <= self.now):
                    late += 1
                elif (decodes or start <= at) and at < end:
                    punctual += 1
            seen = self.demand.at(self.now, at).size
            assert punctual - 1e-9 <= seen <= punctual + late + 1e-9
            if not late:
                assert seen == pytest.approx(punctual)
            assert ahead or seen == pytest.approx(punctual + late)


TestModelOfDemand = ModelOfDemand.TestCase
TestModelOfDemand.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
assert STEP_S == 0.5, "the model counts in whole seconds"
