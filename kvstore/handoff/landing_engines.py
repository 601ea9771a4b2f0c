"""Which transfer engine owns decode's memory when writes are one-sided, and when to shut it down.

Over such a transport (Mooncake, RDMA) bytes of a failed write may arrive at any time: nothing that
prefill does prevents that. Only the end of decode's own engine does. It aborts all other writes, so
the engine is ended once for all blocks in doubt, when nothing else is written to it, or when they
have waited too long or are too many. From the first doubt on, new handoffs are announced without
the engine, so that the wait ends; their KV is sent over TCP. Pure.
"""

from typing import Final

import numpy as np

from kvstore.handoff.messages import LandingPlace
from kvstore.handoff.tables import ReceivingRoom

DOUBT_SHARE: Final = 10
"""The engine is ended when more than this part (1/10) of the blocks is in doubt,"""
DOUBT_S_MAX: Final = 15
"""or when a block has been in doubt for this many seconds."""


class LandingEngines:
    """The engines of one rank of decode, one after another.

    Args:
        block_count: blocks of the pool.
    """

    def __init__(self, block_count: int) -> None:
        self._block_count = block_count
        self._number = 0  # of the engine that is up; 0 = none
        self._place: LandingPlace | None = None
        self._rooms: dict[int, int] = {}  # room → blocks that may be written to
        self._staged = range(0)
        self._extents: dict[int, list[range]] = {}  # room → its parts of that memory
        self._doubtful: set[int] = set()
        self._since_ns: int | None = None  # there is a doubt
        self._ending = False

    def up(self, number: int, place: LandingPlace, staged: range = range(0)) -> None:
        """An engine is up; the one before it has ended.

        Args:
            number: of the engine, starting with 1.
            place: its place for prefill, with all planes of the pool.
            staged: addresses, in the engine's process, of memory for heads that are scattered into
                the pool after they have arrived.
        """
        assert number > self._number
        assert not self._rooms
        self._number, self._place, self._ending = number, place, False
        self._staged = staged

    def enter(self, room: int, blocks: int) -> LandingPlace | None:
        """A handoff is announced; returns where it may be written, None = only over TCP."""
        assert room not in self._rooms
        if self._place is None or self._doubtful or not blocks:
            return None
        self._rooms[room] = blocks
        return self._place

    def announce(self, one: ReceivingRoom, first_plane: int) -> dict[bytes, LandingPlace]:
        """Where prefill ranks may write their parts of a room, by link; other parts use the link.

        Args:
            one: its blocks and links are known.
            first_plane: of our pool, among the planes of all ranks.
        """
        places: dict[bytes, LandingPlace] = {}
        legs = {link: leg for link, leg in one.legs.items() if leg.source.writes}
        count = len(one.blocks or ())
        whole = self.enter(one.room, count) if legs else None
        if whole is None:
            return places
        for link, leg in legs.items():
            share = leg.source.share
            at = 8 * (share.planes.start - first_plane)
            planes = whole.planes[at : at + 8 * len(share.planes)]
            if share.is_staged:
                each = count * share.block_bytes
                extent = self.stage(one.room, len(share.planes) * each)
                if extent is None:
                    one.is_unstaged = True
                    continue
                leg.staged = extent
                addresses = self._staged[extent.start : extent.stop : each]
                planes = np.array(addresses, dtype="<u8").tobytes()
            leg.written = True
            places[link] = LandingPlace(whole.transport, whole.endpoint, planes)
        if not places:
            self.leave(one.room)
        return places

    def stage(self, room: int, size: int) -> range | None:
        """Memory for heads of an entered handoff, for as long as it is held.

        Args:
            room: of the handoff.
            size: bytes, at least 1.

        Returns:
            Its offsets in the staging memory; None = there is not enough now.
        """
        assert room in self._rooms
        assert size > 0
        at = 0
        for one in sorted((one for all_ in self._extents.values() for one in all_),
                          key=lambda one: one.start):  # fmt: skip
            if one.start - at >= size:
                break
            at = one.stop
        if len(self._staged) - at < size:
            return None
        found = range(at, at + size)
        self._extents.setdefault(room, []).append(found)
        return found

    def holds(self, room: int) -> bool:
        """Whether writes may arrive in the blocks of a handoff."""
        return room in self._rooms

    def leave(self, room: int) -> None:
        """All writes of a handoff succeeded, or none was started; a doubt stays."""
        if room not in self._doubtful:
            self._rooms.pop(room, None)
            self._extents.pop(room, None)

    def doubt(self, room: int) -> None:
        """It is unknown whether all writes of an ended handoff have ended."""
        if room in self._rooms:
            self._doubtful.add(room)

    def due(self, now_ns: int) -> int:
        """The engine to end now, returned once; 0 = none."""
        if not self._doubtful or self._ending:
            return 0
        if self._since_ns is None:
            self._since_ns = now_ns
        blocks = sum(self._rooms[room] for room in self._doubtful)
        alone = len(self._doubtful) == len(self._rooms)
        late = now_ns - self._since_ns >= DOUBT_S_MAX * 1_000_000_000
        if not alone and not late and blocks * DOUBT_SHARE <= self._block_count:
            return 0
        self._ending = True
        return self._number

    def ended(self, number: int) -> list[int]:
        """An engine has certainly ended, requested or not; returns the handoffs it held."""
        if number != self._number:
            return []
        rooms = list(self._rooms)
        self._place = self._since_ns = None
        self._rooms.clear()
        self._extents.clear()
        self._doubtful.clear()
        return rooms
