"""Engines of one and of two ranks push over Mooncake, compared with one engine alone.

``python -m tests.cluster_processes.pushed_ranks_program [REQUESTS TOKENS:TRACE]``: a program of its
own, because Mooncake needs a network of its own. Without a trace it pushes a few prompts, with one,
so many requests of it, where so many tokens stand for a block. It says of each pair how many jobs
went over Mooncake, and of a trace how many requests were alike in what.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from bench import replay
from engine_adapters.reference.engine import Engine
from engine_adapters.reference.sampler import Sampling
from engine_adapters.reference.scheduler import Limits
from tests.engine_adapters.reference.conftest import MakeEngine, engines, submit
from tests.engine_adapters.reference.pushed import (
    OPTIONS,
    PushPair,
    kept_hashes,
    pair_of,
    pushed_are_those_of_one_engine,
    report,
)

RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]
AT_ONCE = 3
BLOCKS = 1024


def replayed(
    pair: PushPair, alone: Engine, calls: Sequence[replay.Call], found: Counter[str]
) -> None:
    """Push the requests of a trace, and count in what they are those of one engine."""

    def one(number: int) -> Counter[str]:
        call, name = calls[number], f"r{number}"
        parameters = dict(call.parameters)
        most = parameters.pop("max_tokens")
        sampling = Sampling(**parameters)
        here, there = pair.ask(call.prompt, most, sampling, name=name)
        expected = submit(alone, call.prompt, most, sampling, id=name).wait()
        told = [report(answer.wait()) for answer in (here, there)]
        hashes = alone.kv_hashes(name)
        return Counter(
            pushed=told == [("success", None)] * 2,
            tokens=there.tokens == expected.tokens != [],
            hashes=kept_hashes(pair, name) == [hashes] * 2 and bool(hashes),
        )

    with ThreadPoolExecutor(AT_ONCE) as threads:
        for alike in threads.map(one, range(len(calls))):
            found.update(alike)


def pair_on_trace(
    make: MakeEngine, ranks: tuple[int, int], calls: Sequence[replay.Call], found: Counter[str]
) -> PushPair:
    """The engines that have pushed all requests."""
    small = {"limits": Limits(token_budget=64), "prefix_cache": False, "blocks": BLOCKS}
    sides = [{"ranks": each, "handoff": MOONCAKE, **small} for each in ranks]
    pair = pair_of(make, submit, prefill=sides[0], decode=sides[1])
    replayed(pair, make(**small), calls, found)
    return pair


MOONCAKE = replace(OPTIONS, transport="mooncake", mooncake_protocol="tcp")


def run(calls: Sequence[replay.Call]) -> dict[str, dict[str, int]]:
    """Of each pair of ranks: what was alike, what was written, and what was not taken."""
    torch.set_num_threads(1)
    counted: dict[str, dict[str, int]] = {}
    for ranks in RANKS:
        found: Counter[str] = Counter()
        with engines() as make:
            if calls:
                pair = pair_on_trace(make, ranks, calls, found)
            else:
                pair = pushed_are_those_of_one_engine(make, submit, ranks, MOONCAKE)
            for engine in (pair.prefill, pair.decode):
                pushes = engine.parts.pushes
                assert pushes is not None
                stats = [manager.stats() for manager in pushes._managers]
                found["ended"] += sum(one.get("engines_ended_for_limbo", 0) for one in stats)
                if engine is pair.prefill:
                    found["written"] = min(one["written_jobs"] for one in stats)
                    found["not_taken"] = sum(one["jobs_not_taken"] for one in stats)
                else:
                    found["unstaged"] = sum(one.get("unstaged_handoffs", 0) for one in stats)
        counted["{}to{}".format(*ranks)] = dict(found)
    return counted


if __name__ == "__main__":
    calls: list[replay.Call] = []
    if len(sys.argv) > 1:
        tokens, path = sys.argv[2].split(":", 1)
        calls = replay.load(Path(path), int(sys.argv[1]), int(tokens), max_output=6)
    sys.stdout.write(f"counted {json.dumps(run(calls))}\n")
