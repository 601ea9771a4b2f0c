"""Eight concurrent prompts have pages on a slow tier: load them, compute them, or choose?

Three reference engines take turns: one loads every hit (``always``), one computes every prompt
(``never``), one chooses (``faster``). All find the same pages, on one real node, behind a tier
that serves one load after the other. Its speed is a multiple of what computing a page takes here,
alone: ``fast/...`` 0.02, ``even/...`` 0.8 (alone loading is a bit faster, eight at once crowd
both), ``slow/...`` 8. A figure is the mean time to the first token of a turn's prompts, the median
of all turns but the first ones, in which ``faster`` learns; its bound is the better fixed rule.
"""

import argparse
import queue
import re
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Final, cast

import numpy as np

from bench import server
from bench.measure import Progress, Report, Result
from bench.slow_tier import SlowTier
from engine_adapters.reference.engine import Engine
from engine_adapters.reference.parts import EngineOptions
from engine_adapters.reference.request import Output, Request
from engine_adapters.reference.scheduler import Limits
from kvstore.client.store import KVStore
from kvstore.engine.options import Loads

PROMPTS: Final = 8
PAGES: Final = 8
PAGE_TOKENS: Final = 64
REST_TOKENS: Final = 16
SHARES: Final = {"fast": 0.02, "even": 0.8, "slow": 8.0}
LEARNING_TURNS: Final = 3
WAIT_S: Final = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--turns", type=int, default=9,
                        help="turns per engine and tier, after the learning turns")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="concurrent prompts")
    parser.add_argument("--model", default="demo", help="reference model: tiny or demo")
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only tiers whose name matches")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    tiers = [name for name in SHARES if options.cases.search(name)]
    if not tiers:
        sys.stderr.write(f"no tier is called so: {options.cases.pattern}\n")
        return 2
    with Report(json=options.json) as report, Progress("loads", len(tiers)) as progress:
        for name in tiers:
            progress.step(name)
            for result in _results(name, options):
                report.add(result)
    return 0


class _Side:
    """One engine, which follows one rule, behind a tier of its own."""

    def __init__(self, address: str, rule: Loads, model: str, prompts: int) -> None:
        limits = Limits(running_max=prompts)
        self.tier = SlowTier(KVStore.connect(address, name=rule.value, timeout_s=1.0))
        blocks = prompts * (PAGES + 2) * PAGE_TOKENS // 16
        self.engine = Engine(
            EngineOptions(
                model=model, blocks=blocks, prefix_cache=False, kv_hashes=False, limits=limits,
                loads=rule,
            ),
            cast("KVStore", self.tier),
        )  # fmt: skip
        self.engine.start()

    def serve(self, prompts: list[list[int]]) -> list[float]:
        """Time to the first token of each prompt, all submitted at once."""
        began, found = time.perf_counter(), list[float]()
        ends: queue.Queue[tuple[float, Output]] = queue.Queue()
        for number, tokens in enumerate(prompts):
            request = Request(
                id=str(number), tokens=list(tokens), prompt_tokens=len(tokens), max_tokens=1,
                emit=lambda output: ends.put((time.perf_counter() - began, output)),
            )  # fmt: skip
            self.engine.submit(request)
        while len(found) < len(prompts):
            seconds, output = ends.get(timeout=WAIT_S)
            if output.finish_reason is not None:
                assert output.tokens, output
                found.append(seconds)
        return found

    def close(self) -> None:
        assert self.engine.close(WAIT_S)

    def summary(self) -> str:
        """Its choices, and how good its expectations were."""
        metrics = self.engine.metrics
        choices = {
            f"{sample.labels['choice']}/{sample.labels['reason']}": int(sample.value)
            for family in metrics.load_choices.collect()
            for sample in family.samples
            if sample.name.endswith("_total") and sample.value
        }
        wrong, measured = (
            next(iter(metrics.loads[f"load_{what}_seconds"].collect())).samples[0].value
            for what in ("error", "measured")
        )
        error = f"; expected seconds are wrong by {wrong / measured:.0%}" if measured else ""
        return f"{choices}{error}"


def _results(name: str, options: argparse.Namespace) -> Iterator[Result]:
    rng = np.random.default_rng(7)
    count = PAGES * PAGE_TOKENS + REST_TOKENS
    prompts = [rng.integers(32, 127, count).tolist() for _ in range(options.prompts)]
    found: dict[Loads, list[float]] = {rule: [] for rule in Loads}
    with ExitStack() as undo:
        address = undo.enter_context(server.running(1 << 28, prefault=False))
        sides = {}
        for rule in Loads:
            sides[rule] = _Side(address, rule, options.model, options.prompts)
            undo.callback(sides[rule].close)
        sides[Loads.NEVER].serve(prompts)  # stores them
        alone_s = min(min(sides[Loads.NEVER].serve(prompts[:1])) for _ in range(3))
        page_s = SHARES[name] * alone_s / PAGES
        sys.stderr.write(f"loads/{name}: {1e3 * page_s:.1f} ms a page, computed alone"
                         f" {1e3 * alone_s / PAGES:.1f}\n")  # fmt: skip
        for turn in range(LEARNING_TURNS + options.turns):
            order = list(Loads)[turn % 3 :] + list(Loads)[: turn % 3]
            for rule in order:
                sides[rule].tier.page_s = page_s
                mean = statistics.mean(sides[rule].serve(prompts))
                if turn >= LEARNING_TURNS:
                    found[rule].append(1e3 * mean)
        sys.stderr.write(f"loads/{name}: {sides[Loads.FASTER].summary()}\n")
    medians = {rule: statistics.median(times) for rule, times in found.items()}
    bound = min(medians[Loads.ALWAYS], medians[Loads.NEVER])
    for rule, value in medians.items():
        case = f"loads/{name}/{rule.value}"
        yield Result(case, value, "ms", "better fixed rule", bound, bound / value)
