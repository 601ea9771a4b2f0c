"""A simulated SSD tier for simulations of a node: slow, with failures and bit flips."""

from contextlib import suppress
from functools import partial
from typing import Final

from kvstore.node.desk import Desk
from kvstore.protocol.counts import NO_RECORDS, SsdCounts
from kvstore.protocol.errors import CapacityError, KVStoreError, PageCorrupt, TierUnavailable
from kvstore.state.choice.admission import Admission
from kvstore.state.disk import jobs as diskjobs
from kvstore.state.disk.jobs import DiskJob, DiskRules
from kvstore.state.disk.log import SegmentLog
from kvstore.state.disk.pages import DiskPages
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.places import Place, record_bytes
from kvstore.state.tree.slots import Slot
from kvstore.testing.records_on_disk import RecordsOnDisk
from kvstore.testing.timeline import PAGE_BYTES, Timeline, page_content

SEGMENT_BYTES: Final = 32 * PAGE_BYTES
SEGMENTS: Final = 8
DELAY_NS_MAX: Final = 4_000_000


class SimulatedTier:
    """A simulated SSD tier: every job takes some time, some fail, some bytes flip.

    Args:
        time: timeline of the simulation.
        desk: the desk, which polls the tier when a job has ended; its node gets a disk side.
        extents: the node's memory, by number.
        rules: rules of the disk side.
        disk: what lies on it; the node adopts those pages. None = nothing.
    """

    def __init__(
        self, time: Timeline, desk: Desk, extents: dict[int, bytearray], rules: DiskRules,
        disk: RecordsOnDisk | None = None,
    ) -> None:  # fmt: skip
        self._disk = disk or RecordsOnDisk()
        #: Jobs under way, by number, and their sequence numbers.
        self._under_way: dict[int, tuple[DiskJob, int]] = {}
        self._time = time
        self._random = time.random
        self._outcome = time.outcome
        self._desk = desk
        self._node = desk.node
        self._extents = extents
        self._sizes: dict[int, int] = {}
        self._ended: list[tuple[int, KVStoreError | None, bytes]] = []
        pages = desk.node.pages
        pages.keeping.pins.budget_bytes = pages.keeping.pins.disk_budget_bytes = 4 * PAGE_BYTES
        log = SegmentLog(SEGMENTS, SEGMENT_BYTES)
        self.pages = pages.residents.disk = DiskPages(
            pages.residents, log, Admission("all", 0, log.capacity_bytes), rules
        )
        self._outcome.pages_adopted += self._disk.adopted_by(pages)

    def end(self) -> None:
        """The node is killed: what was under way may be done, but touches no memory any more."""
        under_way, self._under_way = list(self._under_way.values()), {}
        self._random.shuffle(under_way)
        for job, sequence in under_way:
            if not isinstance(job, diskjobs.DiskRead) and self._random.random() < 0.3:
                self._carry_out(job, sequence)
        self._disk.left_by(self.pages.log)

    def flush(self) -> None:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        self._node.pages.tiers.go_on()
        jobs = list(self.pages.jobs)
        self.pages.jobs.clear()
        for job in jobs:
            self._under_way[job.job] = job, self._disk.submitted()
            delay_ns = self._random.randrange(DELAY_NS_MAX)
            self._time.at(delay_ns, partial(self._end, job.job))

    def poll(self, now_ns: int) -> None:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        ended, self._ended = self._ended, []
        for number, (job, error, tokens) in enumerate(ended, start=1):
            last = number == len(ended)
            self._node.disk_completed(job, error, now_ns, tokens, last=last)

    def stats(self) -> SsdCounts:
        """See :class:`~kvstore.node.desk.DiskSide`."""
        return self.pages.stats(NO_RECORDS)

    def check_some(self) -> None:
        """Verify some pages on disk, as an operator does."""
        pages = [
            (node, 0)
            for space in self._node.pages.spaces
            for node in space.nodes.values()
            if 0 in node.disk
        ]
        some = self._random.sample(pages, min(4, len(pages)))
        self.pages.check(some)
        self.pages.read_tokens(some)
        self.flush()

    def limit_some(self, table: PageTable) -> None:
        """Limit a space on disk, and pin a page for a short time, as an operator does."""
        random, spaces = self._random, list(table.spaces)
        if not spaces:
            return
        space, record = random.choice(spaces), record_bytes(PAGE_BYTES)
        quota = random.choice((0, 2, 3, 6))
        self.pages.limit(space, quota * record, random.randrange(3) * record)
        for node in space.nodes.values():
            table.residents.add_candidate(node)
        if (leaves := self.pages.limits.leaves_of(space)) is not None:
            leaves.all_offered = True
        table.tiers.shrink(space, 1 << 20)
        keys = [at.key for at in space.nodes.values() if at.ready and not at.memory_only]
        with suppress(CapacityError):
            if keys:
                ends_ns = self._time.now_ns + 20_000_000
                table.keeping.pin(
                    space, random.choice(keys), ends_ns, random.choice(("host", "ssd"))
                )
        self.flush()

    def check_quotas(self) -> None:
        """No space grows beyond its quota; one that was larger before may shrink slowly."""
        for limits in self.pages.limits.quotas.all():
            space, before = limits.space, self._sizes.get(limits.space.number, 0)
            quota = limits.quota_bytes or 1 << 62
            assert space.disk_bytes <= max(quota, before), "a space grew beyond its quota"
        self._sizes = {one.number: one.disk_bytes for one in self._node.pages.spaces}

    def _end(self, number: int) -> None:
        if number not in self._under_way:
            return  # the node was killed
        job, sequence = self._under_way.pop(number)
        error: KVStoreError | None = None
        if self._random.random() < self._time.faults.disk:
            error = TierUnavailable("simulated")
            self._outcome.disk_failures += 1
        else:
            error = self._carry_out(job, sequence)
        tokens = b""
        if isinstance(job, diskjobs.DiskRead | diskjobs.DiskTokens) and error is None:
            tokens = self._disk.pages[job.place].tokens
        self._ended.append((job.job, error, tokens))
        self._desk.poll_disk()

    def _carry_out(self, job: DiskJob, sequence: int) -> KVStoreError | None:
        disk = self._disk
        match job:
            case diskjobs.DiskWrite(place=place, page=page, slot=slot):
                content = bytes(self._memory(slot))
                if content != _content(page):
                    return PageCorrupt("simulated")
                disk.write(place, page, sequence, page.tokens, content)
            case diskjobs.DiskRead(place=place, page=page, slot=slot):
                error = self._read(place, self._memory(slot), _content(page))
                self._outcome.pages_from_disk += error is None
                return error
            case diskjobs.DiskCheck(place=place, page=page):
                self._outcome.pages_checked += 1
                return self._read(place, memoryview(bytearray(PAGE_BYTES)), _content(page))
            case diskjobs.DiskCopy(source=source, place=place, page=page):
                record = disk.pages[source]
                if record.content != _content(page):
                    return PageCorrupt("simulated")
                disk.write(place, page, sequence, record.tokens, record.content)
            case diskjobs.DiskTombstone():
                disk.bury(job, sequence)
            case diskjobs.DiskSeal(segment=segment):
                disk.seal(segment)
            case diskjobs.DiskDrop(segment=segment):
                disk.drop(segment)
            case _:
                pass
        return None

    def _read(self, place: Place, memory: memoryview, expected: bytes) -> KVStoreError | None:
        memory[:] = self._disk.pages[place].content
        if self._random.random() < self._time.faults.flip:
            memory[self._random.randrange(PAGE_BYTES)] ^= 1
        if memory != expected:
            return PageCorrupt("simulated")
        return None

    def _memory(self, slot: Slot) -> memoryview:
        number, _, offset = self._node.pages.slots.address(slot)
        return memoryview(self._extents[number])[offset : offset + PAGE_BYTES]


def _content(page: diskjobs.PageRecord) -> bytes:
    return page_content(page.key, page.shard)
