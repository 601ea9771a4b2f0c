"""How fast is KV pushed from prefill to decode, and what does it add to the first token?

``ttft/...``: demo model, new prompts of 2,000 tokens, by one engine, through the store, and pushed
after each layer. ``slow/...``: the same over a link on which the KV take 0.6 of the time of
computing them, pushed at the end, after each chunk and after each layer; ``slow/added`` is what
layers add to one engine's time, as a share of what the others add. ``tbt/...``: the 99th percentile
of the gaps of four running streams while such prompts arrive.

``push/block16/...``: the KV of such a prompt (33 MB, blocks of 16 tokens) from the pool of this
process to that of another, digests on, beside two bare TCP sockets in this process that move the
same bytes. ``push/mooncake/block16/...``: the same over Mooncake's own TCP, beside a bare engine
that writes the same blocks; left out, with a message, where Mooncake cannot be had.
``push/tls/block16/contiguous``: over TLS, beside the same push without it. ``send/p50`` is
what one layer of 512 tokens costs the step thread, ``poll/64`` a poll of 64 handoffs.
``abort/others``: nine of ten pushes while one is aborted, beside the same nine when none is; both
managers in this process. ``reshard/...``: the KV of such a prompt between engines of unequal ranks
in this process, beside the same from one rank to one.
"""

import argparse
import re
import sys

from bench import (
    handoff_mooncake,
    handoff_pools,
    handoff_processes,
    handoff_reshard,
    handoff_slow,
    handoff_tbt,
    handoff_tls,
    handoff_ttft,
)
from bench.measure import Progress, Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--seconds", type=float, default=3.0, help="minimum duration of each case")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    every = {
        "push/block16/contiguous": handoff_processes.pushes,
        "push/block16/permuted": handoff_processes.pushes,
        "push/mooncake/block16/contiguous": handoff_mooncake.results,
        "push/mooncake/block16/permuted": handoff_mooncake.results,
        "push/tls/block16/contiguous": handoff_tls.results,
        "send/p50": handoff_pools.sends,
        "poll/64": handoff_pools.polls,
        "abort/others": handoff_pools.aborts,
        "reshard/2to1": handoff_reshard.reshards,
        "reshard/1to2": handoff_reshard.reshards,
        "ttft": handoff_ttft.results,
        "slow": handoff_slow.results,
        "tbt": handoff_tbt.results,
    }
    cases = {name: measure for name, measure in every.items() if options.cases.search(name)}
    if not cases:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    with Report(json=options.json) as report, Progress("handoff", len(cases)) as progress:
        for name, measure in cases.items():
            progress.step(name)
            for result in measure(name, options.seconds):
                report.add(result)
    return 0
