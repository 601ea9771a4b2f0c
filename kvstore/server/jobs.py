"""What an operator starts and that takes a while: verifying, evicting, moving. With progress."""

import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from kvstore.errors import KVStoreError
from kvstore.server.api import ApiError

log = logging.getLogger(__name__)

RUNNING_MAX: Final = 4
KEPT_MAX: Final = 256
_STOP_TIMEOUT_S: Final = 10.0


class Job:
    """One piece of an operator's work in a thread of its own.

    Attributes:
        number: names the job on this node.
        done: steps that are done, of ``total`` (an estimate while pages come and go).
        result: what it found; plain values.
    """

    def __init__(self, number: int, kind: str, subject: dict[str, Any]) -> None:
        self.number = number
        self.kind = kind
        self.state = "running"
        self.done = 0
        self.total = 0
        self.result: dict[str, Any] = {}
        self._subject = subject
        self._error: dict[str, str] | None = None
        self._started = monotonic()
        self._ended = 0.0
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether the work should end; it looks between its turns."""
        return self._cancelled.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, but not when the job is cancelled meanwhile."""
        self._cancelled.wait(seconds)

    def cancel(self) -> None:
        """Ask the work to end."""
        self._cancelled.set()

    def run(self, work: Callable[["Job"], None]) -> None:
        """Do the work and say how it ended."""
        state = "failed"
        try:
            work(self)
            state = "cancelled" if self.cancelled else "done"
        except (KVStoreError, ApiError) as error:
            self._error = {"code": error.code, "message": str(error)}
            log.warning("job %d (%s) failed: %s", self.number, self.kind, error)
        finally:
            if state == "failed" and self._error is None:
                self._error = {"code": "internal", "message": "see the node's log"}
            self._ended = monotonic()
            self.state = state

    def shown(self) -> dict[str, Any]:
        """The job as plain values."""
        return {
            "job": self.number,
            "kind": self.kind,
            "subject": self._subject,
            "state": self.state,
            "done": self.done,
            "total": max(self.total, self.done),
            "result": dict(self.result),
            "error": self._error,
            "seconds": (self._ended or monotonic()) - self._started,
        }


class Jobs:
    """The jobs of one node: a few that run, and the last ones that ended."""

    def __init__(self) -> None:
        """Start with none."""
        self._jobs: dict[int, Job] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._number = 0
        #: Protects the three above.
        self._lock = threading.Lock()

    def start(
        self,
        kind: str,
        subject: dict[str, Any],
        work: Callable[[Job], None],
        first: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Begin a job; returns it as plain values.

        Args:
            kind: names the work.
            subject: what it is about; plain values.
            work: what a thread of its own does.
            first: what is done at once, if there is room for the job; when it raises none begins.

        Raises:
            ApiError: 409, too many run already; nothing was done.
        """
        with self._lock:
            self._threads = {n: thread for n, thread in self._threads.items() if thread.is_alive()}
            if len(self._threads) >= RUNNING_MAX:
                raise ApiError(
                    409, "busy", f"{RUNNING_MAX} jobs run already; wait for one or cancel it"
                )
            first()
            self._number += 1
            job = Job(self._number, kind, subject)
            ended = [number for number, one in self._jobs.items() if one.state != "running"]
            for number in ended[: max(0, len(self._jobs) - KEPT_MAX + 1)]:
                del self._jobs[number]
            self._jobs[job.number] = job
            thread = threading.Thread(target=job.run, args=(work,), name=f"kvstore-job-{kind}")
            self._threads[job.number] = thread
            thread.start()
        return job.shown()

    def get(self, number: int) -> Job:
        """A job that runs or that ended not long ago.

        Raises:
            ApiError: 404, there is none of that number.
        """
        with self._lock:
            job = self._jobs.get(number)
        if job is None:
            message = f"{number} does not exist; the last {KEPT_MAX} are remembered"
            raise ApiError(404, "not_found", message, "job")
        return job

    def all(self) -> list[dict[str, Any]]:
        """All jobs that are remembered, the newest first."""
        with self._lock:
            jobs = list(self._jobs.values())
        return [job.shown() for job in reversed(jobs)]

    def stop(self) -> None:
        """Cancel what runs and wait for it, but not for ever."""
        with self._lock:
            threads = list(self._threads.values())
            for job in self._jobs.values():
                job.cancel()
        for thread in threads:
            thread.join(_STOP_TIMEOUT_S)
