"""Logs on simulated and real disks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvstore.protocol.page import ShardSpec
from kvstore.testing.disk import SimulatedDisk
from kvstore.testing.tiers import SHARD, PageInMemory
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


def pages(
    count: int, size: int = 4096, parent: bytes = b"", shard: ShardSpec = SHARD
) -> list[PageInMemory]:
    random = Random(f"recovery {count} {size}")
    made = []
    for _ in range(count):
        made.append(PageInMemory.random(random, size, parent, shard))
        parent = made[-1].record.key
    return made
