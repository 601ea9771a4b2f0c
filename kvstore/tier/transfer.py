"""Copies records between memory and segment files, with checks in both directions.

A page's digest is checked before it is written, so that no wrong bytes reach the disk, and after
it was read. Adjacent records that were submitted together are moved in one call.
"""

import ctypes
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from kvstore import mover
from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import InvalidArgument, KVStoreError, PageCorrupt
from kvstore.protocol.page import pack_pair, page_seeds
from kvstore.state.disk.jobs import (
    DiskCheck,
    DiskCopy,
    DiskJob,
    DiskRead,
    DiskTokens,
    DiskTombstone,
    DiskWrite,
    PageRecord,
)
from kvstore.state.tree.places import BLOCK_BYTES, HEADER_BYTES, Place
from kvstore.tier.base import Completion
from kvstore.tier.directories import failure
from kvstore.tier.disk import Disk
from kvstore.tier.record import (
    Header,
    Kind,
    decode_header,
    encode_header,
    entry_of,
    is_of,
    pair_seed,
    segment_name,
    tombstone_digest,
)
from kvstore.tier.segments import LogFile, Segments
from kvstore.tier.vectored import aligned, read_fully, write_fully

BATCH_BYTES: Final = 8 << 20
BATCH_RECORDS: Final = 64
"""Maximum records of one call: larger batches are not faster, and one thread handles a batch."""

Write = DiskWrite | DiskCopy | DiskTombstone
"""A copy is written when it has been read."""
Read = DiskRead | DiskCheck


def length(job: Write | Read) -> int:
    """Bytes of a job's record."""
    return job.length if isinstance(job, DiskTombstone) else job.page.length


def batches(jobs: Iterable[DiskJob]) -> Iterator[list[DiskJob]]:
    """Group jobs into batches: runs of adjacent writes or reads; all other jobs alone."""
    batch: list[DiskJob] = []
    end, size = (0, 0), 0
    for job in jobs:
        if not isinstance(job, DiskWrite | DiskTombstone | DiskRead | DiskCheck):
            if batch:
                yield batch
            batch = []
            yield [job]
            continue
        more = length(job)
        joins = (
            len(batch) in range(1, BATCH_RECORDS)
            and job.place == end
            and isinstance(job, Read) == isinstance(batch[0], Read)
            and size + more <= BATCH_BYTES
        )
        if batch and not joins:
            yield batch
        if not joins:
            batch, size = [], 0
        batch.append(job)
        size += more
        end = (job.place.segment, job.place.offset + more)
    if batch:
        yield batch


def digests(pages: Sequence[tuple[int, PageRecord]]) -> list[bytes]:
    """The digest of the bytes at each address, with the seed of its record."""
    if not pages:
        return []
    size = pages[0][1].page_bytes
    if any(record.page_bytes != size for _, record in pages):
        return [digests([page])[0] for page in pages]
    seeds = page_seeds(b"".join(record.key for _, record in pages), 0)
    pair_seeds = [pair_seed(record.space, record.shard) for _, record in pages]
    addresses = np.array([address for address, _ in pages], dtype=np.uint64)
    found = mover.digest(addresses, size, seeds ^ np.array(pair_seeds, dtype=np.uint64))
    return [row.tobytes() for row in found]


class RecordMover:
    """Reads and writes records; each thread has its own.

    Args:
        disk: the disk of the segments.
        segments: the segments, shared by all threads.

    Attributes:
        counts: records and bytes that it has moved.
    """

    def __init__(self, disk: Disk, segments: Segments) -> None:
        self.counts: Counter[str] = Counter()
        self._disk = disk
        self._segments = segments
        self._scratch = aligned(2 * BATCH_RECORDS * BLOCK_BYTES)

    def write(self, jobs: Sequence[Write], sequence: int) -> Iterator[Completion]:
        """Write a batch of :func:`batches`; job i gets the sequence number ``sequence + i``."""
        pages = [(job.address, job.page) for job in jobs if not isinstance(job, DiskTombstone)]
        found = iter(digests(pages))
        run: list[tuple[Write, int]] = []
        for index, job in enumerate(jobs):
            if not isinstance(job, DiskTombstone) and next(found) != job.page.digest:
                yield from self._write_run(run)
                run = []
                error = f"page {job.page.key.hex()[:16]} does not match its digest: not written"
                yield Completion(job.job, PageCorrupt(error))
            else:
                run.append((job, sequence + index))
        yield from self._write_run(run)

    def read(self, jobs: Sequence[Read]) -> Iterator[Completion]:
        """Read a batch of :func:`batches`; a page with wrong bytes completes with an error."""
        try:
            done = self._read_batch(jobs)
        except KVStoreError as error:
            if len(jobs) == 1:
                yield Completion(jobs[0].job, error)
                return
            for job in jobs:  # retry one by one, so that only the affected ones fail
                yield from self.read([job])
            return
        yield from self._checked(jobs, done)

    def read_tokens(self, job: DiskTokens) -> Completion:
        """Read the header of a record, which contains the tokens of its page."""
        block = self._block(0)
        done = self._fill(job.place, [block])
        header = decode_header(block, self._segments.log, job.place) if done == len(block) else None
        if header is None or not is_of(header, job.page):
            return Completion(job.job, _not_there(job))
        return Completion(job.job, tokens=header.tokens)

    def copy(self, job: DiskCopy, sequence: int) -> Completion:
        """Copy a record to another place, after it was read and verified."""
        memory = aligned(job.page.length - HEADER_BYTES)
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        read = next(self.read([DiskCheck(job.job, job.source, job.page, address)]))
        if read.error is not None:
            return read
        page = replace(job.page, tokens=read.tokens)
        return next(self.write([replace(job, page=page, address=address)], sequence))

    # ---- writing ----------------------------------------------------------------------------

    def _write_run(self, run: list[tuple[Write, int]]) -> Iterator[Completion]:
        if not run:
            return
        try:
            self._write_records(run)
        except KVStoreError as error:
            if len(run) == 1:
                yield Completion(run[0][0].job, error)
                return
            for one in run:  # retry one by one, so that only the affected ones fail
                yield from self._write_run([one])
            return
        for job, _ in run:
            yield Completion(job.job)

    def _write_records(self, run: list[tuple[Write, int]]) -> None:
        assert len(run) <= BATCH_RECORDS, "each has two blocks of its own"
        first = run[0][0].place
        end = first.offset + sum(length(job) for job, _ in run)
        with self._segments.using(first.segment, write=True) as (segment, descriptor):
            _check_place(first.offset, end, segment)
            buffers: list[memoryview] = []
            entries: list[bytes] = []
            for index, (job, sequence) in enumerate(run):
                header = _header_of(job, sequence)
                entries.append(entry_of(header, self._segments.pair_index(segment, header.pair)))
                block = self._block(2 * index)
                block[:] = encode_header(self._segments.log, header)
                buffers += [block, *self._payload(job, 2 * index + 1)]
            try:
                write_fully(self._disk, descriptor, buffers, first.offset)
            except OSError as error:
                self._segments.directories[segment.directory].failing = True
                raise self._failure(segment, error) from error
            self._segments.note_written(segment, entries)
        self.counts["written_records"] += len(run)
        self.counts["written_bytes"] += end - first.offset

    def _payload(self, job: Write, block: int) -> list[memoryview]:
        """A record's payload in whole blocks; a partial last block is copied and padded."""
        if isinstance(job, DiskTombstone):
            copy = aligned(job.length - HEADER_BYTES)
            copy[: len(job.keys)] = job.keys
            return [copy]
        size = job.page.page_bytes
        whole = size - size % BLOCK_BYTES
        buffers = [memory_at(job.address, whole)] if whole else []
        if whole < size:
            tail = self._block(block)
            assert len(tail) == BLOCK_BYTES
            tail[: size - whole] = ctypes.string_at(job.address + whole, size - whole)
            tail[size - whole :] = bytes(BLOCK_BYTES - (size - whole))
            buffers.append(tail)
        return buffers

    # ---- reading ----------------------------------------------------------------------------

    def _read_batch(self, jobs: Sequence[Read]) -> int:
        """Read the jobs' pages and headers; returns bytes read."""
        assert 0 < len(jobs) <= BATCH_RECORDS
        buffers: list[memoryview] = []
        for index, job in enumerate(jobs):
            padded = job.page.length - HEADER_BYTES
            buffers += [self._block(index), memory_at(job.address, padded)]
        return self._fill(jobs[0].place, buffers)

    def _fill(self, place: Place, buffers: list[memoryview]) -> int:
        """Read from a place; returns bytes read."""
        with self._segments.using(place.segment, write=False) as (segment, descriptor):
            try:
                return read_fully(self._disk, descriptor, buffers, place.offset)
            except OSError as error:
                raise self._failure(segment, error) from error

    def _checked(self, jobs: Sequence[Read], done: int) -> Iterator[Completion]:
        """Check every page that was read, its header first."""
        headers: list[Header | None] = []
        start = jobs[0].place.offset
        for index, job in enumerate(jobs):
            end = job.place.offset + job.page.length
            header = decode_header(self._block(index), self._segments.log, job.place)
            whole = header is not None and is_of(header, job.page) and end - start <= done
            headers.append(header if whole else None)
        present = [
            (job.address, job.page)
            for job, header in zip(jobs, headers, strict=True)
            if header is not None
        ]
        found = iter(digests(present))
        for job, header in zip(jobs, headers, strict=True):
            if header is None:
                yield Completion(job.job, _not_there(job))
            elif next(found) != job.page.digest:
                error = PageCorrupt(f"{_name(job)}: its bytes do not match its digest")
                yield Completion(job.job, error)
            else:
                self.counts["read_records"] += 1
                self.counts["read_bytes"] += job.page.length
                yield Completion(job.job, tokens=header.tokens)
        assert next(found, None) is None, "a page was compared with another one's digest"

    # ---- both -------------------------------------------------------------------------------

    def _block(self, index: int) -> memoryview:
        return self._scratch[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]

    def _failure(self, segment: LogFile, error: OSError) -> KVStoreError:
        directory = self._segments.directories[segment.directory]
        return failure(directory.path / segment_name(segment.number), error)


def _name(job: Read | DiskTokens) -> str:
    return f"page {job.page.key.hex()[:16]} in segment {job.place.segment}"


def _not_there(job: Read | DiskTokens) -> PageCorrupt:
    return PageCorrupt(f"{_name(job)}: the record is missing or belongs to another page")


def _header_of(job: Write, sequence: int) -> Header:
    """The header for a write.

    Raises:
        InvalidArgument: the names of its space or shard are too long for the format.
    """
    if isinstance(job, DiskTombstone):
        digest = tombstone_digest(job.keys, pair_seed(job.space, job.shard))
        return Header(
            Kind.TOMBSTONE, sequence, job.place, len(job.keys), bytes(32), b"", digest,
            pack_pair(job.space, job.shard), b"",
        )  # fmt: skip
    page = job.page
    return Header(
        Kind.PAGE, sequence, job.place, page.page_bytes, page.key, page.parent,
        page.digest, pack_pair(page.space, page.shard), page.tokens,
    )  # fmt: skip


def _check_place(start: int, end: int, segment: LogFile) -> None:
    if start % BLOCK_BYTES or start < 0 or end > segment.size_bytes or start >= end:
        what = f"{start}..{end} is not a valid place for records in {segment.size_bytes} bytes"
        raise InvalidArgument("place", what)
