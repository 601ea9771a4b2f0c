"""L3: the append-only log on SSDs, as a tier: jobs in, completions out.

A few threads take jobs from one bounded queue and process whole batches in native calls that
release the GIL. Without threads, jobs run in :meth:`SSDLog.poll`; simulations use this. Writes are
durable when a :class:`DiskSync` that was submitted after them has completed.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NamedTuple, cast

from kvstore.protocol.counts import DirectoryCounts, RecordCounts
from kvstore.protocol.errors import CapacityError, ConfigError, KVStoreError, TierUnavailable
from kvstore.state.disk.jobs import (
    DiskCheck,
    DiskCopy,
    DiskDrop,
    DiskJob,
    DiskRead,
    DiskSeal,
    DiskSync,
    DiskTokens,
    DiskTombstone,
    DiskWrite,
)
from kvstore.state.tree.places import BLOCK_BYTES
from kvstore.tier.base import Completion
from kvstore.tier.directories import Directory, failure, open_all, say_room
from kvstore.tier.disk import Disk, OSDisk
from kvstore.tier.record import SEGMENT_MAX, SEGMENT_NAME, ForeignLog, segment_name
from kvstore.tier.recovery import (
    GAP_SEGMENTS,
    RecoveredLog,
    SegmentScan,
    combine,
    load_segment,
    one_of_each,
)
from kvstore.tier.segments import LogFile, Segments
from kvstore.tier.transfer import Read, RecordMover, Write, batches

log = logging.getLogger(__name__)

THREADS: Final = 4
"""Two threads keep an NVMe disk busy; two more compute digests and serve a second disk."""
JOBS_MAX: Final = 16_384
"""Maximum jobs in progress: several seconds of pages at a disk's speed."""
CLOSE_TIMEOUT_S: Final = 30.0
_IDLE_S: Final = 60.0
_RECOVERY_THREADS: Final = 8


class _Work(NamedTuple):
    """A piece of work for one thread; ``unsynced``: the writes that a DiskSync must cover."""

    jobs: list[DiskJob]
    sequence: int
    unsynced: dict[int, int]


class SSDLog:
    """An append-only log over the directories of one node.

    All calls come from one thread. The first one is :meth:`recover`, once.

    Args:
        node: the node's name; directories of another node are refused.
        directories: a new segment is created in the one with most free space.
        segment_bytes: size of new segment files, a multiple of 4096.
        threads: number of worker threads; 0 = jobs run in :meth:`poll`.
        wake: called in a worker thread when the first completion becomes available.
        disk: the disk; None = the machine's.

    Raises:
        ConfigError, TierUnavailable: a directory cannot be used; the message names it and says why.
    """

    def __init__(
        self,
        node: str,
        directories: Sequence[Directory],
        segment_bytes: int,
        *,
        threads: int = THREADS,
        wake: Callable[[], None] = lambda: None,
        disk: Disk | None = None,
    ) -> None:
        assert segment_bytes % BLOCK_BYTES == 0, "segments are whole blocks"
        self._disk = disk if disk is not None else OSDisk()
        self._members, opened = open_all(self._disk, node, directories, segment_bytes)
        self.log_id = self._members.log
        self._directories = opened
        self._segments = Segments(self._disk, self.log_id, opened, segment_bytes)
        self._wake = wake
        self._sequence = 0
        """Sequence number of the next write; 0 until recovery."""
        self._errors: Counter[str] = Counter()
        # Protects the fields below; never held while a job runs.
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._is_idle = threading.Condition(self._lock)
        self._queue: deque[_Work] = deque()
        self._completions: list[Completion] = []
        self._under_way = 0
        """Submitted jobs without a completion."""
        self._closing = self._closed = False
        self._movers = [RecordMover(self._disk, self._segments) for _ in range(max(threads, 1))]
        self._threads = [
            threading.Thread(
                target=self._run, args=(mover,), name=f"kvstore-ssd-{index}", daemon=True
            )
            for index, mover in enumerate(self._movers[:threads])
        ]

    # ---- recovery ---------------------------------------------------------------------------

    def recover(self) -> RecoveredLog:
        """Read the directories; afterwards jobs are accepted.

        First the names of files and the content of unsealed segments are synced: all reported pages
        are durable, even if the last process was killed between a write and its sync.

        Raises:
            TierUnavailable: a directory cannot be listed or synced.
            ConfigError: a file has an impossible segment number; nothing was changed.
        """
        assert not self._sequence, "a log is recovered once"
        names: list[tuple[int, int]] = []
        for index, directory in enumerate(self._directories):
            try:
                self._disk.sync_directory(directory.path)
                listed = self._disk.names(directory.path)
            except OSError as error:
                raise failure(directory.path, error) from error
            matches = (SEGMENT_NAME.fullmatch(name) for name in listed)
            numbers = [int(match[1], 16) for match in matches if match]
            if (highest := max(numbers, default=0)) > SEGMENT_MAX:
                raise ConfigError(
                    f"{directory.path / segment_name(highest)}: too high a number for a segment,"
                    " and the next one might have no valid name: move this file away"
                )
            names += [(number, index) for number in numbers]
        found: list[SegmentScan] = []
        if self._threads:
            with (
                ThreadPoolExecutor(_RECOVERY_THREADS, "kvstore-ssd-scan") as readers,
                ThreadPoolExecutor(_RECOVERY_THREADS, "kvstore-ssd-recover") as pool,
            ):
                # The newest first: it takes longest, because it has no footer.
                found += pool.map(lambda name: self._find(name, readers), sorted(names)[::-1])
        else:
            found += [self._find(name, None) for name in sorted(names)[::-1]]
        found = one_of_each(found)
        for one in found:
            self._adopt(one)
        gap = self._members.gap * GAP_SEGMENTS
        recovered = combine(found, self._members.next_segment, gap)
        self._members.forget_missing(self._disk, recovered.next_segment)
        for line in recovered.untouched:
            log.error("file not used: %s", line)
        say_room(self._disk, self._directories)
        self._sequence = recovered.next_sequence
        for thread in self._threads:
            thread.start()
        return recovered

    def _find(self, name: tuple[int, int], readers: Executor | None) -> SegmentScan:
        """Read one segment; runs in a recovery thread."""
        number, index = name
        directory = self._directories[index]
        path = directory.path / segment_name(number)
        size = 0
        try:
            descriptor = self._disk.open(path, direct=directory.direct_io)
            try:
                size = self._disk.size(descriptor)
                loaded = load_segment(self._disk, descriptor, number, self.log_id, readers)
                if not loaded.sealed:
                    self._disk.sync(descriptor)
            finally:
                self._disk.close(descriptor)
        except OSError as error:
            return SegmentScan(number, index, path, size, None, f"{error.strerror or error}")
        except ForeignLog as error:
            return SegmentScan(number, index, path, size, None, str(error))
        return SegmentScan(number, index, path, size, loaded)

    def _adopt(self, found: SegmentScan) -> None:
        assert not self._sequence, "records may be written already"
        loaded = found.loaded
        if loaded is None:
            self._directories[found.directory].used_bytes += found.size_bytes
            self._directories[found.directory].untouched_bytes += found.size_bytes
            return
        segment = LogFile(found.number, found.directory, found.size_bytes)
        segment.sealing = segment.sealed = loaded.sealed
        if not loaded.sealed:
            segment.entries = bytearray(loaded.entries.tobytes())
            segment.pairs = {packed: index for index, packed in enumerate(loaded.pairs)}
        self._segments.adopt(segment)

    # ---- the tier ---------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """Maximum bytes of all segments together, without files that are not used."""
        each = self._segments.segment_bytes
        free = (one.capacity_bytes - one.untouched_bytes for one in self._directories)
        return sum(max(0, room) // each * each for room in free)

    @property
    def room(self) -> int:
        """Number of jobs that :meth:`submit` accepts now."""
        with self._lock:
            return JOBS_MAX - self._under_way

    def submit(self, jobs: Sequence[DiskJob]) -> None:
        """See :class:`kvstore.tier.base.Tier`.

        Raises:
            CapacityError: too many jobs are in progress; none of these was accepted.
            TierUnavailable: the tier is closed; none of these was accepted.
        """
        assert self._sequence, "call recover() first"
        work: list[_Work] = []
        sequence = self._sequence
        for batch in batches(jobs):
            unsynced = self._segments.unsynced() if isinstance(batch[0], DiskSync) else {}
            work.append(_Work(batch, sequence, unsynced))
            if isinstance(batch[0], DiskWrite | DiskTombstone | DiskCopy):
                sequence += len(batch)
        with self._lock:
            if self._closing:
                raise TierUnavailable("the SSD tier is closed")
            if self._under_way + len(jobs) > JOBS_MAX:
                raise CapacityError(f"the SSD tier has {self._under_way} jobs in progress already")
            self._sequence = sequence
            self._under_way += len(jobs)
            self._queue.extend(work)
            self._has_work.notify(len(work))

    def poll(self) -> list[Completion]:
        """See :class:`kvstore.tier.base.Tier`."""
        if not self._threads:
            self._run_queued()
        with self._lock:
            ended, self._completions = self._completions, []
        return ended

    def drain(self, timeout_s: float) -> bool:
        """See :class:`kvstore.tier.base.Tier`; completions must still be polled."""
        if not self._threads:
            self._run_queued()
        with self._lock:
            return self._is_idle.wait_for(lambda: not self._under_way, timeout_s)

    def close(self) -> None:
        """End jobs in progress and unlock the directories, within CLOSE_TIMEOUT_S.

        Unsynced writes may be lost. Jobs that have not started in time end with TierUnavailable;
        :meth:`poll` returns their completions. If the disk blocks a thread for longer, files and
        locks stay open.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = self._closing = True
            self._has_work.notify_all()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if not self.drain(CLOSE_TIMEOUT_S):
            self._abandon()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(deadline - time.monotonic(), 0.1))
        if any(thread.is_alive() for thread in self._threads):
            log.error("the disk was not idle after %g s: its files stay open", CLOSE_TIMEOUT_S)
        else:
            self._segments.close()

    def forked(self) -> None:
        """In a forked child: close the parent's directories; no thread runs here."""
        self._segments.forked()

    def stats(self) -> RecordCounts:
        """Counts of all threads together, and the directories."""
        total: Counter[str] = Counter()
        for mover in self._movers:
            total.update(dict(mover.counts))
        segments = self._segments.counts()
        with self._lock:
            errors, under_way = dict(self._errors), self._under_way
        failures = self._segments.failures()
        return RecordCounts(
            jobs=under_way, errors=errors,
            failed_segments={str(number): why for number, why in failures.items()},
            directories=[
                DirectoryCounts(
                    path=str(directory.path), direct_io=directory.direct_io,
                    capacity_bytes=directory.capacity_bytes, used_bytes=directory.used_bytes,
                    segments=count,
                )
                for directory, count in zip(self._directories, segments, strict=False)
            ],
            written_records=total["written_records"], read_records=total["read_records"],
            read_bytes=total["read_bytes"], syncs=total["syncs"], seals=total["seals"],
            drops=total["drops"],
        )  # fmt: skip

    # ---- threads ----------------------------------------------------------------------------

    def _run(self, mover: RecordMover) -> None:
        try:
            while (work := self._next()) is not None:
                self._do(work, mover)
        finally:
            with self._lock:
                stopping = self._closing
            if not stopping:  # an error in our code ended this thread: no job may wait for it
                self._abandon()

    def _next(self) -> _Work | None:
        with self._lock:
            while not self._queue:
                if self._closing:
                    return None
                self._has_work.wait(_IDLE_S)
            return self._queue.popleft()

    def _run_queued(self) -> None:
        assert not self._threads, "a job would be done twice"
        while self._queue:
            self._do(self._queue.popleft(), self._movers[0])

    def _abandon(self) -> None:
        """End all jobs that have not started; accept no more."""
        with self._lock:
            self._closing = True
            work, self._queue = self._queue, deque()
            self._has_work.notify_all()
        error = TierUnavailable("the SSD tier was closed before this job began")
        self._ended([Completion(job.job, error) for one in work for job in one.jobs])

    def _do(self, work: _Work, mover: RecordMover) -> None:
        """Process one piece of work; each of its jobs gets exactly one completion in any case."""
        ended: list[Completion] = []
        error = KVStoreError("the SSD tier failed in this job: see its log")
        try:
            ended += self._carry_out(work, mover)
        except KVStoreError as refused:
            error = refused
        finally:
            missing = {job.job for job in work.jobs} - {one.job for one in ended}
            self._ended([*ended, *(Completion(job, error) for job in missing)])

    def _carry_out(self, work: _Work, mover: RecordMover) -> Iterator[Completion]:
        first = work.jobs[0]
        match first:
            case DiskRead() | DiskCheck():
                yield from mover.read(cast("list[Read]", work.jobs))
            case DiskTokens():
                yield mover.read_tokens(first)
            case DiskCopy():
                yield mover.copy(first, work.sequence)
            case DiskSync():
                yield self._sync(first, work.unsynced, mover)
            case DiskSeal(segment=number):
                ended = self._attempt(first, lambda: self._segments.seal(number))
                failed = (number,) if number in self._segments.failures() else ()
                yield replace(ended, failed=failed)
                mover.counts["seals"] += 1
            case DiskDrop(segment=number):
                yield self._attempt(first, lambda: self._segments.drop(number))
                mover.counts["drops"] += 1
            case _:
                yield from mover.write(cast("list[Write]", work.jobs), work.sequence)

    def _attempt(self, job: DiskJob, do: Callable[[], None]) -> Completion:
        try:
            do()
        except KVStoreError as error:
            return Completion(job.job, error)
        return Completion(job.job)

    def _sync(self, job: DiskSync, unsynced: dict[int, int], mover: RecordMover) -> Completion:
        """Sync all segments, even after a failure; the answer names those that failed."""
        errors: dict[int, KVStoreError] = {}
        for number, written in unsynced.items():
            if number in job.given_up:
                continue
            try:
                mover.counts["syncs"] += self._segments.sync(number, written)
            except KVStoreError as error:
                errors[number] = error
        last = list(errors.values())[-1] if errors else None
        return Completion(job.job, last, failed=tuple(errors))

    def _ended(self, completions: list[Completion]) -> None:
        if not completions:
            return
        with self._lock:
            first = not self._completions
            self._completions += completions
            self._under_way -= len(completions)
            assert self._under_way >= 0, "a job ended twice"
            for one in completions:
                if one.error is not None:
                    self._errors[one.error.code] += 1
            if not self._under_way:
                self._is_idle.notify_all()
        if first and self._threads:
            self._wake()
