"""Reports how each job of a push ended, for an engine's logs; off by default."""

import time
from collections.abc import Callable
from typing import NamedTuple

from kvstore.handoff.effects import PushJob
from kvstore.handoff.states import HandoffFailure


class EndedJob(NamedTuple):
    """A submitted job that has ended.

    Attributes:
        room: of the request.
        rank: of prefill.
        sizes: bytes of each range.
        transport: the transport that was used.
        seconds: from its submission to its end.
        code: why not all was sent; empty = it was.
    """

    room: int
    rank: int
    sizes: list[int]
    transport: str
    seconds: float
    code: str


JobObserver = Callable[[EndedJob], None]
"""Called for each job by the thread that ends it, perhaps under a lock: it must not wait, or
raise."""


class JobWatch:
    """Reports the ends of jobs to an observer.

    Args:
        rank: of prefill.

    Attributes:
        observe: the observer; None = there is none.
    """

    def __init__(self, rank: int) -> None:
        self.observe: JobObserver | None = None
        self._rank = rank
        self._since: dict[int, float] = {}

    def submitted(self, job: PushJob) -> None:
        """A job waits for its link."""
        if self.observe is not None:
            self._since[job.number] = time.monotonic()

    def ended(self, job: PushJob, failure: HandoffFailure | None, transport: str) -> None:
        """A submitted job has ended, or will not start."""
        if self.observe is None:
            return
        seconds = time.monotonic() - self._since.pop(job.number)
        sizes = [job.share.range_bytes(place) for place in job.ranges]
        code = failure.code if failure is not None else ""
        self.observe(EndedJob(job.room, self._rank, sizes, transport, seconds, code))
