"""Reads the segments of a log at a start.

A sealed segment has a footer that lists its records. Any other segment is scanned: a record counts
if its header and its payload are valid, so a torn tail is cut off, and a hole from a failed write
is skipped. A segment of another log or of a newer format is not changed.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import mover
from kvstore.protocol.errors import LayoutMismatch
from kvstore.protocol.page import ALL_KEYS, KEY_BYTES, ShardSpec, SpaceIdentity, page_seeds
from kvstore.state.disk.log import SEGMENT_PAIRS_MAX
from kvstore.state.tree.places import BLOCK_BYTES, HEADER_BYTES, Place, footer_bytes, record_bytes
from kvstore.tier.disk import Disk
from kvstore.tier.record import (
    ENTRY,
    PAYLOAD_BYTES_MAX,
    SEGMENT_BYTES_MAX,
    SEQUENCE_MAX,
    Entries,
    ForeignLog,
    Header,
    Kind,
    Pair,
    decode_footer,
    decode_header,
    entry_of,
    pair_seed,
    refuse_foreign,
    tombstone_digest,
    trailer_records,
    unpack_pair,
)
from kvstore.tier.vectored import aligned, read_fully
from kvstore.tier.window import SegmentFile, Window

log = logging.getLogger(__name__)

_MAGIC: Final = int.from_bytes(b"kvsREC\r\n", "little")
_SPREAD: Final = 0x9E3779B97F4A7C15
"""Odd, with bits everywhere: different pairs get different marks for one key."""
PAIRS_MAX = 1 << 16
"""Maximum pairs of space and shard in a log: :data:`ENTRY` has 16 bits for the number of one."""
_SEQUENCE_BITS: Final = 32
"""A segment has fewer records than fit into these bits."""
GAP_SEGMENTS: Final = 1 << 20
"""More segments than a log creates between the last one that a start finds and the last one in a
directory that is missing then: 256 TiB at the default size, all in that directory."""
_GAP_END: Final = SEQUENCE_MAX // 2 >> _SEQUENCE_BITS
"""Up to this segment, sequence numbers grow with segment numbers; see :func:`_above_all`."""


_Marks = npt.NDArray[np.uint64]


class Tombstone(NamedTuple):
    """Removed keys; ``keys`` None = the record is damaged, so the keys are unknown."""

    sequence: int
    pair: bytes
    keys: bytes | None


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """The content of one segment file.

    Attributes:
        entries: all its records.
        pairs: packed pairs; ``entries["pair"]`` is an index into it.
        tombstones: the content of its tombstones.
        sealed: it has a footer.
        end: the first byte after its last record.
    """

    entries: Entries
    pairs: list[bytes]
    tombstones: list[Tombstone]
    sealed: bool
    end: int


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """One segment with the pages that can still be read from it.

    Attributes:
        number: its number.
        size_bytes: size of its file.
        first_page: lowest sequence number of its page records, including superseded ones; 0 = none.
        last_tombstone: highest sequence number of its tombstones; 0 = none.
        sealed: it has a footer; otherwise it may be written from ``end`` on, and sealed.
        end: the first byte after its last record.
        entries: its pages, without those that were written again later or removed. ``pair`` is an
            index into :attr:`RecoveredLog.pairs`.
        records: number of records that its footer must list, including tombstones and lost pages.
    """

    number: int
    size_bytes: int
    sealed: bool
    end: int
    entries: Entries
    records: int
    first_page: int = 0
    last_tombstone: int = 0


@dataclass(frozen=True, slots=True)
class RecoveredLog:
    """The result of a recovery.

    Attributes:
        segments: segments, sorted by number.
        pairs: spaces and shards of the pages.
        next_segment: higher than every number in use, including foreign files and missing
            directories.
        next_sequence: higher than the number of every record, including those in unchanged files.
        untouched: files that are not used and not changed: path and reason.
    """

    segments: list[RecoveredSegment]
    pairs: list[Pair]
    next_segment: int
    next_sequence: int
    untouched: list[str]

    def fitting(self) -> list[Entries]:
        """The pages of each segment whose records have the size of their shard's pages."""
        sizes = np.array([_page_bytes(*pair) for pair in self.pairs], np.uint64)
        pages: list[Entries] = []
        for one in self.segments:
            fits = one.entries["payload_bytes"] == sizes[one.entries["pair"]]
            pages.append(one.entries if fits.all() else one.entries[fits])
        return pages


def _page_bytes(space: SpaceIdentity, shard: ShardSpec) -> int:
    """Size of a shard's pages; 0 = no record can have it."""
    try:
        size = shard.page_bytes(space)
    except LayoutMismatch:
        return 0
    return size if 0 < size <= PAYLOAD_BYTES_MAX else 0


def load_segment(
    disk: Disk, descriptor: int, number: int, log_id: bytes, readers: Executor | None = None
) -> LoadedSegment:
    """Read a segment's footer, or scan it.

    Args:
        disk: its disk.
        descriptor: its open file.
        number: its number.
        log_id: the expected log id.
        readers: threads that read pieces of it in parallel; None = read them one after the other.

    Raises:
        OSError: a read failed.
        ForeignLog: it belongs to another log, has a newer format, or is not a segment.
    """
    size = disk.size(descriptor)
    if size > SEGMENT_BYTES_MAX:
        raise ForeignLog(f"it has {size} bytes, more than any segment")
    loaded = _load_footer(disk, descriptor, number, log_id, size)
    if loaded is None:
        window = Window(SegmentFile(disk, descriptor, size, readers))
        try:
            loaded = Scan(window, number, log_id).run()
        finally:
            window.close()
    for packed in loaded.pairs:
        unpack_pair(packed)
    return loaded


def _load_footer(
    disk: Disk, descriptor: int, number: int, log_id: bytes, size: int
) -> LoadedSegment | None:
    if size < BLOCK_BYTES or size % BLOCK_BYTES:
        return None
    trailer = aligned(BLOCK_BYTES)
    if read_fully(disk, descriptor, [trailer], size - BLOCK_BYTES) < BLOCK_BYTES:
        return None
    refuse_foreign(trailer, log_id)
    count = trailer_records(trailer, log_id, number)
    if count is None or footer_bytes(count) > size:
        return None
    whole = aligned(footer_bytes(count))
    if read_fully(disk, descriptor, [whole], size - len(whole)) < len(whole):
        return None
    unchanged = bytes(whole[-BLOCK_BYTES:]) == bytes(trailer)
    footer = decode_footer(whole, count, size) if unchanged else None
    if footer is None:
        log.warning("the footer of segment %d is damaged: scanning the segment", number)
        return None
    tombstones = [
        _load_tombstone(disk, descriptor, entry, footer.pairs[entry["pair"]])
        for entry in footer.entries[footer.entries["kind"] == Kind.TOMBSTONE]
    ]
    return LoadedSegment(footer.entries, footer.pairs, tombstones, sealed=True, end=footer.end)


def _load_tombstone(disk: Disk, descriptor: int, entry: np.void, pair: bytes) -> Tombstone:
    count, offset = int(entry["payload_bytes"]), int(entry["offset"])
    payload = aligned(record_bytes(count) - HEADER_BYTES)
    read_fully(disk, descriptor, [payload], offset + HEADER_BYTES)
    keys = bytes(payload[:count])
    space, shard = unpack_pair(pair)
    whole = tombstone_digest(keys, pair_seed(space, shard)) == entry["digest"].tobytes()
    return Tombstone(int(entry["sequence"]), pair, keys if whole else None)


class Scan:
    """Scans a segment without a footer, record by record.

    Args:
        window: a window on the segment.
        number: its number.
        log_id: the expected log id.
    """

    def __init__(self, window: Window, number: int, log_id: bytes) -> None:
        self._window = window
        self._number = number
        self._log = log_id
        self._entries: list[bytes] = []
        self._pairs: dict[bytes, int] = {}
        self._tombstones: list[Tombstone] = []
        self._end = 0

    def run(self) -> LoadedSegment:
        """Find all records; see :func:`load_segment`."""
        at = 0
        while self._window.load(at, HEADER_BYTES):
            at = self._step(at)
        entries = np.frombuffer(b"".join(self._entries), dtype=ENTRY)
        return LoadedSegment(
            entries, list(self._pairs), self._tombstones, sealed=False, end=self._end
        )

    def _step(self, at: int) -> int:
        """Parse the block at ``at``; returns where to continue."""
        assert at % BLOCK_BYTES == 0
        block = self._window.bytes(at, HEADER_BYTES)
        header = decode_header(block, self._log, Place(self._number, at))
        if header is None:
            if at == 0:
                refuse_foreign(block, self._log)
            return self._window.find(at + BLOCK_BYTES, _MAGIC)
        length = record_bytes(header.payload_bytes)
        if not self._window.load(at, length) or not self._take(header):
            return self._window.find(at + BLOCK_BYTES, _MAGIC)
        self._end = at + length
        return at + length

    def _take(self, header: Header) -> bool:
        """Add a record if its payload is valid."""
        if header.pair not in self._pairs and len(self._pairs) >= SEGMENT_PAIRS_MAX:
            return False  # a log never writes this, and a footer has no space for it
        space, shard = unpack_pair(header.pair)
        seed = pair_seed(space, shard)
        payload = self._window.bytes(header.place.offset + HEADER_BYTES, header.payload_bytes)
        if header.kind is Kind.TOMBSTONE:
            if tombstone_digest(payload, seed) != header.digest:
                return False
            self._tombstones.append(Tombstone(header.sequence, header.pair, bytes(payload)))
        else:
            address = np.frombuffer(payload, dtype=np.uint8).ctypes.data
            seeds = page_seeds(header.key, seed)
            found = mover.digest(np.array([address], np.uint64), header.payload_bytes, seeds)
            if found.tobytes() != header.digest:
                return False
        pair = self._pairs.setdefault(header.pair, len(self._pairs))
        self._entries.append(entry_of(header, pair))
        return True


# All segments together


class SegmentScan(NamedTuple):
    """A segment's file with its content, or the reason why it is not used."""

    number: int
    directory: int
    path: Path
    size_bytes: int
    loaded: LoadedSegment | None
    reason: str = ""


def one_of_each(found: Iterable[SegmentScan]) -> list[SegmentScan]:
    """Of several files with one number choose the best; do not use the others."""
    best: dict[int, SegmentScan] = {}
    others: list[SegmentScan] = []
    for one in sorted(found, key=_worth, reverse=True):
        if best.setdefault(one.number, one) is one:
            continue
        reason = one.reason or f"segment {one.number} is in two directories"
        others.append(one._replace(loaded=None, reason=reason))
    return [*best.values(), *others]


def _worth(found: SegmentScan) -> tuple[bool, bool, int]:
    loaded = found.loaded
    return (False, False, 0) if loaded is None else (True, loaded.sealed, len(loaded.entries))


def combine(found: Iterable[SegmentScan], floor: int = 0, gap: int = 0) -> RecoveredLog:
    """Decide which records are valid: the latest of each page, unless it was removed.

    Args:
        found: all files.
        floor: lower bound for the numbers of new segments, after an earlier gap.
        gap: segment numbers to leave out, because segments of missing directories may have them.
    """
    ordered = _numbered(sorted(found, key=lambda one: one.number))
    loaded = [(one, one.loaded) for one in ordered if one.loaded is not None]
    numbers: dict[bytes, int] = {}
    entries = [_renumbered(segment, numbers) for _, segment in loaded]
    tombstones = [tombstone for _, segment in loaded for tombstone in segment.tombstones]
    standing = _standing(entries, tombstones, numbers)
    segments, at = [], 0
    for (one, segment), every in zip(loaded, entries, strict=True):
        stands = standing[at : at + len(every)]
        at += len(every)
        segments.append(
            RecoveredSegment(
                number=one.number,
                size_bytes=one.size_bytes,
                sealed=segment.sealed,
                end=segment.end,
                entries=every if stands.all() else every[stands],
                records=len(every),
                first_page=_first_page(every),
                last_tombstone=max((one.sequence for one in segment.tombstones), default=0),
            )
        )
    next_segment = max((one.number + 1 for one in ordered), default=0)
    next_segment = max(next_segment, floor)
    if next_segment + gap <= _GAP_END:
        next_segment += gap
    next_sequence = max((int(one["sequence"].max()) + 1 for one in entries if len(one)), default=1)
    untouched = [f"{one.path}: {one.reason}" for one in ordered if one.loaded is None]
    if untouched or floor or gap:
        next_sequence = max(next_sequence, _above_all(next_segment))
    pairs = [unpack_pair(packed) for packed in numbers]
    return RecoveredLog(segments, pairs, next_segment, next_sequence, untouched)


def _numbered(ordered: list[SegmentScan]) -> list[SegmentScan]:
    """Do not use the oldest segments if the log has more pairs than there are numbers.

    All before the first one that is not used are not used either: a tombstone in that one may
    remove their pages.
    """
    pairs, fits = set[bytes](), True
    found: list[SegmentScan] = []
    for one in reversed(ordered):
        if one.loaded is not None:
            pairs.update(one.loaded.pairs if fits else ())
            fits = fits and len(pairs) <= PAIRS_MAX
        reason = f"the log has more than {PAIRS_MAX} pairs of space and shard"
        found.append(
            one if fits or one.loaded is None else one._replace(loaded=None, reason=reason)
        )
    return found[::-1]


def _above_all(next_segment: int) -> int:
    """A sequence number that is higher than that of any record in earlier segments.

    Each record has its own place in a segment, so their number is limited. A file that this start
    cannot read may be readable for a later one; its records must not seem newer than those that are
    written meanwhile.
    """
    return min(next_segment << _SEQUENCE_BITS, SEQUENCE_MAX // 2)


def _first_page(entries: Entries) -> int:
    sequences = entries["sequence"][entries["kind"] == Kind.PAGE]
    return int(sequences.min()) if len(sequences) else 0


def _renumbered(segment: LoadedSegment, numbers: dict[bytes, int]) -> Entries:
    """A segment's entries, with pairs numbered for the whole log."""
    pairs = [numbers.setdefault(packed, len(numbers)) for packed in segment.pairs]
    if pairs == list(range(len(pairs))) or not len(segment.entries):
        return segment.entries
    entries = segment.entries.copy()
    entries["pair"] = np.array(pairs, dtype=np.uint16)[entries["pair"]]
    return entries


def _standing(
    entries: list[Entries], tombstones: Sequence[Tombstone], numbers: dict[bytes, int]
) -> npt.NDArray[np.bool_]:
    """For each entry, in order: whether it is a page that is still valid."""
    every = [np.empty(0, ENTRY), *entries]
    standing: npt.NDArray[np.bool_] = np.concatenate([one["kind"] == Kind.PAGE for one in every])
    pair = np.concatenate([one["pair"] for one in every])
    head = np.concatenate([one.view("<u8")[:: ENTRY.itemsize // 8] for one in every])
    marks = _marks(head, pair)
    doubtful = _repeated(marks)
    if not tombstones and not doubtful.any():
        return standing
    sequence = np.concatenate([one["sequence"] for one in every])
    latest: dict[tuple[int, bytes], int] = {}
    cleared: dict[int, int] = {}
    for tombstone in tombstones:
        number = numbers[tombstone.pair]
        if tombstone.keys is None:
            log.error("a tombstone is damaged: all older pages of its space are dropped")
        if tombstone.keys is None or _is_for_all(tombstone.keys):
            cleared[number] = max(cleared.get(number, 0), tombstone.sequence)
            continue
        for at in range(0, len(tombstone.keys), KEY_BYTES):
            name = (number, tombstone.keys[at : at + KEY_BYTES])
            latest[name] = max(latest.get(name, 0), tombstone.sequence)
    if cleared:
        first = np.array([cleared.get(number, 0) for number in range(len(numbers))], np.uint64)
        standing &= sequence >= first[pair]
    if latest:
        heads = np.frombuffer(b"".join(key[:8].ljust(8, b"\0") for _, key in latest), "<u8")
        doubtful |= np.isin(marks, _marks(heads, np.array([number for number, _ in latest])))
    rows = np.flatnonzero(doubtful & standing).tolist()
    starts = list(accumulate((len(one) for one in entries), initial=0))
    pages: list[tuple[int, bytes]] = []
    for row in rows:
        which = bisect_right(starts, row) - 1
        pages.append((int(pair[row]), entries[which]["key"][row - starts[which]].tobytes()))
        latest[pages[-1]] = max(latest.get(pages[-1], 0), int(sequence[row]))
    for row, name in zip(rows, pages, strict=True):
        standing[row] = latest[name] == sequence[row]
    return standing


def _is_for_all(keys: bytes) -> bool:
    return any(keys[at : at + KEY_BYTES] == ALL_KEYS for at in range(0, len(keys), KEY_BYTES))


def _marks(heads: npt.NDArray[np.uint64], pairs: npt.NDArray[np.integer]) -> _Marks:
    """A number for each page, by which most are told apart: of its pair and of its key's start."""
    spread: _Marks = pairs.astype(np.uint64) * np.uint64(_SPREAD)
    return heads ^ spread


def _repeated(values: _Marks) -> npt.NDArray[np.bool_]:
    """For each value: whether it occurs more than once."""
    ordered = np.sort(values)  # much faster than with their order, and mostly all are different
    if not (ordered[1:] == ordered[:-1]).any():
        return np.zeros(len(values), np.bool_)
    order = np.argsort(values)
    ordered = values[order]
    same = np.concatenate(([False], ordered[1:] == ordered[:-1], [False]))
    repeated = np.empty(len(values), dtype=np.bool_)
    repeated[order] = same[1:] | same[:-1]
    return repeated
