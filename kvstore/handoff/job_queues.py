"""The jobs of all links of a prefill rank: which wait, and which are submitted. Pure."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.handoff.effects import PushJob
from kvstore.handoff.messages import RANGES_BYTES_MAX, RANGES_MAX
from kvstore.handoff.places import AUX_PLANE, PushRange, batches, joined
from kvstore.handoff.shape import LinkShare
from kvstore.handoff.tables import SendingLeg, SentPart

JOBS_MAX: Final = 4
"""Jobs of a link that are submitted at a time: what an abort has to wait for."""
JOINED_BYTES_MAX: Final = 256 * 1024
"""Layers and chunks that wait for the link are joined to jobs of so many bytes.

What is gathered and scattered to RANGES_BYTES_MAX: there a job costs more besides its bytes.
"""
_NO_BLOCKS: Final = np.zeros(0, dtype=np.int64)
_NO_GENERATIONS: Final = np.zeros(0, dtype=np.uint64)


class JobQueues:
    """A queue of jobs for each link; only :class:`~kvstore.handoff.sending.Senders` uses it."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[bytes, deque[PushJob]] = {}
        self._submitted: dict[int, PushJob] = {}
        self._busy: Counter[bytes] = Counter()

    def add(self, room: int, leg: SendingLeg, part: SentPart) -> None:
        """Queue the ranges of a part that the other side needs."""
        wanted = leg.wanted(part.planes.start)
        if wanted is None:
            return
        share, start, blocks, place = wanted
        stop = min(part.positions.stop, start + len(blocks))
        positions = range(max(part.positions.start, start), stop)
        planes = _common(part.planes, share.planes)
        if not positions or not planes:
            return
        leg.left -= len(positions) * len(planes)
        offset = positions.start - part.positions.start
        here = part.blocks[offset : offset + len(positions)]
        there = blocks[positions.start - start :][: len(positions)]
        generations = part.generations[offset : offset + len(positions)]
        blocks_max = max(RANGES_BYTES_MAX // max(share.block_bytes, 1), 1)
        numbers = here.tolist()
        runs = _joined(positions, numbers, there, blocks_max, share)
        for ranges in batches(planes, runs, blocks_max, RANGES_MAX):
            sources = [numbers[one.first - positions.start] for one in ranges]
            targets = [one.first - start for one in ranges]
            if not share.is_staged:
                targets = [blocks[before] for before in targets]
            rows: list[npt.NDArray[np.int64]] = []
            if share.is_staged:
                rows = [here[one.first - positions.start :][: one.size] for one in ranges]
            job = PushJob(
                next(self._numbers), leg.link, room, ranges, sources, here, generations, share,
                rows, b"", targets, place, part.after, leg.target.instance,
            )  # fmt: skip
            self._put(leg, job)

    def add_aux(self, room: int, leg: SendingLeg, aux: bytes) -> None:
        """Queue the aux data."""
        place = PushRange(AUX_PLANE, leg.slot, len(aux))
        share = leg.target.share
        none = (_NO_BLOCKS, _NO_GENERATIONS)
        self._put(
            leg, PushJob(next(self._numbers), leg.link, room, [place], [0], *none, share, [], aux)
        )

    def submit(self, link: bytes) -> Iterator[PushJob]:
        """Remove and return the jobs of a link that may be submitted now."""
        waiting = self._waiting.get(link)
        while waiting and self._busy[link] < JOBS_MAX:
            job = waiting.popleft()
            self._busy[link] += 1
            self._submitted[job.number] = job
            yield job

    def end(self, number: int) -> PushJob:
        """A job that was submitted has ended."""
        job = self._submitted.pop(number)
        self._busy[job.link] -= 1
        if not self._busy[job.link]:
            del self._busy[job.link]
        return job

    def forget(self, room: int, leg: SendingLeg) -> None:
        """Submit no more jobs of a leg."""
        waiting = self._waiting.get(leg.link)
        if waiting and leg.waiting:
            self._waiting[leg.link] = deque(job for job in waiting if job.room != room)
        leg.waiting = 0

    def closed(self, link: bytes) -> None:
        """A link is closed, and :meth:`forget` was called for all its legs."""
        self._waiting.pop(link, None)

    def check(self, room: int, leg: SendingLeg) -> None:
        """Assert that the leg's count of jobs is right."""
        submitted = [job for job in self._submitted.values() if job.link == leg.link]
        waiting = self._waiting.get(leg.link, ())
        assert leg.submitted == sum(job.room == room for job in submitted)
        assert leg.waiting == sum(job.room == room for job in waiting)
        assert len(submitted) == self._busy[leg.link] <= JOBS_MAX

    def _put(self, leg: SendingLeg, job: PushJob) -> None:
        waiting = self._waiting.setdefault(leg.link, deque())
        last = waiting[-1] if waiting else None
        alike = last and last.room == job.room and last.share.planes == job.share.planes
        if last and alike and not (last.aux or job.aux) and _is_small(last, job):
            waiting[-1] = last.joined(job)
            return
        waiting.append(job)
        leg.waiting += 1


def _is_small(one: PushJob, other: PushJob) -> bool:
    """Whether two jobs may be joined."""
    size = one.share.bytes_of(one.ranges) + other.share.bytes_of(other.ranges)
    is_gathered = one.share.is_staged or one.after
    most = RANGES_BYTES_MAX if is_gathered else JOINED_BYTES_MAX
    return size <= most and len(one.ranges) + len(other.ranges) <= RANGES_MAX


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _joined(
    positions: range, here: Sequence[int], there: Sequence[int], count_max: int, share: LinkShare
) -> list[tuple[int, int]]:
    """Like :func:`joined`; staged ranges need no neighbours."""
    if not share.is_staged:
        return joined(positions, here, there, count_max)
    firsts = range(positions.start, positions.stop, count_max)
    return [(first, min(count_max, positions.stop - first)) for first in firsts]
