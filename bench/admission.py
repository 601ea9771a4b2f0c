"""How many bytes need not be written to the SSD, and how many hits does that cost?

Drives the real page table, log and admission, without bytes, over a request trace and by its
clock: pages are stored in memory, written back to disk when they leave it if admission says so,
and loaded again when asked for. Every job ends at once. Bytes count carried records too.

``bytes/L3`` and ``hits/L3`` are those of ``learned`` without a budget; ``curve/L3/budget-N/...`` of
``learned`` with the budget that lets N percent of the bytes of ``all`` be written by the end of the
trace.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench import trace
from bench.measure import Progress, Report, Result
from bench.reclaim import EXTENT_BLOCKS, PAGE_BYTES, block_key
from kvstore.protocol.page import KEY_BYTES, CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.choice.admission import BUCKET_DISK_SHARE, BURST_SHARE, DAY_NS, Admission
from kvstore.state.disk.jobs import DiskRules, SyncPolicy, WritePolicy
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.invariants import check
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.places import footer_bytes, record_bytes
from kvstore.state.tree.sessions import Lease, Peer, Process, Session
from kvstore.state.tree.slots import SlotTable

SEGMENTS: Final = 64
FULL_CURVE: Final = (10, 20, 30, 50, 75)
SHORT_CURVE: Final = (25, 50, 75)
NEVER_NS: Final = 1 << 62
TRIES_MAX: Final = 10_000
_SHARD: Final = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
# One chain is written at a time: who needs its memory waits for it, as behind a slow disk.
_RULES: Final = DiskRules(WritePolicy.BACK, SyncPolicy.NONE, 0, 1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one setting did: bytes written in all, those carried among them, and hits."""

    written: int
    carried: int
    percent: float
    admitted: int
    refused: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--trace", type=Path, required=True,
                        help="trace file; without it, nothing is run")  # fmt: skip
    parser.add_argument("--memory-blocks", type=int, default=1000, help="size of host memory")
    parser.add_argument("--capacity-blocks", default="10000,30000,60000",
                        help="sizes of the SSD tier, comma-separated")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only the first size, and no curve")


def run(options: argparse.Namespace) -> int:
    """Measure every size of the disk."""
    if not options.trace.exists():
        sys.stderr.write(f"skipped: there is no trace at {options.trace}\n")
        return 0
    requests = trace.blocks(options.trace)
    sizes = [int(size) for size in options.capacity_blocks.split(",")]
    curves: list[tuple[int, ...]] = [FULL_CURVE] + [SHORT_CURVE] * (len(sizes) - 1)
    if options.quick:
        sizes, curves = sizes[:1], [()]
    steps = sum(2 + len(curve) for curve in curves)
    with Report(json=options.json) as report, Progress("admission", steps) as progress:
        for blocks, curve in zip(sizes, curves, strict=True):
            measurement = _Measurement(report, progress, requests, (options.memory_blocks, blocks))
            measurement.run(curve)
    return 0


class _Measurement:
    """One size of the disk; all is compared with what ``all`` did there."""

    def __init__(
        self, report: Report, progress: Progress, requests: list[trace.Request],
        sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        self._report = report
        self._progress = progress
        self._requests = requests
        self._sizes = sizes
        self._all: Outcome | None = None

    def run(self, curve: tuple[int, ...]) -> None:
        blocks = self._sizes[1]
        self._all = self._outcome("all", 0)
        self._compare("learned", 0, f"{{}}/{blocks}")
        for percent in curve:
            name = f"budget-{percent}"
            self._compare(name, self._budget(percent), f"curve/{blocks}/{name}/{{}}")

    def _budget(self, percent: int) -> int:
        """Bytes a day: a full bucket at first, and what flows in while the trace lasts."""
        assert self._all is not None
        wanted = self._all.written * percent / 100
        elapsed_ns = 1_000_000 * (self._requests[-1].timestamp - self._requests[0].timestamp)
        days = max(1, elapsed_ns) / DAY_NS
        bucket = a_log(self._sizes[1]).capacity_bytes / BUCKET_DISK_SHARE
        budget = wanted / (1 / BURST_SHARE + days)
        if budget / BURST_SHARE > bucket:
            budget = max(0.0, wanted - bucket) / days
        return max(1, int(budget))

    def _compare(self, name: str, budget: int, case: str) -> None:
        assert self._all is not None
        found, every = self._outcome(name, budget), self._all
        share = 100 * found.written / every.written
        self._report.add(Result(case.format("bytes"), share, "%", "asked for", 25.0, 25 / share))
        ratio = found.percent / every.percent
        hits = Result(case.format("hits"), found.percent, "%", "all", every.percent, ratio)
        self._report.add(hits)

    def _outcome(self, name: str, budget: int) -> Outcome:
        self._progress.step(f"{name}, {self._sizes[1]} blocks")
        kind = name if name == "all" else "learned"
        found = Cache(*self._sizes, kind, budget).replay(self._requests)
        share = 100 * found.written / self._all.written if self._all else 100.0
        self._progress.note(
            f"{name}, {self._sizes[1]} blocks: {share:.1f} % of the bytes, {found.percent:.2f} %"
            f" hits; {found.admitted} pages admitted, {found.refused} refused,"
            f" {100 * found.carried / found.written:.1f} % of what was written was carried"
        )
        return found


def a_log(blocks: int) -> SegmentLog:
    """A log for so many blocks."""
    records = blocks // SEGMENTS
    size = records * record_bytes(PAGE_BYTES) + footer_bytes(records)
    return SegmentLog(SEGMENTS, -(-size // 4096) * 4096)


@dataclass
class Cache:
    """Memory and disk of so many blocks."""

    memory_blocks: int
    disk_blocks: int
    admission: str
    budget_bytes_per_day: int
    hits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        extents = -(-self.memory_blocks // EXTENT_BLOCKS)
        each = -(-self.memory_blocks // extents)
        self.table = PageTable(SlotTable(each * PAGE_BYTES, extents))
        session = Session(b"trace", "trace", 1 << 60)
        self.process = Process(1, Peer(1), session)
        identity = SpaceIdentity(model="trace", kv_dtype="uint8", page_tokens=1)
        self.space, _ = self.table.spaces.open(session, identity, [_SHARD])
        log = a_log(self.disk_blocks)
        admission = Admission(self.admission, self.budget_bytes_per_day, log.capacity_bytes)
        self.disk = self.table.residents.disk = DiskPages(
            self.table.residents, log, admission, _RULES
        )
        self.names = 0

    def replay(self, requests: list[trace.Request]) -> Outcome:
        """Ask for and store every request."""
        for request in requests:
            self.table.moment.now_ns = request.timestamp * 1_000_000
            self.table.tiers.advance(self.table.now_ns)
            self._serve([block_key(block) for block in request.hash_ids])
        check(self.table)
        log, wear = self.disk.log.stats(), self.disk.admission.wear()
        asked = sum(len(request.hash_ids) for request in requests)
        written = log.written_bytes + log.carried_bytes
        percent = 100 * self.hits / asked
        return Outcome(written, log.carried_bytes, percent, wear.admitted, wear.refused)

    def _serve(self, keys: list[PrefixKey]) -> None:
        lease = self._load(keys)
        lease_id = self.names
        self._store(keys, lease)
        self.table.release(self.process, lease_id)
        self.table.actions.clear()
        self.table.fetches.ended.clear()
        self._end_jobs()

    def _load(self, keys: list[PrefixKey]) -> Lease:
        """Bring what is on disk to memory and pin the run."""
        packed = b"".join(keys)
        run = self.table.residents.ready_run(self.space, 0, packed)
        self.hits += len(run)
        fetch, missing = None, -1
        while run and any(0 not in node.slots for node in run):
            before, missing = missing, sum(0 not in node.slots for node in run)
            size = len(run) * self.space.shards[0].slot_bytes
            again = self.table.begin_fetch(self.process, size, fetch)
            self.table.room.fetch(again, self.space, 0, packed[: len(run) * KEY_BYTES])
            self._end_jobs()
            if fetch is not None:
                self.table.end_fetch(self.process, fetch)
            fetch = again
            run = self.table.residents.ready_run(self.space, 0, packed)
            if missing == before:
                break  # memory is too small for the run
        self.names += 1
        leased = self.table.acquire(self.process, self.names, self.space, 0, packed, NEVER_NS)
        if fetch is not None:
            self.table.end_fetch(self.process, fetch)
        return leased.lease

    def _store(self, keys: list[PrefixKey], lease: Lease) -> None:
        """Store what follows the run, as fast as the disk makes room."""
        done = len(lease.slots)
        for _ in range(TRIES_MAX):
            if done == len(keys):
                return
            self.names += 1
            parent = keys[done - 1] if done else PrefixKey(b"")
            rest = b"".join(keys[done:])
            _, put = self.table.begin_put(self.process, self.names, self.space, 0, rest, parent)
            waits = bool(self.disk.jobs)
            self._end_jobs()
            if put.slots:
                digests = bytes(16 * len(put.slots))
                self.table.commit_put(self.process, self.names, digests)
            done += len(put.slots)
            if not put.slots and not waits:
                return  # the prompt is longer than memory, or it is there already

    def _end_jobs(self) -> None:
        while self.disk.jobs or self.disk.busy:
            self.table.tiers.advance(self.table.now_ns)  # the pages of a segment leave in turns
            jobs = list(self.disk.jobs)
            self.disk.jobs.clear()
            for job in jobs:
                self.table.tiers.completed(job.job, None)
