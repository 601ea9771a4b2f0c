"""Does decode continue what prefill stored, with the same tokens, and how much time does it save?

Replays a conversation through Conductor → prefill engine → decode engine, which share KV through
the node, and the same prompts through one engine on its own that computes everything itself.
"""

import argparse
import asyncio
import json
import signal
import statistics
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.cluster import Cluster, ClusterError, Options, request
from bench.completion import Completion, complete
from bench.conversation import DOCUMENT, Turn, turns, turns_from
from bench.measure import Progress

WARM_SHARE = 0.5
"""A turn is warm when at least this share of its prompt was restored."""


@dataclass(frozen=True, slots=True)
class Row:
    """One turn as both ways served it.

    Attributes:
        restored_tokens: prompt tokens that the prefill engine restored instead of computing.
        restored_bytes: bytes that both engines restored.
        restore_s: time both spent on it.
        compute_s: what the engines computed until the first token.
        conductor_s: the Conductor's own share.
        with_store: through Conductor, P and D.
        alone: on the engine without a store.
        hashes_equal: K and V of every layer were the same at P and at D.
        way: how the KV went from P to D: ``push`` or ``store``; a push that failed is ``push:`` and
            why.
        pushed_bytes: of KV that D got by push.
    """

    turn: Turn
    prompt: list[int]
    restored_tokens: int
    restored_bytes: int
    restore_s: float
    compute_s: float
    with_store: Completion
    alone: Completion
    hashes_equal: bool
    way: str = "store"
    pushed_bytes: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    @property
    def tokens_equal(self) -> bool:
        """Whether both gave the same tokens."""
        return bool(self.alone.tokens) and self.with_store.tokens == self.alone.tokens

    @property
    def warm(self) -> bool:
        """Whether most of the prompt was restored."""
        return self.restored_tokens >= WARM_SHARE * self.prompt_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--quick", action="store_true", help="only two people with two turns each")
    parser.add_argument("--serve", action="store_true", help="leave it running and print the URLs")
    parser.add_argument("--prompts", type=Path, metavar="FILE",
                        help="your own questions, one `name: question` per line")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=32, help="output tokens per turn")
    parser.add_argument("--temperature", type=float, default=0.0,
                        help="sampling temperature; 0 = greedy")  # fmt: skip
    parser.add_argument("--handoff", choices=("store", "push"), default="store",
                        help="how K/V goes from P to D: through the node, or straight from P while"
                        " it computes")  # fmt: skip
    parser.add_argument("--model", default="demo", help="reference model: demo or tiny")


def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit status is 1 when anything was not equal."""
    try:
        chosen = turns(2, 2) if options.quick else turns(3, 4)
        if options.prompts:
            chosen = turns_from(options.prompts)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"--prompts: {error}\n")
        return 2
    sys.stderr.write(
        "Starting a node (kvstore-server), a Conductor, a prefill engine P1, a decode engine D1\n"
        "and, to compare with, an engine `mono` that has no store. The engines' own prefix caches\n"
        "are off, so every reused token comes through the store.\n"
    )
    try:
        with Cluster(Options(model=options.model, handoff=options.handoff)) as cluster:
            rows = asyncio.run(converse(cluster, chosen, options.max_tokens, options.temperature))
            figures = show(rows, as_json=options.json)
            if options.json:
                sys.stdout.write(json.dumps(figures) + "\n")
            if options.serve:
                _serve(cluster)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    equal = all(row.tokens_equal and row.hashes_equal for row in rows)
    return 0 if equal and all(row.way == options.handoff for row in rows) else 1


async def converse(
    cluster: Cluster, chosen: list[Turn], max_tokens: int, temperature: float
) -> list[Row]:
    """Ask all questions in turn, each through the store and of the engine without one.

    A turn's prompt is the document, what was said so far (outputs included) and the question. Each
    turn is seeded with its number; ``temperature`` 0 is greedy.
    """
    rows: list[Row] = []
    async with aiohttp.ClientSession() as session:
        document = tokenize(cluster, DOCUMENT)
        history: dict[str, list[int]] = {}
        with Progress("turn", len(chosen)) as progress:
            # One short request each, so that no first turn pays for what every process does once.
            for url in (cluster.conductor_url, cluster.mono_url):
                await complete(session, url, [65] * 70, max_tokens=2, temperature=0.0)
            for number, turn in enumerate(chosen):
                progress.step(f"{turn.user} asks: {turn.question}")
                said = history.get(turn.user, document)
                question = tokenize(cluster, f"\n{turn.user}: {turn.question}\nHarbour: ")
                prompt = said + question
                parameters = {"max_tokens": max_tokens, "temperature": temperature, "seed": number}
                row = await ask(cluster, session, turn, prompt, parameters)
                history[turn.user] = prompt + row.with_store.tokens
                rows.append(row)
    return rows


async def ask(
    cluster: Cluster,
    session: aiohttp.ClientSession,
    turn: Turn,
    prompt: list[int],
    parameters: dict[str, Any],
) -> Row:
    """Ask one question, of the engine without a store and then through the store."""
    alone = await complete(session, cluster.mono_url, prompt, **parameters)
    shared = await complete(session, cluster.conductor_url, prompt, **parameters)
    decision = request("GET", f"{cluster.conductor_url}/v1/decisions/{shared.request_id}")
    attempt = decision["attempts"][-1]
    prefilled = attempt.get("prefilled") or {}
    decoded = shared.timings
    hashes = [
        request("GET", f"{cluster.engine_urls[name]}/v1/requests/{shared.request_id}/kv-hashes")
        for name in (attempt["prefill"], attempt["decode"])
    ]
    return Row(
        turn,
        prompt,
        prefilled.get("restored_tokens") or 0,
        (prefilled.get("restored_bytes") or 0) + decoded["restored_bytes"],
        (prefilled.get("restore_s") or 0.0) + decoded["restore_s"],
        prefilled.get("compute_s") or 0.0,
        shared,
        alone,
        hashes[0]["layers"] == hashes[1]["layers"] and bool(hashes[0]["layers"]),
        *_way(attempt),
    )


def _way(attempt: dict[str, Any]) -> tuple[str, int]:
    """How the KV went, and how many bytes were pushed, as the decode engine says."""
    way: str = attempt["way"]
    if way != "push":
        return way, 0
    received = attempt["received"] or {"state": "failed", "code": "no report", "bytes": 0}
    failed = f": {received['code']}" if received["state"] != "success" else ""
    return way + failed, received["bytes"]


def tokenize(cluster: Cluster, text: str) -> list[int]:
    """The tokens of a text."""
    answer = request("POST", f"{cluster.conductor_url}/tokenize", {"prompt": text})
    tokens: list[int] = answer["tokens"]
    return tokens


def summary(rows: list[Row]) -> dict[str, Any]:
    """The figures of a run as one flat object."""
    warm = [row for row in rows if row.warm]
    restore_s = sum(row.restore_s for row in rows)
    return {
        "requests": len(rows),
        "tokens_equal": sum(row.tokens_equal for row in rows),
        "hashes_equal": sum(row.hashes_equal for row in rows),
        "prompt_tokens": sum(row.prompt_tokens for row in rows),
        "restored_tokens": sum(row.restored_tokens for row in rows),
        "warm_requests": len(warm),
        "ttft_cold_ms": _median_ms([row.alone.ttft_s for row in warm]),
        "ttft_warm_ms": _median_ms([row.with_store.ttft_s for row in warm]),
        "ways": dict(Counter(row.way for row in rows)),
        "pushed_bytes": sum(row.pushed_bytes for row in rows),
        "overhead_ms": _median_ms([row.with_store.ttft_s - row.compute_s for row in warm]),
        "restore_gbps": sum(row.restored_bytes for row in rows) / restore_s / 1e9
        if restore_s
        else 0.0,
    }


def _median_ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 1) if seconds else 0.0


def show(
    rows: list[Row], *, as_json: bool, title: str = "one conversation, with the store and without"
) -> dict[str, Any]:
    """Print what happened; returns the figures."""
    console = Console(stderr=as_json)
    table = Table(title=title)
    for column in (
        "turn",
        "prompt tokens",
        "restored",
        "TTFT with",
        "TTFT without",
        "MB",
        "GB/s",
        "P to D",
    ):
        table.add_column(column, justify="left" if column in {"turn", "P to D"} else "right")
    for row in rows:
        speed = row.restored_bytes / row.restore_s / 1e9 if row.restore_s else 0.0
        table.add_row(
            f"{row.turn.user} {row.turn.number}",
            str(row.prompt_tokens),
            str(row.restored_tokens),
            f"{row.with_store.ttft_s * 1e3:,.0f} ms",
            f"{row.alone.ttft_s * 1e3:,.0f} ms",
            f"{row.restored_bytes / 1e6:,.1f}",
            f"{speed:.2f}",
            row.way,
        )
    console.print(table)
    figures = summary(rows)
    console.print(
        f"warm turns: TTFT {figures['ttft_warm_ms']:,.0f} ms instead of"
        f" {figures['ttft_cold_ms']:,.0f} ms; Conductor, store and restore take"
        f" {figures['overhead_ms']:,.0f} ms of it"
    )
    console.print(f"tokens equal to mono: {figures['tokens_equal']}/{len(rows)}")
    console.print(f"K/V equal at P and D, every layer: {figures['hashes_equal']}/{len(rows)}")
    ways = ", ".join(f"{way} {count}" for way, count in figures["ways"].items())
    pushed = figures["pushed_bytes"] / 1e6
    console.print(f"K/V went from P to D by: {ways}" + (f" ({pushed:,.1f} MB)" if pushed else ""))
    return figures


def _serve(cluster: Cluster) -> None:
    """Leave everything running until Ctrl-C or SIGTERM."""
    url = cluster.conductor_url
    engines = "\n".join(f"  engine {name:8} {at}" for name, at in cluster.engine_urls.items())
    sys.stdout.write(
        f"\nStill running; Ctrl-C ends it.\n"
        f"  Conductor       {url}  (/v1/engines, /v1/decisions, /metrics)\n"
        f"  node            {cluster.node_url}  (/docs, /metrics)\n"
        f"                  kvstore stats --url {cluster.node_admin}\n"
        f"  node's socket   {cluster.store_url}\n{engines}\n"
        f"  logs            {cluster.directory}\n\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f'  -d \'{{"messages": [{{"role": "user", "content": "Where does the harbour begin?"}}],'
        f' "max_tokens": 16, "stream": true}}\'\n'
    )
    sys.stdout.flush()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        while not ended.wait(1.0):
            dead = [s.name for s in cluster.services.values() if s.process.poll() is not None]
            if dead:
                sys.stderr.write(f"ended by themselves: {', '.join(dead)}\n")
                return
    except KeyboardInterrupt:
        return
