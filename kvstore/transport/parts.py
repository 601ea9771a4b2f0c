"""A transfer in progress: its parts, and the pages that have arrived. Changed under one lock.

A transfer is split so that several connections carry it: while the bytes of one part are digested,
those of another arrive.
"""

from collections.abc import Iterator
from typing import Final

from kvstore.protocol.errors import KVStoreError
from kvstore.transport.base import PageArrival, PageTransfer, TransferEnd
from kvstore.transport.frames import RANGES_MAX, DataKind, pack_ranges
from kvstore.transport.streams import DataStream

PART_BYTES_MIN: Final = 1 << 20
"""Smaller parts cost more in round trips than a second connection brings."""
PART_BYTES_MAX: Final = 16 << 20
_PARTS_PER_CONNECTION: Final = 2
"""More than one, so that a slow connection does less; each part costs a round trip."""


class TransferPart:
    """Consecutive pages of a transfer that one connection carries.

    Attributes:
        of: the transfer.
        first: index of its first page.
        stop: index of the page after its last.
        stream: the connection that is carrying it; None = no bytes can arrive.
        ended: it must not be started any more.
    """

    __slots__ = ("ended", "first", "of", "stop", "stream")

    def __init__(self, of: "UnderWay", first: int, stop: int) -> None:
        self.of = of
        self.first = first
        self.stop = stop
        self.stream: DataStream | None = None
        self.ended = False


class UnderWay:
    """One transfer and its parts.

    Attributes:
        transfer: what to move.
        kind: whether it reads or writes.
        parts: all parts of the transfer.
        good: one :class:`PageArrival` a page, so far.
        packed: its ranges as in a request.
        error: the first failure of a part.
        cancelled: it is to end soon.
    """

    __slots__ = ("_left", "cancelled", "error", "good", "kind", "packed", "parts", "transfer")

    def __init__(self, transfer: PageTransfer, kind: DataKind, connections: int) -> None:
        self.transfer = transfer
        self.kind = kind
        self.packed = pack_ranges(list(transfer.remote))
        self.cancelled = False
        self.good = bytearray(len(transfer.remote))
        self.error: KVStoreError | None = None
        self.parts = [TransferPart(self, *bounds) for bounds in _split(transfer, connections)]
        self._left = len(self.parts)

    def end_part(self, part: TransferPart, error: KVStoreError | None) -> bool:
        """Note that a part has ended; returns whether the whole transfer has."""
        assert part.of is self
        assert not part.ended, "a part ends once"
        part.ended, part.stream = True, None
        self.error = self.error or error
        self._left -= 1
        return not self._left

    def give_up(self, error: KVStoreError) -> bool:
        """End all parts that no connection carries; returns whether the transfer has ended now."""
        ended = False
        for part in self.parts:
            if not part.ended and part.stream is None:
                ended = self.end_part(part, error)
        return ended

    def end(self) -> TransferEnd:
        """The end of the transfer, when all parts have ended."""
        assert not self._left
        missing = PageArrival.MISSING in self.good
        return TransferEnd(
            self.transfer.number, bytes(self.good), self.error if missing else None, settled=True
        )


def _split(transfer: PageTransfer, connections: int) -> Iterator[tuple[int, int]]:
    """First page of each part, and the page after its last."""
    count, size = len(transfer.remote), transfer.page_bytes
    pages = -(-count // (connections * _PARTS_PER_CONNECTION))
    pages = min(max(pages, PART_BYTES_MIN // size), PART_BYTES_MAX // size, RANGES_MAX)
    pages = max(pages, 1)
    for first in range(0, count, pages):
        yield first, min(first + pages, count)
