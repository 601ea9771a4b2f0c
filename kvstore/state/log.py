"""The SSD log as the node's state sees it: which record lies where. Pure.

Segments are files of equal size, written front to back and given back as a whole. A record is a
header and one page; ``docs/internals/ssd-format.md`` describes its bytes.
"""

from typing import Final, NamedTuple

BLOCK_BYTES: Final = 4096
"""Headers, payloads and footers begin and end at multiples of this."""
HEADER_BYTES: Final = BLOCK_BYTES
FOOTER_TABLE_BYTES: Final = 16 * BLOCK_BYTES
"""Room in a footer for the (space, shard) pairs that the segment's records belong to."""
FOOTER_ENTRY_BYTES: Final = 128
SEGMENT_PAIRS_MAX: Final = 64


class Place(NamedTuple):
    """Where a record begins.

    Attributes:
        segment: number of its segment; never used twice.
        offset: bytes from the segment's start, a multiple of :data:`BLOCK_BYTES`.
    """

    segment: int
    offset: int


def record_bytes(page_bytes: int) -> int:
    """Bytes of the record of a page."""
    return HEADER_BYTES + -(-page_bytes // BLOCK_BYTES) * BLOCK_BYTES


def footer_bytes(records: int) -> int:
    """Most bytes that the footer of a segment of so many records takes."""
    entries = -(-records * FOOTER_ENTRY_BYTES // BLOCK_BYTES) * BLOCK_BYTES
    return FOOTER_TABLE_BYTES + entries + BLOCK_BYTES


class SegmentLog:
    """Stub."""

    def __init__(self, directory_capacities, segment_bytes):
        self.segment_bytes = segment_bytes
        self.free = sum(c // segment_bytes for c in directory_capacities)
        self.segment = 0
        self.offset = segment_bytes
        self.reclaiming = False

    def place(self, node, shard, *, carried=False):
        size = record_bytes(node.space.shards[shard].page_bytes)
        if self.offset + size > self.segment_bytes:
            if not self.free:
                return None
            self.free -= 1
            self.segment += 1
            self.offset = 0
        place = Place(self.segment, self.offset)
        self.offset += size
        return place

    def adopt(self, number, size_bytes, end, records, sealed):
        self.free -= 1

    def adopt_page(self, node, shard): ...

    @property
    def next_segment(self):
        return self.segment + 1

    @next_segment.setter
    def next_segment(self, value):
        self.segment = value - 1

    def remove(self, node, shard): ...
    def abandon(self, place, size): ...
    def wrote(self, node, shard): ...
    def pin_segment(self, segment): ...
    def unpin_segment(self, segment): ...
