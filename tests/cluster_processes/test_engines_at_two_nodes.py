"""Prefill at one node, decode at another: the tokens of one engine that computes everything."""

import asyncio
import json
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench import replay
from bench.cluster import Cluster, NodeAt, Options, node_stats
from bench.completion import Completion, complete
from tests.cluster_processes.store_scenes import start_server
from tests.conftest import wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
REQUESTS = 200
CLEAN_WAIT_S = 20.0
PROMPT = [40 + index % 50 for index in range(500)]
TRACE = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = Options(model="tiny", nodes=2, capacity_bytes=128 << 20, kv_blocks=1024)
    with Cluster(options) as running:
        yield running


def held(node: NodeAt) -> dict[str, int]:
    """What a node holds now; empty when that is nothing."""
    stats = node_stats(node)
    host, remote = stats["host"], stats["remote"]
    found = {name: host[f"{name}_bytes"] for name in ("writing", "pinned", "limbo")}
    found |= {name: stats[name] for name in ("leases", "puts", "waiting_requests")}
    found |= {name: remote[name] for name in ("jobs", "unsettled_jobs", "in_flight_bytes")}
    return {name: value for name, value in found.items() if value}


def ask(url: str, prompt: list[int], **parameters: Any) -> Completion:
    async def once() -> Completion:
        async with aiohttp.ClientSession() as session:
            return await complete(session, url, prompt, **parameters)

    return asyncio.run(once())


def trace_of(folder: Path) -> Path:
    """Requests that share beginnings, in the form of the published traces."""
    lines = []
    for number in range(REQUESTS):
        ids = [0, 1, 2 + number % 5, 100 + number % 40, 1000 + number]
        length = 512 * len(ids) - number % 500
        entry = {"timestamp": 0, "input_length": length, "output_length": 9, "hash_ids": ids}
        lines.append(json.dumps(entry))
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines))
    return path


def replay_both(cluster: Cluster, trace: Path, requests: int, block_tokens: int) -> None:
    calls = replay.load(trace, requests, block_tokens, max_output=6)
    calls = [call for call in calls if len(call.prompt) < 2000]
    options = Namespace(speed=0.0, concurrency=3)
    shared = asyncio.run(replay.replay_calls("two nodes", cluster.conductor_url, calls, options))
    alone = asyncio.run(replay.replay_calls("alone", cluster.mono_url, calls, options))
    assert replay.first_difference(shared, alone) == ""
    assert all(answer.tokens for answer in alone)


def test_requests_of_a_trace_get_the_tokens_of_one_engine_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    replay_both(cluster, trace_of(tmp_path), REQUESTS, block_tokens=64)
    first, last = (node_stats(node)["counts"] for node in cluster.nodes)
    assert last["peer_fetched_pages"] >= REQUESTS, "every prompt has pages of its own"
    assert last["located_by_engines"] >= REQUESTS, "the prefill engine names its node"
    assert not first.get("corrupt_pages")
    assert not last.get("corrupt_pages")


@pytest.mark.parametrize(
    "requests",
    [40, pytest.param(REQUESTS, marks=pytest.mark.soak("cluster", minutes=2), id="soak")],
)
def test_requests_get_the_same_tokens_over_nodes_that_meet_in_etcd_and_announce_in_redis(
    tmp_path: Path, requests: int
) -> None:
    for kind in ("etcd", "redis"):
        with start_server(kind, tmp_path / kind):
            pass  # skipped where there is none
    options = Options(
        model="tiny", nodes=2, membership="etcd", directory="redis", capacity_bytes=128 << 20,
        kv_blocks=1024,
    )  # fmt: skip
    with Cluster(options) as over_redis:
        replay_both(over_redis, trace_of(tmp_path), requests, block_tokens=64)
        _, last = (node_stats(node) for node in over_redis.nodes)
    assert last["counts"]["peer_fetched_pages"] >= requests, "every prompt has pages of its own"
    assert last["cluster"]["directory"]["shared"]["announced"] >= requests
    assert not last["counts"].get("corrupt_pages")


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE}")
def test_requests_of_the_real_trace_get_the_tokens_of_one_engine_alone(cluster: Cluster) -> None:
    replay_both(cluster, TRACE, REQUESTS, block_tokens=16)


def test_both_engines_answer_a_prompt_from_their_own_node_later(cluster: Cluster) -> None:
    parameters = {"max_tokens": 9, "temperature": 0.8, "seed": 7}
    expected = ask(cluster.mono_url, PROMPT, **parameters).tokens
    assert ask(cluster.conductor_url, PROMPT, **parameters).tokens == expected
    fetched = [node_stats(node)["counts"].get("peer_fetched_pages", 0) for node in cluster.nodes]
    for url in cluster.engine_urls.values():
        answer = ask(url, PROMPT, **parameters)
        assert answer.tokens == expected
        assert answer.timings["restored_tokens"] == len(PROMPT) // 64 * 64
    again = [node_stats(node)["counts"].get("peer_fetched_pages", 0) for node in cluster.nodes]
    assert again == fetched, "they are here and there now"


def test_nothing_is_held_at_either_node_once_the_requests_have_ended(cluster: Cluster) -> None:
    for node in cluster.nodes:
        wait_for(lambda: not held(node), CLEAN_WAIT_S)  # noqa: B023
        assert held(node) == {}


def test_the_decode_engine_goes_on_while_the_other_node_is_stopped_and_killed(
    cluster: Cluster,
) -> None:
    first = cluster.services["node-a"].process
    prompts = [[33 + number, *PROMPT] for number in range(2)]
    expected = [ask(cluster.mono_url, p, max_tokens=6, temperature=0.0).tokens for p in prompts]
    first.send_signal(signal.SIGSTOP)
    try:
        stopped = ask(cluster.conductor_url, prompts[0], max_tokens=6, temperature=0.0)
    finally:
        first.send_signal(signal.SIGCONT)
    first.kill()
    first.wait(10)
    killed = ask(cluster.conductor_url, prompts[1], max_tokens=6, temperature=0.0)
    assert [stopped.tokens, killed.tokens] == expected
    last = cluster.nodes[-1]
    wait_for(lambda: not held(last), CLEAN_WAIT_S)
    assert held(last) == {}
