"""Pages on their way to the SSD log and back: what is written, loaded, carried and synced. Pure.

::

    in memory ──write──► in memory and on disk ──evicted──► on disk ──load──► in memory and on disk
                                                               │
                                                               └─ its segment is reclaimed: gone

The pages on disk are closed towards the start of their chains: a page counts as being there only
once the page before it does, so whatever a crash leaves can be reached. While a page is written its
slot is pinned; while one is loaded its slot belongs to nobody else.

Completions come in any order. A write counts when its bytes are in the file and its head is on
disk; whoever put it durably is told after the next sync that began later.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.protocol.counts import RecordCounts, SsdCounts
from kvstore.protocol.errors import CapacityError, KVStoreError, PageCorrupt
from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.backlog import Backlog
from kvstore.state.disk.checks import CheckRun, DiskChecks, names
from kvstore.state.disk.durability import is_in_slot
from kvstore.state.disk.graves import Graves
from kvstore.state.disk.jobs import (
    EVICT,
    FULL,
    NO_RULES,
    SELECTIVE,
    THROUGH,
    WRITING,
    CorruptRecord,
    DiskCheck,
    DiskRead,
    DiskRules,
    DiskSync,
    DiskTokens,
    DiskTombstone,
    DiskWrite,
    Durable,
    LeftDisk,
    PageMemory,
    RecordOf,
    Verdict,
)
from kvstore.state.disk.limits import DiskLimits
from kvstore.state.disk.loads import DiskLoads
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.persists import Persists
from kvstore.state.disk.plans import mark_before
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.segments import SegmentReclaimer
from kvstore.state.disk.syncs import Syncs
from kvstore.state.disk.writes import Writes
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import BLOCK_BYTES, Place
from kvstore.state.tree.prefix_tree import PrefixTree

BACKLOG_TURN: Final = 64
"""Maximum pages of the backlog that one turn examines."""
EVICTED_TURN: Final = 256
"""Maximum pages that one turn starts to write because their memory is needed, plus the rest of a
run."""


class DiskPages:
    """The disk side of a page table.

    Args:
        memory: the memory side.
        log: the places of records.
        admission: which ordinary pages are worth writing.
        rules: when they are written and synced.

    Attributes:
        jobs: for the tier, in order.
        effects: what happened to pages, in order: the page table applies them before anything else
            happens, and calls :meth:`applied`.
        acknowledged: durable puts and removals that ended.
        loads: loads of pages from disk.
        writes: writes of pages to disk.
        persists: durable puts.
        unfinished: more can be written or acknowledged now, by :meth:`go_on`.
        exists: there is a disk; without one nothing is ever written, see :func:`no_disk`.
    """

    def __init__(
        self, memory: PageMemory, log: SegmentLog, admission: Admission, rules: DiskRules
    ) -> None:
        self.log = log
        self.exists = log.record_bytes_max > 0
        self.admission = admission
        self.rules = rules
        self._queue = DiskQueue(memory.story)
        self.jobs, self.effects = self._queue.pending, self._queue.effects
        self._memory = memory
        self._sync_failed = False
        self._now_ns = self._retry_ns = 0
        self.unfinished = False
        #: See :meth:`take_passed`.
        self._passed = False
        #: Pages of which :meth:`before_eviction` began to write since the last :meth:`go_on`; and
        #: the message, by its tick, for which it looked for a place in vain.
        self._evicted, self._in_vain = 0, -1
        self._backlog = Backlog()
        self._syncs = Syncs(rules, log, self._queue)
        self.loads = DiskLoads(memory, log, rules, self._queue)
        self._checks = DiskChecks(log, self._queue, memory.counts)
        #: What spaces may and must have on disk.
        self.limits = DiskLimits(memory, log, self._queue)
        #: Pages that were taken out on purpose, until their tombstones are written.
        self.graves = Graves(log, self._queue, self._syncs, memory.counts)
        self._reclaimer = SegmentReclaimer(
            log, admission, self._queue, self.limits, self.graves, memory.counts, rules.retry_ns
        )
        self.writes = Writes(
            memory, log, admission, self.limits, self.graves, self._syncs, self._queue
        )
        self.persists = Persists(
            memory, log, rules, self.writes, self._syncs, self._queue, self._write,
            lambda: self.busy,
        )  # fmt: skip
        self.acknowledged = self.persists.acknowledged

    # ---- towards the disk -------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether memory or disk space will be freed without a further request."""
        buries = self.graves.waiting_keys and not self.degraded
        return bool(self.writes or buries) or self._room_is_made or self.limits.behind

    @property
    def _room_is_made(self) -> bool:
        """Whether a segment is being sealed or reclaimed."""
        return self._reclaimer.reclaiming or bool(self.log.full)

    @property
    def is_full(self) -> bool:
        """Whether the limit of bytes being written is reached."""
        return self.writes.in_flight_bytes >= self.rules.in_flight_bytes_max

    @property
    def degraded(self) -> bool:
        """Whether a write failed recently: nothing is written for a while."""
        return self._now_ns < self._retry_ns

    @property
    def troubled(self) -> bool:
        """Whether writes fail, or a sync failed and its segment still exists."""
        return self.degraded or (self._sync_failed and self.log.is_failing)

    def stored(
        self, nodes: Sequence[PrefixNode], keys_of: Sequence[list[PrefixKey]], shard: int
    ) -> None:
        """Pages became READY in memory: these keys of each node, which may be split by now."""
        assert len(nodes) == len(keys_of)
        for at, node in enumerate(nodes):
            if self.rules.write is THROUGH or node.disk_pins:
                self._backlog.add_stored(node, keys_of[at], shard)
        if self._backlog:
            self._pump()

    def used(self, nodes: Sequence[PrefixNode], shard: int) -> None:
        """A request loads a run of pages: it uses those before them, too, wherever it has them."""
        mark_before(nodes[0], self._memory.moment.tick)
        if self.rules.write is SELECTIVE and self.writes.is_dirty(nodes[-1], shard):
            self._backlog.add(nodes[-1], shard)
            self._pump()

    def is_dirty(self, node: PrefixNode) -> bool:
        """Whether :meth:`before_eviction` might write pages of a node; changes nothing."""
        return self.exists and any(self.writes.is_dirty(node, shard) for shard in node.slot_columns)

    def before_eviction(self, node: PrefixNode, pages: int = 1) -> Verdict:
        """The memory of a node's last ``pages`` pages is needed: write them first if admitted.

        All pages of the node are written, after those before it, which may take several turns. If
        only the first ones are, the node is split, and keeps the others.
        """
        verdict: Verdict = EVICT
        if not self.exists:
            return verdict
        refused = node.depth > node.ask_depth > 0
        if not node.memory & ~node.on_disk:
            self.admission.leaves(node, 0, self._memory.moment.tick)
        for shard in list(node.slot_columns):
            if not self.writes.is_dirty(node, shard):
                continue
            if refused:
                self.admission.refuse(min(pages, node.count))
                self._memory.counts["not_admitted_pages"] += min(pages, node.count)
                continue
            if self.rules.write is SELECTIVE and not node.uses:
                continue
            if self.degraded:
                self._memory.counts["demotions_failed"] += min(pages, node.count)
                continue
            # In vain one prompt of many runs is walked for a message, not one for each victim.
            waits = self._in_vain == self._memory.moment.tick and self._room_is_made
            waits = waits and not self.log.has_room(node.space, shard)
            if self.is_full or self._evicted >= EVICTED_TURN or waits:
                return FULL
            full = self._memory.counts["disk_full_pages"]
            most = self._room(node, shard, EVICTED_TURN - self._evicted)
            begun = self._write(node, shard, most=most)
            self._evicted += max(begun, node.count)
            if self.writes.holds(node, shard) or begun >= most:
                verdict = WRITING  # the pages before it come first, if they are many
            elif self._memory.counts["disk_full_pages"] > full and self._room_is_made:
                self._in_vain = self._memory.moment.tick
                return FULL  # it waits for its place rather than be dropped
            elif self.limits.is_behind(node.space):
                self.unfinished = True
                return FULL
        return verdict

    def make_durable(
        self, nodes: Sequence[PrefixNode], shard: int, deadline_ns: int = 0
    ) -> Durable:
        """Write these pages and all pages before them, regardless of admission, in steps.

        Args:
            nodes: pages of one space, each of which continues the one before it.
            shard: of them.
            deadline_ns: no write begins from then on; 0 = never.

        Returns:
            a handle that is in ``acknowledged`` once they are synced.

        Raises:
            CapacityError: there is no room for one of them now, writes fail at the moment, or
                :data:`~kvstore.state.disk.jobs.DURABLES_MAX` puts wait already (their callers may
                have given up).
            DurabilityUnavailable: one of them must never be written to disk.
        """
        try:
            return self.persists.begin(nodes, shard, deadline_ns, degraded=self.degraded)
        finally:
            self._syncs.advance(self._now_ns)
            self.persists.end_some()
            self.unfinished |= self.persists.may_go_on(degraded=self.degraded)
            self.unfinished |= self.limits.behind or self._syncs.behind

    def ensure_written(self, node: PrefixNode, shard: int) -> bool:
        """Whether the page is on disk; if not, it is being written now, regardless of admission.

        While the pages before it are many, some of them begin with each call.

        Raises:
            CapacityError: it cannot be written now.
        """
        departs = node.space.departs(node) >> shard & 1
        if node.on_disk >> shard & 1 and not departs:
            return True
        if self.writes.holds(node, shard):
            return False
        begun = most = self._room(node, shard, BACKLOG_TURN)
        if not (self.degraded or departs or self.is_full):
            begun = self._write(node, shard, Durable(), most)
        comes = begun >= most or self.writes.holds(node, shard) or self.limits.is_behind(node.space)
        if self.degraded or departs or not comes:
            raise CapacityError("the SSD tier does not take this page now")
        return False

    def ensure_all_written(self, nodes: Sequence[PrefixNode]) -> int:
        """How many leading pages are on disk, or are being written now, regardless of admission.

        Args:
            nodes: single pages of one space, each of which continues the one before it.
        """
        if any(at.space.departs(at) for at in nodes[-1:]):
            return 0
        if not self.degraded:
            self.writes.begin_all(nodes, self._now_ns)
            self._reclaimer.advance_reclaim(self._memory.moment.tick)
        return self.writes.begun(nodes)

    def write_out(self, spaces: Iterable[PrefixTree]) -> None:
        """Before the node stops: write pages that are worth it, and sync; see :attr:`settled`."""
        for space in spaces:
            for number in space.by_creation.numbers(0):
                for node in space.by_creation.nodes(number):
                    if self.rules.write is not SELECTIVE or node.uses:
                        for shard in node.slot_columns:
                            if self.writes.is_dirty(node, shard):
                                self._backlog.add(node, shard)
        self._pump()

    @property
    def settled(self) -> bool:
        """Whether no page waits to be written or synced."""
        pending = self._backlog or self.graves.waiting_keys
        if self.writes or len(self.persists) or (pending and not self.degraded):
            return False
        self._syncs.hurry()
        self._syncs.advance(self._now_ns)
        return not self._syncs.ended and (self._syncs.idle or self.degraded)

    def limit(self, space: PrefixTree, quota_bytes: int, reserved_bytes: int) -> None:
        """Set a space's limits on disk. The caller then queues its pages and shrinks it.

        Raises:
            InvalidArgument, CapacityError: see :meth:`kvstore.state.choice.quotas.Quotas.set`.
        """
        self.limits.limit(space, quota_bytes, reserved_bytes, self.log.reservable_bytes)
        self._reclaimer.reconsider()

    def took_long(self) -> bool:
        """Whether much of a segment was looked at or given up since this was last asked."""
        return self._reclaimer.took_long()

    def needs_space(self, space: PrefixTree) -> bool:
        """Whether tombstones or limits on disk still refer to this empty space."""
        return space.number in self.limits.quotas.limited or self.graves.waits_for(space)

    def unpinned(self) -> None:
        """Pins ended: fewer pages may have to be kept."""
        self._reclaimer.unpinned()

    def _room(self, node: PrefixNode, shard: int, most: int) -> int:
        """How many pages begin to be written at once: ``most``, within the bytes in flight."""
        left_bytes = self.rules.in_flight_bytes_max - self.writes.in_flight_bytes
        most = max(1, min(most, left_bytes // node.space.shards[shard].record_bytes))
        return self.writes.at_once(node.space, shard, most)

    def _write(
        self, node: PrefixNode, shard: int, durable: Durable | None = None,
        most: int = sys.maxsize,
    ) -> int:  # fmt: skip
        """Start to write a node's pages and those before it; returns how many writes have begun."""
        before = self.writes.in_flight_bytes
        self.writes.begin(node, shard, self._now_ns, durable, most)
        begun = (self.writes.in_flight_bytes - before) // node.space.shards[shard].record_bytes
        self._reclaimer.advance_reclaim(self._memory.moment.tick)
        return begun

    def _pump(self) -> None:
        """Write waiting pages up to the limit of bytes in progress, a part of them now."""
        self.unfinished, left = False, BACKLOG_TURN
        while self._backlog and not self.degraded and not self.is_full:
            if self._backlog.is_held(self.graves):
                return  # they were taken out before they were stored again; that is not written yet
            if left <= 0:
                self.unfinished = True
                return
            room_bytes, begun = self.rules.in_flight_bytes_max - self.writes.in_flight_bytes, 0
            looked, node, shard = self._backlog.take(left, room_bytes)
            if node is not None and self.writes.is_dirty(node, shard):
                most = self._room(node, shard, left)
                begun = self._write(node, shard, Durable() if node.disk_pins else None, most)
                if begun >= most and self.writes.is_dirty(node, shard):
                    self._backlog.put_back(self.writes.unwritten(node, shard), shard)
                elif begun < most and not self.writes.holds(node, shard):
                    self._backlog.give_up_rest()
            left -= max(looked, begun)

    # ---- from the disk ----------------------------------------------------------------------

    def check(self, pages: Iterable[tuple[PrefixNode, int]]) -> CheckRun:
        """Read the records of pages of nodes again; pages that fail are quarantined."""
        return self._checks.begin(CheckRun(names(pages)), len(self.loads))

    def read_tokens(self, pages: Iterable[tuple[PrefixNode, int]]) -> CheckRun:
        """Read only the tokens from the records of pages of nodes."""
        return self._checks.begin(CheckRun(names(pages), tokens_only=True), len(self.loads))

    def _quarantine(self, node: PrefixNode, shard: int) -> None:
        """The record of a page differs from what was written; a copy in memory stays."""
        assert node.count == 1, node
        in_memory = node.memory >> shard & 1
        self._queue.effects.append(
            LeftDisk(node.space, shard, node.keys, "head_lost")
            if in_memory
            else CorruptRecord(node.space, shard, node.key)
        )

    # ---- what the tier says -----------------------------------------------------------------

    def completed(
        self, job: int, error: KVStoreError | None, tokens: bytes = b"",
        failed: tuple[int, ...] = (),
    ) -> bool:  # fmt: skip
        """A job has ended; ``error`` None = it succeeded. Call :meth:`go_on` afterwards.

        Args:
            job: its number.
            error: why it failed.
            tokens: of a job that read a record: the tokens in it.
            failed: of a sync or a seal: the segments that cannot be synced; the log gives them up.

        Returns:
            whether there may be more room than before; not while a run is only partly written.
        """
        writes = len(self.writes)
        ended, of = self._queue.end(job, error)
        self.persists.job_ended()
        for number in failed:
            self.log.fail(number)
        if isinstance(ended, DiskSync):
            self._sync_failed = error is not None
        match ended:
            case DiskWrite():
                assert of is not None
                self._wrote(ended, of, error)
            case DiskRead():
                self.loads.loaded(ended, error, tokens)
                self._reclaimer.advance_reclaim(self._memory.moment.tick)
            case DiskCheck() | DiskTokens():
                assert of is not None
                bad = self._checks.completed(ended, of, error, tokens)
                if bad is not None:
                    self._quarantine(bad, of.shard)
                self._reclaimer.advance_reclaim(self._memory.moment.tick)
            case DiskTombstone():
                if error is not None:
                    self._fail(error, ended.place)
                self.graves.completed(ended, error)
            case DiskSync() if not self._reclaimer.is_mine(job):
                if error is not None:
                    self._fail(error)
                else:
                    self.graves.synced()
                self._syncs.completed(error)
            case _:
                self._reclaimer.completed(ended, of, error, self._memory.moment.tick, failed)
        settled = error is not None or len(self.writes) != writes
        return settled or not isinstance(ended, DiskWrite)

    def _wrote(self, job: DiskWrite, of: RecordOf, error: KVStoreError | None) -> None:
        if error is not None and not isinstance(error, PageCorrupt):
            self._fail(error, job.place)
        for node, shard in self.writes.wrote(job, error):
            if node.disk_pins:
                self._backlog.add(node, shard)
        if error is not None and isinstance(error, PageCorrupt) and is_in_slot(job, of):
            self._queue.effects.append(CorruptRecord(of.space, of.shard, job.page.key))

    def go_on(self) -> None:
        """Write and sync waiting pages, as far as possible now."""
        self._evicted = 0
        passed = self.limits.go_on()
        if passed:
            self.persists.job_ended()
            self._passed = True
        self.persists.end_some()
        if not self.degraded:
            self.graves.write()
        self.persists.go_on(degraded=self.degraded)
        self._pump()
        self.unfinished |= self.persists.may_go_on(degraded=self.degraded)
        if self._checks.runs:
            self._checks.go_on(len(self.loads))
        self.persists.end_some()
        self._syncs.note_some()
        self._syncs.advance(self._now_ns)
        self._reclaimer.go_on_choosing(self._memory.moment.tick)
        self.unfinished |= self._syncs.behind or self._reclaimer.choosing
        self.unfinished |= self.limits.free_some() or self.limits.behind or passed

    def take_passed(self) -> bool:
        """Whether a space is behind no more since this was last asked: it may have room."""
        passed, self._passed = self._passed, False
        return passed

    def advance(self, now_ns: int) -> None:
        """Advance the clock to ``now_ns``; :meth:`go_on` then syncs and writes what is due."""
        assert now_ns >= self._now_ns, "the clock never goes back"
        self._now_ns = now_ns
        self.persists.advance()
        self._reclaimer.advance(now_ns, self._memory.moment.tick)

    def applied(self) -> None:
        """All effects were applied; there may be new ones."""
        self.limits.applied()
        self._reclaimer.resume(self._memory.moment.tick)

    def stats(self, records: RecordCounts, recovery_s: float = 0.0) -> SsdCounts:
        """The contents of the disk, and jobs in progress.

        Args:
            records: counts of reads and writes.
            recovery_s: duration of the recovery at the start.
        """
        log = self.log.stats()
        return SsdCounts(
            write=self.rules.write, sync=self.rules.sync, admission=self.admission.name,
            wear=self.admission.wear(), writes=self.limits.writing.pages, loads=len(self.loads),
            checks=len(self._checks), in_flight_bytes=self.writes.in_flight_bytes,
            backlog_pages=self._backlog.pages, degraded=self.troubled,
            tombstone_keys_waiting=self.graves.waiting_keys, capacity_bytes=log.capacity_bytes,
            used_bytes=log.used_bytes, live_bytes=log.live_bytes, dead_bytes=log.dead_bytes,
            segments=log.segments, written_bytes=log.written_bytes,
            carried_bytes=log.carried_bytes, reclaimed_segments=log.reclaimed_segments,
            write_amplification=log.write_amplification, recovery_s=recovery_s,
            jobs=records.jobs, errors=records.errors, failed_segments=records.failed_segments,
            directories=records.directories, written_records=records.written_records,
            read_records=records.read_records, read_bytes=records.read_bytes,
            syncs=records.syncs, seals=records.seals, drops=records.drops,
        )  # fmt: skip

    def next_deadline_ns(self) -> int:
        """When to call :meth:`advance`; 0 = not needed."""
        return self._syncs.next_deadline_ns()

    def _fail(self, error: KVStoreError, place: Place | None = None) -> None:
        if place is not None:
            self.log.fail(place.segment)
        self._retry_ns = self._now_ns + self.rules.retry_ns
        self._memory.counts[f"disk_{error.code}"] += 1


def no_disk(memory: PageMemory) -> DiskPages:
    """The disk side of a node without an SSD tier: its log has no room, so it accepts no record."""
    return DiskPages(memory, SegmentLog(0, BLOCK_BYTES), Admission("all", 0, 0), NO_RULES)
