"""What each side remembers of one room. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.messages import LandingPlace
from kvstore.handoff.places import AUX_PLANE, Coverage, PushRange
from kvstore.handoff.states import HandoffProgress, State


class SentPart(NamedTuple):
    """KV of some layers and positions that the engine has written."""

    planes: range
    positions: range
    blocks: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]


class SendingRoom:
    """One room at prefill; only :class:`~kvstore.handoff.sending.Senders` changes it."""

    __slots__ = (
        "aux", "closed", "coverage", "doubtful", "drained", "first", "link", "opened", "parts",
        "place", "progress", "room", "said_ns", "slot", "submitted", "there", "token_count",
        "waiting",
    )  # fmt: skip

    def __init__(self, room: int, progress: HandoffProgress) -> None:
        self.room = room
        self.progress = progress
        self.link = b""  # of the decode engine that has spoken of the room
        self.opened = self.closed = self.drained = False
        self.doubtful = False  # bytes of a write may arrive that no longer runs
        self.place: LandingPlace | None = None  # where another transport may write
        self.token_count = -1
        self.coverage: Coverage | None = None
        self.parts: list[SentPart] = []  # not yet split: nothing is announced
        self.aux: bytes | None = None
        self.there: list[int] | None = None  # the other side's blocks, from position first on
        self.first = self.slot = 0
        self.submitted = self.waiting = 0  # jobs
        self.said_ns = 0


class ReceivingRoom:
    """One room at decode; only :class:`~kvstore.handoff.receiving.Receivers` changes it."""

    __slots__ = (
        "aborts", "aux_bytes", "aux_claimed", "blocks", "closed", "coverage", "drained", "first",
        "first_token", "landing", "left", "link", "next_abort_ns", "peer", "progress", "room",
        "said_ns", "slot", "token_count",
    )  # fmt: skip

    def __init__(
        self, room: int, peer: str, token_count: int, slot: int, now: HandoffProgress
    ) -> None:
        self.room = room
        self.peer = peer
        self.link = b""  # once there is one; it never changes
        self.token_count = token_count
        self.slot = slot  # of the aux data; -1 = given back
        self.progress = now
        self.first_token = self.first = 0
        self.blocks: list[int] | None = None  # from position first on; None = not announced
        self.coverage: Coverage | None = None
        self.left = 0  # planes of blocks that have not arrived
        self.aux_claimed = self.closed = self.drained = False
        self.aux_bytes = -1  # how many have arrived
        self.landing = 0  # heads whose bytes are being written
        self.said_ns = self.next_abort_ns = self.aborts = 0

    @property
    def is_holding(self) -> bool:
        """Whether bytes may arrive in the blocks that were announced."""
        return self.blocks is not None and self.progress.state != State.SUCCESS

    def claim(self, ranges: Sequence[PushRange], aux_bytes_max: int) -> bool:
        """Note that ranges arrive; False if one may not."""
        if self.coverage is None:
            return False
        aux = [place for place in ranges if place.plane == AUX_PLANE]
        if aux:
            ((_, slot, size),) = aux if len(aux) == 1 else ((0, -1, 0),)
            if slot != self.slot or not size <= aux_bytes_max or self.aux_claimed:
                return False
        if not self.coverage.claim([place for place in ranges if place.plane != AUX_PLANE]):
            return False
        self.aux_claimed = self.aux_claimed or bool(aux)
        return True

    def targets(self, ranges: Sequence[PushRange]) -> list[int]:
        """First block of each range that was claimed; the slot of the aux data."""
        assert self.blocks is not None
        return [
            place.first if place.plane == AUX_PLANE else self.blocks[place.first - self.first]
            for place in ranges
        ]
