"""The frames on the data port; ``docs/internals/transport.md`` describes them.

A request is a head of 32 bytes and 24 bytes for each range. An answer is 16 bytes. All numbers are
little-endian.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument, KVStoreError, NotFound, ProtocolError
from kvstore.transport.base import Range

MAGIC: Final = b"KVTP"
VERSION: Final = 1
RANGES_MAX: Final = 1024
"""Ranges of one request; longer transfers are several requests."""
BUDGET_MS_MAX: Final = 60_000

_HEAD: Final = struct.Struct("<4sBBHII16s")
_RANGE: Final = struct.Struct("<IIQQ")
_ANSWER: Final = struct.Struct("<4sBBHQ")
HEAD_BYTES: Final = _HEAD.size
RANGE_BYTES: Final = _RANGE.size
ANSWER_BYTES: Final = _ANSWER.size


class DataKind(IntEnum):
    """The kind of a request."""

    READ = 1
    """Send the bytes of the ranges."""
    WRITE = 2
    """Write the ranges; their bytes follow after the first answer."""


class DataStatus(IntEnum):
    """The status of an answer."""

    OK = 0
    """The bytes follow (of a read), may follow, or have arrived (of a write)."""
    UNKNOWN_TICKET = 1
    """The ticket does not exist, not for this kind, or not any more."""
    OUTSIDE = 2
    """A range is not one of the ticket's, or is asked for twice."""
    PROTOCOL = 3
    """The request is not understood; ``version`` is the one that is."""


class DataHead(NamedTuple):
    """The head of a request.

    Attributes:
        range_count: number of ranges, 1 to 1024.
        budget_ms: the peer gives up after so many milliseconds.
        ticket: 16 bytes.
    """

    kind: DataKind
    range_count: int
    budget_ms: int
    ticket: bytes


def pack_ranges(ranges: list[Range]) -> list[bytes]:
    """Each range as in a request.

    Raises:
        InvalidArgument: a number does not fit.
    """
    try:
        return [_RANGE.pack(*one) for one in ranges]
    except struct.error as error:
        raise InvalidArgument("ranges", f"not an address and a length: {error}") from error


def pack_request(kind: DataKind, ticket: bytes, budget_ms: int, ranges: list[bytes]) -> bytes:
    """A request for packed ranges; its peer has ``budget_ms``."""
    assert 0 < len(ranges) <= RANGES_MAX
    budget_ms = min(max(budget_ms, 1), BUDGET_MS_MAX)
    head = _HEAD.pack(MAGIC, VERSION, kind, 0, len(ranges), budget_ms, ticket)
    return b"".join([head, *ranges])


def read_head(data: bytes) -> DataHead:
    """The head of a request.

    Raises:
        ProtocolError: another protocol or version, or a number that is not allowed.
    """
    magic, version, kind, zero, count, budget_ms, ticket = _HEAD.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("these bytes are no request for pages")
    if version != VERSION:
        raise ProtocolError(f"version {version} of the data port, this node has {VERSION}")
    known = kind in {DataKind.READ, DataKind.WRITE} and not zero
    if not known or not 0 < count <= RANGES_MAX or not 0 < budget_ms <= BUDGET_MS_MAX:
        raise ProtocolError(f"a request of kind {kind} for {count} ranges in {budget_ms} ms")
    return DataHead(DataKind(kind), count, budget_ms, ticket)


def pack_answer(status: DataStatus, total_bytes: int = 0) -> bytes:
    """An answer."""
    return _ANSWER.pack(MAGIC, VERSION, status, 0, total_bytes)


def read_answer(data: bytes, total_bytes: int) -> None:
    """Check the answer to a request for this many bytes.

    Raises:
        NotFound: the ticket has ended, or is not for this.
        InvalidArgument: a range is outside the ticket.
        ProtocolError: another protocol or version, or another number of bytes.
    """
    magic, version, status, _, size = _ANSWER.unpack(data)
    if magic != MAGIC:
        raise ProtocolError("the peer's data port speaks another protocol")
    if version != VERSION:
        raise ProtocolError(f"the peer's data port has version {version}, this node {VERSION}")
    refusal = _REFUSALS.get(status)
    if refusal is not None:
        raise refusal
    if status != DataStatus.OK or size != total_bytes:
        raise ProtocolError(f"status {status} and {size} bytes, not {total_bytes}")


_REFUSALS: Final[dict[int, KVStoreError]] = {
    DataStatus.UNKNOWN_TICKET: NotFound("ticket", "the peer does not know it, or it has ended"),
    DataStatus.OUTSIDE: InvalidArgument("ranges", "not all of them belong to the ticket"),
    DataStatus.PROTOCOL: ProtocolError("the peer's data port did not understand the request"),
}
