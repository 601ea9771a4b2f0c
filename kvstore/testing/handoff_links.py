"""The links of simulated handoffs, each between two ranks, and what must hold on them."""

from typing import TYPE_CHECKING

from kvstore.handoff.peers import PeerRank

if TYPE_CHECKING:
    from kvstore.testing.handoff_engines import DecodeRank, PrefillRank


class HandoffLink:
    """One link: two processes, and what is under way between them."""

    def __init__(
        self, number: bytes, prefill: "PrefillRank", decode: "DecodeRank", links: "HandoffLinks"
    ) -> None:
        self.number = number
        self.prefill = prefill
        self.decode = decode
        self.links = links
        self.open_at_prefill = self.open_at_decode = True
        self.heard_ns = [decode.time.now_ns] * 2  # by prefill, by decode
        self.ping_ns = [0, 0]  # when each of them sends the next ping
        self.landing = 0
        self.jobs: set[int] = set()  # that prefill was not told the end of
        self.coming: dict[int, int] = {}  # those whose bytes may still come to decode → room

    def check_held(self, number: int, room: int) -> None:
        """Assert that decode keeps the blocks to which the bytes of a job may come."""
        if self.open_at_decode and not self.decode.dead:
            held = self.decode.receivers.holds_blocks(room)
            assert held, f"job {number} of room {room} is under way, its blocks were given away"

    def check_end(self) -> None:
        """Assert that decode, which closes it for blocks in LIMBO, loses no other handoff."""
        rooms = self.decode.living(self.links.peer)
        assert not rooms, f"rooms {rooms} live on a link that is closed for others"


class HandoffLinks:
    """The links of a rank of decode to an instance of prefill: they live and die together."""

    def __init__(self, decode: "DecodeRank", peer: str) -> None:
        self.decode = decode
        self.peer = peer
        self.made: list[tuple[PeerRank, HandoffLink]] = []
        self.is_up = self.is_closed = False
