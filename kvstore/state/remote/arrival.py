"""The pages of one job that are being read from a peer. Pure."""

from dataclasses import dataclass, field

from kvstore.state.remote.located import LocatedChain
from kvstore.state.tree.sessions import Fetch, Process, Put


@dataclass(slots=True, eq=False)
class Arrival:
    """Pages of one job.

    Attributes:
        job: its number; a new one once the rest is requested from another peer.
        put: number of the put, the only one of ``process``.
        chain: the chain of its pages.
        at: index in the chain of the first page.
        waiters: the fetches that wait for the end of the job.
        copies: the peer itself requested the pages, not an engine.
        lost: nothing waits for it any more, and its slots are in LIMBO until it has settled.
    """

    job: int
    put: int
    process: Process
    peer: str
    chain: LocatedChain
    shard: int
    at: int
    deadline_ns: int
    waiters: list[Fetch] = field(default_factory=list)
    copies: bool = False
    lost: bool = False

    @property
    def pages(self) -> Put:
        """The pages that have not arrived yet."""
        return self.process.puts[self.put]
