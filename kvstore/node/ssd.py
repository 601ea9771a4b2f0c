"""The SSD tier of one node: passes the state's jobs to the log, and their results back.

The state names slots, the log needs addresses: only this object knows both. It also passes
recovered pages to the state.
"""

import ctypes
import gc
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from kvstore.config import SSDConfig
from kvstore.node.node import Node
from kvstore.protocol.counts import SsdCounts
from kvstore.protocol.errors import KVStoreError
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import (
    DiskCheck,
    DiskJob,
    DiskRead,
    DiskRules,
    DiskWrite,
    SyncPolicy,
    WritePolicy,
)
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.tree.places import HEADER_BYTES
from kvstore.state.tree.slots import Slot
from kvstore.tier.base import Completion
from kvstore.tier.directories import Directory
from kvstore.tier.disk import Disk
from kvstore.tier.host import HostMemory
from kvstore.tier.ssd import SSDLog
from kvstore.tier.vectored import aligned

log = logging.getLogger(__name__)

IN_FLIGHT_BYTES_MAX: Final = 128 << 20
COMPLETIONS_TURN: Final = 32
"""Jobs whose end the node is told of in one turn."""
_NS: Final = 1_000_000_000


class DiskTier:
    """The pages of one node on SSDs.

    Args:
        config: directories, capacity, and write policy.
        node: the node; its page table gets a disk side.
        memory: memory of the slots.
        wake: called from another thread when :meth:`poll` has something to do.
        device: the disk of the directories; None = the machine's.
        tier: the log, not recovered yet; None = create one in ``config``'s directories.
        in_flight_bytes_max: maximum bytes being written at a time.

    Attributes:
        recovered: ``pages``, ``segments`` and ``took_s``, for the log; empty if there were none.

    Raises:
        ConfigError, TierUnavailable: a directory cannot be used; the message names it and says why.
    """

    def __init__(
        self, config: SSDConfig, node: Node, memory: HostMemory, wake: Callable[[], None],
        tier: SSDLog | None = None, device: Disk | None = None,
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:  # fmt: skip
        self._node = node
        self._memory = memory
        self._wake = wake
        self._jobs: dict[int, DiskJob] = {}
        #: What the tier has done, and the node has not been told of.
        self._completions: deque[Completion] = deque()
        #: Job of a DiskCheck → buffer for its page, as long as the disk may write to it.
        self._scratch: dict[int, memoryview] = {}
        places = [Directory(Path(path), config.capacity_bytes) for path in config.directories]
        self._log = tier or SSDLog(node.name, places, config.segment_bytes, wake=wake, disk=device)
        count = config.capacity_bytes // config.segment_bytes * len(places)
        segments = SegmentLog(count, config.segment_bytes)
        rules = DiskRules(
            WritePolicy(config.write), SyncPolicy(config.sync),
            int(config.sync_interval_s * _NS), in_flight_bytes_max,
        )  # fmt: skip
        admission = Admission(config.admission, config.bytes_per_day_max, segments.capacity_bytes)
        self.pages = node.pages.residents.disk = DiskPages(
            node.pages.residents, segments, admission, rules
        )
        self.recovery_s = 0.0
        self.recovered: dict[str, float] = {}
        self._recover()

    def _recover(self) -> None:
        assert not self._jobs
        start = monotonic()
        try:
            found = self._log.recover()
        except KVStoreError:
            self._log.close()
            raise
        pages_of = found.fitting()
        segments = [
            FoundSegment(
                one.number,
                one.size_bytes,
                one.sealed,
                one.end,
                one.records,
                pages["key"].tobytes(),
                pages["parent"].tobytes(),
                pages["digest"].tobytes(),
                pages["offset"].copy(),
                pages["pair"].copy(),
                one.first_page,
                one.last_tombstone,
            )
            for one, pages in zip(found.segments, pages_of, strict=True)
        ]
        left_out = sum(len(one.entries) for one in found.segments) - sum(map(len, pages_of))
        assert left_out >= 0
        if left_out:
            self._node.pages.counts["recovery_refused_records"] += left_out
            log.error("%d records do not have the size of their shard's pages: ignored", left_out)
        self.pages.log.capacity_bytes = self._log.capacity_bytes
        collecting = gc.isenabled()
        gc.disable()  # it would walk over all the nodes again and again
        try:
            pages = adopt(self._node.pages, segments, list(found.pairs), found.next_segment)
        finally:
            if collecting:
                gc.enable()
        self.recovery_s = monotonic() - start
        if found.segments:
            self.recovered = {
                "pages": pages, "segments": len(found.segments), "took_s": self.recovery_s,
            }  # fmt: skip

    # ---- jobs -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Submit pending jobs to the tier, as many as it accepts."""
        self._node.pages.tiers.go_on()
        if not self.pages.jobs:
            return
        held: list[DiskJob] = []
        if self._memory.missing_bytes():
            held = [job for job in self.pages.jobs if self._waits(job)]
            self.pages.jobs[:] = [job for job in self.pages.jobs if not self._waits(job)]
        jobs = self.pages.jobs[: self._log.room]
        self.pages.jobs[: len(jobs)] = held
        made: list[DiskJob] = []
        for job in jobs:
            assert job.job not in self._jobs
            self._jobs[job.job] = job
            try:
                self._set_address(job)
                made.append(job)
            except KVStoreError as error:  # an error of this job's memory; the others continue
                self._end(Completion(job.job, error), self._node.pages.now_ns)
        try:
            self._log.submit(made)
        except KVStoreError as error:
            for one in made:
                self._end(Completion(one.job, error), self._node.pages.now_ns)

    def poll(self, now_ns: int) -> None:
        """Pass completed jobs to the node, and ask for another call if more are left."""
        self._completions.extend(self._log.poll())
        for left in reversed(range(min(COMPLETIONS_TURN, len(self._completions)))):
            self._end(self._completions.popleft(), now_ns, last=not left)
        if self.behind:
            self._wake()

    @property
    def behind(self) -> bool:
        """Whether completions are left for the next :meth:`poll`."""
        return bool(self._completions)

    def drain(self, timeout_s: float) -> bool:
        """Wait until the tier is idle; returns False on timeout."""
        return self._log.drain(timeout_s)

    def close(self) -> None:
        """End jobs in progress within a limited time, and unlock the directories."""
        self._log.close()

    def forked(self) -> None:
        """In a forked child: the tier belongs to the parent."""
        self._log.forked()

    def stats(self) -> SsdCounts:
        """Content and counts of the tier."""
        return self.pages.stats(self._log.stats(), self.recovery_s)

    def _end(self, ended: Completion, now_ns: int, *, last: bool = True) -> None:
        job, error = ended.job, ended.error
        del self._jobs[job]
        self._scratch.pop(job, None)
        if error is not None:  # logged once while it lasts; all are counted
            level = logging.DEBUG if self.pages.degraded else logging.WARNING
            log.log(level, "the SSD tier: %s: %s", error.code, error)
        self._node.disk_completed(job, error, now_ns, ended.tokens, ended.failed, last=last)

    def _waits(self, job: DiskJob) -> bool:
        """Whether a page's target memory is still being created."""
        if not isinstance(job, DiskRead):
            return False
        extent, _, _ = self._node.pages.slots.address(job.slot)
        return self._memory.pending(extent)

    def _set_address(self, job: DiskJob) -> None:
        """Set where the bytes of a job's page are; a check reads into a temporary buffer."""
        if isinstance(job, DiskWrite | DiskRead):
            job.address = self._address(job.slot)
        elif isinstance(job, DiskCheck):
            assert job.job not in self._scratch, "the disk still writes to that one"
            memory = self._scratch[job.job] = aligned(job.page.length - HEADER_BYTES)
            job.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def _address(self, slot: Slot) -> int:
        extent, _, offset = self._node.pages.slots.address(slot)
        return self._memory.address(extent) + offset
