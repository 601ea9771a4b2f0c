"""Does decode on one node continue what prefill stored on another, with the same tokens?

Replays a conversation as ``demo`` does, but the prefill engine is at one node and the decode engine
at another: every page comes from the other node. Then each engine answers the last question on its
own, from its own node.
"""

import argparse
import asyncio
import json
import sys
from typing import Any, Final

import aiohttp
from rich.console import Console

from bench.cluster import Cluster, ClusterError, Options, node_stats
from bench.completion import complete
from bench.conversation import turns
from bench.demo import Row, converse, show

_MAX_TOKENS: Final = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--quick", action="store_true", help="two people, two turns each")
    parser.add_argument("--model", default="demo", help="of the reference engine: demo or tiny")


def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit status is 1 when anything was not equal."""
    sys.stderr.write(
        "Starting two nodes (kvstore-server) that know each other, a Conductor, a prefill engine\n"
        "P1 at node-a, a decode engine D1 at node-b and, to compare with, an engine `mono` that\n"
        "has no store. The engines' own prefix caches are off.\n"
    )
    chosen = turns(2, 2) if options.quick else turns(3, 4)
    try:
        with Cluster(Options(model=options.model, nodes=2)) as cluster:
            rows = asyncio.run(converse(cluster, chosen, _MAX_TOKENS, 0.0))
            again = asyncio.run(_ask_again(cluster, rows[-1]))
            nodes = {node.name: node_stats(node)["counts"] for node in cluster.nodes}
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    figures = show(rows, as_json=options.json, title="P1 at node-a, D1 at node-b")
    figures |= {"again": len(again), "again_equal": sum(again.values())}
    console = Console(stderr=options.json)
    for name, counts in nodes.items():
        pages, size = counts.get("peer_fetched_pages", 0), counts.get("peer_fetched_bytes", 0)
        figures[f"{name}_fetched_pages"], figures[f"{name}_fetched_bytes"] = pages, size
        console.print(
            f"{name} fetched {pages:,} pages ({size / 1e6:,.1f} MB) from the other node in"
            f" {counts.get('peer_jobs', 0):,} reads; {counts.get('peer_missing_pages', 0)} did not"
            " come"
        )
    console.print(
        "the last question again, to each engine alone: "
        + ", ".join(f"{name} {'equal' if equal else 'NOT EQUAL'}" for name, equal in again.items())
    )
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    equal = all(row.tokens_equal and row.hashes_equal for row in rows) and all(again.values())
    return 0 if equal else 1


async def _ask_again(cluster: Cluster, row: Row) -> dict[str, bool]:
    """Whether each engine gives the tokens of a turn when it is asked alone."""
    parameters: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "temperature": 0.0}
    found: dict[str, bool] = {}
    async with aiohttp.ClientSession() as session:
        for name, url in cluster.engine_urls.items():
            answer = await complete(session, url, row.prompt, **parameters)
            found[name] = bool(answer.tokens) and answer.tokens == row.alone.tokens
    return found
