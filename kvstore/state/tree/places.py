"""The tiers a page can be in, and the position and size of its record in the SSD log. Pure.

``docs/internals/ssd-format.md`` describes the bytes.
"""

from functools import partial
from itertools import repeat
from typing import Final, Literal, NamedTuple

BLOCK_BYTES: Final = 4096
"""Headers, payloads and footers begin and end at multiples of this."""
HEADER_BYTES: Final = BLOCK_BYTES
FOOTER_TABLE_BYTES: Final = 16 * BLOCK_BYTES
"""Room in a footer for the (space, shard) pairs of the segment's records."""
FOOTER_ENTRY_BYTES: Final = 128


Tier = Literal["host", "ssd"]
"""A tier in which a page is. It may be in both; :meth:`PrefixNode.tiers` says in which."""


class Place(NamedTuple):
    """Where a record starts.

    Attributes:
        segment: number of its segment; never reused.
        offset: bytes from the segment's start, a multiple of :data:`BLOCK_BYTES`.
    """

    segment: int
    offset: int


def adjacent_places(first: Place, each: int, count: int) -> list[Place]:
    """The places of ``count`` adjacent records of ``each`` bytes."""
    offsets = range(first.offset, first.offset + count * each, each)
    # As `Place(segment, offset)` for each, which is Python code also where all else is compiled.
    return list(map(partial(tuple.__new__, Place), zip(repeat(first.segment), offsets)))


def record_bytes(page_bytes: int) -> int:
    """Bytes of the record of a page."""
    return HEADER_BYTES + -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


def footer_bytes(records: int) -> int:
    """Maximum bytes of the footer of a segment with this many records."""
    entries = -(-records * FOOTER_ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES
    return FOOTER_TABLE_BYTES + entries + BLOCK_BYTES
