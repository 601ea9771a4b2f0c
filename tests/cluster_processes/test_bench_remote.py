"""Benchmarks that start several nodes, or use TLS, keep the contract of output."""

import os

import pytest

from tests.bench.test_commands import assert_keeps_the_contract, children, printed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

RESULTS = {
    "get/1MiB": ["get/1MiB/x16", "bound/get/1MiB/x16"],
    "lookup": [
        "lookup/local/2048", "lookup/remote/2048", "lookup/remote/2048/first", "lookup/local/p99",
    ],
    "ttft": ["ttft/two-nodes"],
}  # fmt: skip


def results(monkeypatch: pytest.MonkeyPatch, cases: str) -> list[dict[str, object]]:
    """The results of some cases, measured as shortly as can be; no process is left."""
    mark = f"BENCH_REMOTE_TEST={os.getpid()}"
    monkeypatch.setenv(*mark.split("="))
    found = printed("remote", "--cases", cases, "--seconds", "0.01", timeout_s=380)
    for result in found:
        assert_keeps_the_contract(result)
    assert not children(mark)
    return found


@pytest.mark.parametrize("cases", RESULTS)
def test_several_nodes_are_measured_beside_a_bound_and_no_process_is_left(
    monkeypatch: pytest.MonkeyPatch, cases: str
) -> None:
    assert [result["case"] for result in results(monkeypatch, cases)] == RESULTS[cases]


def test_two_nodes_find_nearly_what_one_with_both_memories_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (result,) = results(monkeypatch, "capacity/two")

    assert result["case"] == "capacity/two"
    assert float(str(result["ratio"])) >= 0.9  # counts of pages: a busy machine changes little


def test_a_push_over_tls_is_measured_beside_the_same_without() -> None:
    (result,) = printed("handoff", "--cases", "push/tls", "--seconds", "0.01", timeout_s=200)
    assert_keeps_the_contract(result)
    assert result["case"] == "push/tls/block16/contiguous"
    assert result["bound"] == "the same push without TLS"
