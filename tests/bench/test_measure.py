"""bench/measure.py and the dispatch of ``python -m bench``."""

import argparse
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import __main__ as dispatch
from bench import measure
from bench.measure import Interleaved, Memcpy, Progress, Report, Result, Spread

FIELDS = ["case", "value", "unit", "bound", "bound_value", "ratio"]


def once(seconds: float) -> Spread:
    return Spread(seconds, seconds, seconds, 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# Measuring


def test_case_and_bound_alternate_and_take_turns_in_going_first():
    calls: list[str] = []

    def case() -> float:
        calls.append("case")
        return 2.0

    def bound() -> float:
        calls.append("bound")
        return 1.0

    measured = measure.interleave(case, bound, pairs=3, min_seconds=0.0)

    warm_up = ["case", "bound"]
    assert calls == [*warm_up, "case", "bound", "bound", "case", "case", "bound"]
    assert measured == Interleaved(Spread(2.0, 2.0, 2.0, 3), Spread(1.0, 1.0, 1.0, 3))


def test_the_warm_up_is_not_measured_and_the_median_stands_between_min_and_max():
    seconds = iter([1_000.0, 5.0, 1.0, 3.0])

    measured = measure.interleave(lambda: next(seconds), lambda: 1.0, pairs=3, min_seconds=0.0)

    assert measured.case == Spread(median=3.0, min=1.0, max=5.0, calls=3)


def test_measuring_goes_on_until_min_seconds_have_passed(monkeypatch):
    clock = iter(range(1_000))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    measured = measure.interleave(lambda: 1.0, lambda: 1.0, pairs=2, min_seconds=50.0)

    assert 40 < measured.case.calls <= 60


def test_measuring_ends_even_when_the_clock_stands_still(monkeypatch):
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(measure, "PAIRS_MAX", 100)

    measured = measure.interleave(lambda: 1.0, lambda: 1.0, pairs=2, min_seconds=1.0)

    assert measured.bound.calls == 100


def test_timed_returns_the_seconds_that_the_work_took(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))

    assert measure.timed(lambda: "not this")() == 2.5


@given(
    values=st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    percent=st.integers(0, 100),
)
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_exceed(values, percent):
    found = measure.percentile(values, percent)

    def enough(value: float) -> bool:
        return 100 * sum(other <= value for other in values) >= percent * len(values)

    assert found in values
    assert enough(found)
    assert not any(enough(value) for value in values if value < found)


def test_well_known_percentiles():
    values = list(range(1, 101))

    assert [measure.percentile(values, p) for p in (0, 50, 99, 99.5, 100)] == [1, 50, 99, 100, 100]


def test_the_largest_cache_counts_whatever_its_unit(tmp_path: Path):
    for index, size in enumerate(["48K", "2048K", "260M"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")

    assert measure.last_level_cache_bytes(tmp_path) == 260 << 20


def test_a_kernel_that_tells_no_cache_size_means_the_fallback(tmp_path: Path):
    assert measure.last_level_cache_bytes(tmp_path) == 32 << 20


@pytest.mark.parametrize(
    ("cache", "call", "expected"),
    [
        (32 << 20, 1 << 20, 128 << 20),
        (512 << 20, 1 << 20, 512 << 20),
        (1 << 20, 48 << 20, 96 << 20),
        (32 << 20, 100_000_000, 200_000_000),
    ],
)
def test_the_working_set_is_several_caches_capped_and_at_least_two_calls(
    monkeypatch, cache, call, expected
):
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: cache)

    assert measure.working_set_bytes(call) == expected


def test_memcpy_goes_round_its_whole_working_set_and_copies_it(monkeypatch):
    monkeypatch.setattr(measure, "last_level_cache_bytes", lambda: 100_000)
    copy = Memcpy(page_bytes=1_000, pages=100)
    copy._target[:] = 0
    calls = copy._source.size // copy.call_bytes

    seconds = [copy() for _ in range(calls)]

    assert (copy.call_bytes, calls) == (100_000, 4)
    assert np.array_equal(copy._source, copy._target)
    assert copy._offset == 0
    assert min(seconds) > 0


def test_prefaulted_memory_is_written_everywhere():
    memory = measure.prefaulted(1_000_003)

    assert memory.shape == (1_000_003,)
    assert memory.dtype == np.uint8
    assert not any(np.array_equal(memory[:4096], memory[n : n + 4096]) for n in (4096, 65_536))


# Results


def test_a_throughput_is_value_over_bound():
    result = measure.throughput("put/1MiB/x1", 10**9, Interleaved(once(0.5), once(0.25)), "memcpy")

    assert result == Result("put/1MiB/x1", 2.0, "GB/s", "memcpy", 4.0, 0.5)


def test_a_latency_is_bound_over_value():
    result = measure.latency("roundtrip/p50", Interleaved(once(20e-6), once(10e-6)), "socket")

    assert (result.case, result.unit, result.bound) == ("roundtrip/p50", "us", "socket")
    assert (result.value, result.bound_value, result.ratio) == pytest.approx((20.0, 10.0, 0.5))


def test_json_lines_have_exactly_the_fields_of_the_contract_and_come_at_once():
    arrived = io.BytesIO()
    with io.TextIOWrapper(arrived) as buffered:  # gives on only what is flushed
        report = Report(json=True, stream=buffered)
        report.add(Result("a", 1.23456789, "GB/s", "memcpy", 19.7, 0.062668))
        first = arrived.getvalue()
        report.add(Result("b", 3.0, "us"))
        report.close()
        lines = [json.loads(line) for line in arrived.getvalue().splitlines()]

    assert json.loads(first) == lines[0]
    assert [list(line) for line in lines] == [FIELDS, FIELDS]
    assert list(lines[0].values()) == ["a", 1.235, "GB/s", "memcpy", 19.7, 0.06267]
    assert list(lines[1].values()) == ["b", 3.0, "us", "", None, None]


def test_without_json_there_is_one_table_at_the_end():
    stream = io.StringIO()
    with Report(json=False, stream=stream) as report:
        report.add(Result("put/1MiB/x16", 15.0, "GB/s", "memcpy, one thread", 20.0, 0.75))
        report.add(Result("lookup/1", 12.0, "us"))
        assert stream.getvalue() == ""

    table = stream.getvalue()
    row = next(line for line in table.splitlines() if "put/1MiB/x16" in line)
    assert all(cell in row for cell in ("15 GB/s", "memcpy, one thread", "20", "0.75"))
    assert "lookup/1" in table


def test_no_results_are_no_table():
    stream = io.StringIO()
    Report(json=False, stream=stream).close()

    assert stream.getvalue() == ""


# Progress


def test_progress_in_a_log_is_plain_lines():
    stream = io.StringIO()
    with Progress("host", 2, stream) as progress:
        progress.step("put/1MiB/x1")
        progress.note("cold 3.1 GB/s")
        progress.step("put/1MiB/x16")

    assert stream.getvalue().splitlines() == [
        "host 1/2 put/1MiB/x1",
        "cold 3.1 GB/s",
        "host 2/2 put/1MiB/x16",
    ]


def test_progress_on_a_terminal_is_one_line_that_moves_and_goes_away(monkeypatch):
    monkeypatch.setattr(measure.shutil, "get_terminal_size", lambda: SimpleNamespace(columns=40))
    stream = Terminal()
    with Progress("host", 2, stream) as progress:
        progress.step("put")
        progress.step("a name that is much longer than the terminal is wide")

    shown = stream.getvalue().split("\r\x1b[K")
    assert "\n" not in stream.getvalue()
    assert shown[1] == "[##########..........] host 1/2 put"
    assert shown[2].startswith("[####################] host 2/2 a")
    assert max(map(len, shown)) < 40
    assert shown[-1] == ""


def test_a_note_on_a_terminal_stays_above_the_moving_line():
    stream = Terminal()
    Progress("host", 1, stream).note("cold 3.1 GB/s")

    assert stream.getvalue() == "\r\x1b[Kcold 3.1 GB/s\n"


# Machine


def test_the_machine_line_names_what_figures_depend_on():
    line = measure.machine_line()

    assert "\n" not in line
    for part in ("cores", "cache", "Linux", "Python 3.", "commit", "mover"):
        assert part in line


def test_the_cpu_model_is_read_from_the_first_core_that_has_one():
    assert measure._cpu_model("processor : 0\nmodel name\t: EPYC 7\nmodel name : other") == "EPYC 7"
    assert measure._cpu_model("") != ""


def test_a_commit_is_known_in_a_checkout_and_says_when_files_differ(tmp_path: Path):
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        subprocess.run(command, check=True, capture_output=True, timeout=30)

    assert measure.commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-q", "--no-gpg-sign", "-m", "first")
    clean = measure.commit(tmp_path)
    (tmp_path / "file").write_text("two")

    assert clean.isalnum()
    assert measure.commit(tmp_path) == f"{clean}+changes"


# Dispatch


class FakeGroup:
    """How fast is nothing?"""

    def __init__(self) -> None:
        self.ran: list[argparse.Namespace] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--pages", type=int, default=1)

    def run(self, options: argparse.Namespace) -> int:
        self.ran.append(options)
        return 3


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    """The group ``host``, replaced; any other is not there to import."""
    group = FakeGroup()
    monkeypatch.setitem(dispatch.GROUPS, "host", "bench.fake_for_this_test")
    monkeypatch.setitem(sys.modules, "bench.fake_for_this_test", group)
    monkeypatch.setattr(measure, "machine_line", lambda: "the machine")
    return group


def test_a_group_gets_its_options_and_gives_the_exit_status(group, capsys):
    assert dispatch.main(["host", "--json", "--pages", "7"]) == 3

    assert [vars(options) for options in group.ran] == [{"json": True, "pages": 7}]
    assert capsys.readouterr() == ("", "the machine\n")


def test_help_of_a_group_is_its_question(group, capsys):
    with pytest.raises(SystemExit, match="0"):
        dispatch.main(["host", "--help"])

    assert "How fast is nothing?" in capsys.readouterr().out
    assert group.ran == []


def test_an_unknown_group_is_refused_with_the_names_that_exist(group, capsys):
    with pytest.raises(SystemExit, match="2"):
        dispatch.main(["hots"])

    message = capsys.readouterr().err
    assert "hots" in message
    assert all(name in message for name in ("demo", "host", "kvpool", "replay"))


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_without_a_group_the_groups_are_listed_on_stderr(arguments, status, capsys):
    assert dispatch.main(arguments) == status

    captured = capsys.readouterr()
    assert captured.out == ""
    assert "{" + ",".join(sorted(dispatch.GROUPS)) + "}" in captured.err


def test_choosing_a_group_imports_no_other(spawn):
    process = spawn([sys.executable, "-X", "importtime", "-m", "bench", "--help"])

    assert process.wait(30) == 0
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "bench.measure" in imported
    assert imported.isdisjoint({"torch", *dispatch.GROUPS.values()})
