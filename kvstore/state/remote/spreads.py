"""Requests for copies on further nodes, until the peer side reports how many have them. Pure."""

from dataclasses import dataclass
from itertools import count

from kvstore.protocol.errors import CapacityError
from kvstore.protocol.page import ShardSpec, SpaceIdentity
from kvstore.state.remote.jobs import PeerJob, Spread, SpreadEnd

SPREADS_MAX = 256
"""Maximum unfinished requests of all sessions."""


@dataclass(slots=True, eq=False)
class Spreading:
    """One request; its client waits for it.

    Attributes:
        peers: how many other nodes have all of its pages, as far as is known.
        draining: how many were not asked because they are draining.
    """

    peers: int = 0
    draining: int = 0


class Spreads:
    """All such requests of one node.

    Args:
        jobs: for the peer side, in order.
        counts: of the node.

    Attributes:
        ended: requests that have ended, to be answered.
    """

    def __init__(self, jobs: list[PeerJob], counts: dict[str, int]) -> None:
        self.ended: list[Spreading] = []
        self._jobs = jobs
        self._counts = counts
        self._number = count(1)
        self._running: dict[int, Spreading] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(
        self, identity: SpaceIdentity, shard: ShardSpec, keys: bytes, first: int, peers: int,
        deadline_ns: int,
    ) -> Spreading:  # fmt: skip
        """Ask the peer side for copies at ``peers`` peers; see :class:`Spread`.

        Raises:
            CapacityError: too many requests have not ended.
        """
        if len(self._running) >= SPREADS_MAX:
            raise CapacityError(f"{SPREADS_MAX} requests to copy pages to other nodes run already")
        number = next(self._number)
        made = self._running[number] = Spreading()
        self._counts["spreads"] += 1
        self._jobs.append(Spread(number, identity, shard, keys, first, peers, deadline_ns))
        return made

    def finish(self, end: SpreadEnd) -> None:
        """The peer side has ended a request."""
        spreading = self._running.pop(end.number)
        spreading.peers, spreading.draining = end.peers, end.draining
        self._counts["spread_copies"] += end.peers
        self.ended.append(spreading)
