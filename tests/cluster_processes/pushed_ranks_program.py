"""Engines of one and of two ranks push over Mooncake, compared with one engine alone.

``python -m tests.cluster_processes.pushed_ranks_program``: a program of its own, because Mooncake
needs a network of its own. It says how many jobs went over Mooncake, of each pair.
"""

import json
import sys
from dataclasses import replace

import torch

from tests.reference.conftest import engines, submit
from tests.reference.pushed import OPTIONS, pushed_are_those_of_one_engine

RANKS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def run() -> dict[str, int]:
    """Jobs of prefill that were written, and those that decode's engines did not take."""
    torch.set_num_threads(1)
    options = replace(OPTIONS, transport="mooncake", mooncake_protocol="tcp")
    found = {"not_taken": 0, "ended": 0}
    for ranks in RANKS:
        with engines() as make:
            pair = pushed_are_those_of_one_engine(make, submit, ranks, options)
            for engine in (pair.prefill, pair.decode):
                pushes = engine.parts.pushes
                assert pushes is not None
                stats = [manager.stats() for manager in pushes._managers]
                found["ended"] += sum(one.get("engines_ended_for_limbo", 0) for one in stats)
                if engine is pair.prefill:
                    found["{}to{}".format(*ranks)] = min(one["written_jobs"] for one in stats)
                    found["not_taken"] += sum(one["jobs_not_taken"] for one in stats)
    return found


if __name__ == "__main__":
    sys.stdout.write(f"counted {json.dumps(run())}\n")
