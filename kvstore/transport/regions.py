"""Pieces of memory, each known under two addresses."""

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]


class Regions:
    """Pieces of memory that are mapped here, with their addresses elsewhere."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self._elsewhere: dict[int, int] = {}
        self._starts = np.empty(0, dtype=np.uint64)

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def total_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self._lengths.values())

    def overlaps(self, start: int, length: int) -> bool:
        """Whether a piece shares bytes with this one."""
        return any(start < at + size and at < start + length for at, size in self._lengths.items())

    def add(self, start: int, length: int, elsewhere: int) -> None:
        """Add a piece that starts at one address here, and at another one elsewhere."""
        assert length > 0
        assert not self.overlaps(start, length)
        self._lengths[start], self._elsewhere[start] = length, elsewhere
        self._starts = np.array(sorted(self._lengths), dtype=np.uint64)

    def remove(self, start: int) -> bool:
        """Forget the piece that starts here; returns whether there was one."""
        if self._lengths.pop(start, None) is None:
            return False
        del self._elsewhere[start]
        self._starts = np.array(sorted(self._lengths), dtype=np.uint64)
        return True

    def elsewhere(self, addresses: Addresses, length: int) -> Addresses | None:
        """The other addresses of memory.

        Args:
            addresses: its addresses here, shape (n,).
            length: bytes at each address.

        Returns:
            The other addresses, shape (n,); None if not all of it lies in pieces.
        """
        if not len(self._starts) or not len(addresses):
            return None
        at = np.searchsorted(self._starts, addresses, side="right")
        if not at.all():
            return None
        starts = self._starts[at - 1]
        found, which = np.unique(starts, return_inverse=True)
        lengths = np.array([self._lengths[int(one)] for one in found], dtype=np.uint64)[which]
        offsets = addresses - starts
        if length > int(lengths.min()) or (offsets > lengths - np.uint64(length)).any():
            return None
        moved = np.array([self._elsewhere[int(one)] for one in found], dtype=np.uint64)[which]
        return moved + offsets
