"""The directories of an SSD log: taken for this process, identified, and shared out to segments."""

import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvstore.config.sizes import exact, rounded
from kvstore.errors import CapacityError, ConfigError, KVStoreError, TierUnavailable
from kvstore.tier.disk import Disk, FileSystem
from kvstore.tier.record import (
    IDENTITY_NAME,
    SEGMENT_NAME,
    Identity,
    decode_identity,
    encode_identity,
)

log = logging.getLogger(__name__)


class Directory(NamedTuple):
    """A directory for segments, best one for each disk.

    Attributes:
        path: made when it is not there.
        capacity_bytes: files of segments never take more; at least one segment.
    """

    path: Path
    capacity_bytes: int


@dataclass(slots=True)
class OpenDirectory:
    """A directory that is ours until its lock is closed.

    Attributes:
        path: where.
        capacity_bytes: most bytes of its segment files.
        direct_io: its files are read and written past the page cache.
        lock: descriptor of the lock.
        used_bytes: of its segment files, those being made and foreign ones included.
        untouched_bytes: of those, of files that are left as they are.
        failing: the last segment there could not be made or written: others come first.
    """

    path: Path
    capacity_bytes: int
    direct_io: bool
    lock: int
    used_bytes: int = 0
    untouched_bytes: int = 0
    failing: bool = False


def failure(path: Path | str, error: OSError) -> KVStoreError:
    """What an operating system's error means here; names the path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{path}: {error.strerror}: free room or lower the tier's capacity")
    why = f"{path}: {error.strerror or error}"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return TierUnavailable(f"{why}: let the node's user write there, or use another directory")
    return TierUnavailable(why)


def open_all(
    disk: Disk, node: str, directories: Sequence[Directory], segment_bytes: int
) -> tuple[bytes, list[OpenDirectory]]:
    """Take all directories of a node.

    Args:
        disk: where they are.
        node: the node's name; a directory of another node is refused.
        directories: at least one, no path twice.
        segment_bytes: of a segment's file.

    Returns:
        the log's id, and the directories in the order given.

    Raises:
        ConfigError: a directory cannot be the right one: it is no directory, belongs to another
            node or log, has a newer format, has no room for one segment, or is to hold more than
            its file system. Nothing in it changed.
        TierUnavailable: it cannot be used now: read-only, not permitted, taken by a process.
    """
    assert directories, "a log lies somewhere"
    opened: list[OpenDirectory] = []
    try:
        opened.extend(_take(disk, directory, segment_bytes) for directory in directories)
        _check_room(disk, opened)
        return _identify(disk, node, opened), opened
    except KVStoreError:
        for one in opened:
            disk.close(one.lock)
        raise


def _take(disk: Disk, directory: Directory, segment_bytes: int) -> OpenDirectory:
    path, capacity_bytes = directory
    if capacity_bytes < segment_bytes:
        raise ConfigError(
            f"{path}: a capacity of {exact(capacity_bytes)} has no room for one segment of"
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
    """Each file system with the directories on it."""
    found: dict[int, tuple[FileSystem, list[OpenDirectory]]] = {}
    for one in opened:
        try:
            there = disk.file_system(one.path)
        except OSError as error:
            raise failure(one.path, error) from error
        found.setdefault(there.name, (there, []))[1].append(one)
    return list(found.values())


def _check_room(disk: Disk, opened: Sequence[OpenDirectory]) -> None:
    """Refuse a capacity that can never be; say of a disk that is memory what it is."""
    for there, sharing in _shared(disk, opened):
        paths = ", ".join(str(one.path) for one in sharing)
        wanted = sum(one.capacity_bytes for one in sharing)
        if there.in_memory:
            log.warning(
                "ssd.directories: %s is %s: its pages take memory besides host.capacity_bytes, and"
                " a restart of the machine leaves nothing of them, durable or not",
                paths, there.in_memory,
            )  # fmt: skip
        if there.total_bytes and wanted > there.total_bytes:
            raise ConfigError(
                f"ssd.capacity_bytes: {exact(wanted)} for {paths}, whose file system has"
                f" {rounded(there.total_bytes)} in all: lower it or use a larger disk"
            )


def say_room(disk: Disk, opened: Sequence[OpenDirectory]) -> None:
    """Warn of a capacity that others' files leave no room for; after a start found what is there.

    Raises:
        TierUnavailable: a directory cannot be looked at.
    """
    for there, sharing in _shared(disk, opened):
        wanted = sum(one.capacity_bytes for one in sharing)
        room = there.free_bytes + sum(one.used_bytes for one in sharing)
        if there.total_bytes and wanted > room:
            paths = ", ".join(str(one.path) for one in sharing)
            log.warning(
                "ssd.capacity_bytes: %s for %s, where %s are free or the log's own: it will"
                " be full before that; free room or lower it", exact(wanted), paths, rounded(room),
            )  # fmt: skip


def _identify(disk: Disk, node: str, opened: list[OpenDirectory]) -> bytes:
    """Read every identity before the first is written; returns the log's id."""
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
    for index, one in enumerate(opened):
        try:
            if found[index] is None:
                content = encode_identity(Identity(log_id, node, index))
                disk.write_file(one.path / IDENTITY_NAME, content)
            one.direct_io = disk.takes_direct_io(one.path)
        except OSError as error:
            raise failure(one.path, error) from error
        if not one.direct_io:
            log.warning("%s takes no direct I/O: pages pass through the page cache", one.path)
    return log_id


def _read_identity(disk: Disk, path: Path) -> Identity | None:
    """Whose directory it is; None: nobody's yet."""
    try:
        return decode_identity(disk.read_file(path / IDENTITY_NAME))
    except FileNotFoundError:
        if any(map(SEGMENT_NAME.fullmatch, disk.names(path))):
            raise ConfigError(
                f"{path}: it has segments but no {IDENTITY_NAME}: put back a copy of it, or use"
                " another directory"
            ) from None
        return None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except OSError as error:
        raise failure(path, error) from error
