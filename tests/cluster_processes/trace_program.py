"""Requests of traces through engines at two nodes, compared with one engine alone.

``python -m tests.cluster_processes.trace_program TRANSPORT DIRECTORY REQUESTS TOKENS:TRACE...``
says as JSON what was counted; so many tokens stand for a block of a trace. It is a program of its
own because Mooncake needs a network of its own.
"""

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import replay
from bench.cluster import Cluster, Options, node_stats

CAPACITY_BYTES = 128 << 20
KV_BLOCKS = 1024
REQUESTS = 200
TRACE = Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl"


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


def replay_both(cluster: Cluster, trace: Path, requests: int, block_tokens: int) -> int:
    """Send a trace's requests to the Conductor, then to the engine alone; how many there were."""
    calls = replay.load(trace, requests, block_tokens, max_output=6)
    options = Namespace(speed=0.0, concurrency=3)
    shared = asyncio.run(replay.replay_calls("two nodes", cluster.conductor_url, calls, options))
    alone = asyncio.run(replay.replay_calls("alone", cluster.mono_url, calls, options))
    assert replay.first_difference(shared, alone) == ""
    assert all(answer.tokens for answer in alone)
    return len(calls)


@contextmanager
def logs_told(cluster: Cluster) -> Iterator[None]:
    """Say what the processes have logged if something fails."""
    try:
        yield
    except BaseException:
        for service in cluster.services.values():
            log = service.log.read_text(errors="replace")[-2000:]
            sys.stderr.write(f"{service.name}, status {service.process.poll()}:\n{log}\n")
        raise


def run(transport: str, directory: str, requests: int, traces: list[str]) -> dict[str, Any]:
    """Requests with equal tokens of each trace, and what the nodes have counted."""
    options = Options(
        model="tiny", nodes=2, membership="local" if directory == "peers" else "etcd",
        directory=directory, transport=transport, capacity_bytes=CAPACITY_BYTES,
        kv_blocks=KV_BLOCKS,
    )  # fmt: skip
    with Cluster(options) as cluster, logs_told(cluster):
        equal = []
        for one in traces:
            block_tokens, trace = one.split(":", 1)
            equal.append(replay_both(cluster, Path(trace), requests, int(block_tokens)))
        first, last = (node_stats(node) for node in cluster.nodes)
    return {
        "equal": equal,
        "fetched_pages": last["counts"]["peer_fetched_pages"],
        "transports": last["cluster"]["transports"],
        "announced": (last["cluster"]["directory"]["shared"] or {}).get("announced", 0),
        "corrupt_pages": [one["counts"].get("corrupt_pages", 0) for one in (first, last)],
    }


if __name__ == "__main__":
    transport, directory, requests, *traces = sys.argv[1:]
    found = run(transport, directory, int(requests), traces)
    sys.stdout.write(f"counted {json.dumps(found)}\n")
