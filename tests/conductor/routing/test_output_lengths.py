"""Goal: what is learned of answers tells their length, in bounded memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.routing import output_lengths
from conductor.routing.output_lengths import USUAL_TOKENS, OutputLengths


def learned(*answers: tuple[str, str, int | None, int]) -> OutputLengths:
    lengths = OutputLengths()
    for tenant, session, limit, tokens in answers:
        lengths.learn(tenant, session, limit, lengths.predict(tenant, session, limit), tokens)
    return lengths


def test_nothing_is_known_at_first_but_the_limit() -> None:
    lengths = OutputLengths()

    assert lengths.predict("", "", None) == USUAL_TOKENS
    assert lengths.predict("t", "s", 20) == 20
    assert lengths.predict("t", "s", 1) == 1


def test_all_answers_are_learned_from() -> None:
    lengths = learned(*[("", "", None, 1_000)] * 100)

    assert lengths.predict("new", "new", None) == pytest.approx(1_000, rel=0.05)


@pytest.mark.parametrize("which", [0, 1])
def test_tenants_and_sessions_are_told_apart(which: int) -> None:
    def who(name: str) -> tuple[str, str]:
        return (name, "") if which == 0 else ("", name)

    lengths = learned(*[(*who("brief"), None, 10), (*who("long"), None, 2_000)] * 30)

    assert lengths.predict(*who("brief"), None) < 300
    assert lengths.predict(*who("long"), None) > 1_500


def test_limits_of_one_size_are_told_apart_from_others() -> None:
    lengths = learned(*[("", "", 1_000, 90), ("", "", 5_000, 1_500)] * 50)

    assert lengths.predict("", "", 900) < 200
    assert lengths.predict("", "", 4_500) > 1_300


def test_what_changes_is_learned_again() -> None:
    lengths = learned(*[("t", "", None, 100)] * 1_000, *[("t", "", None, 900)] * 1_000)

    assert lengths.predict("t", "", None) == pytest.approx(900, rel=0.1)


def test_errors_are_those_of_predictions_before_they_were_learned_from() -> None:
    lengths = learned(*[("", "", None, 100)] * 300)
    assert lengths.gauges()["output_tokens_error"]["0.5",] < 10
    lengths.learn("", "", None, 100.0, 5_100)
    gauges = lengths.gauges()
    assert gauges["output_tokens_error"]["0.5",] < 10
    assert 0.5 < gauges["output_tokens_bias"][()] < 1
    assert OutputLengths().gauges() == {"output_tokens_error": {}, "output_tokens_bias": {}}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_lengths, "TENANTS_MAX", 4)
    monkeypatch.setattr(output_lengths, "SESSIONS_MAX", 4)
    lengths = learned(*[(f"t{n}", f"s{n}", n + 1, 10_000) for n in range(50)])
    lengths.check()
    assert lengths.predict("t0", "s0", None) == lengths.predict("", "", None)
    assert lengths.predict("t49", "s49", None) > lengths.predict("", "", None)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "a", "b"]), st.sampled_from(["", "x", "y"]),
            st.none() | st.integers(1, 1 << 40), st.integers(-1, 1 << 40),
        ),
        max_size=30,
    ),
    st.none() | st.integers(1, 1 << 40),
)  # fmt: skip
def test_a_prediction_is_never_above_the_limit_nor_below_one(
    answers: list[tuple[str, str, int | None, int]], limit: int | None
) -> None:
    lengths = learned(*answers)

    assert 1 <= lengths.predict("a", "x", limit) <= (limit or output_lengths.TOKENS_MAX)
    lengths.check()
