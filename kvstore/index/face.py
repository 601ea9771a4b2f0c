"""What nodes and the Conductor see of an index, wherever it runs. Pure."""

from typing import Protocol

from kvstore.index.control import Expect, FollowedWorker, IndexReport, Source
from kvstore.index.table import IndexReader


class PrefixIndex(Protocol):
    """An index: in a process of its own, or in this one.

    Attributes:
        restarts: how often its process was started again.
    """

    restarts: int

    @property
    def report(self) -> IndexReport:
        """Its state; from a process of its own, up to a second old."""
        ...

    def table(self) -> IndexReader | None:
        """The table to read now; None while nothing is known."""
        ...

    def worker(self, name: str) -> FollowedWorker | None:
        """The state of one worker; None if it is not followed."""
        ...

    def follow(self, source: Source) -> None:
        """Follow a source, in place of what was followed for its worker."""
        ...

    def unfollow(self, worker: str) -> None:
        """Forget a worker, whether it was followed or only expected to have pages."""
        ...

    def expect(self, expected: Expect) -> None:
        """A worker will probably have some pages."""
        ...

    async def run(self) -> None:
        """Follow until cancelled."""
        ...
