"""``python -m bench figures`` and ``scheduling --choice`` say what they claim to."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import figures, scheduling, scheduling_choice
from bench.measure import Progress
from conductor.routing.engines import Role
from conductor.simulator.goodput import Highest
from conductor.simulator.trace import TracedRequest, TraceEntry, from_entries


def turns(count: int = 24) -> list[TracedRequest]:
    """Two conversations in turns, each of which repeats all before it."""
    return from_entries(
        TraceEntry(at * 1e4, 512 * size, 4, [at % 2 * 1000 + number for number in range(size)])
        for at in range(count)
        for size in (at // 2 + 1,)
    )


def test_a_cache_finds_what_fits_in_it() -> None:
    trace = turns(6)  # blocks asked for: 1, 1, 2, 2, 3, 3
    assert figures.hits(trace, 100) == 6 / 12
    assert figures.hits(trace, 3) < 6 / 12
    assert figures.hits(trace, 0) == 0


def test_the_figures_of_a_small_trace_fit_together() -> None:
    with Progress("figure", 4) as progress:
        found = {one.case: one for one in figures.others(turns(), progress)}
        nine = list(figures.figure9(turns(), progress))
    together, alone, none = (found[f"figure8/{name}"].value for name in ("global", "local", "none"))
    assert together <= alone <= none
    assert found["figure8/none"].ratio == pytest.approx(none / together)
    assert found["figure8/local"].paper == 1.43
    copies = [found[f"figure11/{top}"].value for top in figures.TOPS]
    assert copies == sorted(copies, reverse=True)
    assert 0 < copies[-1] <= copies[0] <= figures.NODES
    assert [one.ratio for one in nine][-1] == 1.0
    assert {one.case for one in nine} == {f"figure9/{name}" for name in figures.CAPACITIES}


def test_nodes_that_fetch_from_each_other_find_more_and_compute_less() -> None:
    with Progress("figure", 4) as progress:
        found = {one.case: one for one in figures.others(crowded(), progress)}
    hits, seconds = found["figure10/hits/least-loaded"], found["figure10/prefill/least-loaded"]
    assert hits.bound_value is not None
    assert seconds.bound_value is not None
    # every node computes the prefix once
    assert hits.bound_value == pytest.approx((60 - figures.NODES) / 60 * 39 / 40)
    assert hits.value > hits.bound_value
    assert hits.ratio == pytest.approx(hits.value / hits.bound_value)
    assert seconds.value == found["figure8/global"].value < seconds.bound_value
    assert found["figure10/hits/cache-local"].value == hits.value


def crowded(count: int = 60) -> list[TracedRequest]:
    """One prompt after another that begins as the others do."""
    return from_entries(
        TraceEntry(at * 2e3, 512 * 40, 4, [*range(39), 1000 + at]) for at in range(count)
    )


def test_figures_without_a_trace_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    assert figures.run(argparse.Namespace(trace=empty, requests=None, json=True)) == 2
    assert figures.run(argparse.Namespace(trace=tmp_path / "none", requests=None, json=True)) == 1


@pytest.mark.parametrize(("rises", "best", "ratio"), [(0.0, "2+2", 0.99), (6.4, "1+3", 4.95 / 6.4)])
def test_a_choice_is_compared_with_the_best_fixed_roles(
    monkeypatch: pytest.MonkeyPatch, rises: float, best: str, ratio: float
) -> None:
    """With ``rises``, one prefill engine again holds 90 % at speeds from 6 to that."""
    limits = {"3xa800": 4.0, "2xa800": 5.0, "1xa800": 3.0, "4xa800": 2.0}
    asked: list[str] = []

    def limit(roles: Mapping[Role, str], *, lends: bool) -> float:
        return 4.95 if lends else limits[roles.get(Role.PREFILL, "4xa800")]

    class Known(scheduling_choice.PlayedLoad):
        """Its limits are known."""

        def effective(self, roles: Mapping[Role, str], speed: float, *, lends: bool) -> float:
            again = roles.get(Role.PREFILL) == "1xa800" and 6.0 <= speed <= rises
            return 0.9 if speed <= limit(roles, lends=lends) or again else 0.89

        def highest(
            self, roles: Mapping[Role, str], first: float, *, lends: bool = False
        ) -> Highest:
            asked.append(roles.get(Role.PREFILL, "mixed"))
            return Highest(limit(roles, lends=lends), 0.9)

    monkeypatch.setattr(scheduling_choice, "PlayedLoad", Known)
    parser = argparse.ArgumentParser()
    scheduling.add_arguments(parser)
    given = parser.parse_args(
        ["--choice", "--loads", "long", "--fleets", "equal", "--seeds", "3", "--requests", "20"]
    )

    [found] = scheduling.choices(given)

    assert (found.case, found.bound) == ("choice/long/equal/3", best)
    assert (found.ratio, found.kept) == (pytest.approx(ratio, rel=0.011), not rises)
    assert asked == ["3xa800", "2xa800"]  # what is no better is not searched


def test_a_limit_is_that_of_the_simulation() -> None:
    load = scheduling_choice.ChoiceLoad(20.0, 0.1, 12, 1.0)
    played = scheduling_choice.PlayedLoad(turns(12), load)
    roles = {Role.MIXED: "1xa800"}
    assert played.effective(roles, 1.0, lends=False) == 1.0
    assert played.rate(2.0, 4) == pytest.approx(12 / 110 * 2.0 / 4)
