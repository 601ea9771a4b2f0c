"""Operations on many entries, and repetitions among them. Pure."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.index.layout import HOLDER_BITS_MAX, Flags, Numbers, Words

_SCRATCH_BITS: Final = 17
_SCRATCH_FACTOR: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_SCRATCH_SHIFT: Final = np.uint64(64 - _SCRATCH_BITS)
_TAG_BITS: Final = np.uint64(40)


class Operations(NamedTuple):
    """Entries to store or remove, in order.

    Attributes:
        segments: segment of each chain.
        tags: tag of each chain.
        bits: bit of each holder.
        stored: whether it is stored or removed.
    """

    segments: Numbers
    tags: Words
    bits: Numbers
    stored: Flags

    def only(self, which: Flags | Numbers) -> "Operations":
        """Some of them."""
        return Operations(
            self.segments[which], self.tags[which], self.bits[which], self.stored[which]
        )

    def keys(self) -> Words:
        """A key for the chain of each."""
        return (self.segments.view(np.uint64) << _TAG_BITS) | self.tags

    def in_rounds(self, keys: Words) -> tuple["Operations", list[Numbers]]:
        """Keep the last operation of each (chain, holder); name each chain once in a round.

        Returns:
            The operations that are left, and the numbers of those in each round.
        """
        chains = np.unique(keys, return_inverse=True)[1]
        pairs = chains * HOLDER_BITS_MAX + self.bits
        last = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
        kept = np.sort(last)
        chains = chains[kept]
        order = np.argsort(chains, kind="stable")
        starts = np.flatnonzero(np.diff(chains[order], prepend=-1))
        lengths = np.diff(starts, append=len(order))
        turns = np.empty(len(order), dtype=np.int64)
        turns[order] = np.arange(len(order)) - np.repeat(starts, lengths)
        by_turn = np.argsort(turns, kind="stable")
        rounds = np.split(by_turn, np.cumsum(np.bincount(turns))[:-1])
        return self.only(kept), rounds


def first_ranks(keys: Words) -> Numbers:
    """For each key, how many other ones occur before its first occurrence."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    ranks = np.empty(len(first), dtype=np.int64)
    ranks[np.argsort(first)] = np.arange(len(first))
    result: Numbers = ranks[which]
    return result


class Repetitions:
    """Detects repeated keys, without sorting them."""

    def __init__(self) -> None:
        self._scratch: npt.NDArray[np.int32] = np.zeros(1 << _SCRATCH_BITS, dtype=np.int32)

    def found(self, keys: Words) -> bool:
        """Whether any key occurs twice."""
        places = (keys * _SCRATCH_FACTOR) >> _SCRATCH_SHIFT
        left = np.arange(len(keys), dtype=np.int32)
        while len(left):
            at = places[left].view(np.int64)
            self._scratch[at] = left
            winners = self._scratch[at]
            lost = winners != left
            left, winners = left[lost], winners[lost]
            if (keys[left] == keys[winners]).any():
                return True
        return False
