"""The jobs of all links of a rank of prefill: which wait, and which are submitted. Pure."""

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
        assert leg.there is not None
        share = leg.target.share
        stop = min(part.positions.stop, leg.first + len(leg.there))
        positions = range(max(part.positions.start, leg.first), stop)
        planes = _common(part.planes, share.planes)
        if not positions or not planes:
            return
        leg.left -= len(positions) * len(planes)
        offset = positions.start - part.positions.start
        here = part.blocks[offset : offset + len(positions)]
        there = leg.there[positions.start - leg.first :][: len(positions)]
        generations = part.generations[offset : offset + len(positions)]
        blocks_max = max(RANGES_BYTES_MAX // share.block_bytes, 1)
        runs = _joined(positions, here.tolist(), there, blocks_max, share)
        for ranges in batches(planes, runs, blocks_max, RANGES_MAX):
            sources = [int(here[one.first - positions.start]) for one in ranges]
            targets = [leg.there[one.first - leg.first] for one in ranges]
            read = (positions.start, here, generations)
            self._put(room, leg, ranges, sources, read, targets=targets)

    def add_aux(self, room: int, leg: SendingLeg, aux: bytes) -> None:
        """Queue the aux data."""
        place = PushRange(AUX_PLANE, leg.slot, len(aux))
        self._put(room, leg, [place], [0], (0, _NO_BLOCKS, _NO_GENERATIONS), aux)

    def submit(self, link: bytes) -> Iterator[PushJob]:
        """Take jobs of a link that may be submitted now."""
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
        """A link is gone, and all its legs were told to forget."""
        self._waiting.pop(link, None)

    def check(self, room: int, leg: SendingLeg) -> None:
        """Assert that a leg counts its jobs."""
        submitted = [job for job in self._submitted.values() if job.link == leg.link]
        waiting = self._waiting.get(leg.link, ())
        assert leg.submitted == sum(job.room == room for job in submitted)
        assert leg.waiting == sum(job.room == room for job in waiting)
        assert len(submitted) == self._busy[leg.link] <= JOBS_MAX

    def _put(
        self, room: int, leg: SendingLeg, ranges: list[PushRange], sources: list[int],
        read: tuple[int, npt.NDArray[np.int64], npt.NDArray[np.uint64]], aux: bytes = b"",
        targets: Sequence[int] = (),
    ) -> None:  # fmt: skip
        first, blocks, generations = read
        job = PushJob(
            next(self._numbers), leg.link, room, ranges, sources, blocks, generations,
            leg.target.share, first, aux, targets, leg.place if targets else None,
        )  # fmt: skip
        waiting = self._waiting.setdefault(leg.link, deque())
        both = _together(waiting[-1], job) if waiting else None
        if both is not None:  # the link is busy: fewer and longer jobs take less time
            waiting[-1] = both
            return
        waiting.append(job)
        leg.waiting += 1


def _together(one: PushJob, other: PushJob) -> PushJob | None:
    """Two jobs as one, if they are of other layers of the same blocks; None = they stay two."""
    if one.room != other.room or one.aux or other.aux or one.first != other.first:
        return None
    if len(one.ranges) + len(other.ranges) > RANGES_MAX or one.place != other.place:
        return None
    size = sum(map(one.share.range_bytes, one.ranges + other.ranges))
    same = np.array_equal(one.blocks, other.blocks)
    if size > RANGES_BYTES_MAX or not same:
        return None
    if not np.array_equal(one.generations, other.generations):
        return None
    return one._replace(
        ranges=one.ranges + other.ranges,
        sources=one.sources + other.sources,
        targets=[*one.targets, *other.targets],
    )


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _joined(
    positions: range, here: Sequence[int], there: Sequence[int], count_max: int, share: LinkShare
) -> list[tuple[int, int]]:
    """As :func:`joined`; what is gathered and scattered needs no neighbours."""
    if not share.is_staged:
        return joined(positions, here, there, count_max)
    firsts = range(positions.start, positions.stop, count_max)
    return [(first, min(count_max, positions.stop - first)) for first in firsts]
