"""The simulator: one trace, fleet and policy is one simulation, and nothing is lost in it."""

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conductor.routing.journal import BeganInput, JournalHead, Stepped
from conductor.routing.policy import POLICIES
from conductor.service import main
from conductor.simulator.goodput import highest_speed, highest_up_to
from conductor.simulator.journal import read_journal, replay, write_journal
from conductor.simulator.report import Objectives, percentile, rejections, summary_of
from conductor.simulator.samples import Capacity, Series, plot, series_of, swing_of
from conductor.simulator.scenario import Failure, Record
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest, read_trace
from conductor.simulator.workloads import WORKLOADS, made_up
from kvstore.protocol.errors import InvalidArgument
from tests.conductor.simulator.simulated import LinearSteps, fleet, simulated, trace_of

ONE_BLOCK_S = 0.01 + 512 * 1e-4 + 512 * 512 / 2 * 1e-9
"""Of :class:`LinearSteps`, to compute one block."""


def outcomes(simulation: Simulation) -> list[tuple[object, ...]]:
    return [
        (
            one.request.number, one.outcome, one.code, one.prefill, one.decode, one.first_s,
            one.ended, one.hit_tokens, one.tbt_s,
        )
        for one in simulation.records
    ]  # fmt: skip


# One request


def test_a_pair_serves_a_request_in_the_time_of_its_parts():
    trace = trace_of((0.0, BLOCK_TOKENS + 8, 3, [1, 2]))

    done = simulated(trace, fleet(prefill=1, decode=1), handoff_part=1.0)

    (record,) = done.records
    tokens = BLOCK_TOKENS + 8
    prefill = LinearSteps().prefill_seconds(tokens, 0)
    handoff = tokens * 1e5 / (1e9)
    step = LinearSteps().decode_step_seconds(1, tokens)
    assert (record.outcome, record.prefill, record.decode) == ("ok", "p0", "d0")
    assert record.ttft_s == pytest.approx(prefill + handoff + step, rel=1e-3)
    assert record.ended == pytest.approx(prefill + handoff + 3 * step, rel=1e-3)


def test_a_mixed_engine_serves_alone_and_its_first_token_comes_with_the_prompt():
    done = simulated(trace_of((0.0, 100, 3, [])), fleet(mixed=1))

    (record,) = done.records
    assert (record.prefill, record.decode) == ("m0", "m0")
    assert record.ttft_s == pytest.approx(LinearSteps().prefill_seconds(100, 0))


def test_the_second_of_two_equal_prompts_is_not_computed_again():
    trace = trace_of((0.0, 1_100, 2, [1, 2, 3]), (9.0, 1_100, 2, [1, 2, 3]))

    done = simulated(trace, fleet(prefill=2, decode=1), policy="longest-prefix")

    first, second = done.records
    assert first.prefill == second.prefill
    assert (first.hit_tokens, second.hit_tokens) == (0, 2 * BLOCK_TOKENS)
    assert second.predicted_hit == 2 * BLOCK_TOKENS


def test_a_node_fetches_from_a_peer_if_that_is_faster_than_to_compute():
    trace = trace_of((0.0, 1_100, 1, [1, 2]), (9.0, 1_100, 1, [1, 2]))
    slow = [replace(one, network_bytes_per_s=1e3) for one in fleet(prefill=2, decode=1)]

    fetched = simulated(trace, fleet(prefill=2, decode=1), policy="round-robin")
    alone = simulated(trace, fleet(prefill=2, decode=1), policy="round-robin", peers=False)
    computed = simulated(trace, slow, policy="round-robin")

    assert [done.records[1].hit_tokens for done in (fetched, alone, computed)] == [1_024, 0, 0]
    assert {one.prefill for one in fetched.records} == {"p0", "p1"}


def test_who_counts_on_a_fetch_waits_until_it_has_ended():
    blocks = [1, 2, 3, 4, 5]
    trace = trace_of(*[(at, 2_100, 1, blocks) for at in (0.0, 9.0, 9.001, 9.002)])

    done = simulated(trace, fleet(prefill=2, decode=1), policy="round-robin")

    _, fetches, _, follows = done.records
    assert fetches.prefill == follows.prefill == "p1"
    assert (fetches.hit_tokens, follows.hit_tokens) == (4 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)


def test_a_mixed_engine_gets_its_next_prompt_as_soon_as_it_has_told_of_the_last():
    trace = trace_of((0.0, 15_000, 200, []), (0.0, 15_000, 200, []))

    done = simulated(trace, fleet(mixed=1, room_tokens=40_000), policy="earliest-first-token")

    first, second = done.records  # estimated at 2.6 s each, and computed in 1.6 s
    assert first.first_s is not None
    assert second.assigned == first.first_s


def test_a_prompt_that_fits_nowhere_is_refused():
    trace = trace_of((0.0, 30_000, 1, []), (1.0, 10, 1, []))

    done = simulated(trace, fleet(prefill=1, decode=1))

    assert [one.outcome for one in done.records] == ["too_long", "ok"]


def test_who_waits_too_long_is_rejected():
    trace = trace_of(*[(0.0, 5_000, 50, [])] * 6)

    done = simulated(trace, fleet(mixed=1, places=1), wait_s=1.0, waiting_max=4)

    codes = rejections(done.records)
    assert codes.keys() == {"queue_full", "queue_timeout"}
    assert sum(codes.values()) == len([one for one in done.records if one.outcome == "rejected"])


# Failures


def test_requests_of_an_engine_that_dies_go_to_another_unless_they_have_tokens():
    trace = trace_of((0.0, 2_000, 400, []), (0.0, 2_000, 400, []), (5.0, 2_000, 2, []))
    failures = [Failure(engine="m0", at_s=0.1), Failure(engine="m1", at_s=2.0)]

    done = simulated(trace, fleet(mixed=3), failures=failures, policy="least-loaded")

    assert [one.outcome for one in done.records] == ["ok", "broken", "ok"]
    assert [one.tries for one in done.records] == [2, 1, 1]
    assert done.records[0].prefill == "m2"


@pytest.mark.parametrize("dies", ["p0", "d0"])
def test_a_handoff_stops_when_one_of_its_engines_dies(dies: str):
    trace = trace_of((0.0, 1_000, 2, []))
    slow = [replace(one, network_bytes_per_s=1e6) for one in fleet(prefill=2, decode=2)]

    failures = [Failure(engine=dies, at_s=3.0)]
    done = simulated(trace, slow, failures=failures, handoff_part=0.1)

    (record,) = done.records
    assert (record.outcome, record.tries) == ("ok", 2)
    assert dies not in (record.prefill, record.decode)
    assert record.first_s == pytest.approx(13.0, abs=0.5)  # 10 MB once more


def test_an_engine_that_comes_back_serves_again_without_its_cache():
    trace = trace_of((0.0, 600, 1, [1]), (5.0, 600, 1, [1]))

    done = simulated(trace, fleet(mixed=1), failures=[Failure(engine="m0", at_s=2.0, back_s=4.0)])

    assert [one.outcome for one in done.records] == ["ok", "ok"]
    assert done.records[1].hit_tokens == 0


def test_a_request_is_rejected_when_no_engine_is_left():
    trace = trace_of((0.0, 600, 1, [1]), (1.0, 600, 1, [1]))

    done = simulated(trace, fleet(mixed=1), failures=[Failure(engine="m0", at_s=0.5)])

    ends = [(one.outcome, one.code) for one in done.records]
    assert ends == [("ok", ""), ("rejected", "no_engine")]


def test_an_unknown_engine_cannot_fail():
    with pytest.raises(InvalidArgument, match="failures"):
        simulated(trace_of((0.0, 1, 1, [])), fleet(mixed=1), failures=[Failure(engine="x", at_s=0)])


def test_prefill_engines_alone_serve_nobody():
    with pytest.raises(InvalidArgument, match="engines"):
        simulated(trace_of((0.0, 1, 1, [])), fleet(prefill=1))


# Everything at once


@st.composite
def traces(draw: st.DrawFn) -> list[TracedRequest]:
    rows = []
    for _ in range(draw(st.integers(1, 14))):
        at = draw(st.floats(0, 4, allow_nan=False))
        root, length = draw(st.integers(0, 2)), draw(st.integers(0, 6))
        blocks = [root * 100 + depth for depth in range(length)]
        tokens = max(1, length * BLOCK_TOKENS + draw(st.integers(-200, 0)))
        rows.append((at, tokens, draw(st.integers(1, 60)), blocks))
    return trace_of(*rows)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, object]:
    return {
        "policy": draw(st.sampled_from(sorted(POLICIES))),
        "speed": draw(st.sampled_from([0.5, 1.0, 7.0])),
        "wait_s": draw(st.sampled_from([0.3, 2.0, float("inf")])),
        "waiting_max": draw(st.sampled_from([2, 100])),
        "host_bytes": draw(st.sampled_from([0.0, 3e8, 1e10])),
        "disk_bytes": draw(st.sampled_from([0.0, 3e8, 1e10])),
        "bring_bytes": draw(st.sampled_from([0.0, 1e8, 1e10])),
        "peers": draw(st.booleans()),
        "chunk_tokens": draw(st.sampled_from([256, 2048])),
        "sample_s": draw(st.sampled_from([0.0, 0.5])),
        "journal": True,
    }


shapes = st.sampled_from(
    [{"mixed": 2}, {"prefill": 2, "decode": 2}, {"prefill": 1, "decode": 1, "mixed": 1}]
)


@given(traces(), shapes, fields(), st.integers(1, 3), st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_request_ends_once_whatever_happens(
    trace: list[TracedRequest],
    shape: dict[str, int],
    scenario: dict[str, object],
    places: int,
    data: st.DataObject,
):
    engines = fleet(**shape, places=places, room_tokens=4_000)
    failures = [
        Failure(engine=data.draw(st.sampled_from(engines)).info.id, at_s=at, back_s=at + back)
        for at, back in data.draw(
            st.lists(
                st.tuples(st.floats(0, 3), st.sampled_from([0.2, 2.0, float("inf")])), max_size=3
            )
        )
    ]

    done = simulated(trace, engines, failures=failures, **scenario)

    for one in done.records:
        assert one.outcome in {"ok", "rejected", "too_long", "broken"}
        assert 0 <= one.hit_tokens < one.request.tokens
        assert one.tries <= 3
        if one.outcome == "ok":
            assert one.arrived < one.first_s <= one.ended
    assert replay(done.head, done.journal) == []
    again = simulated(trace, engines, failures=failures, **scenario)
    assert outcomes(again) == outcomes(done)
    assert again.samples == done.samples
    assert again.journal == done.journal


@pytest.mark.parametrize("load", sorted(WORKLOADS))
def test_a_made_up_load_is_the_same_each_time_and_is_served(load: str):
    trace = made_up(load, 60, seed=3)
    assert trace == made_up(load, 60, seed=3) != made_up(load, 60, seed=4)
    assert len(trace) == 60
    assert [one.at_s for one in trace] == sorted(one.at_s for one in trace)
    assert all(len(one.blocks) == one.tokens // BLOCK_TOKENS for one in trace)

    done = simulated(trace, fleet(prefill=2, decode=2, room_tokens=200_000))

    assert {one.outcome for one in done.records} == {"ok"}


# Journals


def test_the_dispatcher_hears_no_more_of_first_tokens_than_a_live_one():
    """A stream tells at its end, not at its begin, what its engine had of the prompt."""
    done = simulated(made_up("sessions", 40), fleet(mixed=2), journal=True)
    began = [line for line in done.journal if isinstance(line, BeganInput)]

    assert any(one.hit_tokens for one in done.records)
    assert len(began) == sum(one.outcome == "ok" for one in done.records)
    assert all(line.hit_tokens is None for line in began)


def test_a_journal_in_a_file_is_the_same_journal(tmp_path: Path):
    done = simulated(made_up("sessions", 40), fleet(mixed=2), journal=True)
    path = tmp_path / "journal.jsonl"

    write_journal(path, done.head, done.journal)

    assert read_journal(path) == (done.head, done.journal)
    assert main(["simulate", "--replay", str(path)]) == 0


def test_a_replay_finds_the_first_decision_that_differs():
    done = simulated(made_up("hot", 40), fleet(mixed=3), journal=True, policy="longest-prefix")
    other = msgspec.structs.replace(done.head, policy="round-robin")

    (difference,) = replay(other, done.journal)

    assert difference.before != difference.now
    steps = [one for one in done.journal if isinstance(one, Stepped)]
    assert any(step.effects == difference.before for step in steps)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"type":"head"}', b"\xff"], ids=["empty", "object", "head", "bytes"]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, text: bytes):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(text)

    with pytest.raises(InvalidArgument, match="journal"):
        read_journal(path)


def test_a_journal_of_an_unknown_policy_is_refused(tmp_path: Path):
    path = tmp_path / "journal.jsonl"
    write_journal(path, JournalHead("guess", [], 1, None, 1), [])

    with pytest.raises(InvalidArgument, match="guess"):
        read_journal(path)


# Reports


def test_a_request_is_effective_within_both_objectives():
    request = TracedRequest(1, 0.0, 10, 2, (), "")
    good = Record(request, arrived=1.0, outcome="ok", first_s=3.0, ended=4.0, tbt_s=0.1)
    objectives = Objectives(ttft_s=2.0, tbt_s=0.1)

    assert objectives.met(good)
    assert not objectives.met(replace(good, first_s=3.1))
    assert not objectives.met(replace(good, tbt_s=0.11))
    assert not objectives.met(replace(good, outcome="broken"))


def test_a_summary_counts_who_was_not_served():
    trace = trace_of((0.0, 30_000, 1, []), (1.0, 100, 1, []), (2.0, 100, 1, []))
    done = simulated(trace, fleet(mixed=1))

    summary = summary_of(done, Objectives())

    assert summary.requests == 3
    assert (summary.rejected, summary.effective) == (1 / 3, 2 / 3)
    assert summary.goodput == pytest.approx(1.0)  # two in two seconds, one engine
    assert summary.long_effective == 0.0


def test_percentiles_are_values_that_occurred():
    values = [1.0, 2.0, 3.0, 4.0]

    assert [percentile(values, one) for one in (0, 50, 51, 100)] == [1.0, 2.0, 3.0, 4.0]
    assert percentile([], 50) == 0.0


def test_load_over_time_is_between_nothing_and_everything():
    trace = made_up("sessions", 60)
    engines = fleet(prefill=1, decode=1, room_tokens=200_000)
    done = simulated(trace, engines, sample_s=5.0)
    capacities = {one.info.id: Capacity(one.info.role, 4, 200_000) for one in engines}

    series = series_of(done.samples, capacities)

    assert len(series.at_s) == len(series.prefill) == len(series.kv) == len(done.samples) - 1
    assert max(series.prefill) > 0
    assert all(
        0 <= one <= 1 for column in (series.prefill, series.decode, series.kv) for one in column
    )
    image = plot("load", series.at_s, {"prefill": series.prefill, "decode": series.decode})
    assert image.count("<polyline") == 2


@pytest.mark.parametrize("limit", [0.03, 1.0, 2.7, 300.0])
def test_the_highest_speed_is_found_within_two_percent(limit: float):
    asked: list[float] = []

    def effective(speed: float) -> float:
        asked.append(speed)
        return 1.0 if speed <= limit else 0.5

    found = highest_speed(effective)

    assert limit / 1.02 <= found.speed <= limit
    assert len(asked) < 25


def test_the_last_of_several_falls_is_found_from_above():
    def effective(speed: float) -> float:
        return 0.95 if speed <= 2.0 or 4.0 <= speed <= 5.0 else 0.5

    assert highest_speed(effective, 1.5).speed <= 2.0
    found = highest_up_to(effective, 8.0)
    assert 5.0 / 1.02 <= found.speed <= 5.0
    assert found.effective == 0.95
    assert highest_up_to(effective, 3.9).speed == pytest.approx(2.0, rel=0.02)
    assert highest_up_to(effective, 3.9, 2.1).speed == 0.0
    assert highest_up_to(effective, 4.5).speed == 4.5


def test_no_speed_is_slow_enough_if_all_fail():
    assert highest_speed(lambda _: 0.0).speed == 0.0


# Traces and options


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 2000, "input_length": 600, "output_length": 0, "hash_ids": [5, 6]}\n\n'
        '{"timestamp": 1000, "input_length": 1, "output_length": 7, "hash_ids": [1]}\n'
    )

    first, second = read_trace(path)

    assert (first.number, first.at_s, first.tokens, first.output, first.blocks) == (1, 0, 1, 7, ())
    assert (second.at_s, second.output, second.blocks) == (1.0, 1, (5,))
    assert len(read_trace(path, 1)) == 1


def test_a_session_begins_where_prompts_part():
    rows = [(float(n), 2_048, 1, [0, 1 + n // 3, 1_000 + n]) for n in range(30)]

    sessions = [one.session for one in trace_of(*rows)]

    groups = [len(list(group)) for _, group in itertools.groupby(sessions)]
    assert groups == [1] * 30 or groups == [3] * 10


def test_a_line_that_is_no_request_is_named(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 3, "output_length": 1}\n{"timestamp": 2}\n')

    with pytest.raises(InvalidArgument, match="line 2"):
        read_trace(path)


BASE = ["simulate", "--load", "short", "--requests", "20", "--policy", "session"]


def test_the_command_prints_a_line_for_each_policy_and_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "out"
    files = ["--series", str(folder), "--journal", str(folder), "--fail", "m1@3:5"]

    assert main([*BASE, "--mixed", "2xh800", "--speed", "1,2", "--json", *files]) == 0

    lines = [msgspec.json.decode(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["case"] for one in lines] == ["simulate/session/1", "simulate/session/2"]
    assert lines[0]["effective"] + lines[0]["rejected"] == 1.0
    assert sorted(path.name for path in folder.iterdir()) == [
        f"session-{speed}.{kind}" for speed in (1, 2) for kind in ("json", "jsonl", "svg")
    ]


def test_the_command_searches_goodput(capsys: pytest.CaptureFixture[str]):
    assert main([*BASE, "--prefill", "1xl40s,1xh800@1.3", "--decode", "1xh800:4", "--goodput"]) == 0

    assert capsys.readouterr().out.startswith("goodput/session ")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--mixed", "2xabacus"], "mixed"),
        (["--mixed", "h800"], "mixed"),
        (["--mixed", "1xcpu"], "mixed"),
        (["--mixed", "1xh800@0"], "mixed"),
        ([], "engines"),
        (["--mixed", "2000xh800"], "engines"),
        (["--decode", "1xh800"], "engines"),
        (["--mixed", "1xh800", "--speed", "0"], "speed"),
        (["--mixed", "1xh800", "--speed", "fast"], "speed"),
        (["--mixed", "1xh800", "--policy", "guess"], "policy"),
        (["--mixed", "1xh800", "--fail", "m0"], "fail"),
        (["--mixed", "1xh800", "--requests", "0"], "requests"),
        (["--mixed", "1xh800", "--chunk-tokens", "0"], "chunk_tokens"),
        (["--mixed", "1xh800", "--mixed-running", "0"], "mixed_running"),
        (["--mixed", "1xh800", "--wait-s", "nan"], "wait_s"),
        (["--mixed", "1xh800", "--skew", "1"], "skew"),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
):
    assert main([*BASE, *options]) == 2

    assert named in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--trace", "/nowhere/x.jsonl", "--mixed", "1xh800"]) == 1
    assert main(["simulate", "--replay", "/nowhere/y.jsonl"]) == 1
    assert main(["simulate", "--mixed", "1xh800"]) == 2
    said = capsys.readouterr().err
    assert "simulate: /nowhere/x.jsonl: No such file or directory" in said
    assert "simulate: /nowhere/y.jsonl: No such file or directory" in said
    assert "Traceback" not in said


def test_the_swing_of_a_load_is_its_standard_deviation():
    assert swing_of([0.0, 1.0, 0.0, 1.0]) == (0.5, 0.5)
    whole = Series([1.0, 2.0, 3.0], [4, 5, 6], [0.1] * 3, [0.2, 0.3, 0.4], [0.5] * 3)
    assert whole.until(2.0) == Series([1.0, 2.0], [4, 5], [0.1] * 2, [0.2, 0.3], [0.5] * 2)
    assert swing_of([]) == (0.0, 0.0)
