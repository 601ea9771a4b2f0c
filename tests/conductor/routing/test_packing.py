"""Explanations that are kept: the same numbers in fewer bytes."""

import tracemalloc
from datetime import UTC, datetime

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from conductor.routing.choices import VERDICTS, Assign, Candidates
from conductor.routing.columns import Prefix
from conductor.routing.decisions import DecisionLog
from conductor.routing.engines import Health, Role
from conductor.routing.packing import PackedCandidates, SharedValues
from tests.conductor.routing.columns import engine, request, schedule


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    count = draw(st.integers(0, 9))
    largest = draw(st.sampled_from([0, 255, 256, 65_535, 65_536, (1 << 31) - 1]))
    numbers = draw(arrays.arrays(np.int32, (9, count), elements=st.integers(0, largest)))
    if count:
        numbers[2, draw(st.integers(0, count - 1))] = largest
    numbers[1] = np.maximum(numbers[1], 1)
    verdicts = draw(
        arrays.arrays(np.uint8, (count,), elements=st.integers(0, len(VERDICTS) - 1))
    )  # fmt: skip
    return Candidates(
        tuple(f"e{number}" for number in range(count)),
        tuple(draw(st.lists(st.sampled_from(Role), min_size=count, max_size=count))),
        tuple(draw(st.lists(st.sampled_from(Health), min_size=count, max_size=count))),
        numbers,
        verdicts,
    )


@given(st.lists(candidates(), max_size=4))
def test_what_was_packed_is_what_comes_out_as_often_as_it_is_asked(
    several: list[Candidates],
) -> None:
    shared = SharedValues()
    packed = [PackedCandidates(one, shared) for one in several]
    for before, after in zip(several, packed, strict=True):
        assert list(after) == list(before) == list(after)


def test_a_number_too_large_for_any_narrow_form_is_kept_as_it_is() -> None:
    numbers = np.ones((9, 3), dtype=np.int32)
    numbers[2] = [1 << 30, 5, (1 << 31) - 1]
    one = Candidates(("a", "b", "c"), (Role.MIXED,) * 3, (Health.ALIVE,) * 3, numbers,
                     np.zeros(3, np.uint8))  # fmt: skip
    assert list(PackedCandidates(one, SharedValues())) == list(one)


def test_an_engine_that_is_named_as_a_role_keeps_its_name() -> None:
    shared, numbers = SharedValues(), np.ones((9, 1), dtype=np.int32)

    def packed(name: str, role: Role) -> PackedCandidates:
        verdicts = np.zeros(1, np.uint8)
        return PackedCandidates(
            Candidates((name,), (role,), (Health.ALIVE,), numbers, verdicts), shared
        )

    for name, role in (("mixed", Role.DECODE), ("decode", Role.MIXED), ("alive", Role.PREFILL)):
        [shown] = packed(name, role)
        assert (shown.engine, shown.role, shown.health) == (name, role, Health.ALIVE)
        assert [type(one) for one in (shown.engine, shown.role)] == [str, Role]


def decided(number: int) -> Assign:
    rng = np.random.default_rng(number)
    engines = [engine(f"engine-{at}") for at in range(64)]
    matches = {
        one.id: Prefix(local=int(tokens), usable=int(tokens))
        for one, tokens in zip(engines, rng.integers(0, 20_000, 64), strict=True)
    }
    [assign] = schedule("longest-prefix", engines, [request(number)], matches)
    assert isinstance(assign, Assign)
    return assign


def test_the_log_keeps_requests_that_have_ended_in_a_third_of_the_bytes() -> None:
    at = datetime.now(UTC)
    sizes = []
    assigns = [decided(number) for number in range(50)]
    for packs in (False, True):
        tracemalloc.start()
        log = DecisionLog(1000)
        for number in range(50):
            decision = log.open(f"{number}", "/", "m", "longest-prefix", stream=False, at=at)
            # As from a decision of its own: no array is that of another one.
            decision.attempted(decided(number), 0.1)
            if packs:
                log.ended(decision)
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        for one, assign in zip(reversed(log.newest(50)), assigns, strict=True):
            assert list(one.attempts[0].candidates) == list(assign.candidates)
    assert sizes[1] < sizes[0] / 3, sizes
