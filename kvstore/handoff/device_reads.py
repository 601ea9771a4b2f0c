"""Prefill's jobs of a pool on a device: their blocks are in staging before their link has them.

Each link has a share of the slots, and so has each decode engine with all its links, so that a slow
one does not keep the others waiting.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from kvstore.handoff import device_copies
from kvstore.handoff.device_copies import DeviceCopies, said_of
from kvstore.handoff.effects import PushJob
from kvstore.handoff.memory import HandoffPool, digests_of
from kvstore.mover.ranges import Places

LINK_SLOTS_MAX: Final = 2
"""Slots of one link: one is filled while the other is sent. Of few slots it has half."""
_LOG: Final = logging.getLogger(__name__)


class DeviceReads:
    """The jobs of one prefill manager that are gathered on a device.

    Args:
        pool: on a device.
        ready: told each job whose bytes are in staging, until :meth:`ended`.
        failed: told each job that cannot be read, and why. Both are called without locks.

    Raises:
        DeviceUnavailable: there is no memory for staging.
    """

    def __init__(
        self, pool: HandoffPool, ready: Callable[[PushJob], None],
        failed: Callable[[PushJob, str], None],
    ) -> None:  # fmt: skip
        self._pool, self._ready, self._failed = pool, ready, failed
        self._lock = threading.Lock()
        self._waiting: dict[bytes, deque[PushJob]] = {}
        self._held: Counter[bytes] = Counter()  # slots of each link
        self._held_by: Counter[bytes] = Counter()  # of each decode engine
        self._since: dict[bytes, float] = {}  # links that have jobs, and whose engine has no slot
        self._slots: dict[int, int] = {}  # job → slot
        self._stuck: Counter[int] = Counter()  # room → failed copies that the device may still do
        assert pool.device is not None
        way = pool.device.way_out(pool.slot_bytes, pool.rows_max)
        self._link_slots = min(LINK_SLOTS_MAX, len(way.slots) // 2)
        self._copies = DeviceCopies(way, self._feed, self._give_up_late)

    @property
    def copying(self) -> int:
        """Number of copies that the device has not finished."""
        return self._copies.flying

    def submit(self, job: PushJob) -> None:
        """Read the blocks of a job as soon as there is staging; returns at once."""
        with self._lock:
            self._waiting.setdefault(job.link, deque()).append(job)
        self._copies.wake()

    def read(self, job: PushJob) -> tuple[Places, bytes]:
        """The place of each range of a ready job, and 16 bytes of digest of each."""
        with self._lock:
            slot = self._slots[job.number]
        at, places = int(self._copies.slot(slot).ctypes.data), []
        for one in job.ranges:
            places.append((at, job.share.range_bytes(one)))
            at += places[-1][1]
        return places, digests_of(job.share.seed_of(job.room), job.ranges, places)

    def ended(self, job: PushJob) -> None:
        """A job has ended; its staging is free."""
        with self._lock:
            slot = self._leave(job)
        if slot is not None:
            self._copies.free(slot)

    def drop(self, link: bytes) -> list[PushJob]:
        """Remove and return the jobs of a link that have not started."""
        with self._lock:
            return list(self._waiting.pop(link, ()))

    def holds_blocks(self, room: int) -> bool:
        """Whether the device may still read blocks for a copy that has failed."""
        return self._stuck[room] > 0

    def close(self) -> None:
        """Wait until the device has finished, without limit."""
        self._copies.close()

    # ---- by the threads of the copies -------------------------------------------------------

    def _feed(self) -> bool:
        """Start jobs while there is staging; returns whether jobs wait."""
        while (taken := self._next()) is not None:
            self._begin(*taken)
        with self._lock:
            return any(self._waiting.values())

    def _give_up_late(self) -> None:
        """Report the jobs that have waited too long for staging as failed."""
        for job in self._late():
            why = f"no staging was free for {device_copies.DEVICE_S:.0f} s"
            self._failed(job, why)

    def _begin(self, job: PushJob, slot: int) -> None:
        """Start the copy of a job, or report that it has failed."""
        try:
            rows = self._pool.block_rows(job.ranges, job.sources, job.rows)
            heads = self._pool.head_rows(job.share.heads) if job.rows else None
        except Exception as error:  # a job that has no end would hold its blocks for good
            _LOG.exception("a job of room %d was abandoned after an internal error", job.room)
            self.ended(job)
            self._failed(job, said_of(error))
            return
        self._copies.begin(slot, rows, heads, job.after, self._end_of(job))

    def _next(self) -> tuple[PushJob, int] | None:
        """The next job to read, of the engine with the fewest slots; and its slot."""
        with self._lock:
            heads = [jobs[0] for jobs in self._waiting.values() if jobs]
            heads = [job for job in heads if self._held[job.link] < self._link_slots]
            heads.sort(key=lambda job: (self._held_by[job.receiver], self._held[job.link]))
            for job in heads:
                slot = self._copies.take_for(job.receiver, 0.0)
                if slot >= 0:
                    self._take(job, slot)
                    return job, slot
            return None

    def _take(self, job: PushJob, slot: int) -> None:
        """A job got a slot; next time the other links of its engine come first."""
        jobs = self._waiting.pop(job.link)
        jobs.popleft()
        if jobs:
            self._waiting[job.link] = jobs
        self._held[job.link] += 1
        self._held_by[job.receiver] += 1
        self._slots[job.number] = slot

    def _leave(self, job: PushJob) -> int | None:
        """A job has ended; returns its slot, or None."""
        slot = self._slots.pop(job.number, None)
        if slot is not None:
            self._held[job.link] -= 1
            self._held_by[job.receiver] -= 1
            self._copies.done_for(job.receiver)
        return slot

    def _late(self) -> list[PushJob]:
        """Jobs of links whose engine has waited too long for any slot."""
        now = time.monotonic()
        with self._lock:
            self._held, self._held_by = +self._held, +self._held_by
            waiting = [(link, jobs[0].receiver) for link, jobs in self._waiting.items() if jobs]
            without = [link for link, receiver in waiting if not self._held_by[receiver]]
            self._since = {link: self._since.get(link, now) for link in without}
            late = [link for link in without if now - self._since[link] >= device_copies.DEVICE_S]
            return [job for link in late for job in self._waiting.pop(link)]

    def _end_of(self, job: PushJob) -> Callable[[str, bool], None]:
        reported = False

        def ended(why: str, idle: bool) -> None:  # noqa: FBT001
            nonlocal reported
            first, reported = not reported, True
            if not why:
                self._ready(job)
                return
            with self._lock:
                self._leave(job)  # the slot is not ours any more
                self._stuck[job.room] += (not idle) - (not first)
                self._stuck = +self._stuck
            if first:
                self._failed(job, why)

        return ended
