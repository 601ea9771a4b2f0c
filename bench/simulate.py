"""What would each routing policy do with a trace, on simulated engines?

Rows ``simulate/POLICY/SPEED`` are mean seconds to the first token, ``goodput/POLICY`` requests a
second and engine at the highest speed at which 90 % meet both objectives. They are simulated, not
measured: :mod:`conductor.simulator` says how.
"""

import argparse
import sys

from bench.measure import Progress, Report, Result
from conductor.simulator import command
from kvstore.protocol.errors import InvalidArgument


class Simulated(Result, frozen=True, kw_only=True):
    """Adds what a simulation tells besides; see ``conductor.simulator.report.Summary``."""

    p50: float
    p90: float
    p99: float
    tbt_p99: float
    hit: float
    effective: float
    rejected: float
    lost: float
    wasted: float
    goodput: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of ``kvstore-conductor simulate``."""
    command.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Simulate and print; exit status 1 without the trace, 2 if an option is wrong."""
    try:
        cases = command.Cases(options)
        with (
            Report(json=options.json) as report,
            Progress("simulation", cases.total) as progress,
        ):
            for outcome in cases.run():
                progress.step(outcome.case)
                progress.note(outcome.note)
                figures = {name: getattr(outcome.summary, name) for name in command.SHOWN}
                unit = "1/s" if outcome.case.startswith("goodput/") else "s"
                report.add(Simulated(outcome.case, outcome.value, unit, **figures))
    except InvalidArgument as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"{options.trace}: {error}\n")
        return 1
    return 0
