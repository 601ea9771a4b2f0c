"""Goal: whatever is put, taken out, reclaimed and cut off, the log and its index agree."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.protocol.errors import TierUnavailable
from kvstore.protocol.page import ALL_KEYS, PrefixKey
from kvstore.state.choice.admission import Admission
from kvstore.state.disk.graves import Graves
from kvstore.state.disk.jobs import (
    DiskCopy,
    DiskDrop,
    DiskJob,
    DiskRules,
    DiskSeal,
    DiskSync,
    DiskTombstone,
    Durable,
    LeftDisk,
    SyncPolicy,
    WritePolicy,
)
from kvstore.state.disk.log import CARRY_SHARE, SegmentLog, SegmentState
from kvstore.state.disk.pages import DiskPages
from kvstore.state.disk.queue import DiskQueue
from kvstore.state.disk.segments import SegmentReclaimer
from kvstore.state.disk.syncs import Syncs
from kvstore.state.table.adopt import FoundSegment, adopt
from kvstore.state.tree.columns import pack_place
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.places import Place, record_bytes
from kvstore.state.tree.prefix_tree import PrefixTree
from tests.state.disk.log_files import (
    NAMES,
    PATH_OF,
    RECORD,
    SEGMENT_BYTES,
    SEGMENTS,
    STEPS,
    Files,
    Record,
    set_steps,
)
from tests.state.world import DIGEST, FULL, ROOT, World, hold, identity, key

ERROR = TierUnavailable("no such disk")
RULES = DiskRules(WritePolicy.BACK, SyncPolicy.ALWAYS, 0, 1 << 30, retry_ns=0)


@dataclass
class Write:
    """A page being written."""

    node: PrefixNode
    record: Record


class LogMachine(RuleBasedStateMachine):
    """Drives a log, its keeper and its tombstones; is their disk."""

    @initialize(steps=STEPS)
    def begin(self, steps: tuple[int, int, int]) -> None:
        set_steps(*steps)
        self.files = Files()
        self.tick = self.cut_after = 0
        #: Names that must be there, and that must not, after a cut.
        self.durable: set[str] = set()
        self.gone: set[str] = set()
        self._start([])

    def _start(self, found: list[FoundSegment]) -> None:
        world = World()
        self.log = SegmentLog(SEGMENTS, SEGMENT_BYTES)
        admission = Admission("all", 0, self.log.capacity_bytes)
        world.table.residents.disk = DiskPages(world.table.residents, self.log, admission, RULES)
        self.space: PrefixTree = world.table.spaces.adopt(identity(), [FULL])[0]
        adopt(world.table, found, [(identity(), FULL)], max(self.files.used_numbers, default=0) + 1)
        self.jobs: dict[int, DiskJob] = {}
        self.queue = DiskQueue(world.table.story)
        counts = world.table.counts
        self.records: dict[int, Record] = {}
        self.covered: dict[int, list[Record]] = {}
        #: Files that cannot be synced any more.
        self.unsyncable: set[int] = set()
        self.writes: list[Write] = []
        self.burials: list[tuple[Durable, set[str]]] = []
        self.syncs = Syncs(RULES, self.log, self.queue)
        self.graves = Graves(self.log, self.queue, self.syncs, counts)
        limits = world.table.disk.limits
        self.keeper = SegmentReclaimer(
            self.log, admission, self.queue, limits, self.graves, counts, RULES.retry_ns
        )

    # ---- the disk -----------------------------------------------------------------------------

    def _take_jobs(self) -> None:
        jobs = list(self.queue.pending)
        self.queue.pending.clear()
        for job in jobs:
            self._take_job(job)

    def _take_job(self, job: DiskJob) -> None:
        self.jobs[job.job] = job
        match job:
            case DiskTombstone(place=place, keys=keys):
                names = [keys[at : at + 32] for at in range(0, len(keys), 32)]
                every = NAMES if ALL_KEYS in names else tuple(PATH_OF[one] for one in names)
                size = record_bytes(len(keys))
                self.records[job.job] = self.files.record(place, size, every, tombstone=True)
            case DiskCopy(place=place):
                self.records[job.job] = self.files.record(place, RECORD, (PATH_OF[job.page.key],))
            case DiskSync():
                self.covered[job.job] = self.files.covered(job)

    def _settle(self) -> None:
        """Apply what the parts say, and take their jobs."""
        while self.queue.effects:
            effects = list(self.queue.effects)
            self.queue.effects.clear()
            for one in effects:
                assert isinstance(one, LeftDisk)
                for at in range(0, len(one.keys), 32):
                    node = self.space.nodes.get(PrefixKey(one.keys[at : at + 32]))
                    if node is not None:
                        self._lose(node, one.shard)
            self.keeper.resume(self.tick)
        for durable in self.syncs.ended:
            durable.ended = True
            for waiting, names in self.burials:
                if waiting is durable and durable.error is None:
                    self.gone |= names
        self.syncs.ended.clear()
        self._take_jobs()

    # ---- what is asked for --------------------------------------------------------------------

    def _on_disk(self) -> dict[str, Place]:
        return {PATH_OF[at.key]: at.disk[0] for at in self.space.nodes.values() if at.disk}

    def _lose(self, node: PrefixNode, shard: int) -> None:
        below = [node]
        for at in below:
            below += at.children.values()
        for at in reversed(below):
            if shard in at.disk:
                self.log.remove(at, shard)
                at.forget_disk(shard)
                self.durable.discard(PATH_OF[at.key])
            if is_live(at):
                self.space.prune(at)

    @rule(name=st.sampled_from(NAMES))
    def put(self, name: str) -> None:
        head = name[:-1]
        on_disk = self._on_disk()
        under_way = {PATH_OF[one.node.key] for one in self.writes}
        if name in on_disk or name in under_way or (head and head not in on_disk):
            return
        node = self.space.node(key(name), key(head) if head else ROOT)
        place = None
        if not self.graves.holds(node, 0):
            self.tick += 1
            place = self.log.place(self.space, 0, node.keys, self.tick)
        if place is None:
            self.space.prune(node)
        else:
            self.gone.discard(name)
            for _, names in self.burials:
                names.discard(name)
            assert place.pages == 1
            self.writes.append(Write(node, self.files.record(place.place, RECORD, (name,))))
        self.keeper.advance_reclaim(self.tick)
        self._settle()

    @rule(
        first=st.sampled_from(range(10)),
        most=st.sampled_from((5, 10, 30)),
        drops=st.booleans(),
        uses=st.sampled_from((0, 1, None)),
    )
    def churn(self, first: int, most: int, drops: bool, uses: int | None) -> None:
        """Write pages one after the other, so that segments fill; jobs end meanwhile."""
        for at in range(first, first + most):
            name = NAMES[at % len(NAMES)]
            if name in self.gone or any(name in names for _, names in self.burials):
                continue  # what was taken out is to stay away, for a restart to find it if it can
            if drops:
                self.drop(name)
            self.put(name)
            if uses is not None and at % 2 == uses:
                self.use(name)
            if self.jobs and at % 2:
                self._end_job(min(self.jobs), fails=False)
            if self.writes:
                self._end_write(self.writes.pop(), fails=False)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, True)))
    def end_write(self, data: st.DataObject, fails: bool) -> None:
        write = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        self._end_write(write, fails=fails)

    def _end_write(self, write: Write, *, fails: bool) -> None:
        node, place = write.node, write.record.place
        head = node.parent
        reachable = head is not None and (head is self.space.root or 0 in head.disk)
        if fails:
            self.log.fail(place.segment)
        else:
            write.record.written = True
        if reachable and not fails:
            node.adopt(0, pack_place(place), DIGEST)
            self.log.wrote(place)
            self.syncs.wrote()
        else:
            self.log.abandon(place)
            if is_live(node):
                self.space.prune(node)
        self._go_on()

    @rule(name=st.sampled_from(NAMES))
    def use(self, name: str) -> None:
        self.tick += 1
        node = self.space.nodes.get(key(name))
        while node is not None:
            node.access, node = self.tick, node.parent

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        """As eviction does: no restart needs to know."""
        if name in self._on_disk():
            self._lose(self.space.nodes[key(name)], 0)

    @rule(name=st.sampled_from((*NAMES, *NAMES, "")), then=st.sampled_from(("wait", "put", "")))
    def evict(self, name: str, then: str) -> None:
        """As an operator does, of a page with all that follows it, or of everything."""
        top = self.space.nodes.get(key(name)) if name else self.space.root
        if top is None:
            return
        below = [top]
        for at in below:
            below += at.children.values()
        names = {PATH_OF[at.key] for at in below if at is not self.space.root}
        for at in reversed(below[not name :]):
            self._bury(at)
        if not name:
            names = set(NAMES)
            self.graves.bury_all(self.space)
        for write in self.writes:
            if PATH_OF[write.node.key] in names and is_live(write.node):
                write.node.parent.children.pop(write.node.key)
                self.space.remove(write.node)
        self.durable -= names
        self.burials.append((self.graves.await_written(0), names))
        if then == "put" and name:
            self.put(name)
            if self.writes:
                self._end_write(self.writes.pop(), fails=False)
        if then:
            self._go_on()
            self.let_go_on(12)

    def _bury(self, node: PrefixNode) -> None:
        if node.disk:
            self.log.remove(node, 0)
            node.forget_disk(0)
        self.graves.bury(node, 0)
        if is_live(node):
            self.space.prune(node)

    # ---- what goes on -------------------------------------------------------------------------

    def _go_on(self) -> None:
        self.graves.write()
        self.keeper.advance(0, self.tick)
        self.syncs.advance(0)
        self._settle()

    @rule()
    def time_passes(self) -> None:
        self._go_on()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, False, True)))
    def end_job(self, data: st.DataObject, fails: bool) -> None:
        self._end_job(data.draw(st.sampled_from(sorted(self.jobs))), fails=fails)

    @rule(most=st.integers(1, 12))
    def let_go_on(self, most: int) -> None:
        """End the jobs that wait longest."""
        for _ in range(most):
            if self.jobs:
                self._end_job(min(self.jobs), fails=False)

    def _end_job(self, number: int, *, fails: bool) -> None:
        job = self.jobs.pop(number)
        _, of = self.queue.end(number, None)
        error = ERROR if fails and isinstance(job, DiskCopy | DiskTombstone | DiskDrop) else None
        record = self.records.pop(number, None)
        if record is not None:
            record.written = error is None
        match job:
            case DiskTombstone():
                if error is not None:
                    self.log.fail(job.place.segment)
                self.graves.completed(job, error)
            case DiskSync():
                covered = self.covered.pop(number)
                failed = self._sync([one for one in covered if not one.synced], fails=fails)
                error = ERROR if failed else None
                self._note_durable()
                if self.keeper.is_mine(number):
                    self.keeper.completed(job, of, error, self.tick, failed)
                else:
                    self.syncs.completed(error)
            case DiskSeal():
                file = self.files.by_number[job.segment]
                written = [one for one in file.records if one.written and not one.synced]
                file.sealed = not self._sync(written, fails=fails)
                error = None if file.sealed else ERROR
                self.keeper.completed(job, of, error, self.tick)
            case _:
                if isinstance(job, DiskDrop) and error is None:
                    del self.files.by_number[job.segment]
                self.keeper.completed(job, of, error, self.tick)
        self._go_on()

    def _sync(self, records: list[Record], *, fails: bool) -> tuple[int, ...]:
        """Sync what is written; which files failed: those that did before, and one more."""
        there = [one for one in records if one.place.segment in self.files.by_number]
        if fails and there:
            self.unsyncable.add(there[-1].place.segment)
        failed = {one.place.segment for one in there} & self.unsyncable
        for one in there:
            one.synced = one.place.segment not in failed
        for segment in failed:
            self.log.fail(segment)
        return tuple(sorted(failed))

    def _note_durable(self) -> None:
        there = self.files.synced()
        for name, place in sorted(self._on_disk().items()):
            head = name[:-1]
            if place in there and (not head or head in self.durable):
                self.durable.add(name)

    @precondition(lambda self: len(self.files.used_numbers) >= self.cut_after)
    @rule(data=st.data(), more=st.sampled_from((0, 2, 5)))
    def cut(self, data: st.DataObject, more: int) -> None:
        """The power fails; what was not synced is there afterwards, or not."""
        self.cut_after = len(self.files.used_numbers) + more
        chance = data.draw(st.randoms(use_true_random=False))
        for job in self.jobs.values():
            if isinstance(job, DiskDrop) and chance.random() < 0.5:
                del self.files.by_number[job.segment]
        self.files.cut_power(chance)
        self._start(self.files.found())
        on_disk = self._on_disk()
        assert self.durable <= on_disk.keys(), "what was synced is there"
        assert not self.gone & on_disk.keys(), "what was taken out is not"
        self.durable = set(on_disk)

    def teardown(self) -> None:
        set_steps()

    # ---- what must hold -----------------------------------------------------------------------

    @invariant()
    def the_log_accounts_for_every_byte(self) -> None:
        hold(self.log.checks())
        copies = sum(1 for job in self.jobs.values() if isinstance(job, DiskCopy))
        tombstones = sum(1 for job in self.jobs.values() if isinstance(job, DiskTombstone))
        segments = self.log.segments.values()
        assert sum(one.writing for one in segments) == len(self.writes) + copies + tombstones
        assert sum(one.readers for one in segments) == copies
        stats = self.log.stats()
        assert stats.live_bytes == RECORD * (len(self._on_disk()) + len(self.writes) + copies)
        ends = sum(one.end for one in segments)
        assert stats.dead_bytes == ends - stats.live_bytes
        assert stats.segments == len(self.log.segments) <= SEGMENTS
        assert stats.used_bytes == stats.segments * SEGMENT_BYTES <= stats.capacity_bytes
        assert self.files.by_number.keys() <= self.log.segments.keys(), "a file that nobody counts"

    @invariant()
    def every_page_of_the_index_can_be_reached_and_read(self) -> None:
        on_disk = self._on_disk()
        at = {one.place: one for one in self.files.records()}
        for name, place in on_disk.items():
            assert not name[:-1] or name[:-1] in on_disk
            assert at[place].names == (name,)
            assert at[place].written
            assert self.log.segments[place.segment].pages.key_at(place.offset) == key(name)

    @invariant()
    def a_reclaim_frees_at_least_what_it_may_not_carry(self) -> None:
        for segment in self.log.segments.values():
            if segment.state is SegmentState.SEALED:
                *_, plan = self.log.plan(segment, self.tick, 0.0)
                assert plan is not None
                carried = sum(part.pages for part in plan.carry) * RECORD
                assert carried <= SEGMENT_BYTES * CARRY_SHARE + 2 * RECORD


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
