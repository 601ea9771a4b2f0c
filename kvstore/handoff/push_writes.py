"""Prefill's jobs that another transport carries: which, and what decode is told of their ends."""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvstore.handoff.effects import PushJob
from kvstore.handoff.memory import HandoffPool, digests_of
from kvstore.handoff.messages import RangesWritten
from kvstore.handoff.places import pack_numbers
from kvstore.handoff.writing import BlockWriter

TCP: Final = "tcp"
"""The link itself."""
JobEnded = Callable[[PushJob, RangesWritten, str], None]
"""Gets a job, what decode is told if it went well, and why it did not."""


class PushWrites:
    """The jobs of one manager that another transport has.

    Args:
        writer: the transport; None = there is none. This closes it.
        pool: of the engine.
        ended: told the end of each job, by a thread of the transport.

    Attributes:
        transports: by which KV can be pushed, for the registry.
        counts: jobs that were written, and jobs that went over the link although decode had
            announced a place, because the transport did not take them.
    """

    def __init__(self, writer: BlockWriter | None, pool: HandoffPool, ended: JobEnded) -> None:
        self.transports = [TCP] if writer is None else [TCP, writer.transport]
        self._writer = writer
        self._pool = pool
        self._ended = ended
        self._lock = threading.Lock()
        self._jobs: dict[int, tuple[PushJob, RangesWritten]] = {}
        self.counts = Counter(dict.fromkeys(("written_jobs", "jobs_not_taken"), 0))
        if writer is not None:
            writer.begin(self._written)

    def submit(self, job: PushJob) -> bool:
        """Give a job to the transport, which tells its end; False = it goes over the link."""
        writer, place = self._writer, job.place
        if writer is None or place is None or place.transport != writer.transport:
            return False
        write = self._pool.write_of(job, place)
        if not writer.takes(write):
            self.counts["jobs_not_taken"] += 1
            return False
        digests = digests_of(
            job.share.seed_of(job.room), job.ranges, self._pool.places(job.ranges, job.sources)
        )
        if not self._pool.is_unchanged(job):
            return False  # this is found on the link too, and told
        packed = pack_numbers([number for one in job.ranges for number in one])
        with self._lock:
            self._jobs[job.number] = job, RangesWritten(job.room, packed, digests)
        writer.submit(write)
        return True

    def close(self) -> None:
        """Close the transport; it tells the ends of all jobs."""
        if self._writer is not None:
            self._writer.close()

    def _written(self, number: int, why: str) -> None:
        with self._lock:
            job, message = self._jobs.pop(number)
            self.counts["written_jobs"] += not why
        self._ended(job, message, why)
