"""What does reclaiming disk space by whole segments cost in writes and in hits?

Drives the real page table and the real log, without bytes, over a request trace: every block that
is not on disk is written. ``wa/BLOCKS`` is bytes written for each byte stored; ``hit-loss/BLOCKS``
how many points of prefix hits are lost against leaf-first LRU of the same capacity.
"""

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import trace
from bench.measure import Progress, Report, Result
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import DiskRules, SyncPolicy, WritePolicy
from kvstore.state.disk.log import LogStats, SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.invariants import check
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.places import footer_bytes, record_bytes
from kvstore.state.tree.sessions import Peer, Process, Session
from kvstore.state.tree.slots import SlotTable

PAGE_BYTES: Final = 4096
MEMORY_BLOCKS: Final = 4096
EXTENT_BLOCKS: Final = 256
_SHARD: Final = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
_RULES: Final = DiskRules(WritePolicy.THROUGH, SyncPolicy.NONE, 0, 1 << 60)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--trace", type=Path, required=True,
                        help="trace file; without it, nothing is run")  # fmt: skip
    parser.add_argument("--capacity-blocks", default="10000,30000",
                        help="disk sizes, comma-separated")  # fmt: skip
    parser.add_argument("--segments", type=int, default=64, help="number of segments on the disk")


def run(options: argparse.Namespace) -> int:
    """Measure every capacity."""
    if not options.trace.exists():
        sys.stderr.write(f"skipped: there is no trace at {options.trace}\n")
        return 0
    requests = [request.hash_ids for request in trace.blocks(options.trace)]
    sizes = [int(size) for size in options.capacity_blocks.split(",")]
    with (
        Report(json=options.json) as report,
        Progress("reclaim", 2 * len(sizes)) as progress,
    ):
        for blocks in sizes:
            progress.step(f"{blocks} blocks, leaf-first LRU")
            best = Cache(memory_blocks=blocks).replay(requests)
            progress.step(f"{blocks} blocks, {options.segments} segments")
            cache = Cache(MEMORY_BLOCKS, blocks, options.segments)
            percent = cache.replay(requests)
            log = cache.log_stats()
            wa = log.write_amplification
            report.add(Result(f"wa/{blocks}", wa, "x", "nothing written twice", 1.0, 1 / wa))
            loss, bound = best - percent, "points of leaf-first LRU"
            report.add(Result(f"hit-loss/{blocks}", loss, "points", bound, best, percent / best))
            progress.note(
                f"{blocks} blocks: {percent:.2f} % hits on disk, leaf-first LRU {best:.2f} %;"
                f" dead bytes on disk {100 * log.dead_bytes / log.used_bytes:.1f} % of"
                f" {log.segments} segments, {log.reclaimed_segments} reclaimed,"
                f" unreachable pages {cache.unreachable()}"
            )
    return 0


def block_key(block: int) -> PrefixKey:
    """The key of a block of a trace."""
    return PrefixKey(hashlib.sha256(block.to_bytes(8, "little")).digest())


@dataclass
class Cache:
    """One page table, with a disk when ``disk_blocks`` is not 0."""

    memory_blocks: int
    disk_blocks: int = 0
    segments: int = 0

    def __post_init__(self) -> None:
        extents = -(-self.memory_blocks // EXTENT_BLOCKS)
        each = -(-self.memory_blocks // extents)
        self.table = PageTable(SlotTable(each * PAGE_BYTES, extents))
        session = Session(b"trace", "trace", 1 << 60)
        self.process = Process(1, Peer(1), session)
        identity = SpaceIdentity(model="trace", kv_dtype="uint8", page_tokens=1)
        self.space, _ = self.table.spaces.open(session, identity, [_SHARD])
        self.names = 0
        self.hits = 0
        if self.disk_blocks:
            records = self.disk_blocks // self.segments
            size = records * record_bytes(PAGE_BYTES) + footer_bytes(records)
            log = SegmentLog(self.segments, -(-size // 4096) * 4096)
            self.table.residents.disk = DiskPages(
                self.table.residents, log, Admission("all", 0, log.capacity_bytes), _RULES
            )

    def replay(self, requests: list[list[int]]) -> float:
        """Ask for and store every request; the share of blocks that were prefix hits, percent."""
        for request in requests:
            self._serve([block_key(block) for block in request])
        check(self.table)
        return 100 * self.hits / sum(map(len, requests))

    def log_stats(self) -> LogStats:
        """Of the disk."""
        return self.table.disk.log.stats()

    def unreachable(self) -> int:
        """Pages in the index whose head is not on disk though they are."""
        nodes = self.space.nodes.values()
        return sum(
            bool(at.disk)
            and at.parent is not self.space.root
            and not (at.parent and at.parent.disk)
            for at in nodes
        )

    def _serve(self, keys: list[PrefixKey]) -> None:
        run = self.table.residents.ready_run(self.space, 0, b"".join(keys))
        if self.table.disk.exists:
            run = run[: next((i for i, node in enumerate(run) if not node.disk), len(run))]
        self.hits += len(run)
        self.table.moment.tick += 1
        for node in run:
            node.access = self.table.moment.tick
        self.names += 1
        _, put = self.table.begin_put(
            self.process, self.names, self.space, 0, b"".join(keys), PrefixKey(b"")
        )
        if put.slots:
            digests = bytes(16 * len(put.slots))
            self.table.commit_put(self.process, self.names, digests)
        self.table.actions.clear()
        self._end_jobs()

    def _end_jobs(self) -> None:
        disk = self.table.disk
        while disk.jobs or disk.busy:
            self.table.tiers.advance(0)  # the pages of a segment leave in turns
            jobs = list(disk.jobs)
            disk.jobs.clear()
            for job in jobs:
                self.table.tiers.completed(job.job, None)
