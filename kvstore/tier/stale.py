"""Memory that earlier boots of a node made, and that processes still map.

A node that is killed leaves memory behind for as long as its clients map it. The next one holds
back as much of its own, so that memory does not double. Which memory that is, it knows from a
record that the earlier boot kept beside its socket, in a file of the node's user alone: a device
and inode number for each extent. A number is given to one file at a time, so nobody else's memory
passes for a node's, whatever its name. And only what is there counts: memory that was mapped and
never touched holds nothing back.
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

log = logging.getLogger(__name__)

_TITLE: Final = "kvstore memory"
_ENTRY: Final = re.compile(r"([0-9a-f]{2,}:[0-9a-f]{2,}) (\d{1,20})")
_RECORD_BYTES_MAX: Final = 64 << 20
_UNUSED_MAX: Final = 4_096
"""Entries of memory that is gone, before the record is written anew."""
_PRESENT: Final = np.uint64(1 << 63)
"""Of an entry in ``/proc/PID/pagemap``: the page is in memory."""
_ENTRY_BYTES: Final = 8
_PAGEMAP_BYTES: Final = 1 << 20

Inode = tuple[str, int]
"""Device, as ``/proc/PID/maps`` writes it, and inode number: what names a file while it lives."""


class _Mapped(NamedTuple):
    """A mapping in a process, and which part of its file it shows; in bytes."""

    process: Path
    start: int
    stop: int
    offset: int


def inode_of(descriptor: int) -> Inode:
    """The name of an open file."""
    found = os.fstat(descriptor)
    return f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}", found.st_ino


class MemoryRecord:
    """Which memory a node has made, in this boot and in earlier ones; every thread may use it.

    Without a file that can be trusted or written, a warning says so, and what an earlier boot left
    is not known: memory may then double for as long as its clients map it.

    Args:
        path: the file; beside the node's socket.
        proc: where the process file system is.
    """

    def __init__(self, path: Path, proc: Path = Path("/proc")) -> None:
        """Read what earlier boots have left there."""
        self._path = path
        self._proc = proc
        #: Protects all below.
        self._lock = threading.Lock()
        self._earlier = self._read()
        self._present: set[Inode] = set()
        #: Of the file, while it has all that is known, and its lines; else -1 and 0.
        self._descriptor = -1
        self._lines = 0
        self._failing = False

    def stale_bytes(self) -> int:
        """Memory of earlier boots that processes still map and that is really there.

        Memory of processes that this user may not inspect, or that are in a PID namespace which is
        not seen from here, is not counted. What nobody maps any more is forgotten.
        """
        with self._lock:
            wanted = set(self._earlier)
        if not wanted:
            return 0
        mapped: dict[Inode, list[_Mapped]] = defaultdict(list)
        for process in self._proc.glob("[0-9]*"):
            for inode, mapping in _mappings(process):
                if inode in wanted:
                    mapped[inode].append(mapping)
        with self._lock:
            self._earlier &= mapped.keys()
        return sum(map(_resident_bytes, mapped.values()))

    def add(self, made: Iterable[Inode]) -> None:
        """Memory was made; nobody has it yet."""
        with self._lock:
            new = set(made)
            self._present |= new
            if self._lines and self._lines <= len(self._known()) + _UNUSED_MAX:
                self._append(new)
            else:
                self._write()

    def remove(self, gone: Inode) -> None:
        """Memory was given back."""
        with self._lock:
            self._present.discard(gone)

    def close(self) -> None:
        """Close the file; it stays for the next boot."""
        with self._lock:
            self._close()
            self._lines = 0

    # ---- the file ---------------------------------------------------------------------------

    def _known(self) -> set[Inode]:
        return self._earlier | self._present

    def _title(self) -> str:
        """Inode numbers begin anew when the machine does."""
        boot = "unknown"
        with suppress(OSError):
            boot = (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        return f"{_TITLE} {boot}"

    def _read(self) -> set[Inode]:
        """What the file says; nothing, if it is not this user's alone."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            return set()
        except OSError as error:
            log.warning("%s: %s: memory of an earlier boot is not known", self._path, error)
            return set()
        try:
            found = os.fstat(descriptor)
            others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or others:
                log.warning("%s is not this user's alone: not believed; remove it", self._path)
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
        """Write on behind what is there; the file stays open, for descriptors may run out."""
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
        """A record that cannot be written stops nothing; it is said once while it lasts."""
        try:
            yield
        except OSError as error:
            self._lines = 0  # all of it is written the next time
            if not self._failing:
                log.warning(
                    "%s cannot be written (%s): a restart will not know of memory that clients"
                    " still map; let the node's user write there", self._path, error,
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
    """What a process maps of anything that is called like a node's memory."""
    try:
        lines = (process / "maps").read_text(errors="replace").splitlines()
    except OSError:
        return  # it ended, or it is another user's
    for line in lines:
        if "/memfd:kvstore:" not in line:  # quickly past the others; a name proves nothing
            continue
        span, _, offset, device, number, *_ = line.split()
        start, stop = (int(part, 16) for part in span.split("-"))
        yield (device, int(number)), _Mapped(process, start, stop, int(offset, 16))


def _resident_bytes(mappings: list[_Mapped]) -> int:
    """How much of one file is in memory, as far as its mappings show."""
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
