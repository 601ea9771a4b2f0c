"""The format of the SSD log: record headers, segment footers, a directory's identity. Pure.

``docs/internals/ssd-format.md`` describes it for other readers. A header contains its own place and
the id of its log, so that bytes of an earlier file in the same disk blocks are never mistaken for a
record. It ends with a checksum.
"""

import json
import re
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.protocol.errors import ConfigError, InvalidArgument
from kvstore.protocol.page import (
    DIGEST_BYTES,
    KEY_BYTES,
    PAIR_BYTES_MAX,
    ShardSpec,
    SpaceIdentity,
    digest_seed,
    pack_pair,
)
from kvstore.state.disk.jobs import PageRecord
from kvstore.state.disk.log import SEGMENT_PAIRS_MAX
from kvstore.state.tree.places import (
    BLOCK_BYTES,
    FOOTER_ENTRY_BYTES,
    FOOTER_TABLE_BYTES,
    HEADER_BYTES,
    Place,
    footer_bytes,
)

FORMAT_VERSION: Final = 1
LOG_ID_BYTES: Final = 16
SEGMENT_NAME: Final = re.compile(r"segment-(0[0-9a-f]{15})\.kvlog")
"""A log never has higher numbers; after a higher one, the next might not fit a header."""
IDENTITY_NAME: Final = "kvstore-log.json"

SEGMENT_MAX: Final = 1 << 59
"""The highest number of a segment; :data:`SEGMENT_NAME` matches higher ones, which are refused."""
SEGMENT_BYTES_MAX: Final = 1 << 34
"""Maximum size of a segment's file; the upper limit of ``ssd.segment_bytes``."""
PAYLOAD_BYTES_MAX: Final = 1 << 32
"""Maximum payload of a record: no page is larger than an extent."""
SEQUENCE_MAX: Final = 1 << 62
"""Records never have higher sequence numbers, so that numbers after it are still free."""

_RECORD_MAGIC: Final = b"kvsREC\r\n"
_FOOTER_MAGIC: Final = b"kvsEND\r\n"
_PREFIX: Final = struct.Struct("<8sII16sQ")
"""How headers and trailers of every version start: magic, version, kind, log, segment."""
_HEADER: Final = struct.Struct("<8sII16sQQQQ32s32s16sHHH")
_TRAILER: Final = struct.Struct("<8sII16sQQQQ16s")
_CHECKSUM: Final = struct.Struct("<Q")
_CHECKSUM_AT: Final = HEADER_BYTES - _CHECKSUM.size
_HAS_PARENT: Final = 1
_PAIR_LENGTH: Final = struct.Struct("<H")
_ENTRY: Final = struct.Struct("<32s32s16sQQQHBB20x")
_MEND: Final = "put back a copy of it, or use another directory"
_TRAILER_KIND: Final = 255

ENTRY: Final = np.dtype(
    [
        ("key", "V32"), ("parent", "V32"), ("digest", "V16"), ("sequence", "<u8"),
        ("offset", "<u8"), ("payload_bytes", "<u8"), ("pair", "<u2"), ("kind", "u1"),
        ("flags", "u1"), ("reserved", "V20"),
    ]
)  # fmt: skip
"""One record in a footer; ``pair`` is an index into the footer's table."""
assert ENTRY.itemsize == _ENTRY.size == FOOTER_ENTRY_BYTES

Entries = npt.NDArray[np.void]
"""shape (records,), dtype :data:`ENTRY`."""


class Kind(IntEnum):
    """The kinds of records."""

    PAGE = 1
    TOMBSTONE = 2


class Pair(NamedTuple):
    """The space and shard of a record."""

    space: SpaceIdentity
    shard: ShardSpec


class ForeignLog(Exception):
    """These bytes belong to another log, or have a newer format: do not change them."""


@dataclass(frozen=True, slots=True)
class Header:
    """A record header, decoded and with a valid checksum.

    ``pair``: see :func:`kvstore.protocol.page.pack_pair`.
    """

    kind: Kind
    sequence: int
    place: Place
    payload_bytes: int
    key: bytes
    parent: bytes
    digest: bytes
    pair: bytes
    tokens: bytes


@lru_cache(maxsize=1024)
def unpack_pair(packed: bytes) -> Pair:
    """Decode what :func:`~kvstore.protocol.page.pack_pair` encoded.

    Raises:
        ForeignLog: the space or shard is not valid in this version.
    """
    try:
        space, shard = msgspec.msgpack.decode(packed, type=tuple[SpaceIdentity, ShardSpec])
    except (msgspec.MsgspecError, InvalidArgument, ValueError, RecursionError) as error:
        raise ForeignLog(f"a space or shard of another version: {error}") from error
    return Pair(space, shard)


@lru_cache(maxsize=1024)
def pair_seed(space: SpaceIdentity, shard: ShardSpec) -> int:
    """:func:`kvstore.protocol.page.digest_seed`, which takes 20 us, cached."""
    return digest_seed(space, shard)


def tombstone_digest(keys: bytes | memoryview, seed: int) -> bytes:
    """Digest of a tombstone's payload; ``seed`` is that of its space and shard."""
    return xxhash.xxh3_128_digest(keys, seed)


def segment_name(segment: int) -> str:
    """The name of a segment's file; :data:`SEGMENT_NAME` matches it."""
    return f"segment-{segment:016x}.kvlog"


# Headers


def encode_header(log: bytes, header: Header) -> bytes:
    """Encode a header, HEADER_BYTES bytes; tokens are left out if they do not fit.

    ``log`` is the log's id.
    """
    assert len(header.pair) <= PAIR_BYTES_MAX, "pack_pair bounds it"
    tokens = header.tokens
    if _HEADER.size + len(header.pair) + len(tokens) > _CHECKSUM_AT:
        tokens = b""
    flags = _HAS_PARENT if header.parent else 0
    fixed = _HEADER.pack(
        _RECORD_MAGIC, FORMAT_VERSION, header.kind, log, header.place.segment, header.place.offset,
        header.sequence, header.payload_bytes, header.key, header.parent, header.digest,
        flags, len(header.pair), len(tokens),
    )  # fmt: skip
    return _closed(fixed + header.pair + tokens)


def decode_header(block: bytes | memoryview, log: bytes, place: Place) -> Header | None:
    """Decode a header; None if the bytes are not a valid header of a record at ``place``.

    Args:
        block: HEADER_BYTES bytes.
        log: the expected log id.
        place: where the bytes were read.
    """
    if len(block) != HEADER_BYTES or block[:8] != _RECORD_MAGIC or not _is_closed(block):
        return None
    (
        _, version, kind, of_log, segment, offset, sequence, payload_bytes, key, parent, digest,
        flags, pair_bytes, token_bytes,
    ) = _HEADER.unpack_from(block)  # fmt: skip
    if (version, of_log, segment, offset) != (FORMAT_VERSION, log, place.segment, place.offset):
        return None
    if kind not in (Kind.PAGE, Kind.TOMBSTONE):
        return None
    tokens_at = _HEADER.size + pair_bytes
    if tokens_at + token_bytes > _CHECKSUM_AT or sequence > SEQUENCE_MAX:
        return None
    if not 0 < payload_bytes <= PAYLOAD_BYTES_MAX:
        return None
    return Header(
        Kind(kind), sequence, place, payload_bytes, key, parent if flags & _HAS_PARENT else b"",
        digest, bytes(block[_HEADER.size : tokens_at]),
        bytes(block[tokens_at : tokens_at + token_bytes]),
    )  # fmt: skip


def is_of(header: Header, record: PageRecord) -> bool:
    """Whether a header belongs to this page."""
    return (
        header.kind is Kind.PAGE
        and header.key == record.key
        and header.digest == record.digest
        and header.payload_bytes == record.page_bytes
        and header.pair == pack_pair(record.space, record.shard)
    )


def refuse_foreign(block: bytes | memoryview, log: bytes) -> None:
    """Check a header or trailer block; an invalid block is ignored.

    Raises:
        ForeignLog: it is valid, but of another log or a newer format; the message says which.
    """
    if block[:8] not in (_RECORD_MAGIC, _FOOTER_MAGIC) or not _is_closed(block):
        return
    _, version, _, of_log, _ = _PREFIX.unpack_from(block)
    if version > FORMAT_VERSION:
        raise ForeignLog(f"it has format {version}, this version reads {FORMAT_VERSION}")
    if of_log != log:
        raise ForeignLog(f"it belongs to log {of_log.hex()}, not {log.hex()}")


def entry_of(header: Header, pair: int) -> bytes:
    """The footer entry of a record."""
    return _ENTRY.pack(
        header.key, header.parent, header.digest, header.sequence, header.place.offset,
        header.payload_bytes, pair, header.kind, _HAS_PARENT if header.parent else 0,
    )  # fmt: skip


# Footers


class Footer(NamedTuple):
    """The index of a sealed segment.

    Attributes:
        entries: all its records, in the order in which they were written.
        pairs: packed pairs; ``entries["pair"]`` is an index into it.
        end: the first byte after the last record.
    """

    entries: Entries
    pairs: list[bytes]
    end: int


def encode_footer(log: bytes, segment: int, entries: bytes, pairs: list[bytes], end: int) -> bytes:
    """Encode a footer of ``footer_bytes(records)`` bytes: entries, table of pairs, trailer.

    Args:
        log: the log's id.
        segment: the segment's number.
        entries: packed :data:`ENTRY` items.
        pairs: packed pairs, at most SEGMENT_PAIRS_MAX.
        end: the first byte after the last record.
    """
    count = len(entries) // FOOTER_ENTRY_BYTES
    assert len(pairs) <= SEGMENT_PAIRS_MAX
    table = b"".join(_PAIR_LENGTH.pack(len(pair)) + pair for pair in pairs)
    assert len(table) <= FOOTER_TABLE_BYTES, "PAIR_BYTES_MAX bounds it"
    body = entries.ljust(footer_bytes(count) - FOOTER_TABLE_BYTES - BLOCK_BYTES, b"\0")
    body += table.ljust(FOOTER_TABLE_BYTES, b"\0")
    fixed = _TRAILER.pack(
        _FOOTER_MAGIC, FORMAT_VERSION, _TRAILER_KIND, log, segment, count, len(pairs), end,
        xxhash.xxh3_128_digest(body),
    )  # fmt: skip
    return body + _closed(fixed)


def trailer_records(block: bytes | memoryview, log: bytes, segment: int) -> int | None:
    """The number of records in a segment's footer; None if the block is not its valid trailer."""
    if len(block) != BLOCK_BYTES or block[:8] != _FOOTER_MAGIC or not _is_closed(block):
        return None
    _, version, _, of_log, of_segment, count, _, _, _ = _TRAILER.unpack_from(block)
    if (version, of_log, of_segment) != (FORMAT_VERSION, log, segment):
        return None
    return int(count)


def decode_footer(footer: bytes | memoryview, count: int, size: int) -> Footer | None:
    """Decode a footer; None if it is damaged or not consistent.

    Args:
        footer: all ``footer_bytes(count)`` bytes; :func:`trailer_records` of its last block
            returned ``count``.
        count: number of records.
        size: size of the segment's file.
    """
    body = footer[:-BLOCK_BYTES]
    *_, pair_count, end, checksum = _TRAILER.unpack_from(footer, len(footer) - BLOCK_BYTES)
    if xxhash.xxh3_128_digest(body) != checksum:
        return None
    pairs = _pairs_of(bytes(body[len(body) - FOOTER_TABLE_BYTES :]), pair_count)
    entries = np.frombuffer(body, dtype=ENTRY, count=count)
    if pairs is None or end > size - len(footer) or not _are_records(entries, len(pairs), end):
        return None
    return Footer(entries, pairs, end)


def _pairs_of(table: bytes, count: int) -> list[bytes] | None:
    """The pairs in a footer's table; None if it is too short for them."""
    if count > SEGMENT_PAIRS_MAX:
        return None
    pairs, at = [], 0
    for _ in range(count):
        if at + _PAIR_LENGTH.size > len(table):
            return None
        (length,) = _PAIR_LENGTH.unpack_from(table, at)
        at += _PAIR_LENGTH.size + length
        pairs.append(table[at - length : at])
    return pairs if at <= len(table) else None


def end_of(entries: Entries) -> int:
    """The first byte after the last record; 0 if there is none."""
    return int(_behind(entries).max(initial=0))


def _behind(entries: Entries) -> npt.NDArray[np.uint64]:
    """For each record: the first byte after it."""
    blocks = np.uint64(BLOCK_BYTES)
    pages: npt.NDArray[np.uint64] = -(-entries["payload_bytes"] // blocks) * blocks
    return entries["offset"] + np.uint64(HEADER_BYTES) + pages


def _are_records(entries: Entries, pairs: int, end: int) -> bool:
    """Whether all entries are possible: records before ``end`` that do not overlap."""
    offsets, sizes = entries["offset"], entries["payload_bytes"]
    kinds = (entries["kind"] == Kind.PAGE) | (entries["kind"] == Kind.TOMBSTONE)
    fine = kinds & (entries["pair"] < pairs) & (entries["sequence"] <= SEQUENCE_MAX)
    fine &= (sizes > 0) & (sizes <= PAYLOAD_BYTES_MAX)
    fine &= (offsets % BLOCK_BYTES == 0) & (offsets <= end)
    if not fine.all():
        return False
    starts = np.append(offsets[1:], np.uint64(end))
    return bool((_behind(entries) <= starts).all())


def _closed(fixed: bytes) -> bytes:
    """A block with its checksum at the end."""
    block = fixed.ljust(_CHECKSUM_AT, b"\0")
    return block + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(block))


def _is_closed(block: bytes | memoryview) -> bool:
    found: int = _CHECKSUM.unpack_from(block, _CHECKSUM_AT)[0]
    return found == xxhash.xxh3_64_intdigest(block[:_CHECKSUM_AT])


# A directory's identity


@dataclass(frozen=True, slots=True)
class Identity:
    """The owner of a directory.

    Attributes:
        log: id of the log, the same in all directories of a node.
        node: the node's name.
        directory: its index among the node's directories when it was created.
        id: random bytes that no other directory has; empty in a file of an earlier version.
        directories: id in hex → path of each directory that belongs to the log; empty as above.
        next_segment: a lower bound for the numbers of new segments.
    """

    log: bytes
    node: str
    directory: int
    id: bytes = b""
    directories: dict[str, str] = field(default_factory=dict)
    next_segment: int = 0


def encode_identity(identity: Identity) -> bytes:
    """The content of the file :data:`IDENTITY_NAME`."""
    fields = {
        "format": FORMAT_VERSION,
        "log": identity.log.hex(),
        "node": identity.node,
        "directory": identity.directory,
        "id": identity.id.hex(),
        "directories": identity.directories,
        "next_segment": identity.next_segment,
    }
    return json.dumps(fields, indent=1).encode() + b"\n"


def decode_identity(content: bytes) -> Identity:
    """Decode an identity file.

    Raises:
        ConfigError: it is damaged or of a newer version; the directory must not be written to.
    """
    try:
        fields = json.loads(content)
        version = int(fields["format"])
        if version > FORMAT_VERSION:
            raise ConfigError(
                f"its log has format {version}, this version reads and writes {FORMAT_VERSION}:"
                " use the newer kvstore, or another directory"
            )
        identity = Identity(
            bytes.fromhex(fields["log"]), str(fields["node"]), int(fields["directory"]),
            bytes.fromhex(fields.get("id", "")),
            {str(one): str(path) for one, path in dict(fields.get("directories", {})).items()},
            int(fields.get("next_segment", 0)),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"its identity file is damaged ({error}): {_MEND}") from error
    if len(identity.log) != LOG_ID_BYTES:
        raise ConfigError(f"its identity file is damaged (a short log id): {_MEND}")
    if not 0 <= identity.next_segment <= SEGMENT_MAX:
        raise ConfigError(f"its identity file is damaged (an impossible segment): {_MEND}")
    return identity


assert _HEADER.size + PAIR_BYTES_MAX <= _CHECKSUM_AT
assert SEGMENT_PAIRS_MAX * (_PAIR_LENGTH.size + PAIR_BYTES_MAX) <= FOOTER_TABLE_BYTES
assert _HEADER.size == 8 + 4 + 4 + LOG_ID_BYTES + 4 * 8 + 2 * KEY_BYTES + DIGEST_BYTES + 6
