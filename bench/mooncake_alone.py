"""Measures a case over Mooncake in a process with a network of its own.

Mooncake listens on all interfaces.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from bench import namespace
from bench.measure import Result
from bench.mooncake_wheel import NoMooncakeError, environment

_QUIET: Final = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"}
_RESULTS: Final = msgspec.json.Decoder(list[Result])


def results_alone(module: str, name: str, words: list[str], timeout_s: float) -> Iterator[Result]:
    """Run ``python -m module words``, which writes results as JSON; leave it out without Mooncake.

    Args:
        module: name of a module of the benchmarks.
        name: of the case, for messages.
        words: its arguments.
        timeout_s: longest time of it.
    """
    try:
        variables = environment()
    except NoMooncakeError as error:
        sys.stderr.write(f"{name} is left out: {error}\n")
        return
    program = [sys.executable, "-m", module, *words]
    done = subprocess.run(
        namespace.alone(program, _QUIET | variables), stdout=subprocess.PIPE, check=True,
        timeout=timeout_s,
    )  # fmt: skip
    yield from _RESULTS.decode(done.stdout)
