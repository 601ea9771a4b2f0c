"""What the cores of both sides want done. Pure values."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.messages import RANGES_MAX, FromDecode, FromPrefill, LandingPlace
from kvstore.handoff.places import PushRange
from kvstore.handoff.shape import PoolShape

JOINED_BYTES_MAX: Final = 256 * 1024
"""Layers and chunks that wait for the link are joined to jobs of so many bytes."""


class PushJob(NamedTuple):
    """Ranges to read from prefill's pool and send with one head.

    Attributes:
        number: of the job; its end is told with it.
        link: where to.
        room: of the request.
        ranges: where they belong.
        sources: first block of each in prefill's pool.
        blocks: all blocks that are read.
        generations: of these blocks when their KV was written; empty = the pool has none.
        aux: the bytes of the aux data, if that is what is sent.
        targets: first block of each range in decode's pool.
        place: where another transport may write them; None = over the link.
    """

    number: int
    link: bytes
    room: int
    ranges: list[PushRange]
    sources: list[int]
    blocks: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    aux: bytes = b""
    targets: Sequence[int] = ()
    place: LandingPlace | None = None

    def takes(self, other: "PushJob", shape: PoolShape) -> bool:
        """Whether another job may be joined to this one: both are small, of one room, no aux."""
        if self.room != other.room or self.aux or other.aux:
            return False
        ranges = self.ranges + other.ranges
        size = sum(map(shape.range_bytes, ranges))
        return size <= JOINED_BYTES_MAX and len(ranges) <= RANGES_MAX

    def joined(self, other: "PushJob") -> "PushJob":
        """This job with the ranges of another that it takes behind its own."""
        assert self.place == other.place
        return self._replace(
            ranges=self.ranges + other.ranges,
            sources=self.sources + other.sources,
            targets=[*self.targets, *other.targets],
            blocks=np.concatenate((self.blocks, other.blocks)),
            generations=np.concatenate((self.generations, other.generations)),
        )


class SendTo(NamedTuple):
    """Send a message on a link."""

    link: bytes
    message: FromDecode | FromPrefill


class Submit(NamedTuple):
    """Carry a job out, and tell its end; all jobs of a link in order."""

    job: PushJob


class EndLink(NamedTuple):
    """Close a link: nothing lives on it, and its end settles what is held for it."""

    link: bytes


class EndEngine(NamedTuple):
    """End decode's engine with this number: bytes that nobody can stop may arrive through it."""

    number: int


class Landing(NamedTuple):
    """Ranges whose bytes may be written now; its end is told to :meth:`Receivers.landed`.

    Attributes:
        room: of the request.
        ranges: what arrives, in order.
        targets: first block of each in decode's pool; for the aux data its slot.
        digests: 16 bytes of each.
    """

    room: int
    ranges: list[PushRange]
    targets: list[int]
    digests: bytes


Effect = SendTo | Submit | EndLink | EndEngine
