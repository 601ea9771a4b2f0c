"""Carries out the jobs of a page table on plain files and plain pages."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.protocol.errors import KVStoreError, PageCorrupt
from kvstore.protocol.page import ALL_KEYS, KEY_BYTES, PrefixKey
from kvstore.state.disk.jobs import (
    DiskCopy,
    DiskDrop,
    DiskJob,
    DiskRead,
    DiskSeal,
    DiskSync,
    DiskTombstone,
    DiskWrite,
    PageRecord,
)
from kvstore.state.tree.slots import Slot
from tests.state.disk.disk_world import IO_ERROR
from tests.state.disk.plain_files import PlainFiles, PlainRecord
from tests.state.disk.plain_pages import MODELS, PlainPages
from tests.state.single_pages import PATH_OF, SHARDS, Page
from tests.state.world import key


class Ended(NamedTuple):
    """How a job ended, as the table is told."""

    job: int
    error: KVStoreError | None
    tokens: bytes
    failed: tuple[int, ...]


@dataclass
class PlainDisk:
    """The jobs of one life of a node.

    Attributes:
        files: they change.
        model: has what is in the slots.
        open: jobs that have not ended, by number.
        records: what open jobs write.
        covered: what each open sync makes durable.
    """

    files: PlainFiles
    model: PlainPages
    open: dict[int, DiskJob] = field(default_factory=dict)
    records: dict[int, PlainRecord] = field(default_factory=dict)
    covered: dict[int, list[PlainRecord]] = field(default_factory=dict)

    def begin(self, job: DiskJob) -> None:
        """A job was given to the disk."""
        match job:
            case DiskWrite() | DiskCopy():
                page = _page_of(job.page)
                self.records[job.job] = self.files.submit(
                    job.place, job.page.length, frozenset({page})
                )
                if isinstance(job, DiskWrite):
                    self.model.written_again(page)
            case DiskTombstone():
                self.records[job.job] = self.files.submit(
                    job.place, job.length, _hidden(job), tombstone=True
                )
            case DiskRead():
                self.take_slots([job.slot])
            case DiskSync():
                self.covered[job.job] = [
                    one
                    for one in self.files.records()
                    if one.written and one.place.segment not in job.given_up
                ]
        self.open[job.job] = job

    def take_slots(self, slots: list[Slot]) -> None:
        """Somebody writes to these from now on: nobody else may touch them."""
        assert len(set(slots)) == len(slots)
        touched = {slot for lease in self.model.leases.values() for slot, _ in lease.slots}
        touched |= {slot for put in self.model.puts.values() for _, slot in put.pages}
        for job in self.open.values():
            if isinstance(job, DiskWrite | DiskRead):
                touched.add(job.slot)
        for slot in slots:
            assert slot not in touched, "somebody still touches that slot"
            self.model.content[slot] = None

    def end(self, number: int, *, fails: bool) -> Ended:
        """A job is done, or fails."""
        job, record = self.open.pop(number), self.records.pop(number, None)
        error: KVStoreError | None = IO_ERROR if fails else None
        failed: tuple[int, ...] = ()
        tokens = b""
        match job:
            case DiskSync() | DiskSeal():
                if isinstance(job, DiskSync):
                    failed = self.files.sync(self.covered.pop(number), fails=fails)
                else:
                    failed = self.files.seal(job.segment, fails=fails)
                error = IO_ERROR if failed else None
            case _ if fails:
                pass
            case DiskRead():
                error = _read(self.files.at(job.place), job.page)
                if error is None:
                    self.model.content[job.slot] = _page_of(job.page), job.page.digest
                    tokens = _page_of(job.page)[1][-1].encode("utf-32-le")
            case DiskDrop():
                del self.files.by_number[job.segment]
            case DiskWrite() | DiskCopy() | DiskTombstone():
                assert record is not None
                error = self._write(job, record)
                record.written = error is None
        if error is not None:
            self.model.may_leave |= {"corrupt", "unreadable"}
        return Ended(number, error, tokens, failed)

    def _write(
        self, job: DiskWrite | DiskCopy | DiskTombstone, record: PlainRecord
    ) -> PageCorrupt | None:
        if isinstance(job, DiskTombstone):
            return None
        record.content = _page_of(job.page), job.page.digest
        if isinstance(job, DiskCopy):
            return _read(self.files.at(job.source), job.page)
        assert self.model.content[job.slot] == record.content, "written from another page's slot"
        return None


def _page_of(record: PageRecord) -> Page:
    page = MODELS.index(record.space), PATH_OF[record.key], SHARDS.index(record.shard)
    assert record.parent == key(page[1][:-1]), "the record of a page after another one"
    return page


def _hidden(job: DiskTombstone) -> frozenset[Page]:
    at, shard = MODELS.index(job.space), SHARDS.index(job.shard)
    starts = range(0, len(job.keys), KEY_BYTES)
    names = [PrefixKey(job.keys[start : start + KEY_BYTES]) for start in starts]
    paths = PATH_OF.values() if ALL_KEYS in names else [PATH_OF[one] for one in names]
    return frozenset((at, path, shard) for path in paths)


def _read(record: PlainRecord, page: PageRecord) -> PageCorrupt | None:
    assert record.written
    assert record.content == (_page_of(page), page.digest), "another page's record"
    return PageCorrupt("rotten") if record.rotten else None
