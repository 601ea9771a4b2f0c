"""Does a trace hit in the store as often as it can, and are the tokens the same as without it?

The trace's blocks (512 tokens, named by ids) become blocks of ``--block-tokens`` deterministic
tokens, so that a laptop can run it; equal ids give equal tokens. The requests go through Conductor,
prefill and decode engines, then through one engine without a store, and are compared. An oracle
walks the same requests and says how many prompt tokens a cache that forgets nothing could reuse.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np

from bench.cluster import Cluster, ClusterError, Options, request
from bench.completion import Completion, complete
from bench.measure import Progress, Report, Result, percentile

TRACE_BLOCK_TOKENS: Final = 512
PAGE_TOKENS: Final = 64


class TraceLine(msgspec.Struct):
    """One request of a trace: ``timestamp`` in ms, lengths in tokens, ids of 512-token blocks."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it is replayed.

    Attributes:
        at_s: after the first.
        prompt: token ids.
        parameters: sampling; every second request is seeded, the others are greedy.
    """

    at_s: float
    prompt: list[int]
    parameters: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the replay."""
    parser.add_argument("--trace", type=Path, required=True,
                        help="trace file; without it, nothing is run")  # fmt: skip
    parser.add_argument("--requests", type=int, default=200,
                        help="number of requests, from the start of the trace; default:"
                        " 200")  # fmt: skip
    parser.add_argument(
        "--block-tokens",
        type=int,
        default=64,
        help="scale each 512-token block of the trace to this many tokens",
    )
    parser.add_argument("--max-output", type=int, default=8,
                        help="maximum output tokens per request")  # fmt: skip
    parser.add_argument("--speed", type=float, default=0.0,
                        help="speed-up of arrivals; 0 = no pauses")  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=4, help="maximum requests in flight")
    parser.add_argument("--model", default="tiny", help="reference model: tiny or demo")
    parser.add_argument("--capacity-bytes", type=int, default=2 << 30, help="size of the store")
    parser.add_argument("--policy", default="longest-prefix", help="the Conductor's routing policy")
    parser.add_argument("--prefills", type=int, default=1, help="number of prefill engines")


def run(options: argparse.Namespace) -> int:
    """Replay and print; the exit status is 1 when a token was not equal."""
    if not options.trace.exists():
        sys.stderr.write(f"skipped: there is no trace at {options.trace}\n")
        return 0
    calls = load(options.trace, options.requests, options.block_tokens, options.max_output)
    longest = max(len(call.prompt) + options.max_output for call in calls)
    settings = Options(
        model=options.model,
        capacity_bytes=options.capacity_bytes,
        prefills=options.prefills,
        kv_blocks=(options.concurrency + 1) * (-(-longest // 16) + 4),
        policy=options.policy,
        kv_hashes=False,
    )
    try:
        with Cluster(settings) as cluster:
            shared = asyncio.run(
                replay_calls("through the store", cluster.conductor_url, calls, options)
            )
            restored = restored_tokens(cluster, shared)
            alone = asyncio.run(replay_calls("alone", cluster.mono_url, calls, options))
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    equal = sum(bool(b.tokens) and a.tokens == b.tokens for a, b in zip(shared, alone, strict=True))
    with Report(json=options.json) as report:
        _report(report, calls, shared, alone, restored, equal)
    return 0 if equal == len(calls) else 1


def load(trace: Path, requests: int, block_tokens: int, max_output: int) -> list[Call]:
    """The first ``requests`` of a trace, scaled by ``block_tokens`` / 512."""
    decoder = msgspec.json.Decoder(TraceLine)
    calls: list[Call] = []
    with trace.open("rb") as lines:
        for number, line in enumerate(lines):
            if number == requests:
                break
            entry = decoder.decode(line)
            length = max(1, entry.input_length * block_tokens // TRACE_BLOCK_TOKENS)
            tokens = np.concatenate([_block(i, block_tokens) for i in entry.hash_ids])[:length]
            parameters = {
                "max_tokens": max(1, min(max_output, entry.output_length)),
                "temperature": 0.8 if number % 2 else 0.0,
                "seed": number,
            }
            calls.append(Call(entry.timestamp / 1e3, tokens.tolist(), parameters))
    return calls


def oracle(calls: list[Call]) -> int:
    """Prompt tokens that a cache which forgets nothing could reuse, in whole pages.

    At least one token of each prompt is computed; outputs are not counted.
    """
    known: set[bytes] = set()
    reusable = 0
    for call in calls:
        raw = np.array(call.prompt, dtype=np.uint16).tobytes()
        pages = [raw[: end * 2] for end in range(PAGE_TOKENS, len(call.prompt) + 1, PAGE_TOKENS)]
        run = next((at for at, page in enumerate(pages) if page not in known), len(pages))
        reusable += min(run, (len(call.prompt) - 1) // PAGE_TOKENS) * PAGE_TOKENS
        known.update(pages)
    return reusable


def _block(number: int, tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens that stand for a block id: printable bytes, the same in every run."""
    return np.random.default_rng(number).integers(32, 127, tokens)


async def replay_calls(
    label: str, url: str, calls: list[Call], options: argparse.Namespace
) -> list[Completion]:
    """Send all calls, at their times if asked, never more than ``concurrency`` at once."""
    slots = asyncio.Semaphore(options.concurrency)
    start = time.monotonic()
    results: list[Completion] = [Completion() for _ in calls]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        with Progress(label, len(calls)) as progress:

            async def send(index: int, call: Call) -> None:
                if options.speed:
                    due = start + call.at_s / options.speed
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                async with slots:
                    progress.step(f"{len(call.prompt)} tokens")
                    results[index] = await complete(session, url, call.prompt, **call.parameters)

            async with asyncio.TaskGroup() as tasks:
                for index, call in enumerate(calls):
                    tasks.create_task(send(index, call))
    return results


def restored_tokens(cluster: Cluster, results: list[Completion]) -> int:
    """Prompt tokens that prefill engines restored, as the Conductor's decisions say."""
    total = 0
    for result in results:
        decision = request("GET", f"{cluster.conductor_url}/v1/decisions/{result.request_id}")
        prefilled = decision["attempts"][-1].get("prefilled") or {}
        total += (prefilled.get("restored_tokens") or 0) + (prefilled.get("cached_tokens") or 0)
    return total


def _report(
    report: Report,
    calls: list[Call],
    shared: list[Completion],
    alone: list[Completion],
    restored: int,
    equal: int,
) -> None:
    count, prompt = len(calls), sum(len(call.prompt) for call in calls)
    reusable = oracle(calls)
    share = restored / reusable if reusable else 1.0
    report.add(Result("replay/hit-tokens", restored, "tokens", "oracle", reusable, share))
    report.add(
        Result(
            "replay/hit-rate",
            100 * restored / prompt,
            "%",
            "oracle",
            100 * reusable / prompt,
            share,
        )
    )
    for percent in (50, 90, 99):
        ours = percentile([result.ttft_s for result in shared], percent) * 1e3
        theirs = percentile([result.ttft_s for result in alone], percent) * 1e3
        case = f"replay/ttft/p{percent}"
        report.add(Result(case, ours, "ms", "the same without a store", theirs, theirs / ours))
    report.add(Result("replay/tokens-equal", equal, "requests", "all", count, equal / count))


def first_difference(shared: list[Completion], alone: list[Completion]) -> str:
    """Which request first gave other tokens, for a message; empty when none did."""
    for index, (a, b) in enumerate(zip(shared, alone, strict=True)):
        if a.tokens != b.tokens:
            return json.dumps({"request": index, "store": a.tokens, "alone": b.tokens})
    return ""
