"""The commands of ``python -m bench`` that measure keep the contract of their output."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench import host, host_bystander, host_mooncake, host_pages, index, remote
from bench.index_feed import messages
from bench.index_fleet import Fleet

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ["case", "value", "unit", "bound", "bound_value", "ratio"]
HIGHER_IS_BETTER = {"GB/s": True, "%": True, "us": False, "ms": False, "s": False, "ranges": False}


def measured(*arguments: str) -> list[dict[str, object]]:
    """Run a group that takes time as a user does, as shortly as it can; its results."""
    return printed(*arguments, "--seconds", "0.01")


def printed(*arguments: str, timeout_s: float = 50) -> list[dict[str, object]]:
    """Run a group as a user does; its results."""
    run = subprocess.run(
        [sys.executable, "-m", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "commit" in run.stderr.splitlines()[0], "machine and commit come first, on stderr"
    return [json.loads(line) for line in run.stdout.splitlines()]


def assert_keeps_the_contract(result: dict[str, object]) -> None:
    assert list(result) == FIELDS
    value, bound_value, ratio = (float(result[name]) for name in ("value", "bound_value", "ratio"))
    assert all(math.isfinite(number) and number > 0 for number in (value, bound_value, ratio))
    better = value / bound_value if HIGHER_IS_BETTER[result["unit"]] else bound_value / value
    assert ratio == pytest.approx(better, rel=2e-3)  # both were rounded to four digits
    assert result["bound"]


def test_loads_prints_both_fixed_rules_and_the_choice():
    results = printed(
        "loads", "--turns", "1", "--model", "tiny", "--prompts", "2", "--cases", "fast"
    )  # fmt: skip
    for result in results:
        assert_keeps_the_contract(result)
    names = [result["case"] for result in results]
    assert names == ["loads/fast/faster", "loads/fast/always", "loads/fast/never"]


def children(environment_mark: str) -> list[str]:
    """Processes that inherited this environment variable."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if environment_mark.encode() in entry.read_bytes():
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


def test_host_measures_moves_and_requests_and_leaves_no_process(monkeypatch):
    mark = f"BENCH_COMMANDS_TEST={os.getpid()}"
    monkeypatch.setenv(*mark.split("="))

    cases = "^(put|view)/1MiB/x1(/busy)?$|^roundtrip|/128$"
    results = measured("host", "--pool-mib", "64", "--cases", cases)

    moves = ["put/1MiB/x1", "put/1MiB/x1/busy", "view/1MiB/x1", "view/1MiB/x1/busy"]
    assert [result["case"] for result in results] == [*moves, "roundtrip/p50", "lookup/128"]
    for result in results:
        assert_keeps_the_contract(result)
    assert not children(mark)


def test_host_measures_puts_to_free_memory():
    (result,) = measured("host", "--pool-mib", "64", "--cases", "^put/64KiB/x128/fresh$")

    assert result["case"] == "put/64KiB/x128/fresh"
    assert_keeps_the_contract(result)


def test_host_measures_what_a_bystander_notices_and_leaves_no_process(monkeypatch):
    mark = f"BENCH_BYSTANDER_TEST={os.getpid()}"
    monkeypatch.setenv(*mark.split("="))

    (result,) = measured("host", "--pool-mib", "64", "--cases", "^bystander/clear$")

    assert result["case"] == "bystander/clear"
    assert_keeps_the_contract(result)
    assert not children(mark)


def test_host_stands_beside_mooncake_with_every_shape():
    shapes = [shape.name for shape in host_pages.SHAPES]
    assert host_mooncake.names() == [
        f"peer/{verb}/{shape}" for shape in shapes for verb in ("put", "get")
    ]


def test_peers_are_measured_only_if_asked_for():
    run = subprocess.run(
        [sys.executable, "-m", "bench", "host", "--cases", "^peer/"],
        capture_output=True, text=True, timeout=50, cwd=ROOT, check=False,
    )  # fmt: skip

    assert run.returncode == 2
    assert "no case is called so: ^peer/" in run.stderr


def test_bystanders_stand_beside_all_that_a_node_does_for_others():
    cases = ("fill", "models", "clear", "reclaim")
    assert host_bystander.names() == [f"bystander/{case}" for case in cases]


def test_host_knows_every_case_that_has_a_floor():
    names = {name for shape in host_pages.SHAPES for name in host.move_cases(shape)}

    sizes = [f"{size}/{count}" for size in ("1MiB", "8MiB") for count in ("x1", "x16")]
    wanted = {f"{verb}/{size}" for verb in ("put", "get", "view") for size in sizes}
    wanted |= {f"{name}/busy" for name in wanted}
    wanted |= {f"{verb}/64KiB/{count}" for verb in ("put", "get") for count in ("x1", "x128")}
    wanted.add("put/64KiB/x128/fresh")
    assert names == wanted
    sizes_bytes = {shape.name.partition("/")[0]: shape.page_bytes for shape in host_pages.SHAPES}
    assert sizes_bytes == {"64KiB": 64 << 10, "1MiB": 1 << 20, "8MiB": 8 << 20}


def test_remote_measures_transfers_beside_a_bare_socket_and_leaves_no_process(monkeypatch):
    mark = f"BENCH_COMMANDS_TEST={os.getpid()}"
    monkeypatch.setenv(*mark.split("="))

    results = measured("remote", "--cases", "transport/tcp/1MiB")

    assert [result["case"] for result in results] == ["transport/tcp/1MiB/x16"]
    for result in results:
        assert_keeps_the_contract(result)
    assert not children(mark)


def test_remote_knows_every_case_that_has_a_floor():
    names = {name for part in remote.PARTS for name in part.names()}

    sizes = [f"{size}/x16" for size in ("1MiB", "8MiB")]
    wanted = {f"{verb}/{size}" for verb in ("transport/tcp", "get") for size in sizes}
    wanted |= {"lookup/local/2048", "lookup/remote/2048", "lookup/local/p99"}
    assert names >= wanted | {"capacity/two", "ttft/two-nodes", "directory/peers"}


def test_kvpool_measures_restores_and_extracts_of_scattered_blocks():
    results = measured("kvpool", "--layers", "1", "--cases", "block(1|16)/permuted")

    verbs = ("restore", "layers", "extract")
    expected = [f"{verb}/block{size}/permuted" for verb in verbs for size in (1, 16)]
    assert [result["case"] for result in results] == expected
    for result in results:
        assert_keeps_the_contract(result)


def test_slab_measures_restores_of_what_it_has():
    results = measured("slab", "--layers", "1", "--cases", "slab/1$")

    assert [result["case"] for result in results] == ["slab/1"]
    for result in results:
        assert_keeps_the_contract(result)


def test_keys_measures_lists_arrays_and_a_grown_prompt():
    results = measured("keys", "--tokens", "8192")

    names = ["keys/8k-64/list", "keys/8k-64/array", "keys/grown"]
    assert [result["case"] for result in results] == names
    for result in results:
        assert_keeps_the_contract(result)


def test_ssd_measures_every_case_that_has_a_floor_and_leaves_no_file(tmp_path):
    results = measured(
        "ssd", "--size-mib", "8", "--pages", "100", "--threads", "2", "--directory", str(tmp_path)
    )

    writes = ["write/1MiB/interval", "write/8MiB/interval", "write/1MiB/always"]
    names = [*writes, "read/1MiB", "read/8MiB", "recover/100", "recover/100/log"]
    assert [result["case"] for result in results] == names
    for result in results:
        assert_keeps_the_contract(result)
    assert not list(tmp_path.iterdir())


def a_trace(path: Path) -> Path:
    """Eight documents asked about in turn, each time at another end, among prompts asked once."""
    lines = []
    for at in range(96):
        document = 100 * (at % 8)
        lines += [[document + page for page in range(8)] + [10_000 + at]]
        lines += [[100_000 + 10 * at + page for page in range(8)]]
    path.write_text(
        "".join(
            json.dumps({"timestamp": 1000 * at, "hash_ids": ids}) + "\n"
            for at, ids in enumerate(lines)
        )
    )
    return path


def test_admission_compares_bytes_and_hits_with_what_admitting_all_does(tmp_path):
    results = printed(
        "admission", "--trace", str(a_trace(tmp_path / "trace.jsonl")),
        "--memory-blocks", "32", "--capacity-blocks", "256,512",
    )  # fmt: skip

    curve = {256: (10, 20, 30, 50, 75), 512: (25, 50, 75)}
    names = []
    for size, budgets in curve.items():
        names += [f"bytes/{size}", f"hits/{size}"]
        for budget in budgets:
            names += [f"curve/{size}/budget-{budget}/{what}" for what in ("bytes", "hits")]
    assert [result["case"] for result in results] == names
    value = {result["case"]: float(result["value"]) for result in results}
    every = next(float(one["bound_value"]) for one in results if one["case"] == "hits/256")
    assert every == pytest.approx(100 * 8 * (96 - 8) / (96 * 17), rel=0.15), "documents return"
    assert value["bytes/256"] < 40, "what is asked once needs not be written"
    assert value["hits/256"] > 0.9 * every
    for size, budgets in curve.items():
        bytes_of = [value[f"curve/{size}/budget-{one}/bytes"] for one in budgets]
        assert bytes_of == sorted(bytes_of), "a larger budget writes no less"
        assert all(written <= one for written, one in zip(bytes_of, budgets, strict=True))
    for result in results:
        assert list(result) == FIELDS
        better = float(result["value"]) / float(result["bound_value"])
        if result["bound"] == "asked for":
            better = 1 / better
        assert result["ratio"] == pytest.approx(better, rel=2e-3)


def test_admission_without_a_trace_says_so_and_measures_nothing(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "bench", "admission", "--trace", str(tmp_path / "none"), "--json"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
        check=False,
    )

    assert run.returncode == 0
    assert "there is no trace" in run.stderr
    assert not run.stdout


def test_index_knows_every_case_that_has_a_floor():
    messages_of = [f"{kind}/{blocks}" for kind in ("tokens", "keys") for blocks in (128, 8)]
    wanted = {"match/128k/p50", "match/128k/p99", "match/128k/tokens/p50"}
    wanted |= {f"ingest/{one}" for one in messages_of} | {"memory/keys", "memory/tokens"}
    assert set(index.ASKED) == wanted | {"rebuild/1M", "snapshot/1M", "snapshot/1M/turn"}


def test_index_measures_matching_learning_memory_and_rebuilding_and_leaves_no_process(monkeypatch):
    mark = f"BENCH_COMMANDS_TEST={os.getpid()}"
    monkeypatch.setenv(*mark.split("="))

    cases = "match|ingest/tokens/128|ingest/keys/8|memory/keys|rebuild"
    results = measured("index", "--entries", "20000", "--rounds", "1", "--cases", cases)

    names = ["match/128k/p50", "match/128k/p99", "match/128k/tokens/p50"]
    names += ["ingest/tokens/128", "ingest/keys/8", "memory/keys", "rebuild/1M"]
    assert [result["case"] for result in results] == names
    for result in results:
        assert list(result) == [*FIELDS, "asked", "cpu_us", "bound_cpu_us"]
        assert result["asked"] == index.ASKED[result["case"]]
        assert float(result["value"]) > 0
    for result in results[3:5]:
        assert result["bound"] == "decoding alone"
        better = float(result["value"]) / float(result["bound_value"])
        assert result["ratio"] == pytest.approx(better, rel=2e-3)
    assert not children(mark)


@pytest.mark.parametrize("blocks", [128, 8])
@pytest.mark.parametrize("shared", [True, False])
def test_a_fleet_announces_as_many_blocks_as_it_says_in_messages_of_the_size_asked_for(
    blocks, shared
):
    fleet = Fleet(6, 3, 9 * 700, shared)
    counts: dict[int, list[int]] = {}
    for place, payload in messages(fleet, blocks):
        _, events, _ = msgspec.msgpack.decode(payload)
        counts.setdefault(place, []).append(sum(len(one["block_hashes"]) for one in events))
        last = events[-1]["block_hashes"][-1]
    assert last, "nodes and engines have hashes"
    for worker in fleet.workers():
        *full, end = counts[worker.place]
        assert set(full) == {blocks}
        assert 0 < end <= blocks
        assert sum(full) + end == worker.pages == 700
        assert sum(prompt.pages for prompt in fleet.prompts(worker)) == 700


@pytest.mark.parametrize("group", ["handoff", "host", "index", "kvpool", "remote", "slab", "ssd"])
def test_a_pattern_that_no_case_matches_is_refused(group):
    run = subprocess.run(
        [sys.executable, "-m", "bench", group, "--json", "--cases", "no such case"],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
        check=False,
    )

    assert run.returncode == 2
    assert "no such case" in run.stderr
    assert not run.stdout


def test_handoffs_are_measured_between_two_pools_of_one_process():
    results = measured("handoff", "--cases", "push/block|send|poll|abort|reshard")

    for result in results:
        assert_keeps_the_contract(result)
    assert [result["case"] for result in results] == [
        "push/block16/contiguous", "push/block16/permuted", "send/p50", "poll/64", "abort/others",
        "reshard/2to1", "reshard/2to1/ranges", "reshard/1to2", "reshard/1to2/ranges",
    ]  # fmt: skip


def test_structure_counts_what_a_reader_reads_and_who_knows_whom():
    (counted,) = printed("structure")

    assert counted["path"].keys() >= {
        "kvstore/client/space.py", "kvstore/client/loads.py", "kvstore/node/desk.py",
        "kvstore/node/node.py", "kvstore/state/table/pages.py", "kvstore/mover/__init__.py",
    }, "a load in the background is on the path too"  # fmt: skip
    # An `__init__` that is written out for the compiler counts, one of a dataclass does not.
    assert counted["path_lines"] == sum(counted["path"].values()) <= 2_164, "less, not more"
    assert counted["path_files"] == len(counted["path"]) <= 32
    assert counted["room_pairs"] == len(counted["pairs"]) <= 67
    assert counted["order_lines"] < 1_500, "what a newcomer reads first"
    assert ["state", "node"] not in counted["pairs"], "no arrow points up"


def test_snapshot_measures_what_a_follower_gets_and_the_turns_meanwhile():
    results = {str(one["case"]): one for one in printed("snapshot", "--pages", "5000")}

    for result in results.values():
        assert_keeps_the_contract(result)
    assert {name.rpartition("/")[2] for name in results} == {
        "seconds", "longest_put_turn", "longest_question_turn", "longest_collector_turn",
        "audit_4096", "sample_4096",
    }  # fmt: skip


def test_simulate_prints_a_line_for_each_policy_with_its_own_figures():
    options = ["--load", "short", "--requests", "20", "--mixed", "2xh800"]

    results = printed("simulate", *options, "--policy", "session,lmetric", "--speed", "2")

    assert [one["case"] for one in results] == ["simulate/session/2", "simulate/lmetric/2"]
    figures = [
        "p50",
        "p90",
        "p99",
        "tbt_p99",
        "hit",
        "effective",
        "rejected",
        "lost",
        "wasted",
        "goodput",
    ]
    assert all(list(one) == [*FIELDS, *figures] for one in results)
    assert all(one["unit"] == "s" and 0 < one["p50"] <= one["p99"] for one in results)
