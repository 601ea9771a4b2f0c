"""Changes of the index, gathered from the messages of many workers. Pure."""

from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.scope import ChainValues
from kvstore.mover.chains import WordBuffer

HASHES_MAX: Final = 65_536
"""Maximum block hashes in one event."""


class Changes(NamedTuple):
    """Changes to apply, in order. For a chain value and a holder, the last change counts.

    Attributes:
        chains: shape (n,), uint64.
        holders: number of each holder, shape (n,), int32.
        stored: True = the holder has it now, False = no longer; shape (n,), bool.
    """

    chains: ChainValues
    holders: npt.NDArray[np.int32]
    stored: npt.NDArray[np.bool_]


class ChangeBatch:
    """Gathers runs of changes; a run has one holder, and stores or removes.

    Attributes:
        chains: the chain values; a run is written behind the ``used`` first.
        used: number of changes.
    """

    __slots__ = ("_ends", "_holders", "_stored", "chains", "used")

    def __init__(self) -> None:
        self.chains = WordBuffer(2 * HASHES_MAX)
        self.used = 0
        self._ends: list[int] = [0]
        self._holders: list[int] = []
        self._stored: list[bool] = []

    def __len__(self) -> int:
        return self.used

    def make_room(self) -> int:
        """Make room for one more event; returns where it starts."""
        if self.chains.room - self.used < HASHES_MAX:
            larger = WordBuffer(2 * self.chains.room)
            larger.array[: self.used] = self.chains.array[: self.used]
            self.chains = larger
        return self.used

    def add(self, count: int, holder: int, *, stored: bool) -> None:
        """Add the ``count`` chain values behind the used ones as a run."""
        if count:
            self.used += count
            self._ends.append(self.used)
            self._holders.append(holder)
            self._stored.append(stored)

    def changes(self) -> Changes:
        """All changes; views that are valid until the next event."""
        lengths = [stop - start for start, stop in pairwise(self._ends)]
        return Changes(
            self.chains.array[: self.used],
            np.repeat(np.array(self._holders, np.int32), lengths),
            np.repeat(np.array(self._stored, np.bool_), lengths),
        )

    def clear(self) -> None:
        """Forget all changes; a memory that has grown is given back."""
        if self.chains.room > 2 * HASHES_MAX:
            self.chains = WordBuffer(2 * HASHES_MAX)
        self.used = 0
        self._ends, self._holders, self._stored = [0], [], []
