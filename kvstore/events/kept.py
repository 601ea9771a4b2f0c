"""The last batches of a publisher, kept for replays. Pure."""

from bisect import bisect_left
from collections import deque
from typing import NamedTuple


class Kept(NamedTuple):
    """One batch kept for replay."""

    sequence: int
    payload: bytes


class Bounds(NamedTuple):
    """Limits of the kept batches.

    Attributes:
        batches: maximum number; the oldest are removed first.
        payload_bytes: maximum bytes of all kept payloads together.
    """

    batches: int
    payload_bytes: int


class KeptBatches:
    """The last batches, by position: the number of batches that were kept before.

    Args:
        bounds: how many are kept.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._batches: deque[Kept] = deque()
        self._bytes = 0
        self._dropped = 0

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a batch; its sequence number is larger than those before."""
        self._batches.append(Kept(sequence, payload))
        self._bytes += len(payload)
        while len(self._batches) > self._bounds.batches or self._bytes > self._bounds.payload_bytes:
            self._bytes -= len(self._batches.popleft().payload)
            self._dropped += 1

    def position(self, sequence: int) -> int:
        """Position of the first batch with this sequence number or a larger one."""
        at = bisect_left(self._batches, sequence, key=lambda kept: kept.sequence)
        return self._dropped + at

    def next(self, position: int) -> tuple[int, Kept] | None:
        """The batch at a position, or the first one after it that is left; None at the end."""
        at = max(position, self._dropped) - self._dropped
        if at >= len(self._batches):
            return None
        return self._dropped + at, self._batches[at]
