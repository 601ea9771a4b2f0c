"""The directories of an SSD log: locking, identification, and free space."""

import errno
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.protocol.errors import CapacityError, ConfigError, KVStoreError, TierUnavailable
from kvstore.protocol.sizes import exact, rounded
from kvstore.tier.disk import Disk, FileSystem
from kvstore.tier.record import (
    IDENTITY_NAME,
    SEGMENT_NAME,
    Identity,
    decode_identity,
    encode_identity,
)

log = logging.getLogger(__name__)

_GAPS_MAX: Final = 16
"""Maximum gaps of segment numbers that one start leaves."""


class Directory(NamedTuple):
    """A directory for segments, ideally one per disk.

    Attributes:
        path: path; created if it does not exist.
        capacity_bytes: maximum bytes of segment files; at least one segment.
    """

    path: Path
    capacity_bytes: int


@dataclass(slots=True)
class OpenDirectory:
    """A directory locked by this process.

    Attributes:
        path: its path.
        capacity_bytes: maximum bytes of its segment files.
        direct_io: its files are read and written without the page cache.
        lock: descriptor of the lock.
        used_bytes: bytes of its segment files, including those being created and foreign ones.
        untouched_bytes: part of it in files that are not used.
        failing: the last segment there could not be created or written; others are preferred.
    """

    path: Path
    capacity_bytes: int
    direct_io: bool
    lock: int
    used_bytes: int = 0
    untouched_bytes: int = 0
    failing: bool = False


@dataclass(frozen=True, slots=True)
class Members:
    """The directories that belong to a log, according to their identities.

    Attributes:
        log: the log's id.
        here: the open directories' paths and identities.
        missing: id → path of those that were open at an earlier start and are not open now.
        next_segment: a lower bound for the numbers of new segments.
    """

    log: bytes
    here: list[tuple[Path, Identity]]
    missing: dict[str, str]
    next_segment: int

    @property
    def gap(self) -> int:
        """Gaps of segment numbers to leave out, because missing directories may have these numbers.

        If one part of the directories is started without the other, and then the other without this
        one, both leave a gap: the numbers after it differ if the gaps do.
        """
        if not self.missing:
            return 0
        return 1 + min(max(0, min(identity.directory for _, identity in self.here)), _GAPS_MAX - 1)

    def forget_missing(self, disk: Disk, next_segment: int) -> None:
        """Go on without the missing directories; call it before the first new segment.

        When they return, their segments have lower numbers than ``next_segment``, and their records
        lower sequence numbers than all new ones.
        """
        for path in self.missing.values():
            log.error(
                "ssd.directories: %s belongs to this log and is missing: it is not mounted, not"
                " configured any more, or replaced. Its pages are misses until a start finds it"
                " again; this start goes on without it, and the next one does not say this again",
                path,
            )  # fmt: skip
        if self.missing:
            _write_members(disk, self.here, {}, next_segment)


def failure(path: Path | str, error: OSError) -> KVStoreError:
    """Translate an OSError; the message names the path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"{path}: {error.strerror}: free disk space or lower the tier's capacity"
        )
    why = f"{path}: {error.strerror or error}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return TierUnavailable(
            f"{why}: give the node's user write access, or use another directory"
        )
    return TierUnavailable(why)


def open_all(
    disk: Disk, node: str, directories: Sequence[Directory], segment_bytes: int
) -> tuple[Members, list[OpenDirectory]]:
    """Lock and identify all directories of a node.

    Args:
        disk: their disk.
        node: the node's name; a directory of another node is refused.
        directories: at least one, no path twice.
        segment_bytes: size of a segment file.

    Returns:
        What belongs to the log, and the directories in the given order.

    Raises:
        ConfigError: a directory is wrong: it is not a directory, belongs to another node or log,
            has a newer format, is too small for one segment, or its capacity is more than its file
            system. Nothing in it was changed.
        TierUnavailable: it cannot be used now: read-only, no permission, or locked by another
            process.
    """
    assert directories, "a log needs a directory"
    opened: list[OpenDirectory] = []
    try:
        opened.extend(_take(disk, directory, segment_bytes) for directory in directories)
        _check_room(disk, opened)
        return _identify(disk, node, opened), opened
    except KVStoreError:
        for one in opened:
            with suppress(OSError):  # the error above says why the start ends
                disk.close(one.lock)
        raise


def _take(disk: Disk, directory: Directory, segment_bytes: int) -> OpenDirectory:
    path, capacity_bytes = directory
    if capacity_bytes < segment_bytes:
        raise ConfigError(
            f"{path}: a capacity of {exact(capacity_bytes)} is too small for one segment of"
            f" {exact(segment_bytes)}: raise ssd.capacity_bytes or make ssd.segment_bytes smaller"
        )
    try:
        disk.make_directory(path)
        lock = disk.lock(path)
    except BlockingIOError as error:
        raise TierUnavailable(
            f"ssd.directories: {path}: another process has this directory open"
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"ssd.directories: {path} is not a directory") from error
    except OSError as error:
        raise failure(f"ssd.directories: {path}", error) from error
    return OpenDirectory(path, capacity_bytes, direct_io=False, lock=lock)


def _shared(
    disk: Disk, opened: Sequence[OpenDirectory]
) -> list[tuple[FileSystem, list[OpenDirectory]]]:
    """The file systems, with the directories on each."""
    found: dict[int, tuple[FileSystem, list[OpenDirectory]]] = {}
    for one in opened:
        try:
            there = disk.file_system(one.path)
        except OSError as error:
            raise failure(one.path, error) from error
        found.setdefault(there.name, (there, []))[1].append(one)
    return list(found.values())


def _check_room(disk: Disk, opened: Sequence[OpenDirectory]) -> None:
    """Refuse a capacity that is larger than the file system; warn if it is in memory."""
    for there, sharing in _shared(disk, opened):
        paths = ", ".join(str(one.path) for one in sharing)
        wanted = sum(one.capacity_bytes for one in sharing)
        if there.in_memory:
            log.warning(
                "ssd.directories: %s is %s: its pages use memory besides host.capacity_bytes, and"
                " a restart of the machine loses all of them, even durable ones",
                paths, there.in_memory,
            )  # fmt: skip
        if there.total_bytes and wanted > there.total_bytes:
            raise ConfigError(
                f"ssd.capacity_bytes: {exact(wanted)} for {paths}, whose file system has"
                f" {rounded(there.total_bytes)} in total: lower it or use a larger disk"
            )


def say_room(disk: Disk, opened: Sequence[OpenDirectory]) -> None:
    """Warn if other files leave too little space for the capacity; call it after recovery.

    Raises:
        TierUnavailable: a directory cannot be read.
    """
    for there, sharing in _shared(disk, opened):
        wanted = sum(one.capacity_bytes for one in sharing)
        room = there.free_bytes + sum(one.used_bytes for one in sharing)
        if there.total_bytes and wanted > room:
            paths = ", ".join(str(one.path) for one in sharing)
            log.warning(
                "ssd.capacity_bytes: %s for %s, where only %s are free or used by it: the disk"
                " will be full before that; free disk space or lower it",
                exact(wanted), paths, rounded(room),
            )  # fmt: skip


def _identify(disk: Disk, node: str, opened: list[OpenDirectory]) -> Members:
    """Read all identities, then write missing ones and bring the others up to date."""
    found = {index: _read_identity(disk, one.path) for index, one in enumerate(opened)}
    ids = {identity.log: index for index, identity in found.items() if identity is not None}
    for index, identity in found.items():
        if identity is not None and identity.node != node:
            raise ConfigError(
                f"{opened[index].path}: it belongs to node {identity.node!r}, this is {node!r}:"
                " give it another directory, or this node its old name"
            )
    if len(ids) > 1:
        paths = ", ".join(str(opened[index].path) for index in ids.values())
        raise ConfigError(f"{paths}: these directories belong to different logs")
    log_id = next(iter(ids), None) or disk.random_id()
    here: list[tuple[Path, Identity]] = []
    for index, one in enumerate(opened):
        identity = found[index]
        try:
            if identity is None:
                identity = Identity(log_id, node, index, disk.random_id())
                disk.write_file(one.path / IDENTITY_NAME, encode_identity(identity))
            elif not identity.id or identity.id in {other.id for _, other in here}:
                identity = _rewritten(
                    disk, one.path, identity, replace(identity, id=disk.random_id())
                )
            here.append((one.path, identity))
            one.direct_io = disk.takes_direct_io(one.path)
        except OSError as error:
            raise failure(one.path, error) from error
        if not one.direct_io:
            log.warning("%s does not support direct I/O: using the page cache", one.path)
    missing: dict[str, str] = {}
    for _, identity in here:
        missing.update(identity.directories)
    for _, identity in here:
        missing.pop(identity.id.hex(), None)
    next_segment = max(identity.next_segment for _, identity in here)
    return Members(log_id, _write_members(disk, here, missing, next_segment), missing, next_segment)


def _write_members(
    disk: Disk, here: list[tuple[Path, Identity]], others: dict[str, str], next_segment: int
) -> list[tuple[Path, Identity]]:
    """Write into each identity which directories belong to the log; returns the identities."""
    every = others | {identity.id.hex(): str(path) for path, identity in here if identity.id}
    updated: list[tuple[Path, Identity]] = []
    for path, identity in here:
        wanted = replace(identity, directories=every, next_segment=next_segment)
        if identity.id and identity != wanted:
            identity = _rewritten(disk, path, identity, wanted)
        updated.append((path, identity))
    return updated


def _rewritten(disk: Disk, path: Path, old: Identity, new: Identity) -> Identity:
    """Replace an identity; returns the one that is on the disk now.

    A disk may be full. The old identity does no harm then: at worst a later start does not notice
    that a directory is missing, or takes one for missing once more.
    """
    try:
        disk.write_file(path / IDENTITY_NAME, encode_identity(new))
    except OSError as error:
        log.warning("%s: %s cannot be updated: %s", path, IDENTITY_NAME, error.strerror or error)
        return old
    return new


def _read_identity(disk: Disk, path: Path) -> Identity | None:
    """Read the identity of a directory; None if it has none yet."""
    try:
        with suppress(FileNotFoundError):
            return decode_identity(disk.read_file(path / IDENTITY_NAME))
        if any(map(SEGMENT_NAME.fullmatch, disk.names(path))):
            raise ConfigError(
                f"it has segments but no {IDENTITY_NAME}: put back a copy of it, or use another"
                " directory"
            )
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise failure(path, error) from error
    return None
