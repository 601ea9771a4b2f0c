"""How much time and memory does a node's code take without I/O, and how long are its pauses?

A node in this process gets the messages of its protocol, and no byte moves. ``put``, ``acquire``
and ``lookup`` are in CPU time, beside ``bound/dict``: keys sliced from messages of 128 and put into
a dict in plain Python. ``memory`` is what a process grows by. ``turn`` is the longest that the loop
stands, in CPU time of its thread, for the worst that is known of each kind; the collector's pauses
are ``turn/gc``, and count in no other turn. A case's name ends with the eviction policy.

``asked`` is what a release must reach: a rate at least, all else at most. That of rates and lookups
is for a machine whose ``bound/dict`` is 2,000,000 pages a second, and scales with it.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from typing import Final

from bench import node_memory, node_rates, node_turns
from bench.measure import Progress, Report, Result
from bench.node_rates import POLICIES, Rate, Rates
from bench.node_watch import TURN_S_MAX
from kvstore.process.collector import spare_the_old

BOUND: Final = "bound/dict"
BOUND_PAGES_PER_S: Final = 2_000_000
"""Where the floors were set."""
PUTS_ASKED: Final = {
    "put/fresh/128": 250_000, "put/fresh/8": 100_000, "put/full/128": 120_000, "put/full/8": 60_000,
}  # fmt: skip
"""Pages a second."""
SSD_PUTS_ASKED: Final = 40_000
ACQUIRE_ASKED: Final = 1_000_000
LOOKUP_US_ASKED: Final = {128: 10, 2048: 30}
MEMORY_ASKED: Final = {"host": 300, "ssd": 160}
"""Bytes a page that was put without tokens."""


class NodeResult(Result, frozen=True):
    """A result beside what is asked.

    Attributes:
        asked: in ``unit``; None when nothing is.
        wall: what of the clock passed in the longest turn, in ``unit``; None for other cases.
    """

    asked: float | None = None
    wall: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=1.0,
                        help="minimum CPU time of each rate case")  # fmt: skip
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--pages", type=int, default=0,
                        help="pages per node; default: 2,000,000 for turns, 1,000,000 for memory,"
                        " up to 131,072 for rates")  # fmt: skip


def names() -> list[str]:
    """All cases, in their order."""
    memory = [f"memory/{name}/{policy}" for policy in POLICIES for name in node_memory.names()]
    turns = [f"turn/{name}/{policy}" for policy in POLICIES for name in node_turns.names()]
    return [BOUND, *node_rates.names(), *memory, *turns]


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    wanted = [name for name in names() if options.cases.search(name)]
    if not wanted:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    with Report(json=options.json) as report, Progress("node", len(wanted)) as progress:
        for results in (
            _rates(wanted, options.pages or node_rates.FULL_PAGES, options.seconds, progress),
            _memory(wanted, options.pages or node_memory.PAGES, progress),
            _turns(wanted, options.pages or node_turns.PAGES, progress),
        ):
            for result in results:
                report.add(result)
    return 0


def _rates(
    wanted: list[str], pages: int, seconds: float, progress: Progress
) -> Iterator[NodeResult]:
    found = [name for name in wanted if not name.startswith(("memory/", "turn/"))]
    rates = Rates(pages, seconds) if found else None
    end = spare_the_old()  # as in the daemon
    try:
        for name in found:
            assert rates is not None
            progress.step(name)
            if name == BOUND:
                yield NodeResult(name, rates.bound(), "pages/s")
                continue
            rate = rates.measure(name)
            yield _of_lookup(name, rate) if name.startswith("lookup/") else _of_rate(name, rate)
    finally:
        end()


def _of_rate(name: str, rate: Rate) -> NodeResult:
    bound = rate.bound_pages_per_s
    asked = _pages_asked(name)
    scaled = None if asked is None else asked * bound / BOUND_PAGES_PER_S
    value = rate.pages_per_s
    return NodeResult(name, value, "pages/s", BOUND, bound, value / bound, scaled)


def _pages_asked(name: str) -> float | None:
    if name.startswith("acquire/"):
        return ACQUIRE_ASKED
    if node_rates.SSD in name:
        return SSD_PUTS_ASKED
    return PUTS_ASKED.get("/".join(name.split("/")[:3]))


def _of_lookup(name: str, rate: Rate) -> NodeResult:
    pages = int(re.split(r"[/+]", name)[1])
    value, bound = 1e6 * pages / rate.pages_per_s, 1e6 * pages / rate.bound_pages_per_s
    asked = LOOKUP_US_ASKED[pages] * BOUND_PAGES_PER_S / rate.bound_pages_per_s
    return NodeResult(name, value, "us", BOUND, bound, bound / value, asked)


def _memory(wanted: list[str], pages: int, progress: Progress) -> Iterator[NodeResult]:
    for policy in POLICIES:
        for case in node_memory.names():
            name = f"memory/{case}/{policy}"
            if name not in wanted:
                continue
            progress.step(name)
            grown = node_memory.measure(case, pages, policy)
            progress.note(f"{name}: {grown.pages} pages, {grown.on_disk} of them in no memory")
            asked = MEMORY_ASKED.get(case)
            yield NodeResult(name, grown.bytes / grown.pages, "bytes/page", asked=asked)


def _turns(wanted: list[str], pages: int, progress: Progress) -> Iterator[NodeResult]:
    for policy in POLICIES:
        cases = [case for case in node_turns.names() if f"turn/{case}/{policy}" in wanted]
        if cases:
            progress.note(f"turn/*/{policy}: filling a node with {pages:,} pages")
        for case, outcome in node_turns.measure(pages, policy, cases):
            name = f"turn/{case}/{policy}"
            progress.step(f"{name} is done")
            longest = outcome.longest
            progress.note(
                f"{name}: {longest.name}; {outcome.over} of {outcome.turns} over"
                f" {1e3 * TURN_S_MAX:g} ms{outcome.note and '; '}{outcome.note}"
            )
            yield NodeResult(
                name, 1e3 * longest.cpu_s, "ms", asked=1e3 * TURN_S_MAX, wall=1e3 * longest.wall_s
            )
