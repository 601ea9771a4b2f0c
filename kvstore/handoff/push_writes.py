"""Prefill's jobs that another transport carries, and the reports of their ends to decode."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.handoff.effects import PushJob
from kvstore.handoff.memory import HandoffPool, digests_of
from kvstore.handoff.messages import RANGES_BYTES_MAX, RangesWritten
from kvstore.handoff.places import pack_numbers
from kvstore.handoff.staging import Staging
from kvstore.handoff.writing import BlockWrite, BlockWriter

TCP: Final = "tcp"
"""The link itself."""
Slot = npt.NDArray[np.uint8]
"""Memory for the gathered bytes of one job."""
JobEnded = Callable[[PushJob, RangesWritten, str, bool], None]
"""Gets a job, the message for decode on success, why it failed, and whether bytes may still arrive
at decode."""


class PushWrites:
    """The jobs of one manager that another transport carries.

    Args:
        writer: the transport, closed by this object; None = there is none.
        pool: of the engine.
        ended: called for each ended job, by a thread of the transport.

    Attributes:
        transports: through which KV can be pushed, for the registry.
        counts: jobs that were written, and jobs that used the link although decode had announced a
            place, because the transport refused them.
    """

    def __init__(self, writer: BlockWriter | None, pool: HandoffPool, ended: JobEnded) -> None:
        self.transports = [TCP] if writer is None else [TCP, writer.transport]
        self._writer = writer
        self._pool = pool
        self._ended = ended
        self._lock = threading.Lock()
        self._jobs: dict[int, tuple[PushJob, RangesWritten]] = {}
        self._slots: list[Slot] = []  # free ones, for jobs that are gathered
        self._taken: dict[int, Slot] = {}  # of each job
        self.counts = Counter(dict.fromkeys(("written_jobs", "jobs_not_taken"), 0))
        if writer is not None:
            size = max(RANGES_BYTES_MAX, pool.shape.block_bytes)  # of a job at most
            count = len(writer.gather_memory) // size
            self._slots = list(writer.gather_memory[: count * size].reshape(count, size))
            writer.begin(self._written)

    def submit(self, job: PushJob) -> bool:
        """Pass a job to the transport, which reports its end; False = it must use the link."""
        writer, place = self._writer, job.place
        if writer is None or place is None or place.transport != writer.transport:
            return False
        if not job.rows:
            write = self._pool.write_of(job, place)
            return self._takes(write) and self._write(job, write, lambda: self._digests(job), None)
        with self._lock:
            slot = self._slots.pop() if self._slots else None
        if slot is None:
            self.counts["jobs_not_taken"] += 1
            return False
        begun = False
        try:
            staging = Staging(slot)
            places = staging.places([job.share.range_bytes(one) for one in job.ranges])
            write = self._pool.write_of(job, place, places)
            begun = self._takes(write) and self._write(
                job, write, lambda: staging.gather(self._pool, job)[1], slot
            )
        finally:
            if not begun:
                self._free(slot)
        return begun

    def _takes(self, write: BlockWrite) -> bool:
        assert self._writer is not None
        takes = self._writer.takes(write)
        self.counts["jobs_not_taken"] += not takes
        return takes

    def _digests(self, job: PushJob) -> bytes:
        places = self._pool.places(job.ranges, job.sources)
        return digests_of(job.share.seed_of(job.room), job.ranges, places)

    def _write(
        self, job: PushJob, write: BlockWrite, read: Callable[[], bytes], slot: Slot | None
    ) -> bool:
        """Submit a write of which ``read`` gives the digests, and gathers the bytes."""
        assert self._writer is not None
        digests = read()
        if not self._pool.is_unchanged(job):
            return False  # this is found on the link too, and told
        packed = pack_numbers([number for one in job.ranges for number in one])
        with self._lock:
            self._jobs[job.number] = job, RangesWritten(job.room, packed, digests)
            if slot is not None:
                self._taken[job.number] = slot
        try:
            self._writer.submit(write)
        except BaseException:  # it was not begun, and nobody would tell its end
            with self._lock:
                self._jobs.pop(job.number, None)
                self._taken.pop(job.number, None)
            raise
        return True

    def _free(self, slot: Slot) -> None:
        with self._lock:
            self._slots.append(slot)

    def close(self) -> None:
        """Close the transport; it reports the ends of all jobs."""
        if self._writer is not None:
            self._writer.close()

    def _written(self, number: int, why: str, doubtful: bool) -> None:  # noqa: FBT001
        with self._lock:
            job, message = self._jobs.pop(number)
            self.counts["written_jobs"] += not why
            slot = self._taken.pop(number, None)
            if slot is not None:
                self._slots.append(slot)
        self._ended(job, message, why, doubtful)
