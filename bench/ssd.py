"""How much of a disk's speed is left when pages go through the SSD log, and how fast does it start?

``write/1MiB/interval`` writes pages of 1 MiB with a sync once a second; in ``always`` each group of
pages is synced, while the next one is written. The bound does the same with bare ``pwrite`` and
``pread`` past the page cache, in as many threads, in pieces of one page, with an ``fdatasync`` a
group in ``always``. Pages are read in random order. Digests are on. ``recover/N`` is a start that
finds N pages of 64 KiB, ``recover/N/log`` what of it reads the log.
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

from bench import measure, recovery
from bench.measure import Measured, Progress, Report
from kvstore import mover
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity, page_seeds
from kvstore.state.disk.jobs import DiskDrop, DiskJob, DiskRead, DiskSync, DiskWrite, PageRecord
from kvstore.state.tree.places import FOOTER_TABLE_BYTES, Place, record_bytes
from kvstore.state.tree.slots import Slot
from kvstore.tier.directories import Directory
from kvstore.tier.disk import OSDisk
from kvstore.tier.record import pair_seed
from kvstore.tier.ssd import SSDLog
from kvstore.tier.vectored import aligned

MIB: Final = 1 << 20
SIZE_MIB: Final = 256
GROUP_BYTES: Final = 16 * MIB
"""What is written between two syncs of ``always``."""
SEGMENT_CALLS: Final = 4
"""Calls whose pages a segment holds; one call in so many makes one."""
INTERVAL_S: Final = 1.0
PAIRS: Final = 7
WAIT_S: Final = 60.0
SPACE: Final = SpaceIdentity(model="bench", kv_dtype="uint8", page_tokens=64)
SHARD: Final = ShardSpec(layout=CanonicalLayout(head_dim=128), layers=(0, 1), heads=(0, 1))
CASES: Final = {
    "write/1MiB/interval": MIB,
    "write/8MiB/interval": 8 * MIB,
    "write/1MiB/always": MIB,
    "read/1MiB": MIB,
    "read/8MiB": 8 * MIB,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--directory", type=Path, default=Path(),
                        help="directory on the disk to measure; gets a new folder")  # fmt: skip
    parser.add_argument("--size-mib", type=int, default=SIZE_MIB, help="MiB per call")
    parser.add_argument("--threads", type=int, default=4,
                        help="threads of the log and of its bound")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=5.0, help="minimum duration of each case")
    parser.add_argument("--pages", type=int, action="append", metavar="N",
                        help="pages in the log that is recovered, again for more;"
                        " default: 320,000 and 1,000,000")  # fmt: skip
    parser.add_argument("--cases", type=re.compile, default=re.compile(""), metavar="REGEX",
                        help="run only cases whose name matches")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Measure what is asked for; 2 when that is nothing."""
    recoveries = {f"recover/{count}": count for count in options.pages or recovery.SECONDS_MAX}
    names = [name for name in (*CASES, *recoveries) if options.cases.search(name)]
    if not names:
        sys.stderr.write(f"no case is called so: {options.cases.pattern}\n")
        return 2
    with (
        Report(json=options.json) as report,
        Progress("ssd", len(names)) as progress,
        _folder(options.directory) as folder,
    ):
        for name in names:
            progress.step(name)
            if name not in CASES:
                for result in recovery.measured(name, folder, recoveries[name], progress):
                    report.add(result)
                continue
            with Disks(folder, CASES[name], options.size_mib * MIB, options.threads) as disks:
                case, bound = disks.pair(name)
                taken = measure.interleave(case, bound, pairs=PAIRS, min_seconds=options.seconds)
                report.add(
                    measure.throughput(name, disks.call_bytes, taken, disks.bound_name(name))
                )
                progress.note(disks.remark(name, taken))
    return 0


@contextmanager
def _folder(below: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-ssd-", dir=below))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Disks:
    """A log and a bare file on the same disk, with the same pages.

    Args:
        folder: on the disk; what is made in it stays there until the folder goes.
        page_bytes: of each page.
        call_bytes: what one call moves, rounded down to whole pages.
        threads: of each side.

    Attributes:
        call_bytes: what one call moves.
    """

    def __init__(self, folder: Path, page_bytes: int, call_bytes: int, threads: int) -> None:
        self._count = max(call_bytes // page_bytes, 1)
        self.call_bytes = self._count * page_bytes
        self._page_bytes = page_bytes
        self._group = max(GROUP_BYTES // page_bytes, 1)
        self._threads = threads
        self._random = Random(1)
        memory = aligned(self.call_bytes)
        memory[:] = measure.prefaulted(self.call_bytes).data
        self._pages = [
            memory[index * page_bytes : (index + 1) * page_bytes] for index in range(self._count)
        ]
        base = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        self._addresses = [base + index * page_bytes for index in range(self._count)]
        self._records = self._named()
        self._record_bytes = record_bytes(page_bytes)
        segment_bytes = SEGMENT_CALLS * self._count * self._record_bytes + FOOTER_TABLE_BYTES
        self._path = Path(tempfile.mkdtemp(dir=folder))
        directories = [Directory(self._path, segment_bytes)]
        self._log = SSDLog("bench", directories, segment_bytes, threads=threads)
        self._log.recover()
        self._direct = self._log.stats().directories[0].direct_io
        self._disk = OSDisk()
        self._raw_path = self._path / "raw"
        self._raw: int | None = None
        self._pool = ThreadPoolExecutor(threads)
        self._segment = self._offset = 0
        self._job = 0
        self._synced_at = time.monotonic()

    def __enter__(self) -> "Disks":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._log.close()
        self._renew_raw(make=False)

    def pair(self, name: str) -> tuple[Measured, Measured]:
        """The case of that name and its bound."""
        if name.startswith("read"):
            self._write_pages(sync_groups=False)
            self._renew_raw()
            self._raw_write(sync_groups=False)
            return self.read, self.raw_read
        always = name.endswith("always")
        return lambda: self.write(sync_groups=always), lambda: self.raw_write(sync_groups=always)

    def bound_name(self, name: str) -> str:
        """What the bound is."""
        call = "pread" if name.startswith("read") else "pwrite"
        synced = f", fdatasync every {self._group} pages" if name.endswith("always") else ""
        direct = "O_DIRECT" if self._direct else "buffered (no O_DIRECT here)"
        return f"{direct} {call}, {self._threads} threads{synced}"

    def remark(self, name: str, taken: measure.Interleaved) -> str:
        """How much the figures moved from call to call."""
        spans = []
        for side, spread in (("log", taken.case), ("bare", taken.bound)):
            least, most = (self.call_bytes / it / 1e9 for it in (spread.max, spread.min))
            spans.append(f"{side} {least:.2f}-{most:.2f}")
        return f"{name}: {', '.join(spans)} GB/s over {taken.case.calls} pairs"

    # ---- through the log --------------------------------------------------------------------

    def write(self, *, sync_groups: bool) -> float:
        """Write all pages behind what the segment has; seconds."""
        seconds = self._write_pages(sync_groups=sync_groups)
        self._offset += self._count * self._record_bytes
        if self._offset >= SEGMENT_CALLS * self._count * self._record_bytes:
            self._finish([DiskDrop(self._next_job(), self._segment)])
            self._segment, self._offset = self._segment + 1, 0
        return seconds

    def read(self) -> float:
        """Read all pages in random order; seconds."""
        jobs: list[DiskJob] = [
            DiskRead(self._next_job(), self._place(index), self._records[index], Slot(0), address)
            for index, address in enumerate(self._addresses)
        ]
        self._random.shuffle(jobs)
        start = time.perf_counter()
        self._finish(jobs)
        return time.perf_counter() - start

    def _write_pages(self, *, sync_groups: bool) -> float:
        writes: list[DiskJob] = [
            DiskWrite(self._next_job(), self._place(index), self._records[index], Slot(0), address)
            for index, address in enumerate(self._addresses)
        ]
        start = time.perf_counter()
        if sync_groups:
            for at in range(0, len(writes), self._group):
                # The sync covers the group before, which has ended, while this one is written.
                self._finish([DiskSync(self._next_job()), *writes[at : at + self._group]])
            self._finish([DiskSync(self._next_job())])
        else:
            if start - self._synced_at >= INTERVAL_S:
                writes.append(DiskSync(self._next_job()))
                self._synced_at = start
            self._finish(writes)
        return time.perf_counter() - start

    def _finish(self, jobs: Sequence[DiskJob]) -> None:
        self._log.submit(jobs)
        assert self._log.drain(WAIT_S), f"the disk did not end {len(jobs)} jobs in {WAIT_S} s"
        errors: list[KVStoreError] = [one.error for one in self._log.poll() if one.error]
        if errors:
            raise errors[0]

    def _place(self, index: int) -> Place:
        return Place(self._segment, self._offset + index * self._record_bytes)

    def _next_job(self) -> int:
        self._job += 1
        return self._job

    def _named(self) -> list[PageRecord]:
        keys = self._random.randbytes(32 * self._count)
        seeds = page_seeds(keys, pair_seed(SPACE, SHARD))
        addresses = np.array(self._addresses, dtype=np.uint64)
        digests = mover.digest(addresses, self._page_bytes, seeds)
        return [
            PageRecord(
                PrefixKey(keys[32 * index : 32 * index + 32]), PrefixKey(b""), SPACE, SHARD,
                self._page_bytes, digests[index].tobytes(), bytes(4 * SPACE.page_tokens),
            )
            for index in range(self._count)
        ]  # fmt: skip

    # ---- the bound --------------------------------------------------------------------------

    def raw_write(self, *, sync_groups: bool) -> float:
        """Write all pages to a new file with all of its room; seconds."""
        self._renew_raw()
        return self._raw_write(sync_groups=sync_groups)

    def raw_read(self) -> float:
        """Read all pages in random order; seconds."""
        order = list(range(self._count))
        self._random.shuffle(order)
        start = time.perf_counter()
        list(
            self._pool.map(
                self._read_lane, [order[at :: self._threads] for at in range(self._threads)]
            )
        )
        return time.perf_counter() - start

    def _raw_write(self, *, sync_groups: bool) -> float:
        assert self._raw is not None
        group = self._group if sync_groups else self._count
        start = time.perf_counter()
        for at in range(0, self._count, group):
            order = range(at, min(at + group, self._count))
            list(
                self._pool.map(
                    self._write_lane, [order[one :: self._threads] for one in range(self._threads)]
                )
            )
            if sync_groups:
                self._disk.sync(self._raw)
        return time.perf_counter() - start

    def _lanes(self, order: Sequence[int]) -> list[Sequence[int]]:
        return [order[thread :: self._threads] for thread in range(self._threads)]

    def _write_lane(self, order: Sequence[int]) -> None:
        assert self._raw is not None
        for index in order:
            done = self._disk.write(self._raw, [self._pages[index]], index * self._page_bytes)
            assert done == self._page_bytes

    def _read_lane(self, order: Sequence[int]) -> None:
        assert self._raw is not None
        for index in order:
            done = self._disk.read(self._raw, [self._pages[index]], index * self._page_bytes)
            assert done == self._page_bytes

    def _renew_raw(self, *, make: bool = True) -> None:
        if self._raw is not None:
            self._disk.close(self._raw)
            self._disk.remove(self._raw_path)
            self._disk.sync_directory(self._path)  # or the log's next one pays for it
            self._raw = None
        if make:
            self._raw = self._disk.create(self._raw_path, self.call_bytes, direct=self._direct)
