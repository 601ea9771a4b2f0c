"""How long a node's SSD log takes to start: cases ``recover/N`` of ``python -m bench ssd``.

``recover/N/log`` is the part of it in which the log is read, until the index is built; its bound is
the time in which some thread waited for the disk. The log is made of footers alone: files of full
size whose payloads are holes, so that 64 GB take little of the disk. The last segment is unsealed
and full, as a killed process leaves it, and its pages are really there: they are read and digested.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

from bench.measure import Progress, Result
from kvstore import mover
from kvstore.config import SSDConfig
from kvstore.node.describe import core
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import DiskTier
from kvstore.protocol.page import (
    CanonicalLayout,
    PrefixKey,
    ShardSpec,
    SpaceIdentity,
    pack_pair,
    page_seeds,
)
from kvstore.state.disk.jobs import DiskWrite, PageRecord
from kvstore.state.tree.places import Place, footer_bytes, record_bytes
from kvstore.state.tree.slots import Slot, SlotTable
from kvstore.tier.directories import Directory
from kvstore.tier.disk import Buffer, FileSystem, OSDisk
from kvstore.tier.host import HostMemory
from kvstore.tier.record import ENTRY, Kind, encode_footer, pair_seed, segment_name
from kvstore.tier.recovery import RecoveredLog
from kvstore.tier.ssd import SSDLog
from kvstore.tier.vectored import aligned

SECONDS_MAX: Final = {320_000: 2.0, 1_000_000: 1.5}
"""What a start with so many pages may take, the index of all pages included; 320,000 are 20 GB."""
SECONDS_MAX_OTHER: Final = 2.0
PAGE_BYTES: Final = 64 << 10
SEGMENT_BYTES: Final = 256 << 20
RUNS: Final = 5
WAIT_S: Final = 60.0
SPACE: Final = SpaceIdentity(model="bench", kv_dtype="uint8", page_tokens=64)
SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 4), heads=(0, 1))


class Start(NamedTuple):
    """Seconds of one start.

    Attributes:
        all: of it.
        log: until the log was read.
        disk: in which some thread waited for the disk.
    """

    all: float
    log: float
    disk: float


def measured(name: str, folder: Path, pages: int, progress: Progress) -> list[Result]:
    """Make such a log in ``folder`` and start on it a few times; the medians in seconds."""
    assert SHARD.page_bytes(SPACE) == PAGE_BYTES
    path = folder / name.replace("/", "-")
    make(path, pages)
    # Each start in a process of its own, as a node's is: none finds memory the last one touched.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        starts = [pool.apply_async(start, (path, pages)).get(WAIT_S) for _ in range(RUNS)]
    seconds = [one.all for one in starts]
    progress.note(
        f"{name}: {min(seconds):.3f}-{max(seconds):.3f} s in {RUNS} starts; core={core()}"
    )
    value, log_s, disk_s = (statistics.median(part) for part in zip(*starts, strict=True))
    asked = SECONDS_MAX.get(pages, SECONDS_MAX_OTHER)
    return [
        Result(name, value, "s", "longest start", asked, asked / value),
        Result(f"{name}/log", log_s, "s", "waits for the disk", disk_s, disk_s / log_s),
    ]


def start(path: Path, pages: int) -> Start:
    """Open the log, find all of its pages and put them into an index."""
    limits = NodeLimits(session_quota_bytes=1 << 20, lease_ms_max=1000)
    node = Node("bench", bytes(16), SlotTable(1 << 20, 1), limits, lambda: bytes(16))
    memory = HostMemory("bench", bytes(16), 1 << 20, prefault=False)
    config = SSDConfig(
        directories=(str(path.absolute()),), capacity_bytes=1 << 50, segment_bytes=SEGMENT_BYTES
    )
    disk = WatchedDisk()
    begun = time.perf_counter()
    log = TimedLog("bench", [Directory(path, 1 << 50)], SEGMENT_BYTES, disk=disk)
    tier = DiskTier(config, node, memory, lambda: None, tier=log)
    seconds = time.perf_counter() - begun
    tier.close()
    memory.close()
    assert sum(len(space.nodes) for space in node.pages.spaces) == pages
    return Start(seconds, log.recovered_at - begun, disk.seconds)


def make(path: Path, pages: int) -> None:
    """Make the log."""
    log = _opened(path)
    log.recover()
    random = np.random.default_rng(1)
    each = 1
    while each * record_bytes(PAGE_BYTES) + footer_bytes(each) <= SEGMENT_BYTES:
        each += 1
    each -= 1
    unsealed = min(each, pages)
    sealed, number = pages - unsealed, 0
    while sealed:
        count = min(each, sealed)
        _write_footer(path, log.log_id, number, _entries(count, 1 + number * each, random))
        sealed -= count
        number += 1
    log.close()
    log = _opened(path)
    log.recover()
    _write_pages(log, number, unsealed, random)
    log.close()


def _opened(path: Path) -> SSDLog:
    return SSDLog("bench", [Directory(path, 1 << 50)], SEGMENT_BYTES, disk=SparseDisk())


class SparseDisk(OSDisk):
    """This machine's disk, as if it had room for all that its files leave out."""

    def file_system(self, path: Path) -> FileSystem:
        return super().file_system(path)._replace(total_bytes=1 << 60, free_bytes=1 << 60)


class WatchedDisk(SparseDisk):
    """The same, and knows how long somebody waited for it.

    Attributes:
        seconds: in which one thread did, or more.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._lock = Lock()
        self._waiting = 0
        self._since = 0.0

    def read(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self._watched():
            return super().read(descriptor, buffers, offset)

    def sync(self, descriptor: int) -> None:
        with self._watched():
            super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        with self._watched():
            super().sync_directory(path)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
            if self._waiting == 1:
                self._since = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self.seconds += time.perf_counter() - self._since


class TimedLog(SSDLog):
    """A log that notes when it was read.

    Attributes:
        recovered_at: the time.
    """

    recovered_at = 0.0

    def recover(self) -> RecoveredLog:
        found = super().recover()
        self.recovered_at = time.perf_counter()
        return found


def _entries(count: int, sequence: int, random: np.random.Generator) -> bytes:
    """Footer entries of one chain of pages."""
    entries = np.zeros(count, dtype=ENTRY)
    keys = np.frombuffer(random.bytes(32 * count), dtype="V32")
    entries["key"] = keys
    entries["parent"][1:] = keys[:-1]
    entries["flags"][1:] = 1
    entries["digest"] = np.frombuffer(random.bytes(16 * count), dtype="V16")
    entries["sequence"] = sequence + np.arange(count)
    entries["offset"] = np.arange(count) * record_bytes(PAGE_BYTES)
    entries["payload_bytes"] = PAGE_BYTES
    entries["kind"] = Kind.PAGE
    return entries.tobytes()


def _write_footer(path: Path, log_id: bytes, number: int, entries: bytes) -> None:
    count = len(entries) // ENTRY.itemsize
    pairs = [pack_pair(SPACE, SHARD)]
    footer = encode_footer(log_id, number, entries, pairs, count * record_bytes(PAGE_BYTES))
    with (path / segment_name(number)).open("wb") as file:
        file.truncate(SEGMENT_BYTES)
        file.seek(SEGMENT_BYTES - len(footer))
        file.write(footer)


def _write_pages(log: SSDLog, number: int, count: int, random: np.random.Generator) -> None:
    """Fill a segment with pages and leave it unsealed."""
    memory = aligned(PAGE_BYTES)
    memory[:] = random.bytes(PAGE_BYTES)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    keys = random.bytes(32 * count)
    seeds = page_seeds(keys, pair_seed(SPACE, SHARD))
    digests = mover.digest(np.full(count, address, np.uint64), PAGE_BYTES, seeds)
    jobs = [
        DiskWrite(
            index,
            Place(number, index * record_bytes(PAGE_BYTES)),
            PageRecord(
                PrefixKey(keys[32 * index : 32 * index + 32]), PrefixKey(b""), SPACE, SHARD,
                PAGE_BYTES, digests[index].tobytes(),
            ),
            Slot(0),
            address,
        )
        for index in range(count)
    ]  # fmt: skip
    log.submit(jobs)
    assert log.drain(WAIT_S), "the disk is too slow to make the log"
    assert not any(one.error for one in log.poll())
