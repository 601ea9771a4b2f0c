"""The pages of one job on their way from a peer. Pure."""

from dataclasses import dataclass, field

from kvstore.state.remote.located import LocatedChain
from kvstore.state.tree.sessions import Fetch, Process, Put


@dataclass(slots=True, eq=False)
class Arrival:
    """Pages of one job.

    Attributes:
        job: its number; another one once the rest is asked of another peer.
        put: number of the put, the only one of ``process``.
        chain: where its pages are.
        at: which page of the chain is the first one.
        waiters: who waits for the end of the job.
        copies: no engine has asked for them, but the peer itself.
        lost: nobody waits any more, and its slots are in LIMBO until it has settled.
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
        """The pages that have not come yet."""
        return self.process.puts[self.put]
