"""Keeps the log's segments: seals full ones, reclaims cold ones, deletes drained ones. Pure.

To reclaim a segment, its cold pages are removed from disk at once, last pages first; pages worth
keeping are copied; when the last copy has ended, a sync makes the copies as safe as the originals
were; and when no reader is left, the file is deleted and the room is free.

A segment that failed is reclaimed at once. If its tombstones are still needed, it is given up
instead of deleted: it stays, without pages, and is no longer synced.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from kvstore.protocol.errors import KVStoreError, PageCorrupt
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.choices import SegmentLook
from kvstore.state.disk.graves import Graves
from kvstore.state.disk.jobs import (
    DiskCopy,
    DiskDrop,
    DiskJob,
    DiskSeal,
    DiskSync,
    LeftDisk,
    RecordOf,
    page_record,
)
from kvstore.state.disk.limits import DiskLimits, is_pinned
from kvstore.state.disk.log import Segment, SegmentLog, SegmentState
from kvstore.state.disk.plans import Part, Reclaim
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree


class _Drain(Enum):
    DROPPING = 0
    COPYING = 1
    SYNCING = 2
    READ = 3
    """Only its readers have to end, and pages that leave in turns have to leave."""
    DELETING = 4


DROPS_MAX = 250
"""Maximum pages removed at once: some milliseconds. If a segment has more, some are removed each
tick."""
DROPS_A_JOB = 8
"""Pages that are removed when a write of pages begins, so that reclaiming keeps up with writes; and
when a record was read, or a job of the reclaim itself has ended. Ends of writes remove none."""
COPIES_MAX = 32
"""Maximum pages being copied: some of the tier's time, as loads of pages stand behind them."""
COPY_BYTES_MAX = 16 << 20
"""No further copy begins while this many bytes are being copied."""
COPIES_LOOKS = 256
"""Pages to copy that one tick looks at: some may have left, and if all have, no job ends."""
COPIES_A_JOB = 8
"""The same when a job has ended, or a write begun: so copies go on as others end."""


class _Barren(NamedTuple):
    """A segment that is not worth reclaiming.

    Attributes:
        pages: pages in it.
        there: the spaces of these, and what each had on disk, in bytes.
    """

    pages: int
    there: list[tuple[PrefixTree, int]]


class SegmentReclaimer:
    """Seals, reclaims and deletes the segments of one log.

    Args:
        log: the places of records.
        admission: which pages are worth carrying over; charged for them.
        queue: gets jobs for the tier; :meth:`completed` gets their ends.
        limits: which pages must not be removed.
        graves: are told when tombstones may be lost.
        counts: counters.
        retry_ns: pause of reclaiming after a failed sync or deletion.

    Pages that a reclaim removes are effects, see :class:`~kvstore.state.disk.jobs.LeftDisk`;
    :meth:`resume` is called when they have been applied.

    Attributes:
        choosing: a segment is being looked at, or was not worth reclaiming: :meth:`go_on_choosing`
            looks at more of it, or at the next one.
    """

    def __init__(
        self, log: SegmentLog, admission: Admission, queue: DiskQueue,
        limits: DiskLimits, graves: Graves, counts: dict[str, int], retry_ns: int,
    ) -> None:  # fmt: skip
        self._log = log
        self._admission = admission
        self._queue = queue
        self._limits = limits
        self._graves = graves
        self._counts = counts
        self._retry_ns = retry_ns
        self._now_ns = self._rests_until_ns = 0
        self._victim: Segment | None = None
        self.choosing = self._took_long = False
        #: Pins have ended since segments that were not worth reclaiming were looked at.
        self._unpinned = False
        #: The segment that is being looked at, and what is left of that.
        self._choice: tuple[SegmentLook, Iterator[None]] | None = None
        #: A stretch was looked at since time advanced, or since :meth:`go_on_choosing`.
        self._stepped = False
        #: Segments that are not worth reclaiming → what they were when that was found.
        self._barren: dict[int, _Barren] = {}
        #: Segments whose file could not be deleted → when that is tried again.
        self._stuck: dict[int, int] = {}
        self._stage = _Drain.COPYING
        #: What of the victim has still to leave, and what is to be copied then, the next at the
        #: end; of that part, how many pages were looked at.
        self._plan = Reclaim([], [])
        self._looked = 0
        #: Copies in progress, and the size of their records.
        self._copies = self._copy_bytes = 0
        #: The segments that pages of the victim were copied to.
        self._targets: set[int] = set()
        self._sync = 0
        #: Pages of the victim are to leave, and nobody has said :meth:`resume` since.
        self._losing = False

    @property
    def reclaiming(self) -> bool:
        """Whether a segment is being reclaimed, or chosen for it."""
        return self._victim is not None or self.choosing

    def took_long(self) -> bool:
        """Whether a segment was looked at, or many pages of one given up, since the last call."""
        took_long, self._took_long = self._took_long, False
        return took_long

    def advance(self, now_ns: int, tick: int) -> None:
        """Advance the clock to ``now_ns``: do what is due, including retries."""
        assert now_ns >= self._now_ns, "the clock never goes back"
        self._now_ns = now_ns
        self._stepped = False
        if self._victim is not None and self._stage is _Drain.DROPPING:
            self._took_long = True
            self._drop(self._victim, tick, DROPS_MAX)
        elif self._victim is not None and self._stage is _Drain.COPYING:
            self._copy(self._victim, tick, COPIES_LOOKS)
        self.advance_reclaim(tick)

    def go_on_choosing(self, tick: int) -> None:
        """A turn has ended, once or twice: look at another stretch of a segment."""
        self._stepped = False
        if self.choosing:
            self.advance_reclaim(tick)
        self._stepped = False

    def advance_reclaim(self, tick: int) -> None:
        """Do what is due now."""
        for segment in self._log.full:
            if not segment.writing and not segment.sealing:
                segment.sealing = True
                self._queue.submit(DiskSeal(self._queue.number(), segment.number))
        if self._victim is None:
            self.choosing = self._log.wants_reclaim and self._choose(tick)
        elif self._stage is _Drain.DROPPING:
            self._drop(self._victim, tick, DROPS_A_JOB)
        elif self._stage is _Drain.COPYING:
            self._copy(self._victim, tick, COPIES_A_JOB)
        if self._victim is not None and self._now_ns >= self._rests_until_ns:
            self._go_on(self._victim)

    def resume(self, tick: int) -> None:
        """Removals were applied: copy the other pages once nothing more is to be removed.

        If pages leave because there is no place for a copy, the others wait for a job or a tick:
        all that is left of a segment must not leave in one turn.
        """
        self._losing = False
        victim = self._victim
        if victim is None:
            return
        if self._stage is _Drain.DROPPING and not self._plan.drop:
            self._stage = _Drain.COPYING
            self._plan.carry.sort(key=lambda part: -part.depth)
            self._copy(victim, tick, COPIES_A_JOB)
        if self._now_ns >= self._rests_until_ns:
            self._go_on(victim)

    def completed(
        self, job: DiskJob, of: RecordOf | None, error: KVStoreError | None, tick: int,
        failed: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """A job of this reclaimer has ended.

        Args:
            job: the job.
            of: the page that it copied.
            error: why it failed.
            tick: the current tick.
            failed: of a sync: the segments that cannot be synced.
        """
        match job:
            case DiskSeal(segment=number):
                # Without a footer it is scanned at the next start; that is all.
                self._log.sealed(number)
                self._reconsider_grown()
                self._counts["disk_seals_failed"] += error is not None
            case DiskCopy():
                assert of is not None
                self._copied(job, of, error)
            case DiskSync():
                error = self._synced(error, failed)
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
                    if self._victim.failed:
                        self._log.give_up(self._victim)  # else no sync would succeed any more
                self._victim = None
            case _:
                raise AssertionError(job)
        if error is None:
            self.advance_reclaim(tick)  # else it is tried again when time has passed

    def reconsider(self) -> None:
        """Limits have changed: fewer pages, or others, may have to be kept than before."""
        self._barren.clear()
        self._choice = None  # it may have found one of them

    def unpinned(self) -> None:
        """Pins have ended: once all other segments were looked at, those are looked at again.

        Pins may end all the time, so that neither a look begins anew for that, nor the first of the
        segments comes before the others again and again.
        """
        self._unpinned = True

    def _reconsider_grown(self) -> None:
        """Spaces may have grown beyond their reservations: look at their segments again."""
        there: dict[int, int] = {}
        for number, barren in list(self._barren.items()):
            for space, _ in barren.there:
                if space.number not in there:
                    there[space.number] = self._limits.there_bytes(space)
            if any(there[space.number] > before for space, before in barren.there):
                del self._barren[number]

    def is_mine(self, job: int) -> bool:
        """Whether a sync belongs to this reclaimer."""
        return job == self._sync

    def _choose(self, tick: int) -> bool:
        """Look at a stretch of a segment, and begin to reclaim it once all of it is known.

        Returns:
            whether there is more to look at, of this segment, or another one if it is not worth it.
        """
        assert self._victim is None
        if self._stepped:
            return True
        if self._choice is None:
            segments = self._log.segments
            for number, barren in list(self._barren.items()):
                if number not in segments or len(segments[number].pages) != barren.pages:
                    del self._barren[number]
            victim = self._log.victim(self._passed_over())
            if victim is None and self._unpinned:
                self._unpinned = False
                self._barren.clear()
                victim = self._log.victim(self._passed_over())
            if victim is None:
                self._stepped = True  # all segments were looked at
                return False
            awaited = victim.number in self._barren  # by tombstones, or it would not be here again
            choice = SegmentLook(victim, self._log, self._limits, awaited)
            self._choice = choice, choice.steps(tick, self._admission.carry_from)
        self._stepped = self._took_long = True
        choice, steps = self._choice
        for _ in steps:
            return True
        self._choice = None
        if choice.plan is None:
            self._barren[choice.victim.number] = _Barren(choice.pages, choice.there)
            return True
        self._victim = choice.victim
        self._counts["disk_kept_pages"] += len(choice.kept)
        self._begin(choice.victim, choice.plan, tick)
        return False

    def _passed_over(self) -> set[int]:
        stuck = {number for number, at_ns in self._stuck.items() if self._now_ns < at_ns}
        return stuck | self._barren.keys()

    def _begin(self, victim: Segment, plan: Reclaim, tick: int) -> None:
        assert victim.state is SegmentState.SEALED
        assert not self._copies
        assert not self._plan.carry, "pages of another segment were to be copied"
        assert not self._looked
        victim.state, self._stage = SegmentState.DRAINING, _Drain.DROPPING
        self._plan = Reclaim(plan.carry, plan.drop[::-1])
        self._targets.clear()
        self._drop(victim, tick, DROPS_A_JOB)  # more in the next turn: to choose takes its time

    def _drop(self, victim: Segment, tick: int, limit: int) -> None:
        """Remove up to ``limit`` pages, last pages first; the others are copied afterwards."""
        drop, left = self._plan.drop, limit
        while drop and left > 0:
            part = drop.pop()
            if part.pages > left:
                drop.append(part.cut(0, part.pages - left))
                part = part.cut(part.pages - left, part.pages)
            left -= part.pages
            self._give_up(victim, part)
        if not self._losing:
            self.resume(tick)

    def _give_up(self, victim: Segment, part: Part) -> None:
        """Remove the pages of a part, the last one first, except pages that were pinned since."""
        assert self._stage is _Drain.DROPPING
        end = part.pages
        while end > 0:
            live = victim.pages.live_up_to(part.offset + (end - 1) * part.each, end)
            if not live:  # its head may have taken it along
                self._counts["reclaimed_pages"] += 1
                end -= 1
                continue
            key = part.key(end - 1)
            node = part.space.index[key]
            if is_pinned(node, part.shard):
                self._plan.carry.append(part.cut(end - 1, end))  # since it was chosen
                end -= 1
                continue
            first = end - min(live, node.position(key) + 1)
            self._counts["reclaimed_pages"] += end - first
            self._lose(part.space, part.shard, part.cut(first, end).keys)
            end = first

    def _lose(self, space: PrefixTree, shard: int, keys: bytes) -> None:
        assert self._victim is not None
        assert keys
        self._losing = True
        self._queue.effects.append(LeftDisk(space, shard, keys, "reclaimed"))

    def _copy(self, victim: Segment, tick: int, limit: int) -> None:
        """Begin to copy pages, parents first: look at up to ``limit``, while few are in progress.

        Those that have left meanwhile, maybe because a page before them could not be copied, are
        passed.
        """
        assert self._stage is _Drain.COPYING
        carry, left = self._plan.carry, limit
        while carry and left > 0 and self._copies < COPIES_MAX:
            if self._copy_bytes >= COPY_BYTES_MAX:
                return
            part, number = carry[-1], self._looked
            left -= 1
            self._looked += 1
            if self._looked == part.pages:
                carry.pop()
                self._looked = 0
            found = self._there(victim, part, number)
            if found is not None:
                self._copy_page(*found, part.shard, tick)

    def _copy_page(self, node: PrefixNode, position: int, shard: int, tick: int) -> None:
        key, space = node.key_at(position), node.space
        placed = self._log.place(space, shard, key, tick, carried=True)
        if placed is None:
            self._lose(space, shard, key)
            return
        source = node.place_at(shard, position)
        assert self._victim is not None, node
        assert source.segment == self._victim.number != placed.place.segment, node
        self._log.pin_segment(source.segment)
        self._copies += 1
        self._copy_bytes += space.shards[shard].record_bytes
        self._targets.add(placed.place.segment)
        self._admission.charge(space.shards[shard].record_bytes)
        page = page_record(node, shard, position)
        job = DiskCopy(self._queue.number(), source, placed.place, page)
        self._queue.submit(job, RecordOf(space, shard))

    def _there(self, victim: Segment, part: Part, number: int) -> tuple[PrefixNode, int] | None:
        """The node and position of a page that still has its record in the victim."""
        if victim.pages.key_at(part.offset + number * part.each) is None:
            return None
        key = part.key(number)
        node = part.space.index[key]
        return node, node.position(key)

    def _go_on(self, victim: Segment) -> None:
        if self._stage is _Drain.COPYING and not self._plan.carry and not self._copies:
            self._stage = _Drain.SYNCING
            self._sync = self._queue.number()
            self._queue.submit(DiskSync(self._sync, frozenset(self._log.given_up)))
        elif self._stage is _Drain.READ and not victim.readers and not victim.pages:
            # All of its pages have left, departing ones too.
            if victim.failed and self._log.holds_up(victim):
                self._log.give_up(victim)
                self._graves.doubt(victim.number)
                self._victim, self.choosing = None, self._log.wants_reclaim
                return
            self._stage = _Drain.DELETING
            self._queue.submit(DiskDrop(self._queue.number(), victim.number))

    def _synced(self, error: KVStoreError | None, failed: tuple[int, ...]) -> KVStoreError | None:
        """The sync before a deletion has ended; None if all copies are durable.

        A segment that cannot be synced is no reason to keep the victim: often it is the victim
        itself. Only if copies were written to it, the victim stays until they were copied again.
        """
        assert not self._plan.carry, "copies that it does not cover"
        lost = self._targets.intersection(failed)
        if error is None or (failed and not lost):
            self._stage = _Drain.READ
            return None
        self._rests_until_ns = self._now_ns + self._retry_ns
        self._stage = _Drain.COPYING
        if lost:
            assert self._victim is not None
            self._victim.copied_to |= lost
            self._victim.state = SegmentState.SEALED
            self._victim = None
        return error

    def _copied(self, job: DiskCopy, of: RecordOf, error: KVStoreError | None) -> None:
        page, source = job.page, job.source
        shard, node = of.shard, of.space.index.get(page.key)
        position = node.position(page.key) if node is not None else 0
        self._copies -= 1
        self._copy_bytes -= of.space.shards[shard].record_bytes
        assert self._copies >= 0 <= self._copy_bytes
        self._log.unpin_segment(source.segment)
        if node is not None and not (
            node.on_disk >> shard & 1 and node.place_at(shard, position) == source
        ):
            node = None
        assert node is None or node.digest_at(shard, position) == page.digest, node
        if node is not None and error is None:
            self._log.moved(source, job.place)
            node.move_page(shard, position, job.place)
            self._counts["carried_pages"] += 1
            return
        self._log.abandon(job.place)
        if error is not None and not isinstance(error, PageCorrupt):
            self._log.fail(job.place.segment)  # else it was the record that was to be copied
        if node is not None:
            self._lose(node.space, shard, page.key)
