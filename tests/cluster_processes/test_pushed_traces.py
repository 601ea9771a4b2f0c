"""Two prefill engines and a decode engine on a trace: tokens and KV of one engine, either way."""

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import replay
from bench.cluster import Cluster, ClusterError, Options, request
from tests.cluster_processes.trace_program import (
    KV_BLOCKS,
    REQUESTS,
    TRACE,
    logs_told,
    trace_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", params=["store", "push"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    options = Options(
        model="tiny", handoff=request.param, prefills=2, policy="round-robin",
        kv_blocks=KV_BLOCKS, capacity_bytes=256 << 20,
    )  # fmt: skip
    with Cluster(options) as running, logs_told(running):
        yield running


def layers_of(url: str, name: str, told: object = None) -> Any:
    try:
        return request("GET", f"{url}/v1/requests/{name}/kv-hashes")["layers"]
    except ClusterError as error:
        pytest.fail(f"{error}: {told}")


def replayed(cluster: Cluster, trace: Path, block_tokens: int) -> list[dict[str, Any]]:
    """Send a trace to the Conductor and to one engine; the attempt that served each request."""
    calls = replay.load(trace, REQUESTS, block_tokens, max_output=6)
    options = Namespace(speed=0.0, concurrency=3)
    shared = asyncio.run(replay.replay_calls("shared", cluster.conductor_url, calls, options))
    alone = asyncio.run(replay.replay_calls("alone", cluster.mono_url, calls, options))
    assert replay.first_difference(shared, alone) == ""
    attempts = []
    for ours, one in zip(shared, alone, strict=True):
        decision = request("GET", f"{cluster.conductor_url}/v1/decisions/{ours.request_id}")
        attempt = decision["attempts"][-1]
        expected = layers_of(cluster.mono_url, one.request_id)
        assert expected
        names = [attempt["prefill"], attempt["decode"]]
        if attempt["way"] == "store" and len(one.tokens) == 1:
            names.pop()  # prefill has said all of it
        for name in names:
            found = layers_of(cluster.engine_urls[name], ours.request_id, attempt)
            assert found == expected, attempt
        attempts.append(attempt)
    return attempts


def check(cluster: Cluster, attempts: list[dict[str, Any]]) -> None:
    """Every request went the way it should, and both prefill engines used what the other stored."""
    assert len(attempts) == REQUESTS
    assert {one["way"] for one in attempts} == {cluster.options.handoff}
    for name in ("P1", "P2"):
        prefilled = [one["prefilled"] for one in attempts if one["prefill"] == name]
        assert len(prefilled) > REQUESTS // 3
        assert sum(one["restored_tokens"] for one in prefilled) > 0
    if cluster.options.handoff == "push":
        failed = [one["received"] for one in attempts if one["received"]["state"] != "success"]
        assert failed == []
        assert sum(one["received"]["bytes"] for one in attempts) > 0


def test_a_made_up_trace_gives_the_tokens_and_kv_of_one_engine(
    cluster: Cluster, tmp_path: Path
) -> None:
    check(cluster, replayed(cluster, trace_of(tmp_path), block_tokens=32))


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE}")
def test_the_real_trace_gives_the_tokens_and_kv_of_one_engine(cluster: Cluster) -> None:
    check(cluster, replayed(cluster, TRACE, block_tokens=16))
