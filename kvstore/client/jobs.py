"""Background jobs of a store: submitted by an engine's step, waited for with deadlines."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from kvstore.client import forks
from kvstore.client.results import RestoreResult
from kvstore.mover import Progress
from kvstore.protocol.errors import CapacityError, KVStoreError, PeerUnreachable, TransferTimeout

if TYPE_CHECKING:
    from kvstore.client.device import BlocksOnDevice

log = logging.getLogger(__name__)

T = TypeVar("T")

QUEUE_MAX: Final = 1024
_JOIN_TIMEOUT_S: Final = 60.0
_IDLE_S: Final = 60.0


class MustWaitError(Exception):
    """The rest of a job waits for a disk or for other nodes.

    The job continues at the worker for such jobs.
    """


class Worker:
    """Runs jobs, which start in the order of submission; its threads start when they are needed.

    Args:
        name: name of its threads.
        threads: maximum jobs at a time.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name = name
        self._threads_max = threads
        self._closed = False
        self._begin_empty()
        forks.register(self)

    def _begin_empty(self) -> None:
        #: Protects the fields below; notified when there is a job, or when the worker is closed.
        self._changed = threading.Condition()
        self._waiting: deque[Job[Any]] = deque()
        self._running: dict[Job[Any], None] = {}
        self._threads: list[threading.Thread] = []

    def submit(self, job: "Job[Any]") -> None:
        """Queue a job.

        Raises:
            CapacityError: too many jobs are queued, no thread is available, or the store is closed.
        """
        with self._changed:
            if self._closed:
                raise CapacityError("the store is closed")
            if len(self._waiting) >= QUEUE_MAX:
                raise CapacityError(f"{QUEUE_MAX} jobs are queued already")
            busy = len(self._running) + len(self._waiting)
            if busy >= len(self._threads) < self._threads_max:
                self._start()
            self._waiting.append(job)
            self._changed.notify()

    def _start(self) -> None:
        """Start one more thread; without the first one, no job can run."""
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise CapacityError(f"no thread available: {error}") from error
            return
        self._threads.append(thread)

    def close(self) -> None:
        """Accept no more jobs; wait for submitted ones to end, for a limited time."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = monotonic() + _JOIN_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, deadline - monotonic()))
        if any(thread.is_alive() for thread in threads):
            log.error("%s: a job is still running after %s s", self._name, _JOIN_TIMEOUT_S)

    def forked(self) -> None:
        """In a forked child: the parent runs submitted jobs; here they have failed."""
        inherited = [*self._waiting, *self._running]
        self._begin_empty()
        for job in inherited:
            job.forked()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait(_IDLE_S)
                job = self._waiting.popleft()
                self._running[job] = None
            job.run()
            with self._changed:
                self._running.pop(job, None)


class Job(Generic[T]):
    """One submitted copy. It is queued when it is created; if the queue is full, it has failed.

    Args:
        worker: runs it.
        run: does it. It may raise :class:`MustWaitError` if there is a ``slow`` worker, and is
            then called again there.
        slow: the worker for jobs that wait for a disk or for other nodes; None = the job goes on at
            ``worker``.
        blocks: the job's blocks on a device. It has not ended before the device is done with them,
            even if it has failed.
    """

    def __init__(
        self, worker: Worker, run: Callable[[], T], slow: Worker | None = None,
        blocks: "BlocksOnDevice | None" = None,
    ) -> None:  # fmt: skip
        self._call = run
        self._blocks = blocks
        self._slow = slow
        self._ended = threading.Event()
        self._value: T | None = None
        self._error: KVStoreError | None = None
        self._refused = False
        try:
            worker.submit(self)
        except CapacityError as error:
            self._error = error
            self._refused = True
            self._ended.set()

    @property
    def refused(self) -> bool:
        """Whether the job was not queued because the queue was full; it never runs."""
        return self._refused

    @property
    def done(self) -> bool:
        """Whether the job has ended; it does not access memory any more."""
        return self._ended.is_set() and (self._blocks is None or self._blocks.copy.idle())

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job has ended; returns False if ``timeout_s`` seconds passed first."""
        deadline = monotonic() + timeout_s
        # In a forked child, another thread of the parent may have held the event's lock.
        if not (self._ended.is_set() or self._ended.wait(timeout_s)):
            return False
        blocks = self._blocks
        return blocks is None or blocks.copy.wait_idle(max(0.0, deadline - monotonic()))

    def forked(self) -> None:
        """In a forked child: it has failed; the parent's job continues."""
        if self._blocks is not None:
            forks.keep(self._blocks)
            self._blocks = None
        if self.done:
            return
        self._ended = threading.Event()
        self._error = PeerUnreachable("it was submitted before the fork: the parent runs it")
        self._ended.set()

    def run(self) -> None:
        """Run it; called by the worker."""
        try:
            value = self._call()
            if not self._ended.is_set():  # a cancelled one may have ended before
                self._value = value
        except MustWaitError:
            if self._goes_on_elsewhere():
                return
        except KVStoreError as error:
            self._error = error
        except BaseException as error:
            # An error in our code, or an exception for another thread, must not end the worker or
            # leave an engine waiting.
            log.exception("a job failed")
            self._error = KVStoreError(f"{type(error).__name__}: {error}")
        self._ended.set()

    def _goes_on_elsewhere(self) -> bool:
        """Queue the job at the slow worker; returns whether that was possible."""
        slow, self._slow = self._slow, None
        assert slow is not None
        try:
            slow.submit(self)
        except CapacityError as error:
            self._error = error
            return False
        return True

    def _outcome(self, timeout_s: float) -> T:
        if not self.wait(timeout_s):
            raise TransferTimeout(f"the job has not ended after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class StoreJob(Job[T]):
    """A put or prefetch in the background."""

    def result(self, timeout_s: float = 60.0) -> T:
        """Wait for the end; return the result of the job: :class:`PutResult`, or a number of pages.

        Raises:
            TransferTimeout: the job has not ended after ``timeout_s`` seconds; it continues.
            KVStoreError: what :meth:`Space.put` raises; for a prefetch, why the node refused.
        """
        return self._outcome(timeout_s)


class RestoreJob(Job[RestoreResult]):
    """A restore in the background. If the store fails, it restores 0 pages and raises nothing."""

    def __init__(
        self, worker: Worker, run: Callable[[], RestoreResult], progress: Progress, *,
        layered: bool, slow: Worker | None = None, blocks: "BlocksOnDevice | None" = None,
        waits: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._progress = progress
        #: Whether it would write nothing any more if it were cancelled now.
        self._waits = waits
        self._layered = layered
        super().__init__(worker, run, slow, blocks)
        if self._refused:  # refused: there will be no layers
            self._end_layers()

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """Wait until layer ``layer`` of all restored pages is copied, or the job has ended.

        For blocks on a device this waits until the copy of the layer is queued, and lets the
        calling thread's current stream wait for it: work that is queued there later finds it.

        The first :attr:`verified_pages` pages hold valid KV of the layer then. Only a job of order
        ``segment`` copies layer by layer; for others this waits for the end.

        Returns:
            Whether the layer is there; False on timeout, or if the job ended without this layer.
        """
        if not self._layered:
            return self.wait(timeout_s)
        if self._blocks is not None:
            engine = self._blocks.pool.engine_stream()
            return self._blocks.copy.wait_layer(layer, timeout_s, engine)
        if self.done:
            return self._progress.done > layer
        return self._progress.wait(layer + 1, timeout_s)

    @property
    def verified_pages(self) -> int:
        """Number of leading pages that were verified; for order ``segment`` known after layer 0.

        It becomes smaller if a page changes before its last layer was copied: read it again after
        each :meth:`wait_layer`.
        """
        return self._progress.good_pages

    def cancel(self) -> None:
        """Ask the job to stop early. Wait for its end before you reuse the blocks."""
        self._progress.cancel()
        # An engine's step waits for the end of a layer-wise job, which does not need its thread.
        if self._layered and self._waits() and not self._ended.is_set():
            self._value = RestoreResult(0)
            self._ended.set()
            self._end_layers()

    def result(self, timeout_s: float = 60.0) -> RestoreResult:
        """Wait for the end; return how much was restored.

        Raises:
            TransferTimeout: the job has not ended after ``timeout_s`` seconds; it continues, and
                the blocks are still in use.
        """
        try:
            return self._outcome(timeout_s)
        except TransferTimeout:
            raise
        except KVStoreError as error:
            log.warning("a restore failed and counts as a miss: %s", error)
            return RestoreResult(0)

    def forked(self) -> None:
        """See :class:`Job`; there will be no layers."""
        if self._blocks is not None:
            self._layered = False
        super().forked()
        self._progress.changed = threading.Condition()
        self._progress.finish()

    def run(self) -> None:
        """Run it; when it has ended, wake threads that wait for a layer."""
        super().run()
        if self._ended.is_set():
            self._end_layers()

    def _end_layers(self) -> None:
        """Wake the threads that wait for a layer; the job has ended."""
        self._progress.finish()
        if self._blocks is not None:
            self._blocks.copy.end()
