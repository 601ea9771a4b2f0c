"""The pages of one job that are being read from a peer. Pure."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from kvstore.protocol.page import PrefixKey
from kvstore.state.remote.located import STRETCH_KEYS, LocatedChain
from kvstore.state.table.residents import Residents
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

    def checks(
        self, by_key: Mapping[tuple[int, int], Mapping[PrefixKey, "Arrival"]], residents: Residents
    ) -> Generator[None, None, int]:
        """Assert, a stretch at a time, that the keys of pages in memory lead to their job.

        Args:
            by_key: (number of a space, shard) → key → the job that brings the page.
            residents: the pages in memory.

        Returns:
            The number of keys that lead to this job.
        """
        put, found = self.pages, 0
        assert put.lost == self.lost
        assert not (self.lost and self.waiters)
        assert list(self.process.puts) == [self.put]
        for first in range(0, len(put.keys), STRETCH_KEYS):
            known, part = (
                by_key.get((put.space.number, put.shard), {}),
                slice(first, first + STRETCH_KEYS),
            )
            for key, slot in zip(put.keys[part], put.slots[part], strict=True):
                leads = known.get(key) is self
                assert leads or residents.owner(slot) is None
                assert not (leads and self.lost)
                found += leads
            yield
        return found
