"""How does the simulator compare with figures 8 to 11 of Mooncake's paper (FAST'25)?

``paper`` beside a row is the paper's number for the conversation workload, as its text says it; of
figure 10 it says only the best of all its workloads. Figure 5 is a table of ``python -m bench
simulate``. Everything is simulated:

- ``figure8/…`` is the mean prefill time of a request in seconds of an engine, by what is reused:
  ``global`` (``cache-global``, ten engines that prefill and six that decode, nodes fetch from each
  other), ``local`` (each of sixteen mixed engines what it has in its own memory) and ``none``;
  ``ratio`` is the multiple of ``global``.
- ``figure9/TOKENS`` is the part of the blocks that a cache of so many tokens finds, by the order of
  the requests alone; ``ratio`` is the part of what an endless one finds.
- ``figure10/…/POLICY`` compares nodes that fetch from each other (``cache-global``) with nodes that
  do not, under ``POLICY``; ten engines prefill in both, each with 3 M tokens of memory: the part of
  the prompts' tokens that was not computed (``hits``), and the mean prefill time (``prefill``).
- ``figure11/TOP`` is on how many of the ten nodes the so many most replicated blocks are, mean over
  the run; ``ratio`` is the part of the nodes.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.measure import Progress, Report, Result
from conductor.routing.engines import Role
from conductor.simulator.caches import BlockCache
from conductor.simulator.fleet import Running, SimulatedEngine, engines_of
from conductor.simulator.scenario import Scenario
from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest, read_trace
from kvstore.protocol.errors import InvalidArgument, reason

MODEL: Final = "llama3-70b"
CAPACITIES: Final = {"1M": 1e6, "3M": 3e6, "10M": 1e7, "30M": 3e7, "50M": 5e7}
TOPS: Final = (10, 100, 1_000, 10_000)
NODES: Final = 10
SAMPLE_S: Final = 120.0
HOST_BYTES: Final = 1e12
"""Memory of a node: 3 M tokens of :data:`MODEL`."""
_PREFILL_TIMES: Final = {"local": 1.43, "none": 1.56}
"""Of vLLM with prefix caching, and without (Mooncake: 36 % less), as multiples of Mooncake's."""
_LOCAL_PART: Final = {"3M": 0.5, "50M": 1.0}
"""Of the ceiling: less than this with the memory of one node, and about this with that of 17."""
_TOP_COPIES: Final = {100: 1.0}
"""The hundred hottest blocks are on nearly every prefill node."""


_FETCHED_HITS: Final = 2.36
"""Of nodes that fetch from each other, as a multiple of others: at most, of all workloads."""
_FETCHED_TIME: Final = 0.52
"""Prefill time, likewise: 48 % less at most."""


class Figure(Result, frozen=True, kw_only=True):
    """Adds the paper's number beside ``ratio``; None = it says none."""

    paper: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--trace", type=Path, required=True,
                        help="trace file in Mooncake's format")  # fmt: skip
    parser.add_argument("--requests", type=int, help="use only the first N requests; default: all")


def run(options: argparse.Namespace) -> int:
    """Simulate and print; exit status 1 without the trace, 2 if an option is wrong."""
    try:
        trace = read_trace(options.trace, options.requests)
        if not trace:
            raise InvalidArgument("trace", f"{options.trace} is empty")
        with Report(json=options.json) as report, Progress("figure", 4) as progress:
            for figures in (figure9, others):
                for one in figures(trace, progress):
                    report.add(one)
    except InvalidArgument as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{reason(error)}\n")
        return 1
    return 0


def figure9(trace: Sequence[TracedRequest], progress: Progress) -> Iterator[Figure]:
    """Hits by capacity."""
    progress.step("figure 9: hits of a cache by its capacity")
    ceiling = hits(trace, sum(len(one.blocks) for one in trace))
    for name, tokens in CAPACITIES.items():
        found = hits(trace, int(tokens / BLOCK_TOKENS))
        part = found / ceiling if ceiling else 0.0
        yield Figure(
            f"figure9/{name}", found, "", "endless", ceiling, part, paper=_LOCAL_PART.get(name)
        )


def hits(trace: Sequence[TracedRequest], capacity: int) -> float:
    """The part of the blocks that are a prefix in an LRU cache of so many blocks."""
    cache = BlockCache(capacity, {}, 1)
    found = asked = 0
    for one in trace:
        have = 0
        while have < len(one.blocks) and one.blocks[have] in cache:
            have += 1
        found, asked = found + have, asked + len(one.blocks)
        cache.put(one.blocks)
    return found / max(1, asked)


def others(trace: Sequence[TracedRequest], progress: Progress) -> Iterator[Figure]:
    """Figures 8, 10 and 11: prefill times, hits, and copies of blocks."""
    progress.step("figures 8, 10 and 11: all nodes fetch from each other")
    everywhere = Simulation(trace, _pairs(), Scenario(policy="cache-global", host_bytes=HOST_BYTES))
    copies, samples = replicas(everywhere)
    progress.step("figure 8: each engine by itself")
    mixed = engines_of({Role.MIXED: "16xa800"}, MODEL, Running())
    alone = Scenario(policy="least-loaded", host_bytes=0, peers=False)
    by_itself = Simulation(trace, mixed, alone)
    by_itself.run()
    together = prefill_s(everywhere)
    yield Figure("figure8/global", together, "s", paper=1.0)
    for name, seconds in (
        ("local", prefill_s(by_itself)), ("none", prefill_s(everywhere, reused=False))
    ):  # fmt: skip
        yield Figure(
            f"figure8/{name}", seconds, "s", "global", together, seconds / together,
            paper=_PREFILL_TIMES[name],
        )  # fmt: skip
    progress.step("figure 10: no node fetches from another")
    for policy in ("cache-local", "least-loaded"):
        local = Scenario(policy=policy, host_bytes=HOST_BYTES, peers=False)
        by_node = Simulation(trace, _pairs(), local)
        by_node.run()
        for name, unit, fetched, own, paper in (
            ("hits", "", hit_part(everywhere), hit_part(by_node), _FETCHED_HITS),
            ("prefill", "s", together, prefill_s(by_node), _FETCHED_TIME),
        ):
            ratio = fetched / own if own else None
            yield Figure(
                f"figure10/{name}/{policy}", fetched, unit, "local", own, ratio, paper=paper
            )
    most = [count / samples for _, count in copies.most_common(max(TOPS))]
    for top in TOPS:
        mean = fmean(most[:top]) if most else 0.0
        yield Figure(
            f"figure11/{top}", mean, "nodes", "nodes", NODES, mean / NODES,
            paper=_TOP_COPIES.get(top),
        )  # fmt: skip


def _pairs() -> list[SimulatedEngine]:
    """The engines of figures 8, 10 and 11."""
    return engines_of({Role.PREFILL: f"{NODES}xa800", Role.DECODE: "6xa800"}, MODEL, Running())


def hit_part(simulation: Simulation) -> float:
    """The part of the prompts' tokens that was not computed."""
    served = [one for one in simulation.records if one.outcome == "ok"]
    tokens = sum(one.request.tokens for one in served)
    return sum(one.hit_tokens for one in served) / max(1, tokens)


def prefill_s(simulation: Simulation, *, reused: bool = True) -> float:
    """Mean seconds that an engine computes a prompt alone, without what is reused or with it."""
    engine = simulation.head.engines[0].id
    times = simulation.times(engine)
    served = [one for one in simulation.records if one.outcome == "ok"]
    return fmean(
        times.prefill_seconds(one.request.tokens - hit, hit)
        for one in served
        for hit in (one.hit_tokens if reused else 0,)
    )


def replicas(simulation: Simulation) -> tuple[Counter[int], int]:
    """Run it, and add up in how many nodes each block is, every :data:`SAMPLE_S`."""
    found, samples, at = Counter[int](), 0, SAMPLE_S
    while simulation.step():
        if simulation.now >= at:
            found.update(simulation.caching.copies())
            samples, at = samples + 1, simulation.now + SAMPLE_S
    simulation.run()
    return found, max(1, samples)
