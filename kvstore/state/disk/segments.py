"""Keeps the log's segments: seals full ones, reclaims cold ones, deletes what is drained. Pure.

Reclaiming a segment: its cold pages leave the disk at once, tails first; those worth another turn
are copied; when the last copy has ended a sync makes the copies as safe as the originals were; and
when nobody reads the segment any more its file is deleted and the room is free.
"""

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Final

from kvstore.errors import KVStoreError, PageCorrupt
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.jobs import DiskCopy, DiskDrop, DiskJob, DiskSeal, DiskSync, page_name
from kvstore.state.disk.limits import is_pinned
from kvstore.state.disk.log import Reclaim, Segment, SegmentLog, SegmentState
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import footer_bytes


class _Drain(Enum):
    DROPPING = 0
    COPYING = 1
    SYNCING = 2
    READ = 3
    """Only its readers have to end."""
    DELETING = 4


DROPS_MAX = 250
"""Pages that leave at once: some milliseconds. Of a segment with thousands more go at each tick."""
DROPS_A_JOB = 8
"""Pages that leave with each job that begins or ends, so that reclaiming keeps up with writes."""
GAIN_MIN: Final = 1 / 8
"""A segment of which all but so little must be kept is not reclaimed: it would only go round. Nor
is one of which all but less than a page must be."""


class SegmentReclaimer:
    """Upkeep of one log.

    Args:
        log: which record lies where.
        admission: what is worth being carried over, and who is charged for it.
        number: numbers a job.
        submit: hands a job to the tier; :meth:`completed` is told of its end.
        lose: takes a page off the disk for good: ``lose(node, shard)``.
        kept: the pages of a segment that must not go, closed towards heads.
        counts: what is counted.
        retry_ns: after a failed sync or deletion reclaiming rests for so long.
    """

    def __init__(
        self, log: SegmentLog, admission: Admission, number: Callable[[], int],
        submit: Callable[[DiskJob], None], lose: Callable[[PrefixNode, int], None],
        kept: Callable[[Segment], set[tuple[PrefixNode, int]]], counts: Counter[str], retry_ns: int,
    ) -> None:  # fmt: skip
        self._log = log
        self._admission = admission
        self._number = number
        self._submit = submit
        self._lose = lose
        self._kept = kept
        self._counts = counts
        self._retry_ns = retry_ns
        self._now_ns = self._rests_until_ns = 0
        self._victim: Segment | None = None
        #: Segments that are not worth reclaiming → pages in them when that was found.
        self._barren: dict[int, int] = {}
        #: Segments whose file could not be deleted → when that is tried again.
        self._stuck: dict[int, int] = {}
        self._stage = _Drain.COPYING
        #: What of the victim has still to leave, and what is to be copied then.
        self._plan = Reclaim([], [])
        self._copies = 0
        self._sync = 0

    @property
    def reclaiming(self) -> bool:
        """Whether room is being made."""
        return self._victim is not None

    def advance(self, now_ns: int, tick: int) -> None:
        """Time has come to ``now_ns``: do what is to be done, what failed a while ago included."""
        self._now_ns = now_ns
        if self._victim is not None and self._stage is _Drain.DROPPING:
            self._drop(self._victim, tick, DROPS_MAX)
        self.advance_reclaim(tick)

    def advance_reclaim(self, tick: int) -> None:
        """Do what is to be done now."""
        for segment in self._log.full:
            if not segment.writing and not segment.sealing:
                segment.sealing = True
                self._submit(DiskSeal(self._number(), segment.number))
        if self._victim is None and self._log.wants_reclaim:
            self._choose(tick)
        elif self._victim is not None and self._stage is _Drain.DROPPING:
            self._drop(self._victim, tick, DROPS_A_JOB)
        if self._victim is not None and self._now_ns >= self._rests_until_ns:
            self._go_on(self._victim)

    def completed(self, job: DiskJob, error: KVStoreError | None, tick: int) -> None:
        """One of this keeper's jobs has ended."""
        match job:
            case DiskSeal(segment=number):
                # Without a footer it is scanned at the next start; that is all.
                self._log.sealed(number)
                self.reconsider()  # a space may have grown beyond its reservation
                self._counts["disk_seals_failed"] += error is not None
            case DiskCopy():
                self._copied(job, error)
            case DiskSync():
                assert self._stage is _Drain.SYNCING
                if error is not None:
                    self._rests_until_ns = self._now_ns + self._retry_ns
                self._stage = _Drain.COPYING if error else _Drain.READ
            case DiskDrop(segment=number):
                self._counts["disk_drops_failed"] += error is not None
                assert self._victim is not None
                assert self._victim.number == number
                if error is None:
                    self._log.free(number)
                    self._stuck.pop(number, None)
                else:
                    self._rests_until_ns = self._now_ns + self._retry_ns
                    self._stuck[number] = self._rests_until_ns
                    self._victim.state = SegmentState.SEALED
                self._victim = None
            case _:
                raise AssertionError(job)
        if error is None:
            self.advance_reclaim(tick)  # else it is tried again when time has passed

    def reconsider(self) -> None:
        """Less may have to be kept than before."""
        self._barren.clear()

    def is_mine(self, job: int) -> bool:
        """Whether a sync is one of this keeper's."""
        return job == self._sync

    def _choose(self, tick: int) -> None:
        segments = self._log.segments
        for number, pages in list(self._barren.items()):
            if number not in segments or len(segments[number].pages) != pages:
                del self._barren[number]
        while (victim := self._log.victim(self._passed_over())) is not None:
            kept = self._kept(victim)
            sizes = [node.space.shards[shard].record_bytes for node, shard in kept]
            room = victim.size_bytes - footer_bytes(victim.records + 1)
            gain = max([room * GAIN_MIN, *sizes])
            awaited = victim.number in self._barren  # by tombstones, or it would not be here again
            if victim.failed or awaited or sum(sizes) + gain <= room:
                self._victim = victim
                self._counts["disk_kept_pages"] += len(kept)
                plan = self._log.plan(victim, tick, self._admission.carry_from, kept)
                self._begin(victim, plan, tick)
                return
            self._barren[victim.number] = len(victim.pages)

    def _passed_over(self) -> set[int]:
        stuck = {number for number, at_ns in self._stuck.items() if self._now_ns < at_ns}
        return stuck | self._barren.keys()

    def _begin(self, victim: Segment, plan: Reclaim, tick: int) -> None:
        assert victim.state is SegmentState.SEALED
        assert not self._copies
        victim.state, self._stage = SegmentState.DRAINING, _Drain.DROPPING
        self._plan = Reclaim(plan.carry, plan.drop[::-1])
        self._drop(victim, tick, DROPS_MAX)

    def _drop(self, victim: Segment, tick: int, limit: int) -> None:
        """Let up to ``limit`` pages that go leave, tails first, then copy the others."""
        carry, drop = self._plan
        for _ in range(min(limit, len(drop))):
            node, shard = drop.pop()
            there = (node, shard) in victim.pages  # its head may have taken it along
            if there and is_pinned(node, shard):
                carry.append((node, shard))  # since it was chosen
                continue
            self._counts["reclaimed_pages"] += 1
            if there:
                self._lose(node, shard)
        if not drop:
            self._stage = _Drain.COPYING
            self._copy(victim, sorted(carry, key=lambda page: page[0].depth), tick)

    def _copy(self, victim: Segment, carry: list[tuple[PrefixNode, int]], tick: int) -> None:
        for node, shard in carry:
            if (node, shard) not in victim.pages:
                continue
            place = self._log.place(node, shard, tick, carried=True)
            if place is None:
                self._lose(node, shard)
                continue
            source = node.place(shard)
            self._log.pin_segment(source.segment)
            self._copies += 1
            self._admission.charge(node.space.shards[shard].record_bytes)
            self._submit(DiskCopy(self._number(), source, place, page_name(node, shard)))

    def _go_on(self, victim: Segment) -> None:
        if self._stage is _Drain.COPYING and not self._copies:
            self._stage = _Drain.SYNCING
            self._sync = self._number()
            self._submit(DiskSync(self._sync))
        elif self._stage is _Drain.READ and not victim.readers:
            self._stage = _Drain.DELETING
            assert not victim.pages, "pages would lose their records"
            self._submit(DiskDrop(self._number(), victim.number))

    def _copied(self, job: DiskCopy, error: KVStoreError | None) -> None:
        (node, shard, _, digest), source = job.page, job.source
        self._copies -= 1
        assert self._copies >= 0
        self._log.unpin_segment(source.segment)
        still_there = is_live(node) and node.disk.get(shard) == source
        assert not still_there or node.digests[shard] == digest
        if still_there and error is None:
            self._log.moved(node, shard, source, job.place)
            node.move(shard, job.place)
            self._counts["carried_pages"] += 1
            return
        self._log.abandon(job.place, node, shard)
        if error is not None and not isinstance(error, PageCorrupt):
            self._log.fail(job.place.segment)  # else it was the record that was to be copied
        if still_there:
            self._lose(node, shard)
