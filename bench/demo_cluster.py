"""Does decode on one node continue what prefill stored on another, with the same tokens?

Replays a conversation as ``demo`` does, but the prefill engine is at one node and the decode engine
at another: every page comes from the other node. Then each engine answers the last question on its
own, from its own node. At last etcd and Redis are killed, and the conversation goes on.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import aiohttp
from rich.console import Console

from bench import store_programs
from bench.cluster import Cluster, ClusterError, NodeAt, Options, node_stats
from bench.completion import complete
from bench.conversation import Turn, turns
from bench.demo import Row, ask, converse, show, tokenize
from kvstore.testing.server import wait_for

_MAX_TOKENS: Final = 32
_GREEDY: Final[dict[str, Any]] = {"max_tokens": _MAX_TOKENS, "temperature": 0.0}
_NOTICE_WAIT_S: Final = 30.0
_PROGRAMS: Final = {"etcd": "etcd", "redis": "redis-server"}
_LATER: Final = {
    "etcd": "The harbour office has burnt down. Where is the blue book now?",
    "redis": "And the weigh house is closed as well. Who keeps what was found?",
}
"""What is asked after each has been killed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--quick", action="store_true", help="only two people with two turns each")
    parser.add_argument("--model", default="demo", help="reference model: demo or tiny")
    parser.add_argument(
        "--membership", choices=("local", "etcd", "redis"),
        help="how the nodes find each other: a fixed list, or a real etcd or Redis; by default etcd"
        " if it can be had, else the list",
    )  # fmt: skip
    parser.add_argument(
        "--directory", choices=("peers", "redis"),
        help="how they know of each other's pages: from each other, or from a real Redis; by"
        " default Redis if it can be had",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit status is 1 when anything was not equal."""
    try:
        with _ended_by_sigterm():
            return _run(options)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; all processes have ended\n")
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace) -> int:
    console = Console(stderr=options.json)
    membership = options.membership or if_there_is("etcd", "local", console)
    directory = options.directory or if_there_is("redis", "peers", console)
    servers = sorted({membership, directory} & _PROGRAMS.keys())
    console.print(
        f"Starting {''.join(f'{name}, ' for name in servers)}two nodes (kvstore-server), a"
        " Conductor, a prefill engine P1 at node-a, a decode engine D1 at node-b and, to compare"
        " with, an engine `mono` that has no store. The engines' own prefix caches are off."
    )
    chosen = turns(2, 2) if options.quick else turns(3, 4)
    started = Options(model=options.model, nodes=2, membership=membership, directory=directory)
    with Cluster(started) as cluster:
        _introduce(cluster, console)
        rows = asyncio.run(converse(cluster, chosen, _MAX_TOKENS, 0.0))
        figures = show(rows, as_json=options.json, title="P1 at node-a, D1 at node-b")
        for node in cluster.nodes:
            figures |= _fetched(node, console)
        again = asyncio.run(_ask_again(cluster, rows[-1]))
        console.print(
            "the last question again, to each engine alone: "
            + ", ".join(f"{name} {_equal(equal)}" for name, equal in again.items())
        )
        later = [_ask_without(name, cluster, rows[-1], console) for name in list(cluster.stores)]
    figures |= {
        "membership": membership, "directory": directory,
        "again": len(again), "again_equal": sum(again.values()),
        "killed": len(later), "killed_equal": sum(row.tokens_equal for row in later),
        "killed_hashes_equal": sum(row.hashes_equal for row in later),
    }  # fmt: skip
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    equal = all(row.tokens_equal and row.hashes_equal for row in (*rows, *later))
    return 0 if equal and all(again.values()) else 1


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the program as an exception does, so that its processes are ended."""

    def end(_number: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def if_there_is(name: str, other: str, console: Console) -> str:
    """``name`` if its server is installed or can be had, else ``other``."""
    try:
        store_programs.find(_PROGRAMS[name])
    except store_programs.NoProgramError as error:
        console.print(f"without {name}: {error}")
        return other
    return name


def _introduce(cluster: Cluster, console: Console) -> None:
    """Say who has found whom, and how."""
    options = cluster.options
    found = "their list" if options.membership == "local" else options.membership
    for node in cluster.nodes:
        for name, peer in node_stats(node)["cluster"]["peers"].items():
            console.print(
                f"{node.name} found {name} in {found} at {peer['endpoint']}; they have a session,"
                f" pages go over {peer['transport']}"
            )
    ways = {"peers": "each follows the other's events", "redis": "each announces them in Redis"}
    console.print(f"which pages a node has: {ways[options.directory]}")


def _fetched(node: NodeAt, console: Console) -> dict[str, int]:
    """Say what a node has read from the other one; the same as figures."""
    counts = node_stats(node)["counts"]
    pages, size = counts.get("peer_fetched_pages", 0), counts.get("peer_fetched_bytes", 0)
    console.print(
        f"{node.name} fetched {pages:,} pages ({size / 1e6:,.1f} MB) from the other node in"
        f" {counts.get('peer_jobs', 0):,} reads; {counts.get('peer_missing_pages', 0)} did not come"
    )
    return {f"{node.name}_fetched_pages": pages, f"{node.name}_fetched_bytes": size}


async def _ask_again(cluster: Cluster, row: Row) -> dict[str, bool]:
    """Whether each engine gives the tokens of a turn when it is asked alone."""
    found: dict[str, bool] = {}
    async with aiohttp.ClientSession() as session:
        for name, url in cluster.engine_urls.items():
            answer = await complete(session, url, row.prompt, **_GREEDY)
            found[name] = bool(answer.tokens) and answer.tokens == row.alone.tokens
    return found


def _ask_without(name: str, cluster: Cluster, row: Row, console: Console) -> Row:
    """Kill etcd or Redis, and go on with the conversation that ended with this turn."""
    cluster.stores[name].kill()
    if cluster.options.membership == name:
        for node in cluster.nodes:
            if not wait_for(partial(_is_away, node), _NOTICE_WAIT_S):
                raise ClusterError(f"{node.name} does not notice that {name} is away")
    later = asyncio.run(_ask_later(cluster, row, _LATER[name]))
    console.print(
        f"{name} was killed; the next question: {later.restored_tokens:,} of"
        f" {later.prompt_tokens:,} prompt tokens restored, first token after"
        f" {later.with_store.ttft_s * 1e3:,.0f} ms (mono: {later.alone.ttft_s * 1e3:,.0f} ms),"
        f" tokens {_equal(later.tokens_equal)}, K/V at P and D {_equal(later.hashes_equal)}"
    )
    return later


def _is_away(node: NodeAt) -> bool:
    return bool(node_stats(node)["cluster"]["membership"]["state"] == "away")


async def _ask_later(cluster: Cluster, row: Row, question: str) -> Row:
    turn = Turn(row.turn.user, row.turn.number + 1, question)
    said = row.prompt + row.alone.tokens
    prompt = said + tokenize(cluster, f"\n{turn.user}: {question}\nHarbour: ")
    async with aiohttp.ClientSession() as session:
        return await ask(cluster, session, turn, prompt, _GREEDY)


def _equal(equal: bool) -> str:  # noqa: FBT001
    return "equal" if equal else "NOT EQUAL"
