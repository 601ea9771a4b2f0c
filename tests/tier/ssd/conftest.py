"""Logs on simulated and real disks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.testing.disk import SimulatedDisk
from kvstore.tier.directories import Directory
from kvstore.tier.ssd import SSDLog

SEGMENT_BYTES = 256 << 10
HOME = Path("/log")

OpenLog = Callable[..., SSDLog]


def open_log(disk: Any, *, paths: int = 1, **options: Any) -> SSDLog:
    """A log on a simulated disk, driven by hand; not recovered yet."""
    directories = [
        Directory(HOME / str(index), options.pop("capacity_bytes", 64 * SEGMENT_BYTES))
        for index in range(paths)
    ]
    size = options.pop("segment_bytes", SEGMENT_BYTES)
    node = options.pop("node", "node")
    return SSDLog(node, directories, size, threads=options.pop("threads", 0), disk=disk)


def recovered(disk: Any, **options: Any) -> SSDLog:
    log = open_log(disk, **options)
    log.recover()
    return log


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def real_log(tmp_path: Path) -> Iterator[OpenLog]:
    """``real_log(threads=2) -> SSDLog`` on this machine's disk, recovered, closed at the end."""
    with ExitStack() as stack:

        def make(*, threads: int = 2, **options: Any) -> SSDLog:
            directory = Directory(tmp_path / "log", 64 * SEGMENT_BYTES)
            log = SSDLog("node", [directory], SEGMENT_BYTES, threads=threads, **options)
            stack.callback(log.close)
            log.recover()
            return log

        yield make
