"""What the connector costs where it can never help: no prompt ever comes again.

``multiturn/hostile``: servers with and without the connector compute the same eight prompts at
once, in turns. ``cold/cpu``: the connector's share of the CPU seconds of the same servers.
"""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Final

import aiohttp

from bench import vllm_spent
from bench.completion import complete
from bench.measure import Progress, Report, Result, percentile
from bench.vllm_cluster import MODEL, VllmCluster
from bench.vllm_restart import prompt
from bench.vllm_spent import FOLDER, Spent

BATCH: Final = 8
"""Prompts at once, so that some are stored while the next are computed."""
BATCH_TOKENS: Final = 640
OUTPUT_TOKENS: Final = 4
CAPACITY_BYTES: Final = 256 << 20
WARM_BATCHES: Final = 3
"""Batches before the first one that counts: the node is full then, and the server has mapped all of
its memory, which it does once in its life."""
_OTHER: Final = {"plain": "store", "store": "plain"}
_STORED: Final = "kvstore:stored_pages_total"
_COLD_SEED: Final = 20_000
_WARM_SEED: Final = 19_000
_MEASURED: Final = {
    "kv_connector": "MeasuredConnector", "kv_connector_module_path": "bench.vllm_costs",
}  # fmt: skip


async def new_prompts(turns: int, servers: int, report: Report, progress: Progress) -> None:
    """Measure and report both cases.

    A server can be faster or slower than its twin by several percent for as long as it lives (where
    its memory came to lie): turns of one pair alone would measure that, so there are several.

    Args:
        turns: of each kind of server, in all.
        servers: pairs of servers, at least 2.
        report: gets the results.
        progress: gets the notes.
    """
    of_each, of_turns, spent, server_s, pages = list[float](), list[float](), Spent(0, 0), 0.0, 0.0
    with VllmCluster(capacity_bytes=CAPACITY_BYTES) as cluster:
        cluster.start_node()
        for pair in range(servers):
            mine = range(pair * turns // servers, (pair + 1) * turns // servers)
            with tempfile.TemporaryDirectory(prefix="kv-costs-") as folder:
                transfer = {**cluster.transfer(), **_MEASURED}
                cluster.start_server("plain")
                cluster.start_server("store", transfer, variables={FOLDER: folder})
                for name in ("plain", "store"):
                    cluster.wait_server(name)
                    for batch in range(pair * WARM_BATCHES, (pair + 1) * WARM_BATCHES):
                        await _batch_s(cluster, name, _WARM_SEED + BATCH * batch)
                stored, before = cluster.metric("store", _STORED), vllm_spent.read(Path(folder))
                seconds, cpu_s = await _turns(cluster, mine)
                after = vllm_spent.read(Path(folder))
                pages += cluster.metric("store", _STORED) - stored
                server_s += cpu_s
                spent = Spent(*(s + a - b for s, a, b in zip(spent, after, before, strict=True)))
                of_each.append(sum(seconds["store"]) / sum(seconds["plain"]))
                of_turns += [s / p for s, p in zip(seconds["store"], seconds["plain"], strict=True)]
                cluster.stop("plain")
                cluster.stop("store")
    value, error = statistics.mean(of_each), statistics.stdev(of_each) / len(of_each) ** 0.5
    report.add(Result("multiturn/hostile", value, "of the time without a store"))
    progress.note(
        f"multiturn/hostile: mean {value:.3f} (standard error {error:.3f}) of {servers} pairs of"
        f" servers, {', '.join(f'{one:.3f}' for one in of_each)}; of all {turns} turns: median"
        f" {statistics.median(of_turns):.3f}, quartiles {percentile(of_turns, 25):.3f} and"
        f" {percentile(of_turns, 75):.3f}"
    )
    report.add(Result("cold/cpu", sum(spent) / server_s, "of the server's CPU seconds"))
    progress.note(
        f"cold/cpu: {spent.calls:.3f} s in vLLM's calls and {spent.threads:.3f} s in threads of the"
        f" connector, of {server_s:.1f} s of the servers, for {turns * BATCH * BATCH_TOKENS} new"
        f" prompt tokens and {pages:.0f} stored pages"
    )


async def _turns(cluster: VllmCluster, turns: range) -> tuple[dict[str, list[float]], float]:
    """Seconds of the turns of two servers, of which one stands still; CPU seconds of the store's.

    The server with the store may go on storing after its last prompt: what that costs shows in the
    next turn, or not at all.
    """
    seconds: dict[str, list[float]] = {"plain": [], "store": []}
    begun_s = cluster.cpu_s("store")
    for turn in turns:
        for name in sorted(seconds, reverse=turn % 2 == 0):
            with cluster.suspended(_OTHER[name]):
                seconds[name].append(await _batch_s(cluster, name, _COLD_SEED + BATCH * turn))
    return seconds, cluster.cpu_s("store") - begun_s


async def _batch_s(cluster: VllmCluster, name: str, seed: int) -> float:
    """Seconds that a server takes for a batch of new prompts that come at once."""
    async with aiohttp.ClientSession() as session:
        begin = time.perf_counter()
        await asyncio.gather(
            *(
                complete(
                    session, cluster.urls[name], prompt(seed + number, BATCH_TOKENS),
                    max_tokens=OUTPUT_TOKENS, temperature=0.0, model=MODEL,
                )
                for number in range(BATCH)
            )
        )  # fmt: skip
        return time.perf_counter() - begin
