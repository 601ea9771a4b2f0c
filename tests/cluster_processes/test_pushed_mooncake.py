"""Requests that are pushed over Mooncake get the tokens, and the K/V, of one engine alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_processes.mooncake_scenes import Alone, variables
from tests.conftest import Spawn
from tests.test_bench_commands import assert_keeps_the_contract, printed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
REQUESTS = 6
TRACE = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"


def trace_of(folder: Path) -> Path:
    """Prompts of 64 to 450 tokens, in the form of the published traces."""
    entries = [
        {
            "timestamp": 0, "input_length": 512 * (1 + number) - 70 * number, "output_length": 9,
            "hash_ids": list(range(100 * number, 100 * number + 1 + number)),
        }
        for number in range(REQUESTS)
    ]  # fmt: skip
    path = folder / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


def replayed(spawn: Spawn, requests: int, trace: str, limit_s: float) -> dict[str, Any]:
    program = [
        sys.executable, "-m", "tests.cluster_processes.pushed_trace_program", "mooncake",
        str(requests), trace,
    ]  # fmt: skip
    process = spawn(Alone(spawn).program(program))
    assert process.wait(limit_s) == 0, process.report()
    found = json.loads(process.stdout.rpartition("counted ")[2])
    assert isinstance(found, dict)
    return found


def check(found: dict[str, Any], requests: int) -> None:
    """All were alike and pushed, and nothing was in doubt."""
    alike = {name: found[name] for name in ("requests", "tokens", "hashes", "pushed")}
    assert alike == dict.fromkeys(alike, requests), found
    assert found["written_jobs"] >= requests, "they went over TCP"
    assert found["ended_engines"] == 0


def test_requests_pushed_over_mooncake_have_the_tokens_and_kv_of_one_engine(
    spawn: Spawn, tmp_path: Path
) -> None:
    check(replayed(spawn, REQUESTS, f"64:{trace_of(tmp_path)}", 120.0), REQUESTS)


def test_engines_of_several_ranks_push_their_heads_over_mooncake(spawn: Spawn) -> None:
    program = [sys.executable, "-m", "tests.cluster_processes.pushed_ranks_program"]
    process = spawn(Alone(spawn).program(program))
    assert process.wait(180.0) == 0, process.report()
    found = json.loads(process.stdout.rpartition("counted ")[2])
    assert found.pop("not_taken") == found.pop("ended") == 0
    assert set(found) == {"1to1", "2to1", "1to2", "2to2"}
    assert all(found.values()), "some ranks have pushed over TCP"


def test_pushes_over_mooncake_are_measured_beside_its_bare_engine() -> None:
    variables()  # skipped where it cannot be had
    (result,) = printed(
        "handoff", "--cases", "mooncake/.*contiguous", "--seconds", "0.01", timeout_s=200
    )
    assert_keeps_the_contract(result)
    assert result["case"] == "push/mooncake/block16/contiguous"


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE}")
@pytest.mark.soak("handoff", minutes=5)
def test_200_requests_of_the_real_trace_pushed_over_mooncake_are_those_of_one_engine(
    spawn: Spawn,
) -> None:
    check(replayed(spawn, 200, f"16:{TRACE}", 800.0), 200)
