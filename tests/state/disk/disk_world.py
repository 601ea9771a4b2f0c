"""A page table with an SSD tier, of which every job ends when a test says so."""

import inspect
from itertools import count
from typing import Any, cast

from kvstore.protocol.errors import TierUnavailable
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import (
    DiskJob,
    DiskRules,
    DiskWrite,
    Durable,
    LeftDisk,
    SyncPolicy,
    WritePolicy,
)
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.invariants import check
from kvstore.state.table.pages import PageTable
from kvstore.state.table.tiers import apply_effects
from kvstore.state.tree.actions import PageStatus
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.sessions import Fetch
from tests.state.world import World, chain, key

IO_ERROR = TierUnavailable("no such disk")


class Applied:
    """A disk side of which each call is followed by what the page table does then.

    Args:
        disk: the disk side.
        table: its page table.
    """

    def __init__(self, disk: DiskPages, table: PageTable) -> None:
        self._disk = disk
        self._table = table

    def __getattr__(self, name: str) -> Any:
        tiers = self._table.tiers
        if name in ("completed", "advance", "go_on", "make_durable", "ensure_written"):
            return getattr(tiers, name)
        found = getattr(self._disk, name)
        if not inspect.ismethod(found) and not type(found).__name__.startswith("builtin"):
            return found

        def called(*arguments: Any) -> Any:
            try:
                return found(*arguments)
            finally:
                apply_effects(self._table.residents)

        return called


class DiskWorld(World):
    """A page table with a disk whose jobs the test ends itself."""

    def __init__(
        self, write: str = "through", sync: str = "always", extents: int = 4, segments: int = 8,
        in_flight_max: int = 1 << 30, segment_bytes: int = 1 << 20, admission: str = "all",
    ) -> None:  # fmt: skip
        super().__init__(extents)
        rules = DiskRules(WritePolicy(write), SyncPolicy(sync), 100, in_flight_max, retry_ns=1000)
        log = SegmentLog(segments, segment_bytes)
        admits = Admission(admission, 0, log.capacity_bytes)
        disk = DiskPages(self.table.residents, log, admits, rules)
        self.table.residents.disk = disk
        self.disk: DiskPages = cast("DiskPages", Applied(disk, self.table))
        self.open: dict[int, DiskJob] = {}
        self.letters = count(0x4E00)
        self.me = self.process()
        self.mine = self.space(self.me)

    def jobs(self, kind: type[DiskJob]) -> list[DiskJob]:
        """Jobs of one kind that have not ended, oldest first."""
        self.open |= {job.job: job for job in self.disk.jobs}
        self.disk.jobs.clear()
        return [job for job in self.open.values() if isinstance(job, kind)]

    def write_of(self, path: str) -> DiskWrite:
        return next(job for job in self.jobs(DiskWrite) if job.page.key == key(path))

    def end_job(
        self, job: DiskJob, error: Exception | None = None, failed: tuple[int, ...] = ()
    ) -> None:
        """``failed``: segments that the job could not sync."""
        del self.open[job.job]
        self.table.tiers.completed(job.job, error, failed=failed)
        check(self.table)

    def end_all(self) -> None:
        while jobs := self.jobs(DiskJob):
            for job in jobs:
                self.end_job(job)

    def lose(self, node: PrefixNode, shard: int) -> None:
        """Pages leave the disk with what follows them, as when their segment is reclaimed."""
        self.table.residents.disk.effects.append(
            LeftDisk(node.space, shard, node.keys, "reclaimed")
        )
        apply_effects(self.table.residents)

    def fetch(self, run: list[PrefixNode], shard: int) -> Fetch:
        """Let the engine wait for a run."""
        size = len(run) * run[0].space.shards[shard].slot_bytes
        fetch = self.table.begin_fetch(self.me, size)
        self.table.room.load(fetch, run, shard)
        return fetch

    def node(self, path: str) -> PrefixNode:
        return self.mine.nodes[key(path)]

    def on_disk(self, path: str) -> list[bool]:
        return [0 in self.mine.nodes[one].disk for one in chain(path)]

    def in_memory(self, path: str) -> list[bool]:
        return [0 in self.mine.nodes[one].slots for one in chain(path)]

    def persist(self, path: str) -> Durable:
        return self.disk.make_durable([self.mine.nodes[one] for one in chain(path)], 0)


def flood(world: DiskWorld, pages: int = 16) -> None:
    """Take all memory for other pages, one chain each."""
    for _ in range(pages):
        path = chr(next(world.letters))
        while world.store(world.me, world.mine, path) != [PageStatus.GRANTED]:
            assert world.disk.busy
            world.end_all()
        world.end_all()
