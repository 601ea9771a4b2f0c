"""The effects of both sides' cores: what they want done. Pure values."""

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
        number: of the job; its end is told with it.
        link: where to.
        room: of the request.
        ranges: where they belong.
        sources: first block of each in prefill's pool.
        blocks: all blocks that are read.
        generations: of these blocks when their KV was written; empty = the pool has none.
        share: what the link moves.
        rows: blocks of each range, if the share is staged.
        aux: the bytes of the aux data, if that is what is sent.
        targets: first block of each range in decode's pool; if the share is staged, how many
            announced positions are before it.
        place: where another transport may write them; None = over the link.
        after: fences of a pool on a device: the blocks are not read before all of them.
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
        """This job with the ranges of another of the same room behind its own."""
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
        link: where from.
        room: of the request.
        ranges: what arrives, in order.
        targets: first block of each in decode's pool; for the aux data its slot.
        digests: 16 bytes of each.
        share: what the link moves.
        rows: blocks of each range, if the share is staged.
        staged_at: where the bytes of each range are in the memory for what is staged, if another
            transport has written them there; empty = they come over the link.
        after: fences of a pool on a device: the blocks are not written before all of them.
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
