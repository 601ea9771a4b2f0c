"""The segment files of an SSD log: creates, opens, syncs, seals and deletes them.

:class:`kvstore.state.disk.log.SegmentLog` decides which segments there are, what they contain and
which one gets the next record. This module knows only about files: which are open, which writes are
not synced, what a footer will list, which file failed. Completions report this to the log.

Worker threads share it. ``_lock`` protects the table and all fields of its segments, and is never
held during file operations: the loop takes it too, and any of them may block. A segment's own
``lock`` is held while its file is created, opened or synced, and is taken before ``_lock``. A file
is closed without any lock, by whoever took its descriptor out of the table when it had no users.
"""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.protocol.errors import CapacityError, InvalidArgument, TierUnavailable
from kvstore.state.disk.log import SEGMENT_PAIRS_MAX
from kvstore.state.tree.places import FOOTER_ENTRY_BYTES, footer_bytes
from kvstore.tier.directories import OpenDirectory, failure
from kvstore.tier.disk import Disk
from kvstore.tier.record import ENTRY, encode_footer, end_of, segment_name
from kvstore.tier.vectored import aligned, write_fully

log = logging.getLogger(__name__)

DESCRIPTORS_MAX: Final = 256
"""Maximum open segment files; the others are opened when needed."""


@dataclass(slots=True)
class LogFile:
    """One segment file.

    Attributes:
        number: its number.
        directory: index of its directory.
        size_bytes: size of its file.
        exists: its file was created.
        descriptor: its open file, or None.
        users: jobs that use it now.
        written: number of completed writes.
        synced: number of writes that are durable.
        entries: packed footer entries of the records, until it is sealed.
        pairs: packed pair → its index in the footer, until it is sealed.
        sealing: a footer may have been written, so no more records may follow: a start that finds
            the footer would not look for them.
        sealed: it has a footer.
        failed: why a sync failed; nothing in it is reported as durable afterwards.
        dropped: its file was deleted.
        lock: see the module.
    """

    number: int
    directory: int
    size_bytes: int
    exists: bool = False
    descriptor: int | None = None
    users: int = 0
    written: int = 0
    synced: int = 0
    entries: bytearray = field(default_factory=bytearray)
    pairs: dict[bytes, int] = field(default_factory=dict)
    sealing: bool = False
    sealed: bool = False
    failed: str = ""
    dropped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class Segments:
    """All segments of a log.

    Args:
        disk: the disk of the directories.
        log: the log's id.
        directories: locked directories; this object closes them.
        segment_bytes: size of new segment files.
    """

    def __init__(
        self, disk: Disk, log: bytes, directories: list[OpenDirectory], segment_bytes: int
    ) -> None:
        self.disk = disk
        self.log = log
        self.directories = directories
        self.segment_bytes = segment_bytes
        self._table: dict[int, LogFile] = {}
        self._open: dict[int, LogFile] = {}
        """All segments with a descriptor, the least recently used first."""
        self._dirty: dict[int, LogFile] = {}
        """All segments with writes that are not synced."""
        self._said: set[Path] = set()
        """All directories with a file whose close failed: it was logged."""
        self._lock = threading.Lock()

    def adopt(self, segment: LogFile) -> None:
        """Add a segment that was found at start."""
        with self._lock:
            assert segment.number not in self._table, "a number is used once"
            segment.exists = True
            self._table[segment.number] = segment
            self.directories[segment.directory].used_bytes += segment.size_bytes

    @contextmanager
    def using(self, number: int, *, write: bool) -> Iterator[tuple[LogFile, int]]:
        """Use a segment's open file in a ``with`` block; it is created if it is written first.

        Raises:
            TierUnavailable: there is no such segment, or it cannot be opened or written.
            CapacityError: no space for another segment.
        """
        segment = self._enter(number, make=write)
        try:
            if write and segment.sealing:
                raise InvalidArgument("segment", f"{number} is sealed")
            if write and segment.failed:
                raise TierUnavailable(segment.failed)
            descriptor = segment.descriptor
            if descriptor is None:
                with segment.lock:
                    descriptor, idle = self._opened(segment)
                self._close_files(idle)
            yield segment, descriptor
        finally:
            self._leave(segment)

    def pair_index(self, segment: LogFile, packed: bytes) -> int:
        """The index of a pair in the segment's footer; the log gives it no more than fit."""
        with self._lock:
            index = segment.pairs.setdefault(packed, len(segment.pairs))
        assert index < SEGMENT_PAIRS_MAX
        return index

    def note_written(self, segment: LogFile, entries: list[bytes]) -> None:
        """Record completed writes."""
        with self._lock:
            assert not segment.sealing, "a start would not find these records"
            segment.written += len(entries)
            self._dirty[segment.number] = segment
            segment.entries += b"".join(entries)

    def unsynced(self) -> dict[int, int]:
        """The writes that a sync starting now must cover: segment → number of completed writes."""
        with self._lock:
            return {number: segment.written for number, segment in self._dirty.items()}

    def sync(self, number: int, written: int) -> bool:
        """Make the first ``written`` writes of a segment durable.

        Returns:
            Whether the file was synced; False if an earlier sync covered them.

        Raises:
            TierUnavailable: this or an earlier sync failed. A failed sync leaves the content of the
                disk unknown and a second one would not report it, so the segment stays failed.
        """
        with self._lock:
            segment = self._dirty.get(number)
            if segment is None or segment.synced >= written:
                return False
            segment.users += 1
        try:
            with segment.lock:
                return self._synced(segment, written)
        finally:
            self._leave(segment)

    def seal(self, number: int) -> None:
        """Write a segment's footer. First its records become durable, then the footer.

        Raises:
            InvalidArgument: it is sealed, or there is no space for the footer.
            TierUnavailable, CapacityError: there is no such segment, or the disk failed.
        """
        with self.using(number, write=False) as (segment, descriptor):
            if segment.sealed:
                raise InvalidArgument("segment", f"{number} is sealed")
            if segment.failed:
                raise TierUnavailable(segment.failed)
            with self._lock:
                written = segment.written
                entries = np.frombuffer(bytes(segment.entries), dtype=ENTRY)
                pairs = list(segment.pairs)
            size, end = footer_bytes(len(entries)), end_of(entries)
            if end + size > segment.size_bytes:
                raise InvalidArgument("segment", f"{number} has no space for a footer of {size}")
            ordered = entries[np.argsort(entries["offset"], kind="stable")]
            assert segment.pairs or not len(entries)
            footer = aligned(size)
            footer[:] = encode_footer(self.log, number, ordered.tobytes(), pairs, end)
            segment.sealing = True
            self.sync(number, written)
            path = self.directories[segment.directory].path / segment_name(number)
            try:
                write_fully(self.disk, descriptor, [footer], segment.size_bytes - size)
            except OSError as error:
                raise failure(path, error) from error
            with self._lock:
                segment.written += 1
                self._dirty[number] = segment
            self.sync(number, written + 1)
            with self._lock:
                segment.sealed = True
                segment.entries = bytearray()
                segment.pairs = {}

    def drop(self, number: int) -> None:
        """Delete a segment's file, durably; does nothing if there is no such segment.

        Raises:
            TierUnavailable: the file still exists and counts towards the capacity.
        """
        with self._lock:
            segment = self._table.get(number)
            if segment is None:
                return
            segment.users += 1
        directory = self.directories[segment.directory]
        path = directory.path / segment_name(number)
        try:
            with segment.lock:
                if not segment.dropped:
                    with suppress(FileNotFoundError):  # deleted by somebody else
                        self.disk.remove(path)
                    segment.dropped = True
                self.disk.sync_directory(directory.path)
        except OSError as error:
            raise failure(path, error) from error
        else:
            with self._lock:
                self._dirty.pop(number, None)
                if self._table.pop(number, None) is not None:
                    directory.used_bytes -= segment.size_bytes
                    assert directory.used_bytes >= 0
        finally:
            self._leave(segment)

    def close(self) -> None:
        """Close all files and unlock the directories; no job may be running."""
        with self._lock:
            assert not any(one.users for one in self._open.values()), "jobs end before their files"
            taken = self._taken_out(list(self._open.values()))
        self._close_files(taken)
        self._give_back()

    def forked(self) -> None:
        """In a forked child: close the parent's files, so that its locks do not outlast it."""
        self._close_files(self._taken_out(list(self._open.values())))
        self._give_back()

    def counts(self) -> list[int]:
        """Number of segments in each directory, including those being created."""
        with self._lock:
            found = [0] * len(self.directories)
            for segment in self._table.values():
                found[segment.directory] += 1
            return found

    def failures(self) -> dict[int, str]:
        """Segments that cannot be synced → the reason."""
        with self._lock:
            return {number: one.failed for number, one in self._table.items() if one.failed}

    # ---- internal ---------------------------------------------------------------------------

    def _enter(self, number: int, *, make: bool) -> LogFile:
        with self._lock:
            segment = self._table.get(number)
            if segment is None:
                if not make:
                    raise TierUnavailable(f"there is no segment {number}")
                segment = LogFile(number, self._roomiest(), self.segment_bytes)
                self._table[number] = segment
                directory = self.directories[segment.directory]
                directory.used_bytes += segment.size_bytes
                assert directory.used_bytes <= directory.capacity_bytes
            if segment.dropped:
                raise TierUnavailable(f"segment {number} is dropped")
            segment.users += 1
            if segment.descriptor is not None:
                self._open[number] = self._open.pop(number)
            return segment

    def _roomiest(self) -> int:
        """Index of the directory with most free space; working ones are preferred."""
        room = [one.capacity_bytes - one.used_bytes for one in self.directories]
        roomy = [at for at, free in enumerate(room) if free >= self.segment_bytes]
        if not roomy:
            raise CapacityError("no directory has space for another segment: drop one first")
        return max(roomy, key=lambda at: (not self.directories[at].failing, room[at]))

    def _leave(self, segment: LogFile) -> None:
        taken: list[tuple[LogFile, int]] = []
        with self._lock:
            segment.users -= 1
            assert segment.users >= 0
            if segment.users:
                return
            if segment.dropped:
                taken = self._taken_out([segment])
            elif not segment.exists and self._table.get(segment.number) is segment:
                del self._table[segment.number]
                self.directories[segment.directory].used_bytes -= segment.size_bytes
        self._close_files(taken)

    def _taken_out(self, segments: Iterable[LogFile]) -> list[tuple[LogFile, int]]:
        """The descriptors of segments without users, for :meth:`_close_files`. ``_lock`` is held.

        Whoever uses one of the segments next opens its file again.
        """
        taken: list[tuple[LogFile, int]] = []
        for segment in segments:
            descriptor, segment.descriptor = segment.descriptor, None
            if descriptor is not None:
                mine = self._open.pop(segment.number)
                assert mine is segment
                taken.append((segment, descriptor))
        return taken

    def _close_files(self, taken: Iterable[tuple[LogFile, int]]) -> None:
        """Close files; no lock is held, because the last close of a deleted file frees its blocks.

        Until the log is closed, only deleted files are closed, and those without unsynced writes:
        a close that fails takes back nothing that was reported. The descriptor is free all the
        same.
        """
        for segment, descriptor in taken:
            directory = self.directories[segment.directory]
            self._close(directory.path / segment_name(segment.number), descriptor)

    def _close(self, path: Path, descriptor: int) -> None:
        try:
            self.disk.close(descriptor)
        except OSError as error:
            if path.parent not in self._said:
                self._said.add(path.parent)
                log.warning("%s: closing it failed (%s): said once", path, error.strerror or error)

    def _give_back(self) -> None:
        """Unlock the directories, once."""
        for directory in self.directories:
            lock, directory.lock = directory.lock, -1
            if lock >= 0:
                self._close(directory.path, lock)

    def _opened(self, segment: LogFile) -> tuple[int, list[tuple[LogFile, int]]]:
        """Open or create the file of a segment in use. Its lock is held.

        Returns:
            Its descriptor, and idle files to close when its lock is released.
        """
        assert segment.users > 0, "its file may be closed meanwhile"
        if segment.descriptor is not None:
            return segment.descriptor, []
        directory = self.directories[segment.directory]
        path = directory.path / segment_name(segment.number)
        try:
            if segment.exists:
                descriptor = self.disk.open(path, direct=directory.direct_io)
            else:
                descriptor = self._make(segment, directory)
        except OSError as error:
            directory.failing |= not segment.exists
            raise failure(path, error) from error
        with self._lock:
            directory.failing &= segment.exists
            segment.exists = True
            segment.descriptor = descriptor
            self._open[segment.number] = segment
            idle = [one for one in self._open.values() if not one.users]
            idle = [one for one in idle if one.written == one.synced]
            idle = idle[: max(len(self._open) - DESCRIPTORS_MAX, 0)]
            return descriptor, self._taken_out(idle)

    def _make(self, segment: LogFile, directory: OpenDirectory) -> int:
        assert not segment.exists
        assert not segment.written, "its records would be gone"
        path = directory.path / segment_name(segment.number)
        descriptor = self.disk.create(path, segment.size_bytes, direct=directory.direct_io)
        try:
            self.disk.sync_directory(directory.path)
        except OSError:
            self._close(path, descriptor)
            self.disk.remove(path)
            raise
        return descriptor

    def _synced(self, segment: LogFile, written: int) -> bool:
        with self._lock:
            covered, descriptor = segment.written, segment.descriptor
        if segment.synced >= written:
            return False
        path = self.directories[segment.directory].path / segment_name(segment.number)
        if segment.failed:
            raise TierUnavailable(segment.failed)
        assert descriptor is not None, "a segment with unsynced writes stays open"
        try:
            self.disk.sync(descriptor)
        except OSError as error:
            segment.failed = f"{path}: a sync failed ({error.strerror}): the segment is given up"
            raise TierUnavailable(segment.failed) from error
        with self._lock:
            segment.synced = covered
            if segment.written == covered:
                self._dirty.pop(segment.number, None)
        return True


assert ENTRY.itemsize == FOOTER_ENTRY_BYTES
