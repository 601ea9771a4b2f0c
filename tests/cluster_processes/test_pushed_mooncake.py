"""Requests that are pushed over Mooncake get the tokens, and the K/V, of one engine alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_commands import assert_keeps_the_contract, printed
from tests.cluster_processes.mooncake_scenes import Alone, variables
from tests.cluster_processes.trace_program import TRACE
from tests.conftest import Spawn

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
REQUESTS = 6
SPLITS = {"1to1", "2to1", "1to2", "2to2"}
"""Ranks of prefill and of decode."""


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


def counted(spawn: Spawn, name: str, *words: str, limit_s: float) -> dict[str, Any]:
    """What a program says that runs in a network of its own."""
    program = [sys.executable, "-m", f"tests.cluster_processes.{name}", *words]
    process = spawn(Alone(spawn).program(program))
    assert process.wait(limit_s) == 0, process.report()
    found = json.loads(process.stdout.rpartition("counted ")[2])
    assert isinstance(found, dict)
    return found


def replayed(spawn: Spawn, requests: int, trace: str, limit_s: float) -> dict[str, Any]:
    words = ("mooncake", str(requests), trace)
    return counted(spawn, "pushed_trace_program", *words, limit_s=limit_s)


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


def check_ranks(found: dict[str, Any], alike: dict[str, int]) -> None:
    """In each split all ranks have written, nothing was in doubt, and requests were alike."""
    assert set(found) == SPLITS
    for split, one in found.items():
        assert one.pop("written") > 0, f"{split}: a rank has pushed over TCP"
        assert one == {**alike, "not_taken": 0, "ended": 0, "unstaged": 0}, split


def test_engines_of_several_ranks_push_their_heads_over_mooncake(spawn: Spawn) -> None:
    check_ranks(counted(spawn, "pushed_ranks_program", limit_s=180.0), {})


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


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE}")
@pytest.mark.soak("handoff", minutes=3)
def test_200_requests_of_the_real_trace_pushed_by_ranks_over_mooncake_are_those_of_one_engine(
    spawn: Spawn,
) -> None:
    found = counted(spawn, "pushed_ranks_program", "200", f"16:{TRACE}", limit_s=500.0)
    check_ranks(found, dict.fromkeys(("pushed", "tokens", "hashes"), 200))
