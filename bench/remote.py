"""What do pages of another node cost a client, in time and in memory?

Real processes on this machine; digests are on. ``transport/…`` is a transport alone, ``get/…`` a
client's get of pages that only another node has; both stand beside one bare TCP connection that
moves the same bytes and checks nothing, and ``bound/get/…`` is that with a digest and a copy.
``lookup/…`` is about lookups of 2,048 pages, ``capacity/two`` about hits of two nodes beside one
with both memories, ``ttft/two-nodes`` about the first token when prefill and decode are at two
nodes, ``directory/peers`` about the memory of a node's index. ``announce``, ``directory/redis``,
``directory/locate`` and ``put/…/announced`` are about the directory in Redis
(:mod:`bench.remote_announce`).
"""

import argparse
import re
import sys
from typing import Final

from bench import (
    remote_announce,
    remote_capacity,
    remote_directory,
    remote_get,
    remote_lookup,
    remote_mooncake,
    remote_transport,
    remote_ttft,
)
from bench.measure import Progress, Report

PARTS: Final = (
    remote_transport, remote_mooncake, remote_get, remote_lookup, remote_capacity, remote_ttft,
    remote_directory,
)  # fmt: skip
"""Modules with cases: their ``names()``, and ``results(name, seconds)`` of one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum duration of each case")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    found = [(part, name) for part in PARTS for name in part.names()]
    wanted = [(part, name) for part, name in found if options.cases.search(name)]
    announced = [name for name in remote_announce.CASES if options.cases.search(name)]
    if not wanted and not announced:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    with (
        Report(json=options.json) as report,
        Progress("remote", len(wanted) + bool(announced)) as progress,
    ):
        for part, name in wanted:
            progress.step(name)
            for result in part.results(name, options.seconds):
                report.add(result)
        if announced:
            progress.step(announced[0])
            why_not = remote_announce.measured(announced, report, options.seconds)
            if why_not:
                sys.stderr.write(f"skipped {', '.join(announced)}: {why_not}\n")
    return 0
