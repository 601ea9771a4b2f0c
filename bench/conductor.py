"""How long does a routing decision take, and how much latency does the Conductor add to tokens?

``decision/128k``: 64 prefill and 64 decode engines and 64 nodes have prefixes of different length
of a prompt of 131,072 tokens, in an index of 10 million pages of 64 tokens to which 100,000 blocks
a second are written. From the prompt's keys, or with ``tokens`` from its tokens as an array, to the
pair and the entry in the log, with the terms of all engines and packed (the Conductor does the
latter when the request has ended). The index process and the publishers run on the first
core, who decides on the others. The bound is ``select_and_reserve`` of Dynamo's
``SelectionService`` (``--peers dynamo``, in an environment that is made when it is absent): one of
the 128 engines, not a pair, as it knows no nodes; on the same events, on the first core, the
publishers on the others.

``front/added-ttft``: 100 requests a second with prompts of 2,000 tokens are asked of a stand-in
engine directly, through a bare relay with aiohttp and through the Conductor, in turns; the
difference to asking directly of the percentiles until the first event, and the Conductor's CPU time
for a request. ``front/index-gone``: the same while the index's process is stopped (it is killed and
started again after 10 s), and after it was killed. ``front/streams``: the share of the tokens of
256 streams of 50 tokens a second that are here within 20 ms of the engine's write, through the
Conductor and through the relay in turns; ``cpu`` is CPU time for a token, beside that of the relay.
``…/long``: the same while two prompts of 131,072 tokens come each second, and engines write 100,000
blocks a second.

``schedule/1000/POLICY``: 64 prefill and 64 decode engines are full, 1,000 requests with prefixes of
different length everywhere wait, and one engine comes free.
"""

import argparse
import re
import sys
from contextlib import ExitStack
from statistics import median
from typing import Final

import msgspec

from bench.conductor_decision import decided
from bench.conductor_front import (
    BLOCKS,
    INDEX_GONE,
    INDEX_GONE_S,
    FrontError,
    Servers,
    added_ttft,
    ingest,
    servers,
    streams,
)
from bench.conductor_schedule import scheduled
from bench.index_feed import FeedError
from bench.index_peer import PEERS, dynamo_lines
from bench.measure import Progress, Report, Result, percentile
from conductor.routing.policy import POLICIES

_SCHEDULE: Final = "schedule/1000"
ASKED: Final = {
    "decision/128k/p50": 0.6,
    "decision/128k/p99": 1.0,
    "decision/128k/tokens/p50": 3.5,
    **{f"{_SCHEDULE}/{policy}/p99": 10.0 for policy in POLICIES},
    "front/added-ttft/p50": 3.0,
    "front/added-ttft/p99": 10.0,
    "front/index-gone/p50": 10.0,
    "front/index-gone/p99": 10.0,
    "front/streams": 0.99,
    "front/streams/cpu": 1.5,
    "front/streams/long": 0.98,
}
_RELAY: Final = "bare relay"
_DYNAMO: Final = "Dynamo's SelectionService"


class ConductorResult(Result, frozen=True):
    """A result beside what is asked.

    Attributes:
        asked: of shares at least, of all else at most; of ``cpu`` it is how often the bound.
        cpu_ms: CPU time, where it is known. On a machine with other work it says more than
            ``value``.
    """

    asked: float | None = None
    cpu_ms: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=10.0,
                        help="duration of each decision and front case")  # fmt: skip
    parser.add_argument("--pages", type=int, default=10_000_000,
                        help="pages in the index, for decision cases")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5,
                        help="rounds; each case alternates with its bound")  # fmt: skip
    parser.add_argument("--peers", choices=PEERS, action="append", default=[],
                        help="measure this router's decisions too")  # fmt: skip
    parser.add_argument("--streams", type=int, default=256, help="concurrent streams")


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    wanted = [name for name in ASKED if options.cases.search(name)]
    if not wanted:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    groups = {name.rpartition("/p")[0] or name.removesuffix("/cpu") for name in wanted}
    with Report(json=options.json) as report, Progress("conductor", len(groups)) as progress:
        for policy in POLICIES:
            if f"{_SCHEDULE}/{policy}" in groups:
                progress.step(f"{_SCHEDULE}/{policy}")
                report.add(_schedule(policy))
        if any(name.startswith("decision/") for name in groups):
            progress.step("decision/128k")
            try:
                for result in _decision(options, progress):
                    if result.case in wanted:
                        report.add(result)
            except FeedError as error:
                progress.note(str(error))
                return 1
        if any(name.startswith("front/") for name in groups):
            try:
                with servers() as at:
                    for result in _front(at, options, groups, progress):
                        if result.case in wanted:
                            report.add(result)
            except (FeedError, FrontError) as error:
                progress.note(str(error))
                return 1
    return 0


def _decision(options: argparse.Namespace, progress: Progress) -> list[ConductorResult]:
    peer = dynamo_lines(options.peers, progress)
    found = decided(options.pages, options.seconds, progress.note, peer)
    progress.note(
        f"decision/128k: {found.blocks_per_s:,.0f} blocks/s were written meanwhile; {found.held} of"
        f" {len(found.known) + len(found.of_tokens)} decisions chose no pair;"
        f" {median(found.entry_cpu):.3f} ms of CPU time are the entry in the log"
    )
    results = []
    for name in (one for one in ASKED if one.startswith("decision/")):
        percent = 99 if name.endswith("p99") else 50
        of_tokens = "tokens" in name
        wall, cpu = (
            (found.of_tokens, found.of_tokens_cpu) if of_tokens else (found.known, found.known_cpu)
        )
        value, theirs = (
            percentile(wall, percent),
            found.peer.get("tokens" if of_tokens else "hashes"),
        )
        result = ConductorResult(name, value, "ms", asked=ASKED[name])
        if theirs:
            result = _beside(name, value, "ms", _DYNAMO, percentile(theirs, percent))
        results.append(msgspec.structs.replace(result, cpu_ms=percentile(cpu, percent)))
    return results


def _schedule(policy: str) -> ConductorResult:
    name, times = f"{_SCHEDULE}/{policy}/p99", scheduled(policy)
    wall, cpu = percentile(times.wall, 99), percentile(times.cpu, 99)
    return ConductorResult(name, wall, "ms", asked=ASKED[name], cpu_ms=cpu)


def _front(
    at: Servers, options: argparse.Namespace, groups: set[str], progress: Progress
) -> list[ConductorResult]:
    found: list[ConductorResult] = []
    rounds = max(1, options.rounds)
    for name in ("front/added-ttft", "front/index-gone"):
        if name not in groups:
            continue
        progress.step(name)
        if name == "front/added-ttft":
            added = added_ttft(at, options.seconds, rounds)
        else:
            seconds = len(INDEX_GONE) * max(INDEX_GONE_S, options.seconds)
            added = added_ttft(at, seconds, len(INDEX_GONE), INDEX_GONE)
        for percent in (50, 99):
            value, relay = added.at(percent)
            result = _beside(f"{name}/p{percent}", value, "ms", _RELAY, relay)
            found.append(msgspec.structs.replace(result, cpu_ms=median(added.cpu_ms)))
    for name, per_s in (("front/streams", 0.0), ("front/streams/long", 2.0)):
        if name not in groups:
            continue
        progress.step(name)
        each_s = max(1.0, options.seconds / rounds)
        with ExitStack() as undo:
            if per_s:
                writing = undo.enter_context(ingest(at))
            relayed = streams(at, options.streams, each_s, rounds, prompts_per_s=per_s)
            if per_s:
                written = writing.ask("stop") * BLOCKS
                progress.note(f"{name}: {written:,.0f} blocks/s were written meanwhile")
        on_time, bare, cpu_us, bare_us = relayed.medians()
        found.append(_beside(name, on_time, "share", _RELAY, bare, rising=True))
        if not per_s:
            found.append(_beside(f"{name}/cpu", cpu_us, "us", _RELAY, bare_us))
    return found


def _beside(
    name: str, value: float, unit: str, bound: str, bound_value: float, *, rising: bool = False,
) -> ConductorResult:  # fmt: skip
    """A result; ``rising`` if more is better. Differences below nothing have no ratio."""
    ratio = None
    if min(value, bound_value) > 0:
        ratio = (value / bound_value) ** (1 if rising else -1)
    return ConductorResult(name, value, unit, bound, bound_value, ratio, ASKED[name])
