"""Does a vLLM decode server continue what a vLLM prefill server stored, with the same tokens?

Replays a conversation through Conductor → vLLM P → vLLM D, which share KV through the node only,
and the same prompts through a vLLM server of its own that has no store.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from bench.cluster import ClusterError, request
from bench.completion import Completion, complete
from bench.conversation import DOCUMENT, Turn, turns
from bench.measure import Progress
from bench.vllm_cluster import HITS, MODEL, VllmCluster

_BYTES = "kvstore:loaded_bytes_total"
_SECONDS = "kvstore:load_seconds_total"
_NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)


@dataclass(frozen=True, slots=True)
class Row:
    """One turn as both ways served it.

    Attributes:
        prefill_loaded: prompt tokens that P loaded instead of computing.
        decode_loaded: prompt tokens that D did.
        loaded_bytes: that both loaded.
        load_s: from the loads' submission to their end, both together.
    """

    turn: Turn
    prompt_tokens: int
    prefill_loaded: int
    decode_loaded: int
    loaded_bytes: float
    load_s: float
    with_store: Completion
    alone: Completion

    @property
    def tokens_equal(self) -> bool:
        """Whether both gave the same tokens."""
        return bool(self.alone.tokens) and self.with_store.tokens == self.alone.tokens

    @property
    def gb_per_s(self) -> float:
        """How fast it was loaded; 0.0 when nothing was."""
        return self.loaded_bytes / self.load_s / 1e9 if self.load_s else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the demo."""
    parser.add_argument("--max-tokens", type=int, default=16, help="output tokens per turn")
    parser.add_argument("--quick", action="store_true", help="only two people with two turns each")


def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit status is 1 when tokens differ or nothing was loaded."""
    sys.stderr.write(
        "Starting a node, a Conductor and three vLLM servers: P and D share KV through the node,\n"
        "`alone` has no store. Their own prefix caches are off.\n"
    )
    try:
        with VllmCluster() as cluster:
            cluster.start_node()
            for name in ("P", "D"):
                cluster.start_server(name, cluster.transfer(), _NO_PREFIX_CACHE)
            cluster.start_server("alone", flags=_NO_PREFIX_CACHE)
            for name in ("P", "D", "alone"):
                cluster.wait_server(name)
            cluster.start_conductor({"P": "prefill", "D": "decode"})
            chosen = turns(2, 2) if options.quick else turns(3, 4)
            rows = asyncio.run(_converse(cluster, chosen, options.max_tokens))
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _show(rows, as_json=options.json)
    return 0 if all(row.tokens_equal and row.decode_loaded for row in rows) else 1


async def _converse(cluster: VllmCluster, chosen: Sequence[Turn], max_tokens: int) -> list[Row]:
    rows: list[Row] = []
    history: dict[str, list[int]] = {}
    async with aiohttp.ClientSession() as session:
        with Progress("turn", len(chosen)) as progress:
            for url in (cluster.conductor_url, cluster.urls["alone"]):
                await complete(session, url, [65] * 70, max_tokens=2, temperature=0.0, model=MODEL)
            for turn in chosen:
                progress.step(f"{turn.user} asks: {turn.question}")
                said = history.get(turn.user) or _tokenize(cluster, DOCUMENT)
                question = f"\n{turn.user}: {turn.question}\nHarbour: "
                prompt = said + _tokenize(cluster, question)
                row = await _ask(cluster, session, turn, prompt, max_tokens)
                history[turn.user] = prompt + row.with_store.tokens
                rows.append(row)
    return rows


async def _ask(
    cluster: VllmCluster, session: aiohttp.ClientSession, turn: Turn, prompt: list[int],
    max_tokens: int,
) -> Row:  # fmt: skip
    parameters: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "model": MODEL}
    alone = await complete(session, cluster.urls["alone"], prompt, **parameters)
    series = [(name, what) for name in ("P", "D") for what in (HITS, _BYTES, _SECONDS)]
    before = {key: cluster.metric(*key) for key in series}
    shared = await complete(session, cluster.conductor_url, prompt, **parameters)
    # Not from the answer's usage: of a handed-over prompt vLLM says there what P had cached.
    new = {key: cluster.metric(*key) - before[key] for key in series}
    return Row(
        turn, len(prompt), int(new["P", HITS]), int(new["D", HITS]),
        new["P", _BYTES] + new["D", _BYTES], new["P", _SECONDS] + new["D", _SECONDS],
        shared, alone,
    )  # fmt: skip


def _tokenize(cluster: VllmCluster, text: str) -> list[int]:
    answer = request("POST", f"{cluster.urls['alone']}/tokenize",
                     {"model": MODEL, "prompt": text, "add_special_tokens": False})  # fmt: skip
    tokens: list[int] = answer["tokens"]
    return tokens


def _show(rows: Sequence[Row], *, as_json: bool) -> None:
    console = Console(stderr=as_json)
    table = Table(title="one conversation with vLLM, with the store and without")
    for column in ("turn", "prompt tokens", "P loaded", "D loaded", "TTFT with", "TTFT without",
                   "MB", "GB/s"):  # fmt: skip
        table.add_column(column, justify="left" if column == "turn" else "right")
    for row in rows:
        table.add_row(
            f"{row.turn.user} {row.turn.number}", str(row.prompt_tokens), str(row.prefill_loaded),
            str(row.decode_loaded), f"{row.with_store.ttft_s * 1e3:,.0f} ms",
            f"{row.alone.ttft_s * 1e3:,.0f} ms", f"{row.loaded_bytes / 1e6:,.1f}",
            f"{row.gb_per_s:.2f}",
        )  # fmt: skip
    console.print(table)
    equal = sum(row.tokens_equal for row in rows)
    console.print(f"tokens equal to the server without a store: {equal}/{len(rows)}")
    if as_json:
        figures = {
            "requests": len(rows), "tokens_equal": equal,
            "prompt_tokens": sum(row.prompt_tokens for row in rows),
            "prefill_loaded_tokens": sum(row.prefill_loaded for row in rows),
            "decode_loaded_tokens": sum(row.decode_loaded for row in rows),
            "load_gbps": sum(row.loaded_bytes for row in rows)
            / (sum(row.load_s for row in rows) or 1.0) / 1e9,
        }  # fmt: skip
        sys.stdout.write(json.dumps(figures) + "\n")
