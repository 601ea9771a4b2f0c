"""What each side remembers of one room. Pure."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.handoff.places import Coverage
from kvstore.handoff.states import HandoffProgress


class SentPart(NamedTuple):
    """KV of some layers and positions that the engine has written."""

    planes: range
    positions: range
    blocks: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]


class SendingRoom:
    """One room at prefill; only :class:`~kvstore.handoff.sending.Senders` changes it."""

    __slots__ = (
        "aux", "closed", "coverage", "drained", "first", "link", "opened", "parts", "progress",
        "room", "said_ns", "slot", "submitted", "there", "token_count", "waiting",
    )  # fmt: skip

    def __init__(self, room: int, progress: HandoffProgress) -> None:
        self.room = room
        self.progress = progress
        self.link = b""  # of the decode engine that has spoken of the room
        self.opened = self.closed = self.drained = False
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
