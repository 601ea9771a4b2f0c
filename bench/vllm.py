"""How fast is vLLM's first token when the node has the prompt, and what does storing cost?

``ttft/*``: each store behind a server of its own that computes prompts, is restarted, and is asked
for them: what was loaded stands beside a server without a connector, whose own prefix cache has it;
``ttft/disk``: the node was restarted too. ``multiturn/*``: see :mod:`bench.vllm_multiturn` and
:mod:`bench.vllm_new`. Only one server works at a time, and the cases that are compared take turns.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
from typing import Final

from bench.cluster import ClusterError
from bench.measure import Progress, Report, Result, Spread
from bench.vllm_cluster import VllmCluster
from bench.vllm_multiturn import multiturn
from bench.vllm_new import new_prompts
from bench.vllm_peers import PEERS, measure
from bench.vllm_restart import LENGTHS, Restarted, from_disk, restarted

BOUND: Final = "ttft/engine-prefix-hit"
PARTS: Final = ("ttft", "multiturn", "new")
_GIB: Final = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the group."""
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS,
                        help="parts to measure; default: all")  # fmt: skip
    parser.add_argument("--load", default="async", choices=["async", "layerwise"],
                        help="how the connector loads: kvstore.load")  # fmt: skip
    parser.add_argument("--page-tokens", type=int, default=0,
                        help="of kvstore's pages in ttft/*: kvstore.page_tokens")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=9,
                        help="prompts of each length; minimum: 3")  # fmt: skip
    parser.add_argument("--talks", type=int, default=3, help="repetitions of multiturn")
    parser.add_argument("--turns", type=int, default=18, help="turns of part new, in total")
    parser.add_argument("--servers", type=int, default=6,
                        help="server pairs of part new; minimum: 2")  # fmt: skip
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS,
                        help="other stores to measure; default: all; no name: none")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure; the exit status is 1 when a server failed or nothing was loaded."""
    loaded = True
    steps = len(options.parts) + (len(options.peers) if "ttft" in options.parts else 0)
    try:
        with Report(json=options.json) as report, Progress("part", steps) as part:
            if "ttft" in options.parts:
                part.step("kvstore: restart, then from the node; beside an engine without it")
                loaded = _first_tokens(options, report, part)
            if "multiturn" in options.parts:
                part.step("multiturn: conversations, without a store and with one")
                asyncio.run(multiturn(max(1, options.talks), report, part))
            if "new" in options.parts:
                part.step("new: every prompt is computed, with the connector and without")
                servers = max(2, options.servers)
                turns = max(servers, options.turns)
                asyncio.run(new_prompts(turns, servers, report, part))
    except (ClusterError, TimeoutError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0 if loaded else 1


def _first_tokens(options: argparse.Namespace, report: Report, part: Progress) -> bool:
    """Whether the node had anything."""
    count = max(3, options.prompts)
    extra = {"load": options.load, "page_tokens": options.page_tokens}
    ours = _ours(count, extra, report, part)
    _add("kvstore", ours, report, part)
    for name in options.peers:
        part.step(f"{name}: restart, then from there; beside an engine without it")
        try:
            _add(name, measure(name, count), report, part)
        except (ClusterError, subprocess.CalledProcessError) as error:
            part.note(f"ttft/{name} is left out: {error}")
    return ours.hit_tokens > 0


def _add(name: str, result: Restarted, report: Report, progress: Progress) -> None:
    """One store's cases, beside the prefix hits that took turns with them."""
    for length in result.loaded_s:
        loaded, cached = (
            Spread.of(times[length]) for times in (result.loaded_s, result.cached_s)
        )  # fmt: skip
        report.add(_first_token(f"ttft/{name}/{length}", loaded.median, cached.median))
        progress.note(
            f"{name}, {length} tokens: loaded {_ms(loaded)}, the engine's own hits in turn"
            f" {_ms(cached)}, {loaded.median / cached.median:.2f} times; computed"
            f" {_ms(Spread.of(result.computed_s[length]))}"
        )
    progress.note(f"{name}: {result.hit_tokens} tokens loaded. {' '.join(result.notes)}")


def _first_token(case: str, value_s: float, bound_s: float, bound: str = BOUND) -> Result:
    return Result(case, value_s * 1e3, "ms", bound, bound_s * 1e3, bound_s / value_s)


def _ms(spread: Spread) -> str:
    return f"{spread.median * 1e3:.0f} ms ({spread.min * 1e3:.0f} to {spread.max * 1e3:.0f})"


def _ours(count: int, extra: dict[str, object], report: Report, progress: Progress) -> Restarted:
    with VllmCluster(capacity_bytes=2 * _GIB, ssd_bytes=4 * _GIB) as cluster:
        cluster.start_node()
        transfer = cluster.transfer(**extra)
        result = asyncio.run(restarted(cluster, count, transfer))
        if not result.hit_tokens:
            progress.note("nothing was loaded from the node")
        loads = max(1.0, cluster.metric("store", "kvstore:loads_total"))
        for what in ("load", "lookup"):
            seconds = cluster.metric("store", f"kvstore:{what}_seconds_total")
            result.notes.append(f"Mean {what} {seconds / loads * 1e3:.2f} ms.")
        disk_s, tokens = asyncio.run(from_disk(cluster, transfer))
        length = LENGTHS[-1]
        memory, computed = (
            statistics.median(times[length]) for times in (result.loaded_s, result.computed_s)
        )  # fmt: skip
        disk = Spread.of(disk_s)
        case = f"ttft/disk/{length}"
        report.add(_first_token(case, disk.median, memory, f"ttft/kvstore/{length}"))
        progress.note(
            f"{case}: {_ms(disk)} after a restart of the node too, {tokens} tokens loaded:"
            f" {disk.median / memory:.2f} of memory, {disk.median / computed:.2f} of computing"
        )
        for tokens, times in result.computed_s.items():
            value = statistics.median(times)
            cached = statistics.median(result.cached_s[tokens])
            report.add(_first_token(f"ttft/recompute/{tokens}", value, cached))
        return result
