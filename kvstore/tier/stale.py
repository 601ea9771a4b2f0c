"""Memory of earlier boots of a node that processes still map.

When a node is killed, its memory exists for as long as clients map it. The next boot withholds as
much of its own memory, so that the total does not double. It finds that memory by a record that
the earlier boot kept next to its socket, in a file that only the node's user may write: device and
inode number of each extent. An inode number belongs to one file at a time, so memory of other
programs is never counted, whatever its name. Only resident memory counts: memory that was mapped
and never touched withholds nothing.
"""

import logging
import mmap
import os
import re
import stat
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstore.protocol.errors import reason

log = logging.getLogger(__name__)

_PROC: Final = Path("/proc")
_TITLE: Final = "kvstore memory"
_ENTRY: Final = re.compile(r"([0-9a-f]{2,}:[0-9a-f]{2,}) (\d{1,20})")
_RECORD_BYTES_MAX: Final = 64 << 20
_UNUSED_MAX: Final = 4_096
"""Maximum entries of freed memory before the record is rewritten."""
_PRESENT: Final = np.uint64(1 << 63)
"""Bit of an entry in ``/proc/PID/pagemap``: the page is in memory."""
_ENTRY_BYTES: Final = 8
_PAGEMAP_BYTES: Final = 1 << 20

Inode = tuple[str, int]
"""Device (as in ``/proc/PID/maps``) and inode number; identifies a file while it exists."""


class _Mapped(NamedTuple):
    """A mapping in a process, with the mapped part of its file; in bytes."""

    process: Path
    start: int
    stop: int
    offset: int


def inode_of(descriptor: int) -> Inode:
    """The device and inode number of an open file."""
    found = os.fstat(descriptor)
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", found.st_ino


class MemoryRecord:
    """The memory that a node has created, in this boot and in earlier ones; thread-safe.

    If its file is not trusted or cannot be written, a warning is logged and memory of earlier boots
    is unknown: memory may then double for as long as its clients map it.

    Args:
        path: the file; next to the node's socket.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Protects all fields below.
        self._lock = threading.Lock()
        self._earlier = self._read()
        self._present: set[Inode] = set()
        #: Descriptor and lines of the file while it has all known entries; else -1 and 0.
        self._descriptor = -1
        self._lines = 0
        self._failing = False

    def stale_bytes(self) -> int:
        """Resident memory of earlier boots that processes still map, in bytes.

        Memory of processes that this user may not inspect, or in a PID namespace that is not
        visible here, is not counted. Memory that nobody maps any more is forgotten.
        """
        with self._lock:
            wanted = set(self._earlier)
        if not wanted:
            return 0
        mapped: dict[Inode, list[_Mapped]] = defaultdict(list)
        for process in _PROC.glob("[0-9]*"):
            for inode, mapping in _mappings(process):
                if inode in wanted:
                    mapped[inode].append(mapping)
        with self._lock:
            self._earlier &= mapped.keys()
        return sum(map(_resident_bytes, mapped.values()))

    def add(self, made: Iterable[Inode]) -> None:
        """Add new memory, before any client gets it."""
        with self._lock:
            new = set(made)
            self._present |= new
            if self._lines and self._lines <= len(self._known()) + _UNUSED_MAX:
                self._append(new)
            else:
                self._write()

    def remove(self, gone: Inode) -> None:
        """Remove memory that was freed."""
        with self._lock:
            self._present.discard(gone)

    def close(self) -> None:
        """Close the file; it remains for the next boot."""
        with self._lock:
            self._close()
            self._lines = 0

    # ---- the file ---------------------------------------------------------------------------

    def _known(self) -> set[Inode]:
        return self._earlier | self._present

    def _title(self) -> str:
        """The first line: inode numbers are valid for one boot of the machine only."""
        boot = "unknown"
        with suppress(OSError):
            boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{_TITLE} {boot}"

    def _read(self) -> set[Inode]:
        """Read the file; empty if another user could have written it."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            return set()
        except OSError as error:
            log.warning("%s: %s: memory of an earlier boot is unknown", self._path, reason(error))
            return set()
        try:
            found = os.fstat(descriptor)
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or others:
                log.warning(
                    "%s is not a file that only this user can write: ignored; remove it", self._path
                )
                return set()
            content = os.read(descriptor, _RECORD_BYTES_MAX)
        finally:
            os.close(descriptor)
        lines = content.decode(errors="replace").splitlines()
        if not lines or lines[0] != self._title():
            return set()
        entries = (_ENTRY.fullmatch(line) for line in lines[1:])
        return {(entry[1], int(entry[2])) for entry in entries if entry}

    def _append(self, inodes: set[Inode]) -> None:
        """Append entries; the file stays open, because descriptors may run out."""
        assert self._descriptor >= 0
        with self._failures_said():
            _write_all(self._descriptor, _lines(inodes))
            self._lines += len(inodes)

    def _write(self) -> None:
        with self._failures_said():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, draft = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            try:
                _write_all(descriptor, f"{self._title()}\n".encode() + _lines(self._known()))
                Path(draft).replace(self._path)
            except OSError:
                os.close(descriptor)
                Path(draft).unlink(missing_ok=True)
                raise
            self._close()
            self._descriptor = descriptor
            self._lines = len(self._known())

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    @contextmanager
    def _failures_said(self) -> Iterator[None]:
        """Log an error of writing once while it lasts; it stops nothing."""
        try:
            yield
        except OSError as error:
            self._lines = 0  # rewrite all of it next time
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s): a restart will not know of memory that clients"
                    " still map; give the node's user write access", self._path, reason(error),
                )  # fmt: skip
            self._failing = True
        else:
            self._failing = False


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _lines(inodes: Iterable[Inode]) -> bytes:
    return "".join(f"{device} {number}\n" for device, number in inodes).encode()


def _mappings(process: Path) -> Iterator[tuple[Inode, _Mapped]]:
    """Mappings of a process whose file has a name like the node's memory."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return  # it has ended, or belongs to another user
    for line in lines:
        if "/memfd:kvstore:" not in line:  # fast path; the name alone proves nothing
            continue
        span, _, offset, device, number, *_ = line.split()
        start, stop = (int(part, 16) for part in span.split("-"))
        yield (device, int(number)), _Mapped(process, start, stop, int(offset, 16))


def _resident_bytes(mappings: list[_Mapped]) -> int:
    """Resident bytes of one file, as far as its mappings show."""
    step = mmap.PAGESIZE
    end = max(one.offset + one.stop - one.start for one in mappings)
    there = np.zeros(-(-end // step), dtype=np.bool_)
    for one in mappings:
        first, count = one.offset // step, (one.stop - one.start) // step
        with suppress(OSError), (one.process / "pagemap").open("rb", buffering=0) as table:
            table.seek(one.start // step * _ENTRY_BYTES)
            while count > 0:
                read = table.read(min(count * _ENTRY_BYTES, _PAGEMAP_BYTES))
                entries = np.frombuffer(read, dtype=np.uint64)
                if not len(entries):
                    break
                there[first : first + len(entries)] |= (entries & _PRESENT) != 0
                first, count = first + len(entries), count - len(entries)
    return int(there.sum()) * step
