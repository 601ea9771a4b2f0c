"""Requests of a trace, pushed from a prefill to a decode engine, compared with one engine alone.

``python -m tests.cluster_processes.pushed_trace_program TRANSPORT REQUESTS TOKENS:TRACE`` says as
JSON what was counted; so many tokens stand for a block of the trace. It is a program of its own
because Mooncake needs a network of its own.
"""

import asyncio
import json
import re
import sys
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

from bench import replay
from bench.cluster import Cluster, Options, request
from tests.cluster_processes.trace_program import logs_told


def counted(url: str, name: str) -> float:
    """A metric of an engine."""
    with urllib.request.urlopen(url + "/metrics", timeout=10.0) as answer:
        found = re.search(rf"^reference_engine_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def hashes(url: str, name: str) -> Any:
    """K and V of a prompt at an engine, by layer."""
    return request("GET", f"{url}/v1/requests/{name}/kv-hashes")["layers"]


def ask(cluster: Cluster, calls: list[replay.Call]) -> dict[str, int]:
    """Send requests to the Conductor and to the engine alone; how many were alike in what."""
    found = {"requests": len(calls), "tokens": 0, "hashes": 0, "pushed": 0}
    options = Namespace(speed=0.0, concurrency=3)
    pushed = asyncio.run(replay.replay_calls("pushed", cluster.conductor_url, calls, options))
    alone = asyncio.run(replay.replay_calls("alone", cluster.mono_url, calls, options))
    for one, other in zip(pushed, alone, strict=True):
        decision = request("GET", f"{cluster.conductor_url}/v1/decisions/{one.request_id}")
        received = decision["attempts"][-1].get("received") or {}
        found["pushed"] += received.get("state") == "success"
        found["tokens"] += one.tokens == other.tokens
        here, there = (hashes(cluster.engine_urls[name], one.request_id) for name in ("P1", "D1"))
        found["hashes"] += bool(here) and here == there == hashes(
            cluster.mono_url, other.request_id
        )
    return found


def run(transport: str, requests: int, trace: str) -> dict[str, Any]:
    """What was alike in how many requests, and what went over the transport."""
    options = Options(
        model="tiny", handoff="push", handoff_transport=transport, kv_blocks=1024,
        capacity_bytes=256 << 20,
    )  # fmt: skip
    block_tokens, path = trace.split(":", 1)
    calls = replay.load(Path(path), requests, int(block_tokens), max_output=6)
    with Cluster(options) as cluster, logs_told(cluster):
        found = ask(cluster, calls)
        written = counted(cluster.engine_urls["P1"], "written_push_jobs")
        ended = counted(cluster.engine_urls["D1"], "ended_push_engines")
    return {**found, "written_jobs": written, "ended_engines": ended}


if __name__ == "__main__":
    transport, requests, trace = sys.argv[1:]
    sys.stdout.write(f"counted {json.dumps(run(transport, int(requests), trace))}\n")
