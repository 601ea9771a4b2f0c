"""What all bench commands share: how a case is measured against its bound, and how it is printed.

A case answers one question with one figure, and stands beside its **bound**: what the machine could
do at best (memcpy by one thread, a bare socket's round trip), measured in the same run and
alternately with the case, so that a busy neighbour slows both. ``ratio`` is 1 at the bound and
higher is better, for throughputs (value / bound) and latencies (bound / value) alike.

Progress and notes go to stderr. stdout carries results only: with ``--json`` one JSON object a
line, ``{"case", "value", "unit", "bound", "bound_value", "ratio"}``; else a table at the end.
"""

import argparse
import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self, TextIO

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Column, Table

from kvstore import mover

Measured = Callable[[], float]
"""Does a piece of work once and returns the seconds it took; :func:`timed` makes one."""

WORKING_SET_BYTES_MAX: Final = 512 << 20
CACHES_IN_WORKING_SET: Final = 4
CACHE_BYTES_FALLBACK: Final = 32 << 20
PAIRS_MAX: Final = 100_000
TABLE_WIDTH: Final = 120
"""Of a table that goes to a file."""
GIT_WAIT_S: Final = 10.0
_CLEAR: Final = "\r\x1b[K"
_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")
_ROOT: Final = Path(__file__).resolve().parent.parent


# Measuring


class Spread(NamedTuple):
    """Seconds a call took, over ``calls`` calls."""

    median: float
    min: float
    max: float
    calls: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread":
        """Summarise at least one measurement."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


class Interleaved(NamedTuple):
    """A case and its bound, measured alternately."""

    case: Spread
    bound: Spread


def timed(work: Callable[[], object]) -> Measured:
    """Make ``work`` return the seconds it took instead of its result."""

    def measured() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return measured


def interleave(
    case: Measured, bound: Measured, *, pairs: int = 7, min_seconds: float = 1.0
) -> Interleaved:
    """Run the case and its bound alternately, after one unmeasured call of each.

    Which of the two goes first changes from pair to pair, so that neither always finds the caches
    the other left.

    Args:
        case: one call of what is measured; it returns its own seconds, so that it may prepare and
            clean up outside of them.
        bound: the same amount of work done in the best way the machine allows.
        pairs: at least so many measured calls of each, 1 or more.
        min_seconds: go on until so much time has passed in all (100,000 pairs at most).
    """
    assert pairs >= 1, "a median needs a value"
    case()
    bound()
    seconds: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    for pair in range(max(pairs, PAIRS_MAX)):
        if pair >= pairs and time.perf_counter() - start >= min_seconds:
            break
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            seconds[which].append((case, bound)[which]())
    return Interleaved(Spread.of(seconds[0]), Spread.of(seconds[1]))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` per cent of all values do not exceed.

    Args:
        values: at least one, in any order.
        percent: 0 (the smallest) to 100 (the largest).
    """
    assert values, "no values have no percentile"
    assert 0 <= percent <= 100, "a percentile is between 0 and 100"
    rank = -(-len(values) * percent // 100)
    return sorted(values)[max(int(rank), 1) - 1]


def last_level_cache_bytes(caches: Path = _CACHES) -> int:
    """Size of the largest cache that the first core sees; 32 MiB where the kernel does not say."""
    sizes = [_cache_bytes(entry) for entry in caches.glob("index*/size")]
    return max(sizes, default=0) or CACHE_BYTES_FALLBACK


def _cache_bytes(entry: Path) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    text = entry.read_text().strip()
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0)


def working_set_bytes(call_bytes: int) -> int:
    """How much memory to go round in, so that every call finds its bytes in memory.

    Four times the last level cache, at most 512 MiB, but never less than two calls; a whole number
    of calls.

    Args:
        call_bytes: what one call reads, at least 1.
    """
    wanted = min(CACHES_IN_WORKING_SET * last_level_cache_bytes(), WORKING_SET_BYTES_MAX)
    return max(wanted // call_bytes, 2) * call_bytes


def prefaulted(count_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory every page of which has been written, with bytes that are not all the same.

    Returns:
        shape (count_bytes,), uint8.
    """
    pattern = np.arange(65_521) % 251  # a prime, so that no two pages of memory are equal
    return np.resize(pattern.astype(np.uint8), count_bytes)


class Memcpy:
    """The bound of everything that moves bytes: memcpy by one thread, memory to memory.

    Calling it copies one call's bytes in one piece and returns the seconds that took; each call
    goes on where the last one ended, round a working set several times the caches.

    Attributes:
        call_bytes: what one call copies.
    """

    name: Final = "memcpy, one thread"

    def __init__(self, page_bytes: int, pages: int = 1) -> None:
        self.call_bytes = page_bytes * pages
        size = working_set_bytes(self.call_bytes)
        self._source, self._target = prefaulted(size), prefaulted(size)
        self._offset = 0

    def __call__(self) -> float:
        """Copy once; seconds."""
        source = self._source.ctypes.data + self._offset
        target = self._target.ctypes.data + self._offset
        start = time.perf_counter()
        ctypes.memmove(target, source, self.call_bytes)
        seconds = time.perf_counter() - start
        self._offset = (self._offset + self.call_bytes) % self._source.size
        return seconds


# Results


class Result(msgspec.Struct, frozen=True):
    """One line of output; the fields are the contract of ``--json``.

    A group whose figures stand beside more than a bound adds fields of numbers.

    Attributes:
        case: what was done, ``group/size/count``.
        value: the figure, in ``unit``.
        unit: ``GB/s``, ``us``, ``ms``, …
        bound: what ``bound_value`` is; empty when the case has none.
        bound_value: in ``unit``; None when the case has none.
        ratio: 1 = the bound, higher is better; None when the case has none.
    """

    case: str
    value: float
    unit: str
    bound: str = ""
    bound_value: float | None = None
    ratio: float | None = None


def throughput(case: str, call_bytes: int, measured: Interleaved, bound: str) -> Result:
    """A result in GB/s (10**9 bytes), from what one call of case and bound took."""
    value = call_bytes / measured.case.median / 1e9
    bound_value = call_bytes / measured.bound.median / 1e9
    return Result(case, value, "GB/s", bound, bound_value, value / bound_value)


def latency(case: str, measured: Interleaved, bound: str) -> Result:
    """A result in microseconds, from what one call of case and bound took."""
    value, bound_value = measured.case.median * 1e6, measured.bound.median * 1e6
    return Result(case, value, "us", bound, bound_value, bound_value / value)


class Report:
    """Where results go: one JSON line each at once, or a table when the report is closed."""

    def __init__(self, *, json: bool, stream: TextIO | None = None) -> None:
        self._json = json
        self._stream = stream or sys.stdout
        self._results: list[Result] = []

    def add(self, result: Result) -> None:
        """Take one result."""
        self._results.append(result)
        if self._json:
            self._stream.write(msgspec.json.encode(_rounded(result)).decode() + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Print the table, unless the results went out as JSON."""
        if self._json or not self._results:
            return
        table = Table(Column("case", no_wrap=True), "bound")
        more = _more_fields(self._results[0])
        for column in ("value", "bound value", "ratio", *more):
            table.add_column(column, justify="right")
        for result in map(_rounded, self._results):
            ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
            value = f"{result.value:g} {result.unit}"
            others = [_shown(getattr(result, name)) for name in more]
            table.add_row(
                result.case, result.bound, value, _shown(result.bound_value), ratio, *others
            )
        width = None if self._stream.isatty() else TABLE_WIDTH
        Console(file=self._stream, width=width).print(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _rounded(result: Result) -> Result:
    """Four significant digits: more would be noise that looks like knowledge."""

    def digits(value: float | None) -> float | None:
        return None if value is None else float(f"{value:.4g}")

    names = ("value", "bound_value", "ratio", *_more_fields(result))
    return msgspec.structs.replace(
        result, **{name: digits(getattr(result, name)) for name in names}
    )


def _more_fields(result: Result) -> list[str]:
    """Fields of numbers that a group has added."""
    return list(result.__struct_fields__[len(Result.__struct_fields__) :])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


# The command line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what every group understands."""
    parser.add_argument("--json", action="store_true", help="print one JSON line per case")


class Progress:
    """How far a long measurement is, on stderr: one line that moves, or plain lines in a log.

    A context manager; leaving it clears the moving line.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        """Announce ``total`` steps, at least 1; write to ``stream``, by default stderr."""
        assert total >= 1, "there is no progress towards nothing"
        self._label = label
        self._total = total
        self._stream = stream or sys.stderr
        self._moving = self._stream.isatty()
        self.done = 0

    def step(self, name: str) -> None:
        """Say that one more step, called ``name``, begins."""
        self.done += 1
        text = f"{self._label} {self.done}/{self._total} {name}"
        if self._moving:
            filled = round(20 * self.done / self._total)
            width = shutil.get_terminal_size().columns
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {text}"
            self._stream.write(f"{_CLEAR}{line[: width - 1]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def note(self, text: str) -> None:
        """Write a line that stays: a spread, a cold figure, what was skipped and why."""
        self._stream.write(f"{_CLEAR if self._moving else ''}{text}\n")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._moving:
            self._stream.write(_CLEAR)
            self._stream.flush()


def machine_line() -> str:
    """Where this run's figures come from, without which they mean nothing, in one line."""
    facts = (
        _cpu_model(Path("/proc/cpuinfo").read_text()),
        f"{len(os.sched_getaffinity(0))} cores",
        f"last level cache {last_level_cache_bytes() >> 20} MiB",
        f"Linux {platform.release()}",
        f"Python {platform.python_version()}",
        f"commit {commit()}",
        f"mover {mover.description}",
    )
    return ", ".join(facts)


def _cpu_model(cpuinfo: str) -> str:
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def commit(root: Path = _ROOT) -> str:
    """Short commit id of the checkout, ``+changes`` when files differ from it, or ``unknown``."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--exclude=*"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_WAIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.stdout.strip()
