"""The file in which a server's process says what CPU time the connector has taken in it."""

import time
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = "KVSTORE_BENCH_COSTS"
"""Variable of the environment: an existing folder, with a file for each process."""
EVERY_S: Final = 0.2
_WAIT_S: Final = 30.0
_POLL_S: Final = 0.05


class Spent(NamedTuple):
    """CPU seconds of the connector since its process began.

    Attributes:
        calls: in what vLLM calls of it, in vLLM's own threads.
        threads: in threads of its own.
    """

    calls: float
    threads: float


def write(path: Path, spent: Spent) -> None:
    """Replace the file, so that a reader never sees half of one."""
    fresh = path.with_suffix(".new")
    fresh.write_text(f"{spent.calls} {spent.threads}")
    fresh.replace(path)


def read(folder: Path) -> Spent:
    """The sum of all processes, each as it was after this call began.

    Processes that have ended must have left no file.

    Raises:
        TimeoutError: a process does not write.
    """
    asked = folder / "asked.mark"
    asked.touch()
    now = asked.stat().st_mtime_ns
    deadline = time.monotonic() + _WAIT_S
    while any(path.stat().st_mtime_ns < now for path in _files(folder)) or not _files(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody writes to {folder}")
        time.sleep(_POLL_S)
    found = [map(float, path.read_text().split()) for path in _files(folder)]
    calls, threads = (sum(column) for column in zip(*found, strict=True))
    return Spent(calls, threads)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if not path.suffix]
