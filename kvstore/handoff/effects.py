"""The effects of both sides' cores. Pure values."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.messages import FromDecode, FromPrefill, LandingPlace
from kvstore.handoff.places import PushRange
from kvstore.handoff.shape import LinkShare


class PushJob(NamedTuple):
    """Ranges to read from prefill's pool and send with one head.

    Attributes:
        number: number of the job, for the report of its end.
        link: the link.
        room: room of the request.
        ranges: the target ranges.
        sources: first block of each range in prefill's pool.
        blocks: all blocks that are read.
        generations: generation of each block when its KV was written; empty = the pool has none.
        share: the part of the KV that the link moves.
        rows: blocks of each range, if the share is staged.
        aux: the bytes of the aux data, if that is what is sent.
        targets: first block of each range in decode's pool; if the share is staged, how many
            announced positions are before it.
        place: where another transport may write them; None = over the link.
        after: fences of a pool on a device: the blocks are not read before the last fence.
        receiver: instance of the decode engine, which may have several links.
    """

    number: int
    link: bytes
    room: int
    ranges: list[PushRange]
    sources: list[int]
    blocks: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    share: LinkShare
    rows: list[npt.NDArray[np.int64]]
    aux: bytes = b""
    targets: Sequence[int] = ()
    place: LandingPlace | None = None
    after: tuple[Any, ...] = ()
    receiver: bytes = b""

    def joined(self, other: "PushJob") -> "PushJob":
        """This job followed by the ranges of another job of the same room."""
        assert (self.room, self.place) == (other.room, other.place)
        assert not self.aux
        assert not other.aux
        return self._replace(
            ranges=self.ranges + other.ranges,
            sources=self.sources + other.sources,
            rows=self.rows + other.rows,
            targets=[*self.targets, *other.targets],
            blocks=np.concatenate((self.blocks, other.blocks)),
            generations=np.concatenate((self.generations, other.generations)),
            after=self.after + tuple(one for one in other.after if one not in self.after),
        )


class SendTo(NamedTuple):
    """Send a message on a link."""

    link: bytes
    message: FromDecode | FromPrefill


class Submit(NamedTuple):
    """Carry a job out, and report its end; all jobs of a link in order."""

    job: PushJob


class EndLink(NamedTuple):
    """Close a link without handoffs; its end settles the blocks that are held for it."""

    link: bytes


class EndEngine(NamedTuple):
    """End decode's engine with this number: bytes that cannot be stopped may arrive through it."""

    number: int


class Landing(NamedTuple):
    """Ranges whose bytes may be written now; its end is passed to :meth:`Receivers.landed`.

    Attributes:
        link: the link.
        room: room of the request.
        ranges: the arriving ranges, in order.
        targets: first block of each range in decode's pool; for the aux data its slot.
        digests: digest of each range, 16 bytes.
        share: the part of the KV that the link moves.
        rows: blocks of each range, if the share is staged.
        staged_at: address of each range in the staging memory, if another transport has written
            them there; empty = they come over the link.
        after: fences of a pool on a device: the blocks are not written before the last fence.
    """

    link: bytes
    room: int
    ranges: list[PushRange]
    targets: list[int]
    digests: bytes
    share: LinkShare
    rows: list[npt.NDArray[np.int64]]
    staged_at: Sequence[int] = ()
    after: tuple[Any, ...] = ()

    @property
    def is_staged(self) -> bool:
        """Whether the bytes must be scattered."""
        return bool(self.rows)


Effect = SendTo | Submit | EndLink | EndEngine
