"""Prefill at one node, decode at another: the tokens of one engine that computes everything."""

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.cluster import Cluster, NodeAt, Options, node_stats
from bench.completion import Completion, complete
from tests.cluster_processes.mooncake_scenes import Alone
from tests.cluster_processes.store_scenes import start_server
from tests.cluster_processes.trace_program import REQUESTS, TRACE, replay_both, trace_of
from tests.conftest import Spawn, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
CLEAN_WAIT_S = 20.0
PROMPT = [40 + index % 50 for index in range(500)]


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


def test_requests_of_a_trace_get_the_tokens_of_one_engine_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    replay_both(cluster, trace_of(tmp_path), REQUESTS, block_tokens=64)
    first, last = (node_stats(node)["counts"] for node in cluster.nodes)
    assert last["peer_fetched_pages"] >= REQUESTS, "every prompt has pages of its own"
    assert last["located_by_engines"] >= REQUESTS, "the prefill engine names its node"
    assert not first.get("corrupt_pages")
    assert not last.get("corrupt_pages")


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no trace at {TRACE}")
def test_requests_of_the_real_trace_get_the_tokens_of_one_engine_alone(cluster: Cluster) -> None:
    assert replay_both(cluster, TRACE, REQUESTS, block_tokens=16) == REQUESTS


@pytest.mark.parametrize(
    ("transport", "directory"), [("tcp", "redis"), ("mooncake", "peers"), ("mooncake", "redis")]
)
def test_requests_get_the_same_tokens_over_each_transport_and_directory(
    spawn: Spawn, tmp_path: Path, transport: str, directory: str
) -> None:
    for kind in ("etcd", "redis") if directory == "redis" else ():
        with start_server(kind, tmp_path / kind):
            pass  # skipped where there is none
    traces = [f"64:{trace_of(tmp_path)}", *([f"16:{TRACE}"] if TRACE.exists() else [])]
    program = [
        sys.executable, "-m", "tests.cluster_processes.trace_program", transport, directory,
        str(REQUESTS), *traces,
    ]  # fmt: skip
    process = spawn(Alone(spawn).program(program) if transport == "mooncake" else program)
    assert process.wait(300.0) == 0, process.report()
    found = json.loads(process.stdout.rpartition("counted ")[2])

    assert found["equal"] == [REQUESTS] * len(traces)
    assert found["corrupt_pages"] == [0, 0]
    assert found["fetched_pages"] >= REQUESTS, "every prompt has pages of its own"
    assert found["announced"] >= (REQUESTS if directory == "redis" else 0)
    if transport == "mooncake":
        over = found["transports"]["mooncake"]
        assert over["read_pages"] >= found["fetched_pages"] // 2, "the others came over tcp"
        assert over["wrong_pages"] == 0
    if not TRACE.exists():
        pytest.skip(f"a made-up trace gave equal tokens; there is no real one at {TRACE}")


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
