"""``python -m bench scheduling`` compares policies by the figures of their simulations."""

import argparse
from pathlib import Path

import pytest

from bench import scheduling
from bench.scheduling import FLEETS, OURS, add_arguments, promises, run, shapes
from conductor.routing.policy import POLICIES
from kvstore.protocol.errors import InvalidArgument


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_arguments(parser)
    return parser.parse_args(given)


def test_ours_is_compared_with_the_best_other_policy_in_each_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduling, "OTHERS", ("session", "cache-global"))
    given = options(
        "--loads", "sessions", "--fleets", "mixed", "--requests", "12", "--seeds", "3,4"
    )

    found = list(shapes(given))

    assert [one.case for one in found] == [
        f"shape/sessions/mixed/{wrong}/{part}/{figure}"
        for wrong in ("exact", "fixed", "noise")
        for part in ("0.5", "1")
        for figure in ("ttft", "effective")
    ]
    for one in found:
        assert one.ratio is not None
        assert one.bound in POLICIES
        assert one.bound != OURS
        assert one.bound_value is not None
        lower = one.case.endswith("ttft")
        better = one.bound_value / one.value if lower else one.value / one.bound_value
        assert one.ratio == pytest.approx(better)
        assert one.kept == (one.ratio >= 0.97)


def test_the_promises_of_a_trace_are_five(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        f'{{"timestamp": {900 * n}, "input_length": 9000, "output_length": 4, "hash_ids": [{n}]}}'
        for n in range(30)
    ]
    trace.write_text("\n".join(lines))
    small = ("--prefill", "1xa800", "--decode", "1xa800")

    found = list(promises(options("--trace", str(trace), *small)))

    names = [one.case.removeprefix("promise/") for one in found]
    assert names == ["ttft", "p99", "effective", "longest", "load"]
    assert [one.kept for one in found] == [one.ratio >= one.floor for one in found]


def test_what_cannot_be_compared_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidArgument, match="loads"):
        list(shapes(options("--loads", "none")))
    (tmp_path / "empty").write_text("")

    assert run(options("--trace", str(tmp_path / "empty"))) == 2
    assert run(options("--trace", str(tmp_path / "missing"))) == 1
    assert run(options("--seeds", "one")) == 2
    assert run(options("--fleets", "paper")) == 2
    assert run(options("--estimates", "none")) == 2
    assert "fleets" in capsys.readouterr().err
    assert "unequal" in FLEETS
