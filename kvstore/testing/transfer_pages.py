"""Pages in memory that the checks of transports move."""

from collections.abc import Callable

import numpy as np

from kvstore import mover
from kvstore.protocol.page import DIGEST_BYTES
from kvstore.transport.base import PageTransfer, Range

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Rows = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


def any_memory(size: int) -> Bytes:
    """Zeroed memory, shape (size,)."""
    return np.zeros(size, dtype=np.uint8)


def rows(pages: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> mover.Addresses:
    """Address of each row."""
    start, step = pages.ctypes.data, pages.strides[0]
    return np.arange(len(pages), dtype=np.uint64) * np.uint64(step) + np.uint64(start)


class TransferPages:
    """Pages of one size in memory, at their owner and at their reader.

    Args:
        page_bytes: size of each.
        count: number of pages.
        gap: pages of the reader do not touch, so many bytes are between them.
        memory: makes zeroed memory, shape (n,); None = any will do.

    Attributes:
        addresses: of the owner's pages, as its transport tells peers.
        owned: what the owner has, shape (count, page_bytes).
        ranges: where each page is in the owner's memory.
        seeds: seed of each digest.
        digests: of the pages that the owner has.
    """

    def __init__(
        self, page_bytes: int, count: int, *, gap: int = 0,
        memory: Callable[[int], Bytes] | None = None,
    ) -> None:  # fmt: skip
        random = np.random.default_rng(page_bytes + count)
        made = memory or any_memory
        self.addresses = b""
        self.owned: Rows = made(count * page_bytes).reshape(count, page_bytes)
        self.owned[:] = random.integers(0, 256, (count, page_bytes), dtype=np.uint8)
        self._room: Rows = made(count * (page_bytes + gap)).reshape(count, page_bytes + gap)
        self.ranges = [Range(1, 2, at * page_bytes, page_bytes) for at in range(count)]
        self.seeds = np.arange(count, dtype=np.uint64)
        self.digests = mover.digest(rows(self.owned), page_bytes, self.seeds).tobytes()

    @property
    def arrived(self) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """The reader's pages."""
        return self._room[:, : self.owned.shape[1]]

    @property
    def untouched(self) -> bool:
        """Whether nothing was written at the reader."""
        return not self._room.any()

    def granted(self) -> list[tuple[Range, int]]:
        """The ranges with their addresses."""
        return list(zip(self.ranges, rows(self.owned).tolist(), strict=True))

    def transfer(
        self,
        number: int,
        endpoint: str,
        ticket: bytes,
        deadline_ns: int,
        pages: slice = slice(None),
    ) -> PageTransfer:
        """A transfer of these pages, or some of them, into the reader's memory."""
        digests = np.frombuffer(self.digests, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        return PageTransfer(
            number, endpoint, ticket, self.ranges[pages], rows(self._room)[pages],
            self.seeds[pages], digests[pages].tobytes(), deadline_ns, self._addresses_of(pages),
        )  # fmt: skip

    def _addresses_of(self, pages: slice) -> bytes:
        return np.frombuffer(self.addresses, dtype=np.uint64)[pages].tobytes()
