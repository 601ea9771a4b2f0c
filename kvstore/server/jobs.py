"""Jobs of operators with progress: verifying, evicting, moving."""

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final, Literal

from kvstore.process.logs import audit
from kvstore.server.answers import JobFault, JobRow, Value
from kvstore.server.channel import Caller
from kvstore.server.refusal import Refusal
from kvstore.server.turns import Turns, Work

log = logging.getLogger(__name__)

RUNNING_MAX: Final = 4
KEPT_MAX: Final = 256


class OperatorJob:
    """One job.

    Attributes:
        number: number of the job on this node.
        done: completed steps of ``total`` (an estimate, because pages may change meanwhile).
        result: its results; plain values.
        pages: number of pages that it has dropped, checked or moved.
        cancelled: whether the work should stop; checked between its steps.
    """

    def __init__(self, number: int, kind: str, subject: dict[str, Value], by: Caller) -> None:
        self.number = number
        self.kind = kind
        self.state: Literal["running", "done", "failed", "cancelled"] = "running"
        self.done = 0
        self.total = 0
        self.result: dict[str, Value] = {}
        self.pages = 0
        self.cancelled = False
        self._subject = subject
        self._by = by
        self._fault: JobFault | None = None
        self._started = monotonic()
        self._ended = 0.0

    def end(self, refusal: Refusal | None) -> None:
        """The work has ended."""
        self._ended = monotonic()
        if refusal is not None:
            self.state = "failed"
            self._fault = JobFault(code=refusal.code, message=str(refusal))
        else:
            self.state = "cancelled" if self.cancelled else "done"
        failed = {"code": refusal.code, "why": str(refusal)} if refusal is not None else {}
        audit(
            log, "job ended", job=self.number, kind=self.kind, role=self._by.role,
            address=self._by.address, state=self.state, pages=self.pages, result=self.result,
            **failed,
        )  # fmt: skip

    def shown(self) -> JobRow:
        """The present state of the job."""
        return JobRow(
            job=self.number, kind=self.kind, subject=self._subject, state=self.state,
            done=self.done, total=max(self.total, self.done), result=dict(self.result),
            error=self._fault, seconds=(self._ended or monotonic()) - self._started,
        )  # fmt: skip


class Jobs:
    """The jobs of one node: a few running ones, and the last ended ones.

    Args:
        turns: runs the jobs.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._jobs: dict[int, OperatorJob] = {}
        self._number = 0

    def refuse_if_full(self) -> None:
        """Refuse a new job if too many run.

        Raises:
            Refusal: 409, too many jobs run.
        """
        if sum(job.state == "running" for job in self._jobs.values()) >= RUNNING_MAX:
            message = f"{RUNNING_MAX} jobs run already; wait for one or cancel it"
            raise Refusal(409, "busy", message)

    def start(
        self,
        kind: str,
        subject: dict[str, Value],
        by: Caller,
        work: Callable[[OperatorJob], Work[None]],
    ) -> JobRow:
        """Start a job.

        Args:
            kind: name of the work.
            subject: its arguments.
            by: the client, for the log.
            work: the work.

        Raises:
            Refusal: 409, too many jobs run; nothing was done.
        """
        self.refuse_if_full()
        self._number += 1
        job = OperatorJob(self._number, kind, subject, by)
        over = [number for number, one in self._jobs.items() if one.state != "running"]
        for number in over[: max(0, len(self._jobs) - KEPT_MAX + 1)]:
            del self._jobs[number]
        self._jobs[job.number] = job
        shown = job.shown()
        self._turns.start(work(job), lambda end: job.end(end), f"the job {kind}")
        return shown

    def get(self, number: int) -> OperatorJob:
        """A running or recent job.

        Raises:
            Refusal: 404, the number is unknown.
        """
        job = self._jobs.get(number)
        if job is None:
            message = f"{number} does not exist; the last {KEPT_MAX} are remembered"
            raise Refusal(404, "not_found", message, "job")
        return job

    def all(self) -> list[JobRow]:
        """All known jobs, newest first."""
        return [job.shown() for job in reversed(self._jobs.values())]
